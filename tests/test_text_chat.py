"""Chats: ids only grow at the end, and what was sampled stays as it was."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_file import MERGES, tokens
from text_builders import ADD, GROWING, MISTRAL, QWEN25, TEMPLATES, TEXTS, bpe, call, chat, letters, result, said, trained_text, user

from noria.errors import ChatTemplateError
from noria.text.chat import ChatFormat, Conversation
from noria.text.tokenizer import FastTokenizer, SpecialTokens, byte_level_bpe
from noria.types import Ids, Message, Prompt, ToolSpec


class Path:
    """What an actor makes of a conversation: the ids of the current path, and the place and ids of all that was sampled."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.ids: Ids = conversation.start()
        self.sampled: list[tuple[int, Ids]] = []
        self.keeps: list[int | None] = []

    def say(self, ids: Ids) -> Message:
        self.sampled.append((len(self.ids), ids))
        self.ids += ids
        return self.conversation.hear(ids)

    def answer(self, *messages: Message) -> Ids:
        answer = self.conversation.reply(messages)
        self.keeps.append(answer.keep)
        self.ids = self.ids[: answer.keep] + answer.ids
        return answer.ids


def ended(format: ChatFormat, text: str) -> Ids:
    return (*format.tokenizer.encode(text), format.tokenizer.eos_id)


def rendered(format: ChatFormat, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Ids:
    return format.tokenizer.encode(format.render(messages, tools, add_generation_prompt=True))


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([("tiny", "bytes"), *((name, kind) for name in GROWING[1:] for kind in ("bpe", "sentencepiece"))]), st.lists(TEXTS, max_size=4)
)
def test_a_chat_whose_sampled_text_is_canonical_has_the_ids_of_one_full_render(which: tuple[str, str], texts: list[str]) -> None:
    format = chat(*which)
    path = Path(format.open(Prompt((user("hello"),))))
    for text in texts:
        path.say(ended(format, text.strip()))
        path.answer(user(text))
    if which[1] != "sentencepiece":  # whose sampled text, encoded alone, would begin with a space
        assert path.ids == rendered(format, path.conversation.messages)
    else:
        assert format.tokenizer.decode(path.ids).replace(" ", "") == format.tokenizer.decode(rendered(format, path.conversation.messages)).replace(
            " ", ""
        )
    assert path.keeps == [None] * len(texts)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(GROWING), st.lists(st.tuples(TEXTS, st.booleans()), min_size=1, max_size=4))
def test_what_was_sampled_stays_in_the_path_id_for_id(name: str, turns: list[tuple[str, bool]]) -> None:
    """Two-piece words, white space that the template trims, turns cut off before their end."""
    format = chat(name)
    path = Path(format.open(Prompt((user("hello"),))))
    for text, is_cut in turns:
        path.say(letters(format.tokenizer, text) + (() if is_cut else (format.tokenizer.eos_id,)))
        path.answer(user("12"))
    assert path.keeps == [None] * len(turns)
    for place, ids in path.sampled:
        assert path.ids[place : place + len(ids)] == ids
    end_ids = [i for i in path.ids if i == format.tokenizer.eos_id]
    assert len(end_ids) == sum(i == format.tokenizer.eos_id for i in rendered(format, path.conversation.messages))


def test_a_two_piece_word_is_kept_as_sampled() -> None:
    format = chat("qwen25")
    split = letters(format.tokenizer, "hello")
    assert len(split) == 5
    assert len(format.tokenizer.encode("hello")) == 1
    path = Path(format.open(Prompt((user("hi"),))))
    start = len(path.ids)
    path.say((*split, format.tokenizer.eos_id))
    path.answer(user("hello"))
    assert path.ids[start : start + 6] == (*split, format.tokenizer.eos_id)


def test_the_newline_after_the_end_of_a_turn_is_observed_and_not_sampled() -> None:
    format = chat("qwen25")
    path = Path(format.open(Prompt((user("hi"),))))
    path.say(ended(format, "hello"))
    assert path.answer(user("as")) == format.tokenizer.encode("\n<|im_start|>user\nas<|im_end|>\n<|im_start|>assistant\n")


def test_a_turn_that_was_cut_off_is_ended_by_the_observation() -> None:
    format = chat("qwen25")
    path = Path(format.open(Prompt((user("hi"),))))
    path.say(format.tokenizer.encode("hello"))
    assert path.answer(user("as")) == format.tokenizer.encode("<|im_end|>\n<|im_start|>user\nas<|im_end|>\n<|im_start|>assistant\n")


