"""Ends in order: what has begun to be written is finished, a status is stored before anybody hears of it, one part's failure stops no other's end."""

import asyncio
import threading
from concurrent.futures import Future

import pytest
from service_builders import Letters, Raises, add, reached, run_config, serving, stored

from noria.buffer.database import open_database
from noria.errors import DeadlineExceededError, GradientNotFiniteError, StageStoppedError
from noria.service import store
from noria.service.folder import exclusive


def status_on_disk(state_dir, name):
    """As another process sees it at this very moment."""
    engine = open_database(state_dir / "noria.sqlite")
    try:
        with engine.connect().execution_options(sqlite_begin="DEFERRED") as connection:
            return store.find_run(connection, name).status
    finally:
        engine.dispose()


def test_a_failure_is_stored_before_anybody_hears_of_it(tmp_path):
    async def main():
        config = run_config(num_tasks=0, actors={"episode_tries": 1, "max_failed_groups": 1})
        async with serving(tmp_path, (config, Raises)) as server:
            assert set(await server.finished()) == {"run"}
            assert status_on_disk(tmp_path, "run") == store.FAILED

    asyncio.run(main())


def test_a_status_says_what_is_going_on(tmp_path):
    config = run_config(num_tasks=0, algorithm={"steps": 500})

    async def session(*, resume, version):
        async with serving(tmp_path, (config, Letters), resume=resume) as server:
            await reached(server, "run", version)
            assert status_on_disk(tmp_path, "run") == store.RUNNING
        return server.runs["run"].progress.status

    for resume, version in ((False, 1), (True, 3)):
        assert asyncio.run(session(resume=resume, version=version)) == store.STOPPED
        assert status_on_disk(tmp_path, "run") == store.STOPPED


def test_a_commit_that_has_begun_is_finished_before_the_folder_is_free(tmp_path):
    begun, gate = threading.Event(), threading.Event()
    config = run_config(num_tasks=0, algorithm={"steps": 50})

    async def main():
        async with serving(tmp_path, (config, Letters)) as server:
            files = server.stages.files
            write = files.write

            def held(run_id, version, *rest):
                if version == 3:
                    begun.set()
                    assert gate.wait(60)
                return write(run_id, version, *rest)

            files.write = held
            await asyncio.to_thread(begun.wait, 60)
            stopping = asyncio.create_task(server.runs["run"].stop())
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(stopping), 0.3)
            stopping.cancel()  # who stops waiting for the end does not undo it
            asyncio.get_running_loop().call_later(0.3, gate.set)
        with exclusive(tmp_path):
            assert sorted(path.name for path in (tmp_path / "adapters" / "run").iterdir()) == ["2", "3"]

    async def resume():
        async with serving(tmp_path, (config.model_copy(), Letters), resume=True) as server:
            assert server.runs["run"].progress.version == 3
            counts = await server.stages.buffer.counts("run")
            assert counts.by_status["trained"] + counts.by_reason.get("no_signal", 0) >= 3 * 2

    asyncio.run(main())
    assert status_on_disk(tmp_path, "run") == store.STOPPED
    asyncio.run(resume())


def test_a_stop_between_commit_and_publish_is_resumed_with_what_was_committed(tmp_path):
    config = run_config(num_tasks=0, algorithm={"steps": 4})

    async def main():
        async with serving(tmp_path) as server:
            publisher, reached_publish = server.stages.publisher, asyncio.Event()
            publish = publisher.publish

            async def held(record, *rest, **named):
                if record.version == 2:
                    reached_publish.set()
                    await asyncio.Event().wait()
                await publish(record, *rest, **named)

            publisher.publish = held
            run = await add(server, config)
            await reached_publish.wait()
            await run.stop()
            assert run.progress.version == 1
            return await stored(server, store.versions, "run")

    async def resume():
        async with serving(tmp_path, (config, Letters), resume=True) as server:
            assert server.runs["run"].progress.version == 2
            assert await server.finished() == {}
            return await stored(server, store.versions, "run")

    before, after = asyncio.run(main()), asyncio.run(resume())
    assert len(before) == 3
    assert after[:3] == before
    assert len(after) == 5


def test_a_step_that_fails_settles_its_groups_so_that_a_restart_goes_on_with_others(tmp_path):
    config = run_config(num_tasks=0)

    async def fail():
        async with serving(tmp_path) as server:

            def poisoned(run_id, pieces, **named):
                future = Future()
                future.set_exception(GradientNotFiniteError("the gradient has norm nan"))
                return future

            server.stages.learner.train = poisoned
            await add(server, config)
            assert isinstance((await server.finished())["run"], GradientNotFiniteError)
            counts = await server.stages.buffer.counts("run")
            assert counts.by_reason == {"failed": 2}
            assert "leased" not in counts.by_status
            assert counts.num_quarantined == 0

    async def resume():
        async with serving(tmp_path, (config, Letters), resume=True) as server:
            assert await server.finished() == {}
            assert server.runs["run"].progress.version == 3

    asyncio.run(fail())
    asyncio.run(resume())


@pytest.mark.parametrize("stage", ["sampler", "learner"])
def test_a_stage_that_dies_ends_every_run_with_its_cause_and_the_server_closes(tmp_path, stage):
    async def main():
        configs = [run_config(name, num_tasks=0, algorithm={"steps": 500}) for name in ("one", "two")]
        async with serving(tmp_path, *((config, Letters) for config in configs)) as server:
            await reached(server, "one", 1)

            def step():
                raise RuntimeError("out of device memory")

            getattr(server.stages, stage).step = step
            failures = await server.finished()
            assert set(failures) == {"one", "two"}
            for name, error in failures.items():
                assert isinstance(error, StageStoppedError)
                assert f"the {stage} has stopped" in str(error)
                assert "out of device memory" in str(error)
                assert status_on_disk(tmp_path, name) == store.FAILED
        assert not any(thread.name == "noria-device" for thread in threading.enumerate())

    asyncio.run(main())


def test_every_part_is_closed_though_the_ones_before_it_fail(tmp_path):
    async def session():
        async with serving(tmp_path, (run_config(num_tasks=0, algorithm={"steps": 500}), Letters), drain_s=0.3) as server:
            await reached(server, "run", 1)
            close = server.stages.pool.close

            async def broken(**named):
                await close(**named)
                raise DeadlineExceededError("waited for 3 groups to stop")

            async def hangs():
                await asyncio.Event().wait()

            server.stages.pool.close = broken
            server.runs["run"].stop = hangs

    async def main():
        with pytest.raises(DeadlineExceededError, match="groups to stop") as raised:
            await session()
        assert "1 runs to stop" in str(raised.value.__context__), "the runs come first"
        assert not any(thread.name.startswith(("noria-device", "noria-buffer")) for thread in threading.enumerate())
        with exclusive(tmp_path):
            pass

    asyncio.run(main())
