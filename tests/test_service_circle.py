"""The circle on the tiny model: several runs at once, staleness and settlement, failures that stay their run's own, resume."""

import asyncio

import pytest
from service_builders import Constant, HangsOnce, Letters, Nan, Raises, run_config, serving

from noria.errors import ConfigError, PublishProofError, RunFailedError, StateConflictError
from noria.service import store
from noria.service.build import open_server


def groups_by_status(server, run_id):
    return asyncio.get_running_loop().create_task(server.stages.buffer.counts(run_id))


@pytest.mark.slow
def test_three_tenants_train_at_once_within_the_staleness_bound(tmp_path):
    async def main():
        configs = [run_config(f"run{i}", tenant=f"tenant{i}", adapter={"rank": 2 + i}, algorithm={"max_staleness": i}) for i in range(3)]
        async with serving(tmp_path, *((c, Letters) for c in configs)) as server:
            assert await server.finished() == {}
            for i, config in enumerate(configs):
                report, counts = await server.report(config.name), await groups_by_status(server, config.name)
                assert report.progress.version == 3
                assert report.progress.max_staleness_seen <= i
                assert len(report.metrics) == 3
                assert all(m["num_entries"] > 0 for m in report.metrics)
                on_policy = [m for m in report.metrics if m["staleness_max"] == 0]
                assert on_policy
                assert all(m["mismatch_kl"] < 1e-9 for m in on_policy), "learner_logprobs = behavior_logprobs at the same version"
                assert set(report.progress.evaluations) == {0, 3}
                assert report.tokens_sampled > 0
                assert counts.places_in_use == 0
                assert counts.by_status["trained"] + counts.by_reason.get("no_signal", 0) >= 3 * 2
                assert "stale" not in counts.by_reason

    asyncio.run(main())


def test_a_broken_environment_fails_its_own_run_with_a_named_error(tmp_path):
    async def main():
        broken = run_config("broken", num_tasks=0, actors={"episode_tries": 1, "max_failed_groups": 2})
        liar = run_config("liar", num_tasks=0, actors={"episode_tries": 1, "max_failed_groups": 2})
        async with serving(tmp_path, (broken, Raises), (liar, Nan), (run_config("good"), Letters)) as server:
            failures = await server.finished()
            assert set(failures) == {"broken", "liar"}
            assert isinstance(failures["broken"], RunFailedError)
            assert "environment_failed" in str(failures["broken"])
            assert "broken scorer" in str(failures["broken"])
            assert "reward_not_finite" in str(failures["liar"])
            assert server.runs["good"].progress.version == 3
            for name in ("broken", "liar"):
                assert server.runs[name].progress.status == store.FAILED
                assert (await groups_by_status(server, name)).by_status.get("trained", 0) == 0

    asyncio.run(main())


def test_an_episode_that_hangs_is_retried_and_its_group_trains(tmp_path):
    HangsOnce.hung = 0

    async def main():
        config = run_config(deadlines={"reset_s": 2.0}, algorithm={"steps": 2}, num_tasks=0)  # so long that no other reset takes it
        async with serving(tmp_path, (config, HangsOnce)) as server:
            assert await server.finished() == {}
            assert HangsOnce.hung == 1
            counts = server.stages.pool.counts()
            assert counts.num_retries == 1
            assert counts.failures == {}

    asyncio.run(main())


def test_a_run_without_any_signal_ends_early_and_says_so(tmp_path):
    async def main():
        config = run_config(algorithm={"max_batches_without_signal": 3}, num_tasks=0)
        async with serving(tmp_path, (config, Constant)) as server:
            assert await server.finished() == {}
            progress = server.runs["run"].progress
            assert progress.version == 0
            assert "2 of 2 groups had equal rewards" in progress.message
            counts = await groups_by_status(server, "run")
            assert counts.by_reason["no_signal"] == 3 * 2
            assert counts.places_in_use == 0

    asyncio.run(main())


def test_batches_without_signal_are_counted_across_a_restart(tmp_path):
    config = run_config(algorithm={"max_batches_without_signal": 12, "max_staleness": 0}, num_tasks=0)

    async def some():
        async with serving(tmp_path, (config, Constant)) as server:
            while (await groups_by_status(server, "run")).by_reason.get("no_signal", 0) < 8:
                await asyncio.sleep(0.01)

    async def rest():
        async with serving(tmp_path, (config, Constant), resume=True) as server:
            assert await server.finished() == {}
            assert "12 batches in a row" in server.runs["run"].progress.message
            assert (await groups_by_status(server, "run")).by_reason["no_signal"] == 12 * 2

    asyncio.run(some())
    asyncio.run(rest())


def test_a_run_is_resumed_at_its_committed_version_and_never_trains_twice(tmp_path):
    config = run_config(algorithm={"steps": 4})

    async def first():
        async with serving(tmp_path, (config, Letters)) as server:
            while server.runs["run"].progress.version < 2:
                await asyncio.sleep(0.01)
            run = server.runs["run"]
            await run.stop()
            return run.progress.version, [r.record.checksum for r in await versions(server)]

    async def versions(server):
        return await server.stages.buffer.transaction(lambda connection: store.versions(connection, "run"))

    async def second():
        async with serving(tmp_path, (config, Letters), resume=True) as server:
            assert server.runs["run"].progress.version >= 2
            assert await server.finished() == {}
            counts = await groups_by_status(server, "run")
            assert counts.places_in_use == 0
            return [r.record.checksum for r in await versions(server)]

    version, before = asyncio.run(first())
    after = asyncio.run(second())
    assert version >= 2
    assert after[: len(before)] == before
    assert len(after) == 5


def test_a_state_folder_is_refused_to_a_second_server_and_to_other_settings(tmp_path):
    async def main():
        async with serving(tmp_path, (run_config(), Letters)) as server:
            with pytest.raises(StateConflictError, match="another process"):
                async with open_server(server.config):
                    pass
            with pytest.raises(ConfigError, match="base"):
                await server.add_run(run_config("other").model_copy(update={"base": "smollm2-135m"}), folder=tmp_path, resume=False)
        with pytest.raises(StateConflictError, match="--resume"):
            async with serving(tmp_path, (run_config(), Letters)):
                pass
        with pytest.raises(StateConflictError, match="algorithm"):
            async with serving(tmp_path, (run_config(algorithm={"steps": 9}), Letters), resume=True):
                pass

    asyncio.run(main())


def test_a_sampler_that_keeps_an_old_adapter_stops_the_run(tmp_path):
    """The probe sees a sampler whose slot was not what was published, even though its checksum was right when written."""

    async def main():
        async with serving(tmp_path, (run_config(num_tasks=0, algorithm={"steps": 50}), Letters)) as server:
            sampler = server.stages.sampler
            honest = sampler.publish

            def publish(run_id, version, adapter, scale):
                return honest(run_id, version, adapter, scale * (3.0 if version == 2 else 1.0))

            sampler.publish = publish
            failures = await server.finished()
            assert isinstance(failures["run"], PublishProofError)
            assert server.runs["run"].progress.version == 1
            rows = await server.stages.buffer.transaction(lambda connection: store.versions(connection, "run"))
            assert len(rows) == 3, "committed before it was published"

    asyncio.run(main())
