"""The two clocks: real time, and virtual time in which simulated hours run in milliseconds.

Both satisfy `protocols.Clock`. This module deliberately has no global clock: whoever waits is handed one.
"""

import asyncio
import selectors
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, final

from noria.errors import DeadlineExceededError

T = TypeVar("T")


async def _wait_for(awaitable: Awaitable[T], timeout_s: float, waiting_for: str) -> T:
    try:
        async with asyncio.timeout(timeout_s) as scope:
            return await awaitable
    except TimeoutError as error:
        if scope.expired():
            raise DeadlineExceededError(f"waited {timeout_s:g} s for {waiting_for}, then gave up") from error
        raise


@final
class RealClock:
    """Monotonic time of this machine. Stateless: any thread and any event loop may use it."""

    def now(self) -> float:
        """Seconds on a monotonic axis; only differences mean anything."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since the Unix epoch."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """Let `seconds` pass."""
        await asyncio.sleep(seconds)

    async def wait_for(self, awaitable: Awaitable[T], timeout_s: float, waiting_for: str) -> T:
        """The awaitable's result. Raises DeadlineExceededError after `timeout_s`, when the awaitable has been cancelled."""
        return await _wait_for(awaitable, timeout_s, waiting_for)


@final
class VirtualClock:
    """Time that stands still while anything can run, and jumps to the next timer when nothing can.

    `run` executes a coroutine on an event loop of its own whose timers, and therefore all asyncio timeouts, follow this clock. Time goes on
    from one `run` to the next. Work handed to a thread by `loop.run_in_executor` holds time still until it is done, but for at most
    `patience_s` real seconds a call, so that a thread that hangs meets its virtual deadline.

    Owner of the time: the thread in `run`. `now` and `wall` may be read from any thread.
    """

    def __init__(self, *, epoch_s: float = 1_700_000_000.0, patience_s: float = 5.0) -> None:
        """epoch_s: what `wall` shows at the start, Unix seconds. patience_s: real seconds, > 0."""
        self._now = 0.0
        self._epoch_s = epoch_s
        self._patience_s = patience_s

    def now(self) -> float:
        """Virtual seconds since the clock was made."""
        return self._now

    def wall(self) -> float:
        """Virtual seconds since the Unix epoch."""
        return self._epoch_s + self._now

    async def sleep(self, seconds: float) -> None:
        """Let `seconds` of virtual time pass."""
        await asyncio.sleep(seconds)

    async def wait_for(self, awaitable: Awaitable[T], timeout_s: float, waiting_for: str) -> T:
        """The awaitable's result. Raises DeadlineExceededError after `timeout_s`, when the awaitable has been cancelled."""
        return await _wait_for(awaitable, timeout_s, waiting_for)

    def advance(self, seconds: float) -> None:
        """Move time on by `seconds` >= 0, between runs."""
        assert seconds >= 0
        self._now += seconds

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. Raises RuntimeError when nothing can ever happen again: a deadlock."""
        with asyncio.Runner(loop_factory=lambda: _VirtualLoop(self, self._patience_s)) as runner:
            return runner.run(main)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: VirtualClock, patience_s: float) -> None:
        self._clock = clock
        self._patience_s = patience_s
        self._held_until: dict[asyncio.Future[Any], float] = {}
        super().__init__(_JumpingSelector(clock, self._real_seconds_held, patience_s))

    def time(self) -> float:
        return self._clock.now()

    def run_in_executor(self, executor: Executor | None, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        future: asyncio.Future[T] = super().run_in_executor(executor, func, *args)
        self._held_until[future] = time.monotonic() + self._patience_s
        future.add_done_callback(lambda done: self._held_until.pop(done, None))
        return future

    def _real_seconds_held(self) -> float:
        return max(self._held_until.values(), default=0.0) - time.monotonic()


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that, asked to wait with nothing ready, lets virtual time jump instead."""

    def __init__(self, clock: VirtualClock, real_seconds_held: Callable[[], float], patience_s: float) -> None:
        super().__init__()
        self._clock = clock
        self._real_seconds_held = real_seconds_held
        self._patience_s = patience_s

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events or timeout == 0:
            return events
        while (held_s := self._real_seconds_held()) > 0:
            if events := super().select(held_s):
                return events
        if timeout is None:
            if events := super().select(self._patience_s):
                return events
            raise RuntimeError("virtual time is stuck: every task waits, no timer is set, and no thread works")
        self._clock.advance(max(timeout, 0.0))
        return []
