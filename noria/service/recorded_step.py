"""One recorded optimizer step taken again, offline: from the files of the version before it and the recorded batch, by the code that took it.

    version V - 1 on disk ──┐
                            ├──▶ pieces ──▶ learner ──▶ adapter and moments ──▶ checksums, compared with those of version V
    recorded batch of V ────┘        └────▶ outputs, cotangents, gradient: what each entry and each module had to do with it

On one machine, with the same server file, the checksums are equal bit for bit (design section 6). Nothing in the state folder is changed.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias, TypeVar

import jax.numpy as jnp
import numpy as np

from noria.adapters.versions import VersionFiles
from noria.clock import RealClock
from noria.config import RunConfig, ServerConfig
from noria.errors import ConfigError, StateConflictError, UnknownVersionError
from noria.learner.batches import BatchPlanner, PlannedBatch
from noria.learner.learner import Learner
from noria.learner.operations import BatchResult, RunSpec, StepResult
from noria.model.lora import AdapterState, HostAdapter
from noria.model.placement import base_dtype, place
from noria.model.weights import LoadedBase, load_base
from noria.observe import SpanRecorder
from noria.protocols import Tokenizer
from noria.rl.corrections import MAX_LOG_RATIO
from noria.service.archive import Archive, open_archive
from noria.service.batch import Scored, ask, draft, prepare, step_optimizer
from noria.service.folder import recorded_server
from noria.service.store import VersionRow
from noria.service.supervised import SUPERVISED_LOSS, load_examples, prepare_examples
from noria.types import AdapterVersion, FloatArray, IntArray, LossSpec, OptimizerSpec

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EntryTable:
    """Every entry of the step, in the order of its batch, all [M].

    target_M: the token. depth_M: the RoPE position that predicts it. sequence_M: its sequence in the batch. behavior_logprobs_M: 0 in a supervised
    phase. cotangent_M: the gradient of the loss with respect to the learner's log-probability.
    """

    target_M: IntArray
    depth_M: IntArray
    sequence_M: IntArray
    behavior_logprobs_M: FloatArray
    learner_logprobs_M: FloatArray
    advantage_M: FloatArray
    weight_M: FloatArray
    cotangent_M: FloatArray

    @property
    def ratio_M(self) -> FloatArray:
        """exp(learner - behavior)."""
        log_ratio_M = np.clip(self.learner_logprobs_M - self.behavior_logprobs_M, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio_M: FloatArray = np.exp(log_ratio_M)
        return ratio_M


@dataclass(frozen=True, slots=True)
class RetakenStep:
    """A step taken again. loss: its kind. grad_norms: by module, of A and B together. recorded: its version's row; retaken: the record now."""

    config: RunConfig
    recorded: VersionRow
    loss: str
    num_groups: int
    num_positions: int
    entries: EntryTable
    grad_norms: Mapping[str, float]
    result: StepResult
    retaken: AdapterVersion
    tokenizer: Tokenizer

    @property
    def is_equal(self) -> bool:
        """Adapter and moments are, bit for bit, the recorded ones."""
        return self.retaken == self.recorded.record


_Prepared: TypeAlias = tuple[PlannedBatch, OptimizerSpec]
_Ask: TypeAlias = Callable[[PlannedBatch], Scored]


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A step's inputs: the state before it, and how it trained. prepare: its batch and optimizer, once the learner has answered what it asks."""

    row: VersionRow
    before: AdapterState
    num_groups: int
    loss: LossSpec
    prepare: Callable[[_Ask], _Prepared]


def retake(state_dir: Path, name: str, version: int, *, server: ServerConfig | None = None, folder: Path = Path()) -> RetakenStep:
    """Take the step to `version` of a run again.

    server: None for the settings of the folder's newest server. folder: where the run file lies, for the examples of a supervised phase.

    Raises StateConflictError (no such run; its episodes were not kept; the file of its examples is another than it was started with),
    UnknownVersionError (no such version; the files of the one before it are gone), ConfigError (no server settings), AdapterFileCorruptError,
    DatasetError, and what loading the base raises.
    """
    with open_archive(state_dir) as archive:
        config, row = archive.run(name).config, archive.version(name, str(version))
        server = server or recorded_server(state_dir)
        if server is None:
            raise ConfigError(f"{state_dir} does not say how its server was configured: pass its file with --server-config")
        before = _state_before(archive, config, version, server.learner.class_of(config.adapter.rank))
        base = load_base(config.base)
        learner = _learner(server, base)
        step = _recorded(archive, config, row, before, planner=learner.planner, base=base, folder=folder)
    return _retake(config, step, learner, base)


def _state_before(archive: Archive, config: RunConfig, version: int, width: int) -> AdapterState:
    if version < 1:
        raise UnknownVersionError(f"version {version} was made by no optimizer step; name one from 1 on")
    try:
        return archive.files.load(archive.version(config.name, str(version - 1)).record, width)
    except UnknownVersionError as error:
        raise UnknownVersionError(
            f"the step to version {version} begins at version {version - 1}, whose files are gone: {error}. "
            "A server keeps its keep_versions newest: raise keep_versions in the server file before the run, and its steps can be taken again"
        ) from error


