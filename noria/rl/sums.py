"""Sums over segments that depend on the segment's own numbers only: not on their order, nor on what stands beside them.

A float sum depends on the order of its terms, and a scatter on an accelerator adds in any order. A decision that hangs on such a sum (drop this
sequence, clip this ratio) would then hang on the neighbours. Here each term is rounded to a fixed point, its digits are added as integers, which is
exact in any order, and the total is rounded once. Thirty thousand equal terms lose nothing, where a running float32 sum loses three digits.

Shape letters: M entry, S segment.
"""

from typing import Final

import jax
import jax.numpy as jnp

_DIGIT_BITS: Final = 10
"""Of the two lower digits. An int32 holds the sum of 2^21 of them: more entries than a batch has."""
_DIGIT: Final = (1 << _DIGIT_BITS) - 1


def segment_sums(
    x_M: jax.Array, is_counted_M: jax.Array, segment_M: jax.Array, num_segments: int, *, fraction_bits: int = 25
) -> tuple[jax.Array, jax.Array]:
    """Sum float32 [S] and number float32 [S] of the counted entries of each segment; a NaN that counts makes its segment's sum NaN.

    x_M: float32; terms are rounded to 2^-fraction_bits and clamped to +-2^(30 - fraction_bits). segment_M: int32 in 0..num_segments - 1.
    """
    limit, one = 2.0 ** (30 - fraction_bits), 2.0**fraction_bits
    is_nan_M = is_counted_M & jnp.isnan(x_M)
    term_M = jnp.where(is_counted_M & ~is_nan_M, jnp.clip(x_M, -limit, limit), 0.0)
    fixed_M = jnp.round(term_M * one).astype(jnp.int32)
    columns = (fixed_M >> 2 * _DIGIT_BITS, (fixed_M >> _DIGIT_BITS) & _DIGIT, fixed_M & _DIGIT, is_nan_M, is_counted_M)
    digits_M5 = jnp.stack([column.astype(jnp.int32) for column in columns], axis=-1)
    high_S, middle_S, low_S, num_nan_S, count_S = jax.ops.segment_sum(digits_M5, segment_M, num_segments=num_segments).T
    middle_S += low_S >> _DIGIT_BITS
    high_S += middle_S >> _DIGIT_BITS
    rest_S = ((middle_S & _DIGIT) << _DIGIT_BITS) | (low_S & _DIGIT)
    total_S = high_S.astype(jnp.float32) * (2.0 ** (2 * _DIGIT_BITS) / one) + rest_S.astype(jnp.float32) / one
    return jnp.where(num_nan_S > 0, jnp.nan, total_S), count_S.astype(jnp.float32)
