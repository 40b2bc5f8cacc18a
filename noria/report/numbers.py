"""Rewards and names in short forms, for tables and curves. Deliberately light: no jax, no database."""

from collections.abc import Sequence
from itertools import pairwise

from noria.config import RunConfig

SPARKS = "▁▂▃▄▅▆▇█"


def mean_reward(rewards: Sequence[float]) -> float | None:
    """Their mean; None of none."""
    return sum(rewards) / len(rewards) if rewards else None


def task_name(config: RunConfig) -> str:
    """A short name of the run's environment: a built-in's name, or the class of a file."""
    return config.environment.name.rpartition(":")[2]


def sparkline(values: Sequence[float], width: int) -> str:
    """At most `width` characters whose heights are the means of equal stretches of `values`, from min(0, lowest) to max(1, highest)."""
    num_bins = min(width, len(values))
    edges = [i * len(values) // num_bins for i in range(num_bins)] + [len(values)] if num_bins else []
    low, high = min(0.0, *values, 0.0), max(1.0, *values, 1.0)
    means = [sum(values[start:stop]) / (stop - start) for start, stop in pairwise(edges)]
    return "".join(SPARKS[min(len(SPARKS) - 1, int((mean - low) / (high - low) * len(SPARKS)))] for mean in means)
