"""A run tried out: one group end to end on a server of its own, with the code that a run goes through, and nothing stored.

    environment, adapter, examples ──▶ publish version 0 ──▶ play one group ──▶ tree, pieces ──▶ train ──▶ publish version 1
                                                             play a few at once, timed          again, timed

The first pass of everything is the one that compiles, and is not timed; what the run will not need is not compiled.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np

from noria.actors.evaluation import held_out_tasks
from noria.actors.group import EpisodeFailure, GroupOutcome
from noria.actors.rules import EpisodeRules
from noria.buffer.cursor import task_at
from noria.config import AlgorithmConfig, RunConfig, ServerConfig
from noria.errors import RunFailedError
from noria.learner.operations import RunSpec, StepResult
from noria.model.config import ModelConfig
from noria.model.lora import AdapterState, checksum, host_shapes, resident_tops
from noria.model.placement import base_dtype
from noria.protocols import EnvironmentFactory, Lease, Tokenizer
from noria.rl.credit import counted_rewards, episode_advantages
from noria.rl.packing import ENTRY_CHUNK
from noria.sampler.pages import PAGE
from noria.service.batch import Batch, Scored, ask, draft, prepare
from noria.service.build import Server
from noria.service.supervised import prepare_examples
from noria.types import AdapterVersion, EpisodeGroup, Example

PATIENCE_S = 1800.0
"""For anything that may compile: a deep model on two cores takes minutes."""

MAX_TIMED_GROUPS = 8
"""Enough to fill the lanes of a small sampler; more would only take longer."""


COMPILING_TOKENS = 2
"""Enough for every program that a longer completion needs too."""


@dataclass(frozen=True, slots=True)
class Timing:
    """What was measured, in seconds. All per optimizer step of the run, but for position_s, one position of the learner.

    play_s: its groups, from lease to rewards, as many at once as were timed; sample_s: of it, the sampler at work; learn_s, publish_s.
    """

    play_s: float
    sample_s: float
    learn_s: float
    publish_s: float
    position_s: float
    num_timed_groups: int

    @property
    def wait_s(self) -> float:
        """Of play_s, with the sampler idle: environments at work."""
        return max(0.0, self.play_s - self.sample_s)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of the whole run, start-up and compilation aside. step_s: one optimizer step. bound: the stage that takes longest, as a sentence."""

    step_s: float
    supervised_s: float
    evaluation_s: float
    total_s: float
    bound: str


@dataclass(frozen=True, slots=True)
class Trial:
    """What one group showed. advantages: by member. notes: what a person should look at. memory: bytes by part, computed; rss_bytes: measured."""

    config: RunConfig
    group: EpisodeGroup
    failures: tuple[EpisodeFailure, ...]
    advantages: tuple[float, ...]
    batch: Batch
    examples: tuple[Example, ...]
    tokenizer: Tokenizer
    timing: Timing
    estimate: Estimate
    memory: Mapping[str, int]
    notes: tuple[str, ...]


async def try_run(server: Server, config: RunConfig, *, folder: Path, environment: EnvironmentFactory | None = None) -> Trial:
    """Try a run on a server that has no other. folder, environment: as `Server.add_run`.

    Raises what `Server.add_run` raises, RunFailedError if no two episodes of the group succeed, and what training raises.
    """
    stages = server.stages
    rules, initial = await server.prepare(config, folder=folder, environment=environment)
    examples = (await server.examples(config, folder=folder)).examples
    stages.weights.join(config)
    spec = RunSpec(config.name, config.lora, config.optimizer, config.algorithm.loss_spec, config.weight)
    await asyncio.wrap_future(stages.learner.load_run(spec, initial))
    await _publish(server, config, 0, initial)
    outcome = await _play(server, config, rules, 0)
    if outcome.group is None:
        failure = outcome.failures[0]
        raise RunFailedError(f"run {config.name}: {len(outcome.failures)} episodes of the first group failed; {failure.code}: {failure.message}")
    batch = await _prepared(server, config.name, [outcome.group], config.algorithm)
    timing = await _time(server, config, rules, outcome.group)
    evaluated = len(held_out_tasks(rules.environment, config.evaluation.num_tasks)) * config.evaluation.samples
    return Trial(
        config=config,
        group=outcome.group,
        failures=outcome.failures,
        advantages=tuple(episode_advantages(outcome.group, config.algorithm).tolist()),
        batch=batch,
        examples=examples,
        tokenizer=server.base.tokenizer,
        timing=timing,
        estimate=_estimate(server, config, timing, examples, num_evaluated=evaluated),
        memory=memory_bytes(server.base.config, server.config),
        notes=tuple(_notes(config, rules.environment, outcome.group, batch)),
    )


