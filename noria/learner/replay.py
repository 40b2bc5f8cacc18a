"""The replay executor: a batch whose tree fits in no microbatch, walked in chunks (`rl/chunks.py`).

        enter   score a chunk, keep only its keys and values: the path grows
        pull    score a chunk, turn its outputs into cotangents, pull: adapters' gradient, and what the chunk owes its path

Alive are the path's keys and values, their gradient, one chunk's activations and the adapters' gradient: no branch but the present one. The loss of
an entry may need all entries of its sequence. Where the plan keeps every sequence in one chunk, each chunk is its own loss's scope and the walk is
made once; else the tree is scored first, chunk by chunk, then the loss sees the whole batch, and the walk only pulls.

One `advance` is one visit, so that decoding and other runs' microbatches go between. Deliberately not here: when to use it (`learner/learner.py`).

    L layer   T position   M entry   K kv head   H head size   S block of a path   C = 64
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from noria.learner.step import (
    Arrays,
    KeysValues,
    Residuals,
    TokenOutputs,
    clear_path,
    extend_path,
    loss_cotangents,
    loss_inputs,
    pull_chunk,
    score_chunk,
    to_device,
)
from noria.model.attention import SPAN, Path
from noria.model.config import ModelConfig
from noria.model.lora import AdapterTree
from noria.rl.chunks import Chunk, ReplayPlan
from noria.rl.losses import LossInputs, LossMetrics, LossTable
from noria.rl.packing import MicrobatchPlan, MicrobatchShape, PlannedPiece, pack
from noria.types import TILE, Entries, FloatArray, IntArray, Microbatch


class Model(NamedTuple):
    """What a visit reads: stacked base weights, the slots' adapters (leaves [L, A, ...]), their scales."""

    params: Mapping[str, Any]
    slots: AdapterTree
    scale_A: jax.Array


@dataclass(slots=True)
class _Buffers:
    """The path's keys and values, and their gradient. Donated and replaced at every visit."""

    path: Path
    gradient: KeysValues

    def at(self, num_blocks: int) -> Path:
        """The path, read up to `num_blocks`."""
        return self.path._replace(num_blocks=jnp.int32(num_blocks))


