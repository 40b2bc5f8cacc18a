"""Text to ids and back: a byte tokenizer for the tiny model, and byte-level BPE as GGUF files carry it.

Both satisfy `protocols.Tokenizer`. Special tokens that are written out in a text become their ids, as everywhere in the field; whoever feeds
untrusted text to a model removes them first. Deliberately not here: chat templates, and any tokenization of sampled ids.
"""

import re
from collections.abc import Sequence
from typing import Final, final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from noria.errors import ConfigError
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
        self._tokenizer = Tokenizer(models.BPE(ids, pairs))
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        )
        self._tokenizer.decoder = decoders.ByteLevel()
        self._tokenizer.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in special_ids])

    def encode(self, text: str) -> Ids:
        """Ids of `text`, special tokens where they are written out; adds none."""
        return tuple(self._tokenizer.encode(_well_formed(text), add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; special tokens are left out; bytes that are not valid UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def token_id(self, text: str) -> int:
        """The id of a text that is exactly one token. Raises ConfigError otherwise."""
        return _only_id(text, self.encode(text))


def _well_formed(text: str) -> str:
    """`text` with lone surrogates, which no encoding of Unicode can express, replaced by U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace") if any("\ud800" <= c <= "\udfff" for c in text) else text


def _only_id(text: str, ids: Ids) -> int:
    if len(ids) != 1:
        raise ConfigError(f"{text!r} is {len(ids)} tokens ({', '.join(map(str, ids))}); a stop text must be exactly one token")
    return ids[0]
