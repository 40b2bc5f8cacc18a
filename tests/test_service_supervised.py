"""A supervised phase in the circle: it comes first, is committed and published like any step, needs no cursor, and leaves its neighbours alone."""

import asyncio
import json
import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from service_builders import Letters, add, reached, record_training, run_config, serving, stored
from tool_builders import SERVER_FILE

from noria.buffer.database import open_database
from noria.config import RunConfig, SupervisedConfig, load_toml
from noria.errors import DatasetError, StateConflictError
from noria.learner.operations import RunSpec
from noria.model.lora import checksum
from noria.service import store
from noria.service.recorded_step import retake
from noria.service.supervised import SUPERVISED_LOSS, prepare_examples, supervised_metrics

EXAMPLE = Path(__file__).parents[1] / "examples" / "supervised" / "largest.toml"


@pytest.fixture
def folder(tmp_path):
    """Where the run file is said to lie; its examples teach the letter a."""
    lines = [{"prompt": "abcdefgh"[n % 8] * 6, "completion": "a" * (1 + n % 3)} for n in range(10)]
    (tmp_path / "examples.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path


def supervised(name="run", *, steps=3, warmup_steps=0, **changes):
    phase = SupervisedConfig(file="examples.jsonl", steps=steps, examples_per_batch=4, learning_rate=5e-3, warmup_steps=warmup_steps)
    return run_config(name, supervised=phase, **changes)


async def versions(server, name="run"):
    return await stored(server, store.versions, name)


def test_versions_of_the_phase_come_first_and_no_group_is_admitted_before_it_ends(tmp_path, folder):
    config = supervised(steps=3, algorithm={"steps": 2}, num_tasks=4)

    async def main():
        async with serving(tmp_path / "state") as server:
            losses, train = [], server.stages.learner.train

            def recording(run_id, pieces, *, loss=None, optimizer=None):
                losses.append((server.runs["run"].progress.version, loss and loss.kind, server.runs["run"].progress.num_outstanding))
                return train(run_id, pieces, loss=loss, optimizer=optimizer)

            server.stages.learner.train = recording
            await add(server, config, folder=folder)
            assert await server.finished() == {}
            progress, rows = server.runs["run"].progress, await versions(server)
            assert losses[:3] == [(0, "cross_entropy", 0), (1, "cross_entropy", 0), (2, "cross_entropy", 0)]
            assert [(version, kind) for version, kind, _ in losses[3:]] == [(3, None), (4, None)]
            assert progress.version == 5 == config.num_steps
            assert (len(progress.supervised_losses), len(progress.rewards)) == (3, 2)
            assert progress.supervised_losses[2] < progress.supervised_losses[0]
            assert set(progress.evaluations) == {0, 3, 5}
            assert [row.metrics.get("num_examples") for row in rows[1:]] == [4, 4, 4, None, None]
            assert [row.metrics.get("epoch") for row in rows[1:4]] == [0, 0, 0]
            assert [row.metrics["learning_rate"] for row in rows[1:]] == pytest.approx([5e-3] * 3 + [1e-2] * 2)
            counts = await server.stages.buffer.counts("run")
            assert counts.places_in_use == 0

    asyncio.run(main())


def test_each_phase_warms_up_on_its_own(tmp_path, folder):
    config = supervised(steps=4, warmup_steps=2, algorithm={"steps": 2, "zero_signal": "train"}, num_tasks=0, adapter={"warmup_steps": 4})

    async def main():
        async with serving(tmp_path / "state") as server:
            await add(server, config, folder=folder)
            assert await server.finished() == {}
            return [row.metrics["learning_rate"] for row in (await versions(server))[1:]]

    assert asyncio.run(main()) == pytest.approx([2.5e-3, 5e-3, 5e-3, 5e-3, 0.25e-2, 0.5e-2])


def test_a_run_may_be_supervised_only_or_evaluate_only(tmp_path, folder):
    async def main():
        async with serving(tmp_path / "state") as server:
            await add(server, supervised("sft", steps=2, algorithm={"steps": 0}), folder=folder)
            await add(server, run_config("none", algorithm={"steps": 0}))
            assert await server.finished() == {}
            assert set(server.runs["sft"].progress.evaluations) == {0, 2}
            assert set(server.runs["none"].progress.evaluations) == {0}
            assert [row.record.version for row in await versions(server, "none")] == [0]
            for name in ("sft", "none"):
                assert (await server.stages.buffer.counts(name)).by_status == {}

    asyncio.run(main())


@pytest.mark.parametrize("stop_at", [1, 2])
def test_a_phase_that_is_stopped_and_resumed_has_the_bytes_of_one_that_is_not(tmp_path, folder, stop_at):
    config = supervised(steps=4, algorithm={"steps": 0}, num_tasks=0)

    async def straight():
        async with serving(tmp_path / "straight") as server:
            await add(server, config, folder=folder)
            assert await server.finished() == {}
            return [row.record for row in await versions(server)]

    async def first():
        async with serving(tmp_path / "stopped") as server:
            await add(server, config, folder=folder)
            await reached(server, "run", stop_at)
            await server.runs["run"].stop()
            return server.runs["run"].progress.version

    async def second():
        async with serving(tmp_path / "stopped") as server:
            run = await add(server, config, folder=folder, resume=True)
            assert len(run.progress.supervised_losses) == run.progress.version
            assert await server.finished() == {}
            return [row.record for row in await versions(server)]

    expected = asyncio.run(straight())
    stopped_at = asyncio.run(first())
    assert stop_at <= stopped_at
    assert asyncio.run(second()) == expected


def test_what_a_phase_trains_is_the_same_beside_a_run_of_reinforcement_learning(tmp_path, folder):
    config = supervised(steps=4, algorithm={"steps": 0}, num_tasks=0)

    async def session(name, *others):
        async with serving(tmp_path / name, *((other, Letters) for other in others)) as server:
            for other in others:
                await reached(server, other.name, 1)
            await add(server, config, folder=folder)
            await server.runs["run"].finished()
            return [row.record for row in await versions(server)]

    alone = asyncio.run(session("alone"))
    beside = asyncio.run(session("beside", run_config("busy", num_tasks=0, algorithm={"steps": 500}, adapter={"rank": 8})))
    assert alone == beside


def test_examples_are_read_before_the_run_exists_and_no_more_once_the_phase_is_over(tmp_path, folder):
    config = supervised(steps=1, algorithm={"steps": 1}, num_tasks=0)
    file = folder / "examples.jsonl"

    async def main():
        async with serving(tmp_path / "state") as server:
            with pytest.raises(DatasetError, match="cannot read"):
                await add(server, config, folder=tmp_path / "elsewhere")
            assert await stored(server, store.find_run, "run") is None
            good = file.read_text()
            file.write_text(good + "\n{}")
            with pytest.raises(DatasetError, match=r"examples.jsonl, line 11: no 'prompt' in it"):
                await add(server, config, folder=folder)
            assert list(server.runs) == []
            file.write_text(good)
            await (await add(server, config, folder=folder)).finished()

    async def again():
        file.unlink()
        async with serving(tmp_path / "state") as server:
            run = await add(server, config, folder=folder, resume=True)
            await run.finished()
            assert run.progress.version == 2

    asyncio.run(main())
    asyncio.run(again())


def test_another_file_of_examples_is_refused_within_the_phase_by_resume_and_by_replay(tmp_path, folder):
    config, file, state_dir = supervised(steps=400, algorithm={"steps": 0}, num_tasks=0), folder / "examples.jsonl", tmp_path / "state"
    original = file.read_text()
    edited = original.replace('"completion": "aa"', '"completion": "ab"')
    assert edited != original

    async def session(*, resume, steps):
        async with serving(state_dir, keep_versions=400) as server:
            run = await add(server, config, folder=folder, resume=resume)
            await reached(server, "run", run.progress.version + steps)

    asyncio.run(session(resume=False, steps=2))
    file.write_text(edited)
    with pytest.raises(StateConflictError, match=r"examples.jsonl is not the file that run run was started with \(SHA-256 "):
        asyncio.run(session(resume=True, steps=1))
    with pytest.raises(StateConflictError, match=r"is not the file that run run was started with"):
        retake(state_dir, "run", 2, folder=folder)
    file.write_text(original)
    asyncio.run(session(resume=True, steps=1))
    assert retake(state_dir, "run", 2, folder=folder).is_equal
    with closing(sqlite3.connect(state_dir / "noria.sqlite")) as database:
        database.execute("UPDATE runs SET examples_sha256 = NULL")  # as a release that did not record it left it
        database.commit()
    file.write_text(edited)
    asyncio.run(session(resume=True, steps=1))


def test_a_version_of_the_phase_can_be_made_again_from_the_one_before(tmp_path, folder):
    """What a replay needs: the version before, the file and the configuration."""
    config = supervised(steps=3, algorithm={"steps": 0}, num_tasks=0)

    async def main():
        async with serving(tmp_path / "state", keep_versions=9) as server:
            await add(server, config, folder=folder)
            assert await server.finished() == {}
            rows, stages = await versions(server), server.stages
            before = stages.files.load(rows[1].record, stages.width_of(config))
            batch = prepare_examples((await server.examples(config, folder=folder)).examples, config, 2, stages.learner.planner)
            stages.learner.load_run(RunSpec("replay", config.adapter.lora, config.optimizer, config.algorithm.loss_spec), before)
            training = stages.learner.train("replay", batch.pieces, loss=SUPERVISED_LOSS, optimizer=config.supervised_optimizer)
            result = await asyncio.wrap_future(training)
            assert checksum(result.state.params) == rows[2].record.checksum
            assert supervised_metrics(batch, result) == pytest.approx(rows[2].metrics | {"device_s": result.device_s})

    asyncio.run(main())


def small(config, **changes):
    """A run file on the tiny base with few and small steps."""
    return config.model_copy(
        update={
            "base": "tiny",
            "supervised": config.supervised.model_copy(update={"steps": 2, "examples_per_batch": 4}),
            "algorithm": config.algorithm.model_copy(
                update={"steps": 2, "group_size": 4, "groups_per_batch": 2, "zero_signal": "train", "truncated": "keep"}
            ),
            "evaluation": config.evaluation.model_copy(update={"num_tasks": 4}),
            **changes,
        }
    )


def test_the_example_trains_supervised_then_by_reward(tmp_path):
    config = small(load_toml(EXAMPLE, RunConfig))

    async def main():
        async with serving(tmp_path) as server:
            run = await server.add_run(config, folder=EXAMPLE.parent, resume=False)
            assert await server.finished() == {}
            assert run.progress.version == 4
            assert set(run.progress.evaluations) == {0, 2, 4}
            assert (len(run.progress.supervised_losses), len(run.progress.rewards)) == (2, 2)
            rows = await versions(server, config.name)
            assert rows[3].metrics["learning_rate"] == pytest.approx(1.5e-4), "the warm-up of reinforcement learning begins after the phase"

    asyncio.run(main())


def test_the_staleness_of_groups_counts_from_the_phase_on(tmp_path, folder):
    async def main():
        async with serving(tmp_path / "state") as server:
            steps = record_training(server)
            await add(server, supervised(steps=2, algorithm={"steps": 3, "max_staleness": 1}, num_tasks=0), folder=folder)
            assert await server.finished() == {}
            assert [version for _, version, _ in steps] == list(range(5))
            for _, version, sampled_by in steps[2:]:
                assert max(2, version - 1) <= min(sampled_by) <= max(sampled_by) <= version

    asyncio.run(main())


RUN = """
name = "run"
base = "tiny"
seed = 5
[supervised]
file = "examples.jsonl"
steps = 40
examples_per_batch = 3
[environment]
name = "addition"
[algorithm]
steps = 0
[adapter]
rank = 4
[sampling]
max_tokens = 4
[evaluation]
num_tasks = 0
"""


def committed(state_dir):
    """The run's committed versions, as a restart would find them."""
    if not (state_dir / "noria.sqlite").exists():
        return []
    engine = open_database(state_dir / "noria.sqlite")
    try:
        with engine.begin() as connection:
            if not connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE name = 'versions'").all():
                return []
            return [row.record for row in store.versions(connection, "run")]
    finally:
        engine.dispose()


@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [2, pytest.param(4, marks=pytest.mark.prove)])
def test_a_phase_that_is_killed_and_resumed_has_the_bytes_of_one_that_is_not(folder, num_kills):
    """Cases 86 to 88: kill -9 at random moments; every version has the parameters and moments that it has without."""
    (folder / "run.toml").write_text(RUN)
    (folder / "server.toml").write_text(SERVER_FILE)

    def start(state_dir):
        command = [sys.executable, "-m", "noria.cli", "train", str(folder / "run.toml"), "--server-config", str(folder / "server.toml")]
        command += ["--state-dir", str(state_dir), "--json", "--resume", "--no-report"]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def finish(state_dir):
        process = start(state_dir)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors.decode()[-2000:]
        return committed(state_dir)

    expected = finish(folder / "straight")
    assert len(expected) == 41
    rng, killed = random.Random(0), folder / "killed"
    for _ in range(num_kills):
        before, wanted = len(committed(killed)), rng.randrange(1, 9)
        process, limit = start(killed), time.monotonic() + 120
        while process.poll() is None and len(committed(killed)) - before < wanted and time.monotonic() < limit:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        seen = committed(killed)
        assert seen == expected[: len(seen)]
    assert 4 < len(seen) < 41, "the kills must have hit the phase"
    assert finish(killed) == expected
