"""Whether the event loop keeps up: code that blocks it delays every tenant, and shows in no stage's time."""

import logging
from typing import final

from noria.observe import log_event
from noria.protocols import Clock

log = logging.getLogger(__name__)


@final
class LoopWatchdog:
    """Sleeps, and measures how late it is woken. Run it as a task of the event loop to watch.

    longest_s: the longest lag so far, seconds. num_late: how often it was beyond the limit; each time is a log event.
    """

    def __init__(self, clock: Clock, *, period_s: float = 0.25, limit_s: float = 1.0) -> None:
        """period_s: between two looks, > 0. limit_s: longer lags are logged."""
        self._clock = clock
        self._period_s = period_s
        self._limit_s = limit_s
        self.longest_s = 0.0
        self.num_late = 0

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            due_s = self._clock.now() + self._period_s
            await self._clock.sleep(self._period_s)
            lag_s = self._clock.now() - due_s
            self.longest_s = max(self.longest_s, lag_s)
            if lag_s > self._limit_s:
                self.num_late += 1
                log_event(log, logging.WARNING, "event loop was blocked", lag_s=round(lag_s, 3))
