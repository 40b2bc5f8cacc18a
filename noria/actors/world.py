"""Calls of tenant code: each has a deadline and a span, and what comes back is checked before anything else sees it.

    method ──▶ a thread that can be given up ──▶ an answer, checked there
                                      └────────▶ an awaitable ──▶ the run's own event loop (actors/loops.py) ──▶ an answer, checked there

Nothing of a tenant's ever runs on the event loop of the actors: not an awaitable, not the `__str__` of an error, not the `__float__` of a reward. So
code that hangs, blocks its loop or ignores cancellation ends at its deadline and delays its own run only. A failure is an error with its cause; it is
never a reward. Tenant code lives in real time: under a `VirtualClock`, time stands still while a call of either kind is under way.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, TypeVar, final

import numpy as np

from noria.actors.loops import EnvironmentLoop
from noria.actors.rules import EpisodeRules, Seams
from noria.actors.threads import Pending
from noria.errors import EnvironmentOutputError, RewardNotFiniteError
from noria.protocols import Environment, Step
from noria.types import Task

T = TypeVar("T")


@final
class World:
    """One episode's environment. Touched by the task that plays the episode only."""

    def __init__(self, seams: Seams, rules: EpisodeRules, loop: EnvironmentLoop) -> None:
        """loop: lent to this episode; what its methods return to be awaited runs there."""
        self._seams, self._rules, self._loop = seams, rules, loop
        self._environment: Environment | None = None

    async def start(self, task: Task) -> str:
        """Make a fresh environment, and return the prompt of its task.

        Raises EnvironmentFailedError (it raised, or too many calls of the run hang), EnvironmentOutputError (not a prompt), DeadlineExceededError (it
        hung for `reset_s`).
        """
        what = f"the environment's reset of task ({task.index}, {task.seed})"
        return await self._seams.clock.wait_for(self._make_and_reset(what, task), self._rules.deadlines.reset_s, what)

    async def act(self, action: str) -> Step:
        """What the environment answers to `action`, in plain Python numbers. Raises as `start`, and RewardNotFiniteError."""
        assert self._environment is not None, "start it first"
        what = "the environment's step"
        return await self._seams.clock.wait_for(self._call(what, check_step, self._environment.step, action), self._rules.deadlines.step_s, what)

    async def _make_and_reset(self, what: str, task: Task) -> str:
        environment = await self._seams.threads.call(self._rules.run_id, what, self._rules.environment)

        def check(prompt: object) -> str:
            return check_text(prompt, f"{what} returned", may_be_empty=False)

        prompt = await self._call(what, check, environment.reset, task)
        self._environment = environment
        return prompt

    async def _call(self, what: str, check: Callable[[Any], T], method: Callable[..., Any], *args: Any) -> T:
        answer = await self._seams.threads.call(self._rules.run_id, what, _checked, check, method, *args)
        return await self._loop.call(what, check, answer) if isinstance(answer, Pending) else answer


def _checked(check: Callable[[Any], T], method: Callable[..., Any], *args: Any) -> T | Pending:
    answer = method(*args)
    return Pending(answer) if inspect.isawaitable(answer) else check(answer)


def check_text(value: object, what: str, *, may_be_empty: bool) -> str:
    """`value` as a plain `str`. Raises EnvironmentOutputError, which begins with `what`, for anything else."""
    if not isinstance(value, str):
        raise EnvironmentOutputError(f"{what} {_show(value)}; it must be text")
    if not value and not may_be_empty:
        raise EnvironmentOutputError(f"{what} an empty text; the policy needs at least one token to go on from")
    return str.__str__(value)


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
