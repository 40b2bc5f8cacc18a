"""`noria.train`: from a script and from a running event loop, its result, its refusals, and an interrupt."""

import asyncio
import dataclasses
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tool_builders import SECTIONS, SERVER, Low, train

import noria
from noria.actors.load import environment_factory
from noria.config import AdapterConfig, EvaluationConfig, RunConfig
from noria.errors import ConfigError, EnvironmentFailedError, RunFailedError, StateConflictError
from noria.report.stored import read_runs

ROOT = Path(__file__).parents[1]


class Empty:
    """No environment at all."""


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return train(tmp_path_factory.mktemp("state"))


def test_a_run_trains_to_its_end_and_says_what_came_of_it(result):
    assert result.version == 3
    assert len(result.rewards) == len(result.metrics) == 3
    assert set(result.evaluations) == {0, 3}
    assert [metrics["reward_mean"] for metrics in result.metrics] == list(result.rewards)
    assert result.adapter.is_dir()
    assert (result.config.base, result.config.environment.name, result.message) == ("tiny", "Low", "")
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.version = 4


def test_its_folder_is_an_ordinary_state_folder(result):
    (stored,) = read_runs(result.folder)
    assert (stored.row.status, stored.rewards) == ("finished", list(result.rewards))


def test_its_plot_is_a_picture_that_a_notebook_shows_without_pyplot(result):
    figure = result.plot()
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert len(figure.axes) == 2


def test_its_episodes_and_its_adapter_come_out(result, tmp_path):
    rows = result.episodes(2)
    assert rows
    assert {row["trained_version"] for row in rows} == {2}
    assert (result.export(tmp_path / "adapter", version=2) / "adapter_config.json").is_file()


def test_it_works_where_an_event_loop_is_running(tmp_path):
    async def cell():
        return train(tmp_path, steps=1)

    assert asyncio.run(cell()).version == 1


def test_a_run_goes_on_where_it_was_and_only_when_told_to(tmp_path):
    first = train(tmp_path, steps=2)
    with pytest.raises(StateConflictError, match="exists already"):
        train(tmp_path, steps=2)
    again = train(tmp_path, steps=2, resume=True)
    assert (again.version, again.rewards) == (2, first.rewards)


@pytest.mark.parametrize("form", ["config", "dict", "sections"])
def test_all_spellings_of_a_configuration_mean_the_same(form):
    wanted = RunConfig(
        name="run",
        base="tiny",
        environment={"name": "addition"},
        algorithm={"steps": 5, "group_size": 4},
        adapter={"rank": 2},
        evaluation={"num_tasks": 0},
    )
    data = wanted.model_dump(exclude_unset=True)
    given = {"config": {"config": wanted}, "dict": {"config": data}, "sections": {k: v for k, v in data.items() if k not in ("environment", "base")}}
    more = {"environment": "addition", "model": "tiny"} if form == "sections" else {}
    made, factory = noria.notebook._run_of(
        more.get("environment"),
        given[form].get("config"),
        {} if form != "sections" else {**given[form], "adapter": AdapterConfig(rank=2), "evaluation": EvaluationConfig(num_tasks=0)},
        model=more.get("model"),
        steps=None,
        settings=None,
    )
    assert made == wanted
    assert factory is None


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({}, ConfigError, "needs an environment"),
        ({"environment": Low}, ConfigError, "needs steps"),
        ({"environment": Low(), "steps": 1}, ConfigError, "give the class, environment=Low"),
        ({"environment": 3, "steps": 1}, ConfigError, "is no environment"),
        ({"environment": Low, "steps": 1, "adaptor": {}}, ConfigError, "unknown key 'adaptor'; did you mean 'adapter'"),
        ({"environment": Low, "steps": 1, "adapter": {"rnk": 3}}, ConfigError, "unknown key 'adapter.rnk'; did you mean 'rank'"),
        ({"environment": Low, "steps": 1, "settings": {"lettres": "ab"}}, ConfigError, "did you mean 'letters'"),
        ({"environment": Low, "steps": 1, "server": {"samplr": {}}}, ConfigError, "did you mean 'sampler'"),
        ({"environment": "no_such_task", "steps": 1, "model": "tiny", "server": SERVER}, EnvironmentFailedError, "no built-in environment"),
        ({"environment": Empty, "steps": 1}, EnvironmentFailedError, "no method reset"),
        ({"config": [1], "environment": Low, "steps": 1}, ConfigError, "config must be a dict"),
        ({"config": {1: 2}, "environment": Low, "steps": 1}, ConfigError, "config must be a dict"),
        ({"algorithm": None, "environment": Low}, ConfigError, "needs steps"),
        ({"algorithm": [1], "environment": Low}, ConfigError, "algorithm must be a dict"),
        ({"config": {"algorithm": "x"}, "environment": Low, "steps": 1}, ConfigError, "algorithm must be a dict"),
        ({"config": {"environment": 3}, "steps": 1}, ConfigError, "environment must be a dict"),
        ({"environment": Low, "steps": 1, "settings": [1]}, ConfigError, "settings must be a dict"),
        ({"environment": Low, "steps": 1, "settings": {"letters": object()}}, ConfigError, "letters must be text"),
        ({"environment": Low, "steps": 1, "server": [1]}, ConfigError, "server must be a dict"),
        ({"environment": Low, "steps": 1, "folder": 3}, ConfigError, "folder must be a path"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_what_to_do(tmp_path, arguments, error, words):
    with pytest.raises(error, match=words):
        noria.train(**{"folder": tmp_path / "state", "progress": False, **arguments})


def test_settings_reach_the_environment(tmp_path):
    result = train(tmp_path, steps=1, settings={"letters": "xyz"})
    prompt = result.episodes()[0]["text"]
    assert set(prompt[:6]) <= set("xyz")


def test_a_ready_made_factory_is_used_as_it_is(tmp_path):
    result = train(tmp_path, environment_factory(Low, {"letters": "xyz"}, name="Low"), steps=1)
    assert set(result.episodes()[0]["text"][:6]) <= set("xyz")


def test_a_run_that_fails_raises_its_cause(tmp_path):
    class Broken(Low):
        def reward(self, action, answer):
            raise ValueError("out of order")

    with pytest.raises(RunFailedError, match="out of order"):
        train(tmp_path, Broken, steps=1, evaluation={"num_tasks": 0}, actors={"max_failed_groups": 1, "episode_tries": 1})


def test_an_interrupt_stops_in_order_and_the_run_can_be_resumed(tmp_path):
    begun = threading.Event()

    class Telling(Low):
        def reset(self, task):
            begun.set()
            return super().reset(task)

    main = threading.main_thread().ident
    watcher = threading.Thread(target=lambda: begun.wait(60) and signal.pthread_kill(main, signal.SIGINT))
    watcher.start()
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, Telling, steps=500)
    watcher.join()
    (stored,) = read_runs(tmp_path)
    assert stored.row.status == "stopped"
    assert not [thread for thread in threading.enumerate() if thread.name in ("noria-train", "noria-device")]


def test_importing_noria_loads_nothing():
    script = "import sys, noria; print([m for m in ('jax', 'numpy', 'pydantic', 'matplotlib', 'typer') if m in sys.modules], dir(noria)[0])"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("[]")
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = noria.trian


def test_the_sections_here_are_those_of_a_run_file():
    assert SECTIONS.keys() <= RunConfig.model_fields.keys()
