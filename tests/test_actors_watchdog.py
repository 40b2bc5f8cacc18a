"""The watchdog of the event loop sees what blocks it, and nothing when nothing does."""

import asyncio
import logging

import pytest

from noria.actors.watchdog import LoopWatchdog
from noria.clock import VirtualClock


@pytest.mark.parametrize(("block_s", "num_late"), [(0.0, 0), (0.9, 0), (5.0, 1)])
def test_a_blocked_event_loop_is_seen_and_logged_beyond_the_limit(caplog, block_s, num_late):
    clock = VirtualClock()
    watchdog = LoopWatchdog(clock, limit_s=1.0)

    async def main() -> None:
        watching = asyncio.ensure_future(watchdog.run())
        await clock.sleep(10.1)
        clock.advance(block_s)  # as when a callback takes so long
        await clock.sleep(10)
        watching.cancel()

    with caplog.at_level(logging.WARNING, "noria"):
        clock.run(main())
    assert watchdog.num_late == len(caplog.records) == num_late
    assert watchdog.longest_s == pytest.approx(max(0.0, block_s - 0.15), abs=1e-6)
