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


def moving_mean(values: Sequence[float], width: int) -> list[float]:
    """The mean of each value and up to `width` - 1 before it."""
    return [sum(window) / len(window) for i in range(1, len(values) + 1) if (window := values[max(0, i - width) : i])]


def reward_at(config: RunConfig, rewards: Sequence[float], version: int) -> float | None:
    """The reward of the step that made `version`, of a run's rewards by step; None for version 0 and those of a supervised phase, which has none."""
    index = version - 1 - config.num_supervised_steps
    return rewards[index] if 0 <= index < len(rewards) else None


def sparkline(values: Sequence[float], width: int) -> str:
    """At most `width` characters whose heights are the means of equal stretches of `values`, from min(0, lowest) to max(1, highest)."""
    num_bins = min(width, len(values))
    edges = [i * len(values) // num_bins for i in range(num_bins)] + [len(values)] if num_bins else []
    low, high = min(0.0, *values, 0.0), max(1.0, *values, 1.0)
    means = [sum(values[start:stop]) / (stop - start) for start, stop in pairwise(edges)]
    return "".join(SPARKS[min(len(SPARKS) - 1, int((mean - low) / (high - low) * len(SPARKS)))] for mean in means)
