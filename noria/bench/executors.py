"""The learner's executors as the benches drive them: from a token tree to its run's gradient, host work included. The only file of the benches that
calls the jitted functions of training.

    packed_gradient    cut, plan, pack; then score -> loss -> pull of each microbatch
    replay_gradient    plan the walk; then one visit after another

Deliberately without queue, fairness and residency: those are the learner's, and cost the same whatever the executor.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from noria.bench.memory import program_bytes, tree_bytes
from noria.learner import optimizer, replay, step
from noria.learner.optimizer import SlotState, apply_step, empty_state, hyperparameters, load_slot
from noria.learner.replay import Judge, Replay, path_blocks
from noria.learner.step import (
    Arrays,
    KeysValues,
    Model,
    Residuals,
    loss_cotangents,
    loss_inputs,
    pull,
    pull_chunk,
    score,
    score_chunk,
    to_device,
)
from noria.model import lora
from noria.model.attention import Path
from noria.model.config import ModelConfig
from noria.model.lora import AdapterTree
from noria.model.placement import place
from noria.model.weights import LoadedBase
from noria.rl.chunks import PrefixGradient, ReplayPlan, plan_replay
from noria.rl.losses import LossInputs, LossTable, TokenCotangents, TokenOutputs, loss_table
from noria.rl.packing import MicrobatchPlan, MicrobatchShape, ReadyRun, cut, microbatch_shape, pack, plan_microbatch
from noria.types import TILE, LoraSpec, LossSpec, Microbatch, OptimizerSpec, Piece, TokenTree

AXIS = 1536
"""Longest axis of a packed pass unless a single row is longer: matrix products reach their speed well below it."""

LORA = LoraSpec(rank=8, alpha=16.0)
OPTIMIZER = OptimizerSpec(1e-4)


@dataclass(slots=True)
class Subject:
    """A base with adapter slots, ready to train: what a bench measures on. state is replaced by optimizer steps."""

    config: ModelConfig
    params: dict[str, Any]
    state: SlotState
    scale_A: jax.Array
    table: LossTable

    @property
    def num_slots(self) -> int:
        """Adapter slots."""
        return int(self.scale_A.shape[0])

    @property
    def scale(self) -> float:
        """Of every adapter's delta."""
        return LORA.scale

    @property
    def model(self) -> Model:
        """What the executors read."""
        return Model(self.params, self.state.params, self.scale_A)

    def zero_gradient(self) -> AdapterTree:
        """Fresh accumulators."""
        return jax.tree.map(jnp.zeros_like, self.state.params)


def make_subject(loaded: LoadedBase, *, num_slots: int = 1, dtype: npt.DTypeLike = np.float32) -> Subject:
    """Every slot holds an adapter of rank 8 on all linears whose b is not zero, so that no part of the gradient is."""
    config = loaded.config
    state = empty_state(config, num_slots, LORA.rank)
    for slot in range(num_slots):
        contents = lora.initial_state(config, LORA, LORA.rank, seed=slot)
        rng = np.random.default_rng(slot)
        for leaf in contents.params["b"].values():
            leaf[...] = rng.normal(0, 0.01, leaf.shape)
        state = load_slot(state, slot, contents)
    loss = LossSpec(kind="grpo", sequence_mask_c=0.0)
    table = loss_table(dict.fromkeys(range(num_slots), loss), num_slots)
    return Subject(config, place(loaded.params, dtype).stacked, state, jnp.full(num_slots, LORA.scale, jnp.float32), table)


