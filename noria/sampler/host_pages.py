"""Places in host memory for pages that the device has no room for: pages of episodes that wait for a tool, for as long as there is room.

    store: pages of all layers ──▶ one array [X, L, 2, *page] ──one transfer──▶ places        load: the way back, into donated pools

A page comes back with the bits with which it left. Which page lies in which place, and for how long, is the page pool's business
(`sampler/pages.py`); here places are numbers too.

    X move   L layer   P page of the pools   K kv heads   H head size
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from noria.model.config import ModelConfig
from noria.model.params import aligned_empty
from noria.sampler.page_kernels import Kernel, page_shape
from noria.sampler.pages import PageMove
from noria.types import IntArray

MOVE_WIDTH = 16
"""Pages of one program run: 11 MiB of SmolLM2-135M, large enough that bytes, not launches, take the time."""

Pool: TypeAlias = tuple[jax.Array, ...]
"""Per layer [P, *page_kernels.page_shape]."""

_MIB = 2**20


@final
class HostPages:
    """Owner of the places 0 .. num_places - 1. Touched by the device thread only."""

    def __init__(
        self, model: ModelConfig, host_mib: int, dtype: npt.DTypeLike = np.float32, *, kernel: Kernel = Kernel.LOOPS, is_pinned: bool | None = None
    ) -> None:
        """host_mib: MiB of host memory that pages may take, touched as they are stored; 0: no places. dtype, kernel: of the pools.

        is_pinned: keep pages in memory that an accelerator reads without a copy by the processor; None: where there is an accelerator.
        """
        shape = (model.num_layers, 2, *page_shape(kernel, model.num_kv_heads, model.head_dim))
        self.num_places = host_mib * _MIB // (np.dtype(dtype).itemsize * math.prod(shape))
        self._is_pinned = jax.default_backend() != "cpu" if is_pinned is None else is_pinned
        self._pinned: dict[int, jax.Array] = {}
        self._places = aligned_empty((0 if self._is_pinned else self.num_places, *shape), dtype)

    def warm_up(self, k: Pool, v: Pool) -> tuple[Pool, Pool]:
        """Compile the two programs. Donates the pools; returned unchanged, but for the trash page.

        To be called before other programs on the pools are compiled: what comes back from pinned memory is committed to its device, which JAX
        compiles for apart, so the pools are committed from here on.
        """
        if not self.num_places:
            return k, v
        if self._is_pinned:
            k, v = jax.device_put((k, v), k[0].sharding)
        trash = [PageMove(0, 0)]
        self.store(k, v, trash)
        return self.load(k, v, trash)

    def store(self, k: Pool, v: Pool, moves: Sequence[PageMove]) -> None:
        """Copy pages of the device to places. Returns when they are there: the pages may be written again."""
        for page_X, places in _in_parts(moves):
            if self._is_pinned:
                pages = jax.block_until_ready(_take_pinned(k, v, page_X))
                self._pinned.update(zip(places, pages, strict=False))
            else:
                self._places[places] = np.asarray(_take(k, v, page_X))[: len(places)]

    def load(self, k: Pool, v: Pool, moves: Sequence[PageMove]) -> tuple[Pool, Pool]:
        """Copy places, each of which has been stored, to pages of the device. Donates the pools; the places may be written again at once."""
        for page_X, places in _in_parts(moves):
            if self._is_pinned:
                pages = [self._pinned[place] for place in places]
                k, v = _put_pinned(k, v, (*pages, *pages[:1] * (MOVE_WIDTH - len(pages))), page_X)
            else:
                pages_XL = np.empty((MOVE_WIDTH, *self._places.shape[1:]), self._places.dtype)  # a new one: JAX may read it after this call
                pages_XL[: len(places)] = self._places[places]
                pages_XL[len(places) :] = 0  # values in pages are finite, the trash page's too
                k, v = _put(k, v, pages_XL, page_X)
        return k, v


def _in_parts(moves: Sequence[PageMove]) -> Iterator[tuple[IntArray, list[int]]]:
    """Pages, padded with the trash page to MOVE_WIDTH, and their places, not padded."""
    for start in range(0, len(moves), MOVE_WIDTH):
        part = moves[start : start + MOVE_WIDTH]
        page_X = np.zeros(MOVE_WIDTH, np.int32)
        page_X[: len(part)] = [move.page for move in part]
        yield page_X, [move.place for move in part]


# Programs


def _gather(k: Pool, v: Pool, page_X: jax.Array) -> jax.Array:
    """[X, L, 2, *page]."""
    return jnp.stack([jnp.stack((k_layer[page_X], v_layer[page_X]), 1) for k_layer, v_layer in zip(k, v, strict=True)], 1)


def _scatter(k: Pool, v: Pool, pages_XL: jax.Array, page_X: jax.Array) -> tuple[Pool, Pool]:
    """The inverse, in place; padding goes to the trash page."""
    new_k = tuple(x.at[page_X].set(pages_XL[:, layer, 0]) for layer, x in enumerate(k))
    new_v = tuple(x.at[page_X].set(pages_XL[:, layer, 1]) for layer, x in enumerate(v))
    return new_k, new_v


_take = jax.jit(_gather)
_put = jax.jit(_scatter, donate_argnums=(0, 1))


@jax.jit
def _take_pinned(k: Pool, v: Pool, page_X: jax.Array) -> tuple[jax.Array, ...]:
    """Pages as arrays of their own, so that each is freed when its place is stored to again."""
    pages_XL = _gather(k, v, page_X)
    return tuple(jax.device_put(pages_XL[index], jax.memory.Space.Host) for index in range(MOVE_WIDTH))


@partial(jax.jit, donate_argnums=(0, 1))
def _put_pinned(k: Pool, v: Pool, pages: tuple[jax.Array, ...], page_X: jax.Array) -> tuple[Pool, Pool]:
    return _scatter(k, v, jnp.stack([jax.device_put(page, jax.memory.Space.Device) for page in pages]), page_X)
