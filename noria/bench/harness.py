"""What every measurement of `noria bench` shares: paired repeats in one run, medians of ratios, and bars that are judged but never raise.

Timings on shared machines are noisy, and drift. So works that are compared take turns in one run, in the order given and then reversed, and what is
reported is the median of the ratios of neighbours, never a ratio of medians of different runs. A bar that is missed is an entry of the result: a
measurement that was made has succeeded.
"""

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax

REPEATS = 5
"""The fewest pairs whose median two disturbed ones cannot move to where they are."""

Result: TypeAlias = dict[str, Any]
"""A measurement as one JSON-ready object."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of each named work, repeat by repeat."""

    seconds: Mapping[str, tuple[float, ...]]

    def median(self, name: str) -> float:
        """Median seconds of one work."""
        return statistics.median(self.seconds[name])

    def ratio(self, over: str, under: str) -> float:
        """Median over the repeats of seconds of `over` / seconds of `under`: how many times faster `under` is."""
        return statistics.median(a / b for a, b in zip(self.seconds[over], self.seconds[under], strict=True))


def seconds_of(work: Callable[[], object]) -> float:
    """Wall seconds of one call. The work itself waits for the device."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def alternate(works: Mapping[str, Callable[[], object]], *, repeats: int = REPEATS) -> Timings:
    """Run all works by turns, `repeats` times each; every other round in reverse order, so that none always follows the same. All warmed before."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(repeats):
        for name in list(works) if repeat % 2 == 0 else list(works)[::-1]:
            seconds[name].append(seconds_of(works[name]))
    return Timings({name: tuple(values) for name, values in seconds.items()})


@dataclass(frozen=True, slots=True)
class Bar:
    """What a measurement has to show: a value of at least `at_least`, or at most `at_most`; one of them is given. value None: not measured."""

    name: str
    value: float | None
    at_least: float | None = None
    at_most: float | None = None

    @property
    def is_hit(self) -> bool | None:
        """Whether it is met; None where nothing was measured."""
        if self.value is None:
            return None
        return self.value >= self.at_least if self.at_least is not None else self.value <= (self.at_most or 0.0)

    def as_json(self) -> Result:
        """The bar as it stands in a result."""
        bound = {"at_least": self.at_least} if self.at_least is not None else {"at_most": self.at_most}
        return {"value": self.value, **bound, "is_hit": self.is_hit}


@dataclass(frozen=True, slots=True)
class Report:
    """A finished measurement. values: under the names that the bench promises. is_quick: at sizes that only show that it runs, never compared."""

    bench: str
    base: str
    values: Result
    bars: tuple[Bar, ...]
    is_quick: bool
    notes: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> Result:
        """One object: the values, then the bars by name, then what it was measured on."""
        bars = {bar.name: bar.as_json() for bar in self.bars}
        return {**self.values, "bars": bars, "sizes": "quick" if self.is_quick else "full", "bench": self.bench, "base": self.base, **self.machine()}

    def machine(self) -> Result:
        """Where it was measured, and with what."""
        device = jax.devices()[0]
        return {"device": device.device_kind, "platform": device.platform, "jax": jax.__version__, "python": platform.python_version(), **self.notes}
