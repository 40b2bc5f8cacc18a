"""Held-out evaluations: each due version exactly once, whatever stops in between; one at a time; never a reason for a run to fail."""

import asyncio
import random
import shutil
import threading
from itertools import count

import pytest
from actor_builders import Echo, rules_for
from service_builders import Constant, Letters, add, gated, reached, run_config, serving, stored
from sqlalchemy import select

from noria.buffer.tables import GROUPS
from noria.config import SupervisedConfig
from noria.service import store
from noria.service.evaluations import Evaluations


def evaluated(rows):
    return [row.version for row in rows]


def evaluations_of(config):
    return Evaluations(config, rules_for(Echo), None, None)


def test_due_are_the_first_version_the_last_supervised_one_the_multiples_and_the_last():
    config = run_config(algorithm={"steps": 10}, every=4)
    assert evaluations_of(config).pending(100) == [0, 4, 8, 10]
    assert evaluations_of(config).pending(7) == [0, 4]
    supervised = config.model_copy(update={"supervised": SupervisedConfig(file="examples.jsonl", steps=3)})
    assert evaluations_of(supervised).pending(100) == [0, 3, 4, 8, 12, 13]
    assert evaluations_of(run_config(num_tasks=0, every=1)).pending(100) == []


def test_versions_with_a_result_are_not_pending_and_compete_for_best():
    config = run_config(algorithm={"steps": 4}, every=2)
    evaluations = evaluations_of(config)
    assert evaluations.best is None
    evaluations.restore([store.EvaluationRow(0, 0.5, 0.5, 4, 0), store.EvaluationRow(2, 0.5, 0.6, 4, 0)])
    assert (evaluations.pending(4), evaluations.best, evaluations.accuracy) == ([4], 2, {0: 0.5, 2: 0.5})
    careless = evaluations_of(run_config(evaluation={"keep_best": False}))
    careless.restore([store.EvaluationRow(0, 0.5, 0.5, 4, 0)])
    assert careless.best is None


def best_second(num_tasks):
    """Letters whose held-out tasks are all solved in the second evaluation, and in no other."""
    numbers = count()

    class BestSecond(Letters):
        def reset(self, task):
            self.is_solved = task.index >= self.num_tasks and next(numbers) // num_tasks == 1
            return Letters.reset(self, task)

        def reward(self, action, answer):
            return float(self.is_solved) or 0.9 * Letters.reward(self, action, answer)

    return BestSecond


@pytest.mark.parametrize("keeps", [True, False])
def test_the_best_version_stays_on_disk_however_old_and_after_a_restart(tmp_path, keeps):
    config, environment = run_config(algorithm={"steps": 8}, every=2, evaluation={"keep_best": keeps}), best_second(4)

    async def serve(resume):
        async with serving(tmp_path, (config, environment), resume=resume) as server:
            assert await server.finished() == {}
            return await stored(server, store.evaluations, "run")

    for resume in (False, True):
        rows = asyncio.run(serve(resume))
        assert [row.accuracy for row in rows] == [0, 1, 0, 0, 0]
        kept = sorted(path.name for path in (tmp_path / "adapters" / "run").iterdir())
        assert kept == (["2", "7", "8"] if keeps else ["7", "8"])


def test_an_evaluation_never_trains(tmp_path):
    """Neither its tasks nor its episodes enter the buffer, and what is stored of it is its numbers."""
    config = run_config(algorithm={"steps": 4}, every=1, num_tasks=5, evaluation={"samples": 4, "temperature": 1.0})

    async def main():
        async with serving(tmp_path, (config, Letters)) as server:
            assert await server.finished() == {}
            rows = await stored(server, store.evaluations, "run")
            groups = await stored(server, lambda connection: connection.execute(select(GROUPS)).all())
            played = server.stages.pool.counts().num_finished
        return rows, groups, played

    rows, groups, played = asyncio.run(main())
    assert evaluated(rows) == [0, 1, 2, 3, 4]
    assert all(list(row.pass_at) == [1, 2, 4] and row.num_tasks == 5 for row in rows)
    assert all(row.pass_at[1] == pytest.approx(row.accuracy) and row.pass_at[1] <= row.pass_at[2] <= row.pass_at[4] for row in rows)
    assert all(group.task_index < Letters.num_tasks for group in groups)
    num_episodes = sum(group.num_episodes for group in groups if group.num_episodes)
    assert played == num_episodes + 5 * 5 * 4


