"""Does it learn the same? Runs of the tiny base on one task, that differ in one thing each, in pairs that share every seed.

    sample (the real sampler, of the version that the arm allows) ─▶ reward ─▶ build_tree ─▶ gradient (the arm's executor) ─▶ AdamW ─▶ next version

    naive, exact, stop      the batch's rows one by one; the walk over the tree with the exact gradient; the same with a constant prefix
    stale 0, 2, 8           packed trees, sampled by the adapter of so many steps ago; corrected (truncated importance weights and the geometric
                            sequence mask), or as if it were on-policy

The task: after a long header and a few ids, of which the last is one of two marks, say ids of one half of the vocabulary after one mark and of the
other half after the other. The halves are the two sides of a plane through the embeddings, since a frozen random head lets nothing else be learned. A
reward is the fraction of sampled ids that are right, 0 to 1, and 0.5 by chance. Deliberately without server, actors and buffer: what is compared is
the gradient and the data it is taken on.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np
import numpy.typing as npt
from rich.table import Table

from noria.bench.bases import base_of
from noria.bench.executors import Subject, make_subject, optimizer_step, packed_gradient, replay_gradient, start_again
from noria.bench.harness import Bar, Report, Result
from noria.bench.trees import unshared
from noria.clock import RealClock
from noria.config import AlgorithmConfig, SamplerConfig
from noria.learner.optimizer import read_slot
from noria.model.lora import AdapterTree, HostAdapter
from noria.model.placement import place
from noria.observe import SpanRecorder
from noria.rl.losses import loss_table
from noria.rl.tree import build_tree
from noria.sampler.engine import SamplerEngine
from noria.types import (
    Completion,
    Episode,
    EpisodeGroup,
    FloatArray,
    Ids,
    LossSpec,
    OptimizerSpec,
    SampleRequest,
    SamplingParams,
    Task,
    TokenTree,
    Turn,
)

SEEDS: Final = 5
STEPS: Final = 60
LAST: Final = 10
"""Steps at the end whose mean is a run's final reward: 640 episodes."""

HEADER, QUESTION, ANSWER = 96, 6, 2
GROUPS, MEMBERS = 4, 16
MARKS: Final = (65, 97)
NUM_BYTES: Final = 256
CHUNK: Final = 128
AXIS: Final = 1024
LEARNING_RATE: Final = 5e-3
MARGIN: Final = 0.05

ALGORITHM: Final = AlgorithmConfig(steps=STEPS, group_size=MEMBERS, groups_per_batch=GROUPS, truncated="keep")
CORRECTED: Final = LossSpec(kind="grpo")
UNCORRECTED: Final = LossSpec(kind="cross_entropy")
"""-weight * advantage * learner_logprobs: the policy gradient that takes all data for its own."""


@dataclass(frozen=True, slots=True)
class Arm:
    """What is compared. staleness: how many optimizer steps older than the learner the adapter is that samples."""

    name: str
    executor: str
    staleness: int = 0
    loss: LossSpec = CORRECTED


ARMS: Final = (
    Arm("naive", "naive"),
    Arm("exact", "exact"),
    Arm("stop", "stop"),
    Arm("stale 0, corrected", "packed"),
    Arm("stale 2, corrected", "packed", 2),
    Arm("stale 8, corrected", "packed", 8),
    Arm("stale 0, uncorrected", "packed", 0, UNCORRECTED),
    Arm("stale 2, uncorrected", "packed", 2, UNCORRECTED),
    Arm("stale 8, uncorrected", "packed", 8, UNCORRECTED),
)

COMPARED: Final = (
    ("exact", "naive"),
    ("stop", "naive"),
    ("stale 2, corrected", "stale 0, corrected"),
    ("stale 8, corrected", "stale 0, corrected"),
    ("stale 2, uncorrected", "stale 0, uncorrected"),
    ("stale 8, uncorrected", "stale 0, uncorrected"),
)
"""(arm, what it is compared with): differences of final rewards, seed by seed."""


