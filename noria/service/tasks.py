"""The tasks of one run: whatever one of them raises ends the run, with its cause, and no other; what has begun to be written is finished."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, final

from noria.protocols import Clock
from noria.service.evaluations import Work

T = TypeVar("T")


@final
class RunTasks:
    """Owner of a run's tasks. Touched by the event loop only."""

    def __init__(self, on_failure: Callable[[Exception], Coroutine[Any, Any, None]]) -> None:
        """on_failure: awaited with what a task raised."""
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[None]] = set()
        self._durable: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Work) -> asyncio.Task[None]:
        """Start a task that `cancel` cancels."""
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(self._guard(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def durably(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is finished even if its caller is cancelled; `cancel` waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._durable.add(task)
        task.add_done_callback(self._durable.discard)
        return await asyncio.shield(task)

    async def cancel(self, clock: Clock, timeout_s: float, what: str) -> None:
        """Cancel the spawned tasks, and wait until they and all durable work are over. Raises DeadlineExceededError naming `what`."""
        for task in self._tasks:
            task.cancel()
        under_way = self._tasks | self._durable
        if under_way:
            await clock.wait_for(asyncio.wait(under_way), timeout_s, what)

    async def _guard(self, work: Work) -> None:
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this run, recorded and with its cause, and no other
            await self._on_failure(error)