def test_two_adjacent_tool_results_are_one_render() -> None:
    format = chat("qwen25")
    path = Path(format.open(Prompt((user("hi"),), (ADD,))))
    message = path.say(
        ended(format, '<tool_call>\n{"name":"add","arguments":{"a":1}}\n</tool_call>\n<tool_call>\n{"name":"add","arguments":{}}\n</tool_call>')
    )
    assert [c.call_id for c in message.tool_calls] == ["call00000", "call00001"]
    observation = path.answer(result("3"), result("4", 1))
    assert observation == format.tokenizer.encode(
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert path.keeps == [None]


@pytest.mark.parametrize("name", ["tiny", "qwen25", "qwen3", "llama3", "mistral"])
def test_a_call_that_the_template_writes_in_another_way_is_kept_as_sampled(name: str) -> None:
    format = chat(name)
    spaced = '{ "name" : "add",  "arguments": {"b":2,"a":1} }'
    text = (
        f"[TOOL_CALLS][{spaced}]"
        if name == "mistral"
        else spaced.replace("arguments", "parameters")
        if name == "llama3"
        else f"<tool_call>{spaced}</tool_call>"
    )
    path = Path(format.open(Prompt((user("hi"),), (ADD,))))
    sampled = ended(format, text)
    message = path.say(sampled)
    assert message.tool_calls == (call(a=1, b=2),)
    assert message.content == ""
    path.answer(result("3"))
    assert path.keeps == [None]
    place, ids = path.sampled[0]
    assert path.ids[place : place + len(ids)] == sampled
    assert (
        format.tokenizer.decode(path.ids[place + len(ids) :])
        .strip()
        .startswith(("tool\n3", "user\n<tool_response>\n3", "ipython\n\n3", '{"content": "3"'))
    )


def test_a_template_that_strips_reasoning_forks_where_the_reasoning_began() -> None:
    format = chat("qwen3")
    path = Path(format.open(Prompt((user("hello"),))))
    start = len(path.ids)
    message = path.say(ended(format, "<think>\nas 12\n</think>\n\n4"))
    assert (message.reasoning, message.content) == ("as 12", "4")
    answer = path.answer(user("12?"))
    assert path.keeps == [start]
    assert answer == format.tokenizer.encode("4<|im_end|>\n<|im_start|>user\n12?<|im_end|>\n<|im_start|>assistant\n")
    assert path.ids == rendered(format, path.conversation.messages)


def test_reasoning_before_tool_results_stays_and_forks_only_at_the_next_question() -> None:
    format = chat("qwen3")
    path = Path(format.open(Prompt((user("hello"),), (ADD,))))
    start = len(path.ids)
    path.say(ended(format, '<think>\nas\n</think>\n\nas\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'))
    path.answer(result("3"))
    path.say(ended(format, "<think>\n12\n</think>\n\n3"))
    path.answer(result("so?"))
    assert path.keeps == [None, None]
    path.say(ended(format, "<think>\n12\n</think>\n\n4"))
    path.answer(user("12?"))
    assert path.keeps == [None, None, start]
    assert path.ids == rendered(format, path.conversation.messages, (ADD,))
    path.say(ended(format, "<think>\n12\n</think>\n\n4"))
    path.answer(user("12?"))
    assert path.keeps[-1] is not None
    assert path.keeps[-1] > start
    assert path.ids == rendered(format, path.conversation.messages, (ADD,))


@settings(deadline=None, max_examples=80)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["", "hello", "as 12"]), st.booleans()), min_size=1, max_size=6))
def test_whatever_forks_the_sampler_reads_what_one_full_render_says(turns: list[tuple[bool, str, bool]]) -> None:
    """Each turn: does it call a tool, its reasoning, does a tool or the user answer. All paths together hold all that was sampled."""
    format = chat("qwen3")
    path = Path(format.open(Prompt((user("hello"),), (ADD,))))
    for number, (calls_tool, reasoning, is_result) in enumerate(turns):
        text = "as 4" + ('\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>' if calls_tool else "")
        path.say(ended(format, f"<think>\n{reasoning}\n</think>\n\n{text}" if reasoning else text))
        before = path.ids
        path.answer(result("3") if is_result else user("12"))
        assert path.ids == rendered(format, path.conversation.messages, (ADD,))
        keep = path.keeps[-1]
        if keep is None:
            assert path.ids[: len(before)] == before
        else:
            assert not is_result
            assert any(reasoning for _, reasoning, _ in turns[: number + 1])
            assert keep <= path.sampled[-1][0]


