"""Text to ids and back: a byte tokenizer for the tiny model, and what the `tokenizers` package runs for all others.

Both satisfy `protocols.Tokenizer`. Special tokens that are written out in a text become their ids, as everywhere in the field; whoever feeds
untrusted text to a model removes them first. Deliberately not here: files (`text/tokenizer_files.py`), chat templates, and any tokenization of
sampled ids.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from noria.errors import ConfigError, InvalidRequestError
from noria.types import Ids

_NUM_BYTES: Final = 256


@final
class ByteTokenizer:
    """One token per UTF-8 byte, and four special tokens. Immutable; usable from any thread."""

    SPECIAL: Final = {"<|bos|>": 256, "<|eos|>": 257, "<|pad|>": 258, "<|sep|>": 259}

    def __init__(self) -> None:
        self.vocab_size = _NUM_BYTES + len(self.SPECIAL)
        self.bos_id: int | None = None
        self.eos_id = self.SPECIAL["<|eos|>"]
        self.end_ids: Ids = (self.eos_id,)
        self._splitter = re.compile("(" + "|".join(map(re.escape, self.SPECIAL)) + ")")

    def encode(self, text: str) -> Ids:
        """Bytes of `text`, special tokens where they are written out; adds none. A lone surrogate is U+FFFD."""
        ids: list[int] = []
        for part in self._splitter.split(_well_formed(text)):
            special = self.SPECIAL.get(part)
            ids.extend(part.encode("utf-8") if special is None else (special,))
        return tuple(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the byte tokens; special tokens are left out; bytes that are not valid UTF-8 become U+FFFD."""
        return bytes(i for i in ids if i < _NUM_BYTES).decode("utf-8", "replace")

    def token_id(self, text: str) -> int:
        """The id of a text that is exactly one token. Raises ConfigError otherwise."""
        return _only_id(text, self.encode(text))

    def name_of(self, token_id: int) -> str:
        """How a token is written, special ones too; an id that has no token is its number."""
        names = {special: name for name, special in self.SPECIAL.items()}
        return names.get(token_id) or (self.decode((token_id,)) if 0 <= token_id < _NUM_BYTES else str(token_id))


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Which ids are no ordinary text.

    ids: matched in text before anything else, and left out when decoding. added_ids: matched so, and they stay. end_ids: at least one, the id
    that ends a turn first. bos_id: what plain text begins with.
    """

    ids: Collection[int]
    end_ids: Ids
    bos_id: int | None = None
    added_ids: Collection[int] = ()


@final
class FastTokenizer:
    """A tokenizer that the `tokenizers` package runs. Immutable; usable from any thread.

    engine: it; given away. end_ids: at least one, the id that ends a turn first. bos_id: what plain text begins with. missing_bytes: bytes that it
    cannot spell, which byte-level BPE leaves out without a word. spelling: bytes of each id where tokens stand for single bytes of a character
    (SentencePiece's byte fallback), None for a special token; the package turns a whole run of such tokens into U+FFFD where one is wrong.
    strips_space: the first space of decoded text is the one that encoding puts there.
    """

    def __init__(
        self,
        engine: Tokenizer,
        *,
        end_ids: Ids,
        bos_id: int | None = None,
        missing_bytes: bytes = b"",
        spelling: Sequence[bytes] | None = None,
        strips_space: bool = False,
    ) -> None:
        self.vocab_size = max(engine.get_vocab(with_added_tokens=True).values()) + 1
        self.bos_id = bos_id
        self.eos_id = end_ids[0]
        self.end_ids = end_ids
        self._engine, self._missing_bytes = engine, missing_bytes
        self._spelling, self._strips_space = spelling, strips_space
        self._unknown = _unknown_token(engine)

    def encode(self, text: str) -> Ids:
        """Ids of `text`, special tokens where they are written out; adds none.

        Raises InvalidRequestError for a character that the vocabulary cannot spell: in SmolLM the control characters U+0004, 6, 13, 14, 16 and 1D,
        and the unassigned planes 4 to 11 (lead bytes F1 and F2). A lone surrogate is no character: it is read as U+FFFD.
        """
        text = _well_formed(text)
        if _has_any(text, self._missing_bytes):
            self._refuse(text, next(i for i, letter in enumerate(text) if _has_any(letter, self._missing_bytes)))
        encoding = self._engine.encode(text, add_special_tokens=False)
        if self._unknown is not None:
            unknown_text, unknown_id = self._unknown
            if unknown_id in encoding.ids and unknown_text not in text:
                self._refuse(text, encoding.offsets[encoding.ids.index(unknown_id)][0])
        return tuple(encoding.ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; special tokens are left out; bytes that are not valid UTF-8 become U+FFFD."""
        if self._spelling is None:
            return str(self._engine.decode(list(ids), skip_special_tokens=True))
        num = len(self._spelling)
        text = b"".join([self._spelling[i] for i in ids if i < num]).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._strips_space else text

    def token_id(self, text: str) -> int:
        """The id of a text that is exactly one token. Raises ConfigError otherwise."""
        try:
            ids = self.encode(text)
        except InvalidRequestError as error:
            raise ConfigError(str(error)) from error
        has_space = self._strips_space and self._spelling is not None and len(ids) == 2 and self._spelling[ids[0]] == b" "
        return _only_id(text, ids[1:] if has_space else ids)

    def name_of(self, token_id: int) -> str:
        """How the vocabulary writes a token, special ones too; an id that has no token is its number."""
        return self._engine.id_to_token(token_id) or str(token_id)

    def save(self, path: Path) -> None:
        """Write it as a tokenizer.json of Hugging Face."""
        self._engine.save(str(path))

    def _refuse(self, text: str, position: int) -> None:
        letter = text[position]
        raise InvalidRequestError(
            f"character {letter!r} (U+{ord(letter):04X}) at position {position} is not in this model's vocabulary; leave it out"
        )


def _unknown_token(engine: Tokenizer) -> tuple[str, int] | None:
    """Text and id of the token that stands for what the vocabulary lacks, None if there is none."""
    text = getattr(engine.model, "unk_token", None)
    token_id = engine.token_to_id(text) if text else None
    return (str(text), token_id) if token_id is not None else None


SPLITS: Final[Mapping[str, str]] = {
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""Expressions that cut a text into words, as the models' own tokenizer.json files have them, by llama.cpp's names."""

WORD_SPLITS: Final = ("smollm", "gpt-2", "default", *SPLITS)
"""Names of the ways to cut a text into words that `byte_level_bpe` knows."""

_IGNORES_MERGES: Final = ("llama-bpe", "tekken")  # a word that is a token is that token, whatever its merges


def byte_level_bpe(tokens: Sequence[str], merges: Sequence[str], special: SpecialTokens, *, split: str = "smollm") -> FastTokenizer:
    """Byte-level BPE (Radford et al. 2019), as GGUF files carry it: bit for bit the models' own.

    tokens: text of each id, in GPT-2's printable byte alphabet. merges: "left right", best first. split: one of `WORD_SPLITS`; "smollm" splits
    every digit off, then cuts as "gpt-2"; "default" is what llama.cpp makes of files that do not say.

    Raises ValueError if a merge names a token that is not in `tokens`, an id is outside them, or a token is given twice.
    """
    ids = _numbered(tokens, special)
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    bad = next((f"{a} {b}" for a, b in pairs if a not in ids or b not in ids or a + b not in ids), None)
    if bad is not None:
        raise ValueError(f"merge {bad!r} does not join two known tokens into a known one")
    engine = Tokenizer(models.BPE(ids, pairs, ignore_merges=split in _IGNORES_MERGES))
    if split == "qwen2":
        engine.normalizer = normalizers.NFC()
    engine.pre_tokenizer = _word_split(split)
    engine.decoder = decoders.ByteLevel()
    _add_tokens(engine, tokens, special)
    return FastTokenizer(engine, end_ids=special.end_ids, bos_id=special.bos_id, missing_bytes=missing_bytes(ids))


def sentencepiece_bpe(
    tokens: Sequence[str],
    scores: Sequence[float],
    special: SpecialTokens,
    *,
    byte_ids: Collection[int],
    unknown_id: int,
    adds_space: bool = True,
) -> FastTokenizer:
    """SentencePiece's BPE (Kudo and Richardson 2018), which joins the pair whose result has the best score, with a token per byte for the rest.

    tokens, scores: of each id, a space written as U+2581. byte_ids: tokens that stand for a byte, written <0x0A>. adds_space: text, and what
    follows a special token, is read as if it began with a space. The merges are generated as transformers generates them (`generate_merges`): by
    score, ties by the lengths of the two parts.

    Raises ValueError if an id is outside the tokens, a token is given twice, or there is not one score each.
    """
    ids = _numbered(tokens, special, *byte_ids, unknown_id)
    if len(scores) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens do not fit {len(scores)} scores")
    outside = {*special.ids, *special.added_ids, *byte_ids, unknown_id}
    plain = {token: i for token, i in ids.items() if i not in outside}
    pairs = [(token[:k], token[k:]) for token in plain for k in range(1, len(token)) if token[:k] in plain and token[k:] in plain]
    pairs.sort(key=lambda pair: (-scores[ids[pair[0] + pair[1]]], -len(pair[0]), -len(pair[1])))
    engine = Tokenizer(models.BPE(ids, pairs, unk_token=tokens[unknown_id], byte_fallback=bool(byte_ids), fuse_unk=True))
    prefix = [normalizers.Prepend("▁")] if adds_space else []
    engine.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    suffix = [decoders.Strip(" ", 1, 0)] if adds_space else []
    engine.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *suffix])
    _add_tokens(engine, tokens, special)
    spelled = spelling(tokens, special.ids)
    return FastTokenizer(engine, end_ids=special.end_ids, bos_id=special.bos_id, spelling=spelled, strips_space=adds_space)


def spelling(tokens: Sequence[str], special_ids: Collection[int]) -> tuple[bytes, ...]:
    """The bytes that each token of a SentencePiece vocabulary stands for, none for a special one."""

    def spell(token: str) -> bytes:
        byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)
        return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode("utf-8", "replace")

    hidden = frozenset(special_ids)
    return tuple(b"" if i in hidden else spell(token) for i, token in enumerate(tokens))


def missing_bytes(vocabulary: Collection[str]) -> bytes:
    """Bytes that a byte-level vocabulary cannot spell. vocabulary: token texts, fast to look up in."""
    return bytes(byte for byte, letter in enumerate(_byte_alphabet()) if letter not in vocabulary)


def _numbered(tokens: Sequence[str], special: SpecialTokens, *other_ids: int) -> dict[str, int]:
    """The id of each token. Raises ValueError if one is given twice, or one of the special or other ids is none."""
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise ValueError(f"{len(tokens) - len(ids)} tokens are given twice")
    named_ids = (*special.ids, *special.added_ids, *special.end_ids, *other_ids, *(() if special.bos_id is None else (special.bos_id,)))
    bad = next((i for i in named_ids if not 0 <= i < len(tokens)), None)
    if bad is not None:
        raise ValueError(f"id {bad}, named as special, is outside the {len(tokens)} tokens")
    return ids


def _add_tokens(engine: Tokenizer, tokens: Sequence[str], special: SpecialTokens) -> None:
    engine.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in special.ids])
    engine.add_tokens([AddedToken(tokens[i], special=False, normalized=False) for i in special.added_ids])
    if special.bos_id is not None:
        bos = tokens[special.bos_id]
        engine.post_processor = processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, special.bos_id)])


def _word_split(name: str) -> pre_tokenizers.PreTokenizer:
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole])
    if name == "gpt-2":
        return whole
    expressions = (SPLITS[name],) if name in SPLITS else _DEFAULT_SPLITS
    cuts = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_DEFAULT_SPLITS: Final = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)


def _byte_alphabet() -> str:
    """GPT-2's printable stand-in of each byte, in the order of the bytes (Radford et al. 2019, `bytes_to_unicode`)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    stand_ins = map(chr, range(_NUM_BYTES, 2 * _NUM_BYTES))
    return "".join(chr(byte) if byte in printable else next(stand_ins) for byte in range(_NUM_BYTES))


def _has_any(text: str, some: bytes) -> bool:
    if not some:
        return False
    raw = text.encode("utf-8")
    return len(raw.translate(None, some)) < len(raw)


def _well_formed(text: str) -> str:
    """`text` with lone surrogates, which no encoding of Unicode can express, replaced by U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _only_id(text: str, ids: Ids) -> int:
    if not text:
        raise ConfigError("'' is no text; a stop text must be exactly one token")
    if len(ids) != 1:
        raise ConfigError(f"{text!r} is {len(ids)} tokens ({', '.join(map(str, ids))}); a stop text must be exactly one token")
    return ids[0]
