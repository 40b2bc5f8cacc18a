"""From logits to ids: a seeded draw over the whole vocabulary, over its most likely part (top-k, top-p), and the most likely ids themselves.

The vocabulary lies as a matrix: reductions over its rows use vector instructions, over a flat vocabulary they do not. There is no sort: where the
part that is kept ends is found by bisection, in passes that only count or add, and a dispatch whose lanes are all unconstrained makes none.

    W lane   V vocabulary, as Y rows of Z columns: id = y * Z + z   X whatever is drawn from   T most likely ids
"""

from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from noria.types import MAX_TOP

_COLUMNS = 256
"""Columns of the vocabulary as a matrix."""

_DEPTH = 64.0
"""What lies so far below the peak has a weight below 2e-28: no draw ever finds it, so that no bisection looks there."""

_EVEN_STEPS = 16
"""Bisections by value: then numbers 0.001 apart are parted. What is closer is parted by halving the number of floats between, in at most 32."""

_TRUSTED = 1e-5
"""Of the total weight: what is smaller may be lost in the rounding of a sum."""


_Search: TypeAlias = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]
"""Steps so far; low and high as ordered integers; what is reached at both."""


class Choice(NamedTuple):
    """How each lane draws. seed_W2: high and low 32 bits, uint32. temperature_W: 0 takes the most likely id. top_k_W: 0 for all; top_p_W: 1 for all.
    num_top_W: most likely ids wanted."""

    seed_W2: Any
    sample_index_W: Any
    temperature_W: Any
    top_k_W: Any
    top_p_W: Any
    num_top_W: Any


class Drawn(NamedTuple):
    """id_W; logprobs_W: natural log, after temperature, over the full vocabulary, whatever part was drawn from; the most likely ids, most likely
    first, of equals the smaller, and their log-probabilities, where any lane wants them."""

    id_W: jax.Array
    logprobs_W: jax.Array
    top_id_WT: jax.Array
    top_logprobs_WT: jax.Array


class Table(NamedTuple):
    """A softmax before its division. scaled_WYZ: logits after temperature, -inf beyond the vocabulary. weight_WYZ: exp(scaled - peak).
    weight_WZ, total_W: sums of the weights."""

    scaled_WYZ: jax.Array
    peak_W: jax.Array
    weight_WYZ: jax.Array
    weight_WZ: jax.Array
    total_W: jax.Array

    def logprobs(self, id_W: jax.Array) -> jax.Array:
        """Log-probabilities of one id per lane."""
        width = self.peak_W.shape[0]
        chosen_W = jnp.take_along_axis(self.scaled_WYZ.reshape(width, -1), id_W[:, None], axis=1)[:, 0]
        return chosen_W - self.peak_W - jnp.log(self.total_W)


class _Part(NamedTuple):
    """What is kept of each lane: everything above the floor, and of what equals it the ids up to the last."""

    floor_W: jax.Array
    last_id_W: jax.Array


@partial(jax.named_call, name="draw")
def draw(logits_WV: jax.Array, choice: Choice, position_W: jax.Array) -> Drawn:
    """One id per lane, drawn from softmax(logits / temperature) or the part of it that top-k and top-p leave; temperature 0: the most likely.

    The key of a token is fold_in(fold_in(seed, sample index), position of the sampled token): it depends on nothing else in the batch. The draw
    inverts the cumulative distribution in two stages, over the columns, then within a column: two random numbers instead of one per id (Gumbel-max),
    which cost as much as all matmuls of a decode step on CPU. An unconstrained lane has the same bits beside constrained ones.
    """
    is_random_W = choice.temperature_W > 0
    table = tabulate(logits_WV / jnp.where(is_random_W, choice.temperature_W, 1.0)[:, None])
    is_cut_W = is_random_W & ((choice.top_k_W > 0) | (choice.top_p_W < 1))
    uniform_W2 = jax.vmap(_uniform_pair)(choice.seed_W2, choice.sample_index_W, position_W)
    drawn_W = jax.lax.cond(jnp.any(is_cut_W), _draw_part, _draw_whole, table, choice, is_cut_W, uniform_W2)
    best_W = jax.lax.cond(jnp.all(is_random_W), lambda: drawn_W, lambda: _best(table, logits_WV.shape[1]))
    id_W = jnp.where(is_random_W, drawn_W, best_W)
    return Drawn(id_W, table.logprobs(id_W), *most_likely(table, choice.num_top_W))


