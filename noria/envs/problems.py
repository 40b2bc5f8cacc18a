"""Problems of tasks: training and evaluation never share one, by construction.

A problem is held out if a hash of its prompt says so, which is true of one in eight; a training task draws until it gets one that is not held out, a
held-out task until it gets one that is. So both follow the same distribution, each restricted to its own side, whatever seeds and however many tasks
there are. The same task always stands for the same problem.
"""

import random
from collections.abc import Callable

from noria.errors import EnvironmentFailedError
from noria.seeds import derive_seed
from noria.types import Task

HELD_OUT_BITS = 3
"""One prompt in 2**3 is held out."""

MAX_DRAWS = 10_000
"""After so many draws on one side, the problems are too few to have two sides."""


def problem_of(task: Task, draw: Callable[[random.Random], tuple[str, str]], *, num_tasks: int, name: str) -> tuple[str, str]:
    """Prompt and answer of the task's problem; the task's seed does not matter.

    draw: a problem, made with nothing but its generator. num_tasks: from this index on tasks are held out. name: of the environment, for errors.
    Raises EnvironmentFailedError if one side has no problems.
    """
    is_wanted_held_out = task.index >= num_tasks
    rng = random.Random(derive_seed("problem", task.index))
    for _ in range(MAX_DRAWS):
        prompt, answer = draw(rng)
        if is_held_out(prompt) == is_wanted_held_out:
            return prompt, answer
    side = "held-out" if is_wanted_held_out else "training"
    raise EnvironmentFailedError(f"{name} has no {side} problem among {MAX_DRAWS} draws; it needs more different prompts")


def is_held_out(prompt: str) -> bool:
    """Whether a problem is for evaluation only."""
    return derive_seed("held-out", prompt, bits=HELD_OUT_BITS) == 0
