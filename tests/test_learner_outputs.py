"""Token outputs and their pull against dense autodiff; adapters on the unembedding and value heads; the reference policy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_builders import pieces_of, random_groups, tiny

from noria.learner.step import Model, pull, reference, score, to_device
from noria.model.lora import HEAD, TOP_MODULES, VALUE, RowAdapters, delta, empty_slots
from noria.model.transformer import block, embed, forward_logits, head_product, rms_norm, rotary_angles
from noria.rl.losses import TokenCotangents, TokenOutputs
from noria.rl.packing import ENTRY_CHUNK, MicrobatchPlan, PlannedPiece, microbatch_shape, pack
from noria.types import ENTRY_TILE

SLOTS, RANK, SCALE = 4, 8, 2.0


@functools.cache
def model_with(tops=TOP_MODULES):
    """Random adapters in every slot."""
    config, base = tiny()
    slots, rng = empty_slots(config, SLOTS, RANK, tops), np.random.default_rng(3)
    slots = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.05, jnp.float32), slots)
    return Model(base.stacked, slots, jnp.full(SLOTS, SCALE))


def microbatch_of(*runs, length=256):
    """runs: (slot, pieces), or (slot, pieces, number of the first)."""
    pieces = [PlannedPiece(str(slot), slot, n, piece) for slot, run, *first in runs for n, piece in enumerate(run, *first)]
    return pack(MicrobatchPlan(microbatch_shape(length), tuple(pieces)))


def random_cotangents(microbatch, seed=0):
    """Of all three outputs, where a piece has entries. A run's own are the same wherever it lies."""
    found = np.zeros((3, len(microbatch.entries)), np.float32)
    for placed in microbatch.placed:
        rng = np.random.default_rng([seed, placed.slot, placed.piece_index])
        found[:, placed.first_entry : placed.first_entry + placed.num_entries] = rng.normal(size=(3, placed.num_entries))
    return TokenCotangents(*map(jnp.asarray, found))


def gradient_of(model, microbatch, sums=None, tiles_at_once=None):
    config, _ = tiny()
    arrays = to_device(microbatch, tiles_at_once)
    _, residuals = score(model, arrays, config)
    sums = jax.tree.map(jnp.zeros_like, model.slots) if sums is None else sums
    return pull(model, arrays, residuals, random_cotangents(microbatch), sums, config=config)


def of_slot(tree, slot):
    return {side: {m: np.asarray(leaf[:, slot]) for m, leaf in tree[side].items()} for side in tree}


def naive_outputs(adapter, piece):
    """The outputs of a piece's entries by dense attention under the mask rule; adapter: leaves [L, ...] of one run."""
    config, base = tiny()
    length = len(piece.ids_T)
    i, j = np.arange(length)[:, None], np.arange(length)[None, :]
    sees = jnp.asarray((j <= i) & (i < piece.end_T[None, :]))

    def attention(q, k, v):
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
        scores = jnp.einsum("rinh,rjnh->rnij", q, k) * q.shape[-1] ** -0.5
        return jnp.einsum("rnij,rjnh->rinh", jax.nn.softmax(jnp.where(sees, scores, -jnp.inf), -1), v)

    x, angles = embed(base.stacked, piece.ids_T[None]), rotary_angles(config, jnp.asarray(piece.depth_T)[None])
    for layer in range(config.num_layers):
        a, b = ({m: leaf[layer][None] for m, leaf in adapter[side].items() if m not in TOP_MODULES} for side in ("a", "b"))
        x = block(base.layers[layer], RowAdapters(a, b, jnp.full(1, SCALE)), x, angles=angles, attention=attention, config=config)
    rows = rms_norm(x[0][piece.entries.predict_from_M], base.stacked["final_norm"], config.rms_norm_eps)

    def of(module):
        return delta(rows[None], adapter["a"][module], adapter["b"][module], jnp.full(1, SCALE))[0]

    logits = head_product(base.stacked, rows) + (of(HEAD) if HEAD in adapter["a"] else 0.0)
    log_p = jax.nn.log_softmax(logits / piece.entries.temperature_M[:, None], -1)
    chosen = jnp.take_along_axis(log_p, piece.entries.target_M[:, None], 1)[:, 0]
    value = of(VALUE)[:, 0] if VALUE in adapter["a"] else jnp.zeros(len(rows))
    return TokenOutputs(chosen, -(jnp.exp(log_p) * log_p).sum(-1), value)


