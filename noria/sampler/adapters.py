"""Adapter versions on the device: stacked slots, one stack per rank class, and what a forward pass adds of them to each row.

    y ─▶ each row of class 8: + delta ─▶ each row of class 32: + delta ─▶ ...      a class without rows is skipped, so is the base

A row's delta is computed at the width of its own run's class, whatever other classes there are, and every other row passes by untouched: so a run's
bits do not depend on the ranks of its neighbours.

Rows are visited one by one, each reading its adapter where it lies, or their adapters are gathered, copied for all rows at once: by the size of the
copies, `max_gathered`. Visits cost the bytes of the distinct adapters, and give a lane the same bits in a tile of its own as in one of eight. `a`
lies transposed, [r, I], so that its product reads along memory, and for modules of one input together, so that one product serves them.

    R row of one adapter slot   C position within a row   A adapter slot   D model   I in features   O out features   V vocabulary
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
    INPUT_GROUPS,
    MODULES,
    AdapterTree,
    HostAdapter,
    adapter_shapes,
    layer_checksum,
    resize_rank,
    top_shapes,
    width_of,
    with_tops,
    zero_adapter,
)

MAX_GATHERED_MIB = {"cpu": 0}
"""By backend: MiB of copies of adapters, of one rank class and one input of a layer, up to which rows are gathered; beyond, they are visited.

CPU: never. Milliseconds of a layer, visited and gathered, two cores, JAX 0.12, by turns (more in docs/decisions.md); copies are of the whole layer:

    SmolLM2   8 lanes r 8    2 MiB   0.14  0.19        0.6B   8 lanes r 64       44 MiB    1.6  1.4
             32 lanes r 8   10 MiB   0.33  0.44              64 lanes r 8        44 MiB    1.4  3.1
             32 lanes r 64  80 MiB   2.9  12.8               64 lanes r 64      352 MiB   13.3 47.6
    4 rows of 32 r 8         1 MiB   0.49  0.50               4 rows of 32 r 64  22 MiB    3.3  3.2
   16 rows of 32 r 64       40 MiB   6.3   4.7               16 rows of 32 r 64  88 MiB   12.6 19.9

Below some 40 MiB neither wins by much, and above gathering loses up to fivefold."""

MAX_GATHERED_MIB_ELSEWHERE = 256
"""Accelerators gather, since a loop of small products would wait for itself: not measured. This bounds the memory that copies take."""

NO_CLASS = -1
"""In `class_A`: the base, to which no stack adds anything."""

_HIGHEST = jax.lax.Precision.HIGHEST


class Stack(NamedTuple):
    """Adapters of one rank class: per layer, and of the top modules that are compiled in. A value head is of no use here: it is held so that the
    bytes that are proved to have arrived are those that were committed.

    a {first module of those that read one input: [A, r of each of them in turn, I]}, b {module: [A, r, O]}.
    """

    layers: tuple[AdapterTree, ...]
    tops: AdapterTree


class Slots(NamedTuple):
    """What programs read. A slot's adapter lies in one stack, class_A (its index, or NO_CLASS); what other stacks hold at that slot is never read.
    Slot 0 is zeros in all of them."""

    stacks: tuple[Stack, ...]
    scale_A: jax.Array
    class_A: jax.Array


class _Contents(NamedTuple):
    """One slot's part of a stack, from the host, as `HostAdapter` has it."""

    layers: tuple[HostAdapter, ...]
    tops: HostAdapter


class _OwnRows(NamedTuple):
    """Rows of one class. own_R: their numbers, `num` of them, then anything. is_own_R: the same as a mask."""

    own_R: jax.Array
    num: jax.Array
    is_own_R: jax.Array


class RowPlan(NamedTuple):
    """Which rows use which adapters: made once, read by every layer. classes: per rank class. max_gathered: bytes, see MAX_GATHERED_MIB."""

    slot_R: jax.Array
    classes: tuple[_OwnRows, ...]
    max_gathered: int


