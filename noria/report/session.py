"""One training session in this process: a server, its runs, somebody who watches, and an orderly end.

    plan ──▶ open_server ──▶ add every run ──▶ all runs have ended ──▶ SessionReport
                  └──────────── a snapshot every half second ──▶ display

`until_stopped` turns the first SIGINT or SIGTERM into that orderly end, and leaves the second one its usual, immediate effect.
"""

import asyncio
import signal
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar, final

from noria.errors import NoriaError
from noria.report.live import Display, Snapshot
from noria.report.plan import Plan
from noria.report.summary import SessionReport
from noria.service.build import Server, open_server
from noria.service.progress import RunProgress

T = TypeVar("T")

REFRESH_S = 0.5
"""Time between two snapshots."""

WINDOW_S = 10.0
"""Busy fractions and rates are those of the last ten seconds: short enough to follow, long enough not to flicker."""

TIMELINE_S = 20.0
"""Length of the stage timeline in the report, which ends with the learner's last work: what follows is evaluation only."""

STAGES = ("sampler", "learner", "adapters", "actor")


async def train(plan: Plan, display: Display, elapsed: Callable[[], float]) -> SessionReport:
    """Train the plan's runs to their end. elapsed: seconds since the command's start, for the display.

    Raises NoriaError only before all runs are up; what makes a run fail later is in the report's failures, and the other runs go on.
    """
    session = _Session(plan, display, elapsed)
    report: SessionReport | None = None
    watching = asyncio.create_task(session.watch())
    try:
        async with open_server(plan.server) as server:
            report = await session.run(server)
    except NoriaError as error:
        if report is None:
            raise
        report = replace(report, failures={**report.failures, "server": error})  # the runs have ended, the stop failed
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
    return report


async def until_stopped(work: Coroutine[Any, Any, T], announce: Callable[[], None]) -> T | None:
    """The work's result, or None if SIGINT or SIGTERM came first: then `announce` is called, the work is cancelled, and waited for.

    From then on both signals have the system's own effect, so that a second one ends the process at once.
    """
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    numbers = (signal.SIGINT, signal.SIGTERM)
    is_stopped = False

    def stop() -> None:
        nonlocal is_stopped
        if is_stopped:  # both signals at the same moment
            return
        is_stopped = True
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        announce()
        task.cancel()

    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        return await task
    except asyncio.CancelledError:
        if is_stopped:
            return None
        raise
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


@final
class _Session:
    """What the watcher reads while the session goes on. Touched by the event loop only."""

    def __init__(self, plan: Plan, display: Display, elapsed: Callable[[], float]) -> None:
        self._plan, self._display, self._elapsed = plan, display, elapsed
        self._server: Server | None = None
        self._is_over = False
        self._doing = f"loading {plan.server.base} and compiling"
        self._rates = _Rates()

    async def run(self, server: Server) -> SessionReport:
        """Bring all runs up, wait for their ends, and gather what is known of them."""
        self._server = server
        try:
            return await self._run(server)
        finally:
            self._is_over = True  # the store closes next

    async def watch(self) -> None:
        """Show a snapshot every now and then, until the session is over."""
        while not self._is_over:
            self._show()
            await asyncio.sleep(REFRESH_S)

    async def _run(self, server: Server) -> SessionReport:
        ready_s = server.clock.now()
        self._doing = "starting the runs"
        try:
            async with asyncio.TaskGroup() as group:
                for planned in self._plan.runs:
                    group.create_task(
                        server.add_run(planned.config, folder=planned.folder, resume=self._plan.resume, environment=planned.environment)
                    )
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        self._doing = ""
        failures = await server.finished()
        end_s = server.clock.now()
        window_s = end_s - ready_s
        busy = {stage: server.spans.busy(stage, window_s) for stage in STAGES}
        spans = server.spans.spans()
        last_s = max((span.end_s for span in spans if span.stage == "learner" and not span.is_wait), default=end_s)
        recent = tuple(span for span in spans if span.end_s > last_s - TIMELINE_S and span.start_s < last_s)
        reports = [await server.report(planned.config.name) for planned in self._plan.runs]
        self._show()
        return SessionReport(self._plan.server.base, tuple(reports), busy, window_s, recent, last_s, failures)

    def _show(self) -> None:
        server, progress = self._server, self._progress()
        runs = [(planned.config, progress.get(planned.config.name, RunProgress())) for planned in self._plan.runs]
        if server is None or self._doing:
            self._display.show(Snapshot(self._elapsed(), runs, doing=self._doing))
            return
        sampled = server.stages.sampler.counts.num_sampled
        trained = sum(each.tokens_trained for each in progress.values())
        self._rates.add(server.clock.now(), sampled, trained)
        busy = {stage: server.spans.busy(stage, WINDOW_S) for stage in STAGES}
        self._display.show(Snapshot(self._elapsed(), runs, "", *self._rates.per_second(), busy))

    def _progress(self) -> dict[str, RunProgress]:
        return {name: run.progress for name, run in self._server.runs.items()} if self._server else {}


@final
class _Rates:
    """Tokens per second over the last WINDOW_S, from running totals."""

    def __init__(self) -> None:
        self._totals: deque[tuple[float, int, int]] = deque()

    def add(self, now_s: float, sampled: int, trained: int) -> None:
        """The totals at a time."""
        self._totals.append((now_s, sampled, trained))
        while now_s - self._totals[0][0] > WINDOW_S:
            self._totals.popleft()

    def per_second(self) -> tuple[float, float]:
        """(sampled, trained); 0 before there are two times."""
        (start_s, sampled_then, trained_then), (now_s, sampled, trained) = self._totals[0], self._totals[-1]
        window_s = now_s - start_s
        return ((sampled - sampled_then) / window_s, (trained - trained_then) / window_s) if window_s > 0 else (0.0, 0.0)
