"""Tool calls and reasoning, parsed out of what a policy said, which may be anything."""

import json
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from text_builders import TEMPLATES, call, chat, said, user

from noria.text.tools import FORMATS, format_of, parse_message
from noria.types import Message, ToolCall

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=3), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.from_regex(r"\A[a-z_][a-z0-9_]{0,8}\Z")
ARGUMENTS = st.dictionaries(NAMES, JSON, max_size=3)
CONTENTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).map(str.strip).filter(lambda text: not re.search(r"[\[\]<>|{}]", text))


@st.composite
def calls(draw: st.DrawFn) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(draw(NAMES), draw(ARGUMENTS), f"call{i:05d}") for i in range(draw(st.integers(1, 3))))


@settings(deadline=None)
@given(st.sampled_from(sorted(FORMATS)), calls())
def test_what_a_format_writes_it_reads(name: str, some: tuple[ToolCall, ...]) -> None:
    assert parse_message(FORMATS[name].write(some), FORMATS[name]) == said("", *some)


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(["tiny", "qwen25", "qwen3", "mistral"]), calls(), CONTENTS, CONTENTS)
def test_a_rendered_message_is_parsed_to_itself(name: str, some: tuple[ToolCall, ...], content: str, reasoning: str) -> None:
    format = chat(name)
    content, reasoning = "" if name == "mistral" else content, reasoning if name == "qwen3" else ""
    message = said(content, *some, reasoning=reasoning)
    prompt = format.render([user("hi")], add_generation_prompt=True)
    text = format.render([user("hi"), message], add_generation_prompt=False)
    assert text.startswith(prompt)
    ends = {"tiny": "<|eos|>", "mistral": "</s>"}.get(name, "<|im_end|>\n")
    assert format.parse(text.removeprefix(prompt).removesuffix(ends)) == message


@settings(deadline=None, max_examples=50)
@given(ARGUMENTS, NAMES, CONTENTS)
def test_a_rendered_call_of_llama_is_parsed_to_itself(arguments: dict, name: str, content: str) -> None:
    format, message = chat("llama3"), said("", ToolCall(name, arguments, "call00000"))
    prompt = format.render([user("hi")], add_generation_prompt=True)
    text = format.render([user("hi"), message], add_generation_prompt=False).removeprefix(prompt).removesuffix("<|eot_id|>")
    assert format.parse(text) == message
    assert format.parse(f"{content}<|python_tag|>{text}") == said(content, *message.tool_calls)


MARKS = ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "<think>", "</think>", "<|tool_call_start|>", "[" * 40]
PARTS = [
    '{"name": "f"',
    ', "arguments": ',
    '{"a": 1}',
    "}",
    "[",
    "]",
    "f(",
    "x=",
    "'",
    '"',
    ")",
    ",",
    "\\",
    "\n",
    " ",
    "-1e999",
    "NaN",
    "\\ud800",
    "\x00",
    "{",
    ":",
]
PIECES = st.sampled_from([*MARKS, *PARTS])


@settings(deadline=None, max_examples=400)
@given(st.sampled_from(sorted(FORMATS)), st.lists(PIECES, max_size=14).map("".join) | st.text(), st.booleans())
@example("hermes", "<tool_call>" + "[" * 100_000, False)
@example("llama", '{"name": "f", "parameters": ' + '{"a":' * 100_000, False)
@example("mistral", "[TOOL_CALLS] " + "[" * 100_000, False)
@example("pythonic", "[f(x=" + "[" * 100_000, False)
@example("hermes", '<tool_call>{"name": "f", "arguments": ' + "1" * 5000 + "}</tool_call>", False)
def test_garbage_never_raises_and_what_is_parsed_is_plain_json(name: str, text: str, is_thinking: bool) -> None:
    message = parse_message(text, FORMATS[name], is_thinking=is_thinking)
    assert message.role == "assistant"
    for found in message.tool_calls:
        json.dumps([found.name, dict(found.arguments)], allow_nan=False, ensure_ascii=False).encode()
    if not message.tool_calls and not is_thinking and "</think>" not in text:
        assert message.content == text


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}}',
        '<tool_call>{"name": "f", "arguments": {}</tool_call>',
        '{"name": "f", "arguments": {}}</tool_call>',
    ],
)
def test_a_call_that_is_none_stays_content(text: str) -> None:
    assert parse_message(text, FORMATS["hermes"]) == said(text)


