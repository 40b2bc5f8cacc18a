"""Calls of tenant code: each has a deadline and a span, and what comes back is checked before anything else sees it.

    method ──▶ a thread that can be given up ──▶ an answer, checked there
                                      └────────▶ an awaitable ──▶ the run's own event loop (actors/loops.py) ──▶ an answer, checked there

What an answer may be is said in outputs.py. Nothing of a tenant's ever runs on the event loop of the actors: not an awaitable, not the `__str__` of
an error, not the `__float__` of a reward. So code that hangs, blocks its loop or ignores cancellation ends at its deadline and delays its own run
only. A failure is an error with its cause; it is never a reward. Tenant code lives in real time: under a `VirtualClock`, time stands still while a
call of either kind is under way.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, final

from noria.actors.calls import Calls
from noria.actors.loops import EnvironmentLoop
from noria.actors.outputs import check_prompt, check_step
from noria.actors.rules import EpisodeRules, Seams
from noria.actors.threads import Pending
from noria.protocols import Environment, Step
from noria.types import Message, Prompt, Task

T = TypeVar("T")


@final
class World:
    """One episode's environment. Touched by the task that plays the episode only."""

    def __init__(self, seams: Seams, rules: EpisodeRules, loop: EnvironmentLoop) -> None:
        """loop: lent to this episode; what its methods return to be awaited runs there."""
        self._seams, self._rules, self._loop = seams, rules, loop
        self._environment: Environment | None = None
        self._calls = Calls()

    async def start(self, task: Task) -> str | Prompt:
        """Make a fresh environment, and return the prompt of its task, which says in what the episode speaks: text or messages.

        Raises EnvironmentFailedError (it raised, or too many calls of the run hang), EnvironmentOutputError (not a prompt), DeadlineExceededError (it
        hung for `reset_s`).
        """
        what = f"the environment's reset of task ({task.index}, {task.seed})"
        return await self._seams.clock.wait_for(self._make_and_reset(what, task), self._rules.deadlines.reset_s, what)

    async def act(self, action: str | Message) -> Step:
        """What the environment answers to `action`, in plain values. action: of the episode's kind. Raises as `start`, and RewardNotFiniteError."""
        assert self._environment is not None, "start it first"
        what, calls = "the environment's step", None
        if isinstance(action, Message):
            calls = self._calls
            calls.follow((action,), what)
        check = partial(check_step, calls=calls)
        return await self._seams.clock.wait_for(self._call(what, check, self._environment.step, action), self._rules.deadlines.step_s, what)

    async def _make_and_reset(self, what: str, task: Task) -> str | Prompt:
        environment = await self._seams.threads.call(self._rules.run_id, what, self._rules.environment)
        prompt = await self._call(what, partial(check_prompt, what=f"{what} returned", calls=self._calls), environment.reset, task)
        self._environment = environment
        return prompt

    async def _call(self, what: str, check: Callable[[Any], T], method: Callable[..., Any], *args: Any) -> T:
        answer = await self._seams.threads.call(self._rules.run_id, what, _checked, check, method, *args)
        return await self._loop.call(what, check, answer) if isinstance(answer, Pending) else answer


def _checked(check: Callable[[Any], T], method: Callable[..., Any], *args: Any) -> T | Pending:
    answer = method(*args)
    return Pending(answer) if inspect.isawaitable(answer) else check(answer)