def tabulate(scaled_WV: jax.Array) -> Table:
    """The table of logits after temperature."""
    width, vocab_size = scaled_WV.shape
    scaled_WYZ = jnp.pad(scaled_WV, ((0, 0), (0, -vocab_size % _COLUMNS)), constant_values=-jnp.inf).reshape(width, -1, _COLUMNS)
    peak_W = scaled_WYZ.max(1).max(1)
    weight_WYZ = jnp.exp(scaled_WYZ - peak_W[:, None, None])
    weight_WZ = weight_WYZ.sum(1)
    return Table(scaled_WYZ, peak_W, weight_WYZ, weight_WZ, weight_WZ.sum(1))


# The most likely ids


def most_likely(table: Table, num_top_W: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As many of the most likely ids [W, T] as the lane that wants most wants, and their log-probabilities; zeros beyond them.

    One after another, each the best of the columns' best; then its column alone is looked through for what comes next in it.
    """
    width = table.peak_W.shape[0]
    lane_W, y_Y = jnp.arange(width), jnp.arange(table.scaled_WYZ.shape[1], dtype=jnp.int32)
    empty = jnp.zeros((width, MAX_TOP), jnp.int32), jnp.zeros((width, MAX_TOP), jnp.float32)

    def take(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        id_WT, logprobs_WT, best_WZ, row_WZ = carry
        value_W = best_WZ.max(1)
        id_WZ = row_WZ * _COLUMNS + jnp.arange(_COLUMNS, dtype=jnp.int32)
        id_W = jnp.where(best_WZ == value_W[:, None], id_WZ, table.scaled_WYZ[0].size - 1).min(1)
        row_W, z_W = id_W // _COLUMNS, id_W % _COLUMNS
        column_WY = _column(table.scaled_WYZ, z_W)
        is_later_WY = (column_WY < value_W[:, None]) | ((column_WY == value_W[:, None]) & (y_Y > row_W[:, None]))
        best_W, next_row_W = _first_best(jnp.where(is_later_WY, column_WY, -jnp.inf)[:, :, None])
        best_WZ, row_WZ = best_WZ.at[lane_W, z_W].set(best_W[:, 0]), row_WZ.at[lane_W, z_W].set(next_row_W[:, 0])
        return id_WT.at[:, index].set(id_W), logprobs_WT.at[:, index].set(table.logprobs(id_W)), best_WZ, row_WZ

    def select() -> tuple[jax.Array, jax.Array]:
        found = jax.lax.fori_loop(0, num_top_W.max(), take, (*empty, *_first_best(table.scaled_WYZ)))
        return found[0], found[1]

    found: tuple[jax.Array, jax.Array] = jax.lax.cond(jnp.any(num_top_W > 0), select, lambda: empty)
    return found


def _first_best(value_WYZ: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of each column the largest value, and the first row that has it."""
    best_WZ = value_WYZ.max(1)
    y_Y1 = jnp.arange(value_WYZ.shape[1], dtype=jnp.int32)[:, None]
    return best_WZ, jnp.where(value_WYZ == best_WZ[:, None], y_Y1, value_WYZ.shape[1] - 1).min(1)


def _best(table: Table, vocab_size: int) -> jax.Array:
    """The most likely id of every lane, of equals the smallest."""
    return jnp.where(table.scaled_WYZ == table.peak_W[:, None, None], _ids(table), vocab_size - 1).min(1).min(1)


def _ids(table: Table) -> jax.Array:
    return jnp.arange(table.scaled_WYZ[0].size, dtype=jnp.int32).reshape(table.scaled_WYZ.shape[1:])


# Draws


def _draw_whole(table: Table, choice: Choice, is_cut_W: jax.Array, uniform_W2: jax.Array) -> jax.Array:
    z_W = _draw_index(table.weight_WZ, uniform_W2[:, 0])
    return _draw_index(_column(table.weight_WYZ, z_W), uniform_W2[:, 1]) * _COLUMNS + z_W


def _draw_part(table: Table, choice: Choice, is_cut_W: jax.Array, uniform_W2: jax.Array) -> jax.Array:
    """As `_draw_whole`, from what top-k, then top-p keep. Lanes that are not cut read the very sums that it reads."""
    part = _kept_part(table, choice, is_cut_W)
    kept_WZ = jnp.where(_is_in(part, table.scaled_WYZ, _ids(table)), table.weight_WYZ, 0.0).sum(1)
    z_W = _draw_index(jnp.where(is_cut_W[:, None], kept_WZ, table.weight_WZ), uniform_W2[:, 0])
    id_WY1 = (jnp.arange(table.scaled_WYZ.shape[1], dtype=jnp.int32) * _COLUMNS + z_W[:, None])[:, :, None]
    is_in_WY = _is_in(part, _column(table.scaled_WYZ, z_W)[:, :, None], id_WY1)[:, :, 0]
    weight_WY = jnp.where(is_in_WY | ~is_cut_W[:, None], _column(table.weight_WYZ, z_W), 0.0)
    return _draw_index(weight_WY, uniform_W2[:, 1]) * _COLUMNS + z_W


def _column(table_WYZ: jax.Array, z_W: jax.Array) -> jax.Array:
    return jnp.take_along_axis(table_WYZ, z_W[:, None, None], axis=2)[:, :, 0]


def _uniform_pair(seed_2: jax.Array, sample_index: jax.Array, position: jax.Array) -> jax.Array:
    """Two uniform numbers in [0, 1)."""
    key = jax.random.wrap_key_data(seed_2, impl="threefry2x32")
    return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, sample_index), position), (2,), jnp.float32)


