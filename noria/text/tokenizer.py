"""Text to ids and back: a byte tokenizer for the tiny model, and byte-level BPE as GGUF files carry it.

Both satisfy `protocols.Tokenizer`. Special tokens that are written out in a text become their ids, as everywhere in the field; whoever feeds
untrusted text to a model removes them first. Deliberately not here: chat templates, and any tokenization of sampled ids.
"""

import re
from collections.abc import Sequence
from typing import Final, final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from noria.errors import ConfigError, InvalidRequestError
from noria.types import Ids

_NUM_BYTES: Final = 256


@final
class ByteTokenizer:
    """One token per UTF-8 byte, and four special tokens. Immutable; usable from any thread."""

    SPECIAL: Final = {"<|bos|>": 256, "<|eos|>": 257, "<|pad|>": 258, "<|sep|>": 259}
    vocab_size: int = _NUM_BYTES + len(SPECIAL)
    eos_id: int = SPECIAL["<|eos|>"]

    def __init__(self) -> None:
        self._splitter = re.compile("(" + "|".join(map(re.escape, self.SPECIAL)) + ")")

    def encode(self, text: str) -> Ids:
        """Bytes of `text`, special tokens where they are written out; adds none."""
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


@final
class BpeTokenizer:
    """Byte-level BPE that splits every digit off (GPT-2's expression after a digit split): SmolLM's, bit for bit. Immutable; usable from any thread.

    tokens: text of each id, in GPT-2's printable byte alphabet. merges: "left right", best first. special_ids: tokens that are matched in text
    before anything else, and left out when decoding. eos_id: ends a sampled turn.

    Raises ValueError if a merge names a token that is not in `tokens`, an id is outside them, or a token is given twice.
    """

    def __init__(self, tokens: Sequence[str], merges: Sequence[str], *, special_ids: Sequence[int], eos_id: int) -> None:
        ids = {token: i for i, token in enumerate(tokens)}
        if len(ids) != len(tokens):
            raise ValueError(f"{len(tokens) - len(ids)} tokens are given twice")
        if not all(0 <= i < len(tokens) for i in (*special_ids, eos_id)):
            raise ValueError(f"special ids {list(special_ids)} or end-of-text id {eos_id} outside the {len(tokens)} tokens")
        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
        bad = next((f"{a} {b}" for a, b in pairs if a not in ids or b not in ids or a + b not in ids), None)
        if bad is not None:
            raise ValueError(f"merge {bad!r} does not join two known tokens into a known one")
        self.vocab_size = len(tokens)
        self.eos_id = eos_id
        self._missing_bytes = bytes(byte for byte, letter in enumerate(_byte_alphabet()) if letter not in ids)
        self._tokenizer = Tokenizer(models.BPE(ids, pairs))
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        )
        self._tokenizer.decoder = decoders.ByteLevel()
        self._tokenizer.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in special_ids])

    def encode(self, text: str) -> Ids:
        """Ids of `text`, special tokens where they are written out; adds none.

        Raises InvalidRequestError for a character with a byte that the vocabulary lacks, which the BPE would leave out without a word: in SmolLM
        the control characters U+0004, 6, 13, 14, 16 and 1D, and the unassigned planes 4 to 11 (lead bytes F1 and F2).
        """
        text = _well_formed(text)
        self._require_known_bytes(text)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; special tokens are left out; bytes that are not valid UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def token_id(self, text: str) -> int:
        """The id of a text that is exactly one token. Raises ConfigError otherwise."""
        try:
            return _only_id(text, self.encode(text))
        except InvalidRequestError as error:
            raise ConfigError(str(error)) from error

    def _require_known_bytes(self, text: str) -> None:
        if not _has_any(text, self._missing_bytes):
            return
        position, letter = next((i, c) for i, c in enumerate(text) if _has_any(c, self._missing_bytes))
        raise InvalidRequestError(
            f"character {letter!r} (U+{ord(letter):04X}) at position {position} is not in this model's vocabulary; leave it out"
        )


def _byte_alphabet() -> str:
    """GPT-2's printable stand-in of each byte, in the order of the bytes (Radford et al. 2019, `bytes_to_unicode`)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    stand_ins = map(chr, range(_NUM_BYTES, 2 * _NUM_BYTES))
    return "".join(chr(byte) if byte in printable else next(stand_ins) for byte in range(_NUM_BYTES))


def _has_any(text: str, some: bytes) -> bool:
    raw = text.encode("utf-8")
    return len(raw.translate(None, some)) < len(raw)


def _well_formed(text: str) -> str:
    """`text` with lone surrogates, which no encoding of Unicode can express, replaced by U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace") if any("\ud800" <= c <= "\udfff" for c in text) else text


def _only_id(text: str, ids: Ids) -> int:
    if len(ids) != 1:
        raise ConfigError(f"{text!r} is {len(ids)} tokens ({', '.join(map(str, ids))}); a stop text must be exactly one token")
    return ids[0]
