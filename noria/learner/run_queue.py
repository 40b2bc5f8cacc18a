"""One run's operations on their way: in the order of submission, each with its future.

    head ──▶ fb  fb  forward | optim_step | fb | optim_step | save
             └─ leading jobs ┘ barrier

Jobs that lead the queue may share microbatches; a barrier is executed when it is the head. Operations that were submitted as one (`Learner.train`)
fail as one. Deliberately not here: the device, and other runs.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, final

from noria.learner.executors import Job, Owners
from noria.learner.inbox import fail_future
from noria.learner.operations import Barrier, Forward, ForwardBackward, Operation, RunSpec
from noria.learner.queue import Offer
from noria.types import Piece

LEADING_JOBS: Final = 4
"""Most jobs of one run in a microbatch, so that its table of losses has a fixed number of rows."""

BARRIERS_AT_ONCE: Final = 4
"""Barriers right behind a job that do not wait for the run's turn: they cost milliseconds, and the batch is not done without them. Not more, or a run
could fill the device with them."""


@dataclass(slots=True)
class Item:
    """A submitted operation. group: the same number for operations that fail together."""

    operation: Operation
    future: "Future[Any]"
    group: int
    job: Job | None = None


@final
class RunQueue:
    """Owned by the learner; touched by the device thread only. num_steps: optimizer steps of the run's adapter, all barriers so far included."""

    def __init__(self, spec: RunSpec, num_steps: int) -> None:
        self.spec, self.num_steps = spec, num_steps
        self._items: deque[Item] = deque()
        self._barriers_at_once = 0

    def __len__(self) -> int:
        return len(self._items)

    def append(self, operations: Sequence[Operation], futures: Sequence["Future[Any]"], group: int) -> None:
        """Operations behind all that are queued."""
        self._items.extend(Item(operation, future, group) for operation, future in zip(operations, futures, strict=True))

    @property
    def job(self) -> Job | None:
        """The head as a job; None if it is a barrier."""
        return self._job(self._items[0])

    @property
    def barrier(self) -> Barrier | None:
        """The head, if it is a barrier."""
        operation = self._items[0].operation
        return None if isinstance(operation, Forward | ForwardBackward) else operation

    @property
    def is_due(self) -> bool:
        """Whether the head is a barrier that need not wait for the run's turn."""
        return self._barriers_at_once > 0 and bool(self._items) and self.barrier is not None

    def offer(self, rank_class: int, *, most: int) -> tuple[Offer, Owners] | None:
        """What the leading jobs have ready for one microbatch, and whose part each piece is. None if the head needs something else.

        most: pieces that a microbatch can hold.
        """
        mode, pieces, owners = None, list[Piece](), list[tuple[Job, int]]()
        for item in list(self._items)[:LEADING_JOBS]:
            job = self._job(item)
            if job is None or job.mode is None or job.batch.walk is not None or mode not in (None, job.mode) or len(pieces) >= most:
                break
            mode = job.mode
            for part in range(job.next_part, min(len(job.batch.parts), job.next_part + most - len(pieces))):
                pieces.append(job.batch.parts[part])
                owners.append((job, part))
        return None if mode is None else (Offer(self.spec.run_id, rank_class, mode, pieces), owners)

    def settle(self) -> bool:
        """Complete the futures of jobs that are done; whether there were any."""
        has_settled = False
        while self._items and (job := self._items[0].job) is not None and job.phase is None:
            self.finish_head(job.result())
            self._barriers_at_once = BARRIERS_AT_ONCE
            has_settled = True
        return has_settled

    def finish_head(self, result: Any) -> None:
        """The head is done."""
        item = self._items.popleft()  # it is gone before anybody hears of it
        if item.job is None:
            self._barriers_at_once -= 1
        if not item.future.done():
            item.future.set_result(result)

    def fail_head(self, error: BaseException) -> None:
        """The head has failed, and with it what was submitted together with it."""
        group = self._items[0].group
        failed = [item for item in self._items if item.group == group]
        self._items = deque(item for item in self._items if item.group != group)
        for item in failed:
            fail_future(item.future, error)

    def fail(self, error: BaseException) -> None:
        """All operations fail."""
        failed, self._items = self._items, deque()
        for item in failed:
            fail_future(item.future, error)

    def _job(self, item: Item) -> Job | None:
        if item.job is None and isinstance(item.operation, Forward | ForwardBackward):
            item.job = Job(item.operation, num_steps=self.num_steps)
        return item.job
