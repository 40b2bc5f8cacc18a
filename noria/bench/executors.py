"""The learner's executors as the benches drive them: from a token tree to its run's gradient, host work included. Of the benches this file alone
calls the jitted functions of training; a whole learner is driven by `learners.py`.

    packed_gradient    cut, plan, pack; then score -> loss -> pull of each microbatch
    replay_gradient    plan the walk; then one visit after another

Deliberately without queue, fairness and residency: those are the learner's, and cost the same whatever the executor.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from noria.bench.memory import Meter, program_bytes, tree_bytes
from noria.learner import optimizer, replay, step
from noria.learner.optimizer import SlotState, apply_step, empty_state, hyperparameters, load_slot
from noria.learner.replay import Programs, Replay
from noria.learner.step import (
    Arrays,
    Model,
    loss_cotangents,
    loss_inputs,
    pull,
    pull_chunk,
    score,
    score_chunk,
    to_device,
)
from noria.model import lora
from noria.model.attention import SPAN, Path, PathGradient
from noria.model.config import ModelConfig
from noria.model.lora import AdapterState, AdapterTree
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
        state = load_slot(state, slot, adapter_of(config, LORA, LORA.rank, slot))
    loss = LossSpec(kind="grpo", sequence_mask_c=0.0)
    table = loss_table(dict.fromkeys(range(num_slots), loss), num_slots)
    return Subject(config, place(loaded.params, dtype).stacked, state, jnp.full(num_slots, LORA.scale, jnp.float32), table)


def adapter_of(config: ModelConfig, spec: LoraSpec, width: int, seed: int) -> AdapterState:
    """A run's state whose b is not zero, so that no part of its gradient is."""
    state = lora.initial_state(config, spec, width, seed)
    rng = np.random.default_rng(seed)
    for leaf in state.params["b"].values():
        leaf[...] = rng.normal(0, 0.01, leaf.shape)
    return state


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


def beside_passes(plans: Sequence[MicrobatchPlan], num_slots: int) -> None:
    """What scoring these passes takes beside its program: packing, uploading, the loss, and copies of its numbers to the host."""
    table = loss_table({}, num_slots)
    for plan in plans:
        _, inputs = upload(pack(plan))
        zeros = jnp.zeros(plan.shape.num_entries)
        outputs = TokenOutputs(zeros, zeros, zeros)
        cotangents, sums = loss_cotangents(outputs, inputs, table)
        jax.tree.map(np.asarray, (outputs, cotangents, sums))


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
    return _walk(subject, plan_replay(tree, chunk, mode), chunk, Programs(), loss_cotangents)


def _walk(subject: Subject, plan: ReplayPlan, chunk: int, programs: Programs, evaluate: Callable[..., Any]) -> AdapterTree:
    """The whole walk with the subject's loss, chunk by chunk. evaluate: `loss_cotangents`."""

    def judge(_index: int, microbatch: Microbatch, outputs: TokenOutputs) -> TokenCotangents:
        cotangents: TokenCotangents = evaluate(outputs, loss_inputs(microbatch), subject.table)[0]
        return cotangents

    walk = Replay(plan, microbatch_shape(chunk), subject.config, judge=judge, programs=programs)
    model, gradient = subject.model, subject.zero_gradient()
    while (added := walk.advance(model, 0, gradient)) is not None:
        gradient = added
    return jax.block_until_ready(gradient)


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


def packed_peak(subject: Subject, tree: TokenTree, axis: int) -> int:
    """Most bytes alive while slot 0's gradient is made by packed passes of `axis` positions: base, adapters, and all that training makes."""
    meter, shape = Meter(subject.model), microbatch_shape(axis)
    scoring, evaluate, pulling = (meter.watched(program) for program in (score, loss_cotangents, pull))
    gradient = subject.zero_gradient()
    for plan in microbatches_of([(0, cut(tree, shape))], [shape]):
        arrays, inputs = upload(pack(plan))
        outputs, residuals = scoring(subject.model, arrays, subject.config)
        cotangents, _ = evaluate(outputs, inputs, subject.table)
        gradient = pulling(subject.model, arrays, residuals, cotangents, gradient, config=subject.config)
    return meter.peak_bytes