def best_axis(tree: TokenTree, limit: int = AXIS) -> int:
    """The axis up to `limit`, or up to the longest row, on whose passes the fewest positions are padding; the longer one of two equal ones."""
    longest = int(np.max(tree.depth_T)) + 1
    sizes = range(max(2, -(-longest // TILE)), max(limit // TILE, -(-longest // TILE), 2) + 1)
    return min((TILE * size for size in sizes), key=lambda t: (len(cut(tree, microbatch_shape(t))) * t, -t))


def microbatches_of(runs: Sequence[tuple[int, Sequence[Piece]]], shapes: Sequence[MicrobatchShape]) -> list[MicrobatchPlan]:
    """The passes that these runs' pieces make. runs: (slot, pieces), in the order in which they are served."""
    ready = [ReadyRun(str(slot), slot, pieces) for slot, pieces in runs]
    plans: list[MicrobatchPlan] = []
    while any(run.next_piece < len(run.pieces) for run in ready):
        plan = plan_microbatch(ready, shapes, shapes[-1].num_positions)
        plans.append(plan)
        taken = {int(p.run_id): p.piece_index + 1 for p in plan.pieces}
        ready = [ReadyRun(run.run_id, run.slot, run.pieces, taken.get(run.slot, run.next_piece)) for run in ready]
    return plans


def upload(microbatch: Microbatch) -> tuple[Arrays, LossInputs]:
    """A pass on the device: what the model reads, and what the loss reads."""
    return to_device(microbatch), loss_inputs(microbatch)


def pass_gradient(subject: Subject, uploaded: tuple[Arrays, LossInputs], accumulators: AdapterTree) -> AdapterTree:
    """Score, loss and pull of one pass. accumulators: donated."""
    arrays, inputs = uploaded
    outputs, residuals = score(subject.model, arrays, subject.config)
    cotangents, _ = loss_cotangents(outputs, inputs, subject.table)
    return pull(subject.model, arrays, residuals, cotangents, accumulators, config=subject.config)


def packed_axis(tree: TokenTree) -> int:
    """The axis that takes the whole tree in one pass."""
    return max(2 * TILE, -(-len(tree) // TILE) * TILE)


def packed_gradient(subject: Subject, tree: TokenTree, axis: int) -> AdapterTree:
    """The gradient of slot 0's run by packed passes of `axis` positions."""
    return runs_gradient(subject, [(0, tree)], axis, subject.zero_gradient())


def runs_gradient(subject: Subject, runs: Sequence[tuple[int, TokenTree]], axis: int, accumulators: AdapterTree) -> AdapterTree:
    """The gradients of several runs, (slot, tree) each, by passes of `axis` positions that they share. accumulators: donated."""
    shape = microbatch_shape(axis)
    for plan in microbatches_of([(slot, cut(tree, shape)) for slot, tree in runs], [shape]):
        accumulators = pass_gradient(subject, upload(pack(plan)), accumulators)
    return jax.block_until_ready(accumulators)


def replay_gradient(subject: Subject, tree: TokenTree, chunk: int, mode: PrefixGradient = "exact") -> AdapterTree:
    """The gradient of slot 0's run by a walk over chunks of `chunk` positions."""
    walk = Replay(plan_replay(tree, chunk, mode), microbatch_shape(chunk), subject.config, slot=0, judge=_judge(subject))
    model, gradient = subject.model, subject.zero_gradient()
    while (added := walk.advance(model, gradient)) is not None:
        gradient = added
    return jax.block_until_ready(gradient)


def _judge(subject: Subject) -> Judge:
    """The subject's loss, chunk by chunk."""
    return lambda _index, microbatch, outputs: loss_cotangents(outputs, loss_inputs(microbatch), subject.table)[0]


def optimizer_step(subject: Subject, slot: int, gradient: AdapterTree, spec: OptimizerSpec = OPTIMIZER) -> None:
    """One optimizer step of one slot from a gradient (donated)."""
    state, *_ = apply_step(subject.state._replace(gradient=gradient), jnp.int32(slot), hyperparameters(spec))
    subject.state = jax.block_until_ready(state)


def start_again(subject: Subject, seed: int) -> None:
    """Slot 0 as a new run finds it: the adapter of this seed, whose delta is zero; no moments, no steps, no gradient."""
    subject.state = load_slot(subject.state, 0, lora.initial_state(subject.config, LORA, LORA.rank, seed))


def program_names() -> frozenset[str]:
    """The names of the learner's jitted functions, as the compiler knows them."""
    return frozenset(f.__name__ for module in (step, optimizer, replay) for f in vars(module).values() if hasattr(f, "lower") and callable(f))


def packed_peak(subject: Subject, axis: int) -> int:
    """Most bytes that a packed pass has alive: the compiler's figures, and beside score the accumulators that it does not see."""
    model, config = subject.model, subject.config
    arrays = to_device(_empty_pass(microbatch_shape(axis)))
    outputs, residuals = jax.eval_shape(lambda model, arrays: score(model, arrays, config), model, arrays)
    gradient = subject.state.params
    scoring = program_bytes(score, model, arrays, config) + tree_bytes(gradient)
    return max(scoring, program_bytes(pull, model, arrays, residuals, TokenCotangents(*outputs), gradient, config))


def replay_peak(subject: Subject, plan: ReplayPlan, chunk: int) -> int:
    """Most bytes that a visit of the walk has alive: `visit_peak` on the path that the plan needs."""
    return visit_peak(subject, path_blocks(plan, microbatch_shape(chunk)), chunk)


def visit_peak(subject: Subject, blocks: int, chunk: int) -> int:
    """Most bytes that a visit has alive, on a path of `blocks` blocks: the compiler's figures, and a ledger of what else is.

    Beside score: the path's gradient and the accumulators. Beside pull: the chunk's keys and values, which the visit still holds.
    """
    model, config, shape = subject.model, subject.config, microbatch_shape(chunk)
    arrays = to_device(_empty_pass(shape))
    path, path_gradient = jax.eval_shape(lambda: _path_buffers(config, blocks))
    made: tuple[TokenOutputs, Residuals, KeysValues] = jax.eval_shape(
        lambda model, arrays, path: score_chunk(model, arrays, path, config), model, arrays, path
    )
    outputs, residuals, keys_values = made
    gradient, cotangents = subject.state.params, TokenCotangents(*outputs)
    scoring = program_bytes(score_chunk, model, arrays, path, config) + tree_bytes(path_gradient) + tree_bytes(gradient)
    buffers = {"path": path, "path_gradient": path_gradient}
    pulling = program_bytes(pull_chunk, model, arrays, residuals, cotangents, gradient, config=config, **buffers)
    return max(scoring, pulling + tree_bytes(keys_values))


def visit_at_the_end(subject: Subject, blocks: int, chunk: int) -> None:
    """Pull one chunk behind a path of `blocks` blocks, the chunk's own included: all that a walk of that length has alive, and none of its time."""
    model, config, shape = subject.model, subject.config, microbatch_shape(chunk)
    path, path_gradient = jax.jit(lambda: _path_buffers(config, blocks))()
    path = path._replace(num_blocks=jnp.int32(blocks - shape.num_tiles))
    arrays = to_device(_empty_pass(shape))
    outputs, residuals, keys_values = score_chunk(model, arrays, path, config)
    gradient, cotangents = subject.zero_gradient(), TokenCotangents(*outputs)
    buffers = {"path": path, "path_gradient": path_gradient}
    jax.block_until_ready((pull_chunk(model, arrays, residuals, cotangents, gradient, config=config, **buffers), keys_values))


def relative_l2(got: AdapterTree, want: AdapterTree) -> float:
    """|got - want| / |want| over all leaves together, in float64."""
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)]
    return math.sqrt(sum(float(((a - b) ** 2).sum()) for a, b in pairs) / sum(float((b**2).sum()) for _, b in pairs))


def _path_buffers(config: ModelConfig, blocks: int) -> tuple[Path, KeysValues]:
    zeros = jnp.zeros((config.num_layers, blocks, config.num_kv_heads, TILE, config.head_dim))
    return Path(zeros, zeros, jnp.zeros((blocks, TILE), bool), jnp.int32(0)), (zeros, zeros)


def _empty_pass(shape: MicrobatchShape) -> Microbatch:
    return pack(MicrobatchPlan(shape, ()))