def path_blocks(plan: ReplayPlan, shape: MicrobatchShape) -> int:
    """The static size S of a path's axis that serves `plan`: room for a whole chunk behind the longest path, rounded up to two significant bits."""
    needed = max((chunk.first_block for chunk in plan.chunks), default=0) + shape.num_tiles
    unit = max(SPAN, 1 << max(0, needed.bit_length() - 2))
    return -(-needed // unit) * unit


def path_bytes(config: ModelConfig, num_blocks: int) -> int:
    """Bytes of a path's keys, values and their gradients, float32."""
    return 2 * num_blocks * TILE * config.kv_bytes_per_position(np.float32)


@final
class Replay:
    """One batch on its walk. Owned by the device thread: `advance` until it returns None."""

    def __init__(self, plan: ReplayPlan, shape: MicrobatchShape, config: ModelConfig, *, slot: int, table: LossTable) -> None:
        """shape: of the chunks, which `plan` was cut for. slot: the run's. table: the losses of all slots, as they are for this batch."""
        self._plan, self._shape, self._config, self._slot, self._table = plan, shape, config, slot, table
        dims = (config.num_layers, path_blocks(plan, shape), config.num_kv_heads, TILE, config.head_dim)
        zeros = (jnp.zeros(dims) for _ in range(4))
        path = Path(next(zeros), next(zeros), jnp.zeros((dims[1], TILE), bool), jnp.int32(0))
        self._buffers = _Buffers(path, (next(zeros), next(zeros)))
        self._cotangent_of: FloatArray | None = None
        self._walk = self._visits()
        self.sums: LossMetrics | None = None
        self.num_visits = 0

    def advance(self, model: Model, accumulators: AdapterTree) -> AdapterTree | None:
        """One visit. accumulators: the adapters' gradients (donated); returned with what the visit added, or None if the walk had ended."""
        self._model, self._accumulators = model, accumulators
        if next(self._walk, None) is None:
            return None
        self.num_visits += 1
        return self._accumulators

    def _visits(self) -> Iterator[bool]:
        plan = self._plan
        if not plan.is_scope_whole:
            yield from self._score_all()
        entered: set[int] = set()
        for visit in plan.visits:
            chunk = plan.chunks[visit.chunk]
            if visit.action == "enter":
                self._enter(chunk)
                entered.add(visit.chunk)
            elif visit.action == "pull":
                self._pull(chunk)
            if visit.action != "enter" and visit.chunk in entered:
                self._buffers.gradient = clear_path(self._buffers.gradient, jnp.int32(chunk.first_block), self._shape.num_tiles)
            yield True

    def _score_all(self) -> Iterator[bool]:
        """The forward walk, and then the loss over the whole batch."""
        entries = [chunk.piece.entries for chunk in self._plan.chunks]
        order = np.argsort(np.concatenate([chunk.entry_M for chunk in self._plan.chunks]))
        outputs_of: dict[int, TokenOutputs] = {}
        for visit in self._plan.visits:
            if visit.chunk in outputs_of:
                continue
            chunk = self._plan.chunks[visit.chunk]
            outputs, num_entries = (self._enter if visit.action == "enter" else self._score)(chunk), len(chunk.entry_M)
            outputs_of[visit.chunk] = TokenOutputs(outputs.learner_logprobs_M[:num_entries], outputs.entropy_M[:num_entries])
            yield True
        columns = [np.concatenate([np.asarray(outputs_of[index][c]) for index in range(len(entries))])[order] for c in range(2)]
        size = _padded_size(len(order))
        logprobs_M, entropy_M = (jnp.asarray(np.pad(column, (0, size - len(order)))) for column in columns)
        cotangent_M, self.sums = loss_cotangents(TokenOutputs(logprobs_M, entropy_M), _loss_inputs(entries, order, self._slot, size), self._table)
        self._cotangent_of = np.asarray(cotangent_M)

    def _enter(self, chunk: Chunk) -> TokenOutputs:
        outputs, _, keys_values = self._forward(to_device(self._pack(chunk)), chunk)
        is_real_T = jnp.arange(self._shape.num_positions) < len(chunk.piece.ids_T)
        self._buffers.path = extend_path(self._buffers.at(chunk.first_block), keys_values, is_real_T)
        return outputs

    def _score(self, chunk: Chunk) -> TokenOutputs:
        return self._forward(to_device(self._pack(chunk)), chunk)[0]

    def _pull(self, chunk: Chunk) -> None:
        microbatch = self._pack(chunk)
        arrays = to_device(microbatch)
        outputs, residuals, _ = self._forward(arrays, chunk)
        self._accumulators, self._buffers.gradient = pull_chunk(
            *self._model,
            arrays,
            residuals,
            cotangent_M=self._cotangents(chunk, microbatch, outputs),
            accumulators=self._accumulators,
            path=self._buffers.at(chunk.first_block),
            path_gradient=self._buffers.gradient,
            config=self._config,
        )

    def _cotangents(self, chunk: Chunk, microbatch: Microbatch, outputs: TokenOutputs) -> jax.Array:
        if self._cotangent_of is not None:
            known = self._cotangent_of[chunk.entry_M]
            return jnp.asarray(np.pad(known, (0, len(microbatch.entries) - len(known))))
        cotangent_M, sums = loss_cotangents(outputs, loss_inputs(microbatch), self._table)
        self.sums = sums if self.sums is None else jax.tree.map(jnp.add, self.sums, sums)
        return cotangent_M

    def _forward(self, arrays: Arrays, chunk: Chunk) -> tuple[TokenOutputs, Residuals, KeysValues]:
        return score_chunk(*self._model, arrays, self._buffers.at(chunk.first_block), self._config)

    def _pack(self, chunk: Chunk) -> Microbatch:
        return pack(MicrobatchPlan(self._shape, (PlannedPiece("", self._slot, 0, chunk.piece),)))


def _padded_size(num_entries: int) -> int:
    """Entries of a whole batch, rounded up to a power of two: a closed set."""
    return max(128, 1 << (num_entries - 1).bit_length())


def _loss_inputs(entries: list[Entries], order: npt.NDArray[np.integer], slot: int, size: int) -> LossInputs:
    """The loss's inputs of the whole batch in the tree's order of entries. Padding has weight 0 and a sequence of its own, the last index."""
    missing = size - len(order)

    def column(name: str) -> IntArray | FloatArray:
        return np.concatenate([getattr(e, name) for e in entries])[order]

    floats = [jnp.asarray(np.pad(column(name), (0, missing))) for name in ("behavior_logprobs_M", "advantage_M", "weight_M")]
    sequence_M = np.unique(column("sequence_M"), return_inverse=True)[1].astype(np.int32)
    sequence_M = np.pad(sequence_M, (0, missing), constant_values=size - 1)
    return LossInputs(floats[0], floats[1], floats[2], jnp.asarray(sequence_M), jnp.full(size, slot, jnp.int32))