class RowDeltas(NamedTuple):
    """The deltas of one layer's modules, or of the top modules. Implements `lora.Deltas`."""

    trees: tuple[AdapterTree, ...]
    slots: Slots
    plan: RowPlan

    def add(self, modules: tuple[str, ...], x_RCI: jax.Array, ys: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """See `Deltas`."""
        for tree, own in zip(self.trees, self.plan.classes, strict=True):
            leaves = tree["a"][_group_of(modules)[0]], *(tree["b"][module] for module in modules)
            num_copied = len(self.plan.slot_R) * sum(leaf.nbytes // len(leaf) for leaf in leaves)
            add = self._gather if num_copied <= self.plan.max_gathered else self._visit
            ys = add(modules, x_RCI, ys, tree, own)
        return ys

    def _visit(
        self, modules: tuple[str, ...], x_RCI: jax.Array, ys: tuple[jax.Array, ...], tree: AdapterTree, own: _OwnRows
    ) -> tuple[jax.Array, ...]:
        """Row after row, in place."""

        def visit(index: jax.Array, ys: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            row = own.own_R[index]
            slot = self.plan.slot_R[row]
            a_kI, x_CI = _at(tree["a"][_group_of(modules)[0]], slot), _at(x_RCI, row)
            h_kC = _product(a_kI, x_CI.T) * self.slots.scale_A[slot]
            changed = []
            for module, y_RCO in zip(modules, ys, strict=True):
                b_rO = _at(tree["b"][module], slot)
                change_CO = _product(_part(h_kC, module, b_rO.shape[0]).T, b_rO)
                changed.append(jax.lax.dynamic_update_index_in_dim(y_RCO, _at(y_RCO, row) + change_CO, row, 0))
            return tuple(changed)

        found: tuple[jax.Array, ...] = jax.lax.fori_loop(0, own.num, visit, ys)
        return found

    def _gather(
        self, modules: tuple[str, ...], x_RCI: jax.Array, ys: tuple[jax.Array, ...], tree: AdapterTree, own: _OwnRows
    ) -> tuple[jax.Array, ...]:
        """All rows at once. Gathering is inside the branch: a class without rows costs neither its copies nor its products."""
        slot_R = jnp.where(own.is_own_R, self.plan.slot_R, 0)

        def add(ys: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            a_RkI = tree["a"][_group_of(modules)[0]][slot_R]
            h_RkC = jnp.einsum("rki,rci->rkc", a_RkI, x_RCI.astype(jnp.float32), precision=_HIGHEST) * self.slots.scale_A[slot_R][:, None, None]
            changed = []
            for module, y_RCO in zip(modules, ys, strict=True):
                b_RrO = tree["b"][module][slot_R]
                change = jnp.einsum("rkc,rko->rco", _part(h_RkC, module, b_RrO.shape[1], axis=1), b_RrO, precision=_HIGHEST)
                changed.append(jnp.where(own.is_own_R[:, None, None], y_RCO + change, y_RCO))
            return tuple(changed)

        found: tuple[jax.Array, ...] = jax.lax.cond(own.num > 0, add, lambda ys: ys, ys)
        return found


def plan_rows(slots: Slots, slot_R: jax.Array, *, max_gathered: int | None = None) -> RowPlan:
    """Sort rows by class. max_gathered: bytes, None for what suits the device."""
    classes = []
    for index in range(len(slots.stacks)):
        is_own_R = slots.class_A[slot_R] == index
        (own_R,) = jnp.nonzero(is_own_R, size=slot_R.shape[0], fill_value=0)
        classes.append(_OwnRows(own_R.astype(jnp.int32), is_own_R.sum(dtype=jnp.int32), is_own_R))
    return RowPlan(slot_R, tuple(classes), _max_gathered() if max_gathered is None else max_gathered)


def visits_rows() -> bool:
    """Rows are always visited one by one on this device, so that a row costs what it reads, and one of a single lane is best."""
    return _max_gathered() == 0


def _max_gathered() -> int:
    """In bytes, of this device."""
    return MAX_GATHERED_MIB.get(jax.default_backend(), MAX_GATHERED_MIB_ELSEWHERE) * 2**20


def layer_deltas(slots: Slots, layer: int, plan: RowPlan) -> RowDeltas:
    """The rows' deltas in one layer."""
    return RowDeltas(tuple(stack.layers[layer] for stack in slots.stacks), slots, plan)


def add_head(slots: Slots, plan: RowPlan, normed_RCD: jax.Array, logits_WV: jax.Array) -> jax.Array:
    """Logits with the rows' own deltas of the unembedding, where room for them is compiled in.

    Row after row on any device: gathered for all of them at once, the factors [r, V] would be copied per row and take more memory than logits.
    """
    if HEAD not in slots.stacks[0].tops["b"]:
        return logits_WV
    deltas = RowDeltas(tuple(stack.tops for stack in slots.stacks), slots, plan._replace(max_gathered=0))
    (logits_RCV,) = deltas.add((HEAD,), normed_RCD, (logits_WV.reshape(*normed_RCD.shape[:2], -1),))
    return logits_RCV.reshape(logits_WV.shape)


def _group_of(modules: tuple[str, ...]) -> tuple[str, ...]:
    """All modules that read the same input as these."""
    return next((group for group in INPUT_GROUPS if modules[0] in group), modules)


def _part(h: jax.Array, module: str, width: int, axis: int = 0) -> jax.Array:
    """One module's part of what `a` makes of its group's input."""
    start = _group_of((module,)).index(module) * width
    part: jax.Array = jax.lax.slice_in_dim(h, start, start + width, axis=axis)
    return part


def _at(stacked: jax.Array, index: jax.Array) -> jax.Array:
    found: jax.Array = jax.lax.dynamic_index_in_dim(stacked, index, 0, keepdims=False)
    return found


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.matmul(left, right.astype(jnp.float32), precision=_HIGHEST)


@final
class AdapterSlots:
    """Owner of the stacks. Touched by the device thread only."""

    def __init__(self, model: ModelConfig, num_slots: int, rank_classes: tuple[int, ...], tops: Collection[str]) -> None:
        """rank_classes: widths, ascending; each stack has room for all slots, so that any version fits into any free slot."""
        self.rank_classes = rank_classes
        self._model = model
        self._tops = tuple(tops)
        stacks = tuple(_empty_stack(model, num_slots, width, tops) for width in rank_classes)
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
    laid_out = Stack(tuple(_lay_out(layer) for layer in contents.layers), _lay_out(contents.tops))
    stack = jax.tree.map(lambda leaf, new: leaf.at[slot].set(new), stack, laid_out)
    return stack, scale_A.at[slot].set(scale), class_A.at[slot].set(index)


@jax.jit
def _checksum(stack: Stack, slot: jax.Array) -> jax.Array:
    found = jax.tree.map(lambda leaf: leaf[slot], stack)
    parts = [layer_checksum(_as_on_host(layer), index) for index, layer in enumerate(found.layers)]
    return jnp.sum(jnp.stack([*parts, layer_checksum(_as_on_host(found.tops), 0)]), dtype=jnp.uint32)


def _empty_stack(model: ModelConfig, num_slots: int, width: int, tops: Collection[str]) -> Stack:
    def zeros(shapes: dict[str, dict[str, tuple[int, int]]]) -> AdapterTree:
        a = {group[0]: jnp.zeros((num_slots, len(group) * width, shapes["a"][group[0]][0])) for group in _groups(shapes["a"])}
        return {"a": a, "b": {module: jnp.zeros((num_slots, *shape)) for module, shape in shapes["b"].items()}}

    return Stack(tuple(zeros(adapter_shapes(model, width)) for _ in range(model.num_layers)), zeros(top_shapes(model, width, tops)))


def _lay_out(adapter: HostAdapter) -> AdapterTree:
    a = {group[0]: jnp.concatenate([adapter["a"][module].T for module in group]) for group in _groups(adapter["a"])}
    return {"a": a, "b": {module: jnp.asarray(leaf) for module, leaf in adapter["b"].items()}}


def _as_on_host(slot: AdapterTree) -> AdapterTree:
    """The inverse of `_lay_out`."""
    a = {module: _part(slot["a"][_group_of((module,))[0]], module, leaf.shape[0]).T for module, leaf in slot["b"].items()}
    return {"a": a, "b": slot["b"]}


def _groups(modules: Collection[str]) -> list[tuple[str, ...]]:
    return list(dict.fromkeys(_group_of((module,)) for module in modules))


def _layer_of(adapter: HostAdapter, layer: int, modules: Iterable[str]) -> HostAdapter:
    return {side: {module: leaves[module][layer] for module in modules} for side, leaves in adapter.items()}