@pytest.mark.parametrize("is_lost", [False, True])
def test_an_evaluation_cut_short_is_made_up_for_after_a_restart(tmp_path, is_lost):
    config, slow = run_config(algorithm={"steps": 6}, evaluation={"keep_best": False}), gated()
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


def fading():
    """Signal in the first two groups of four, and in none after them. Held-out tasks after the first four wait until `gate` is set."""
    trained, held_out = count(), count()

    class Fading(Letters):
        gate = threading.Event()

        def reset(self, task):
            is_training = task.index < self.num_tasks
            self.has_signal = is_training and next(trained) < 8
            if not is_training and next(held_out) >= 4:
                assert Fading.gate.wait(60)
            return Letters.reset(self, task)

        def reward(self, action, answer):
            return random.Random(action).random() if self.has_signal else 0.5

    return Fading


@pytest.mark.parametrize("is_cut_short", [False, True])
@pytest.mark.parametrize("zero_signal", ["skip", "resample"])
def test_what_a_run_that_ends_early_ends_with_is_evaluated_after_a_restart_too(tmp_path, zero_signal, is_cut_short):
    algorithm = {"steps": 9, "max_staleness": 0, "max_batches_without_signal": 2, "zero_signal": zero_signal}
    config, environment = run_config(algorithm=algorithm), fading()

    async def first():
        async with serving(tmp_path, (config, environment)) as server:
            run = server.runs["run"]
            while run._evaluations._pinned != 1:
                assert not run._done.done(), "the run ended without an evaluation"
                await asyncio.sleep(0.01)
            assert evaluated(await stored(server, store.evaluations, "run")) == [0]

    async def to_its_end(*, resume):
        async with serving(tmp_path, (config, environment), resume=resume) as server:
            before = await server.stages.buffer.counts("run")
            assert await server.finished() == {}
            after, progress = await server.stages.buffer.counts("run"), server.runs["run"].progress
            assert (progress.version, progress.status) == (1, store.FINISHED)
            assert "stopped early" in progress.message
            assert evaluated(await stored(server, store.evaluations, "run")) == [0, 1]
            assert not resume or before.by_reason["no_signal"] == after.by_reason["no_signal"], "nothing more was played"

    try:
        if is_cut_short:
            asyncio.run(first())
    finally:
        environment.gate.set()
    for resume in [True] if is_cut_short else [False, True]:
        asyncio.run(to_its_end(resume=resume))


def test_an_evaluation_is_played_and_counted_as_the_run_file_says(tmp_path):
    """Its own temperature and samples, and the reward from which a sample solves its task."""
    how = {"samples": 2, "temperature": 0.7}
    lenient = run_config("lenient", algorithm={"steps": 0}, evaluation=how | {"solved_at": 0.5})
    strict = run_config("strict", algorithm={"steps": 0}, evaluation=how)

    async def main():
        async with serving(tmp_path) as server:
            asked, sample = [], server.stages.sampler.sample

            async def recording(request):
                asked.append(request)
                return await sample(request)

            server.stages.sampler.sample = recording
            for config in (lenient, strict):
                await add(server, config, Constant)
            assert await server.finished() == {}
            rows = {config.name: (await stored(server, store.evaluations, config.name))[0] for config in (lenient, strict)}
            return rows, [request for request in asked if request.tenant == "local"]

    rows, asked = asyncio.run(main())
    assert {(request.params.temperature, request.version) for request in asked} == {(0.7, 0)}
    assert len(asked) == 2 * 4 * 2
    assert (rows["lenient"].accuracy, dict(rows["lenient"].pass_at)) == (1.0, {1: 1.0, 2: 1.0})
    assert (rows["strict"].accuracy, dict(rows["strict"].pass_at)) == (0.0, {1: 0.0, 2: 0.0})


@pytest.mark.slow
@pytest.mark.parametrize(("num_slots", "version"), [(8, 2), (3, 0)])
def test_evaluations_slower_than_steps_hold_up_their_own_run_and_fail_none(tmp_path, num_slots, version):
    """With 3 slots there is none for a second version of any run: the publish itself waits for the evaluation, beyond its own deadline."""
    publish_s = 4.0
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
