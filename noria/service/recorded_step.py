"""One recorded optimizer step taken again, offline: from the files of the version before it and the recorded batch, by the code that took it.

    version V - 1 on disk ──┐
                            ├──▶ pieces ──▶ learner ──▶ adapter and moments ──▶ checksums, compared with those of version V
    recorded batch of V ────┘        └────▶ score, cotangents, pull: what each entry and each module had to do with it

On one machine, with the same server file, the checksums are equal bit for bit (design section 6). Nothing in the state folder is changed.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from noria.adapters.versions import VersionFiles
from noria.clock import RealClock
from noria.config import RunConfig, ServerConfig
from noria.errors import ConfigError, StateConflictError, UnknownVersionError
from noria.learner.learner import Learner, RunSpec, StepResult
from noria.learner.optimizer import empty_state, load_slot
from noria.learner.step import loss_cotangents, loss_inputs, pull, score, to_device
from noria.model.config import ModelConfig
from noria.model.lora import AdapterState, HostAdapter
from noria.model.placement import BaseParams, base_dtype, place
from noria.model.weights import LoadedBase, load_base
from noria.observe import SpanRecorder
from noria.protocols import Tokenizer
from noria.rl.losses import MAX_LOG_RATIO, loss_table
from noria.rl.packing import MicrobatchPlan, PlannedPiece, microbatch_shape, pack, shapes_up_to
from noria.service.archive import Archive, open_archive
from noria.service.batch import prepare
from noria.service.folder import recorded_server
from noria.service.store import VersionRow
from noria.service.supervised import SUPERVISED_LOSS, load_examples, prepare_examples
from noria.types import AdapterVersion, FloatArray, IntArray, LossSpec, OptimizerSpec, Piece

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EntryTable:
    """Every entry of the step, in the order of its pieces, all [M].

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


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A step's inputs: the state before it, its batch, and how it trained."""

    row: VersionRow
    before: AdapterState
    pieces: tuple[Piece, ...]
    num_groups: int
    loss: LossSpec
    optimizer: OptimizerSpec


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
        before = _state_before(archive, config, version, server.learner.max_rank)
        base = load_base(config.base)
        step = _recorded(archive, config, row, before, server=server, base=base, folder=folder)
    return _retake(config, step, server, base)


def _state_before(archive: Archive, config: RunConfig, version: int, max_rank: int) -> AdapterState:
    if version < 1:
        raise UnknownVersionError(f"version {version} was made by no optimizer step; name one from 1 on")
    try:
        return archive.files.load(archive.version(config.name, str(version - 1)).record, max_rank)
    except UnknownVersionError as error:
        raise UnknownVersionError(
            f"the step to version {version} begins at version {version - 1}, whose files are gone: {error}. "
            "A server keeps its keep_versions newest: raise keep_versions in the server file before the run, and its steps can be taken again"
        ) from error


def _recorded(
    archive: Archive, config: RunConfig, row: VersionRow, before: AdapterState, *, server: ServerConfig, base: LoadedBase, folder: Path
) -> _Recorded:
    version, shape = row.record.version, microbatch_shape(server.learner.max_positions)
    if version <= config.num_supervised_steps:
        recorded = archive.run(config.name).examples_sha256
        examples = load_examples(config, base.tokenizer, base.chat, folder=folder, shape=shape, sha256=recorded).examples
        supervised = prepare_examples(examples, config, version, shape)
        return _Recorded(row, before, supervised.pieces, supervised.num_examples, SUPERVISED_LOSS, config.supervised_optimizer)
    settled = archive.settled(config.name, trained_version=version)
    if not settled:
        raise StateConflictError(f"no group of run {config.name} is recorded as trained by the step to version {version}")
    batch = prepare([each.group for each in settled], config.algorithm, shape)
    return _Recorded(row, before, batch.pieces, len(settled), config.algorithm.loss, config.optimizer)


