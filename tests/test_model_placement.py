"""Base weights in JAX: one copy in memory, two forms."""

import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noria.model.params import Params, random_params
from noria.model.placement import base_dtype, choose_dtype, place
from noria.model.weights import load_base


def test_stacked_and_per_layer_weights_alias_the_same_host_memory_on_cpu() -> None:
    params = load_base("tiny").params
    placed = place(params)
    for name in ("embed", "final_norm"):
        assert placed.stacked[name].unsafe_buffer_pointer() == params[name].ctypes.data
    for name, array in params["layers"].items():
        assert placed.stacked["layers"][name].unsafe_buffer_pointer() == array.ctypes.data
        for layer, weights in enumerate(placed.layers):
            assert weights[name].unsafe_buffer_pointer() == array[layer].ctypes.data


def test_placed_weights_outlive_the_host_arrays() -> None:
    base = load_base("tiny")
    expected = base.params["layers"]["q"].copy()
    placed = place(base.params)
    del base
    gc.collect()
    _scribble = [np.full(1 << 14, 7.0, np.float32) for _ in range(200)]
    np.testing.assert_array_equal(placed.stacked["layers"]["q"], expected)
    np.testing.assert_array_equal(placed.layers[1]["q"], expected[1])


def test_unaligned_weights_are_placed_by_copy() -> None:
    params = load_base("tiny").params

    def shifted(array: np.ndarray) -> np.ndarray:
        memory = np.empty(array.nbytes + 128, np.uint8)
        first = -memory.ctypes.data % 64 + 4
        out = memory[first : first + array.nbytes].view(np.float32).reshape(array.shape)
        out[...] = array
        return out

    unaligned: Params = jax.tree.map(shifted, params)
    placed = place(unaligned)
    np.testing.assert_array_equal(placed.stacked["embed"], params["embed"])
    for layer in range(2):
        np.testing.assert_array_equal(placed.layers[layer]["down"], params["layers"]["down"][layer])


def test_matrices_take_the_asked_dtype_and_norms_stay_float32() -> None:
    params = load_base("tiny").params
    placed = place(params, jnp.bfloat16)
    layer = placed.layers[0]
    assert placed.stacked["embed"].dtype == layer["q"].dtype == jnp.bfloat16
    assert placed.stacked["final_norm"].dtype == layer["attn_norm"].dtype == jnp.float32
    assert layer["q"].unsafe_buffer_pointer() == placed.stacked["layers"]["q"].unsafe_buffer_pointer()
    np.testing.assert_array_equal(layer["q"], jnp.asarray(params["layers"]["q"][0]).astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("backend", "flags", "version", "dtype"),
    [
        ("gpu", (), (0, 10, 2), "bfloat16"),
        ("tpu", (), (0, 12), "bfloat16"),
        ("cpu", ("avx512f", "amx_bf16"), (0, 12, 0), "bfloat16"),
        ("cpu", ("avx512f", "amx_bf16"), (0, 10, 2), "float32"),
        ("cpu", ("avx512f", "avx512_bf16"), (0, 12, 0), "float32"),
        ("cpu", (), (0, 12, 0), "float32"),
    ],
)
def test_the_dtype_of_the_base_follows_backend_flags_and_version(backend, flags, version, dtype):
    assert choose_dtype(backend, frozenset(flags), version) == dtype


def test_this_machine_has_a_dtype():
    assert base_dtype() in ("float32", "bfloat16")


def test_biases_and_head_norms_stay_float32() -> None:
    config = dataclasses.replace(load_base("tiny").config, qkv_bias=True, o_bias=True, qk_norm=True)
    layer = place(random_params(config, 0), jnp.bfloat16).layers[1]
    assert {name for name, array in layer.items() if array.dtype == jnp.bfloat16} == {"q", "k", "v", "o", "gate", "up", "down"}
    assert {"q_bias", "k_bias", "v_bias", "o_bias", "q_norm", "k_norm"} <= layer.keys()
