"""A first environment: a question, an answer, a reward."""

import random

from noria.envs.single_turn import SingleTurn


class Smallest(SingleTurn):
    """The smallest of some two-digit numbers."""

    # Public class attributes are settings: a run file may give other values of the same type.
    how_many: int = 3
    # A small base model is shown what an answer looks like; it has never seen this task.
    examples: str = "smallest of 52 15 31 = 15\nsmallest of 20 82 54 = 20\n"

    def problem(self, rng: random.Random) -> tuple[str, str]:
        """A prompt and its answer, drawn with nothing but `rng`: so the same task is always the same problem.

        One prompt in eight, chosen by a hash of its text, is held out for evaluation and never trained on.
        """
        numbers = rng.sample(range(10, 100), self.how_many)
        question = f"smallest of {' '.join(map(str, numbers))} ="
        return self.examples + question, str(min(numbers))

    def reward(self, action: str, answer: str) -> float:
        """From 0 to 1. Leave this method out if being equal to the answer is what counts."""
        said = action.split("\n", 1)[0].strip()
        # A little for a number at all: a group in which everything is worth 0 teaches nothing.
        return 1.0 if said == answer else 0.1 * said.isdigit()
