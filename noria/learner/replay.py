"""The replay executor: a batch whose tree fits in no microbatch, walked in chunks (`rl/chunks.py`).

        enter   score a chunk, keep only its keys and values: the path grows, nothing is owed to it yet
        pull    score a chunk, turn its outputs into cotangents, pull: adapters' gradient, and what the chunk owes its path

Alive are the path's keys and values, their gradient (of a constant prefix none), one chunk's activations and the adapters' gradient: no branch but
the present one. Whoever walks says what a chunk's cotangents are: the loss of its entries, if that sees no further, or what came of a walk before,
which only scored.

One `advance` is one visit, so that decoding and other runs' microbatches go between. Deliberately not here: losses (`learner/executors.py`),
and when to walk (`learner/batches.py`).

    L layer   T position   M entry   K kv head   H head size   S block of a path   C = 64
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np

from noria.learner.step import (
    Arrays,
    KeysValues,
    Model,
    Residuals,
    extend_path,
    pull_chunk,
    score_chunk,
    to_device,
    without_entries,
)
from noria.model.attention import SPAN, Path, PathGradient
from noria.model.config import ModelConfig
from noria.model.lora import AdapterTree
from noria.rl.chunks import Chunk, ReplayPlan
from noria.rl.losses import TokenCotangents, TokenOutputs
from noria.rl.packing import MicrobatchPlan, MicrobatchShape, PlannedPiece, pack
from noria.types import TILE, Microbatch

Judge: TypeAlias = Callable[[int, Microbatch, TokenOutputs], TokenCotangents]
"""(a chunk's index in the plan, its microbatch, what it was scored to) -> its cotangents."""


class Programs(NamedTuple):
    """What visits run on the device, so that who measures them can pass programs that are measured."""

    score: Callable[..., tuple[TokenOutputs, Residuals, KeysValues]] = score_chunk
    pull: Callable[..., tuple[AdapterTree, PathGradient]] = pull_chunk
    extend: Callable[..., tuple[Path, PathGradient]] = extend_path


@dataclass(slots=True)
class _Buffers:
    """The path's keys and values, and their gradient. Donated and replaced at every visit."""

    path: Path
    gradient: PathGradient

    def path_to(self, chunk: Chunk) -> Path:
        """The path, read up to the chunk."""
        return self.path._replace(num_blocks=jnp.int32(chunk.first_block))

    def gradient_to(self, chunk: Chunk, *, num_owed: int = 0) -> PathGradient:
        """Its gradient from the constant prefix on. num_owed: blocks of the chunk to which something is owed."""
        return self.gradient._replace(num_constant=jnp.int32(_constant_blocks(chunk)), num_owed=jnp.int32(num_owed))


def path_blocks(plan: ReplayPlan, shape: MicrobatchShape) -> int:
    """The static size S of a path's axis that serves `plan`: room for a whole chunk behind the longest path, rounded up by at most a sixteenth."""
    return _rounded(max((chunk.first_block for chunk in plan.chunks), default=0) + shape.num_tiles)


def gradient_blocks(plan: ReplayPlan, shape: MicrobatchShape) -> int:
    """The same of the path's gradient, which a constant prefix has none of."""
    return _rounded(max((chunk.first_block - _constant_blocks(chunk) for chunk in plan.chunks), default=0) + shape.num_tiles)


def _rounded(num_blocks: int) -> int:
    unit = max(SPAN, 1 << max(0, num_blocks.bit_length() - 5))
    return -(-num_blocks // unit) * unit


def _constant_blocks(chunk: Chunk) -> int:
    """Blocks before the gradient's first, which stands at the beginning of a span."""
    return chunk.num_constant // SPAN * SPAN


def _empty_buffers(config: ModelConfig, num_blocks: int, num_gradient: int) -> _Buffers:
    def zeros(blocks: int) -> jax.Array:
        return jnp.zeros((config.num_layers, blocks, config.num_kv_heads, TILE, config.head_dim))

    path = Path(zeros(num_blocks), zeros(num_blocks), jnp.zeros((num_blocks, TILE), bool), jnp.int32(0))
    gradient = PathGradient(zeros(num_gradient), zeros(num_gradient), jnp.int32(0), jnp.int32(0))
    return _Buffers(*jax.device_put((path, gradient), jax.devices()[0]))  # explicitly: programs are compiled for what has waited on the host too


def _moved(buffers: _Buffers, kind: str) -> _Buffers:
    """The buffers in memory of this kind; as they are on a backend that has none such."""
    (device,) = buffers.path.k_LSKCH.devices()
    if kind not in {memory.kind for memory in device.addressable_memories()}:
        return buffers

    def moved(pair: tuple[jax.Array, jax.Array]) -> dict[str, Any]:
        k, v = jax.device_put(pair, jax.sharding.SingleDeviceSharding(device, memory_kind=kind))
        return {"k_LSKCH": k, "v_LSKCH": v}

    return _Buffers(buffers.path._replace(**moved(buffers.path[:2])), buffers.gradient._replace(**moved(buffers.gradient[:2])))


@final
class Replay:
    """One batch on its walk. Owned by the device thread: `advance` until it returns None."""

    def __init__(
        self,
        plan: ReplayPlan,
        shape: MicrobatchShape,
        config: ModelConfig,
        *,
        judge: Judge,
        is_forward: bool = False,
        num_blocks: int | None = None,
        is_on_host: bool = False,
        programs: Programs = Programs(),  # noqa: B008 - immutable
    ) -> None:
        """shape: of the chunks, which `plan` was cut for. judge: gives each pulled chunk's cotangents. is_forward: the walk only scores, each chunk
        once; the judge sees what, and what it says is ignored.

        num_blocks: the axis of the path, and of its gradient; None for the least that serves the plan, each its own. A server that has one size for
        all has one program for all. is_on_host: it is parked after every visit, so that other work has the device's memory. programs: of the visits.
        """
        self._plan, self._shape, self._config, self._judge, self._programs = plan, shape, config, judge, programs
        sizes = (num_blocks, num_blocks) if num_blocks else (path_blocks(plan, shape), gradient_blocks(plan, shape))
        for chunk in plan.chunks:  # beyond its axis a chunk would silently be written elsewhere
            assert len(chunk.piece.ids_T) <= shape.num_positions
            assert chunk.first_block + shape.num_tiles <= sizes[0]
            assert chunk.first_block - _constant_blocks(chunk) + shape.num_tiles <= sizes[1]
        self._buffers, self._is_on_host, self._is_parked = _empty_buffers(config, *sizes), is_on_host, False
        self._entered: set[int] = set()
        self.is_halfway = False
        self._walk = self._forward_visits() if is_forward else self._visits()

    def advance(self, model: Model, slot: int, accumulators: AdapterTree) -> AdapterTree | None:
        """One visit, or its first half (`is_halfway`): where it is scored, its pull is a dispatch of its own, so that neither holds the device up for
        longer than a microbatch does.

        slot: where the run lies now; the same for both halves. accumulators: the adapters' gradients (donated); returned with what the visit added,
        or None if the walk had ended.
        """
        self._model, self._slot, self._accumulators = model, slot, accumulators
        if self._is_parked:
            self._buffers, self._is_parked = _moved(self._buffers, "device"), False
        is_whole = next(self._walk, None)
        if is_whole is None:
            return None
        self.is_halfway = not is_whole
        if self._is_on_host and is_whole:
            self.park()
        return self._accumulators

    def park(self) -> None:
        """Let the path and its gradient wait in pinned host memory, where the backend has it, until the next visit."""
        if not self._is_parked:
            self._buffers, self._is_parked = _moved(self._buffers, "pinned_host"), True

    def _visits(self) -> Iterator[bool]:
        for visit in self._plan.visits:
            if visit.action == "enter":
                self._enter(visit.chunk, is_scored=False)
            elif visit.action == "pull":
                yield from self._pull(visit.chunk)
            yield True

    def _forward_visits(self) -> Iterator[bool]:
        """Every chunk once, in the order of the walk; what was pulled or dropped is overwritten by what comes after it."""
        seen: set[int] = set()
        for visit in self._plan.visits:
            if visit.chunk not in seen:
                seen.add(visit.chunk)
                outputs = (self._enter if visit.action == "enter" else self._score)(visit.chunk)
                self._judge(visit.chunk, self._pack(self._plan.chunks[visit.chunk]), outputs)
                yield True

    def _enter(self, index: int, *, is_scored: bool = True) -> TokenOutputs:
        chunk = self._plan.chunks[index]
        arrays = to_device(self._pack(chunk))
        outputs, _, keys_values = self._forward(arrays if is_scored else without_entries(arrays), chunk)
        is_real_T = np.arange(self._shape.num_positions) < len(chunk.piece.ids_T)
        self._buffers = _Buffers(*self._programs.extend(self._buffers.path_to(chunk), self._buffers.gradient_to(chunk), keys_values, is_real_T))
        self._entered.add(index)
        return outputs

    def _score(self, index: int) -> TokenOutputs:
        chunk = self._plan.chunks[index]
        return self._forward(to_device(self._pack(chunk)), chunk)[0]

    def _pull(self, index: int) -> Iterator[bool]:
        chunk = self._plan.chunks[index]
        microbatch = self._pack(chunk)
        arrays = to_device(microbatch)
        outputs, residuals = self._forward(arrays, chunk)[:2]  # its keys and values are let go: it never enters the path again
        cotangents = self._judge(index, microbatch, outputs)
        del outputs
        yield False
        self._accumulators, self._buffers.gradient = self._programs.pull(
            self._model,
            arrays,
            residuals,
            cotangents,
            self._accumulators,
            path=self._buffers.path_to(chunk),
            path_gradient=self._buffers.gradient_to(chunk, num_owed=chunk.piece.num_tiles if index in self._entered else 0),
            config=self._config,
        )

    def _forward(self, arrays: Arrays, chunk: Chunk) -> tuple[TokenOutputs, Residuals, KeysValues]:
        return self._programs.score(self._model, arrays, self._buffers.path_to(chunk), self._config)

    def _pack(self, chunk: Chunk) -> Microbatch:
        return pack(MicrobatchPlan(self._shape, (PlannedPiece("", self._slot, 0, chunk.piece),)))
