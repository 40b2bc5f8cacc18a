"""Time: deadlines that say what they waited for, and a virtual day that passes in milliseconds."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.clock import RealClock, VirtualClock
from noria.errors import DeadlineExceededError


def test_a_virtual_day_takes_no_real_time():
    clock = VirtualClock()
    started = time.monotonic()
    clock.run(clock.sleep(86_400 * 7))
    assert clock.now() == pytest.approx(86_400 * 7)
    assert time.monotonic() - started < 2


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30))
def test_virtual_sleepers_wake_in_order_and_on_time(delays_s):
    clock = VirtualClock()
    woken: list[tuple[float, float]] = []

    async def sleeper(delay_s: float) -> None:
        await clock.sleep(delay_s)
        woken.append((delay_s, clock.now()))

    async def main() -> None:
        await asyncio.gather(*map(sleeper, delays_s))

    clock.run(main())
    assert [delay for delay, _ in woken] == sorted(delays_s)
    assert all(at == pytest.approx(delay, abs=1e-6) for delay, at in woken)


@pytest.mark.parametrize("clock", [RealClock(), VirtualClock()])
def test_a_deadline_names_what_was_waited_for_and_cancels_it(clock):
    was_cancelled = []

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            was_cancelled.append(True)
            raise

    async def main() -> None:
        await clock.wait_for(endless(), 0.01, "the answer to everything")

    runner = clock.run if isinstance(clock, VirtualClock) else asyncio.run
    with pytest.raises(DeadlineExceededError, match=r"0\.01 s for the answer to everything"):
        runner(main())
    assert was_cancelled == [True]


def test_a_timeout_inside_the_awaited_work_is_not_our_deadline():
    clock = VirtualClock()

    async def fails() -> None:
        raise TimeoutError("theirs")

    with pytest.raises(TimeoutError, match="theirs"):
        clock.run(clock.wait_for(fails(), 10, "x"))


def test_cancelling_the_waiter_is_a_cancellation_and_not_a_deadline():
    clock = VirtualClock()

    async def main() -> str:
        waiter = asyncio.ensure_future(clock.wait_for(asyncio.Event().wait(), 10, "x"))
        await clock.sleep(1)
        waiter.cancel()
        results = await asyncio.gather(waiter, return_exceptions=True)
        return type(results[0]).__name__

    assert clock.run(main()) == "CancelledError"


def test_asyncio_timeouts_follow_virtual_time():
    clock = VirtualClock()

    async def main() -> None:
        async with asyncio.timeout(3600):
            await asyncio.sleep(7200)

    with pytest.raises(TimeoutError):
        clock.run(main())
    assert clock.now() == pytest.approx(3600)


def test_time_goes_on_from_one_run_to_the_next():
    clock = VirtualClock(epoch_s=1000)
    clock.run(clock.sleep(5))
    clock.advance(2)
    clock.run(clock.sleep(5))
    assert (clock.now(), clock.wall()) == (pytest.approx(12), pytest.approx(1012))


def test_work_in_a_thread_holds_virtual_time():
    clock = VirtualClock()
    gate = threading.Event()

    async def main(pool: ThreadPoolExecutor) -> float:
        asyncio.get_running_loop().call_later(1e-6, lambda: threading.Timer(0.05, gate.set).start())
        await clock.sleep(1e-3)
        await clock.wait_for(asyncio.get_running_loop().run_in_executor(pool, gate.wait), 0.001, "the thread")
        return clock.now()

    with ThreadPoolExecutor(1) as pool:
        assert clock.run(main(pool)) == pytest.approx(1e-3, abs=1e-6)


def test_a_thread_that_hangs_meets_its_virtual_deadline():
    clock = VirtualClock(patience_s=0.02)
    gate = threading.Event()

    async def main(pool: ThreadPoolExecutor) -> None:
        await clock.wait_for(asyncio.get_running_loop().run_in_executor(pool, gate.wait), 3600, "the thread")

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(DeadlineExceededError):
            clock.run(main(pool))
        gate.set()
    assert clock.now() == pytest.approx(3600)


def test_a_deadlock_in_virtual_time_is_an_error_and_not_a_hang():
    with pytest.raises(RuntimeError, match="stuck"):
        VirtualClock(patience_s=0.01).run(asyncio.Event().wait())
