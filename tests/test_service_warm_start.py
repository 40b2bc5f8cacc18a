"""A new run starts from a PEFT folder; a resumed one does not look at it again. The best version stays on disk."""

import asyncio
import shutil

import pytest
from service_builders import Letters, add, run_config, serving, stored

from noria.errors import NoriaError
from noria.model.export import write_peft
from noria.service import store


async def records(server, name):
    return [row.record for row in await stored(server, store.versions, name)]


def exported(server, config, record, folder):
    state = server.stages.files.load(record, server.stages.width_of(config))
    write_peft(folder, state.params, config.adapter.lora, server.base.config, base_name="tiny")
    return state


def test_a_run_starts_from_the_adapter_of_another_and_trains_on(tmp_path):
    first = run_config("first", num_tasks=0, algorithm={"steps": 2})
    warm = run_config("warm", num_tasks=0, algorithm={"steps": 1}, adapter={"rank": 4, "warm_start": "adapters/first"})

    async def main():
        async with serving(tmp_path / "state", (first, Letters)) as server:
            assert await server.finished() == {}
            source = (await records(server, "first"))[-1]
            exported(server, first, source, tmp_path / "adapters" / "first")
            await (await add(server, warm, folder=tmp_path)).finished()
            start, trained = await records(server, "warm")
            assert start.checksum == source.checksum
            assert start.moments_checksum == 0, "moments begin anew"
            assert trained.checksum != source.checksum

    async def again():
        shutil.rmtree(tmp_path / "adapters")
        async with serving(tmp_path / "state") as server:
            run = await add(server, warm, folder=tmp_path, resume=True)
            await run.finished()
            assert run.progress.version == 1

    (tmp_path / "adapters").mkdir()
    asyncio.run(main())
    asyncio.run(again())


@pytest.mark.parametrize("change", [{"rank": 2}, {"alpha": 3.0}, {"train_mlp": False}, {"train_unembed": True}, {"warm_start": "nowhere"}])
def test_a_warm_start_that_does_not_fit_is_refused_and_leaves_nothing(tmp_path, change):
    first = run_config("first", num_tasks=0, algorithm={"steps": 0})
    warm = run_config("warm", num_tasks=0, adapter={"rank": 4, "warm_start": "first", **change})

    async def main():
        async with serving(tmp_path / "state", (first, Letters)) as server:
            assert await server.finished() == {}
            exported(server, first, (await records(server, "first"))[0], tmp_path / "first")
            with pytest.raises(NoriaError):
                await add(server, warm, folder=tmp_path)
            assert await stored(server, store.find_run, "warm") is None
            assert list(server.runs) == ["first"]

    asyncio.run(main())


def test_the_best_version_stays_on_disk_beside_the_newest(tmp_path):
    config = run_config(every=1, algorithm={"steps": 6})

    async def main():
        async with serving(tmp_path, (config, Letters), keep_versions=1) as server:
            assert await server.finished() == {}
            rows = await stored(server, store.evaluations, "run")
            best = max(rows, key=lambda row: (row.accuracy, row.mean_reward, -row.version)).version
            kept = {int(path.name) for path in (tmp_path / "adapters" / "run").iterdir()}
            assert {best, 6} <= kept
            assert len(kept) <= 3, "the best, the newest, and one that waited for its evaluation"

    asyncio.run(main())
