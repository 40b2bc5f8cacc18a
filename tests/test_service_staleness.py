"""The staleness bound in the whole circle: every bound makes progress, none is ever exceeded, neither by one step nor after a restart."""

import asyncio
import threading

import pytest
from service_builders import Letters, add, reached, record_training, run_config, serving


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_every_bound_makes_progress_and_no_trained_token_exceeds_it(tmp_path, bound):
    async def main():
        async with serving(tmp_path) as server:
            steps = record_training(server)
            await add(server, run_config(num_tasks=0, algorithm={"steps": 6, "max_staleness": bound}))
            assert await server.finished() == {}
            assert [version for _, version, _ in steps] == list(range(6))
            for _, version, sampled_by in steps:
                assert version - bound <= min(sampled_by) <= max(sampled_by) <= version

    asyncio.run(main())


@pytest.mark.parametrize(("bound", "version"), [(0, 0), (1, 1), (2, 4)])
def test_a_restart_with_groups_under_way_keeps_the_bound_and_the_places(tmp_path, bound, version):
    gate = threading.Event()
    config = run_config(num_tasks=0, algorithm={"steps": version + 8, "max_staleness": bound})
    num_places = config.algorithm.num_places

    class Gated(Letters):
        def reset(self, task):
            assert gate.wait(60)
            return Letters.reset(self, task)

    async def stop():
        async with serving(tmp_path, (config, Gated)) as server:
            if version:
                gate.set()
                await reached(server, "run", version)
                gate.clear()
            while server.runs["run"].progress.num_outstanding < num_places:
                await asyncio.sleep(0.01)
            await server.runs["run"].stop()
            assert 0 < (await server.stages.buffer.counts("run")).places_in_use <= num_places

    async def resume():
        async with serving(tmp_path) as server:
            steps = record_training(server)
            run = await add(server, config, Gated, resume=True)
            at_start = run.progress.version
            assert 0 < (await server.stages.buffer.counts("run")).places_in_use <= num_places
            assert await server.finished() == {}
            assert [v for _, v, _ in steps] == list(range(at_start, version + 8))
            assert all(v - bound <= min(sampled_by) <= max(sampled_by) <= v for _, v, sampled_by in steps)

    asyncio.run(stop())
    gate.set()
    asyncio.run(resume())
