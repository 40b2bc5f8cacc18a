"""The calculator's example, end to end on the tiny base: messages in, reward components out, every step committed."""

import asyncio
from pathlib import Path

import pytest
from service_builders import server_config, stored

from noria.buffer.sqlite import SqliteBuffer
from noria.config import RunConfig, load_toml
from noria.service import store
from noria.service.build import open_server

EXAMPLE = Path(__file__).parents[1] / "examples" / "calculator" / "calculator.toml"


def small(config: RunConfig) -> RunConfig:
    """The example's run on the tiny base, whose random policy never earns a reward: all groups train."""
    algorithm = config.algorithm.model_copy(update={"steps": 2, "group_size": 2, "groups_per_batch": 2, "zero_signal": "train"})
    sections = {
        "algorithm": algorithm,
        "sampling": config.sampling.model_copy(update={"max_tokens": 8}),
        "evaluation": config.evaluation.model_copy(update={"num_tasks": 2}),
    }
    return config.model_copy(update={"base": "tiny"} | sections)


@pytest.mark.slow
def test_the_example_trains_episodes_that_speak_in_messages(tmp_path):
    config = small(load_toml(EXAMPLE, RunConfig))
    server_file = server_config(tmp_path, sampler={"max_context": 1024, "num_pages": 512}, learner={"max_positions": 1024}, keep_episodes=True)

    async def main():
        async with open_server(server_file) as server:
            await server.add_run(config, folder=EXAMPLE.parent, resume=False)
            assert await server.finished() == {}
            rows = await stored(server, store.versions, "calculator")
            buffer: SqliteBuffer = server.stages.buffer
            return server.base.tokenizer, rows, await buffer.settled("calculator", trained_version=2)

    tokenizer, rows, groups = asyncio.run(main())
    assert [row.record.version for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert {name for name in row.metrics if name.startswith("reward_part_")} == {f"reward_part_{n}" for n in config.environment.rewards}
    assert len(groups) == 2
    for settled in groups:
        text = tokenizer.decode(settled.group.episodes[0].turns[0].observation_ids)
        assert all(words in text for words in ("Evaluates an arithmetic expression", config.environment.name, "system\n", "user\n", "?"))
        assert text.endswith("assistant\n")
