"""Regular expressions for whole names, matched without backtracking: an adapter's file is somebody else's, and `([a-z]+)+!` must not hang a server.

    pattern ──▶ parts; part(positions where it may begin) ──▶ positions where it may end

A match of a whole name needs only these sets, bit masks here, and never the way that led there. The steps of all names together are bounded. What is
written is what `re` reads: letters, `.`, `[...]`, `\\d \\w \\s`, groups, `|`, `* + ? {m,n}` (greedy or lazy, which is the same for whole names),
`^ $ \\b \\B \\A \\Z`, `(?=...)` and `(?!...)`. All else (back references, look-behind, flags, possessive and atomic parts) is refused.
"""

import math
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias, final

MAX_LENGTH: Final = 2000
"""Of a pattern, in characters."""

MAX_STEPS: Final = 2_000_000
"""Of one matcher, for all names: a hundred times what a pattern takes that people write, and about a second."""

_MAX_DEPTH: Final = 20  # of groups
_CLASS: Final = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_COUNT: Final = re.compile(r"\{(?!\})(\d*)(,?)(\d*)\}")
_GROUP: Final = re.compile(r"\((?:\?(?::|=|!|P<\w+>)|(?!\?))")


class PatternError(ValueError):
    """A pattern that may be valid, and that noria does not match."""


def name_matcher(pattern: str) -> Callable[[str], bool]:
    """A function that says whether a whole name, of one line, matches; it raises PatternError once it has taken too many steps.

    Raises PatternError for what is refused, re.error for what is no regular expression.
    """
    if len(pattern) > MAX_LENGTH:
        raise PatternError(f"a pattern of {len(pattern)} characters; noria reads up to {MAX_LENGTH}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sets of characters that may mean something else one day
            re.compile(pattern)
    except (OverflowError, RecursionError) as error:
        raise PatternError(f"{error}") from error
    part, budget = _Reader(pattern).read(), _Budget()
    return lambda name: bool(part(_Walk(name, budget), 1) >> len(name))


class _Budget:
    """Steps that are left."""

    left = MAX_STEPS


@final
class _Walk:
    """One name on its way through the parts. masks: where each atom holds."""

    def __init__(self, name: str, budget: _Budget) -> None:
        self.name, self.masks, self._budget = name, dict[str, int](), budget

    def spend(self) -> None:
        self._budget.left -= 1
        if self._budget.left < 0:
            raise PatternError("a pattern that takes too long to match")


_Part: TypeAlias = Callable[[_Walk, int], int]


def _atom(written: str, width: int, walk: _Walk, begins: int) -> int:
    """One letter (width 1), or a condition on the place (width 0)."""
    walk.spend()
    if (mask := walk.masks.get(written)) is None:
        holds = re.compile(written).match
        mask = walk.masks[written] = sum(1 << i for i in range(len(walk.name) + 1) if holds(walk.name, i))
    return (begins & mask) << width


def _sequence(parts: list[_Part], walk: _Walk, begins: int) -> int:
    for part in parts:
        begins = part(walk, begins) if begins else 0
    return begins


def _either(options: list[_Part], walk: _Walk, begins: int) -> int:
    ends = 0
    for option in options:
        ends |= option(walk, begins)
    return ends


def _repeat(part: _Part, least: int, most: float, walk: _Walk, begins: int) -> int:
    count = 0
    while begins and count < least:
        walk.spend()
        begins, count = part(walk, begins), count + 1
    ends = begins
    while begins and count < most:
        walk.spend()
        begins, count = part(walk, begins) & ~ends, count + 1
        ends |= begins
    return ends


def _ahead(part: _Part, is_wanted: bool, walk: _Walk, begins: int) -> int:
    places = (1 << i for i in range(begins.bit_length()) if begins >> i & 1)
    return sum(place for place in places if bool(part(walk, place)) is is_wanted)


@final
class _Reader:
    """Reads a pattern that `re` compiles, from left to right."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._place, self._depth = pattern, 0, 0

    def read(self) -> _Part:
        part = self._options()
        assert self._place == len(self._pattern), "re would not have compiled it"
        return part

    def _options(self) -> _Part:
        options: list[_Part] = []
        while not options or self._has("|"):
            parts: list[_Part] = []
            while self._place < len(self._pattern) and self._pattern[self._place] not in "|)":
                parts.append(self._repeated(self._part()))
            options.append(partial(_sequence, parts))
        return partial(_either, options)

    def _part(self) -> _Part:
        letter = self._pattern[self._place]
        if letter == "(":
            return self._group()
        if letter == "[":
            return partial(_atom, self._take(_CLASS), 1)
        self._place += 1
        if letter == "\\":
            return self._escaped()
        if letter in "^$":
            return partial(_atom, letter, 0)
        return partial(_atom, letter if letter == "." else re.escape(letter), 1)

    def _escaped(self) -> _Part:
        letter = self._pattern[self._place]
        self._place += 1
        if letter in "bBAZ":
            return partial(_atom, f"\\{letter}", 0)
        if letter.isalnum() and letter not in "dDwWsS":
            raise PatternError(f"\\{letter}, which noria does not match")
        return partial(_atom, f"\\{letter}", 1)

    def _group(self) -> _Part:
        opening = self._take(_GROUP)
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise PatternError(f"groups nested more than {_MAX_DEPTH} deep")
        part = self._options()
        self._depth -= 1
        self._has(")")
        return part if opening[-1] not in "=!" else partial(_ahead, part, opening[-1] == "=")

    def _repeated(self, part: _Part) -> _Part:
        least, most = 0, math.inf
        if (count := _COUNT.match(self._pattern, self._place)) is not None:
            least = int(count[1] or 0)
            most = math.inf if count[2] and not count[3] else int(count[3] or least)
            self._place = count.end()
        elif self._has("+"):
            least = 1
        elif self._has("?"):
            most = 1
        elif not self._has("*"):
            return part
        if self._has("+"):
            raise PatternError("a possessive repetition, which noria does not match")
        self._has("?")  # lazy
        return partial(_repeat, part, least, most)

    def _has(self, letter: str) -> bool:
        """Whether the letter is next; then it is taken."""
        is_next = self._pattern.startswith(letter, self._place)
        self._place += is_next
        return is_next

    def _take(self, form: re.Pattern[str]) -> str:
        found = form.match(self._pattern, self._place)
        if found is None:
            raise PatternError(f"{self._pattern[self._place : self._place + 4]!r}, which noria does not match")
        self._place = found.end()
        return found[0]
