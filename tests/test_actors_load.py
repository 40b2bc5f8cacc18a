"""From a name in a run file to an environment, and every way in which that fails by name."""

import pytest

from noria.actors.evaluation import held_out_tasks
from noria.actors.load import environment_factory, load_environment
from noria.config import EnvironmentConfig
from noria.envs.builtin import BUILTIN
from noria.errors import ConfigError, EnvironmentFailedError
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
        ("zzz", {}, EnvironmentFailedError, r'known: addition, doubling, .*"file\.py:Class"'),
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


@pytest.mark.parametrize(("text", "message"), [("import not_there", "ModuleNotFoundError"), ("def f(:", "SyntaxError"), ("exit(3)", "SystemExit")])
def test_a_file_that_cannot_be_imported_is_a_named_failure(tmp_path, load, text, message):
    (tmp_path / "broken.py").write_text(text)
    with pytest.raises(EnvironmentFailedError, match=f"importing it raised {message}"):
        load("broken.py:X")


def test_a_file_that_is_not_python_is_refused(tmp_path, load):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(EnvironmentFailedError, match="not a Python file"):
        load("notes.txt:X")
