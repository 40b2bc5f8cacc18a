"""The base's products and their gradients, in either dtype of a base."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noria.model.transformer import base_product


def operands(dtype):
    rng = np.random.default_rng(0)
    x, weight, d = (rng.normal(size=shape).astype(np.float32) for shape in ((64, 48), (48, 96), (64, 96)))
    return jnp.asarray(x), jnp.asarray(weight).astype(dtype), jnp.asarray(d)


def gradients(x, weight, d):
    y, pull = jax.vjp(base_product, x, weight)
    return y, *pull(d)


def test_in_float32_a_product_and_its_gradients_are_those_of_matmul_bit_for_bit():
    x, weight, d = operands(jnp.float32)
    y, pull = jax.vjp(lambda x, weight: jnp.matmul(x, weight, precision="highest"), x, weight)
    for found, expected in zip(gradients(x, weight, d), (y, *pull(d)), strict=True):
        assert np.array_equal(found, expected)


def test_in_bfloat16_operands_are_rounded_and_sums_are_not():
    x, weight, d = operands(jnp.bfloat16)
    rounded_x, rounded_d, exact_weight = (np.asarray(a.astype(jnp.bfloat16), np.float64) for a in (x, d, weight))
    y, d_x, d_weight = gradients(x, weight, d)
    assert (y.dtype, d_x.dtype, d_weight.dtype) == (jnp.float32, jnp.float32, jnp.bfloat16)
    np.testing.assert_allclose(y, rounded_x @ exact_weight, atol=1e-4)
    np.testing.assert_allclose(d_x, rounded_d @ exact_weight.T, atol=1e-4)
    np.testing.assert_allclose(np.asarray(d_weight, np.float64), rounded_x.T @ rounded_d, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_no_product_of_a_pull_has_operands_of_two_dtypes(dtype):
    """XLA would convert the weight, whole, for every tile."""
    lowered = jax.jit(gradients).lower(*operands(dtype)).as_text()
    found = re.findall(r"stablehlo.dot_general .*: \(tensor<[\dx]*(\w+)>, tensor<[\dx]*(\w+)>\)", lowered)
    assert found == [{"float32": ("f32", "f32"), "bfloat16": ("bf16", "bf16")}[jnp.dtype(dtype).name]] * 3
