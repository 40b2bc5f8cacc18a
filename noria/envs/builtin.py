"""The environments that a run file can name without a file of its own."""

from noria.envs.arithmetic import Addition, Doubling, Largest, Smallest
from noria.envs.single_turn import SingleTurn
from noria.envs.words import FirstLetter

BUILTIN: dict[str, type[SingleTurn]] = {
    "addition": Addition,
    "doubling": Doubling,
    "first_letter": FirstLetter,
    "largest": Largest,
    "smallest": Smallest,
}
