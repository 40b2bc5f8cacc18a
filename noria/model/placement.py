"""Base weights on the device, in the two forms that the stages want: stacked over layers (the learner scans) and per layer (the sampler loops).

On CPU both forms alias the same host memory, so a base is resident once; elsewhere, and where memory is not aligned, a layer is a slice of its own.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
import numpy.typing as npt

from noria.model.params import Params, aligned_empty

HostArray: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class BaseParams:
    """stacked: the tree of `weights.Params` as JAX arrays. layers: for each layer its weights by name, of the same memory where possible.

    The arrays are read-only in effect: never donate them.
    """

    stacked: dict[str, Any]
    layers: tuple[dict[str, jax.Array], ...]


def base_dtype() -> str:
    """The dtype of base matrices on this machine: "bfloat16" or "float32" (see `choose_dtype`)."""
    return choose_dtype(jax.default_backend(), _cpu_flags(), jax.__version_info__)


def choose_dtype(backend: str, cpu_flags: frozenset[str], jax_version: tuple[int, ...]) -> str:
    """bfloat16 on accelerators, and on CPUs with AMX under JAX 0.12 or newer, which uses it; float32 elsewhere, where bfloat16 gains nothing.

    Decided by flag and version, never by timing, so that a machine always decides alike.
    """
    has_fast_bfloat16 = "amx_bf16" in cpu_flags and jax_version >= (0, 12)
    return "bfloat16" if backend != "cpu" or has_fast_bfloat16 else "float32"


def _cpu_flags() -> frozenset[str]:
    """The processor's feature flags; empty where the system does not tell."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


def place(params: Params, dtype: npt.DTypeLike = np.float32) -> BaseParams:
    """Put host weights on the default device, matrices in `dtype`, norms and biases in float32 always.

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
    if name.endswith(("norm", "bias")) or array.dtype == dtype:
        return array
    cast = aligned_empty(array.shape, dtype)
    cast[...] = array
    return cast
