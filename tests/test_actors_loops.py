"""Async environments: one thread per run, one loop per episode, and a loop that is blocked or ended is its own run's trouble only."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from actor_builders import Echo, ScriptedSampler, rules_for, seams_for

from noria.actors.episode import run_episode
from noria.actors.loops import EnvironmentLoops
from noria.actors.threads import HungThreads, Pending
from noria.clock import VirtualClock
from noria.errors import DeadlineExceededError, EnvironmentFailedError, StageStoppedError
from noria.types import Task

ROOT = Path(__file__).parents[1]


class Stage:
    """Loops under a virtual clock; `call` runs one awaitable on a lent loop with a deadline of a minute."""

    def __init__(self, *, patience_s=5.0, **limits):
        self.clock = VirtualClock(patience_s=patience_s)
        self.hung = HungThreads(**limits)
        self.loops = EnvironmentLoops(self.hung)

    async def call(self, coroutine, *, run_id="run", loop=None):
        if loop is None:
            with self.loops.lend(run_id) as loop:
                return await self.call(coroutine, run_id=run_id, loop=loop)
        return await self.clock.wait_for(loop.call("it", lambda answer: answer, Pending(coroutine)), 60, "it")

    def run(self, main):
        """`main()`, then an orderly end; whatever threads of loops are left must end too."""
        before = set(threading.enumerate())
        try:
            self.clock.run(main())
        finally:
            self.loops.shutdown()
        for thread in set(threading.enumerate()) - before:
            thread.join(5)
            assert not thread.is_alive()
        assert self.hung.num_hung == 0


async def here():
    return asyncio.get_running_loop(), threading.get_ident()


def test_the_episodes_of_a_run_share_one_thread_and_runs_do_not():
    stage = Stage()

    async def main():
        same = await asyncio.gather(*(stage.call(here()) for _ in range(300)))
        other = await stage.call(here(), run_id="other")
        assert len({thread for _, thread in same}) == 1
        assert len({threading.get_ident(), same[0][1], other[1]}) == 3

    stage.run(main)


def test_hundreds_of_async_episodes_are_under_way_at_once_on_one_loop():
    clock = VirtualClock()
    seams = seams_for(ScriptedSampler(clock, ["a\n"]), clock, max_threads=8)
    num_episodes, waiting, loops = 300, [], set()

    class Together(Echo):
        async def reset(self, task):
            self.lock = asyncio.Lock()
            loops.add(asyncio.get_running_loop())
            return super().reset(task)

        async def step(self, action):
            async with self.lock:
                loops.add(asyncio.get_running_loop())
                waiting.append(asyncio.Event())
                if len(waiting) == num_episodes:
                    for event in waiting:
                        event.set()
                await waiting[-1].wait()
            return super().step(action)

    async def main():
        return await asyncio.gather(*(run_episode(seams, rules_for(Together), Task(i, 0), episode_id=f"{i}", member=i) for i in range(num_episodes)))

    episodes = clock.run(main())
    seams.threads.shutdown()
    seams.loops.shutdown()
    assert [e.reward for e in episodes] == [1.0] * num_episodes
    assert len(loops) == 1


def test_code_that_blocks_its_loop_meets_its_deadline_and_delays_no_other_run_and_no_later_episode():
    stage, gate = Stage(patience_s=0.3), threading.Event()

    async def block():
        gate.wait()

    async def main():
        with stage.loops.lend("bad") as blocked:
            bystander = asyncio.ensure_future(stage.call(asyncio.sleep(0.01), loop=blocked))
            blocking = asyncio.ensure_future(stage.call(block(), loop=blocked))
            assert await stage.call(asyncio.sleep(0, "fine"), run_id="good") == "fine"
            outcomes = await asyncio.gather(bystander, blocking, return_exceptions=True)
            assert isinstance(outcomes[1], DeadlineExceededError)
            assert stage.hung.num_hung == 1, "one thread, whatever the number of calls"
            loop, _ = await stage.call(here(), run_id="bad")
            again, _ = await stage.call(here(), run_id="bad")
            assert loop is again
            with pytest.raises(DeadlineExceededError):
                await stage.call(here(), loop=blocked)
        gate.set()

    stage.run(main)


def test_a_run_that_goes_on_blocking_loops_is_refused_and_others_are_not():
    stage, gate = Stage(patience_s=0.1, max_per_run=2), threading.Event()

    async def block():
        gate.wait()

    async def main():
        for _ in range(2):
            with pytest.raises(DeadlineExceededError):
                await stage.call(block(), run_id="bad")
        with pytest.raises(EnvironmentFailedError, match="run bad hang in 2 threads"):
            await stage.call(here(), run_id="bad")
        await stage.call(here(), run_id="good")
        gate.set()

    stage.run(main)


def test_a_call_given_up_is_cancelled_and_its_loop_stays_the_runs():
    stage, cleaned = Stage(patience_s=0.2), threading.Event()

    async def wait_for_ever():
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    async def main():
        with stage.loops.lend("run") as loop:
            before, _ = await stage.call(here(), loop=loop)
            with pytest.raises(DeadlineExceededError):
                await stage.call(wait_for_ever(), loop=loop)
            assert cleaned.wait(5)
            while not loop.is_fit:  # it is letting go of the coroutine
                await asyncio.sleep(0)
        after, _ = await stage.call(here())
        assert after is before
        assert stage.hung.num_hung == 0

    stage.run(main)


def test_an_episode_keeps_its_loop_while_later_ones_get_another():
    stage, release = Stage(patience_s=0.2), []

    async def stubborn():
        release.append((asyncio.get_running_loop(), asyncio.Event()))
        while not release[0][1].is_set():
            try:
                await release[0][1].wait()
            except asyncio.CancelledError:
                continue

    async def main():
        with stage.loops.lend("run") as early:
            first, _ = await stage.call(here(), loop=early)
            with pytest.raises(DeadlineExceededError):
                await stage.call(stubborn())
            assert stage.hung.num_hung == 1
            later, _ = await stage.call(here())
            assert later is not first
            assert (await stage.call(here(), loop=early))[0] is first
            stage.loops.forget("run")
            assert (await stage.call(here(), loop=early))[0] is first, "an episode under way outlives its run's forgetting"
        release[0][0].call_soon_threadsafe(release[0][1].set)

    stage.run(main)


@pytest.mark.parametrize("how", ["exit", "cancel_all"])
def test_code_that_ends_its_loop_fails_the_episodes_on_it_and_the_next_gets_another(how):
    stage = Stage()

    async def leave():
        raise SystemExit(3)

    async def end():
        if how == "exit":
            keep = asyncio.ensure_future(leave())
            await asyncio.Event().wait()
            del keep
        for task in asyncio.all_tasks():
            task.cancel()
        await asyncio.Event().wait()

    async def main():
        with stage.loops.lend("run") as loop:
            with pytest.raises(EnvironmentFailedError, match=r"CancelledError|ended the event loop"):
                await stage.call(end(), loop=loop)
            while loop.is_fit:  # its thread is about to end
                await asyncio.sleep(0)
            with pytest.raises(EnvironmentFailedError, match="ended the event loop of run run"):
                await stage.call(here(), loop=loop)
        assert await stage.call(asyncio.sleep(0, "fine")) == "fine"

    stage.run(main)


def test_threads_of_async_code_that_hang_are_given_up_and_counted():
    stage, gate = Stage(patience_s=0.3), threading.Event()

    async def main():
        with stage.loops.lend("run") as loop:
            with pytest.raises(DeadlineExceededError):
                await stage.call(asyncio.to_thread(gate.wait), loop=loop)
            assert await stage.call(asyncio.to_thread(lambda: 5), loop=loop) == 5
            while not loop.is_fit:  # it is letting go of the coroutine
                await asyncio.sleep(0)
            assert stage.hung.num_hung == 1, "the thread"
        gate.set()

    stage.run(main)


def test_no_loop_is_lent_after_the_end():
    stage = Stage()

    async def main():
        await stage.call(here())
        stage.loops.shutdown()
        with pytest.raises(StageStoppedError), stage.loops.lend("run"):
            pass

    stage.run(main)


@pytest.mark.parametrize(
    "hang",
    [
        "AbandonableThreads(1, HungThreads()).call('r', 'x', threading.Event().wait)",
        "blocked(threading.Event().wait)",
        "blocked(spin)",
        "loop.call('x', str, Pending(asyncio.to_thread(threading.Event().wait)))",
        "loop.call('x', str, Pending(asyncio.Event().wait()))",
    ],
)
def test_the_process_can_exit_while_a_call_hangs(tmp_path, hang):
    script = tmp_path / "hang.py"
    script.write_text(f"""
import asyncio, threading
from noria.actors.loops import EnvironmentLoops
from noria.actors.threads import AbandonableThreads, HungThreads, Pending
from noria.clock import RealClock
from noria.errors import DeadlineExceededError

def spin():
    while True:
        pass

async def main():
    with EnvironmentLoops(HungThreads()).lend("run") as loop:
        async def do(function):
            function()
        def blocked(function):
            return loop.call("x", str, Pending(do(function)))
        try:
            await RealClock().wait_for({hang}, 0.05, "x")
        except DeadlineExceededError:
            print("bye")

asyncio.run(main())
""")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=30, check=False, env={"PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stdout, done.stderr) == (0, "bye\n", "")
