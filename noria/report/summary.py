"""The end of a training session in plain numbers: what `--json` prints, and what the page and the curves show."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from noria.observe import Span
from noria.report.numbers import mean_reward
from noria.service.build import RunReport
from noria.service.progress import REWARD_WINDOW


@dataclass(frozen=True, slots=True)
class SessionReport:
    """A finished session.

    busy: by stage, over the window_s seconds from the server's start to the end of the last run. spans: what the timeline shows, which ends at end_s
    on their clock. failures: by run name.
    """

    base: str
    runs: tuple[RunReport, ...]
    busy: Mapping[str, float]
    window_s: float
    spans: tuple[Span, ...] = ()
    end_s: float = 0.0
    failures: Mapping[str, BaseException] = field(default_factory=dict)


def summarize(report: SessionReport, *, install_s: float, wall_s: float) -> dict[str, Any]:
    """The object that `--json` prints. Numbers that do not exist (no evaluation, no step) are None. wall_s: since the command's start."""
    return {
        "runs": [_summarize_run(run) for run in report.runs],
        "sampler_busy": report.busy.get("sampler", 0.0),
        "learner_busy": report.busy.get("learner", 0.0),
        "install_s": install_s,
        "wall_s": wall_s,
    }


def _summarize_run(run: RunReport) -> dict[str, Any]:
    progress, config = run.progress, run.config
    return {
        "name": config.name,
        "eval_before": progress.evaluations.get(0),
        "eval_after": progress.evaluations.get(config.num_steps),
        "reward_first5": mean_reward(progress.rewards[:REWARD_WINDOW]),
        "reward_last5": mean_reward(progress.rewards[-REWARD_WINDOW:]),
        "version": progress.version,
        "max_staleness": config.algorithm.max_staleness,
        "max_staleness_seen": progress.max_staleness_seen,
        "dropped_stale": run.dropped.get("stale", 0),
        "tokens_sampled": run.tokens_sampled,
        "tokens_trained": progress.tokens_trained,
    }