def replay_peak(subject: Subject, tree: TokenTree, chunk: int, mode: PrefixGradient = "exact") -> int:
    """The same of a walk over chunks of `chunk` positions."""
    meter = Meter(subject.model)
    _walk(subject, plan_replay(tree, chunk, mode), chunk, Programs(*map(meter.watched, Programs())), meter.watched(loss_cotangents))
    return meter.peak_bytes


def visit_peak(subject: Subject, blocks: int, chunk: int, mode: PrefixGradient = "exact") -> int:
    """Most bytes that a visit at the end of a path of `blocks` blocks will have alive, all constant if the mode is "stop". Nothing is allocated: the
    compiler's figures, and beside score, which does not see them, the path's gradient and the accumulators."""
    model, config, shape = subject.model, subject.config, microbatch_shape(chunk)
    arrays = to_device(_empty_pass(shape))
    path, path_gradient = jax.eval_shape(lambda: _path_buffers(config, blocks, shape, mode))
    outputs, residuals, _ = jax.eval_shape(lambda model, arrays, path: score_chunk(model, arrays, path, config), model, arrays, path)
    gradient, cotangents, both = subject.state.params, TokenCotangents(*outputs), {"path": path, "path_gradient": path_gradient}
    scoring = program_bytes(score_chunk, model, arrays, path, config) + tree_bytes(path_gradient) + tree_bytes(gradient)
    return max(scoring, program_bytes(pull_chunk, model, arrays, residuals, cotangents, gradient, config=config, **both))


def visit_at_the_end(subject: Subject, blocks: int, chunk: int, mode: PrefixGradient = "exact") -> None:
    """Pull one chunk behind a path of `blocks` blocks, the chunk's own included: all that a walk of that length has alive, and none of its time."""
    model, config, shape = subject.model, subject.config, microbatch_shape(chunk)
    path, path_gradient = jax.jit(lambda: _path_buffers(config, blocks, shape, mode))()
    before = blocks - shape.num_tiles
    path = path._replace(num_blocks=jnp.int32(before))
    path_gradient = path_gradient._replace(num_constant=jnp.int32(before // SPAN * SPAN if mode == "stop" else 0))
    arrays = to_device(_empty_pass(shape))
    outputs, residuals = score_chunk(model, arrays, path, config)[:2]
    gradient, cotangents, both = subject.zero_gradient(), TokenCotangents(*outputs), {"path": path, "path_gradient": path_gradient}
    jax.block_until_ready(pull_chunk(model, arrays, residuals, cotangents, gradient, config=config, **both))


def relative_l2(got: AdapterTree, want: AdapterTree) -> float:
    """|got - want| / |want| over all leaves together, in float64."""
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)]
    return math.sqrt(sum(float(((a - b) ** 2).sum()) for a, b in pairs) / sum(float((b**2).sum()) for _, b in pairs))


def rounding_noise(subject: Subject, gradient: Callable[[], AdapterTree], want: AdapterTree) -> float:
    """How far a gradient moves (`relative_l2`) when every weight, base and adapters, does by a unit in its last place: what float32 makes of one sum
    in two orders, layer by layer. want: the gradient as it is."""
    rng = np.random.default_rng(0)

    def moved(leaf: jax.Array) -> jax.Array:
        if leaf.dtype != jnp.float32:
            return leaf
        weights = np.asarray(leaf)
        return jnp.asarray(weights + np.spacing(weights) * rng.choice(np.array([-1, 1], np.float32), leaf.shape))

    params, state = subject.params, subject.state
    subject.params, subject.state = jax.tree.map(moved, params), state._replace(params=jax.tree.map(moved, state.params))
    try:
        return relative_l2(gradient(), want)
    finally:
        subject.params, subject.state = params, state


def _path_buffers(config: ModelConfig, blocks: int, shape: MicrobatchShape, mode: PrefixGradient) -> tuple[Path, PathGradient]:
    def zeros(blocks: int) -> jax.Array:
        return jnp.zeros((config.num_layers, blocks, config.num_kv_heads, TILE, config.head_dim))

    live = blocks if mode == "exact" else -(-(shape.num_tiles + SPAN) // SPAN) * SPAN
    path = Path(zeros(blocks), zeros(blocks), jnp.zeros((blocks, TILE), bool), jnp.int32(0))
    return path, PathGradient(zeros(live), zeros(live), jnp.int32(0), jnp.int32(0))


def _empty_pass(shape: MicrobatchShape) -> Microbatch:
    return pack(MicrobatchPlan(shape, ()))
