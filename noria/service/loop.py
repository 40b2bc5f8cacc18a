"""The circle: wires the stages as tasks. They meet only in data; there is no tick and no lockstep.

                observations                    EpisodeGroup                     TokenTree → Microbatch
     Environment ───────────▶  actors ──────────────────────▶  buffer  ──────────────────────────────▶  learner
          ▲                    ▲   │                                                                       │
          │ actions            │   │ SampleRequest                                             AdapterVersion
          └────────────────────┘   ▼                                                                       ▼
                               sampler  ◀──────────────────────────────────────────────────────────  adapters

    who         waits for                        never waits for
    actor       its environment, its completion  the learner, other episodes
    sampler     any request                      environments, a publish
    learner     any run with a full batch        actors of other runs, other runs' batches
    adapters    a committed optimizer step       anything else

Here: each run is an `ActiveRun` (service/runs.py) with its own tasks; sampler and learner share one device thread (service/device.py).
"""

import asyncio
import logging
from typing import final

from noria.actors.watchdog import LoopWatchdog
from noria.errors import StageStoppedError, StateConflictError
from noria.observe import log_event
from noria.service.runs import ActiveRun
from noria.service.stages import Stages

log = logging.getLogger(__name__)


@final
class Circle:
    """Owner of the active runs and of the device thread's life. Touched by the event loop only."""

    def __init__(self, stages: Stages) -> None:
        self.stages = stages
        self.runs: dict[str, ActiveRun] = {}
        self._loop = asyncio.get_running_loop()
        self._watchdog: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the device thread, and the watchdog of this event loop."""
        self._watchdog = self._loop.create_task(LoopWatchdog(self.stages.clock).run())

        def on_failure(name: str, error: BaseException) -> None:
            self._loop.call_soon_threadsafe(self._stage_failed, name, error)

        self.stages.device.start(on_failure)

    async def add(self, run: ActiveRun) -> None:
        """Bring a run up and let it go round; one that is refused leaves nothing behind.

        Raises StateConflictError if it is active already, and what `ActiveRun.start` raises.
        """
        if run.run_id in self.runs:
            raise StateConflictError(f"run {run.run_id} is active already")
        self.runs[run.run_id] = run
        try:
            await run.start()
        except BaseException:
            del self.runs[run.run_id]
            raise

    async def finished(self) -> dict[str, BaseException]:
        """Wait until every run has ended; the runs that failed, each with its cause."""
        results = await asyncio.gather(*(run.finished() for run in self.runs.values()), return_exceptions=True)
        return {name: result for name, result in zip(self.runs, results, strict=True) if isinstance(result, BaseException)}

    async def close(self, drain_s: float) -> None:
        """Stop the runs, then the actors, then the device. What is committed stays. Idempotent.

        drain_s: for each of the three. Every part is stopped, whatever becomes of the ones before it, and then their failures are raised.
        """
        if self._watchdog is not None:
            self._watchdog.cancel()
        try:
            await self._stop_runs(drain_s)
        finally:
            try:
                await self.stages.pool.close(drain_s=drain_s)
            finally:
                try:
                    await self._stop_device(drain_s)
                finally:
                    await asyncio.to_thread(self.stages.buffer.close)

    async def _stop_runs(self, drain_s: float) -> None:
        stopping = asyncio.gather(*(run.stop() for run in self.runs.values()))
        await self.stages.clock.wait_for(stopping, drain_s, f"{len(self.runs)} runs to stop")

    async def _stop_device(self, drain_s: float) -> None:
        try:
            if not await asyncio.to_thread(self.stages.device.stop, drain_s):
                log_event(log, logging.ERROR, "device thread did not stop in time", timeout_s=drain_s)
        finally:
            stopped = StageStoppedError("the server is shutting down")
            self.stages.sampler.fail(stopped)
            self.stages.learner.fail(stopped)

    def _stage_failed(self, name: str, error: BaseException) -> None:
        """No run can go on without it: each ends with the cause, and not when it next asks the stage for something."""
        log_event(log, logging.CRITICAL, "stage failed", stage=name, error=repr(error))
        for run in self.runs.values():
            stopped = StageStoppedError(f"run {run.run_id}: the {name} has stopped: {error!r}")
            stopped.__cause__ = error
            run.fail(stopped)
