"""The replay executor: a batch whose tree fits in no microbatch, walked in chunks (`rl/chunks.py`).

        enter   score a chunk, keep only its keys and values: the path grows
        pull    score a chunk, turn its outputs into cotangents, pull: adapters' gradient, and what the chunk owes its path

Alive are the path's keys and values, their gradient, one chunk's activations and the adapters' gradient: no branch but the present one. Whoever
walks says what a chunk's cotangents are: the loss of its entries, if that sees no further, or what came of a walk before, which only scored.

One `advance` is one visit, so that decoding and other runs' microbatches go between. Deliberately not here: losses (`learner/executors.py`),
and when to walk (`learner/batches.py`).

    L layer   T position   M entry   K kv head   H head size   S block of a path   C = 64
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias, final

import jax
import jax.numpy as jnp

from noria.learner.step import (
    Arrays,
    KeysValues,
    Model,
    Residuals,
    clear_path,
    extend_path,
    pull_chunk,
    score_chunk,
    to_device,
    without_entries,
)
from noria.model.attention import SPAN, Path
from noria.model.config import ModelConfig
from noria.model.lora import AdapterTree
from noria.rl.chunks import Chunk, ReplayPlan
from noria.rl.losses import TokenCotangents, TokenOutputs
from noria.rl.packing import MicrobatchPlan, MicrobatchShape, PlannedPiece, pack
from noria.types import TILE, Microbatch

Judge: TypeAlias = Callable[[int, Microbatch, TokenOutputs], TokenCotangents]
"""(a chunk's index in the plan, its microbatch, what it was scored to) -> its cotangents."""


@dataclass(slots=True)
class _Buffers:
    """The path's keys and values, and their gradient. Donated and replaced at every visit."""

    path: Path
    gradient: KeysValues

    def at(self, num_blocks: int) -> Path:
        """The path, read up to `num_blocks`."""
        return self.path._replace(num_blocks=jnp.int32(num_blocks))


def path_blocks(plan: ReplayPlan, shape: MicrobatchShape) -> int:
    """The static size S of a path's axis that serves `plan`: room for a whole chunk behind the longest path, rounded up by at most a sixteenth."""
    needed = max((chunk.first_block for chunk in plan.chunks), default=0) + shape.num_tiles
    unit = max(SPAN, 1 << max(0, needed.bit_length() - 5))
    return -(-needed // unit) * unit


def _empty_buffers(config: ModelConfig, num_blocks: int) -> _Buffers:
    dims = (config.num_layers, num_blocks, config.num_kv_heads, TILE, config.head_dim)
    k, v, d_k, d_v = (jnp.zeros(dims) for _ in range(4))
    return _Buffers(Path(k, v, jnp.zeros((num_blocks, TILE), bool), jnp.int32(0)), (d_k, d_v))


def _moved(buffers: _Buffers, kind: str) -> _Buffers:
    """The buffers in memory of this kind; as they are on a backend that has none such."""
    (device,) = buffers.gradient[0].devices()
    if kind not in {memory.kind for memory in device.addressable_memories()}:
        return buffers
    k, v, d_k, d_v = jax.device_put((*buffers.path[:2], *buffers.gradient), jax.sharding.SingleDeviceSharding(device, memory_kind=kind))
    return _Buffers(buffers.path._replace(k_LSKCH=k, v_LSKCH=v), (d_k, d_v))


@final
class Replay:
    """One batch on its walk. Owned by the device thread: `advance` until it returns None."""

    def __init__(
        self,
        plan: ReplayPlan,
        shape: MicrobatchShape,
        config: ModelConfig,
        *,
        slot: int,
        judge: Judge,
        is_forward: bool = False,
        num_blocks: int | None = None,
        is_on_host: bool = False,
    ) -> None:
        """shape: of the chunks, which `plan` was cut for. slot: the run's; may be set between visits. judge: gives each pulled chunk's cotangents.
        is_forward: the walk only scores, each chunk once; the judge sees what, and what it says is ignored.

        num_blocks: the path's axis; None for the least that serves the plan. A server that has one size for all has one program for all. is_on_host:
        between visits the path and its gradient wait in pinned host memory, where the backend has it, so that other work has the device's.
        """
        self._plan, self._shape, self._config, self._judge = plan, shape, config, judge
        self.slot = slot
        self._buffers, self._is_on_host = _empty_buffers(config, num_blocks or path_blocks(plan, shape)), is_on_host
        self._walk = self._forward_visits() if is_forward else self._visits()
        self.num_visits = 0

    def advance(self, model: Model, accumulators: AdapterTree) -> AdapterTree | None:
        """One visit. accumulators: the adapters' gradients (donated); returned with what the visit added, or None if the walk had ended."""
        self._model, self._accumulators = model, accumulators
        if self._is_on_host:
            self._buffers = _moved(self._buffers, "device")
        if next(self._walk, None) is None:
            return None
        if self._is_on_host:
            self._buffers = _moved(self._buffers, "pinned_host")
        self.num_visits += 1
        return self._accumulators

    def _visits(self) -> Iterator[bool]:
        plan = self._plan
        entered: set[int] = set()
        for visit in plan.visits:
            chunk = plan.chunks[visit.chunk]
            if visit.action == "enter":
                self._enter(chunk, is_scored=False)
                entered.add(visit.chunk)
            elif visit.action == "pull":
                self._pull(visit.chunk)
            if visit.action != "enter" and visit.chunk in entered:
                self._buffers.gradient = clear_path(self._buffers.gradient, jnp.int32(chunk.first_block), self._shape.num_tiles)
            yield True

    def _forward_visits(self) -> Iterator[bool]:
        """Every chunk once, in the order of the walk; what was pulled or dropped is overwritten by what comes after it."""
        seen: set[int] = set()
        for visit in self._plan.visits:
            if visit.chunk not in seen:
                seen.add(visit.chunk)
                chunk = self._plan.chunks[visit.chunk]
                self._judge(visit.chunk, self._pack(chunk), (self._enter if visit.action == "enter" else self._score)(chunk))
                yield True

    def _enter(self, chunk: Chunk, *, is_scored: bool = True) -> TokenOutputs:
        arrays = to_device(self._pack(chunk))
        outputs, _, keys_values = self._forward(arrays if is_scored else without_entries(arrays), chunk)
        is_real_T = jnp.arange(self._shape.num_positions) < len(chunk.piece.ids_T)
        self._buffers.path = extend_path(self._buffers.at(chunk.first_block), keys_values, is_real_T)
        return outputs

    def _score(self, chunk: Chunk) -> TokenOutputs:
        return self._forward(to_device(self._pack(chunk)), chunk)[0]

    def _pull(self, index: int) -> None:
        chunk = self._plan.chunks[index]
        microbatch = self._pack(chunk)
        arrays = to_device(microbatch)
        outputs, residuals, _ = self._forward(arrays, chunk)
        self._accumulators, self._buffers.gradient = pull_chunk(
            self._model,
            arrays,
            residuals,
            self._judge(index, microbatch, outputs),
            self._accumulators,
            path=self._buffers.at(chunk.first_block),
            path_gradient=self._buffers.gradient,
            config=self._config,
        )

    def _forward(self, arrays: Arrays, chunk: Chunk) -> tuple[TokenOutputs, Residuals, KeysValues]:
        return score_chunk(self._model, arrays, self._buffers.at(chunk.first_block), self._config)

    def _pack(self, chunk: Chunk) -> Microbatch:
        return pack(MicrobatchPlan(self._shape, (PlannedPiece("", self.slot, 0, chunk.piece),)))
