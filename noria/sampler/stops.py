"""What ends a completion beside its length: stop ids, which the device compares with, and stop texts, which are looked for in what was sampled.

A stop text ends the completion with the token after which the decoded text contains it, wherever token borders lie: so a dispatch may have sampled
tokens beyond it, and the engine drops them.
"""

from collections.abc import Sequence
from typing import final

from noria.errors import ConfigError, InvalidRequestError
from noria.protocols import Tokenizer
from noria.sampler.sequence import MAX_STOP_IDS
from noria.text.stream import TextStream
from noria.types import Ids, SamplingParams


def stops_of(params: SamplingParams, eos_id: int, tokenizer: Tokenizer | None) -> tuple[Ids, tuple[str, ...]]:
    """Stop ids, ascending, end of text included; and stop texts to look for. A special token's text, which no decoded text contains, becomes its id.

    Raises InvalidRequestError for stop texts without a tokenizer, and for more than MAX_STOP_IDS ids.
    """
    if params.stop and tokenizer is None:
        raise InvalidRequestError(f"stop texts {params.stop} need a tokenizer, which this sampler has none of; use stop_ids")
    ids, texts = {*params.stop_ids, eos_id}, []
    for text in params.stop:
        special_id = _special_id(text, tokenizer) if tokenizer is not None else None
        if special_id is None:
            texts.append(text)
        else:
            ids.add(special_id)
    if len(ids) > MAX_STOP_IDS:
        raise InvalidRequestError(f"at most {MAX_STOP_IDS} stop ids, end of text and the stop texts of special tokens included, got {len(ids)}")
    return tuple(sorted(ids)), tuple(texts)


def _special_id(text: str, tokenizer: Tokenizer) -> int | None:
    try:
        token_id = tokenizer.token_id(text)
    except ConfigError:
        return None
    return token_id if tokenizer.decode((token_id, token_id)) == "" else None


@final
class StopSearch:
    """Looks for stop texts in one growing completion, at a cost per token that does not grow with it. Device thread only."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        """texts: at least one, none empty."""
        self._stream, self._texts = TextStream(tokenizer), tuple(texts)
        self._num_kept = max(map(len, texts)) - 1  # characters that may begin a stop text whose end is still to come
        self._tail = ""

    def find(self, ids: Sequence[int]) -> int | None:
        """How many of the ids sampled next there are up to the one after which the text contains a stop text; None if it does not after any.

        A character counts from the token on that completes it.
        """
        for count, token_id in enumerate(ids, 1):
            text = self._tail + self._stream.push((token_id,))
            if any(stop in text for stop in self._texts):
                return count
            self._tail = text[max(0, len(text) - self._num_kept) :]
        return None