def _retake(config: RunConfig, step: _Recorded, server: ServerConfig, base: LoadedBase) -> RetakenStep:
    params = place(base.params, jnp.dtype(base_dtype() if server.dtype == "auto" else server.dtype))
    entries, grad_norms = _look_at(config, step, server, base.config, params)
    result = _train(config, step, server, base.config, params)
    with TemporaryDirectory() as scratch:  # by the code that wrote the recorded version, so that nothing else can differ
        retaken = VersionFiles(Path(scratch)).write(config.name, step.row.record.version, result.state, config.adapter.rank)
    return RetakenStep(
        config=config,
        recorded=step.row,
        loss=step.loss.kind,
        num_groups=step.num_groups,
        num_positions=sum(len(piece.ids_T) for piece in step.pieces),
        entries=entries,
        grad_norms=grad_norms,
        result=result,
        retaken=retaken,
        tokenizer=base.tokenizer,
    )


def _train(config: RunConfig, step: _Recorded, server: ServerConfig, model: ModelConfig, params: BaseParams) -> StepResult:
    """The step, by the learner itself."""
    clock = RealClock()
    spans = SpanRecorder(clock)
    learner = Learner(params.stacked, model, server.learner, spans=spans, clock=clock, wake=lambda: None, max_stall_s=server.max_stall_ms / 1000)

    def finish(future: "Future[T]") -> T:
        while learner.has_work:
            learner.step()
        return future.result()

    spec = RunSpec(config.name, config.adapter.lora, config.optimizer, config.algorithm.loss)
    finish(learner.load_run(spec, step.before))
    return finish(learner.train(config.name, step.pieces, loss=step.loss, optimizer=step.optimizer))


def _look_at(config: RunConfig, step: _Recorded, server: ServerConfig, model: ModelConfig, params: BaseParams) -> tuple[EntryTable, dict[str, float]]:
    """The step's entries, and the norm of its gradient by module, one piece after another in a slot of their own."""
    state = load_slot(empty_state(model, server.learner.num_slots, server.learner.max_rank), 0, step.before)
    scale_A = np.zeros(server.learner.num_slots, np.float32)
    scale_A[0] = config.adapter.lora.scale
    scales, losses, gradient = jnp.asarray(scale_A), loss_table({0: step.loss}, server.learner.num_slots), state.gradient
    shapes = shapes_up_to(server.learner.max_positions)
    tables: list[dict[str, npt.NDArray[Any]]] = []
    for index, piece in enumerate(step.pieces):
        shape = next(shape for shape in shapes if shape.holds(piece.num_tiles, len(piece.entries)))
        microbatch = pack(MicrobatchPlan(shape, (PlannedPiece(config.name, 0, index, piece),)))
        arrays = to_device(microbatch)
        outputs, residuals = score(params.stacked, state.params, scales, arrays, model)
        cotangent_M, _ = loss_cotangents(outputs, loss_inputs(microbatch), losses)
        tables.append(_columns(piece, np.asarray(outputs.learner_logprobs_M), np.asarray(cotangent_M)))
        gradient = pull(params.stacked, state.params, scales, arrays, residuals, cotangent_M=cotangent_M, accumulators=gradient, config=model)
    columns = {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
    return EntryTable(**columns), _norms(jax.tree.map(lambda leaf: np.asarray(leaf)[:, 0], gradient))


def _columns(piece: Piece, learner_logprobs_M: FloatArray, cotangent_M: FloatArray) -> dict[str, npt.NDArray[Any]]:
    entries, count = piece.entries, len(piece.entries)
    return {
        "target_M": entries.target_M,
        "depth_M": piece.depth_T[entries.predict_from_M],
        "sequence_M": entries.sequence_M,
        "behavior_logprobs_M": entries.behavior_logprobs_M,
        "learner_logprobs_M": learner_logprobs_M[:count],
        "advantage_M": entries.advantage_M,
        "weight_M": entries.weight_M,
        "cotangent_M": cotangent_M[:count],
    }


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
