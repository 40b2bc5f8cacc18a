"""Threads for tenant code that may never come back: a call that hangs costs its thread, never the event loop, the others, or the process's exit.

Python cannot stop a thread. So a hung call's thread is given up: it no longer counts, another may take its place, and if its call does return
one day it ends. How many may hang at once is bounded. Deliberately not concurrent.futures.ThreadPoolExecutor, whose threads are joined at exit.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar, cast, final

from noria.errors import EnvironmentFailedError, StageStoppedError

T = TypeVar("T")


@final
class AbandonableThreads(Executor):
    """Daemon threads, started when needed. All state is under one condition; `submit` and `shutdown` may be called from any thread."""

    def __init__(self, max_threads: int, *, max_hung: int = 64) -> None:
        """max_threads: calls at one time, >= 1. max_hung: calls given up and still running, beyond which new calls are refused."""
        self._max_threads = max_threads
        self._max_hung = max_hung
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._num_idle = 0
        self._num_threads = 0
        self._num_hung = 0
        self._is_closed = False

    @property
    def num_hung(self) -> int:
        """Calls that were given up and still run."""
        return self._num_hung

    async def call(self, what: str, function: Callable[..., T], *args: Any) -> T:
        """The result of `function(*args)`, run in a thread. Cancelling the call gives its thread up. what: names the call in errors.

        Raises EnvironmentFailedError with whatever the function raised as its cause, or when too many calls hang; StageStoppedError after
        `shutdown`.
        """
        call = _Call(function, args)
        try:
            await asyncio.get_running_loop().run_in_executor(self, call)
        except asyncio.CancelledError:
            self._give_up(call)
            raise
        if call.error is not None:
            raise failure_of(what, call.error) from call.error
        return cast(T, call.result)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run the call as soon as a thread is free. Raises as `call`."""
        future: Future[T] = Future()
        with self._changed:
            if self._is_closed:
                raise StageStoppedError("the actors are shutting down; no more environment calls are taken")
            if self._num_hung >= self._max_hung:
                raise EnvironmentFailedError(
                    f"{self._num_hung} environment calls hang in threads that cannot be stopped; repair the environment and restart the actors"
                )
            self._waiting.append((future, fn if not (args or kwargs) else lambda: fn(*args, **kwargs)))
            self._find_thread()
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = True) -> None:
        """Refuse new calls and end idle threads; never waits for running ones. Idempotent."""
        del wait, cancel_futures
        with self._changed:
            self._is_closed = True
            while self._waiting:
                self._waiting.popleft()[0].cancel()
            self._changed.notify_all()

    def _find_thread(self) -> None:
        if self._num_idle >= len(self._waiting):
            self._changed.notify()
        elif self._num_threads < self._max_threads:
            self._num_threads += 1
            threading.Thread(target=self._work, name="noria-environment", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._is_closed:
                        self._num_threads -= 1
                        return
                    self._num_idle += 1
                    self._changed.wait()
                    self._num_idle -= 1
                future, call = self._waiting.popleft()
                is_wanted = future.set_running_or_notify_cancel()
                if is_wanted and isinstance(call, _Call):
                    call.is_running = True
            if is_wanted:
                _finish(future, call)
            with self._changed:
                if isinstance(call, _Call):
                    call.is_running = False
                    if call.is_given_up:
                        self._num_hung -= 1
                        return

    def _give_up(self, call: "_Call") -> None:
        with self._changed:
            if call.is_running:
                call.is_given_up = True
                self._num_hung += 1
                self._num_threads -= 1
                if self._waiting:
                    self._find_thread()


def failure_of(what: str, error: BaseException) -> EnvironmentFailedError:
    """The named error for whatever tenant code raised; an EnvironmentFailedError keeps its own words."""
    return EnvironmentFailedError(str(error) if isinstance(error, EnvironmentFailedError) else f"{what} raised {type(error).__name__}: {error}")


def _finish(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - the future carries it to the caller
        future.set_exception(error)


@final
class _Call:
    """One call and its outcome. The error is kept, not raised: SystemExit and StopIteration must not travel through futures."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._function = function
        self._args = args
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_running = False
        self.is_given_up = False

    def __call__(self) -> None:
        try:
            self.result = self._function(*self._args)
        except BaseException as error:  # noqa: BLE001 - tenant code: becomes the episode's recorded failure
            self.error = error
