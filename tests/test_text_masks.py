"""What trains of a chat that was written down: what its assistants say and what ends their turns, by place and never by value."""

import re
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_builders import ADD, GROWING, MISTRAL, TEMPLATES, TEXTS, bpe, call, chat, result, said, trained_text, user

from noria.errors import ChatTemplateError
from noria.text.chat import ChatFormat
from noria.types import Prompt


@pytest.mark.parametrize("name", ["tiny", "smollm", "qwen25", "llama3", "mistral", "plain"])
def test_what_the_assistants_say_and_the_end_of_their_turns_train(name: str) -> None:
    text, num_ends = trained_text(chat(name), [user("hi"), said("12 hello"), user("as"), said("4")])
    assert text.replace(" ", "") == "12hello4"
    assert num_ends == (0 if name == "plain" else 2)


@pytest.mark.parametrize("name", sorted(TEMPLATES.keys() - {"plain"}))
def test_calls_train_and_results_do_not(name: str) -> None:
    text, num_ends = trained_text(chat(name), [user("hi"), said("", call()), result("987"), said("3"), user("hi"), said("4")], (ADD,))
    assert '"add"' in text
    assert '{"a": 1, "b": 2}' in text
    assert text.replace("<think>\n\n</think>\n\n", "").replace(" ", "").endswith("34")
    assert "987" not in text
    assert num_ends == 3


def test_reasoning_trains_where_the_template_shows_it() -> None:
    messages = [user("hi"), said("3", reasoning="as"), user("12"), said("4", reasoning="hello")]
    assert trained_text(chat("qwen3"), messages) == ("3<think>\nhello\n</think>\n\n4", 2)


def test_a_template_that_moves_its_tools_still_says_what_trains() -> None:
    messages = [user("hi"), said("as"), user("12"), said("", call()), result("987"), said("4")]
    text, num_ends = trained_text(chat("mistral"), messages, (ADD,))
    assert text.split() == ["as", '[{"name":', '"add",', '"arguments":', '{"a":', "1,", '"b":', "2},", '"id":', '"call00000"}]', "4"]
    assert num_ends == 3


def who_ends(user_end: str, earlier_end: str, last_end: str, *, header: str = "<|im_start|>", note: str = "") -> ChatFormat:
    """A chat template that ends the user's turns, and the assistant's before the last message and at it, each in its own way. note: before the
    user's last turn."""
    body = (
        "{% for m in messages %}{% set is_last = loop.last %}{% if m.role == 'user' and loop.index0 >= messages | length - 2 %}{{ note }}{% endif %}"
        "{{ header + m.role + '\\n' + m.content }}{% if m.role == 'user' %}{{ user_end }}"
        "{% elif is_last %}{{ last_end }}{% else %}{{ earlier_end }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ header + 'assistant\\n' }}{% endif %}"
    )
    names = {"user_end": user_end, "earlier_end": earlier_end, "last_end": last_end, "header": header, "note": note}
    settings = "".join(f"{{% set {name} = {text!r} %}}" for name, text in names.items())
    return ChatFormat(settings + body, bpe())


@pytest.mark.parametrize("last_end", ["", "<|im_end|>", "<|im_end|>\n"])
@pytest.mark.parametrize("earlier_end", ["", "\n", "<|im_end|>", "<|im_end|>\n", " <|im_end|>"])
@pytest.mark.parametrize("user_end", ["", "<|im_end|>", "\n<|im_end|>\n"])
@pytest.mark.parametrize("header", ["<|im_start|>", "\n# "])
@pytest.mark.parametrize("note", ["", "\nNote: be brief.<|im_end|>", "<|im_start|>system\nBe brief.<|im_end|>"])
def test_no_end_but_the_turns_own_trains_and_nothing_that_others_say(last_end: str, earlier_end: str, user_end: str, header: str, note: str) -> None:
    """Whichever turns a template ends: where an assistant's has no end, its last word is the last id that trains."""
    format = who_ends(user_end, earlier_end, last_end, header=header, note=note)
    for between in ("cd", "", "<|im_end|>", "as"):
        ids, is_trained = format.encode_example([user("as"), said("12"), user(between), said("hello"), user("x"), said("4")])
        end = (format.tokenizer.eos_id,)
        spans = [tuple(id_ for _, id_ in run) for trains, run in groupby(zip(is_trained, ids, strict=True), key=lambda pair: pair[0]) if trains]
        earlier = format.tokenizer.encode(earlier_end.partition("\n")[0] if "<" in earlier_end else "")
        assert spans == [
            format.tokenizer.encode("12") + earlier,
            format.tokenizer.encode("hello") + earlier,
            format.tokenizer.encode("4") + (end if last_end else ()),
        ]