def measure(*, quick: bool = False, seeds: int = SEEDS, arms: Sequence[Arm] = ARMS) -> Report:
    """All curves and the differences. quick: two seeds of 4 steps, said in the result."""
    steps, seeds = (4, 2) if quick else (STEPS, seeds)
    trainer = Trainer()
    curves = {arm.name: [trainer.run(arm, seed, steps) for seed in range(seeds)] for arm in arms}
    compared = [(arm, other) for arm, other in COMPARED if arm in curves and other in curves]
    values: Result = {
        "curves": curves,
        "final_reward": {name: float(np.mean(final_rewards(curve))) for name, curve in curves.items()},
        "differences": [difference(arm, other, curves[arm], curves[other]) for arm, other in compared],
    }
    return Report("convergence", "tiny", values, bars_of(values), quick, {"seeds": seeds, "steps": steps})


def final_rewards(curves: Sequence[Sequence[float]]) -> list[float]:
    """Mean reward of each run's last steps."""
    return [float(np.mean(curve[-LAST:])) for curve in curves]


def difference(arm: str, other: str, curves: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> Result:
    """Paired difference of final rewards, with its 95 % bootstrap interval."""
    paired = [a - b for a, b in zip(final_rewards(curves), final_rewards(others), strict=True)]
    low, high = bootstrap_interval(paired)
    return {"arm": arm, "minus": other, "mean": float(np.mean(paired)), "low": low, "high": high, "by_seed": paired}


def bootstrap_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """The percentile bootstrap interval of the mean (Efron 1979), exactly: over all n^n resamples of n values, n at most 6."""
    assert len(values) <= 6, "beyond that draw at random"
    means = [sum(drawn) / len(values) for drawn in itertools.product(values, repeat=len(values))]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


@final
class Trainer:
    """One base, sampler and learner, used for run after run: what is compiled is compiled once. Owned by one thread."""

    def __init__(self) -> None:
        loaded = base_of("tiny")
        self._subject: Subject = make_subject(loaded)
        self._side_V = sides(loaded.params["embed"])
        self._engine = SamplerEngine(
            place(loaded.params),
            loaded.config,
            SamplerConfig(num_lanes=GROUPS * MEMBERS, num_pages=512, max_context=128, steps_per_dispatch=ANSWER, num_slots=4),
            rank_classes=(8,),
            eos_id=loaded.tokenizer.eos_id,
            spans=SpanRecorder(RealClock()),
        )

    def run(self, arm: Arm, seed: int, steps: int) -> list[float]:
        """Mean reward of each step's batch, 0 to 1. Equal seeds mean equal adapters, tasks and random keys, whatever the arm."""
        subject, run_id = self._subject, f"{arm.name}/{seed}"
        start_again(subject, seed)
        subject.table = loss_table({0: arm.loss}, 1)
        waiting: deque[HostAdapter] = deque([read_slot(subject.state, 0).params])
        rewards, published = [], -1
        for step in range(steps):
            if step == 0 or len(waiting) > arm.staleness:
                published += 1
                self._engine.publish(run_id, published, waiting.popleft(), subject.scale)
            groups = asyncio.run(self._play(run_id, seed, step))
            rewards.append(float(np.mean([episode.reward for group in groups for episode in group.episodes])))
            tree, _ = build_tree(groups, ALGORITHM)
            if len(tree):
                optimizer_step(subject, 0, gradient_of(arm.executor, subject, tree), OptimizerSpec(LEARNING_RATE))
            waiting.append(read_slot(subject.state, 0).params)
        self._engine.retire(run_id)
        return rewards

    async def _play(self, run_id: str, seed: int, step: int) -> list[EpisodeGroup]:
        """A batch of groups, sampled by the newest published version."""
        prompts = [question(seed, step, index) for index in range(GROUPS)]
        requests = [
            SampleRequest(
                f"{run_id}/{step}/{g}/{m}", "bench", run_id, "", prompts[g][0], SamplingParams(ANSWER, seed=key(seed, step, g), sample_index=m)
            )
            for g, m in itertools.product(range(GROUPS), range(MEMBERS))
        ]
        work = asyncio.gather(*(self._engine.sample(request) for request in requests))
        while not work.done():
            await asyncio.sleep(0)
            self._engine.step()
        completions = iter(await work)
        return [
            EpisodeGroup(f"{step}/{g}", run_id, Task(g, seed), tuple(self._episode(m, prompt, mark, next(completions)) for m in range(MEMBERS)))
            for g, (prompt, mark) in enumerate(prompts)
        ]

    def _episode(self, member: int, prompt: Ids, mark: int, completion: Completion) -> Episode:
        reward = reward_of(completion.sampled_ids, mark, self._side_V)
        return Episode(str(member), member, (Turn(prompt, completion, 1.0),), reward)


def gradient_of(executor: str, subject: Subject, tree: TokenTree) -> AdapterTree:
    """The batch's gradient as the arm computes it."""
    if executor == "naive":
        return packed_gradient(subject, unshared(tree), AXIS)
    if executor == "packed":
        return packed_gradient(subject, tree, CHUNK * 4)
    return replay_gradient(subject, tree, CHUNK, "stop" if executor == "stop" else "exact")


def question(seed: int, step: int, index: int) -> tuple[Ids, int]:
    """(prompt, which mark it ends with): a header that all prompts of a seed share, ids of its own, the mark. Both marks are in every batch."""
    header = np.random.default_rng([seed, 0]).integers(0, NUM_BYTES, HEADER)
    own = np.random.default_rng([seed, 1, step, index]).integers(0, NUM_BYTES, QUESTION - 1)
    mark = index % 2
    return tuple(int(i) for i in (*header, *own, MARKS[mark])), mark


def sides(embed_VD: FloatArray) -> npt.NDArray[np.bool_]:
    """Which half of the vocabulary each id belongs to: [V], the side of a plane through the embeddings, the same always."""
    normal_D = np.random.default_rng(0).normal(size=embed_VD.shape[1])
    along_V = embed_VD @ normal_D
    return np.asarray(along_V > np.median(along_V))


def reward_of(sampled: Ids, mark: int, side_V: npt.NDArray[np.bool_]) -> float:
    """The fraction of the answer's ids in the half that the mark asks for; what is missing after the end is wrong."""
    return sum(bool(side_V[i]) == bool(mark) for i in sampled) / ANSWER


def key(seed: int, step: int, index: int) -> int:
    """Seed of a group's random keys."""
    return (seed * STEPS + step) * GROUPS + index


def bars_of(values: Result) -> tuple[Bar, ...]:
    """What the issue asks: the interval of exact replay against naive lies inside the margin. Arms that were not run are not judged."""
    found = next((d for d in values["differences"] if d["arm"] == "exact"), None)
    if found is None:
        return ()
    return (
        Bar("exact_minus_naive_low", found["low"], at_least=-MARGIN),
        Bar("exact_minus_naive_high", found["high"], at_most=MARGIN),
    )


def table(report: Report) -> Table:
    """The measurement for people."""
    shown = Table("run", "final reward", "minus", "difference", "95 % interval", title=f"convergence, {report.base}, {report.notes['seeds']} seeds")
    found = {difference["arm"]: difference for difference in report.values["differences"]}
    for name, reward in report.values["final_reward"].items():
        shown.add_row(name, f"{reward:.3f}", *_shown(found.get(name)))
    return shown


def _shown(found: Result | None) -> tuple[str, ...]:
    return () if found is None else (found["minus"], f"{found['mean']:+.4f}", f"[{found['low']:+.4f}, {found['high']:+.4f}]")
