"""One episode: observation tokens, then sampled tokens, until the environment is done.

    reset ──▶ encode ──▶ sample ──▶ decode ──▶ step ──┐
                ▲                                     │ observation
                └─────────────────────────────────────┘

Ids only ever grow at the end: history is neither rendered nor encoded a second time, and what is stored is exactly what the sampler saw and
produced. Deliberately not here: retries, groups, and any judgement of a failure.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager

from noria.actors.rules import EpisodeRules, Seams
from noria.actors.world import World, check_reward
from noria.errors import PromptTooLongError
from noria.seeds import derive_seed
from noria.types import Completion, Episode, Ids, SampleRequest, SamplingParams, Task, Turn

SEED_BITS = 31
"""Request seeds fit in a non-negative int32, which every random generator takes."""


async def run_episode(seams: Seams, rules: EpisodeRules, task: Task, *, episode_id: str, member: int) -> Episode:
    """Play one episode of `task`. episode_id: unique in the server. member: which episode of its group, 0-based.

    Raises EnvironmentFailedError, EnvironmentOutputError, RewardNotFiniteError; DeadlineExceededError naming the call, the request or the episode
    that took too long; PromptTooLongError if the first prompt leaves no room; and what the sampler raises. A later observation that leaves
    no room ends the episode as truncated.
    """
    play = _Play(seams, rules, task, episode_id, member)
    with seams.spans.span("actor", "episode", rules.run_id, is_wait=True):
        return await seams.clock.wait_for(play.run(), rules.deadlines.episode_s, f"episode {episode_id}")


def action_of(completion: Completion, stop_ids: Ids) -> Ids:
    """The sampled ids without the stop id that ended them."""
    ids = completion.sampled_ids
    return ids[:-1] if ids and ids[-1] in stop_ids else ids


class _Play:
    """The state of one episode under way; touched only by the task that runs it."""

    def __init__(self, seams: Seams, rules: EpisodeRules, task: Task, episode_id: str, member: int) -> None:
        self.seams, self.rules, self.task, self.episode_id, self.member = seams, rules, task, episode_id, member
        self.history: Ids = ()
        self.turns: list[Turn] = []
        self.reward = 0.0
        self.reward_parts: dict[str, float] = {}

    async def run(self) -> Episode:
        with self.seams.loops.lend(self.rules.run_id) as loop:
            return await self._play(World(self.seams, self.rules, loop))

    async def _play(self, world: World) -> Episode:
        with self._span("reset"):
            observation = await world.start(self.task)
        is_done = False
        while not is_done and len(self.turns) < self.rules.max_turns:
            completion = await self._sample(self.seams.tokenizer.encode(observation))
            if completion is None:
                break
            is_done, observation = await self._act(world, action_of(completion, self.rules.stop_ids))
        is_cut = self.turns[-1].completion.finish_reason == "length"
        return Episode(
            episode_id=self.episode_id,
            member=self.member,
            turns=tuple(self.turns),
            reward=check_reward(self.reward, "the sum of the rewards"),
            truncated=is_cut or not is_done,
            reward_parts=tuple(sorted(self.reward_parts.items())),
        )

    async def _sample(self, observation_ids: Ids) -> Completion | None:
        """The next completion, appended with its observation; None if a later turn finds no room left."""
        rules, turn = self.rules, len(self.turns)
        request = SampleRequest(
            request_id=f"{self.episode_id}/{turn}",
            tenant=rules.tenant,
            run_id=rules.run_id,
            episode_id=self.episode_id,
            prompt_ids=self.history + observation_ids,
            params=SamplingParams(rules.max_tokens, rules.temperature, rules.stop_ids, self._seed(turn)),
            version=rules.version,
        )
        try:
            with self._span("sample", is_wait=True):
                sample = self.seams.sampler.sample(request)
                completion = await self.seams.clock.wait_for(sample, rules.deadlines.sample_s, f"sample request {request.request_id}")
        except PromptTooLongError:
            if turn == 0:
                raise
            return None
        self.turns.append(Turn(observation_ids, completion, rules.temperature))
        self.history = request.prompt_ids + completion.sampled_ids
        return completion

    async def _act(self, world: World, action_ids: Sequence[int]) -> tuple[bool, str]:
        with self._span("step"):
            step = await world.act(self.seams.tokenizer.decode(action_ids))
        self.reward += step.reward
        for name, part in step.reward_parts.items():
            self.reward_parts[name] = self.reward_parts.get(name, 0.0) + part
        return step.done, step.observation or ""

    def _seed(self, turn: int) -> int:
        return derive_seed("request", self.rules.seed, self.task.index, self.task.seed, self.member, turn, bits=SEED_BITS)

    def _span(self, name: str, *, is_wait: bool = False) -> AbstractContextManager[None]:
        return self.seams.spans.span("actor", name, self.rules.run_id, is_wait=is_wait)
