"""Calls of tenant code: each has a deadline and a span, and what comes back is checked before anything else sees it.

Plain methods run in threads that can be given up, `async` ones as tasks that can be given up: a hang of either kind ends at its deadline, even
if it ignores cancellation. A failure is an error with its cause; it is never a reward.
"""

import asyncio
import inspect
import math
from collections.abc import Callable, Coroutine, Mapping
from numbers import Real
from typing import Any, TypeVar

import numpy as np

from noria.actors.rules import EpisodeRules, Seams
from noria.actors.threads import AbandonableThreads, failure_of
from noria.errors import EnvironmentFailedError, EnvironmentOutputError, RewardNotFiniteError
from noria.protocols import Environment, EnvironmentFactory, Step
from noria.types import Task

T = TypeVar("T")


async def start(seams: Seams, rules: EpisodeRules, task: Task) -> tuple[Environment, str]:
    """A fresh environment and the prompt of its task.

    Raises EnvironmentFailedError (it raised), EnvironmentOutputError (not a prompt), DeadlineExceededError (it hung for `reset_s`).
    """
    what = f"the environment's reset of task ({task.index}, {task.seed})"
    work = _call(seams.threads, what, _make_and_reset, rules.environment, task)
    environment, prompt = await _bounded(seams, work, rules.deadlines.reset_s, what)
    return environment, check_text(prompt, f"{what} returned", may_be_empty=False)


async def act(seams: Seams, rules: EpisodeRules, environment: Environment, action: str) -> Step:
    """What the environment answers to `action`, in plain Python numbers. Raises as `start`, and RewardNotFiniteError."""
    what = "the environment's step"
    work = _call(seams.threads, what, _step, environment, action)
    _, answer = await _bounded(seams, work, rules.deadlines.step_s, what)
    return check_step(answer)


def _make_and_reset(factory: EnvironmentFactory, task: Task) -> tuple[Environment, Any]:
    environment = factory()
    return environment, environment.reset(task)


def _step(environment: Environment, action: str) -> tuple[Environment, Any]:
    return environment, environment.step(action)


async def _call(threads: AbandonableThreads, what: str, function: Callable[..., tuple[Environment, Any]], *args: Any) -> tuple[Environment, Any]:
    environment, answer = await threads.call(what, function, *args)
    if inspect.isawaitable(answer):
        try:
            answer = await answer
        except (Exception, SystemExit) as error:
            raise failure_of(what, error) from error
    return environment, answer


async def _bounded(seams: Seams, work: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
    """The work's result. On timeout or cancellation the work is cancelled but not waited for, since tenant code may ignore that."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        await seams.clock.wait_for(asyncio.wait({task}), timeout_s, what)
        if task.cancelled():
            raise EnvironmentFailedError(f"{what} cancelled itself")
        return task.result()
    finally:
        task.cancel()


def check_text(value: object, what: str, *, may_be_empty: bool) -> str:
    """`value` as text. Raises EnvironmentOutputError, which begins with `what`, for anything else."""
    if not isinstance(value, str):
        raise EnvironmentOutputError(f"{what} {_show(value)}; it must be text")
    if not value and not may_be_empty:
        raise EnvironmentOutputError(f"{what} an empty text; the policy needs at least one token to go on from")
    return value


def check_step(value: object) -> Step:
    """A step with plain Python numbers. Raises RewardNotFiniteError, EnvironmentOutputError."""
    if not isinstance(value, Step):
        raise EnvironmentOutputError(f"the environment's step returned {_show(value)}; it must be a noria.protocols.Step")
    if not isinstance(value.done, bool | np.bool_):
        raise EnvironmentOutputError(f"the environment's step returned done={_show(value.done)}; it must be True or False")
    is_done = bool(value.done)
    observation = None if is_done else check_text(value.observation, "the environment's step is not done, and its observation is", may_be_empty=True)
    if not isinstance(value.reward_parts, Mapping):
        raise EnvironmentOutputError(f"the environment's step returned reward_parts={_show(value.reward_parts)}; it must be a dict")
    parts = {str(name): check_reward(part, f"reward part {name!r}") for name, part in value.reward_parts.items()}
    return Step(check_reward(value.reward, "the reward"), is_done, observation, parts)


def check_reward(value: object, what: str) -> float:
    """`value` as a float. Raises RewardNotFiniteError for NaN and infinities, EnvironmentOutputError for what is no number."""
    if not isinstance(value, Real):
        raise EnvironmentOutputError(f"{what} is {_show(value)}; it must be a number")
    if not math.isfinite(value):
        raise RewardNotFiniteError(f"{what} is {value}; it must be finite. The episode fails; it is not counted as 0")
    return float(value)


def _show(value: object) -> str:
    return f"{type(value).__name__} {str(value)[:80]!r}"
