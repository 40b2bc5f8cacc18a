"""Event loops for `async` tenant code: one thread per run, however many of its episodes are under way, and never the event loop of the actors.

    episode ──▶ lend ──▶ the run's current loop ──▶ its calls until the episode ends
                  └────▶ a new one instead, if the current loop has not let go of a call that was given up

So code that blocks where it should await stops its own run's loop and nothing else: calls on that loop meet their deadlines, and episodes that begin
afterwards get another loop. The one that is stuck counts as one hung thread until it lets go, and ends with the last episode that uses it.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, InvalidStateError
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast, final

from noria.actors.threads import AbandonableThreads, HungThreads, Pending, failure_of
from noria.errors import EnvironmentFailedError, StageStoppedError
from noria.observe import log_event

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_THREADS = 32
"""Threads for `asyncio.to_thread` and name look-ups of one loop, as many as asyncio's own at most."""


@final
class EnvironmentLoops:
    """The current loop of each run. Touched by the event loop of the actors only."""

    def __init__(self, hung: HungThreads) -> None:
        self._hung = hung
        self._current: dict[str, EnvironmentLoop] = {}
        self._is_closed = False

    @contextmanager
    def lend(self, run_id: str) -> Iterator["EnvironmentLoop"]:
        """A loop for one episode: all its calls share it. Its thread is started by the first call. Raises StageStoppedError after `shutdown`."""
        if self._is_closed:
            raise StageStoppedError("the actors are shutting down; no more environment calls are taken")
        loop = self._current.get(run_id)
        if loop is None or not loop.is_fit:
            self.forget(run_id)
            loop = self._current[run_id] = EnvironmentLoop(run_id, self._hung)
        with loop.used():
            yield loop

    def forget(self, run_id: str) -> None:
        """Let the run's loop end with the last episode that uses it."""
        if loop := self._current.pop(run_id, None):
            loop.retire()

    def shutdown(self) -> None:
        """Refuse new episodes and let all loops end. Never waits. Idempotent."""
        self._is_closed = True
        for run_id in list(self._current):
            self.forget(run_id)


