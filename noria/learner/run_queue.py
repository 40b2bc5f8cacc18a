"""One run's operations on their way: in the order of their numbers, or of submission, each with its future.

    head ──▶ fb  fb  forward | optim_step | fb | optim_step | save      early: 7, 9 (6 has not come yet)
             └─ leading jobs ┘ barrier

Jobs that lead the queue may share microbatches; a barrier is executed when it is the head. Operations that were submitted as one (`Learner.train`)
fail as one. Deliberately not here: the device, other runs, and how long one waits for a number that does not come (whoever gave the numbers knows).
"""

from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

from noria.errors import StateConflictError
from noria.learner.executors import Job, Owners
from noria.learner.inbox import fail_future
from noria.learner.operations import Barrier, Forward, ForwardBackward, Load, Operation, OptimStep, Refused, RunSpec
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


class Offered(NamedTuple):
    """What a run has ready for a microbatch, and whose part each piece is."""

    offer: Offer
    owners: Owners


@final
class RunQueue:
    """Owned by the learner; touched by the device thread only. num_steps: optimizer steps of the run's adapter, all barriers so far included.

    lacks: why the pending gradient is not all that was submitted since the last optimizer step; None if it is.
    """

    def __init__(self, spec: RunSpec, num_steps: int) -> None:
        self.spec, self.num_steps = spec, num_steps
        self.lacks: BaseException | None = None
        self._items: deque[Item] = deque()
        self._early: dict[int, list[Item]] = {}
        self._next_seq = spec.first_seq
        self._barriers_at_once = 0

    def __len__(self) -> int:
        return len(self._items)

    def append(self, operations: Sequence[Operation], futures: Sequence["Future[Any]"], group: int, *, seq: int | None = None) -> None:
        """Operations, behind all that are queued. seq: their number; they wait until all smaller ones have come. None: they wait for none.

        Raises StateConflictError: the number has come before.
        """
        items = [Item(operation, future, group) for operation, future in zip(operations, futures, strict=True)]
        if seq is None:
            self._items.extend(items)
            return
        if seq < self._next_seq or seq in self._early:
            raise StateConflictError(
                f"operation {seq} of run {self.spec.run_id} was submitted before; the next new number is {self._next_seq} or later"
            )
        self._early[seq] = items
        while self._next_seq in self._early:
            self._items.extend(self._early.pop(self._next_seq))
            self._next_seq += 1

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

    def offer(self, rank_class: int, *, most: int) -> Offered | None:
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
        return None if mode is None else Offered(Offer(self.spec.run_id, rank_class, mode, pieces), owners)

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
        if isinstance(item.operation, Refused):
            self.lacks = self.lacks or item.operation.error
        if isinstance(item.operation, OptimStep | Load):
            self.lacks = None
        if not item.future.done():
            item.future.set_result(result)

    def fail_head(self, error: BaseException) -> bool:
        """The head, a barrier, has failed, and with it what was submitted together with it. Whether the pending gradient is to be cleared."""
        self._barriers_at_once -= 1
        return self._fail_groups({self._items[0].group}, error)

    def fail_jobs(self, jobs: Collection[Job], error: BaseException) -> bool:
        """These jobs have failed, and with them what was submitted together with them. Whether the pending gradient is to be cleared."""
        return self._fail_groups({item.group for item in self._items if item.job in jobs}, error)

    def fail(self, error: BaseException) -> None:
        """All operations fail."""
        failed = [*self._items, *(item for items in self._early.values() for item in items)]
        self._items, self._early = deque(), {}
        for item in failed:
            fail_future(item.future, error)

    def _fail_groups(self, groups: Collection[int], error: BaseException) -> bool:
        """A gradient that lacks a part is cleared by the step that would have been taken from it, at once if that has failed too."""
        failed = [item for item in self._items if item.group in groups]
        self._items = deque(item for item in self._items if item.group not in groups)
        if any(isinstance(item.operation, OptimStep) for item in failed):
            self.lacks = None
        elif any(isinstance(item.operation, ForwardBackward) for item in failed):
            self.lacks = self.lacks or error
        for item in failed:
            fail_future(item.future, error)
        return any(isinstance(item.operation, OptimStep) for item in failed)

    def _job(self, item: Item) -> Job | None:
        if item.job is None and isinstance(item.operation, Forward | ForwardBackward):
            item.job = Job(item.operation, num_steps=self.num_steps)
        return item.job
