"""The way back from the device thread to the event loop that asked: tokens as they are sampled, then the completion, or an error.

A request that does not stream is one whose only item is the last. Items queue up on the reader's side, at most one for each token that the request
may sample: a slow reader holds up nobody.
"""

import asyncio
from contextlib import suppress
from typing import TypeAlias, final

from noria.errors import NoriaError
from noria.types import Completion, Tokens

Item: TypeAlias = Tokens | NoriaError


@final
class Reply:
    """One request's way back. Made and read by a task of the event loop; `send` and `settle` belong to the device thread."""

    def __init__(self, *, is_stream: bool) -> None:
        """is_stream: send what each dispatch has sampled, and not only the completion."""
        self.is_stream = is_stream
        self.is_settled = False
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Item] = asyncio.Queue()

    def send(self, tokens: Tokens) -> None:
        """Hand over what a dispatch sampled."""
        self._put(tokens)

    def settle(self, outcome: Item) -> None:
        """Hand over the last item. Later ones are nobody's."""
        if not self.is_settled:
            self.is_settled = True
            self._put(outcome)

    async def next(self) -> Tokens:
        """The next item. Raises the error that the request ended with."""
        item = await self._items.get()
        if isinstance(item, NoriaError):
            raise item
        return item

    async def completion(self) -> Completion:
        """The last item's completion. Raises as `next`."""
        while (completion := (await self.next()).completion) is None:
            pass
        return completion

    def _put(self, item: Item) -> None:
        with suppress(RuntimeError):  # a loop that is closed has nobody waiting
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)
