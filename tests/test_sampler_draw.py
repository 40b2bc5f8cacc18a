"""The draw against NumPy: the part that top-k and top-p leave, the most likely ids, log-probabilities, and what neighbours may not change."""

from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.sampler.draw import Choice, _kept_part, draw, most_likely, tabulate
from noria.types import MAX_TOP

WIDTH = 8
VOCABULARIES = (300, 1000)  # one not filled to whole columns, both of several rows

_draw = jax.jit(draw)
_most_likely = jax.jit(lambda scaled, num_top: most_likely(tabulate(scaled), num_top))


@jax.jit
def kept(scaled_WV, top_k_W, top_p_W):
    """The mask [W, V] of what is kept."""
    table = tabulate(scaled_WV)
    choice = Choice(None, None, None, top_k_W, top_p_W, None)
    part = _kept_part(table, choice, np.ones(len(scaled_WV), bool))
    is_tie = (scaled_WV == part.floor_W[:, None]) & (np.arange(scaled_WV.shape[1]) <= part.last_id_W[:, None])
    return (scaled_WV > part.floor_W[:, None]) | is_tie


def kept_plainly(scaled_V, top_k, top_p, slack=0.0):
    """How many of the ids, in the order of `ranked`, are kept: top-k, then the fewest whose renormalized probabilities reach top_p + slack."""
    order = ranked(scaled_V)
    count = min(top_k or len(order), len(order))
    weight = np.exp(scaled_V[order[:count]].astype(np.float64) - scaled_V.max())
    if top_p < 1:
        reached = np.cumsum(weight) / weight.sum() >= top_p + slack
        count = int(np.argmax(reached)) + 1 if reached.any() else count
    return count


def ranked(scaled_V):
    """Ids, most likely first, of equals the smaller first."""
    return np.lexsort((np.arange(len(scaled_V)), -scaled_V))


def logits_of(seed, vocab_size, kind):
    rng = np.random.default_rng(seed)
    if kind == "smooth":
        return rng.normal(0, rng.uniform(0.2, 6), (WIDTH, vocab_size)).astype(np.float32)
    if kind == "ties":
        return rng.integers(-3, 4, (WIDTH, vocab_size)).astype(np.float32)
    return np.zeros((WIDTH, vocab_size), np.float32) + np.float32(rng.normal())


def choice_of(seed=0, **changes):
    columns = {
        "seed_W2": np.full((WIDTH, 2), seed, np.uint32),
        "sample_index_W": np.arange(WIDTH, dtype=np.int32),
        "temperature_W": np.ones(WIDTH, np.float32),
        "top_k_W": np.zeros(WIDTH, np.int32),
        "top_p_W": np.ones(WIDTH, np.float32),
        "num_top_W": np.zeros(WIDTH, np.int32),
    }
    return Choice(**columns | changes)


@pytest.mark.parametrize("kind", ["smooth", "ties", "flat"])
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.data())
def test_what_top_k_and_top_p_keep_is_what_sorting_keeps(kind, seed, data):
    vocab_size = data.draw(st.sampled_from(VOCABULARIES))
    top_k = data.draw(st.lists(st.sampled_from([0, 1, 2, 7, 50, 299, 5000]), min_size=WIDTH, max_size=WIDTH))
    top_p = data.draw(st.lists(st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.95, 0.999, 1.0]), min_size=WIDTH, max_size=WIDTH))
    scaled = logits_of(seed, vocab_size, kind)
    mask = np.asarray(kept(scaled, np.array(top_k, np.int32), np.array(top_p, np.float32)))
    for lane in range(WIDTH):
        order, found = ranked(scaled[lane]), int(mask[lane].sum())
        assert mask[lane][order[:found]].all(), "what is kept is the beginning of the ranking"
        least, most = (kept_plainly(scaled[lane], top_k[lane], top_p[lane], slack) for slack in (-2e-6, 2e-6))
        assert least <= found <= most, (top_k[lane], top_p[lane])
        assert top_p[lane] < 1 or found == min(top_k[lane] or vocab_size, vocab_size)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["smooth", "ties", "flat"]))
