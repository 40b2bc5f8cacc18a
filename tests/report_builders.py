"""Finished and running sessions made by hand, with the numbers of a plausible demo."""

import math
import random
from dataclasses import replace

from noria.config import AdapterConfig, AlgorithmConfig, EnvironmentConfig, RunConfig
from noria.observe import Span
from noria.report.live import Snapshot
from noria.report.summary import SessionReport
from noria.service.build import RunReport
from noria.service.progress import RunProgress


def run_config(
    name: str = "largest", *, steps: int = 20, rank: int = 8, environment: str = "", max_staleness: int = 1, tenant: str = "amber"
) -> RunConfig:
    return RunConfig(
        name=name,
        tenant=tenant,
        environment=EnvironmentConfig(name=environment or name),
        algorithm=AlgorithmConfig(steps=steps, max_staleness=max_staleness),
        adapter=AdapterConfig(rank=rank),
    )


def progress(config: RunConfig, *, num_steps: int | None = None, seed: int = 0) -> RunProgress:
    """A run that learns, `num_steps` steps in (default: at its end)."""
    rng = random.Random(seed)
    steps = config.algorithm.steps
    done = steps if num_steps is None else num_steps
    rewards = [min(1.0, max(0.0, 0.25 + 0.65 * (1 - math.exp(-3 * i / steps)) + rng.gauss(0, 0.06))) for i in range(done)]
    evaluations = {0: 0.28125} | ({steps: 0.84375} if done == steps else {})
    status = "finished" if done == steps else "running"
    return RunProgress(
        version=done,
        status=status,
        evaluations=evaluations,
        rewards=rewards,
        tokens_trained=480 * done,
        staleness=min(1, done),
        max_staleness_seen=min(1, done),
        num_outstanding=4,
    )


def run_report(config: RunConfig | None = None, *, state: RunProgress | None = None, dropped: dict[str, int] | None = None) -> RunReport:
    config = config or run_config()
    state = state or progress(config)
    metrics = tuple({"reward_mean": reward, "staleness_max": float(i > 0 and i % 4 != 0)} for i, reward in enumerate(state.rewards))
    return RunReport(config, state, 700 * state.version, dropped or {"no_signal": 3}, metrics, tuple(float(i) for i in range(state.version + 1)))


def three_runs() -> list[RunConfig]:
    return [run_config(), run_config("first_letter", rank=4, tenant="birch"), run_config("addition", rank=16, tenant="cedar")]


def spans(end_s: float = 100.0) -> tuple[Span, ...]:
    """Ten seconds of a shared device that alternates, with actors beside it."""
    made: list[Span] = []
    now_s = end_s - 11
    while now_s < end_s - 0.3:
        made += [
            Span("sampler", "prefill", "", False, now_s, now_s + 0.05),
            Span("sampler", "decode", "", False, now_s + 0.05, now_s + 0.3),
            Span("learner", "score", "largest,addition", False, now_s + 0.3, now_s + 0.38),
            Span("learner", "pull", "largest,addition", False, now_s + 0.38, now_s + 0.55),
            Span("learner", "optimize", "largest", False, now_s + 0.55, now_s + 0.57),
            Span("learner", "batch", "largest", True, now_s, now_s + 0.3),
            Span("adapters", "publish", "largest", False, now_s + 0.57, now_s + 0.65),
            Span("actor", "step", "largest", False, now_s + 0.31, now_s + 0.32),
        ]
        now_s += 0.7
    return tuple(made)


def session(runs: list[RunReport] | None = None, **changes: object) -> SessionReport:
    reports = tuple(runs if runs is not None else [run_report(config, state=progress(config, seed=i)) for i, config in enumerate(three_runs())])
    made = SessionReport("smollm2-135m", reports, {"sampler": 0.62, "learner": 0.31, "actor": 0.04, "adapters": 0.05}, 118.2, spans(), 100.0)
    return replace(made, **changes)  # type: ignore[arg-type]


def snapshot(**changes: object) -> Snapshot:
    runs = [(config, progress(config, num_steps=11, seed=i)) for i, config in enumerate(three_runs())]
    made = Snapshot(73.4, runs, "", 1234.0, 567.0, {"sampler": 0.62, "learner": 0.31, "actor": 0.04})
    return replace(made, **changes)  # type: ignore[arg-type]
