"""A group: the episodes of one leased task, played side by side, each retried a bounded number of times.

A failed episode is never a reward of 0. What failed for good is left out, counted, and told; with fewer than two episodes left there is nothing
to compare, and there is no group.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from noria.actors.episode import run_episode
from noria.actors.room import Room
from noria.actors.rules import EpisodeRules, Seams
from noria.errors import (
    ChatTemplateError,
    DeadlineExceededError,
    EnvironmentFailedError,
    EnvironmentOutputError,
    InvalidRequestError,
    PromptTooLongError,
)
from noria.protocols import Lease
from noria.types import Episode, EpisodeGroup, Task

MIN_EPISODES = 2
"""A group compares episodes with each other."""

RETRIED = (EnvironmentFailedError, EnvironmentOutputError, DeadlineExceededError)
"""May go well the next time. Everything else that an episode raises is no episode's failure and ends the group: the sampler stopped, ..."""

HOPELESS = (PromptTooLongError, InvalidRequestError, ChatTemplateError)
"""Fail an episode at once: the same prompt fails in the same way."""


@dataclass(frozen=True, slots=True)
class EpisodeFailure:
    """An episode that failed for good. num_tries: how often it was tried. code, message: of its last error."""

    member: int
    num_tries: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """group: the episodes that succeeded, in order of member; None if fewer than two did. num_retries: tries beyond each episode's first."""

    group: EpisodeGroup | None
    failures: tuple[EpisodeFailure, ...]
    num_retries: int


@dataclass(frozen=True, slots=True)
class Played:
    """One episode after all its tries: itself, or its failure."""

    episode: Episode | None
    failure: EpisodeFailure | None
    num_tries: int


async def run_group(seams: Seams, rules: EpisodeRules, lease: Lease, *, group_size: int, episode_tries: int, room: Room) -> GroupOutcome:
    """Play the leased task `group_size` times at once. room: entered for each try.

    Raises DeadlineExceededError at the lease's deadline, and what ends a group (`RETRIED`). Cancelling it cancels its sample requests.
    """
    members = play_all(seams, rules, [(lease.task, f"{lease.group_id}/{m}", m) for m in range(group_size)], tries=episode_tries, room=room)
    played = await seams.clock.wait_for(members, max(0.0, lease.deadline_s - seams.clock.wall()), f"group {lease.group_id}")
    episodes = tuple(p.episode for p in played if p.episode is not None)
    failures = tuple(p.failure for p in played if p.failure is not None)
    group = EpisodeGroup(lease.group_id, lease.run_id, lease.task, episodes, len(failures)) if len(episodes) >= MIN_EPISODES else None
    return GroupOutcome(group, failures, sum(p.num_tries for p in played) - len(played))


async def play_all(seams: Seams, rules: EpisodeRules, episodes: Sequence[tuple[Task, str, int]], *, tries: int, room: Room) -> list[Played]:
    """Play (task, name, member) episodes at once, in the order given; the first error that is no episode's failure cancels the rest."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_play_with_tries(seams, rules, episode, tries, room)) for episode in episodes]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]


async def _play_with_tries(seams: Seams, rules: EpisodeRules, episode: tuple[Task, str, int], tries: int, room: Room) -> Played:
    task, name, member = episode
    num_tries = 0
    while True:
        num_tries += 1
        try:
            async with room.enter(rules.run_id):
                return Played(await run_episode(seams, rules, task, episode_id=f"{name}/{num_tries}", member=member), None, num_tries)
        except (*RETRIED, *HOPELESS) as error:
            if num_tries >= tries or isinstance(error, HOPELESS):
                return Played(None, EpisodeFailure(member, num_tries, error.code, str(error)), num_tries)