def _draw_index(weight_WX: jax.Array, uniform_W: jax.Array) -> jax.Array:
    """An index per row with probability proportional to its weight; never one of weight 0, whatever the rounding of the cumulative sums."""
    size = weight_WX.shape[1]
    index_X = jnp.arange(size, dtype=jnp.int32)
    cumulative_WX = jnp.cumsum(weight_WX, axis=1)
    is_possible_WX = weight_WX > 0
    is_reached_WX = is_possible_WX & (cumulative_WX > uniform_W[:, None] * cumulative_WX[:, -1:])
    first_W = jnp.where(is_reached_WX, index_X, size).min(1)
    last_W = jnp.where(is_possible_WX, index_X, 0).max(1)
    return jnp.minimum(first_W, last_W)


# The part that top-k and top-p keep


def _is_in(part: _Part, scaled_WYZ: jax.Array, id_WYZ: jax.Array) -> jax.Array:
    floor_W11, last_W11 = part.floor_W[:, None, None], part.last_id_W[:, None, None]
    return (scaled_WYZ > floor_W11) | ((scaled_WYZ == floor_W11) & (id_WYZ <= last_W11))


def _kept_part(table: Table, choice: Choice, is_cut_W: jax.Array) -> _Part:
    """The k most likely ids; of these the fewest most likely whose probabilities, divided by their sum, reach top_p; of equals the smaller ids.

    Exact, but for the rounding of sums of weights (1e-6 of the total), and but for ids of weights below 2e-28, which no draw finds.
    """
    size = table.scaled_WYZ[0].size
    everything = _Part(jnp.full_like(table.peak_W, -jnp.inf), jnp.full(table.peak_W.shape, size, jnp.int32))
    has_k_W = is_cut_W & (choice.top_k_W > 0) & (choice.top_k_W < size)
    most = _reach(table, jnp.ones(()), choice.top_k_W.astype(jnp.float32), has_k_W, everything)
    has_p_W = is_cut_W & (choice.top_p_W < 1)

    def weights_of_most() -> jax.Array:
        return jnp.where(_is_in(most, table.scaled_WYZ, _ids(table)), table.weight_WYZ, 0.0)

    weight_WYZ = jax.lax.cond(jnp.any(has_k_W & has_p_W), weights_of_most, lambda: table.weight_WYZ)
    return _reach(table, weight_WYZ, choice.top_p_W * weight_WYZ.sum(1).sum(1), has_p_W, most)