def test_a_template_that_moves_its_tools_forks_at_the_latest_shared_place() -> None:
    """Mistral's shows tools before the last question: with a new one, nothing after BOS is where it was."""
    format = chat("mistral")
    path = Path(format.open(Prompt((user("hi"),), (ADD,))))
    path.say(ended(format, "hello"))
    path.answer(user("12"))
    assert path.keeps == [0]
    assert path.ids == rendered(format, path.conversation.messages, (ADD,))
    tool_free = Path(chat("mistral").open(Prompt((user("hi"),))))
    tool_free.say(ended(format, "hello"))
    tool_free.answer(user("12"))
    assert tool_free.keeps == [None]


def test_a_conversation_without_end_tokens_goes_on_by_plain_text() -> None:
    format = chat("plain")
    path = Path(format.open(Prompt((user("hi"),))))
    path.say(letters(format.tokenizer, "hello"))
    assert path.answer(user("12")) == format.tokenizer.encode("\nuser: 12\nAnswer: ")
    path.say((*letters(format.tokenizer, "hello"), format.tokenizer.eos_id))
    assert path.answer(user("12")) == format.tokenizer.encode("\nuser: 12\nAnswer: ")
    assert path.keeps == [None, None]


def test_a_prompt_that_history_does_not_repeat_goes_on_all_the_same() -> None:
    """The generation prompt has a newline more than the message that follows it."""
    format = ChatFormat(QWEN25.replace("{{ start + 'assistant\\n' }}", "{{ start + 'assistant\\n\\n' }}"), bpe())
    path = Path(format.open(Prompt((user("hi"),))))
    for text in ("hello", "as"):
        path.say(ended(format, text))
        assert path.answer(user(text)) == format.tokenizer.encode(f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n\n")
    assert path.keeps == [None, None]


def test_the_end_of_turn_of_the_template_ends_a_turn_whatever_the_tokenizer_says() -> None:
    """A base model's tokenizer ends texts, its chat template turns."""
    format = ChatFormat(QWEN25, bpe("<|endoftext|>"), name="base")
    end_id = format.tokenizer.token_id("<|im_end|>")
    assert format.end_ids == (format.tokenizer.eos_id, end_id)
    path = Path(format.open(Prompt((user("hi"),))))
    assert path.say((*format.tokenizer.encode("hello"), end_id)).content == "hello"
    assert path.answer(user("12"))[0] == format.tokenizer.token_id("\n")


EOM = TEMPLATES["llama3"].replace("call.arguments | tojson + '}<|eot_id|>'", "call.arguments | tojson + '}' + after_call")
"""Llama's, with another end after a call than after content."""


@pytest.mark.parametrize("end", ["<|eot_id|>", "<|eom_id|>"])
def test_a_turn_with_a_call_may_end_in_a_token_of_its_own(end: str) -> None:
    """The template's end after calls is an end id although the tokenizer does not say so; whichever end was sampled, the result is read once."""
    format = ChatFormat("{% set after_call = '<|eom_id|>' %}" + EOM, bpe("<|eot_id|>"), bos="<|begin_of_text|>")
    assert format.end_ids == (format.tokenizer.token_id("<|eot_id|>"), format.tokenizer.token_id("<|eom_id|>"))
    path = Path(format.open(Prompt((user("hi"),), (ADD,))))
    sampled = (*format.tokenizer.encode('{"name": "add", "parameters": {"a": 1, "b": 2}}'), format.tokenizer.token_id(end))
    assert path.say(sampled).tool_calls == (call(),)
    assert path.answer(result("987")) == format.tokenizer.encode(
        "<|start_header_id|>ipython<|end_header_id|>\n\n987<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    text, num_ends = trained_text(format, [user("hi"), said("", call()), result("987"), said("3")], (ADD,))
    assert (text, num_ends) == ('{"name": "add", "parameters": {"a": 1, "b": 2}}3', 2)
    ids, is_trained = format.encode_example([user("hi"), said("", call()), result("987"), said("3")], (ADD,))
    assert is_trained[ids.index(format.tokenizer.token_id("<|eom_id|>"))]


@pytest.mark.parametrize("after_call", ["", "\n", " and so\n", "<|eom_id|>"])
@pytest.mark.parametrize("is_ended", [True, False])
@pytest.mark.parametrize("question", ["hi", "<|eot_id|>hi<|eot_id|>"])
def test_a_tool_result_is_read_whatever_ends_the_turn_of_its_call(after_call: str, is_ended: bool, question: str) -> None:
    """Nor is anything read twice: the prompt holds end ids, the rendered turn none."""
    template = EOM.replace("+ after_call", "+ (after_call if call.name == 'add' else '<|eot_id|>')")  # as Llama's for its own tools
    format = ChatFormat("{% set after_call = " + repr(after_call) + " %}" + template, bpe("<|eot_id|>"), bos="<|begin_of_text|>")
    assert format.end_ids == (format.tokenizer.eos_id,)
    path = Path(format.open(Prompt((user(question),), (ADD,))))
    sampled = format.tokenizer.encode('{"name": "add", "parameters": {"a": 1, "b": 2}}')
    for number in (0, 1):
        path.say((*sampled, format.tokenizer.eos_id) if is_ended else sampled)
        observation = format.tokenizer.decode(path.answer(result("987", number)))
        assert observation == "ipython\n\n987assistant\n\n"
    assert path.keeps == [None, None]


def test_calls_that_the_template_refuses_stay_content() -> None:
    """The policy may say anything; its episode goes on."""
    format = chat("llama3")
    path = Path(format.open(Prompt((user("hi"),), (ADD,))))
    text = '{"name": "add", "parameters": {}}; {"name": "add", "parameters": {}}'
    message = path.say(ended(format, text))
    assert message == said(text)
    path.answer(user("one at a time"))


def test_marks_that_are_special_tokens_are_read() -> None:
    format = chat("mistral")
    mark = format.tokenizer.token_id("[TOOL_CALLS]")
    assert format.tokenizer.decode((mark,)) == ""
    path = Path(format.open(Prompt((user("hi"),), (ADD,))))
    message = path.say((mark, *ended(format, '[{"name": "add", "arguments": {"a": 1, "b": 2}}]')))
    assert message == said("", call())


def test_a_prompt_that_opens_the_reasoning_has_it_parsed() -> None:
    format = ChatFormat(
        TEMPLATES["qwen3"].replace("'<|im_start|>assistant\\n' }}{% endif %}", "'<|im_start|>assistant\\n<think>\\n' }}{% endif %}"), bpe()
    )
    conversation = format.open(Prompt((user("hi"),)))
    conversation.start()
    assert conversation.hear(ended(format, "as\n</think>\n\n4")) == said("4", reasoning="as")


def test_tools_and_calls_reach_a_template_that_knows_neither() -> None:
    format = chat("smollm")
    text = format.render([user("hi"), said("as", call()), result("3")], (ADD,), add_generation_prompt=False)
    assert '{"name": "add", "description": "Add two numbers."' in text
    assert 'as\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>' in text
    assert text.count("<|im_start|>system") == 1
    with_system = format.render([Message("system", "hello"), user("hi")], (ADD,), add_generation_prompt=False)
    assert with_system.startswith("<|im_start|>system\nhello\n\n")
    assert with_system.count("<|im_start|>system") == 1
    assert "<think>\nas\n</think>\n\n4<|im_end|>" in format.render([user("hi"), said("4", reasoning="as")], add_generation_prompt=False)


def test_a_prompt_needs_a_message() -> None:
    with pytest.raises(ChatTemplateError, match="at least one message"):
        chat("tiny").open(Prompt(()))


def test_text_that_the_vocabulary_cannot_spell_is_a_template_error() -> None:
    format = chat("smollm")
    with pytest.raises(ChatTemplateError, match="no ids"):
        ChatFormat(format.template, _without("z"), name="small").open(Prompt((user("lazy"),))).start()


def _without(letter: str) -> FastTokenizer:
    return byte_level_bpe([t for t in tokens() if t != letter], MERGES, SpecialTokens((0, 1, 2), (2,)))


@pytest.mark.parametrize("kind", ["bpe", "sentencepiece"])
@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_there_is_one_bos_or_none(name: str, kind: str) -> None:
    format = chat(name, kind)
    bos = "<|begin_of_text|>" if name == "llama3" else "<s>"
    bos_id = None if name == "tiny" else format.tokenizer.token_id(bos)
    expected = name in ("llama3", "mistral")
    for ids in (format.open(Prompt((user("hi"),))).start(), format.encode_example([user("hi"), said("hello")])[0]):
        assert sum(i == bos_id for i in ids) == expected
        assert (ids[0] == bos_id) == expected


def test_a_second_bos_is_dropped() -> None:
    format = ChatFormat("{{ bos_token }}<s>" + MISTRAL.replace("{{- bos_token }}", ""), bpe("</s>"), bos="<s>", eos="</s>")
    assert format.render([user("hi")], add_generation_prompt=True) == "<s>[INST] hi[/INST]"
