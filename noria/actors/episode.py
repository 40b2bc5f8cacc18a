"""One episode: observation tokens, then sampled tokens, until the environment is done.

    reset ──▶ begin ──▶ sample ──▶ hear ──▶ step ──┐
                ▲                                  │ observation
                └──────────── answer ◀─────────────┘

What is stored is exactly what the sampler saw and produced. Ids only ever grow at the end; where a chat template rewrites history, the episode forks:
the path so far stays as it is, and another goes on from the part of it that still holds. Text and chat differ in dialogue.py only. Deliberately not
here: retries, groups, and any judgement of a failure.
"""

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager

from noria.actors.dialogue import dialogue_of
from noria.actors.outputs import check_reward
from noria.actors.rules import EpisodeRules, Seams
from noria.actors.world import World
from noria.errors import EnvironmentOutputError, PromptTooLongError
from noria.protocols import Step
from noria.seeds import derive_seed
from noria.text.chat import Continuation
from noria.types import Completion, Episode, Ids, SampleRequest, SamplingParams, Task, Turn

SAMPLE_MARGIN_S = 5.0
"""The sampler's own deadline comes first, since it knows what a request was waiting for; this much later comes that of a sampler which hangs."""

SEED_BITS = 31
"""Request seeds fit in a non-negative int32, which every random generator takes."""


async def run_episode(seams: Seams, rules: EpisodeRules, task: Task, *, episode_id: str, member: int) -> Episode:
    """Play one episode of `task`. episode_id: unique in the server. member: which episode of its group, 0-based.

    Raises EnvironmentFailedError, EnvironmentOutputError, RewardNotFiniteError, ChatTemplateError; DeadlineExceededError naming the call, the request
    or the episode that took too long; PromptTooLongError if the first prompt leaves no room; and what the sampler raises. A later observation that
    leaves no room ends the episode as truncated.
    """
    play = _Play(seams, rules, task, episode_id, member)
    with seams.spans.span("actor", "episode", rules.run_id, is_wait=True):
        return await seams.clock.wait_for(play.run(), rules.deadlines.episode_s, f"episode {episode_id}")


class _Play:
    """The state of one episode under way; touched only by the task that runs it."""

    def __init__(self, seams: Seams, rules: EpisodeRules, task: Task, episode_id: str, member: int) -> None:
        self.seams, self.rules, self.task, self.episode_id, self.member = seams, rules, task, episode_id, member
        self.path: Ids = ()
        self.stop_ids: Ids = rules.stop_ids
        self.turns: list[Turn] = []
        self.rewards: list[float] = []
        self.parts: dict[str, list[float]] = {}

    async def run(self) -> Episode:
        with self.seams.loops.lend(self.rules.run_id) as loop:
            return await self._play(World(self.seams, self.rules, loop))

    async def _play(self, world: World) -> Episode:
        with self._span("reset"):
            dialogue = dialogue_of(await world.start(self.task), self.seams, self.rules)
            continuation = Continuation(None, await dialogue.begin())
            self.stop_ids = dialogue.stop_ids
        is_done = False
        while completion := await self._sample(continuation):
            with self._span("step"):
                step = await world.act(await dialogue.hear(completion.sampled_ids))
                self._count(step)
                is_done = step.done
                if is_done or len(self.turns) == self.rules.max_turns:
                    break
                continuation = await dialogue.answer(step)
        is_cut = any(turn.completion.finish_reason == "length" for turn in self.turns)
        reward_parts = {name: check_reward(_sum(values), f"the sum of reward part {name!r}") for name, values in self.parts.items()}
        return Episode(
            episode_id=self.episode_id,
            member=self.member,
            turns=tuple(self.turns),
            reward=self._total(reward_parts, is_done=is_done),
            truncated=is_cut or not is_done,
            reward_parts=tuple(sorted(reward_parts.items())),
        )

    async def _sample(self, continuation: Continuation) -> Completion | None:
        """The next completion, appended with its observation; None if a later turn finds no room left."""
        rules, turn = self.rules, len(self.turns)
        is_fork = continuation.keep is not None and continuation.keep < len(self.path)
        request = SampleRequest(
            request_id=f"{self.episode_id}/{turn}",
            tenant=rules.tenant,
            run_id=rules.run_id,
            episode_id=self.episode_id,
            prompt_ids=self.path[: continuation.keep] + continuation.ids,
            params=SamplingParams(
                rules.max_tokens,
                rules.temperature,
                self.stop_ids,
                self._seed(turn),
                top_k=rules.top_k,
                top_p=rules.top_p,
                stop=rules.stop,
            ),
            version=rules.version,
            timeout_s=rules.deadlines.sample_s,
        )
        try:
            with self._span("sample", is_wait=True):
                sample = self.seams.sampler.sample(request)
                limit_s = request.timeout_s + SAMPLE_MARGIN_S
                completion = await self.seams.clock.wait_for(sample, limit_s, f"sample request {request.request_id}")
        except PromptTooLongError:
            if turn == 0:
                raise
            return None
        self.turns.append(Turn(continuation.ids, completion, rules.temperature, continuation.keep if is_fork else None))
        self.path = request.prompt_ids + completion.sampled_ids
        return completion

    def _count(self, step: Step) -> None:
        self.rewards.append(step.reward)
        for name, part in step.reward_parts.items():
            self.parts.setdefault(name, []).append(part)

    def _total(self, parts: Mapping[str, float], *, is_done: bool) -> float:
        """The episode's reward. A weighted component that was never reported counts as 0 only if the episode was cut before its end.

        Raises RewardNotFiniteError, EnvironmentOutputError.
        """
        weights = self.rules.reward_weights
        if not weights:
            return check_reward(_sum(self.rewards), "the sum of the rewards")
        missing = sorted(weights.keys() - parts.keys())
        if missing and is_done:
            raise EnvironmentOutputError(
                f"environment.rewards weighs {', '.join(missing)}, which the environment did not report in any step of a whole episode; "
                f"it reported {', '.join(sorted(parts)) or 'no reward_parts'}"
            )
        weighted = [weight * parts.get(name, 0.0) for name, weight in weights.items()]
        return check_reward(_sum(weighted), "the weighted sum of the reward components")

    def _seed(self, turn: int) -> int:
        return derive_seed("request", self.rules.seed, self.task.index, self.task.seed, self.member, turn, bits=SEED_BITS)

    def _span(self, name: str, *, is_wait: bool = False) -> AbstractContextManager[None]:
        return self.seams.spans.span("actor", name, self.rules.run_id, is_wait=is_wait)


def _sum(values: Iterable[float]) -> float:
    """Exact until it is rounded once, so that 0.7 + 0.2 + 0.1 is 1.0 on every Python; NaN where it overflows."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # of finite numbers, and of infinities of both signs
        return math.nan
