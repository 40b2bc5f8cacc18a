"""Room for episodes: how many are played at once, and whose is next. No run's episodes, however many or slow, keep another run's out for long."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import final

from noria.protocols import Spans


@final
class Room:
    """A place that gets free goes to the waiting run with the fewest episodes inside; within a run, first come, first served. Of one event loop."""

    def __init__(self, size: int, spans: Spans) -> None:
        """size: episodes inside at once, >= 1."""
        self._num_free = size
        self._spans = spans
        self._inside: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @property
    def num_inside(self) -> int:
        """Episodes that are inside now, of all runs."""
        return self._inside.total()

    @asynccontextmanager
    async def enter(self, run_id: str) -> AsyncIterator[None]:
        """Be inside while the block runs; waiting for it is a span."""
        with self._spans.span("actor", "room", is_wait=True):
            await self._wait(run_id)
        try:
            yield
        finally:
            self._leave(run_id)

    async def _wait(self, run_id: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(run_id, deque()).append(turn)
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # admitted at the same moment
                self._leave(run_id)
            raise

    def _leave(self, run_id: str) -> None:
        self._num_free += 1
        self._inside[run_id] -= 1
        if not self._inside[run_id]:
            del self._inside[run_id]
        self._admit()

    def _admit(self) -> None:
        while self._num_free and self._waiting:
            run_id = min(self._waiting, key=lambda name: self._inside[name])
            turns = self._waiting[run_id]
            turn = turns.popleft()
            if not turns:
                del self._waiting[run_id]
            if not turn.cancelled():
                self._num_free -= 1
                self._inside[run_id] += 1
                turn.set_result(None)
