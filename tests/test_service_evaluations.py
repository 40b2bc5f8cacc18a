"""Held-out evaluations: each due version exactly once, whatever stops in between; one at a time; never a reason for a run to fail."""

import asyncio
import shutil
import threading

import pytest
from service_builders import Letters, add, gated, reached, run_config, serving, stored

from noria.service import store


def evaluated(rows):
    return [row.version for row in rows]


@pytest.mark.parametrize("is_lost", [False, True])
def test_an_evaluation_cut_short_is_made_up_for_after_a_restart(tmp_path, is_lost):
    config, slow = run_config(algorithm={"steps": 6}), gated()
    folder = tmp_path / "adapters" / "run" / "0"

    async def first():
        async with serving(tmp_path, (config, slow)) as server:
            await reached(server, "run", 4)
            assert await stored(server, store.evaluations, "run") == []
            assert folder.is_dir(), "what waits for its evaluation is kept, however old"

    async def second():
        async with serving(tmp_path, (config, slow), resume=True) as server:
            assert await server.finished() == {}
            assert server.runs["run"].progress.version == 6
            return await stored(server, store.evaluations, "run")

    try:
        asyncio.run(first())
    finally:
        slow.gate.set()
    if is_lost:
        shutil.rmtree(folder)
    assert evaluated(asyncio.run(second())) == ([6] if is_lost else [0, 6])
    kept = sorted(path.name for path in folder.parent.iterdir())
    assert kept == ["5", "6"], "retention goes on once the evaluation is stored"


def test_two_pending_versions_are_evaluated_after_a_restart(tmp_path):
    config, slow = run_config(algorithm={"steps": 4}, every=2), gated()

    async def first():
        async with serving(tmp_path, (config, slow)) as server:
            await reached(server, "run", 2)

    async def second():
        async with serving(tmp_path, (config, slow), resume=True) as server:
            assert await server.finished() == {}
            return await stored(server, store.evaluations, "run")

    try:
        asyncio.run(first())
    finally:
        slow.gate.set()
    assert evaluated(asyncio.run(second())) == [0, 2, 4]


@pytest.mark.slow
@pytest.mark.parametrize(("num_slots", "version"), [(8, 2), (3, 0)])
def test_evaluations_slower_than_steps_hold_up_their_own_run_and_fail_none(tmp_path, num_slots, version):
    """With 3 slots there is none for a second version of any run: the publish itself waits for the evaluation, beyond its own deadline."""
    publish_s = 2.0
    config = run_config("every", algorithm={"steps": 6}, every=2, deadlines={"publish_s": publish_s})
    innocent, slow = run_config("innocent", tenant="other", num_tasks=0, algorithm={"steps": 5000}), gated()

    async def main():
        async with serving(tmp_path, (innocent, Letters), sampler={"num_slots": num_slots}) as server:
            run = await add(server, config, slow)
            await reached(server, "every", version)
            before = server.runs["innocent"].progress.version
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(run.finished(), publish_s + 0.5)
            assert run.progress.version == version
            slow.gate.set()
            await run.finished()
            await reached(server, "innocent", before + 3)
            assert evaluated(await stored(server, store.evaluations, "every")) == [0, 2, 4, 6]

    try:
        asyncio.run(main())
    finally:
        slow.gate.set()


def test_a_pin_whose_wait_is_cancelled_is_given_back(tmp_path):
    """The run is stopped while its pin is on the way to the device."""
    begun, gate = threading.Event(), threading.Event()

    async def main():
        async with serving(tmp_path) as server:
            sampler = server.stages.sampler
            num_free, pin = sampler.num_free_slots, sampler.pin

            def held(run_id, version):
                begun.set()
                assert gate.wait(60)
                pin(run_id, version)

            sampler.pin = held
            run = await add(server, run_config())
            await asyncio.to_thread(begun.wait, 60)
            await run.stop()
            gate.set()
            assert await server.stages.on_device(lambda: sampler.num_free_slots, 60, "the slots") == num_free

    asyncio.run(main())
