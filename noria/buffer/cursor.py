"""The endless order of a run's tasks: position -> task, a pure function that holds no state and no list."""

from noria.seeds import derive_seed
from noria.types import Task

ROUNDS = 4
"""Four rounds of a Feistel network with a pseudorandom function make a pseudorandom permutation (Luby and Rackoff 1988)."""


def task_at(position: int, *, num_tasks: int, seed: int) -> Task:
    """The task at `position` >= 0 of the run whose seed is given: each epoch of `num_tasks` positions visits every index once, in its own order."""
    epoch, offset = divmod(position, num_tasks)
    return Task(index=_permute(offset, num_tasks, (seed, epoch)), seed=derive_seed("task", seed, position))


def _permute(index: int, size: int, key: tuple[int, int]) -> int:
    """The image of `index` under a permutation of range(size) chosen by `key`.

    A Feistel network on the smallest even number of bits that holds `size`, applied until the image lies inside: fewer than four times on average.
    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", cycle walking.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & mask
        for number in range(ROUNDS):
            left, right = right, left ^ derive_seed(*key, number, right, bits=half_bits)
        index = left << half_bits | right
        if index < size:
            return index