def test_an_end_that_only_the_last_message_has_is_not_looked_for_in_what_follows() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}"
        "{% if loop.last %}{{ eos_token }}{% else %} {% endif %}{% endif %}{% endfor %}"
    )
    format = ChatFormat(template, bpe("</s>"), bos="<s>", eos="</s>")
    assert trained_text(format, [user("ab"), said("XY"), user("cd"), said("ZW")]) == (" XY ZW", 1)
    assert trained_text(format, [user("ab"), said("XY"), user("cd")]) == (" XY", 0)
    assert trained_text(format, [user("ab"), said("XY"), said("ZW")]) == (" XYZW", 1)


def test_white_space_before_the_end_of_a_turn_trains_with_it() -> None:
    """As in Llama 2's template."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
    )
    format = ChatFormat(template, bpe("</s>"), bos="<s>", eos="</s>")
    assert trained_text(format, [user("ab"), said("XY"), user("cd"), said("ZW")]) == (" XY  ZW ", 2)
    conversation = format.open(Prompt((user("ab"),)))
    conversation.start()
    conversation.hear(format.tokenizer.encode(" XY </s>"))
    assert conversation.reply([user("cd")]).ids == format.tokenizer.encode("<s>[INST] cd [/INST]")


@pytest.mark.parametrize("end", ["", "\n", "<|im_end|>\n"])
def test_a_call_trains_up_to_its_closing_mark_whatever_ends_its_turn(end: str) -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}" + end + "{% endfor %}"
    )
    format = ChatFormat(template, bpe())
    text, num_ends = trained_text(format, [user("hi"), said("as", call()), result("987"), said("3"), user("4"), said("", call(a="x"))], (ADD,))
    calls = ["as", '{"name": "add", "arguments": {"a": 1, "b": 2}}', "3", '{"name": "add", "arguments": {"a": "x"}}']
    words = [word for word in re.split(r"assistant\n|</?tool_call>", text) if word]
    assert words == calls
    assert text.count("</tool_call>") == 2
    assert num_ends == (3 if "<" in end else 0)


@pytest.mark.parametrize("refuses", [False, True])
def test_a_call_trains_whole_where_the_template_moves_its_tools(refuses: bool) -> None:
    """The prompt for it is rendered in another way later: tools stand before the last question. refuses: results of no call."""
    refusal = "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}{% endif %}"
    template = MISTRAL.replace("{%- for m in messages %}", "{%- for m in messages %}" + refusal * refuses)
    format = ChatFormat(template, bpe("</s>"), bos="<s>", eos="</s>")
    messages = [user("hi"), said("", call()), result("987"), said("3"), user("as"), said("4")]
    text, num_ends = trained_text(format, messages, (ADD,))
    assert text.replace(" ", "") == '[{"name":"add","arguments":{"a":1,"b":2},"id":"call00000"}]34'
    assert num_ends == 3
    ids, is_trained = format.encode_example(messages, (ADD,))
    assert is_trained[ids.index(format.tokenizer.token_id("[TOOL_CALLS]"))]


def test_the_end_of_a_turn_is_found_where_the_next_message_changes_the_ones_before() -> None:
    """Where a message of the user that looks like a result is none any more, reasoning before it goes."""
    template = TEMPLATES["qwen3"].replace("m.role == 'user' %}", "m.role == 'user' and not m.content.startswith('<') %}")
    format = ChatFormat(template, bpe())
    assert trained_text(format, [user("hi"), said("3", reasoning="as"), user("<12>"), said("4")]) == (
        "<think>\nas\n</think>\n\n3<think>\n\n</think>\n\n4",
        2,
    )


def test_a_template_that_repeats_what_an_assistant_said_is_refused() -> None:
    """Where the user's turn begins is then not told by what changes with the assistant's message."""
    quote = "{% if loop.index0 and m.role == 'user' %}re: {{ messages[loop.index0 - 1].content }}|{% endif %}"
    size = "{% if loop.index0 and m.role == 'user' %}of {{ messages[loop.index0 - 1].content | length }}|{% endif %}"
    for echo in (quote, size):
        format = ChatFormat("{% for m in messages %}{{ m.role }}: " + echo + "{{ m.content }}<|im_end|>{% endfor %}", bpe())
        with pytest.raises(ChatTemplateError, match="repeats an assistant's words"):
            format.encode_example([user("hi"), said("hello"), user("as"), said("4")])


def test_an_end_that_is_ordinary_text_is_not_looked_for_beyond_its_turn() -> None:
    """Joined with what follows it is another token."""
    format = ChatFormat("{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}as{% endif %}{% endfor %}", bpe("as"))
    messages = [user("4"), said("5"), user("sist"), said("6")]
    assert len(format.tokenizer.encode("assist")) == 1
    assert trained_text(format, messages) == ("56as", 1)


def test_an_end_token_inside_the_content_trains_and_does_not_end_it() -> None:
    """By place, never by value; padding may have the same id."""
    format = chat("smollm")
    ids, is_trained = format.encode_example([user("<|im_end|>"), said("he<|im_end|>llo")])
    chosen = [i for i, trains in zip(ids, is_trained, strict=True) if trains]
    assert chosen == [*format.tokenizer.encode("he<|im_end|>llo"), format.tokenizer.eos_id]
    assert not any(is_trained[: ids.index(chosen[0])])
    assert ids[-1] == format.tokenizer.token_id("\n")
    assert not is_trained[-1]


def test_a_token_that_straddles_the_end_of_the_header_does_not_train() -> None:
    body = "{% for m in messages %}{{ m.role + '\\n' + m.content + '<|im_end|>' }}{% endfor %}"
    format = ChatFormat(body + "{% if add_generation_prompt %}{{ 'assistant\\n' }}{% endif %}", bpe())
    ids, is_trained = format.encode_example([user("hi"), said("\n12")])
    double = format.tokenizer.encode("\n\n")
    assert len(double) == 1
    assert double[0] in ids
    assert [i for i, trains in zip(ids, is_trained, strict=True) if trains] == [*format.tokenizer.encode("12"), format.tokenizer.eos_id]


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([("tiny", "bytes"), *((name, kind) for name in GROWING[1:] for kind in ("bpe", "sentencepiece"))]),
    st.lists(TEXTS, min_size=1, max_size=4),
)
def test_an_example_trains_what_a_conversation_would_have_sampled(which: tuple[str, str], texts: list[str]) -> None:
    format = chat(*which)
    contents = [text.strip() for text in texts]
    messages = [message for text in contents for message in (user("hi"), said(text))]
    ids, is_trained = format.encode_example(messages)
    starts = [i for i in range(1, len(ids)) if is_trained[i] and not is_trained[i - 1]]
    stops = [i for i in range(1, len(ids)) if not is_trained[i] and is_trained[i - 1]] or [len(ids)]
    assert len(starts) == len(contents)
    for index, (start, content) in enumerate(zip(starts, contents, strict=True)):
        prompt = format.render(messages[: 2 * index + 1], add_generation_prompt=True)
        if which[1] != "sentencepiece" and not content.startswith("\n"):
            assert ids[:start] == format.tokenizer.encode(prompt)
        stop = stops[index] if index < len(stops) else len(ids)
        assert ids[stop - 1] == format.tokenizer.eos_id
        assert format.tokenizer.decode(ids[start:stop]).strip() == content


def test_an_end_token_in_plain_text_ends_no_turn() -> None:
    """A template without end-of-turn tokens: one that a user writes is the user's."""
    format = chat("plain")
    assert not format.ends_turns
    ids, is_trained = format.encode_example([user("hi"), said("as"), user("<|endoftext|>")])
    assert format.tokenizer.decode([i for i, trains in zip(ids, is_trained, strict=True) if trains]) == "as"
    conversation = format.open(Prompt((user("hi"),)))
    conversation.start()
    conversation.hear(format.tokenizer.encode("he<|endoftext|>llo"))
    assert conversation.reply([user("12")]).ids == format.tokenizer.encode("\nuser: 12\nAnswer: ")


def test_a_chat_that_the_assistant_begins_says_what_trains() -> None:
    for name in ("tiny", "smollm", "qwen25", "llama3"):
        text, num_ends = trained_text(chat(name), [said("hello"), user("hi"), said("as")])
        assert (text, num_ends) == ("helloas", 2)
