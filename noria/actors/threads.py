"""Threads for tenant code that may never come back: a hung call costs its run a thread, and never the event loop, other runs, or the process's exit.

Python cannot stop a thread. So a hung call's thread is given up: it no longer counts, another may take its place, and if its call does return
one day it ends. How many threads a run may lose is bounded. Deliberately not concurrent.futures.ThreadPoolExecutor, whose threads are joined at exit.
"""

import asyncio
import inspect
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar, cast, final

from noria.errors import EnvironmentFailedError, EnvironmentOutputError, RewardNotFiniteError, StageStoppedError

T = TypeVar("T")


@final
class HungThreads:
    """How many threads each run has lost to calls that were given up and still run. Callable from any thread."""

    def __init__(self, *, max_per_run: int = 64, max_in_all: int = 256) -> None:
        """max_per_run: so many lost threads, and the run's calls are refused. max_in_all: so many, and those of every run that lost any are."""
        self._max_per_run = max_per_run
        self._max_in_all = max_in_all
        self._lock = threading.Lock()
        self._by_run: Counter[str] = Counter()

    @property
    def num_hung(self) -> int:
        """Of all runs."""
        with self._lock:
            return self._by_run.total()

    def lose(self, run_id: str) -> None:
        """A thread of the run was given up."""
        with self._lock:
            self._by_run[run_id] += 1

    def regain(self, run_id: str) -> None:
        """One that was given up has come back."""
        with self._lock:
            self._by_run[run_id] -= 1
            self._by_run += Counter()  # keeps positive counts only

    def check(self, run_id: str) -> None:
        """Raises EnvironmentFailedError if the run must not begin another call. A run that has lost no thread may always."""
        with self._lock:
            own, in_all = self._by_run[run_id], self._by_run.total()
        if own >= self._max_per_run or (own > 0 and in_all >= self._max_in_all):
            raise EnvironmentFailedError(
                f"environment calls of run {run_id} hang in {own} threads, which cannot be stopped; repair the environment and restart the actors"
            )


@final
class AbandonableThreads(Executor):
    """Daemon threads, started when needed. All state is under one condition; `submit` and `shutdown` may be called from any thread."""

    def __init__(self, max_threads: int, hung: HungThreads) -> None:
        """max_threads: calls at one time, >= 1; those given up do not count. hung: counts them, and bounds them."""
        self._max_threads = max_threads
        self._hung = hung
        self._changed = threading.Condition()
        self._waiting: deque[_Call] = deque()
        self._num_idle = 0
        self._num_threads = 0
        self._is_closed = False

    async def call(self, run_id: str, what: str, function: Callable[..., T], *args: Any) -> T:
        """The result of a run's `function(*args)`, run in a thread. Cancelling the call gives its thread up. what: names the call in errors.

        Raises EnvironmentFailedError or EnvironmentOutputError with whatever the function raised as its cause; EnvironmentFailedError when too many
        of the run's calls hang; StageStoppedError after `shutdown`.
        """
        return await self.run(run_id, named, what, function, *args)

    async def run(self, run_id: str, function: Callable[..., T], *args: Any) -> T:
        """As `call`, but what the function raises is raised as it is."""
        call = _Call(run_id, function, args)
        try:
            await asyncio.get_running_loop().run_in_executor(self, call)
        except asyncio.CancelledError:
            self._give_up(call)
            raise
        if call.error is not None:
            raise call.error
        return cast(T, call.result)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """For `run` only, by way of `run_in_executor`. Raises as `run`."""
        assert isinstance(fn, _Call), "use `run`"
        with self._changed:
            if self._is_closed:
                raise StageStoppedError("the actors are shutting down; no more environment calls are taken")
            self._hung.check(fn.run_id)
            self._waiting.append(fn)
            self._find_thread()
        return cast("Future[T]", fn.future)

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = True) -> None:
        """Refuse new calls and end idle threads; never waits for running ones. Idempotent."""
        del wait, cancel_futures
        with self._changed:
            self._is_closed = True
            while self._waiting:
                self._waiting.popleft().future.cancel()
            self._changed.notify_all()

    def _find_thread(self) -> None:
        if self._num_idle >= len(self._waiting):
            self._changed.notify()
        elif self._num_threads < self._max_threads:
            self._num_threads += 1
            threading.Thread(target=self._work, name="noria-environment", daemon=True).start()

    def _work(self) -> None:
        while (call := self._next()) is not None:
            call()
            with self._changed:
                call.is_running = False
                if call.is_given_up:
                    self._hung.regain(call.run_id)
                    call.discard()
                    return
            call.future.set_result(None)
            del call  # an idle thread keeps nothing alive

    def _next(self) -> "_Call | None":
        """The next call that somebody still wants; None when there will be no more."""
        with self._changed:
            while True:
                while not self._waiting:
                    if self._is_closed:
                        self._num_threads -= 1
                        return None
                    self._num_idle += 1
                    self._changed.wait()
                    self._num_idle -= 1
                call = self._waiting.popleft()
                if call.future.set_running_or_notify_cancel():
                    call.is_running = True
                    return call

    def _give_up(self, call: "_Call") -> None:
        with self._changed:
            if not call.is_running:
                call.discard()
                return
            call.is_given_up = True
            self._hung.lose(call.run_id)
            self._num_threads -= 1
            if self._waiting:
                self._find_thread()


def named(what: str, function: Callable[..., T], *args: Any) -> T:
    """The result of `function(*args)`; what it raises becomes `failure_of` it."""
    try:
        return function(*args)
    except BaseException as error:  # tenant code
        raise failure_of(what, error) from error


def failure_of(what: str, error: BaseException) -> EnvironmentFailedError | EnvironmentOutputError:
    """The named error for whatever tenant code raised; one that says that an environment failed keeps its own words. Runs tenant code: `__str__`."""
    try:
        words = str(error)
    except BaseException as second:  # noqa: BLE001 - tenant code: the first error is the one to tell
        words = f"(its text cannot be shown: {type(second).__name__})"
    for kind in (RewardNotFiniteError, EnvironmentOutputError, EnvironmentFailedError):
        if isinstance(error, kind):
            return kind(words)
    return EnvironmentFailedError(f"{what} raised {type(error).__name__}: {words}")


@final
class Pending:
    """An answer that is still to be awaited, elsewhere."""

    def __init__(self, awaitable: Awaitable[Any]) -> None:
        self.awaitable = awaitable

    def discard(self) -> None:
        """Nobody will await it: if it is a coroutine that never began, close it, so that Python does not complain of it."""
        if inspect.iscoroutine(self.awaitable) and inspect.getcoroutinestate(self.awaitable) == inspect.CORO_CREATED:
            self.awaitable.close()


@final
class _Call:
    """One call and its outcome. The error is kept, not raised: SystemExit and StopIteration must not travel through futures."""

    def __init__(self, run_id: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.run_id = run_id
        self._function = function
        self._args = args
        self.future: Future[None] = Future()
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_running = False
        self.is_given_up = False

    def __call__(self) -> None:
        try:
            self.result = self._function(*self._args)
        except BaseException as error:  # noqa: BLE001 - whoever waits for the call gets it
            self.error = error

    def discard(self) -> None:
        """Nobody wants the result."""
        if isinstance(self.result, Pending):
            self.result.discard()