@pytest.mark.parametrize("tops", [(), (VALUE,), TOP_MODULES], ids=["layers alone", "value", "head and value"])
def test_outputs_and_the_pull_of_all_three_equal_dense_autodiff(tops):
    config, model = tiny()[0], model_with(tops)
    (piece,) = pieces_of(random_groups(1, turns=2))
    on_one = np.stack((piece.entries.predict_from_M, piece.entries.target_M))
    assert len(np.unique(on_one, axis=1).T) < len(piece.entries), "several entries must stand on one position"
    microbatch = microbatch_of((2, [piece]))
    count = len(piece.entries)
    outputs, _ = score(model, to_device(microbatch), config)
    adapter = jax.tree.map(jnp.asarray, of_slot(model.slots, 2))
    for got, want in zip(outputs, naive_outputs(adapter, piece), strict=True):
        np.testing.assert_allclose(got[:count], want, rtol=1e-5, atol=1e-5)
    assert bool(np.asarray(outputs.value_M).any()) == (VALUE in tops)
    weights = [d_M[:count] for d_M in random_cotangents(microbatch)]

    @jax.jit
    def total(adapter):
        return sum((d_M * output_M).sum() for d_M, output_M in zip(weights, naive_outputs(adapter, piece), strict=True))

    got, want = of_slot(gradient_of(model, microbatch), 2), jax.grad(total)(adapter)
    for got_leaf, want_leaf in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(want_leaf) > 0
        assert np.linalg.norm(got_leaf - want_leaf) <= 1e-5 * np.linalg.norm(want_leaf)


MINE = pieces_of(random_groups(5, num_groups=5, prompt=40, turns=2), 128)
"""Several pieces, none of which fills a tile of entries."""


def split_gradient(model, *microbatches):
    sums = None
    for microbatch in microbatches:
        sums = gradient_of(model, microbatch, sums)
    return of_slot(sums, 1)


@pytest.fixture(scope="module")
def alone():
    assert len(MINE) > 1
    assert any(len(piece.entries) % ENTRY_TILE for piece in MINE)
    return split_gradient(model_with(), microbatch_of((1, MINE), length=512))


def assert_same_bits(got, want):
    for side in want:
        for module, leaf in want[side].items():
            assert leaf.any()
            assert got[side][module].tobytes() == leaf.tobytes(), (side, module)


def test_a_runs_gradient_of_every_module_is_bit_equal_beside_neighbours_and_over_any_split(alone):
    neighbour, other = pieces_of(random_groups(6)), pieces_of(random_groups(7, num_groups=1))
    beside = split_gradient(model_with(), microbatch_of((0, neighbour), (1, MINE), (3, other), length=768))
    assert_same_bits(beside, alone)
    split = [microbatch_of((3, other), (1, [piece], number)) for number, piece in enumerate(MINE)]
    assert_same_bits(split_gradient(model_with(), *split), alone)


def test_a_neighbours_nan_reaches_no_entry_and_no_top_module_of_a_run(alone):
    model = model_with()
    for slot, order in ((0, (0, 1)), (3, (1, 3))):
        slots = {side: {m: leaf.at[:, slot].set(jnp.nan) for m, leaf in model.slots[side].items()} for side in model.slots}
        broken = pieces_of(random_groups(6))
        microbatch = microbatch_of(*((s, MINE if s == 1 else broken) for s in order), length=768)
        gradient = gradient_of(model._replace(slots=slots), microbatch)
        assert np.isnan(of_slot(gradient, slot)["a"][HEAD]).any()
        assert_same_bits(of_slot(gradient, 1), alone)
        for idle in {0, 2, 3} - {slot}:
            assert not any(leaf.any() for leaf in jax.tree.leaves(of_slot(gradient, idle)))


def test_blocks_of_one_tile_and_the_whole_axis_at_once_give_the_same_gradient():
    microbatch = microbatch_of((1, MINE), length=512)
    one, all_at_once = (jax.tree.leaves(gradient_of(model_with(), microbatch, tiles_at_once=n)) for n in (1, 8))
    for a, b in zip(one, all_at_once, strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)


def test_the_reference_is_the_base_and_costs_no_program():
    config, base = tiny()
    (piece,) = pieces_of(random_groups(1))
    arrays = to_device(microbatch_of((2, [piece])))
    score(model_with(), arrays, config)
    before = score._cache_size()
    got = reference(model_with(), arrays, config)[: len(piece.entries)]
    assert score._cache_size() == before
    entries = piece.entries
    for m in range(0, len(entries), 5):
        position = entries.predict_from_M[m]
        seen = np.flatnonzero((np.arange(len(piece.ids_T)) <= position) & (position < piece.end_T))
        logits = forward_logits(base.stacked, config, piece.ids_T[seen])[-1] / entries.temperature_M[m]
        assert float(got[m]) == pytest.approx(float(jax.nn.log_softmax(logits)[entries.target_M[m]]), rel=1e-4, abs=1e-5)


def test_no_array_of_entries_by_vocabulary_exists():
    config, model = tiny()[0], model_with()
    microbatch = microbatch_of((1, MINE), length=512)
    arrays = to_device(microbatch)
    text = score.lower(model, arrays, config).compile().as_text()
    assert f"[{ENTRY_CHUNK},{config.vocab_size}]" in text
    assert f"[{len(microbatch.entries)},{config.vocab_size}]" not in text
