"""Sampled ids to text while they arrive: nothing that later ids could change is given out, so never half a character.

Deliberately not here: stop texts.
"""

from collections.abc import Sequence
from typing import Final, final

from noria.protocols import Tokenizer
from noria.types import Ids

_LONGEST: Final = 16  # tokens in the window; each has a byte at least, and 3 can be pending
_KEPT: Final = 8


@final
class TextStream:
    """The text of one growing sequence of ids: what `push` and `finish` return, joined, is what the tokenizer decodes all ids to.

    A window of the last few ids is decoded at each step, at a cost that does not grow with the sequence. Its first tokens are there for what decoding
    does at the start of a text only (SentencePiece drops a space). Owned by one task.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._window: list[int] = []
        self._num_given = 0  # characters of the window's text

    def push(self, ids: Sequence[int]) -> str:
        """The text that is certain now, after `ids`."""
        parts = []
        for start in range(0, len(ids), _KEPT):
            self._window += [i for i in ids[start : start + _KEPT] if not self._is_silent(i)]
            text = self._decode(self._window)
            num_certain = len(text) - text.endswith("\ufffd")  # a later byte may complete the last character, no other
            parts.append(text[self._num_given : num_certain])
            self._num_given = max(self._num_given, num_certain)
            self._shorten(len(text) - self._num_given)
        return "".join(parts)

    def finish(self) -> str:
        """What is left: U+FFFD where a character stays incomplete."""
        rest = self._decode(self._window)[self._num_given :]
        self._window, self._num_given = [], 0
        return rest

    def _shorten(self, num_pending: int) -> None:
        if len(self._window) > _LONGEST:
            self._window = self._window[-_KEPT:]
            self._num_given = len(self._decode(self._window)) - num_pending

    def _is_silent(self, token_id: int) -> bool:
        """Whether the id adds nothing anywhere: a special token. One that is only dropped at the start of a text is not."""
        once: Ids = (token_id,)
        return self._decode(once) == "" and self._decode(once * 2) == ""
