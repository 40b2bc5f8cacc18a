"""Builders for service tests: a server on the tiny model, and environments that learn, raise, hang or lie."""

import asyncio
import threading
from contextlib import asynccontextmanager
from pathlib import Path

from noria.actors.load import environment_factory
from noria.config import (
    ActorsConfig,
    AdapterConfig,
    AlgorithmConfig,
    DeadlinesConfig,
    EnvironmentConfig,
    EvaluationConfig,
    LearnerConfig,
    RunConfig,
    SamplerConfig,
    SamplingConfig,
    ServerConfig,
)
from noria.envs.single_turn import SingleTurn
from noria.service.build import open_server


class Letters(SingleTurn):
    """Rewarded for low bytes: something that a random tiny model can learn at once."""

    def problem(self, rng):
        return "".join(rng.choice("abcdefgh") for _ in range(6)), ""

    def reward(self, action, answer):
        return sum(byte < 100 for byte in action.encode()) / max(1, len(action.encode()))


class Raises(Letters):
    def reward(self, action, answer):
        raise ValueError("broken scorer")


class Nan(Letters):
    def reward(self, action, answer):
        return float("nan")


class HangsOnce(Letters):
    """The first reset of all hangs until the test ends; the others are fine."""

    release = None
    hung = 0

    async def reset(self, task):
        if HangsOnce.hung == 0:
            HangsOnce.hung = 1
            await asyncio.Event().wait()
        return Letters.reset(self, task)


class Constant(Letters):
    """Every reward is equal: no signal, ever."""

    def reward(self, action, answer):
        return 0.5


def gated():
    """Letters whose held-out tasks wait until `gate` is set."""

    class Gated(Letters):
        gate = threading.Event()

        def reset(self, task):
            if task.index >= self.num_tasks:
                assert Gated.gate.wait(60)
            return Letters.reset(self, task)

    return Gated


def run_config(name="run", **changes):
    algorithm = {"steps": 3, "group_size": 4, "groups_per_batch": 2, "max_staleness": 1, "truncated": "keep"} | changes.pop("algorithm", {})
    return RunConfig(
        name=name,
        base="tiny",
        environment=EnvironmentConfig(name="test"),
        algorithm=AlgorithmConfig(**algorithm),
        adapter=AdapterConfig(**({"rank": 4, "learning_rate": 1e-2} | changes.pop("adapter", {}))),
        sampling=SamplingConfig(max_tokens=4),
        evaluation=EvaluationConfig(num_tasks=changes.pop("num_tasks", 4), every=changes.pop("every", 0), **changes.pop("evaluation", {})),
        deadlines=DeadlinesConfig(**changes.pop("deadlines", {})),
        actors=ActorsConfig(**changes.pop("actors", {})),
        **changes,
    )


def server_config(state_dir: Path, **changes):
    return ServerConfig(
        state_dir=str(state_dir),
        base="tiny",
        sampler=SamplerConfig(**({"num_lanes": 32, "num_pages": 256, "max_context": 128} | changes.pop("sampler", {}))),
        learner=LearnerConfig(**({"max_positions": 256, "num_slots": 4, "rank_classes": (8,)} | changes.pop("learner", {}))),
        **({"warm_up": False, "dtype": "float32"} | changes),
    )


@asynccontextmanager
async def serving(state_dir: Path, *runs, resume=False, **changes):
    """A server on which (config, environment class) pairs have been started."""
    async with open_server(server_config(state_dir, **changes)) as server:
        for config, kind in runs:
            await add(server, config, kind, resume=resume)
        yield server


async def add(server, config, kind=Letters, *, resume=False, folder=Path(".")):
    factory = environment_factory(kind, {}, name=kind.__name__)
    return await server.add_run(config, folder=folder, resume=resume, environment=factory)


async def reached(server, name, version):
    """Wait until the run is at `version` or later; fails with what made the run end before."""
    run = server.runs[name]
    while run.progress.version < version:
        assert not run._done.done(), run._done.exception()
        await asyncio.sleep(0.01)


async def stored(server, read, *arguments):
    """What a function of the store reads: `await stored(server, store.versions, "run")`."""
    return await server.stages.buffer.transaction(lambda connection: read(connection, *arguments))


def record_training(server):
    """A list that grows by (run, its learner's version, versions that sampled the trained tokens) with every step."""
    learner, steps = server.stages.learner, []
    train = learner.train

    def recording(run_id, batch, **named):
        sampled_by = {int(version) for version in batch.entries.version_M}
        steps.append((run_id, server.runs[run_id].progress.version, sampled_by))
        return train(run_id, batch, **named)

    learner.train = recording
    return steps
