"""`noria bench sampler`: the engine as a server runs it: batches, adapters, publishes, a learner beside it, constrained draws, long episodes.

The cases are in `sampler_own`, the workloads in `sampler_cases`; `--case NAME` measures one of them alone. What other systems do with the same
workloads, in turn, is `--peer transformers` (`sampler_peer`) and `--peer vllm`.
"""

from collections.abc import Callable, Mapping
from typing import Final

import jax.numpy as jnp
from rich.table import Table

from noria.bench import sampler_own
from noria.bench.bases import base_of
from noria.bench.harness import REPEATS, Bar, Report, Result
from noria.bench.sampler_cases import FULL, QUICK, Sizes
from noria.bench.sampler_own import Outcome
from noria.bench.sampler_side import MAX_STALL_S, Side, serving
from noria.config import LearnerConfig, SamplerConfig
from noria.errors import ConfigError
from noria.model.placement import base_dtype

MATMULS: Final = 0.7
ADAPTERS: Final = 0.85
PUBLISH: Final = 0.02
CONSTRAINED: Final = 0.6

NUM_SLOTS: Final = 33
"""The base, and one for each of 32 adapters."""

CASES: Final[Mapping[str, Callable[[Side, Sizes, int], Outcome]]] = {
    "batches": sampler_own.batches,
    "adapters": sampler_own.adapters,
    "publish": sampler_own.publish,
    "constrained": sampler_own.constrained,
    "training": sampler_own.training,
}
"""Those that share one engine; `long` has its own."""

LONG: Final = "long"


def measure(*, quick: bool = False, repeats: int = REPEATS, case: str | None = None) -> Report:
    """Everything, or one case. quick: tiny sizes on the tiny base, said in the result. Raises ConfigError for an unknown case."""
    if case is not None and case not in (*CASES, LONG):
        raise ConfigError(f"the sampler's bench has no case {case!r}: choose from {', '.join((*CASES, LONG))}")
    sizes, names = QUICK if quick else FULL, [name for name in (*CASES, LONG) if case in (None, name)]
    values: Result = {}
    dtype, rows = base_dtype(), list[Result]()
    if shared := [name for name in names if name in CASES]:
        with serving(_side(sizes, dtype, has_learner="training" in shared)) as side:
            for name in shared:
                _add(values, rows, CASES[name](side, sizes, repeats))
    if LONG in names:
        _add(values, rows, sampler_own.long(sizes))
    values["cases"] = rows
    return Report("sampler", sizes.base, values, bars_of(values), quick, {"dtype": dtype})


def bars_of(values: Result) -> tuple[Bar, ...]:
    """What the issue asks of these numbers; of a case that was left out, nothing."""
    return (
        Bar("fraction_of_matmuls_batch32", values.get("fraction_of_matmuls_batch32"), at_least=MATMULS),
        Bar("adapters32_over_1", values.get("adapters32_over_1"), at_least=ADAPTERS),
        Bar("publish_cost", values.get("publish_cost"), at_most=PUBLISH),
        Bar("inter_token_p95_training_minus_solo_ms", values.get("inter_token_p95_training_minus_solo_ms"), at_most=1e3 * MAX_STALL_S),
        Bar("constrained_over_free", values.get("constrained_over_free"), at_least=CONSTRAINED),
        Bar("constrained_finished", values.get("constrained_finished"), at_least=1.0),
        Bar("long_episodes_finished", values.get("long_episodes_finished"), at_least=1.0),
    )


def table(report: Report) -> Table:
    """The measurement for people."""
    shown = Table("measured", "tokens/s", "first token p50, p95 ms", "inter-token p95 ms", "prefix hits", title=f"sampler, {report.base}")
    for row in report.values["cases"]:
        if "tokens_per_s" in row:
            first = f"{row['first_token_p50_ms']:.0f}, {row['first_token_p95_ms']:.0f}"
            shown.add_row(row["name"], f"{row['tokens_per_s']:.0f}", first, f"{row['inter_token_p95_ms']:.0f}", f"{row['prefix_hits']:.2f}")
        else:
            shown.add_row(row["name"], f"{row['finished']} finished in {row['seconds']:.1f} s", "", "", "")
    for bar in report.bars:
        if bar.value is not None:
            shown.add_row(bar.name, f"{bar.value:.3f}", "", "", "")
    return shown


def _side(sizes: Sizes, dtype: str, *, has_learner: bool) -> Side:
    """The engine with a server's settings, but room for 32 adapters of either rank."""
    training = LearnerConfig(max_positions=sizes.max_positions, num_slots=1, rank_classes=(8,)) if has_learner else None
    settings = SamplerConfig(num_slots=NUM_SLOTS)
    return Side(base_of(sizes.base), settings, dtype=jnp.dtype(dtype), rank_classes=sizes.rank_classes, training=training, shapes=sizes.shapes)


def _add(values: Result, rows: list[Result], outcome: Outcome) -> None:
    values.update(outcome.values)
    rows += outcome.rows
