"""Bytes that are really alive: before each program the arrays that exist, and beside them what the compiler gives that program.

What an executor's memory ought to be made of is the learner's own estimate (`learner/memory.py`).
"""

import math
from collections.abc import Callable
from typing import Any, final

import jax
import numpy as np


def tree_bytes(tree: Any) -> int:
    """Bytes of all leaves of a tree: arrays, or shapes of arrays."""
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def program_bytes(jitted: Any, *arguments: Any, **named: Any) -> int:
    """The compiler's own figure of a jitted function at these arguments (arrays or shapes): arguments + temporaries + results that reuse nothing."""
    figures = jitted.lower(*arguments, **named).compile().memory_analysis()
    return int(figures.argument_size_in_bytes) + _new_bytes(figures)


@final
class Meter:
    """The most bytes that are alive at any program it watches. One thread.

    own: what exists already and counts; every other array that exists now is left out.
    """

    def __init__(self, own: Any) -> None:
        counted = {_memory_of(leaf) for leaf in jax.tree.leaves(own)}
        self._others = {_memory_of(array): array for array in jax.live_arrays() if _memory_of(array) not in counted}  # held: no memory changes hands
        self._new_bytes: dict[Any, int] = {}
        self.peak_bytes = 0

    def watched(self, jitted: Any) -> Callable[..., Any]:
        """The jitted function; each call is measured first."""

        def measured(*arguments: Any, **named: Any) -> Any:
            jax.block_until_ready([leaf for leaf in jax.tree.leaves((arguments, named)) if isinstance(leaf, jax.Array)])
            key = jitted, tuple(getattr(leaf, "shape", leaf) for leaf in jax.tree.leaves((arguments, named)))
            if key not in self._new_bytes:
                self._new_bytes[key] = _new_bytes(jitted.lower(*arguments, **named).compile().memory_analysis())
            self.peak_bytes = max(self.peak_bytes, self.alive_bytes() + self._new_bytes[key])
            return jitted(*arguments, **named)

        return measured

    def alive_bytes(self) -> int:
        """Of the arrays that exist now and count, each piece of memory once, however many arrays see it."""
        return sum({_memory_of(array): array.nbytes for array in jax.live_arrays() if _memory_of(array) not in self._others}.values())


def _memory_of(array: jax.Array) -> int:
    return int(array.unsafe_buffer_pointer())


def _new_bytes(figures: Any) -> int:
    """Temporaries, and results that reuse nothing."""
    return int(figures.temp_size_in_bytes + figures.output_size_in_bytes - figures.alias_size_in_bytes)
