"""Adapter versions on the device: stacked slots, one stack per rank class, and what a forward pass adds of them to each row.

    y ─▶ rows of class 8: + delta, the others as they are ─▶ rows of class 32: + delta ─▶ ...      a class without rows is skipped

A row's delta is computed at the width of its own run's class, whatever other classes there are, and every other row passes by untouched: so a run's
bits do not depend on the ranks of its neighbours. With one class there is nothing to choose, and the pass is gather, delta, add.

    R row of one adapter slot   C position within a row   A adapter slot   W flat position   D model   I in features   O out features   V vocabulary
"""

from collections.abc import Collection, Iterable
from functools import partial
from typing import NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np

from noria.model.config import ModelConfig
from noria.model.lora import (
    HEAD,
    MODULES,
    AdapterTree,
    Deltas,
    HostAdapter,
    delta,
    empty_layer_slots,
    empty_top_slots,
    gather_rows,
    layer_checksum,
    resize_rank,
    width_of,
    with_tops,
    zero_adapter,
)

NO_CLASS = -1
"""In `class_A`: the base, to which no stack adds anything."""


class Stack(NamedTuple):
    """Adapters of one rank class, leaves [A, ...]: per layer, and of the top modules that are compiled in. A value head is of no use here: it is
    held so that the bytes that are proved to have arrived are those that were committed."""

    layers: tuple[AdapterTree, ...]
    tops: AdapterTree


class Slots(NamedTuple):
    """What programs read. A slot's adapter lies in one stack, class_A (its index, or NO_CLASS); what other stacks hold at that slot is never read.
    Slot 0 is zeros in all of them."""

    stacks: tuple[Stack, ...]
    scale_A: jax.Array
    class_A: jax.Array


class _Contents(NamedTuple):
    """One slot's part of a stack, from the host."""

    layers: tuple[HostAdapter, ...]
    tops: HostAdapter


class _MixedRows(NamedTuple):
    """One layer's deltas for rows of several classes."""

    trees: tuple[AdapterTree, ...]
    slots: Slots
    slot_R: jax.Array

    def add(self, module: str, x_RCI: jax.Array, y_RCO: jax.Array) -> jax.Array:
        """See `Deltas`. Gathering is inside the branch: a class without rows costs neither its copies nor its products."""
        for index, tree in enumerate(self.trees):
            is_own_R, own_R = _own_rows(self.slots, index, self.slot_R)

            def add(y: jax.Array, tree: AdapterTree = tree, is_own_R: jax.Array = is_own_R, own_R: jax.Array = own_R) -> jax.Array:
                change = delta(x_RCI, tree["a"][module][own_R], tree["b"][module][own_R], self.slots.scale_A[own_R])
                return jnp.where(is_own_R[:, None, None], y + change, y)

            y_RCO = jax.lax.cond(jnp.any(is_own_R), add, _unchanged, y_RCO)
        return y_RCO


def layer_deltas(slots: Slots, layer: int, slot_R: jax.Array) -> Deltas:
    """The rows' deltas in one layer."""
    trees = tuple(stack.layers[layer] for stack in slots.stacks)
    return gather_rows(trees[0], slots.scale_A, slot_R) if len(trees) == 1 else _MixedRows(trees, slots, slot_R)


def add_head(slots: Slots, slot_R: jax.Array, normed_RCD: jax.Array, logits_WV: jax.Array) -> jax.Array:
    """Logits with the rows' own deltas of the unembedding, where room for them is compiled in.

    Row after row: gathered for all of them at once, the factors [r, V] would be copied once per row and take more memory than the logits.
    """
    if HEAD not in slots.stacks[0].tops["a"]:
        return logits_WV
    if len(slots.stacks) == 1:
        return logits_WV + _head_delta(slots, 0, slot_R, normed_RCD)
    for index in range(len(slots.stacks)):
        is_own_R, own_R = _own_rows(slots, index, slot_R)
        is_own_W = jnp.repeat(is_own_R, normed_RCD.shape[1])

        def add(logits: jax.Array, index: int = index, own_R: jax.Array = own_R, is_own_W: jax.Array = is_own_W) -> jax.Array:
            return jnp.where(is_own_W[:, None], logits + _head_delta(slots, index, own_R, normed_RCD), logits)

        logits_WV = jax.lax.cond(jnp.any(is_own_R), add, _unchanged, logits_WV)
    return logits_WV


