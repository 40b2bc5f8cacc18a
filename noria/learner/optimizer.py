"""Per-slot AdamW: parameters, moments, gradient and step count of every run live in stacked slots; a step touches the active slot alone.

One AdamW over the whole stack would move idle runs (weight decay, momentum). Here a step gathers one slot, updates it with that run's own
learning rate, schedule, betas, decay and clip norm (traced values: a new mixture compiles nothing), and writes it back in place. The schedule is a
function of the slot's step count, which is committed with its moments: a resumed run is where it was.

    L layer   A adapter slot
"""

from functools import partial
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from noria.errors import InvalidRequestError
from noria.model.config import ModelConfig
from noria.model.lora import AdapterState, AdapterTree, empty_slots
from noria.types import OptimizerSpec, Schedule

SCHEDULES: Final[tuple[Schedule, ...]] = ("constant", "linear", "cosine")
"""A schedule's number in `Hyperparameters` is its position here."""


class SlotState(NamedTuple):
    """Everything trainable. params, first_moment, second_moment, gradient: leaves [L, A, ...] float32; count_A: optimizer steps, int32."""

    params: AdapterTree
    first_moment: AdapterTree
    second_moment: AdapterTree
    gradient: AdapterTree
    count_A: jax.Array


class Hyperparameters(NamedTuple):
    """OptimizerSpec as scalars on the device (see types.OptimizerSpec): float32, and int32 for schedule, steps and first_step."""

    learning_rate: jax.Array
    beta1: jax.Array
    beta2: jax.Array
    eps: jax.Array
    weight_decay: jax.Array
    grad_clip_norm: jax.Array
    final_fraction: jax.Array
    schedule: jax.Array
    warmup_steps: jax.Array
    decay_steps: jax.Array
    first_step: jax.Array


def hyperparameters(spec: OptimizerSpec) -> Hyperparameters:
    """The spec's fields as arrays. Raises InvalidRequestError: no such schedule."""
    if spec.schedule not in SCHEDULES:
        raise InvalidRequestError(f"there is no schedule {spec.schedule!r}; known: {', '.join(SCHEDULES)}")
    floats = (spec.learning_rate, spec.beta1, spec.beta2, spec.eps, spec.weight_decay, spec.grad_clip_norm, spec.final_fraction)
    ints = (SCHEDULES.index(spec.schedule), spec.warmup_steps, spec.decay_steps, spec.first_step)
    return Hyperparameters(*map(jnp.float32, floats), *map(jnp.int32, ints))


def rate_at(count: jax.Array, hyper: Hyperparameters) -> jax.Array:
    """The learning rate, float32, of the step after `count` int32 steps of the slot: `OptimizerSpec` says how it rises and falls.

    A step before first_step has the rate of the first. A decay that should end within the warm-up ends with it.
    """
    number = jnp.maximum(count + 1 - hyper.first_step, 1)
    rise = jnp.minimum(number / jnp.maximum(hyper.warmup_steps, 1), 1.0)
    length = jnp.maximum(hyper.decay_steps - hyper.warmup_steps, 1)
    progress = jnp.clip((number - hyper.warmup_steps) / length, 0.0, 1.0)
    left = jnp.stack([jnp.ones_like(progress), 1.0 - progress, 0.5 * (1.0 + jnp.cos(jnp.pi * progress))])[hyper.schedule]
    return hyper.learning_rate * rise * (hyper.final_fraction + (1.0 - hyper.final_fraction) * left)


def empty_state(config: ModelConfig, num_slots: int, max_rank: int) -> SlotState:
    """All slots zero."""
    params, first, second, gradient = (empty_slots(config, num_slots, max_rank) for _ in range(4))
    return SlotState(params, first, second, gradient, jnp.zeros(num_slots, jnp.int32))


@partial(jax.jit, donate_argnames=("state",))
def apply_step(state: SlotState, slot: jax.Array, hyper: Hyperparameters) -> tuple[SlotState, jax.Array, jax.Array]:
    """One AdamW step of `slot` from its accumulated gradient, which is then cleared.

    Returns (state, the gradient's norm before clipping, the learning rate).

    A norm that is not finite leaves parameters, moments and count as they were; the caller refuses the step.
    """
    params, first, second, gradient = (jax.tree.map(lambda leaf: leaf[:, slot], tree) for tree in state[:4])
    count = state.count_A[slot]
    norm = optax.tree.norm(gradient)
    is_finite = jnp.isfinite(norm)
    clip = jnp.where((hyper.grad_clip_norm > 0) & (norm > hyper.grad_clip_norm), hyper.grad_clip_norm / norm, 1.0)
    rate = rate_at(count, hyper)
    adamw = optax.adamw(rate, hyper.beta1, hyper.beta2, hyper.eps, weight_decay=hyper.weight_decay)
    adam, *rest = adamw.init(params)
    before = (adam._replace(count=count, mu=first, nu=second), *rest)
    updates, (after, *_) = adamw.update(jax.tree.map(lambda g: g * clip, gradient), before, params)
    new = (optax.apply_updates(params, updates), after.mu, after.nu)

    def write(stack: jax.Array, value: jax.Array, old: jax.Array) -> jax.Array:
        return stack.at[:, slot].set(jnp.where(is_finite, value, old))

    params, first, second = (
        jax.tree.map(write, stack, value, old) for stack, value, old in zip(state[:3], new, (params, first, second), strict=True)
    )
    cleared = jax.tree.map(lambda leaf: leaf.at[:, slot].set(0.0), state.gradient)
    return SlotState(params, first, second, cleared, state.count_A.at[slot].add(is_finite.astype(jnp.int32))), norm, rate


@partial(jax.jit, donate_argnames=("state",))
def _write(state: SlotState, slot: jax.Array, trees: tuple[AdapterTree, AdapterTree, AdapterTree], count: jax.Array) -> SlotState:
    put = jax.tree.map(lambda stack, value: stack.at[:, slot].set(value), state[:3], trees)
    cleared = jax.tree.map(lambda leaf: leaf.at[:, slot].set(0.0), state.gradient)
    return SlotState(put[0], put[1], put[2], cleared, state.count_A.at[slot].set(count))


def load_slot(state: SlotState, slot: int, contents: AdapterState) -> SlotState:
    """Write a run's parameters and moments into a slot and clear its gradient; `state` is consumed."""
    return _write(state, jnp.int32(slot), (contents.params, contents.first_moment, contents.second_moment), jnp.int32(contents.num_steps))


@jax.jit
def _read(trees: tuple[AdapterTree, AdapterTree, AdapterTree], slot: jax.Array) -> tuple[AdapterTree, AdapterTree, AdapterTree]:
    return jax.tree.map(lambda leaf: leaf[:, slot], trees)


def read_slot(state: SlotState, slot: int) -> AdapterState:
    """Copy a slot to the host."""
    trees = _read((state.params, state.first_moment, state.second_moment), jnp.int32(slot))
    params, first, second = jax.tree.map(np.asarray, trees)
    return AdapterState(params, first, second, int(state.count_A[slot]))
