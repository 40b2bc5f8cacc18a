"""What a run may ask of the learner: frozen records, queued per run and executed in the order of submission, and what comes of them.

    forward, forward_backward      commute: those at the head of a queue may share microbatches
    optim_step, load, save         barriers: each waits for all before it, and all after it wait for it

An optimizer step is taken from all of the passes submitted since the last one or not at all: if one of them failed, it fails too, the pending
gradient is cleared, and what follows begins anew.

Deliberately not here: how they are executed (`learner/learner.py`), and in which order runs are served (`learner/queue.py`).

    M entry, in the order of its batch (`batches.PlannedBatch`)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from noria.learner.batches import PlannedBatch
from noria.model.lora import AdapterState
from noria.types import FloatArray, LoraSpec, LossSpec, OptimizerSpec


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What the learner knows of a run. optimizer, loss: of its batches that bring none of their own. weight: its fair share relative to others.
    first_seq: number of its first operation, if they are numbered."""

    run_id: str
    lora: LoraSpec
    optimizer: OptimizerSpec
    loss: LossSpec
    weight: float = 1.0
    first_seq: int = 0


@dataclass(frozen=True, slots=True)
class EntryOutputs:
    """One number per entry of a batch, float32 [M]: what the model says of it (`rl.losses.TokenOutputs`), or the cotangents of that."""

    learner_logprobs_M: FloatArray
    entropy_M: FloatArray
    value_M: FloatArray


@dataclass(frozen=True, slots=True)
class Forward:
    """Score a batch. Result: BatchResult; its loss is evaluated, for its metrics.

    of_base: score it with the adapter off, and nothing else: of the outputs there are the log-probabilities alone, and no loss is evaluated.
    """

    batch: PlannedBatch
    loss: LossSpec
    of_base: bool = False


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """Score a batch and add the gradient of its loss to the run's pending gradient. Result: BatchResult.

    cotangents: the derivatives of a loss that the caller has computed himself, by entry, in place of the loss's.
    """

    batch: PlannedBatch
    loss: LossSpec
    cotangents: EntryOutputs | None = None


@dataclass(frozen=True, slots=True)
class OptimStep:
    """One optimizer step from the pending gradient, which is then cleared. Result: OptimResult."""

    optimizer: OptimizerSpec


@dataclass(frozen=True, slots=True)
class Load:
    """Replace the run's parameters, moments and step count; clear its pending gradient. Result: None."""

    state: AdapterState


@dataclass(frozen=True, slots=True)
class Save:
    """Result: the run's AdapterState on the host."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The place of a forward_backward that was refused when it was submitted: the next optimizer step lacks what it would have added."""

    error: BaseException


Pass: TypeAlias = Forward | ForwardBackward
Barrier: TypeAlias = OptimStep | Load | Save | Refused
Operation: TypeAlias = Pass | Barrier


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What came of a forward or forward_backward. outputs; cotangents: of the loss with respect to them, zeros of a forward. metrics: of the loss,
    additive ones already divided by their counts. num_positions, num_entries: of the run's own. device_s: its part of the device's seconds."""

    outputs: EntryOutputs
    cotangents: EntryOutputs
    metrics: Mapping[str, float]
    num_positions: int
    num_entries: int
    device_s: float


@dataclass(frozen=True, slots=True)
class OptimResult:
    """grad_norm: before clipping. learning_rate: used by the step. num_steps: the run's, this one included."""

    grad_norm: float
    learning_rate: float
    num_steps: int
    device_s: float


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step on one batch. state: the run's new state on the host. metrics: of the loss, additive ones already divided by their counts.

    learning_rate: used by it. num_positions, num_entries: of the run's own pieces. device_s: device seconds of its microbatches (shared ones by
    tiles) and its optimizer step.
    """

    run_id: str
    state: AdapterState
    grad_norm: float
    learning_rate: float
    metrics: Mapping[str, float]
    num_positions: int
    num_entries: int
    device_s: float
