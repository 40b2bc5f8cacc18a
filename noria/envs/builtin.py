"""The environments that a run file can name without a file of its own."""

from collections.abc import Callable

from noria.envs.arithmetic import Addition, Doubling, Largest, Smallest
from noria.envs.calculator import Calculator
from noria.envs.words import FirstLetter
from noria.protocols import Environment

BUILTIN: dict[str, Callable[..., Environment]] = {
    "addition": Addition,
    "calculator": Calculator,
    "doubling": Doubling,
    "first_letter": FirstLetter,
    "largest": Largest,
    "smallest": Smallest,
}
