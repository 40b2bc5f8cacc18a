"""From a name in a run file to an environment, and every way in which that fails by name."""

import asyncio
import builtins
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from actor_builders import Letters, ScriptedSampler

from noria.actors.evaluation import held_out_tasks
from noria.actors.load import environment_factory, load_environment
from noria.actors.pool import ActorPool
from noria.clock import VirtualClock
from noria.config import AlgorithmConfig, DeadlinesConfig, EnvironmentConfig, RunConfig
from noria.envs.builtin import BUILTIN
from noria.errors import ConfigError, DeadlineExceededError, EnvironmentFailedError, StageStoppedError
from noria.observe import SpanRecorder
from noria.types import Task

USER_FILE = """
import dataclasses
from noria.protocols import Step

@dataclasses.dataclass
class Countdown:
    start: int = 3
    num_tasks = 16

    def reset(self, task):
        return f"{self.start} {task.index}"

    def step(self, action):
        return Step(1.0)

class NeedsMore:
    num_tasks = 4
    def __init__(self, path, *, depth):
        pass
    def reset(self, task): return "x"
    def step(self, action): return Step(0.0)

class Explodes(Countdown):
    def __init__(self):
        raise ValueError("no licence")

class NoStep:
    num_tasks = 4
    def reset(self, task): return "x"

class NoCount(NoStep):
    num_tasks = None
    def step(self, action): return Step(0.0)

class Empty(Countdown):
    num_tasks = 0
"""


@pytest.fixture
def load(tmp_path):
    (tmp_path / "my_env.py").write_text(USER_FILE)
    return lambda name, **settings: load_environment(EnvironmentConfig(name=name, settings=settings), builtin=BUILTIN, folder=tmp_path)


def test_a_built_in_environment_is_found_by_name(load):
    factory = load("addition", largest_a=5, num_tasks=7)
    assert (factory.num_tasks, factory.num_held_out) == (7, 1024)
    assert factory().reset(Task(0, 0)).endswith("=")
    assert factory() is not factory()


def test_a_class_in_a_file_is_an_environment_and_its_last_tasks_are_held_out(load):
    factory = load("my_env.py:Countdown", start=9)
    assert factory().reset(Task(1, 0)) == "9 1"
    assert (factory.num_tasks, factory.num_held_out) == (14, 2)
    assert [task.index for task in held_out_tasks(factory, 10)] == [14, 15]


def test_a_class_can_be_given_itself():
    factory = environment_factory(BUILTIN["largest"], {}, name="largest")
    assert factory.num_tasks == BUILTIN["largest"].num_tasks


@pytest.mark.parametrize(
    ("name", "settings", "error", "message"),
    [
        ("additoin", {}, EnvironmentFailedError, "no built-in environment 'additoin'; did you mean 'addition'"),
        ("zzz", {}, EnvironmentFailedError, r'known: addition, calculator, doubling, .*"file\.py:Class"'),
        ("nowhere.py:X", {}, EnvironmentFailedError, r"no file .*nowhere\.py"),
        ("my_env.py:CountDown", {}, EnvironmentFailedError, "no class 'CountDown'; did you mean 'Countdown'"),
        ("my_env.py:Countdown", {"strat": 3}, ConfigError, "no setting 'strat'; did you mean 'start'"),
        ("my_env.py:NeedsMore", {"path": "x"}, ConfigError, "needs depth"),
        ("addition", {"largest_aa": 3}, ConfigError, "did you mean 'largest_a'"),
        ("my_env.py:Explodes", {}, EnvironmentFailedError, "building it raised ValueError: no licence"),
        ("my_env.py:NoStep", {}, EnvironmentFailedError, "no method step"),
        ("my_env.py:NoCount", {}, EnvironmentFailedError, "num_tasks = None"),
        ("my_env.py:Empty", {}, EnvironmentFailedError, "at least 1"),
        ("addition", {"num_tasks": -1}, EnvironmentFailedError, "num_tasks = -1"),
    ],
)
def test_what_is_wrong_is_said_with_the_nearest_right_thing(load, name, settings, error, message):
    with pytest.raises(error, match=message):
        load(name, **settings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import not_there", "ModuleNotFoundError"),
        ("def f(:", "SyntaxError"),
        ("exit(3)", "SystemExit"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ],
)
def test_a_file_that_cannot_be_imported_is_a_named_failure(tmp_path, load, text, message):
    (tmp_path / "broken.py").write_text(text)
    with pytest.raises(EnvironmentFailedError, match=f"importing it raised {message}"):
        load("broken.py:X")


