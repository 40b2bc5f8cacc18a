"""What a call of the learner asks for, on its way from any thread to the run's queue; and three futures as one. Plain Python."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias

from noria.learner.batches import PlannedBatch
from noria.learner.inbox import fail_future
from noria.learner.operations import Operation, RunSpec, StepResult
from noria.types import Piece, TokenTree

AnyBatch: TypeAlias = PlannedBatch | TokenTree | Sequence[Piece]
"""A batch: planned (`Learner.planner`), a tree, or pieces cut for this learner's largest microbatch."""


@dataclass(frozen=True, slots=True)
class Submission:
    """What a caller has asked for. operations: of the run's spec and the planned batch. is_part_of_step: the next step is not taken without it."""

    run_id: str
    operations: Callable[[RunSpec, Any], Sequence[Operation]]
    seq: int | None
    batch: AnyBatch | None = None
    num_operations: int = 1
    is_part_of_step: bool = False


def as_step(run_id: str, parts: Sequence["Future[Any]"]) -> "Future[StepResult]":
    """A future of the three as one result, or of what the first failure was."""
    whole: Future[StepResult] = Future()
    whole.set_running_or_notify_cancel()

    def fail(part: "Future[Any]") -> None:
        if (error := part.exception()) is not None:
            fail_future(whole, error)

    def finish(saved: "Future[Any]") -> None:
        if saved.exception() is None:
            batch, optim = parts[0].result(), parts[1].result()
            device_s = batch.device_s + optim.device_s
            rates = optim.grad_norm, optim.learning_rate
            whole.set_result(StepResult(run_id, saved.result(), *rates, batch.metrics, batch.num_positions, batch.num_entries, device_s))

    for part in parts:
        part.add_done_callback(fail)
    parts[-1].add_done_callback(finish)
    return whole