async def _play(server: Server, config: RunConfig, rules: EpisodeRules, number: int) -> GroupOutcome:
    stages, actors = server.stages, config.actors
    task = task_at(number, num_tasks=rules.environment.num_tasks, seed=config.seed)
    lease = Lease(f"{config.name}/check-{number}", config.name, task, number, 0, stages.clock.wall() + PATIENCE_S)
    return await stages.pool.play_group(rules, lease, group_size=config.algorithm.group_size, episode_tries=actors.episode_tries)


async def _publish(server: Server, config: RunConfig, version: int, state: AdapterState) -> None:
    record = AdapterVersion(config.name, version, checksum(state.params), moments_checksum=0, path="")
    await server.stages.publisher.publish(record, state.params, config.adapter.lora, timeout_s=PATIENCE_S)


async def _time(server: Server, config: RunConfig, rules: EpisodeRules, first: EpisodeGroup) -> Timing:
    stages, algorithm, clock = server.stages, config.algorithm, server.clock
    count = min(algorithm.groups_per_batch, MAX_TIMED_GROUPS, max(1, server.config.sampler.num_lanes // algorithm.group_size))
    short = replace(rules, max_tokens=min(rules.max_tokens, COMPILING_TOKENS), max_turns=1)
    await asyncio.gather(*(_play(server, config, short, number) for number in range(1, count + 1)))  # compiles the shapes that so many need
    start_s = clock.now()
    outcomes = await asyncio.gather(*(_play(server, config, rules, number) for number in range(count + 1, 2 * count + 1)))
    play_s = clock.now() - start_s
    busy = server.spans.busy("sampler", play_s)
    groups = [_told_apart(outcome.group) for outcome in outcomes if outcome.group is not None] or [_told_apart(first)]
    timed = algorithm.model_copy(update={"zero_signal": "train", "truncated": "keep"})  # or a group without signal would take no time
    batches = [await _prepared(server, config.name, groups, timed) for _ in range(2)]
    results: list[StepResult] = [await asyncio.wrap_future(stages.learner.train(config.name, batch.planned)) for batch in batches]
    start_s = clock.now()
    await _publish(server, config, 1, results[-1].state)
    scale, last, scoring_s = algorithm.groups_per_batch / len(groups), results[-1], batches[-1].scoring_metrics.get("device_s", 0.0)
    return Timing(
        play_s=play_s * algorithm.groups_per_batch / count,
        sample_s=play_s * busy * algorithm.groups_per_batch / count,
        learn_s=(last.device_s + scoring_s) * scale,
        publish_s=clock.now() - start_s,
        position_s=last.device_s / max(1, last.num_positions),
        num_timed_groups=count,
    )


def _told_apart(group: EpisodeGroup) -> EpisodeGroup:
    """The group with rewards that all differ, since one of equals may have nothing to train, and so nothing to time."""
    return replace(group, episodes=tuple(replace(episode, reward=float(episode.member)) for episode in group.episodes))


async def _prepared(server: Server, run_id: str, groups: Sequence[EpisodeGroup], algorithm: AlgorithmConfig) -> Batch:
    learner = server.stages.learner
    scored, drafted = None, draft(groups, algorithm, learner.planner)
    if drafted is not None:
        scored = Scored(drafted, [await asyncio.wrap_future(each) for each in ask(learner, run_id, drafted, algorithm)])
    return prepare(groups, algorithm, learner.planner, scored=scored)


def _estimate(server: Server, config: RunConfig, timing: Timing, examples: Sequence[Example], *, num_evaluated: int) -> Estimate:
    algorithm = config.algorithm
    parts = {
        "the sampler": timing.sample_s,
        "the learner": timing.learn_s,
        "the environment, while the sampler waits for it,": timing.wait_s,
        "publishing": timing.publish_s,
    }
    on_device = timing.sample_s + timing.learn_s + timing.publish_s  # sampler and learner share the device
    in_turn = timing.play_s + timing.learn_s + timing.publish_s
    step_s = max(timing.play_s, on_device) if algorithm.max_staleness else in_turn
    longest = max(parts, key=lambda name: parts[name])
    supervised_s = 0.0
    if config.supervised is not None and examples:
        positions = sum(len(piece.ids_T) for piece in prepare_examples(examples, config, 1, server.stages.learner.planner).pieces)
        supervised_s = config.num_supervised_steps * (positions * timing.position_s + timing.publish_s)
    every, last = config.evaluation.every, config.num_steps
    num_evaluations = len({0, config.num_supervised_steps, last, *(range(every, last, every) if every else ())})
    episode_s = timing.play_s / (algorithm.groups_per_batch * algorithm.group_size)
    evaluation_s = num_evaluations * num_evaluated * episode_s
    total_s = algorithm.steps * step_s + supervised_s + evaluation_s
    share = parts[longest] / sum(parts.values()) if any(parts.values()) else 0.0
    return Estimate(step_s, supervised_s, evaluation_s, total_s, f"{longest} takes most of a step, {share:.0%}")


def memory_bytes(model: ModelConfig, server: ServerConfig) -> dict[str, int]:
    """Bytes of what a server holds, by part, computed from the sizes of model and server: the arrays, not the programs.

    host weights: float32, kept for as long as the server lives; where the device holds float32 on a CPU it is the same memory, counted once.
    """
    dtype = base_dtype() if server.dtype == "auto" else server.dtype
    is_cpu = jax.default_backend() == "cpu"
    itemsize = 2 if dtype == "bfloat16" else 4
    in_layers = model.num_layers * sum(math.prod(shape) for shape in model.layer_shapes.values())
    device = model.num_parameters + (0 if is_cpu else in_layers)  # elsewhere the sampler's layers are arrays of their own
    tops = resident_tops(server.learner)

    def adapter(width: int) -> int:
        return 4 * sum(math.prod(shape) for side in host_shapes(model, width, tops).values() for shape in side.values())

    heads, width = model.num_heads, model.num_heads * model.head_dim
    kept = 4 * (model.num_layers * (model.hidden_size + width + heads) + model.hidden_size)
    return {
        "host weights": 0 if is_cpu and itemsize == 4 else 4 * model.num_parameters,
        f"base, {dtype}": itemsize * device,
        "K/V pool": server.sampler.num_pages * PAGE * model.kv_bytes_per_position(np.float32) * itemsize // 4,
        "adapter slots, sampler": server.sampler.num_slots * sum(map(adapter, server.learner.rank_classes)),
        "adapter slots, learner": 4 * server.learner.num_slots * sum(map(adapter, server.learner.rank_classes)),  # parameters, moments, gradient
        "microbatch residuals": server.learner.max_positions * kept,
        "logits of the head": 3 * ENTRY_CHUNK * model.vocab_size * 4,
    }


def _notes(config: RunConfig, environment: EnvironmentFactory, group: EpisodeGroup, batch: Batch) -> list[str]:
    statistics, notes = batch.statistics, []
    if statistics.num_groups_without_signal:
        notes.append(f"{_equality(group, config.algorithm)}: this group teaches nothing; an easier task, or a graded reward, has signal sooner")
    if statistics.num_truncated:
        what = {"mask": "do not train", "penalize": "count as reward 0", "keep": "train as they are"}[config.algorithm.truncated]
        notes.append(
            f"{statistics.num_truncated} of {statistics.num_episodes} episodes were cut by sampling.max_tokens = {config.sampling.max_tokens} or "
            f"actors.max_turns = {config.actors.max_turns}, and {what} (algorithm.truncated)"
        )
    wanted = config.evaluation.num_tasks
    if wanted > environment.num_held_out:
        notes.append(f"evaluation.num_tasks = {wanted}, but the environment has {environment.num_held_out} held-out tasks: so many are evaluated")
    if group.num_failed:
        notes.append(f"{group.num_failed} of {config.algorithm.group_size} episodes failed, see below")
    return notes


def _equality(group: EpisodeGroup, algorithm: AlgorithmConfig) -> str:
    """Why the group has no signal."""
    count, counted = len(group.episodes), counted_rewards(group, algorithm)
    if count == 1:
        return "one episode has none to be compared with"
    if len(set(counted)) > 1:
        return f"the rewards of its {count} episodes differ by less than 32-bit advantages tell apart"
    if any(e.reward != counted[0] for e in group.episodes):
        cut = sum(e.truncated for e in group.episodes)
        return f'all {count} episodes count as reward {counted[0]:g}, {cut} of them since they were cut (algorithm.truncated = "penalize")'
    return f"all {count} episodes have the reward {counted[0]:g}"