def _head_delta(slots: Slots, index: int, slot_R: jax.Array, normed_RCD: jax.Array) -> jax.Array:
    def row(normed_and_slot: tuple[jax.Array, jax.Array]) -> jax.Array:
        normed_CD, slot = normed_and_slot
        factors = gather_rows(slots.stacks[index].tops, slots.scale_A, slot[None])
        return delta(normed_CD[None], factors.a[HEAD], factors.b[HEAD], factors.scale_R)[0]

    change: jax.Array = jax.lax.map(row, (normed_RCD, slot_R))
    return change.reshape(-1, change.shape[-1])


def _own_rows(slots: Slots, index: int, slot_R: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which rows are of a class, and their slots, 0 for the others."""
    is_own_R = slots.class_A[slot_R] == index
    return is_own_R, jnp.where(is_own_R, slot_R, 0)


def _unchanged(y: jax.Array) -> jax.Array:
    return y


@final
class AdapterSlots:
    """Owner of the stacks. Touched by the device thread only."""

    def __init__(self, model: ModelConfig, num_slots: int, rank_classes: tuple[int, ...], tops: Collection[str]) -> None:
        """rank_classes: widths, ascending; each stack has room for all slots, so that any version fits into any free slot."""
        self.rank_classes = rank_classes
        self._model = model
        self._tops = tuple(tops)
        stacks = tuple(Stack(empty_layer_slots(model, num_slots, width), empty_top_slots(model, num_slots, width, tops)) for width in rank_classes)
        self.arrays = Slots(stacks, jnp.zeros(num_slots, jnp.float32), jnp.full(num_slots, NO_CLASS, jnp.int32))
        self._class_of: dict[int, int] = {}
        self._used: set[tuple[str, int]] = set()

    @property
    def num_programs(self) -> int:
        """Programs used so far."""
        return len(self._used)

    def warm_up(self) -> None:
        """Compile every program."""
        for width in self.rank_classes:
            self.write(0, zero_adapter(self._model, width), 0.0)
            self.checksum(0)

    def write(self, slot: int, adapter: HostAdapter, scale: float) -> None:
        """Put an adapter into a slot, in place, padded to the smallest class that holds it. It fits the model (`lora.misfit`)."""
        width = width_of(adapter)
        index, wide = next((index, wide) for index, wide in enumerate(self.rank_classes) if wide >= width)
        whole = with_tops(resize_rank(adapter, wide), self._model, wide, self._tops)
        contents = _Contents(tuple(_layer_of(whole, layer, MODULES) for layer in range(self._model.num_layers)), _layer_of(whole, 0, self._tops))
        self._used.add(("write", index))
        stacks, scale_A, class_A = self.arrays
        place = np.int32(slot), np.float32(scale), np.int32(index if slot else NO_CLASS)
        stack, scale_A, class_A = _write(stacks[index], scale_A, class_A, contents, place)
        self.arrays = Slots((*stacks[:index], stack, *stacks[index + 1 :]), scale_A, class_A)
        self._class_of[slot] = index

    def checksum(self, slot: int) -> int:
        """The integer checksum of the slot's bytes on the device, equal to `lora.checksum` of what was written."""
        index = self._class_of.get(slot, 0)
        self._used.add(("checksum", index))
        return int(_checksum(self.arrays.stacks[index], np.int32(slot)))


@partial(jax.jit, donate_argnums=(0, 1, 2))
def _write(
    stack: Stack, scale_A: jax.Array, class_A: jax.Array, contents: _Contents, place: tuple[jax.Array, jax.Array, jax.Array]
) -> tuple[Stack, jax.Array, jax.Array]:
    """place: slot, scale, class."""
    slot, scale, index = place
    layers, tops = jax.tree.map(lambda leaf, new: leaf.at[slot].set(new), tuple(stack), tuple(contents))
    return Stack(layers, tops), scale_A.at[slot].set(scale), class_A.at[slot].set(index)


@jax.jit
def _checksum(stack: Stack, slot: jax.Array) -> jax.Array:
    found = jax.tree.map(lambda leaf: leaf[slot], stack)
    parts = [layer_checksum(layer, index) for index, layer in enumerate(found.layers)]
    return jnp.sum(jnp.stack([*parts, layer_checksum(found.tops, 0)]), dtype=jnp.uint32)


def _layer_of(adapter: HostAdapter, layer: int, modules: Iterable[str]) -> HostAdapter:
    return {side: {module: leaves[module][layer] for module in modules} for side, leaves in adapter.items()}
