"""The documentation is true: reference pages are what the code says, and every snippet runs."""

import importlib.util
import random
import re
import tomllib
from pathlib import Path

import pytest

from noria.actors.load import load_environment
from noria.config import EnvironmentConfig, RunConfig, load_toml
from noria.types import Message, Task, ToolCall

ROOT = Path(__file__).parents[1]


def reference():
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "scripts" / "make_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def snippets(page, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize(("page", "make"), [("run-file.md", "run_file_page"), ("errors.md", "errors_page"), ("cli.md", "cli_page")])
def test_reference_pages_are_what_the_code_says(page, make):
    want = getattr(reference(), make)()
    assert (ROOT / "docs" / page).read_text(encoding="utf-8") == want, "run `python scripts/make_reference.py`"
    assert "None |" not in want, "every field and every error is documented"


def test_the_readmes_run_file_and_environment_load_together(tmp_path):
    (python,), (toml,) = snippets("README.md", "python"), snippets("README.md", "toml")
    (tmp_path / "my_env.py").write_text(python, encoding="utf-8")
    (tmp_path / "minus.toml").write_text(toml, encoding="utf-8")
    config = load_toml(tmp_path / "minus.toml", RunConfig)
    environment = load_environment(config.environment, builtin={}, folder=tmp_path)()
    prompt = environment.reset(Task(3, 0))
    a, b = map(int, re.findall(r"\d+", prompt.splitlines()[-1]))
    assert environment.step(f" {a - b}").reward == 1.0
    assert environment.step(f" {a - b + 1}").reward == 0.0


def test_the_tutorials_environments_do_what_it_says(tmp_path):
    single, several, chat = snippets("docs/first-environment.md", "python")
    (tmp_path / "env.py").write_text(single + several + chat, encoding="utf-8")
    vowels = load_environment(EnvironmentConfig(name="env.py:Vowels"), builtin={}, folder=tmp_path)()
    word = vowels.reset(Task(0, 0)).rsplit(" ", 1)[1].rstrip(":")
    assert vowels.step(str(sum(letter in "aeiou" for letter in word))).reward == 1.0
    guess = load_environment(EnvironmentConfig(name="env.py:Guess"), builtin={}, folder=tmp_path)()
    assert "1 to 9" in guess.reset(Task(4, 0))
    first = guess.step(" 3")
    assert not first.done
    assert "higher" in first.observation
    assert guess.step(" 5").reward == 1.0
    capitals = load_environment(EnvironmentConfig(name="env.py:Capitals"), builtin={}, folder=tmp_path)()
    prompt = capitals.reset(Task(1, 0))
    assert (prompt.messages[0].content, prompt.tools[0].name) == ("What is the capital of Nepal?", "look_up")
    looked_up = capitals.step(Message("assistant", "", (ToolCall("look_up", {"country": "Nepal"}, "1"),)))
    assert (looked_up.done, looked_up.observation) == (False, [Message("tool", "Kathmandu", call_id="1")])
    last = capitals.step(Message("assistant", "Kathmandu."))
    (weights,) = snippets("docs/first-environment.md", "toml")
    assert last.reward_parts.keys() == tomllib.loads(weights)["environment"]["rewards"].keys()


def test_a_settings_free_problem_depends_on_its_generator_only(tmp_path):
    (python,) = snippets("README.md", "python")
    (tmp_path / "my_env.py").write_text(python, encoding="utf-8")
    make = load_environment(EnvironmentConfig(name="my_env.py:Minus"), builtin={}, folder=tmp_path)
    assert make().problem(random.Random(5)) == make().problem(random.Random(5))
