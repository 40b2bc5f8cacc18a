"""A run is taken in whole or not at all; tenants' weights follow their active runs."""

import asyncio

import pytest
from pydantic import ValidationError
from service_builders import Letters, add, reached, run_config, server_config, serving, stored

from noria.buffer.tables import CURSORS
from noria.config import ServerConfig, parse
from noria.errors import ConfigError, PublishProofError, StateConflictError
from noria.service import store

REFUSED = [
    ({"adapter": {"rank": 16}}, {}, ConfigError, "rank classes"),
    ({"base": "smollm2-135m"}, {}, ConfigError, "base"),
    ({"adapter": {"train_unembed": True}}, {}, ConfigError, "has_unembed"),
    ({}, {"sampler": {"max_context": 32}, "max_tokens": 32}, ConfigError, "no room for a prompt"),
]


@pytest.mark.parametrize(("run", "server", "error", "message"), REFUSED)
def test_a_run_that_is_refused_leaves_nothing_behind(tmp_path, run, server, error, message):
    server = dict(server)
    max_tokens, base = server.pop("max_tokens", None), run.get("base", "tiny")
    first = run_config("first", num_tasks=0, algorithm={"steps": 500})
    second = run_config("second", **{key: value for key, value in run.items() if key != "base"}).model_copy(update={"base": base})
    if max_tokens:
        second = second.model_copy(update={"sampling": second.sampling.model_copy(update={"max_tokens": max_tokens})})

    async def main():
        async with serving(tmp_path, (first, Letters), **server) as live:
            with pytest.raises(error, match=message):
                await add(live, second)
            assert list(live.runs) == ["first"]
            assert await stored(live, store.find_run, "second") is None
            assert await stored(live, lambda connection: [row.run_id for row in connection.execute(CURSORS.select())]) == ["first"]
            assert not (tmp_path / "adapters" / "second").exists()
            await reached(live, "first", live.runs["first"].progress.version + 1)
            await live.runs["first"].stop()
            await (await add(live, run_config("second"))).finished()  # its name is free, and so is all that it had claimed

    asyncio.run(main())


def test_a_resumed_run_that_is_refused_stays_as_it_was(tmp_path):
    config = run_config(num_tasks=0)

    async def finish():
        async with serving(tmp_path, (config, Letters)) as server:
            assert await server.finished() == {}

    async def refuse():
        async with serving(tmp_path, (run_config("other", num_tasks=0, algorithm={"steps": 500}), Letters)) as server:
            sampler, checksum = server.stages.sampler, server.stages.sampler.checksum
            sampler.checksum = lambda run_id, version: checksum(run_id, version) ^ (run_id == config.name)
            with pytest.raises(PublishProofError, match="checksum"):
                await add(server, config, resume=True)
            assert await server.stages.on_device(lambda: sampler.num_versions, 60, "the versions") == 1
            assert (await stored(server, store.find_run, "run")).status == store.FINISHED
            with pytest.raises(StateConflictError, match="active already"):
                await add(server, server.runs["other"].config, resume=True)
            assert not server.runs["other"]._done.done()

    asyncio.run(finish())
    asyncio.run(refuse())


def test_more_runs_than_the_sampler_has_slots_train_side_by_side(tmp_path):
    async def main():
        runs = [(run_config(f"run-{n}", algorithm={"steps": 3}), Letters) for n in range(4)]
        async with serving(tmp_path, *runs, sampler={"num_slots": 2}) as server:
            assert await server.finished() == {}
            assert {run.progress.version for run in server.runs.values()} == {3}
            sampler = server.stages.sampler
            assert await server.stages.on_device(lambda: (sampler.num_versions, sampler.num_free_slots), 60, "the slots") == (0, 1)

    asyncio.run(main())


def test_a_tenant_has_the_sum_of_its_active_runs_weights_in_the_sampler(tmp_path):
    async def main():
        async with serving(tmp_path) as server:
            sampler, weights = server.stages.sampler, {}
            honest = sampler.set_weight

            def record(tenant, weight):
                weights.setdefault(tenant, []).append(weight)
                honest(tenant, weight)

            sampler.set_weight = record
            short = await add(server, run_config("short", tenant="a", weight=3.0, num_tasks=0))
            long = await add(server, run_config("long", tenant="a", weight=0.5, num_tasks=0, algorithm={"steps": 500}))
            await add(server, run_config("other", tenant="b", weight=2.0, num_tasks=0))
            await short.finished()
            await server.runs["other"].finished()
            await long.stop()
            assert weights == {"a": [3.0, 3.5, 0.5], "b": [2.0]}

    asyncio.run(main())


def test_a_server_whose_episodes_could_never_train_is_refused(tmp_path):
    with pytest.raises(ValidationError, match="raise max_positions"):
        server_config(tmp_path, sampler={"max_context": 512})
    with pytest.raises(ConfigError, match=r"^server.toml: sampler.max_context = 2048 is more than learner.max_positions = 1024"):
        parse({"sampler": {"max_context": 2048}}, ServerConfig, source="server.toml")