def test_a_file_that_is_not_python_is_refused(tmp_path, load):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(EnvironmentFailedError, match="not a Python file"):
        load("notes.txt:X")


class Spoils:
    """num_tasks is code, and fails."""

    def reset(self, task): ...
    def step(self, action): ...

    @property
    def num_tasks(self):
        raise ZeroDivisionError


def test_a_class_whose_attributes_fail_is_a_named_failure():
    with pytest.raises(EnvironmentFailedError, match="'spoils': building it raised ZeroDivisionError"):
        environment_factory(Spoils, {}, name="spoils")


def run_config(name="run", environment="my_env.py:Countdown", **settings):
    return RunConfig(
        name=name,
        environment=EnvironmentConfig(name=environment, settings=settings),
        algorithm=AlgorithmConfig(steps=1),
        deadlines=DeadlinesConfig(reset_s=25),
    )


def pool_for(clock):
    return ActorPool(ScriptedSampler(clock), Letters(), clock, SpanRecorder(clock))


def test_a_pool_loads_an_environment_in_another_thread_and_its_errors_stay_as_they_are(tmp_path, load):
    clock = VirtualClock()
    pool = pool_for(clock)
    (tmp_path / "where.py").write_text(USER_FILE + "\nimport threading\nclass Where(Countdown):\n    start: int = threading.get_ident()\n")

    async def main():
        found = await pool.load(run_config(environment="where.py:Where"), builtin={}, folder=tmp_path)
        assert found().start != threading.get_ident()
        with pytest.raises(ConfigError, match="did you mean 'start'"):
            await pool.load(run_config(strat=3), builtin={}, folder=tmp_path)
        with pytest.raises(EnvironmentFailedError, match="no licence"):
            await pool.load(run_config(environment="my_env.py:Explodes"), builtin={}, folder=tmp_path)
        await pool.close()
        with pytest.raises(StageStoppedError):
            await pool.load(run_config(), builtin={}, folder=tmp_path)

    clock.run(main())


@pytest.mark.parametrize("where", ["import", "init"])
def test_an_environment_that_hangs_while_it_loads_meets_its_deadline_and_delays_nobody(tmp_path, load, monkeypatch, where):
    gate = threading.Event()
    monkeypatch.setattr(builtins, "gate", gate, raising=False)  # how the file below gets at it
    hang = "gate.wait()" if where == "import" else "class Slow(Countdown):\n    def __init__(self): gate.wait()"
    (tmp_path / "slow.py").write_text(f"{USER_FILE}\n{hang}\n")
    clock = VirtualClock(patience_s=0.3)
    pool = pool_for(clock)

    async def main():
        with pytest.raises(DeadlineExceededError, match=r"waited 25 s for environment 'slow.py:Slow' to load"):
            await pool.load(run_config("bad", "slow.py:Slow"), builtin={}, folder=tmp_path)
        assert pool.counts().num_hung == 1
        slow = asyncio.ensure_future(pool.load(run_config("bad", "slow.py:Slow"), builtin={}, folder=tmp_path))
        good = await pool.load(run_config("good"), builtin={}, folder=tmp_path)
        assert not slow.done()
        assert good().reset(Task(1, 0)) == "3 1"
        slow.cancel()
        await asyncio.wait({slow})
        await pool.close()

    clock.run(main())
    gate.set()


def test_a_file_may_be_loaded_by_several_threads_at_once(tmp_path, load):
    (tmp_path / "broken.py").write_text("import dataclasses\n@dataclasses.dataclass\nclass X:\n    a: 'int' = 1\nraise ValueError\n")

    def try_both(_):
        with pytest.raises(EnvironmentFailedError, match="ValueError"):
            load("broken.py:X")
        return load("my_env.py:Countdown").num_tasks

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(try_both, range(40))) == [14] * 40
