"""Which lanes of a decode dispatch lie side by side: the lanes of a tile use one adapter slot, and best also one long prefix. Plain Python."""

from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import NamedTuple

from noria.sampler.sequence import BLOCK_PAGES, LANES_PER_TILE, LaneTile, Sequence


class Lane(NamedTuple):
    """A sequence in the next dispatch; `slot` holds `version` of its run. can_share: its prefix may be read once for all who have it in common."""

    sequence: Sequence
    slot: int
    version: int
    can_share: bool


def lanes_per_tile(sizes: Many[int], widths: Many[int]) -> int:
    """LANES_PER_TILE or 1, whichever serves more lanes in one dispatch, or serves them in a narrower program; LANES_PER_TILE if neither does.

    sizes: ready lanes of each adapter version. widths: of the programs, ascending; the last is the most that may be used.
    """
    limit = widths[-1]
    num_lanes, num_tiles = sum(sizes), sum(-(-size // LANES_PER_TILE) for size in sizes)
    if num_tiles * LANES_PER_TILE <= limit:
        return 1 if _width(num_lanes, widths) < _width(num_tiles * LANES_PER_TILE, widths) else LANES_PER_TILE
    fullest = sorted((min(LANES_PER_TILE, size - start) for size in sizes for start in range(0, size, LANES_PER_TILE)), reverse=True)
    return 1 if sum(fullest[: limit // LANES_PER_TILE]) < min(num_lanes, limit) else LANES_PER_TILE


def pack(lanes: Iterable[Lane], num_per_tile: int) -> list[LaneTile]:
    """Tiles of up to num_per_tile lanes of one slot each, as few as possible."""
    kinds: dict[tuple[int, int, bool], list[Sequence]] = {}
    for lane in lanes:
        kinds.setdefault((lane.slot, lane.version, lane.can_share), []).append(lane.sequence)
    tiles: list[LaneTile] = []
    for (slot, version, can_share), sequences in kinds.items():
        ordered = _alike_together(sequences, num_per_tile) if can_share else sequences
        for start in range(0, len(ordered), num_per_tile):
            part = ordered[start : start + num_per_tile]
            tiles.append(LaneTile(slot, version, part, _num_shared(part) if can_share else 0))
    return tiles


def _width(num_lanes: int, widths: Many[int]) -> int:
    return next(width for width in widths if width >= min(num_lanes, widths[-1]))


def _alike_together(sequences: list[Sequence], num_per_tile: int) -> list[Sequence]:
    """Those that begin with the same block of pages next to each other: first what fills whole tiles, then what is left of each kind."""
    kinds: dict[tuple[int, ...], list[Sequence]] = {}
    for sequence in sequences:
        kinds.setdefault(sequence.block_ends[:1], []).append(sequence)
    whole, rest = [], []
    for alike in kinds.values():
        alike.sort(key=lambda sequence: sequence.block_ends)
        cut = len(alike) - len(alike) % num_per_tile
        whole += alike[:cut]
        rest += alike[cut:]
    return whole + rest


def _num_shared(sequences: list[Sequence]) -> int:
    """Pages that all have in common from the first on, of those that nobody writes any more; whole blocks."""
    if len(sequences) == 1:
        return 0
    num_blocks = 0
    for pages in zip(*(sequence.block_ends for sequence in sequences), strict=False):
        if len(set(pages)) > 1:
            break
        num_blocks += 1
    shared = sequences[0].table[: num_blocks * BLOCK_PAGES]
    return len(shared) if all(sequence.table[: len(shared)] == shared for sequence in sequences) else 0
