"""Questions about small numbers, few-shot, that a base model of 135 M parameters learns in some twenty steps (algorithms.md section 6).

The examples before the question are the attribute `examples`, and the question's form is `question`: settings like any other.
"""

import random
from typing import final

from noria.envs.single_turn import SingleTurn


@final
class Addition(SingleTurn):
    """The sum of two numbers, at most largest_a and largest_b."""

    examples: str = "12 + 5 = 17\n31 + 24 = 55\n"
    question: str = "{a} + {b} ="
    largest_a: int = 60
    largest_b: int = 39

    def problem(self, rng: random.Random) -> tuple[str, str]:
        """Two numbers from 1 on."""
        a, b = rng.randint(1, self.largest_a), rng.randint(1, self.largest_b)
        return self.examples + self.question.format(a=a, b=b), str(a + b)


@final
class Doubling(SingleTurn):
    """Twice a number between smallest and largest."""

    examples: str = "12 + 12 = 24\n31 + 31 = 62\n"
    question: str = "{a} + {a} ="
    smallest: int = 1
    largest: int = 149

    def problem(self, rng: random.Random) -> tuple[str, str]:
        """One number."""
        a = rng.randint(self.smallest, self.largest)
        return self.examples + self.question.format(a=a), str(2 * a)


@final
class Largest(SingleTurn):
    """The largest of three different two-digit numbers."""

    examples: str = "largest of 12 45 31 = 45\nlargest of 80 22 54 = 80\n"
    question: str = "largest of {a} {b} {c} ="

    def problem(self, rng: random.Random) -> tuple[str, str]:
        """Three numbers."""
        a, b, c = rng.sample(range(10, 100), 3)
        return self.examples + self.question.format(a=a, b=b, c=c), str(max(a, b, c))


@final
class Smallest(SingleTurn):
    """The smallest of three different two-digit numbers."""

    examples: str = "smallest of 52 15 31 = 15\nsmallest of 20 82 54 = 20\nsmallest of 77 59 23 = 23\n"
    question: str = "smallest of {a} {b} {c} ="

    def problem(self, rng: random.Random) -> tuple[str, str]:
        """Three numbers."""
        a, b, c = rng.sample(range(10, 100), 3)
        return self.examples + self.question.format(a=a, b=b, c=c), str(min(a, b, c))
