"""One device thread for sampler and learner on a shared device: it alternates their dispatches by deficit, and never idles while one has work.

        sampler.step() ──┐
                         ├── device thread: the stage that has had less of its share goes next
        learner.step() ──┘

Each step is one device program (some decode steps, one prefill, or one phase of a microbatch), so a stage waits for the other at most one step.
What must happen between two steps (a publish, say) is a `call`. The thread sleeps on a condition and is woken by whoever brings work; nothing polls.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, final

from noria.errors import StageStoppedError
from noria.protocols import Clock

log = logging.getLogger(__name__)

T = TypeVar("T")


class Stage(Protocol):
    """What runs on a device: synchronous steps, called by the device thread only."""

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something. Cheap; any thread."""

    def step(self) -> bool:
        """Run one dispatch; returns whether it did anything. An exception means that the stage has failed."""

    def fail(self, error: BaseException) -> None:
        """Fail everything that is queued or running with `error`; the stage takes no more work."""


@dataclass(slots=True)
class _Account:
    stage: Stage
    share: float
    used: float = 0.0
    is_failed: bool = False


@final
class SharedDevice:
    """Owns the device thread. `shares`: stage name -> share of the device when all stages have work; they add up to at most 1.

    long_steps counts steps over max_stall_s: what exceeds the promised stall is not hidden.
    """

    def __init__(self, stages: Mapping[str, Stage], shares: Mapping[str, float], clock: Clock, max_stall_s: float) -> None:
        assert sum(shares.values()) <= 1 + 1e-9, "shares of one device add up to at most 1"
        self._accounts = {name: _Account(stage, shares[name]) for name, stage in stages.items()}
        self._clock = clock
        self._max_stall_s = max_stall_s
        self._condition = threading.Condition()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._is_stopping = False
        self._on_failure: Callable[[str, BaseException], None] = lambda _name, _error: None
        self.long_steps: dict[str, int] = dict.fromkeys(stages, 0)
        self._thread = threading.Thread(target=self._run, name="noria-device", daemon=True)

    def start(self, on_failure: Callable[[str, BaseException], None]) -> None:
        """Start the thread. on_failure(stage name, error) is called on it once for a stage whose step raised."""
        self._on_failure = on_failure
        self._thread.start()

    def wake(self) -> None:
        """Work has arrived. Any thread."""
        with self._condition:
            self._condition.notify()

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Run `function` on the device thread before its next step; the future has its result or what it raised. Any thread.

        Raises StageStoppedError once the device is stopping.
        """
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # who stops waiting does not undo the call: from here on it cannot be cancelled
        with self._condition:
            if self._is_stopping:
                raise StageStoppedError("the device is shutting down")
            self._calls.append((function, future))
            self._condition.notify()
        return future

    def stop(self, timeout_s: float) -> bool:
        """Finish the running step, end the thread. Returns whether it ended in time."""
        with self._condition:
            self._is_stopping = True
            self._condition.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        was_active: set[str] = set()
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._is_stopping or self._calls or self._any_work())
                calls, self._calls = self._calls, deque()
                is_stopping = self._is_stopping
            for function, future in calls:
                _run_call(function, future)
            if is_stopping:
                return
            active = {name for name, account in self._accounts.items() if not account.is_failed and account.stage.has_work}
            self._credit_newcomers(active, was_active)
            was_active = active
            if active:
                self._step(min(active, key=lambda name: (self._accounts[name].used, name)))

    def _any_work(self) -> bool:
        return any(not account.is_failed and account.stage.has_work for account in self._accounts.values())

    def _credit_newcomers(self, active: set[str], was_active: set[str]) -> None:
        """A stage that was idle starts level with the least served active one: idling earns no credit."""
        level = min((self._accounts[name].used for name in active & was_active), default=None)
        for name in active - was_active:
            if level is not None:
                self._accounts[name].used = max(self._accounts[name].used, level)

    def _step(self, name: str) -> None:
        account = self._accounts[name]
        start = self._clock.now()
        try:
            account.stage.step()
        except Exception as error:  # the thread outlives a failed stage: its work fails with the cause, the others go on
            log.exception("stage %s failed", name)
            account.is_failed = True
            account.stage.fail(error)
            self._on_failure(name, error)
        elapsed = self._clock.now() - start
        account.used += elapsed / account.share
        if elapsed > self._max_stall_s:
            self.long_steps[name] += 1


def _run_call(function: Callable[[], Any], future: "Future[Any]") -> None:
    try:
        result = function()
    except Exception as error:  # noqa: BLE001 - the caller's failure, handed back to it
        future.set_exception(error)
    else:
        future.set_result(result)
