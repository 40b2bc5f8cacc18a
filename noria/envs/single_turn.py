"""The shortest way to an environment: one question, one answer, one reward.

    class Countdown(SingleTurn):
        def problem(self, rng):
            a, b = rng.randint(1, 60), rng.randint(1, 39)
            return f"12 + 5 = 17\\n31 + 24 = 55\\n{a} + {b} =", str(a + b)

Training and evaluation never share a problem, by construction. A problem is held out if a hash of its prompt says so, which is true of one in
eight; a training task draws from `problem` until it gets one that is not held out, a held-out task until it gets one that is. So both follow the
distribution of `problem`, each restricted to its own side, whatever seeds and however many tasks there are. The same task always stands for
the same problem.

Deliberately not here: several turns (write `protocols.Environment` itself), and anything that waits.
"""

import random
from abc import ABC, abstractmethod
from difflib import get_close_matches

from noria.errors import ConfigError, EnvironmentFailedError
from noria.protocols import Step
from noria.seeds import derive_seed
from noria.types import Task

HELD_OUT_BITS = 3
"""One prompt in 2**3 is held out."""

MAX_DRAWS = 10_000
"""After so many draws on one side, the problems are too few to have two sides."""


class SingleTurn(ABC):
    """Satisfies `protocols.Environment`; an object serves one episode. Write `problem`, and `reward` if being equal to the answer is not it.

    Public class attributes are settings: a run file may give another value of the same type.
    """

    num_tasks: int = 4096
    """Training tasks: indices [0, num_tasks)."""
    num_held_out: int = 1024
    """Held-out tasks: indices [num_tasks, num_tasks + num_held_out)."""

    def __init__(self, **settings: object) -> None:
        """Raises ConfigError for a key that is no setting, or a value of another type than its default."""
        known = settings_of(type(self))
        for key, value in settings.items():
            if key not in known:
                close = get_close_matches(key, known, n=1, cutoff=0.5)
                hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"
                raise ConfigError(f"environment.settings: {type(self).__name__} has no setting {key!r}; {hint}")
            setattr(self, key, _as_setting(key, value, known[key]))
        self._answer = ""

    @abstractmethod
    def problem(self, rng: random.Random) -> tuple[str, str]:
        """A prompt and its answer, drawn with nothing but `rng`."""

    def reward(self, action: str, answer: str) -> float:
        """1 if the first line of what was sampled is the answer, white space at its ends aside; else 0."""
        return float(action.split("\n", 1)[0].strip() == answer)

    def reset(self, task: Task) -> str:
        """The prompt of the task's problem; the task's seed does not matter. Raises EnvironmentFailedError if one side has no problems."""
        is_wanted_held_out = task.index >= self.num_tasks
        rng = random.Random(derive_seed("problem", task.index))
        for _ in range(MAX_DRAWS):
            prompt, self._answer = self.problem(rng)
            if is_held_out(prompt) == is_wanted_held_out:
                return prompt
        side = "held-out" if is_wanted_held_out else "training"
        raise EnvironmentFailedError(f"{type(self).__name__} has no {side} problem among {MAX_DRAWS} draws; it needs more different prompts")

    def step(self, action: str) -> Step:
        """The reward; the episode is over."""
        return Step(self.reward(action, self._answer))


def is_held_out(prompt: str) -> bool:
    """Whether a problem is for evaluation only."""
    return derive_seed("held-out", prompt, bits=HELD_OUT_BITS) == 0


def settings_of(kind: type[SingleTurn]) -> dict[str, object]:
    """The public class attributes that are values, with their defaults."""
    attributes = {key: value for ancestor in reversed(kind.__mro__) for key, value in vars(ancestor).items()}
    return {key: value for key, value in attributes.items() if not key.startswith("_") and isinstance(value, str | int | float | tuple)}


def _as_setting(key: str, value: object, default: object) -> object:
    """`value` in the type of the setting's default; TOML writes floats as integers and tuples as lists."""
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if isinstance(default, tuple) and isinstance(value, list):
        return tuple(value)
    if type(value) is not type(default):
        raise ConfigError(f"environment.settings.{key}: must be {type(default).__name__}, like its default {default!r} (got {value!r})")
    return value
