"""Threads that can be given up: replaced, bounded per run, gone when their call returns, and no reason for a process to stay."""

import asyncio
import threading

import pytest

from noria.actors.threads import AbandonableThreads, HungThreads
from noria.clock import VirtualClock
from noria.errors import DeadlineExceededError, EnvironmentFailedError, StageStoppedError


def test_hung_threads_are_given_up_replaced_bounded_and_end_when_they_return():
    clock = VirtualClock(patience_s=0.3)
    hung = HungThreads(max_per_run=2)
    threads = AbandonableThreads(1, hung)
    gate = threading.Event()

    async def hang() -> None:
        with pytest.raises(DeadlineExceededError):
            await clock.wait_for(threads.call("bad", "x", gate.wait), 1, "the hung call")

    async def main() -> None:
        await hang()
        assert await threads.call("bad", "x", lambda: 5) == 5, "the only thread was replaced"
        await hang()
        assert hung.num_hung == 2
        with pytest.raises(EnvironmentFailedError, match="run bad hang in 2 threads"):
            await threads.call("bad", "x", lambda: 5)
        assert await threads.call("good", "x", lambda: 5) == 5, "another run is not refused"

    before = set(threading.enumerate())
    clock.run(main())
    gate.set()
    threads.shutdown()
    started = set(threading.enumerate()) - before
    for thread in started:
        thread.join(5)
    assert hung.num_hung == 0
    assert not any(thread.is_alive() for thread in started)


def test_the_bound_over_all_runs_refuses_only_runs_that_have_lost_threads():
    hung = HungThreads(max_per_run=3, max_in_all=4)
    for run_id in ("a", "a", "b", "b"):
        hung.check(run_id)
        hung.lose(run_id)
    for run_id in ("a", "b"):
        with pytest.raises(EnvironmentFailedError, match=f"run {run_id} hang in 2"):
            hung.check(run_id)
    hung.check("c")
    hung.lose("c")
    assert hung.num_hung == 5
    for run_id in ("b", "b"):
        hung.regain(run_id)
    hung.check("a")
    hung.check("b")
    hung.lose("a")
    with pytest.raises(EnvironmentFailedError):
        hung.check("a")


def test_threads_queue_beyond_their_number_and_a_cancelled_waiting_call_never_runs():
    clock = VirtualClock()
    hung = HungThreads()
    threads = AbandonableThreads(2, hung)
    gate, ran = threading.Event(), []

    async def main() -> list[int]:
        calls = [asyncio.ensure_future(threads.call("r", "x", lambda i=i: (gate.wait(), ran.append(i)))) for i in range(6)]
        await asyncio.sleep(0)
        calls[5].cancel()
        await asyncio.gather(calls[5], return_exceptions=True)
        gate.set()
        await asyncio.gather(*calls, return_exceptions=True)
        threads.shutdown()
        with pytest.raises(StageStoppedError):
            await threads.call("r", "x", lambda: 1)
        return sorted(ran)

    assert clock.run(main()) == [0, 1, 2, 3, 4]
    assert hung.num_hung == 0


@pytest.mark.parametrize("error", [ValueError("v"), SystemExit(1), KeyboardInterrupt()])
def test_run_raises_what_was_raised_and_call_names_it(error):
    threads = AbandonableThreads(1, HungThreads())

    def fail():
        raise error

    async def main() -> None:
        with pytest.raises(type(error)):
            await threads.run("r", fail)
        with pytest.raises(EnvironmentFailedError, match=f"the thing raised {type(error).__name__}") as caught:
            await threads.call("r", "the thing", fail)
        assert caught.value.__cause__ is error
        threads.shutdown()

    VirtualClock().run(main())
