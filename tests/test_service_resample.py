"""zero_signal = "resample": a group without signal gives its place to another task at once, and batches are full of groups that train."""

import asyncio
import random

import pytest
from service_builders import Constant, Letters, add, record_training, run_config, serving, stored
from sqlalchemy import select

from noria.buffer.tables import GROUPS
from noria.service import store


class Sometimes(Letters):
    """Every third task has signal: the other groups' rewards are all equal."""

    def reset(self, task):
        self._is_dull = task.index % 3 > 0
        return Letters.reset(self, task)

    def reward(self, action, answer):
        return 0.5 if self._is_dull else hash_of(action)


def hash_of(action):
    """As good as always different between the episodes of a group."""
    return random.Random(action).random()


def slow(seed):
    """The same tasks and rewards, played in a different time and order."""
    rng = random.Random(seed)

    class Slow(Sometimes):
        async def reset(self, task):
            await asyncio.sleep(rng.uniform(0.0, 0.05))
            return Sometimes.reset(self, task)

    return Slow


def resampling(name="run", **algorithm):
    return run_config(name, num_tasks=0, algorithm={"zero_signal": "resample", "steps": 4, **algorithm})


async def groups_of(server, run_id="run"):
    query = select(GROUPS).where(GROUPS.c.run_id == run_id).order_by(GROUPS.c.admission)
    return await server.stages.buffer.transaction(lambda connection: list(connection.execute(query)))


@pytest.mark.parametrize("staleness", [0, 2])
def test_every_batch_is_full_of_groups_with_signal(tmp_path, staleness):
    async def main():
        async with serving(tmp_path) as server:
            steps = record_training(server)
            config = resampling(max_staleness=staleness)
            run = await add(server, config, Sometimes)
            assert await server.finished() == {}
            groups, rows = await groups_of(server), await stored(server, store.versions, "run")
            for version in range(1, 5):
                trained = [g for g in groups if g.trained_version == version]
                assert len(trained) == config.algorithm.groups_per_batch
                assert all(g.task_index % 3 == 0 for g in trained)
            dull = [g for g in groups if g.reason == "no_signal"]
            assert dull
            assert all(g.task_index % 3 > 0 and g.payload is not None and g.num_sampled for g in dull), "recorded, with their statistics"
            assert {row.metrics["num_groups_without_signal"] for row in rows[1:]} == {0}
            assert all(v - staleness <= min(sampled_by) <= v for _, v, sampled_by in steps)
            assert (await server.stages.buffer.counts("run")).places_in_use == 0
            assert run.progress.max_staleness_seen <= staleness

    asyncio.run(main())


def test_on_policy_a_batch_is_the_first_groups_with_signal_however_long_each_took(tmp_path):
    async def trained(number):
        async with serving(tmp_path / str(number), (resampling(max_staleness=0), slow(number))) as server:
            assert await server.finished() == {}
            return [(g.task_index, g.task_seed, g.trained_version, g.reason) for g in await groups_of(server) if g.reason != "stopped"]

    outcomes = [asyncio.run(trained(number)) for number in range(3)]
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_a_run_whose_groups_never_have_signal_ends_early_and_says_so(tmp_path):
    async def main():
        async with serving(tmp_path, (resampling(max_batches_without_signal=3), Constant)) as server:
            assert await server.finished() == {}
            progress = server.runs["run"].progress
            assert progress.version == 0
            assert progress.status == store.FINISHED
            assert "stopped early: 6 groups in a row had nothing to train" in progress.message
            counts = await server.stages.buffer.counts("run")
            assert counts.by_reason["no_signal"] >= 6
            assert counts.places_in_use == 0

    asyncio.run(main())


def test_groups_without_signal_are_counted_across_a_restart(tmp_path):
    config = resampling(max_batches_without_signal=40)

    async def some():
        async with serving(tmp_path, (config, Constant)) as server:
            while (await server.stages.buffer.counts("run")).by_reason.get("no_signal", 0) < 30:
                await asyncio.sleep(0.01)

    async def rest():
        async with serving(tmp_path, (config, Constant), resume=True) as server:
            before = (await server.stages.buffer.counts("run")).by_reason["no_signal"]
            assert await server.finished() == {}
            after = (await server.stages.buffer.counts("run")).by_reason["no_signal"]
            assert before >= 30
            assert 80 <= after < 80 + 2 * config.algorithm.num_places

    asyncio.run(some())
    asyncio.run(rest())