def _reach(table: Table, amount_WYZ: jax.Array, target_W: jax.Array, is_on_W: jax.Array, within: _Part) -> _Part:
    """The smallest part, most likely first, whose amounts (1, or the weights) add up to the target. Amounts are 0 outside of `within`, which is the
    answer of lanes that are not on.

    Invariant of the bisection: what is >= low reaches the target, what is >= high does not. A lane is done when nothing, or one id, lies between;
    a lane that is done does not move while others go on, so that it depends on no neighbour.
    """
    is_count = amount_WYZ.ndim == 0

    def reached(order_W: jax.Array) -> jax.Array:
        return jnp.where(table.scaled_WYZ >= _float_of(order_W)[:, None, None], amount_WYZ, 0.0).sum(1).sum(1)

    def is_open(low_W: jax.Array, high_W: jax.Array, at_low_W: jax.Array, at_high_W: jax.Array) -> jax.Array:
        smallest_W = jnp.ones_like(table.peak_W) if is_count else jnp.exp(_float_of(low_W) - table.peak_W)
        is_single_W = (at_low_W - at_high_W < 1.5 * smallest_W) & (is_count | (smallest_W > _TRUSTED * table.total_W))
        return is_on_W & (low_W + 1 < high_W) & ~is_single_W

    def halve(carry: _Search) -> _Search:
        step, low_W, high_W, at_low_W, at_high_W = carry
        by_value_W = _order_of(0.5 * _float_of(low_W) + 0.5 * _float_of(high_W))
        by_order_W = (low_W >> 1) + (high_W >> 1) + (low_W & high_W & 1)
        middle_W = jnp.clip(jnp.where(step < _EVEN_STEPS, by_value_W, by_order_W), low_W + 1, high_W - 1)
        at_middle_W = reached(middle_W)
        is_moved_W, is_enough_W = is_open(*carry[1:]), at_middle_W >= target_W
        moves_low_W, moves_high_W = is_moved_W & is_enough_W, is_moved_W & ~is_enough_W
        low_W, at_low_W = jnp.where(moves_low_W, middle_W, low_W), jnp.where(moves_low_W, at_middle_W, at_low_W)
        high_W, at_high_W = jnp.where(moves_high_W, middle_W, high_W), jnp.where(moves_high_W, at_middle_W, at_high_W)
        return step + 1, low_W, high_W, at_low_W, at_high_W

    low_W, high_W = _order_of(table.peak_W - _DEPTH), _order_of(table.peak_W) + 1
    start = jnp.int32(0), low_W, high_W, jnp.full_like(table.peak_W, jnp.inf), jnp.zeros_like(table.peak_W)
    _, low_W, high_W, _, at_high_W = jax.lax.while_loop(lambda carry: jnp.any(is_open(*carry[1:])), halve, start)
    floor_W = _float_of(low_W)
    equal_W = jnp.ones_like(floor_W) if is_count else jnp.exp(floor_W - table.peak_W)
    num_equal_W = jnp.clip(jnp.ceil((target_W - at_high_W) / equal_W), 1, table.scaled_WYZ[0].size).astype(jnp.int32)
    last_id_W = _last_of_equals(table, floor_W, num_equal_W, is_on_W & (low_W + 1 >= high_W))
    found = _both(_Part(floor_W, last_id_W), within)
    return _Part(*(jnp.where(is_on_W, new, old) for new, old in zip(found, within, strict=True)))


def _both(left: _Part, right: _Part) -> _Part:
    """What both keep: the part whose floor is higher, of equal floors the ids up to the smaller last one."""
    last_W = jnp.where(left.floor_W > right.floor_W, left.last_id_W, right.last_id_W)
    last_W = jnp.where(left.floor_W == right.floor_W, jnp.minimum(left.last_id_W, right.last_id_W), last_W)
    return _Part(jnp.maximum(left.floor_W, right.floor_W), last_W)


def _last_of_equals(table: Table, floor_W: jax.Array, num_W: jax.Array, is_on_W: jax.Array) -> jax.Array:
    """The id of the num-th of the ids that equal the floor, the largest id where there are no more or a lane is not on; by bisection too."""
    size = table.scaled_WYZ[0].size

    def count(last_W: jax.Array) -> jax.Array:
        is_equal_WYZ = (table.scaled_WYZ == floor_W[:, None, None]) & (_ids(table) <= last_W[:, None, None])
        return is_equal_WYZ.astype(jnp.int32).sum(1).sum(1)

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low_W, high_W = bounds
        middle_W = (low_W + high_W) // 2
        is_enough_W = count(middle_W) >= num_W
        return jnp.where(is_enough_W, low_W, middle_W + 1), jnp.where(is_enough_W, middle_W, high_W)

    def search() -> jax.Array:
        has_more_W = is_on_W & (count(last_W) > num_W)
        low_W = jnp.where(has_more_W, 0, last_W)
        return jax.lax.while_loop(lambda bounds: jnp.any(bounds[0] < bounds[1]), halve, (low_W, last_W))[1]

    last_W = jnp.full(floor_W.shape, size - 1, jnp.int32)
    found_W: jax.Array = jax.lax.cond(jnp.any(is_on_W), search, lambda: last_W)
    return found_W


def _order_of(x: jax.Array) -> jax.Array:
    """Floats as integers in the same order; 0.0 and -0.0 are neighbours."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _float_of(order: jax.Array) -> jax.Array:
    """The inverse of `_order_of`."""
    return jax.lax.bitcast_convert_type(jnp.where(order < 0, order ^ jnp.int32(0x7FFFFFFF), order), jnp.float32)