def test_a_broken_call_does_not_hide_the_others() -> None:
    text = 'as <tool_call>no</tool_call> <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call> so'
    assert parse_message(text, FORMATS["hermes"]) == said("as <tool_call>no</tool_call>so", call())


def test_a_closing_mark_inside_an_argument_ends_nothing() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>"}}</tool_call>'
    assert parse_message(text, FORMATS["hermes"]).tool_calls == (call(a="</tool_call>"),)


def test_arguments_as_text_are_read_as_openai_writes_them() -> None:
    text = '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>'
    assert parse_message(text, FORMATS["hermes"]) == said("", call())


def test_calls_are_numbered_through_the_conversation() -> None:
    text = FORMATS["hermes"].write([call(), call()])
    assert [c.call_id for c in parse_message(text, FORMATS["hermes"], num_calls=7).tool_calls] == ["call00007", "call00008"]


@pytest.mark.parametrize(
    ("text", "is_thinking", "content", "reasoning"),
    [
        ("<think>\nas\n</think>\n\n4", False, "4", "as"),
        ("as\n</think>\n4", True, "4", "as"),
        ("as\n</think>\n4", False, "as\n</think>\n4", ""),
        ("<think>as", False, "<think>as", ""),
        ("as", True, "", "as"),
        ("<think></think>4", False, "4", ""),
        ("4 <think>as</think>", False, "4 ", "as"),
        ("<think>a<think>b</think>4", False, "4", "a<think>b"),
    ],
)
def test_reasoning_is_what_stands_between_the_marks(text: str, is_thinking: bool, content: str, reasoning: str) -> None:
    assert parse_message(text, FORMATS["hermes"], is_thinking=is_thinking) == said(content, reasoning=reasoning)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("[f(a=1, b='it\\'s', c=\"x\\n\")]", {"a": 1, "b": "it's", "c": "x\n"}),
        ("[f(a=[1, 2.5, None], b={'k': True})]", {"a": [1, 2.5, None], "b": {"k": True}}),
        ("[f(a=-1e3, b=null, c=false,)]", {"a": -1000.0, "b": None, "c": False}),
        ("[ f( ) ]", {}),
        ("<|tool_call_start|>[f(a=1)]<|tool_call_end|>", {"a": 1}),
    ],
)
def test_pythonic_arguments_are_literals(text: str, arguments: dict) -> None:
    assert parse_message(text, FORMATS["pythonic"]) == said("", ToolCall("f", arguments, "call00000"))


@pytest.mark.parametrize(
    "text", ["[f(1)]", "[f(a=b)]", "[f(a=1+1)]", "[f(a=g())]", "[f(a=1, a=2)]", "[1]", "[]", "f(a=1)", "[f(a=1)] so", "[f(a=1)", "[f(a='\\x41')]"]
)
def test_what_is_no_list_of_calls_with_literals_stays_content(text: str) -> None:
    assert parse_message(text, FORMATS["pythonic"]) == said(text)


def test_a_template_says_which_format_it_is() -> None:
    names = {name: format_of(template) for name, template in TEMPLATES.items()}
    assert names == dict.fromkeys(("tiny", "plain", "smollm", "qwen25", "qwen3"), "hermes") | {"llama3": "llama", "mistral": "mistral"}
    assert format_of("{{ '<|tool_call_start|>[' }}") == "pythonic"


def test_a_message_has_no_hidden_parts() -> None:
    assert parse_message("4", FORMATS["llama"]) == Message("assistant", "4")


def test_an_answer_in_json_is_no_call() -> None:
    assert parse_message('{"name": "Bob"}', FORMATS["llama"]) == said('{"name": "Bob"}')


@pytest.mark.parametrize(("depth", "is_call"), [(31, True), (40, False)])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_arguments_have_a_largest_depth(name: str, depth: int, is_call: bool) -> None:
    nested: object = 1
    for _ in range(depth - 2):
        nested = [nested]
    assert bool(parse_message(FORMATS[name].write([call(a=nested)]), FORMATS[name]).tool_calls) == is_call
