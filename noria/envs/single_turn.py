"""The shortest way to an environment: one question, one answer, one reward.

    class Countdown(SingleTurn):
        def problem(self, rng):
            a, b = rng.randint(1, 60), rng.randint(1, 39)
            return f"12 + 5 = 17\\n31 + 24 = 55\\n{a} + {b} =", str(a + b)

Training and evaluation never share a problem (problems.py). Deliberately not here: several turns (write `protocols.Environment` itself, as
calculator.py does), and anything that waits.
"""

import random
from abc import ABC, abstractmethod

from noria.envs.problems import problem_of
from noria.envs.settings import Settings
from noria.protocols import Step
from noria.types import Task


class SingleTurn(Settings, ABC):
    """Satisfies `protocols.Environment`; an object serves one episode. Write `problem`, and `reward` if being equal to the answer is not it.

    Public class attributes are settings: a run file may give another value of the same type.
    """

    num_tasks: int = 4096
    """Training tasks: indices [0, num_tasks)."""
    num_held_out: int = 1024
    """Held-out tasks: indices [num_tasks, num_tasks + num_held_out)."""
    _answer = ""

    @abstractmethod
    def problem(self, rng: random.Random) -> tuple[str, str]:
        """A prompt and its answer, drawn with nothing but `rng`."""

    def reward(self, action: str, answer: str) -> float:
        """1 if the first line of what was sampled is the answer, white space at its ends aside; else 0."""
        return float(action.split("\n", 1)[0].strip() == answer)

    def reset(self, task: Task) -> str:
        """The prompt of the task's problem; the task's seed does not matter. Raises EnvironmentFailedError if one side has no problems."""
        prompt, self._answer = problem_of(task, self.problem, num_tasks=self.num_tasks, name=type(self).__name__)
        return prompt

    def step(self, action: str) -> Step:
        """The reward; the episode is over."""
        return Step(self.reward(action, self._answer))
