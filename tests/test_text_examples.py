"""Files of examples: what trains of each form, and a bad line is an error that names it."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.errors import DatasetError
from noria.text.chat import TINY_TEMPLATE, ChatFormat
from noria.text.examples import read_examples
from noria.text.tokenizer import ByteTokenizer
from noria.types import Message, ToolCall

TOKENIZER = ByteTokenizer()
CHAT = ChatFormat(TINY_TEMPLATE, TOKENIZER, eos="<|eos|>")
GOOD = {"prompt": "2 + 2 = ", "completion": "4"}


def read(tmp_path, *lines, chat=CHAT, max_positions=1000, too_long="error", tokenizer=TOKENIZER):
    path = tmp_path / "examples.jsonl"
    path.write_bytes("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines).encode())
    return read_examples(path, tokenizer, chat, max_positions=max_positions, too_long=too_long)


def trained_text(example):
    """The trained ids as text, special tokens written out."""
    names = {i: name for name, i in ByteTokenizer.SPECIAL.items()}
    return "".join(names.get(i) or chr(i) for i in example.ids_T[example.is_trained_T].tolist())


def test_of_plain_text_the_completion_and_the_end_of_text_train(tmp_path):
    (example,) = read(tmp_path, GOOD).examples
    assert example.ids_T.tolist() == [*b"2 + 2 = 4", TOKENIZER.eos_id]
    assert trained_text(example) == "4<|eos|>"
    assert example.weight == 1.0


def test_an_end_of_text_that_is_written_out_is_not_doubled(tmp_path):
    (example,) = read(tmp_path, {"prompt": "a", "completion": "b<|eos|>"}).examples
    assert trained_text(example) == "b<|eos|>"


def test_plain_text_begins_with_the_models_first_token_once(tmp_path):
    tokenizer = ByteTokenizer()
    tokenizer.bos_id = ByteTokenizer.SPECIAL["<|bos|>"]
    lines = (GOOD, {"prompt": "<|bos|>x", "completion": "y"}, {"prompt": "", "completion": "y"})
    for example in read(tmp_path, *lines, tokenizer=tokenizer).examples:
        assert example.ids_T.tolist().count(tokenizer.bos_id) == 1
        assert example.ids_T[0] == tokenizer.bos_id
        assert not example.is_trained_T[0]


def test_of_a_chat_what_the_assistants_say_and_the_end_of_their_turns_train(tmp_path):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "four"},
    ]
    (example,) = read(tmp_path, {"messages": messages, "weight": -2}).examples
    assert trained_text(example) == "4<|eos|>four<|eos|>"
    assert example.weight == -2.0
    ids, is_trained = CHAT.encode_example([Message(m["role"], m["content"]) for m in messages])
    assert (example.ids_T.tolist(), example.is_trained_T.tolist()) == (list(ids), list(is_trained))


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
def test_tools_and_calls_have_the_form_of_the_chat_api(tmp_path, arguments):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "assistant", "content": "2"},
    ]
    tools = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}]
    (example,) = read(tmp_path, {"messages": messages, "tools": tools}).examples
    assert '{"name": "add", "arguments": {"a": 1}}' in trained_text(example)
    spoken = [Message("user", "go"), Message("assistant", "", (ToolCall("add", {"a": 1}, "c1"),))]
    head, _ = CHAT.encode_example(spoken)
    assert "add" in TOKENIZER.decode(head)
    assert "adds" in TOKENIZER.decode(example.ids_T.tolist()), "the tools are in the prompt"


QUESTION = {"role": "user", "content": "go"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {}}}]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "2"}
ANSWER = {"role": "assistant", "content": "2"}


def test_a_results_name_is_that_of_its_call_and_null_is_nothing(tmp_path):
    plain = read(tmp_path, {"messages": [QUESTION, CALL, RESULT, ANSWER]}).examples[0]
    empty = {"name": None, "tool_call_id": None, "tool_calls": None, "reasoning_content": None}
    named = [{**empty, **QUESTION}, {**empty, **CALL}, {**empty, **RESULT, "name": "add"}, {**empty, **ANSWER}]
    example = read(tmp_path, {"messages": named}).examples[0]
    assert example.ids_T.tolist() == plain.ids_T.tolist()
    assert example.is_trained_T.tolist() == plain.is_trained_T.tolist()


BAD = [
    ("{", "not JSON"),
    ("[]", "must be an object"),
    ('"text"', "must be an object"),
    ({"prompt": "a"}, "no 'completion'"),
    ({"completion": "a"}, "no 'prompt'"),
    ({"prompt": 1, "completion": "a"}, "prompt must be a text"),
    ({"prompt": "a", "completion": ""}, "completion is empty"),
    ({"prompt": "", "completion": "a"}, "nothing precedes"),
    ({**GOOD, "wieght": 1}, "unknown keys wieght; known: prompt, completion, weight"),
    ({**GOOD, "tools": []}, "unknown keys tools"),
    ({**GOOD, "weight": "1"}, "weight must be a finite number"),
    ({**GOOD, "weight": True}, "weight must be a finite number"),
    ('{"prompt": "a", "completion": "b", "weight": NaN}', "weight must be a finite number"),
    ({**GOOD, "weight": 1e39}, "32-bit training"),
    ({**GOOD, "weight": -1e39}, "32-bit training"),
    ({**GOOD, "weight": 1e-60}, "32-bit training"),
    ('{"prompt": "a", "completion": "b", "weight": 1' + "0" * 400 + "}", "401 digits"),
    ('{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested more than"),
    ({"messages": []}, "messages is empty"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a":' * 5000 + "1" + "}" * 5000}]}]}, "nested more than"),
    ('{"prompt": {"arguments": ' + '{"a":' * 5000 + "1" + "}" * 5002, "nested more than"),
    ({"messages": "hello"}, "messages must be a list"),
    ({"messages": [3]}, r"messages\[0\]: it must be an object"),
    ({"messages": [{"role": "robot", "content": ""}]}, r"messages\[0\]: role must be one of .* \(got 'robot'\)"),
    ({"messages": [{"role": ["user"], "content": ""}]}, "role must be one of"),
    ({"messages": [{"role": "user"}]}, "content must be a text"),
    ({"messages": [{"role": "user", "content": "hello"}]}, "nothing of the example would train"),
    ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": "{"}}]}]}, "not JSON"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"arguments": {}}]}]}, "no 'name'"),
    ({"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "x", "parameters": 3}]}, "parameters must be an object"),
    ({"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "x", "strict": True}]}, r"tools\[0\]: unknown keys strict"),
    ({"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "browser", "name": "x"}]}, "type must be 'function'"),
    ({"messages": [{"role": "user", "content": "a", "name": "Ann"}, ANSWER]}, r"messages\[0\]: name 'Ann' would be lost"),
    ({"messages": [QUESTION, {**ANSWER, "name": "Bob"}]}, r"messages\[1\]: name 'Bob' would be lost"),
    ({"messages": [QUESTION, CALL, {**RESULT, "name": "subtract"}, ANSWER]}, r"messages\[2\]: name 'subtract' would be lost"),
    ({"messages": [QUESTION, CALL, {"role": "tool", "content": "2", "name": "add"}, ANSWER]}, r"messages\[2\]: name 'add' would be lost"),
    ({"messages": [{**QUESTION, "tool_call_id": "c1"}, ANSWER]}, "tool_call_id is for messages of role tool"),
    ({"messages": [{**QUESTION, "reasoning_content": "hm"}, ANSWER]}, "reasoning_content is for messages of role assistant"),
    ({"messages": [{**QUESTION, "tool_calls": CALL["tool_calls"]}, ANSWER]}, "tool_calls is for messages of role assistant"),
    ({"messages": [QUESTION, {**CALL, "tool_calls": [{"id": "c1", "name": "add", "index": 0}]}]}, r"tool_calls\[0\]: unknown keys index"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_a_bad_line_is_refused_with_its_number(tmp_path, line, message):
    with pytest.raises(DatasetError, match=rf"examples\.jsonl, line 3: .*{message}"):
        read(tmp_path, GOOD, "", line)


def test_tools_and_a_weight_that_are_null_are_left_out(tmp_path):
    chat = {"messages": [QUESTION, ANSWER]}
    (plain,) = read(tmp_path, chat).examples
    (nulls,) = read(tmp_path, {**chat, "tools": None, "weight": None}).examples
    assert (nulls.ids_T.tolist(), nulls.weight) == (plain.ids_T.tolist(), 1.0)


def test_weights_may_be_zero_or_negative_but_not_all_zero(tmp_path):
    weights = [example.weight for example in read(tmp_path, {**GOOD, "weight": 0}, {**GOOD, "weight": -0.5}).examples]
    assert weights == [0.0, -0.5]
    with pytest.raises(DatasetError, match="all 2 examples have the weight 0"):
        read(tmp_path, {**GOOD, "weight": 0}, {**GOOD, "weight": -0.0})


def test_files_that_are_no_files_of_examples_are_refused(tmp_path):
    with pytest.raises(DatasetError, match="cannot read"):
        read_examples(tmp_path / "none.jsonl", TOKENIZER, CHAT, max_positions=10, too_long="error")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(DatasetError, match="not UTF-8"):
        read_examples(tmp_path / "binary", TOKENIZER, CHAT, max_positions=10, too_long="error")
    with pytest.raises(DatasetError, match="holds no example"):
        read(tmp_path, "", "  ")
    with pytest.raises(DatasetError, match="no chat template"):
        read(tmp_path, {"messages": [{"role": "assistant", "content": "a"}]}, chat=None)


def test_long_examples_are_an_error_or_skipped_or_cut_to_what_fits(tmp_path):
    long, hopeless = {"prompt": "ab", "completion": "cdefgh"}, {"prompt": "a" * 20, "completion": "b"}
    with pytest.raises(DatasetError, match="line 2: the example needs 8 positions, the learner's largest microbatch has 4"):
        read(tmp_path, {"prompt": "a", "completion": "b"}, long, max_positions=4)
    skipped = read(tmp_path, {"prompt": "a", "completion": "b"}, long, hopeless, max_positions=4, too_long="skip")
    assert (len(skipped.examples), skipped.num_skipped, skipped.num_truncated) == (1, 2, 0)
    cut = read(tmp_path, long, hopeless, max_positions=4, too_long="truncate")
    assert (len(cut.examples), cut.num_skipped, cut.num_truncated) == (1, 1, 1)
    assert trained_text(cut.examples[0]) == "cde"
    with pytest.raises(DatasetError, match="2 are longer"):
        read(tmp_path, long, hopeless, max_positions=1, too_long="skip")


@given(st.lists(st.tuples(st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=8), st.integers(1, 12)), min_size=1, max_size=5))
def test_whatever_fits_is_kept_whole_in_the_order_of_the_lines(tmp_path_factory, made):
    path = tmp_path_factory.mktemp("examples") / "examples.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text, "completion": "x" * n}, ensure_ascii=False) for text, n in made), encoding="utf-8")
    examples = read_examples(path, TOKENIZER, None, max_positions=100, too_long="error").examples
    assert [(e.ids_T.tolist(), int(e.is_trained_T.sum())) for e in examples] == [
        ([*TOKENIZER.encode(text), *b"x" * n, TOKENIZER.eos_id], n + 1) for text, n in made
    ]
    assert all(e.ids_T.dtype == np.int32 for e in examples)
