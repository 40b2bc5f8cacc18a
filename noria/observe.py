"""Which stage did what, when: spans (from which utilization and the timeline are made) and structured logs.

Deliberately not here: metrics of single runs (they live in the store), and any text of a prompt or a completion, which is a tenant's property
and never logged.
"""

import json
import logging
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import TextIO, TypeAlias, final

from noria.protocols import Clock

LogValue: TypeAlias = str | int | float | bool | None

MAX_TOTALS = 4096
"""Distinct (stage, name, run) totals kept; later ones share one total per stage named "other", so that memory stays bounded."""

MAX_LOG_CHARACTERS = 300
"""Longest text of one log field: enough for an id or an error's first line, too little to leak a prompt by accident."""


@dataclass(frozen=True, slots=True)
class Span:
    """One finished stretch of a stage's time. start_s, end_s: of the recorder's clock. is_wait: it waited and did not work."""

    stage: str
    name: str
    run_id: str
    is_wait: bool
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class SpanTotal:
    """All spans of one name since the start: how many, their summed and their longest duration in seconds."""

    stage: str
    name: str
    run_id: str
    is_wait: bool
    num_spans: int
    total_s: float
    longest_s: float


@final
class SpanRecorder:
    """Satisfies `protocols.Spans`: the newest spans of each stage in a ring, and running totals of all of them.

    Callable from any thread; its lock is held for a few instructions only.
    """

    def __init__(self, clock: Clock, *, capacity: int = 20_000) -> None:
        """capacity: raw spans kept per stage."""
        self._clock = clock
        self._lock = threading.Lock()
        self._keys = count()
        self._open: dict[int, Span] = {}
        self._rings: defaultdict[str, deque[Span]] = defaultdict(lambda: deque(maxlen=capacity))
        self._totals: dict[tuple[str, str, str, bool], tuple[int, float, float]] = {}

    def span(self, stage: str, name: str, run_id: str = "", *, is_wait: bool = False) -> "_OpenSpan":
        """Measure the block's duration. name: one of few, never an id. is_wait: the stage waited and did not work."""
        return _OpenSpan(self, (stage, name, run_id, is_wait))

    def begin(self, stage: str, name: str, run_id: str, is_wait: bool) -> int:
        """Open a span and return its key for `end`."""
        now_s = self._clock.now()
        with self._lock:
            key = next(self._keys)
            self._open[key] = Span(stage, name, run_id, is_wait, now_s, now_s)
        return key

    def end(self, key: int) -> None:
        """Close the span that `begin` opened."""
        now_s = self._clock.now()
        with self._lock:
            opened = self._open.pop(key)
            span = Span(opened.stage, opened.name, opened.run_id, opened.is_wait, opened.start_s, now_s)
            self._rings[span.stage].append(span)
            self._add_to_totals(span)

    def busy(self, stage: str, window_s: float, run_id: str | None = None) -> float:
        """Fraction of the last `window_s` seconds in which the stage worked: the union of its work spans, open ones included, / the window.

        run_id: only spans of this run. Where the ring no longer reaches back to the window's start, the window is what it still covers.
        """
        now_s = self._clock.now()
        with self._lock:
            ring = self._rings.get(stage, ())
            finished = list(ring)
            is_cut = isinstance(ring, deque) and len(ring) == ring.maxlen
            running = [(s.start_s, now_s) for s in self._open.values() if _is_work(s, stage, run_id)]
        start_s = now_s - window_s
        if is_cut:
            start_s = max(start_s, finished[0].end_s)
        intervals = running + [(s.start_s, s.end_s) for s in finished if s.end_s > start_s and _is_work(s, stage, run_id)]
        return min(1.0, union_length(intervals, start_s, now_s) / (now_s - start_s)) if now_s > start_s else 0.0

    def snapshot(self) -> list[SpanTotal]:
        """Totals of all spans that have ended, sorted by stage, name and run."""
        with self._lock:
            return [SpanTotal(*key, *total) for key, total in sorted(self._totals.items())]

    def spans(self) -> list[Span]:
        """The spans still in the rings, in order of their start."""
        with self._lock:
            kept = [span for ring in self._rings.values() for span in ring]
        return sorted(kept, key=lambda span: (span.start_s, span.end_s))

    def _add_to_totals(self, span: Span) -> None:
        key = (span.stage, span.name, span.run_id, span.is_wait)
        if key not in self._totals and len(self._totals) >= MAX_TOTALS:
            key = (span.stage, "other", "", span.is_wait)
        num_spans, total_s, longest_s = self._totals.get(key, (0, 0.0, 0.0))
        duration_s = span.end_s - span.start_s
        self._totals[key] = (num_spans + 1, total_s + duration_s, max(longest_s, duration_s))


