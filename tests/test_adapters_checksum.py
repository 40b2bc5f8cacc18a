"""The adapter checksum: one number on host and device, of every bit and every place."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_builders import nonzero_state, spec, tiny

from noria.model.lora import HEAD, MODULES, VALUE, adapter_shapes, checksum, host_shapes, layer_checksum, resize_rank, zero_adapter

NUM_LAYERS = tiny()[0].num_layers


@jax.jit
def on_device(adapter):
    layers = (jax.tree.map(lambda leaf, layer=layer: leaf[layer], adapter) for layer in range(NUM_LAYERS))
    return sum(layer_checksum(layer, index) for index, layer in enumerate(layers))


def any_bits(seed):
    """An adapter of uniformly random bits: NaN, infinities, denormals and negative zeros too."""
    rng, shapes = np.random.default_rng(seed), adapter_shapes(tiny()[0], 8)
    bits = {side: {m: rng.integers(0, 2**32, (NUM_LAYERS, *shape), np.uint32) for m, shape in shapes[side].items()} for side in shapes}
    return jax.tree.map(lambda leaf: leaf.view(np.float32), bits)


def naive(adapter):
    """Element by element, in Python integers."""
    total = 0
    for s, side in enumerate("ab"):
        for m, module in enumerate(module for module in (*MODULES, HEAD, VALUE) if module in adapter[side]):
            for (layer, row, column), value in np.ndenumerate(adapter[side][module].view(np.uint32)):
                weight = row * 0x9E3779B1 + column * 0x85EBCA77 + layer * 0xC2B2AE3D + (2 * m + s + 1) * 0x27D4EB2F
                total += int(value) * ((weight % 2**32) | 1)
    return total % 2**32


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32))
def test_host_and_device_agree_on_any_bits(seed):
    adapter = any_bits(seed)
    assert checksum(adapter) == int(on_device(jax.tree.map(jnp.asarray, adapter)))


def test_the_checksum_is_the_sum_of_weighted_bits():
    adapter = resize_rank(any_bits(0), 2)
    assert checksum(adapter) == naive(adapter)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_flipped_bit_changes_it(data):
    adapter = any_bits(1)
    before = checksum(adapter)
    side, module = data.draw(st.sampled_from("ab")), data.draw(st.sampled_from(MODULES))
    bits = adapter[side][module].view(np.uint32)
    where = tuple(data.draw(st.integers(0, size - 1)) for size in bits.shape)
    bits[where] ^= np.uint32(1 << data.draw(st.integers(0, 31)))
    assert checksum(adapter) != before


def with_head(adapter, seed):
    """The adapter with an unembedding of random bits."""
    rng, shapes = np.random.default_rng(seed), host_shapes(tiny()[0], adapter["a"]["q"].shape[-1])
    return {side: leaves | {HEAD: rng.integers(0, 2**32, shapes[side][HEAD], np.uint32).view(np.float32)} for side, leaves in adapter.items()}


@jax.jit
def top_on_device(adapter):
    return layer_checksum({side: {HEAD: leaves[HEAD][0]} for side, leaves in adapter.items()}, 0)


def test_an_adapted_unembedding_counts_with_weights_of_its_own():
    adapter = with_head(resize_rank(any_bits(0), 1), 2)
    assert checksum(adapter) == naive(adapter)
    assert checksum(adapter) == int(on_device(jax.tree.map(jnp.asarray, resize_rank(any_bits(0), 1))) + top_on_device(adapter)) % 2**32
    adapter["b"][HEAD].view(np.uint32)[0, 0, 7] ^= np.uint32(1)
    assert checksum(adapter) != naive(with_head(resize_rank(any_bits(0), 1), 2))


def test_an_adapted_unembedding_of_zeros_weighs_nothing():
    config, adapter = tiny()[0], resize_rank(any_bits(0), 4)
    shapes = host_shapes(config, 4)
    head = {side: leaves | {HEAD: np.zeros(shapes[side][HEAD], np.float32)} for side, leaves in adapter.items()}
    assert checksum(head) == checksum(adapter)
    assert checksum(zero_adapter(config, 4)) == 0


def test_it_does_not_depend_on_the_rank_class():
    params = nonzero_state(1, spec("run", rank=4)).params
    assert len({checksum(resize_rank(params, rank)) for rank in (4, 8, 64)}) == 1
