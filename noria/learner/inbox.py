"""Commands for the device thread, posted by any thread. Plain Python."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, final

from noria.errors import StageStoppedError


@final
class Inbox:
    """Owner of posted commands until they run. `post`: any thread; the rest: the device thread. wake: called after a command has arrived."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._commands: deque[tuple[Callable[[], Any], Sequence[Future[Any]]]] = deque()
        self._failure: BaseException | None = None

    def __len__(self) -> int:
        return len(self._commands)

    def post(self, command: Callable[[], Any], *futures: "Future[Any]") -> "Future[Any]":
        """Run a command before the device's next step; the first of the futures.

        Without futures the command's result is that of a new one; else the command settles them itself, later. What it raises is theirs in any case.
        Once closed, their exception is StageStoppedError.
        """
        settling = futures or (Future(),)
        for future in settling:
            future.set_running_or_notify_cancel()  # who stops waiting does not undo the work: from here on it cannot be cancelled
        with self._lock:
            if self._failure is None:
                self._commands.append((command if futures else lambda: settling[0].set_result(command()), settling))
        if self._failure is not None:
            for future in settling:
                fail_future(future, self.stopped())
        self._wake()
        return settling[0]

    def drain(self, is_intact: Callable[[], bool]) -> bool:
        """Run what was posted; whether there was anything.

        A command that raises fails its own futures and nobody else's, unless it took the device's state with it (not `is_intact`): then this raises.
        """
        did_work = False
        while True:
            with self._lock:
                if not self._commands:
                    return did_work
                command, futures = self._commands.popleft()
            did_work = True
            try:
                command()
            except Exception as error:  # whatever it is, it is this command's failure, recorded in its futures
                for future in futures:
                    fail_future(future, error)
                if not is_intact():  # a device step failed after its inputs were donated
                    raise

    def close(self, failure: BaseException) -> None:
        """Fail what was posted, and all that will be, with StageStoppedError from `failure`."""
        with self._lock:
            self._failure = failure
            waiting = [future for _, futures in self._commands for future in futures]
            self._commands.clear()
        for future in waiting:
            fail_future(future, self.stopped())

    def stopped(self) -> StageStoppedError:
        """What work fails with after `close`."""
        stopped = StageStoppedError(f"the learner has stopped: {self._failure}")
        stopped.__cause__ = self._failure
        return stopped


def fail_future(future: "Future[Any]", error: BaseException) -> None:
    """Its exception, unless it has one, or a result."""
    if not future.done():
        future.set_exception(error)