@final
class _OpenSpan:
    __slots__ = ("_key", "_recorder", "_what")

    def __init__(self, recorder: SpanRecorder, what: tuple[str, str, str, bool]) -> None:
        self._recorder = recorder
        self._what = what
        self._key = -1

    def __enter__(self) -> None:
        self._key = self._recorder.begin(*self._what)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._recorder.end(self._key)


def _is_work(span: Span, stage: str, run_id: str | None) -> bool:
    return span.stage == stage and not span.is_wait and run_id in (None, span.run_id)


def union_length(intervals: Iterable[tuple[float, float]], low: float, high: float) -> float:
    """Length of the part of [low, high] that at least one of the (start, end) intervals covers."""
    covered, reached = 0.0, low
    for start, end in sorted(intervals):
        first, stop = max(start, reached), min(end, high)
        if stop > first:
            covered += stop - first
            reached = stop
    return covered


def write_chrome_trace(path: Path, spans: Iterable[Span]) -> None:
    """A timeline for chrome://tracing or ui.perfetto.dev: one process row per stage, and lanes in it so that spans at one time lie side by side.

    Source: Trace Event Format, complete events ("ph": "X"), microseconds.
    """
    rows: dict[str, int] = {}
    lanes: defaultdict[str, list[float]] = defaultdict(list)
    events: list[dict[str, object]] = []
    for span in sorted(spans, key=lambda s: s.start_s):
        row = rows.setdefault(span.stage, len(rows) + 1)
        lane = _first_free(lanes[span.stage], span)
        arguments = {"run_id": span.run_id, "is_wait": span.is_wait}
        times = {"ts": span.start_s * 1e6, "dur": (span.end_s - span.start_s) * 1e6}
        events.append({"name": span.name, "cat": "wait" if span.is_wait else "work", "ph": "X", "pid": row, "tid": lane, "args": arguments, **times})
    names = [{"name": "process_name", "ph": "M", "pid": row, "args": {"name": stage}} for stage, row in rows.items()]
    path.write_text(json.dumps({"traceEvents": names + events}), encoding="utf-8")


def _first_free(ends: list[float], span: Span) -> int:
    for lane, end in enumerate(ends):
        if end <= span.start_s:
            ends[lane] = span.end_s
            return lane
    ends.append(span.end_s)
    return len(ends) - 1


def log_event(logger: logging.Logger, level: int, event: str, **fields: LogValue) -> None:
    """Log that `event` (a few words, always the same for the same kind) happened, with named values: ids, counts, seconds, error codes."""
    logger.log(level, event, extra={"fields": fields})


def configure_logging(*, as_json: bool = False, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Send the `noria` loggers to `stream` (default: standard error), as JSON lines or as plain text. Calling it again replaces the handler."""
    logger = logging.getLogger("noria")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(_Formatter(as_json=as_json))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False


@final
class _Formatter(logging.Formatter):
    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        fields = {key: _shorten(value) for key, value in getattr(record, "fields", {}).items()}
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            fields["error"] = _shorten(f"{type(error).__name__}: {error}")
        head = {"time_s": round(record.created, 3), "level": record.levelname.lower(), "logger": record.name, "event": _shorten(record.getMessage())}
        if self._as_json:
            return json.dumps(head | fields)
        values = "".join(f" {key}={value}" for key, value in fields.items())
        return f"{self.formatTime(record)} {record.levelname:<7} {record.name}: {head['event']}{values}"


def _shorten(value: LogValue) -> LogValue:
    if isinstance(value, str) and len(value) > MAX_LOG_CHARACTERS:
        return value[:MAX_LOG_CHARACTERS] + "…"
    return value