def _recorded(
    archive: Archive, config: RunConfig, row: VersionRow, before: AdapterState, *, planner: BatchPlanner, base: LoadedBase, folder: Path
) -> _Recorded:
    version, algorithm = row.record.version, config.algorithm
    if version <= config.num_supervised_steps:
        recorded = archive.run(config.name).examples_sha256
        examples = load_examples(config, base.tokenizer, base.chat, folder=folder, max_positions=planner.longest, sha256=recorded).examples
        supervised = prepare_examples(examples, config, version, planner)
        planned = supervised.planned, config.supervised_optimizer
        return _Recorded(row, before, supervised.num_examples, SUPERVISED_LOSS, lambda _: planned)
    settled = archive.settled(config.name, trained_version=version)
    if not settled:
        raise StateConflictError(f"no group of run {config.name} is recorded as trained by the step to version {version}")
    groups = [each.group for each in settled]

    def prepared(answer: _Ask) -> _Prepared:
        drafted = draft(groups, algorithm, planner)
        batch = prepare(groups, algorithm, planner, scored=None if drafted is None else answer(drafted))
        return batch.planned, step_optimizer(batch, config, version - 1)

    return _Recorded(row, before, len(settled), algorithm.loss_spec, prepared)


def _learner(server: ServerConfig, base: LoadedBase) -> Learner:
    params, clock = place(base.params, jnp.dtype(base_dtype() if server.dtype == "auto" else server.dtype)), RealClock()
    settings, max_stall_s = server.learner, server.max_stall_ms / 1000
    return Learner(params.stacked, base.config, settings, spans=SpanRecorder(clock), clock=clock, wake=lambda: None, max_stall_s=max_stall_s)


def _retake(config: RunConfig, step: _Recorded, learner: Learner, base: LoadedBase) -> RetakenStep:
    planned, batch, gradient, result = _take(config, step, learner)
    with TemporaryDirectory() as scratch:  # by the code that wrote the recorded version, so that nothing else can differ
        retaken = VersionFiles(Path(scratch)).write(config.name, step.row.record.version, result.state, config.adapter.rank)
    return RetakenStep(
        config=config,
        recorded=step.row,
        loss=step.loss.kind,
        num_groups=step.num_groups,
        num_positions=result.num_positions,
        entries=_table(planned, batch),
        grad_norms=_norms(gradient),
        result=result,
        retaken=retaken,
        tokenizer=base.tokenizer,
    )


def _take(config: RunConfig, step: _Recorded, learner: Learner) -> tuple[PlannedBatch, BatchResult, HostAdapter, StepResult]:
    """The step, by the learner itself: its batch, what that came to, its gradient, its result."""
    name = config.name

    def finish(future: "Future[T]") -> T:
        while learner.has_work:
            learner.step()
        return future.result()

    finish(learner.load_run(RunSpec(name, config.lora, config.optimizer, config.algorithm.loss_spec), step.before))
    planned, optimizer = step.prepare(lambda drafted: Scored(drafted, [finish(each) for each in ask(learner, name, drafted, config.algorithm)]))
    batch = finish(learner.forward_backward(name, planned, step.loss))
    gradient = finish(learner.pending_gradient(name))
    optim, state = finish(learner.optim_step(name, optimizer)), finish(learner.save(name))
    sizes, device_s = (batch.num_positions, batch.num_entries), batch.device_s + optim.device_s
    return planned, batch, gradient, StepResult(name, state, optim.grad_norm, optim.learning_rate, batch.metrics, *sizes, device_s)


def _table(batch: PlannedBatch, result: BatchResult) -> EntryTable:
    entries = batch.entries
    depth_M = np.zeros(len(entries), np.int32)
    for part, place_M in zip(batch.parts, batch.places, strict=True):
        depth_M[place_M] = part.depth_T[part.entries.predict_from_M]
    return EntryTable(
        target_M=entries.target_M,
        depth_M=depth_M,
        sequence_M=entries.sequence_M,
        behavior_logprobs_M=entries.behavior_logprobs_M,
        learner_logprobs_M=result.outputs.learner_logprobs_M,
        advantage_M=entries.advantage_M,
        weight_M=entries.weight_M,
        cotangent_M=result.cotangents.learner_logprobs_M,
    )


def _norms(gradient: HostAdapter) -> dict[str, float]:
    """Of each module, over all layers, of both factors."""
    squares: dict[str, float] = {}
    for leaves in gradient.values():
        for module, leaf in leaves.items():
            squares[module] = squares.get(module, 0.0) + float(np.sum(np.square(leaf, dtype=np.float64)))
    return {module: float(np.sqrt(square)) for module, square in squares.items()}


def summary_of(values_M: FloatArray) -> dict[str, float]:
    """Mean, extremes and quartiles of one column; empty for none."""
    if not len(values_M):
        return {}
    names: Sequence[str] = ("min", "p25", "median", "p75", "max")
    return {"mean": float(values_M.mean()), **{n: float(v) for n, v in zip(names, np.quantile(values_M, (0, 0.25, 0.5, 0.75, 1)), strict=True)}}
