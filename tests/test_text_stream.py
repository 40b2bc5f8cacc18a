"""Text that is given out while ids arrive: all of it, once, and never half a character."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from text_builders import bpe, sentencepiece

from noria.protocols import Tokenizer
from noria.text.stream import TextStream
from noria.text.tokenizer import ByteTokenizer

TOKENIZERS: dict[str, Tokenizer] = {
    "bytes": ByteTokenizer(),
    "bpe": bpe(),
    "sentencepiece": sentencepiece(),
    "no prefix": sentencepiece(adds_space=False),
}
TEXTS = st.lists(
    st.sampled_from(["hello", " ", "  ", "é", "日本", "👩‍👩‍👧", "🙂", "\n", "\ufffd", "<s>", "</s>", "as", "12", "\u0301"]), max_size=12
).map("".join)


def streamed(tokenizer: Tokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    stream, texts, place = TextStream(tokenizer), [], 0
    for size in [*sizes, *[1] * len(ids)]:
        texts.append(stream.push(ids[place : place + size]))
        place += size
    return [*texts, stream.finish()]


SIZES = st.lists(st.integers(0, 30), max_size=4)


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(sorted(TOKENIZERS)), st.data(), SIZES)
def test_any_ids_give_what_decoding_them_together_gives(name: str, data: st.DataObject, sizes: list[int]) -> None:
    """Also bytes that are no UTF-8, special tokens in the middle of a character, and spaces at the start."""
    tokenizer = TOKENIZERS[name]
    first_bytes = st.integers(17, 17 + 256) if "prefix" in name or name == "sentencepiece" else st.integers(0, 259)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1) | first_bytes, max_size=60))
    assert "".join(streamed(tokenizer, ids, sizes)) == tokenizer.decode(ids)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(sorted(TOKENIZERS)), TEXTS, SIZES)
@example("sentencepiece", "<s> hello", [])
@example("sentencepiece", "é é", [1, 1, 1])
def test_no_half_character_is_given_out(name: str, text: str, sizes: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    ids = list(tokenizer.encode(text))
    whole = tokenizer.decode(ids)
    given_out = ""
    for part in streamed(tokenizer, ids, sizes):
        given_out += part
        assert whole.startswith(given_out)
    assert given_out == whole


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_a_character_is_given_out_with_its_last_token(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    stream = TextStream(tokenizer)
    ids = tokenizer.encode("a🙂a")
    parts = [stream.push((i,)) for i in ids]
    assert [part for part in parts if part] == ["a", "🙂", "a"]
    assert stream.finish() == ""


def test_an_incomplete_character_is_given_out_at_the_end() -> None:
    stream = TextStream(ByteTokenizer())
    assert stream.push("é".encode()[:1]) == ""
    assert stream.finish() == "\ufffd"


@pytest.mark.parametrize("name", ["bpe", "sentencepiece"])
def test_special_tokens_hide_no_space_and_complete_no_character(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    (special,), hello, e_acute = tokenizer.encode("</s>"), tokenizer.encode("a hello"), tokenizer.encode("é")[-2:]
    ids = [*hello[:-1], *[special] * 40, hello[-1], e_acute[0], *[special] * 40, e_acute[1], special, *hello]
    assert "".join(streamed(tokenizer, ids, [])) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@pytest.mark.parametrize("text", ["hello 12", "\ufffd", "日"])
def test_the_cost_of_a_token_does_not_grow(name: str, text: str) -> None:
    """Counted in ids that are decoded, for a long text and for garbage: bytes that never become a character."""
    tokenizer = TOKENIZERS[name]
    ids = [*tokenizer.encode(text)] if text != "日" else [i for i in tokenizer.encode(text) for _ in range(3)]
    ids = ids * (3000 // len(ids))
    counting = _Counting(tokenizer)
    stream = TextStream(counting)
    text = "".join([stream.push((i,)) for i in ids]) + stream.finish()
    assert text == tokenizer.decode(ids)
    assert counting.num_decoded < 40 * len(ids)


class _Counting:
    """A tokenizer that counts what it decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.num_decoded = tokenizer, 0
        self.vocab_size, self.bos_id, self.eos_id, self.end_ids = tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.end_ids

    def encode(self, text: str) -> tuple[int, ...]:
        return self.tokenizer.encode(text)

    def decode(self, ids: list[int]) -> str:
        self.num_decoded += len(ids)
        return self.tokenizer.decode(ids)

    def token_id(self, text: str) -> int:
        return self.tokenizer.token_id(text)