def test_the_most_likely_ids_are_those_of_a_sort_and_of_equals_the_smaller_come_first(seed, kind):
    scaled = logits_of(seed, 1000, kind)
    id_WT, logprobs_WT = (np.asarray(x) for x in _most_likely(scaled, np.full(WIDTH, MAX_TOP, np.int32)))
    for lane in range(WIDTH):
        assert id_WT[lane].tolist() == ranked(scaled[lane])[:MAX_TOP].tolist()
        full = scaled[lane].astype(np.float64)
        expected = full[id_WT[lane]] - full.max() - np.log(np.exp(full - full.max()).sum())
        np.testing.assert_allclose(logprobs_WT[lane], expected, atol=1e-5)


def test_a_lane_has_the_same_bits_whatever_its_neighbours_ask_for():
    logits = logits_of(3, 1000, "smooth")
    logits[6] = np.nan
    mine = np.array([True, False, True, False, False, False, False, False])
    alone = _draw(logits, choice_of(), np.arange(WIDTH))
    cut = choice_of(
        top_k_W=np.where(mine, 0, 5).astype(np.int32),
        top_p_W=np.where(mine, 1.0, 0.7).astype(np.float32),
        temperature_W=np.array([1, 1, 1, 0, 1, 0.3, 1, 2], np.float32),
        num_top_W=np.array([0, 0, 0, 5, 0, 0, 20, 0], np.int32),
    )
    beside = _draw(logits, cut, np.arange(WIDTH))
    for left, right in zip(alone[:2], beside[:2], strict=True):
        assert np.asarray(left)[mine].tobytes() == np.asarray(right)[mine].tobytes()
    again = _draw(logits[::-1].copy(), jax.tree.map(lambda x: x[::-1].copy(), cut), np.arange(WIDTH)[::-1].copy())
    for left, right in zip(jax.tree.leaves(beside), jax.tree.leaves(again), strict=True):
        assert np.asarray(left).tobytes() == np.asarray(right)[::-1].tobytes()


def test_logprobs_are_those_of_the_whole_vocabulary_whatever_is_drawn_from():
    logits, temperature = logits_of(4, 1000, "smooth"), np.float32(0.7)
    cut = choice_of(top_k_W=np.full(WIDTH, 3, np.int32), temperature_W=np.full(WIDTH, temperature))
    drawn = _draw(logits, cut, np.arange(WIDTH))
    for lane, (id_, logprob) in enumerate(zip(np.asarray(drawn.id_W), np.asarray(drawn.logprobs_W), strict=True)):
        scaled = logits[lane].astype(np.float64) / temperature
        assert id_ in ranked(logits[lane])[:3]
        assert abs(scaled[id_] - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum()) - logprob) < 1e-5


def test_constrained_frequencies_are_the_renormalized_probabilities():
    scaled = np.full(1000, -4.0, np.float32)
    scaled[[5, 261, 517, 900]] = 3.0, 2.0, 2.0, 1.0
    logits = np.tile(scaled, (WIDTH, 1))
    cut = choice_of(top_k_W=np.full(WIDTH, 3, np.int32), top_p_W=np.full(WIDTH, 0.9, np.float32))
    many = jax.jit(jax.vmap(partial(draw, logits), in_axes=(Choice(0, None, None, None, None, None), None)))
    seeds = np.zeros((500, WIDTH, 2), np.uint32)
    seeds[:, :, 1] = np.arange(500)[:, None]
    ids = np.asarray(many(cut._replace(seed_W2=seeds), np.arange(WIDTH)).id_W).ravel()
    weight = np.exp([3.0, 2.0, 2.0])
    for id_, expected in zip((5, 261, 517), weight / weight.sum(), strict=True):
        assert abs((ids == id_).mean() - expected) < 4 * np.sqrt(expected * (1 - expected) / ids.size)
    assert set(ids.tolist()) == {5, 261, 517}