@final
class EnvironmentLoop(Executor):
    """A daemon thread with an event loop for awaitables of one run. All state is under one lock; tasks are touched by the thread only."""

    def __init__(self, run_id: str, hung: HungThreads) -> None:
        self._run_id = run_id
        self._hung = hung
        self._threads = AbandonableThreads(MAX_THREADS, hung)
        self._lock = threading.Lock()
        self._loop: _TenantLoop | None = None
        self._stop = asyncio.Event()
        self._calls: set[_Awaited] = set()
        self._num_given_up = 0
        self._num_users = 0
        self._is_retired = False
        self._is_ended = False

    @property
    def is_fit(self) -> bool:
        """Whether new episodes should use it: it has let go of every call that was given up, and tenant code has not ended it."""
        return self._num_given_up == 0 and not self._is_ended

    @contextmanager
    def used(self) -> Iterator[None]:
        """Keep the loop until the block ends, even if it is retired meanwhile."""
        self._num_users += 1
        try:
            yield
        finally:
            self._num_users -= 1
            self._end_if_unused()

    def retire(self) -> None:
        """Let the thread end once nobody uses the loop."""
        self._is_retired = True
        self._end_if_unused()

    async def call(self, what: str, check: Callable[[Any], T], pending: Pending) -> T:
        """`check` of what is pending, run on this loop. Cancelling the call gives it up. what: names it in errors.

        Raises as AbandonableThreads.call, and EnvironmentFailedError if tenant code has ended the loop.
        """
        call = _Awaited(what, check, pending)
        try:
            await asyncio.get_running_loop().run_in_executor(self, call)
        except asyncio.CancelledError:
            self._give_up(call)
            raise
        if call.failure is not None:
            raise call.failure from call.cause
        return cast(T, call.result)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """For `call` only, by way of `run_in_executor`. Raises as `call`."""
        assert isinstance(fn, _Awaited), "use `call`"
        try:
            with self._lock:
                self._hung.check(self._run_id)
                if self._is_ended:
                    raise self._ended(fn)
                self._calls.add(fn)
                self._started().call_soon_threadsafe(self._begin, fn)
        except EnvironmentFailedError:
            fn.pending.discard()
            raise
        return cast("Future[T]", fn.future)

    def _started(self) -> "_TenantLoop":
        if self._loop is None:
            self._loop = _TenantLoop(self._run_id, self._threads)
            threading.Thread(target=self._serve, args=(self._loop,), name="noria-environment-loop", daemon=True).start()
        return self._loop

    def _give_up(self, call: "_Awaited") -> None:
        with self._lock:
            if call not in self._calls:
                return
            call.is_given_up = True
            self._num_given_up += 1
            if self._num_given_up == 1:
                self._hung.lose(self._run_id)
            self._post(call.cancel)

    def _post(self, function: Callable[[], object]) -> None:
        if self._loop is not None and not self._is_ended:
            self._loop.call_soon_threadsafe(function)

    def _end_if_unused(self) -> None:
        with self._lock:
            if self._is_retired and self._num_users == 0:
                self._post(self._stop.set)

    def _ended(self, call: "_Awaited") -> EnvironmentFailedError:
        return EnvironmentFailedError(f"{call.what}: the environment's own code has ended the event loop of run {self._run_id}")

    # ---- on the loop's thread ---------------------------------------------------------------------------------------------------------

    def _serve(self, loop: "_TenantLoop") -> None:
        runner = asyncio.Runner(loop_factory=lambda: loop)
        self._contain(lambda: runner.run(self._until_stopped()))
        with self._lock:
            self._is_ended = True
        self._contain(runner.close)
        for call in tuple(self._calls):
            self._finish(call)
        self._threads.shutdown()

    def _contain(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - tenant code, in a task of its own, that wanted to exit or cancelled every task
            log_event(log, logging.WARNING, "environment ended its event loop", run_id=self._run_id, error=type(error).__name__)

    async def _until_stopped(self) -> None:
        await self._stop.wait()

    def _begin(self, call: "_Awaited") -> None:
        if self._is_ended:
            return
        if call.future.set_running_or_notify_cancel():
            call.task = asyncio.ensure_future(call.run())
            call.task.add_done_callback(lambda _: self._finish(call))
        else:
            self._finish(call)

    def _finish(self, call: "_Awaited") -> None:
        with self._lock:
            self._calls.discard(call)
            if call.is_given_up:
                self._num_given_up -= 1
                if self._num_given_up == 0:
                    self._hung.regain(self._run_id)
        call.pending.discard()
        if not call.is_over:
            call.failure = self._ended(call)
        with suppress(InvalidStateError):  # nobody waits any more
            call.future.set_result(None)


@final
class _TenantLoop(asyncio.SelectorEventLoop):
    """A loop whose default executor is made of threads that can be given up: asyncio's own would be waited for when the process exits."""

    def __init__(self, run_id: str, threads: AbandonableThreads) -> None:
        super().__init__()
        self._run_id = run_id
        self._threads = threads

    def run_in_executor(self, executor: Executor | None, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        if executor is not None:
            return super().run_in_executor(executor, func, *args)
        return self.create_task(self._threads.run(self._run_id, func, *args))


@final
class _Awaited:
    """One awaitable of an environment, and its outcome."""

    def __init__(self, what: str, check: Callable[[Any], Any], pending: Pending) -> None:
        self.what, self.check, self.pending = what, check, pending
        self.future: Future[None] = Future()
        self.task: asyncio.Future[None] | None = None
        self.result: Any = None
        self.failure: Exception | None = None
        self.cause: BaseException | None = None
        self.is_over = False
        self.is_given_up = False

    def __call__(self) -> None:
        raise AssertionError("runs on an EnvironmentLoop only")

    async def run(self) -> None:
        try:
            self.result = self.check(await self.pending.awaitable)
        except BaseException as error:  # noqa: BLE001 - tenant code: becomes the episode's recorded failure
            self.failure, self.cause = failure_of(self.what, error), error
        self.is_over = True

    def cancel(self) -> None:
        """Ask its task to end, if it has one: one that never began finds out by itself."""
        if self.task is not None:
            self.task.cancel()
