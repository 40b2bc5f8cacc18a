"""Base weights on the device, in the two forms that the stages want: stacked over layers (the learner scans) and per layer (the sampler loops).

On CPU both forms alias the same host memory, so a base is resident once; elsewhere, and where memory is not aligned, a layer is a slice of its own.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
import numpy.typing as npt

from noria.model.weights import Params, aligned_empty

HostArray: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class BaseParams:
    """stacked: the tree of `weights.Params` as JAX arrays. layers: for each layer its weights by name, of the same memory where possible.

    The arrays are read-only in effect: never donate them.
    """

    stacked: dict[str, Any]
    layers: tuple[dict[str, jax.Array], ...]


def place(params: Params, dtype: npt.DTypeLike = np.float32) -> BaseParams:
    """Put host weights on the default device, matrices in `dtype`, norms in float32 always.

    params: NumPy arrays, left as they are; on CPU JAX keeps them alive for as long as an array aliases them.
    """
    host: Params = {name: _cast(name, array, dtype) for name, array in params.items() if name != "layers"}
    host["layers"] = {name: _cast(name, array, dtype) for name, array in params["layers"].items()}
    stacked = jax.tree.map(_put, host)
    num_layers = len(host["layers"]["attn_norm"])
    if jax.default_backend() == "cpu":
        layers = tuple({name: _put(array[layer]) for name, array in host["layers"].items()} for layer in range(num_layers))
    else:
        layers = tuple({name: array[layer] for name, array in stacked["layers"].items()} for layer in range(num_layers))
    return BaseParams(stacked, layers)


def _put(array: HostArray) -> jax.Array:
    """`device_put` aliases an aligned array on CPU; `jnp.asarray` copies (measured on JAX 0.10 and 0.12)."""
    return jax.device_put(array, may_alias=True)


def _cast(name: str, array: HostArray, dtype: npt.DTypeLike) -> HostArray:
    if name.endswith("norm") or array.dtype == dtype:
        return array
    cast = aligned_empty(array.shape, dtype)
    cast[...] = array
    return cast
