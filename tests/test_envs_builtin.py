"""Built-in environments: right answers, problems that are the same for the same task, and no held-out problem in training."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.envs.builtin import BUILTIN
from noria.envs.problems import is_held_out
from noria.envs.settings import settings_of
from noria.envs.single_turn import SingleTurn
from noria.envs.words import WORDS
from noria.errors import ConfigError, EnvironmentFailedError
from noria.types import Task

each_environment = pytest.mark.parametrize("name", sorted(name for name, kind in BUILTIN.items() if issubclass(kind, SingleTurn)))


def ask(name: str, index: int, seed: int = 0, **settings) -> tuple[str, SingleTurn]:
    environment = BUILTIN[name](**settings)
    return environment.reset(Task(index, seed)), environment


def expected(name: str, prompt: str) -> str:
    """The answer read off the prompt's last line, independently of `problem`."""
    question = prompt.rsplit("\n", 1)[1]
    values = [int(digits) for digits in re.findall(r"\d+", question)]
    if name == "first_letter":
        match = re.fullmatch(r"first letter of (\w)\w+ =", question)
        assert match is not None
        return match[1]
    return str({"addition": sum, "doubling": sum, "largest": max, "smallest": min}[name](values))


@each_environment
def test_the_right_answer_earns_one_and_a_wrong_one_nothing(name):
    for index in range(200):
        prompt, environment = ask(name, index)
        answer = expected(name, prompt)
        rewards = [environment.step(action).reward for action in (f" {answer}", answer, f"{answer}  \nand more", f"{answer}0", "", f"\n{answer}")]
        assert rewards == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


@each_environment
def test_the_examples_in_the_prompt_are_right(name):
    prompt, _ = ask(name, 0)
    for line in prompt.split("\n")[:-1]:
        cut = line.rfind("=") + 1
        assert expected(name, f"\n{line[:cut]}") == line[cut:].strip()


@each_environment
def test_the_same_task_is_the_same_problem_whatever_its_seed(name):
    assert [ask(name, i, 1)[0] for i in range(20)] == [ask(name, i, 2)[0] for i in range(20)]
    assert len({ask(name, i)[0] for i in range(50)}) > 20


@each_environment
def test_no_held_out_problem_is_ever_trained_on(name):
    kind = BUILTIN[name]
    training = {ask(name, i)[0] for i in range(kind.num_tasks)}
    held_out = {ask(name, kind.num_tasks + i)[0] for i in range(kind.num_held_out)}
    assert not training & held_out
    assert len(held_out) >= 15


@each_environment
def test_prompts_are_short(name):
    assert max(len(ask(name, i)[0]) for i in range(100)) < 110


def test_held_out_problems_follow_the_same_distribution():
    kind = BUILTIN["addition"]

    def mean_sum(first: int) -> float:
        return sum(int(expected("addition", ask("addition", first + i)[0])) for i in range(1000)) / 1000

    assert abs(mean_sum(0) - mean_sum(kind.num_tasks)) < 4


def test_one_prompt_in_eight_is_held_out():
    assert 1150 < sum(is_held_out(f"problem {i}") for i in range(10_000)) < 1350


def test_the_words_are_many_lower_case_and_different():
    assert len(set(WORDS)) == len(WORDS) >= 400
    assert all(re.fullmatch("[a-z]+", word) for word in WORDS)
    assert {word[0] for word in WORDS} >= set("abcdefghijklmnoprstuvwyz")


@given(st.integers(1, 500))
def test_the_range_of_a_problem_is_a_setting(largest):
    prompt, _ = ask("doubling", 3, smallest=largest, largest=largest + 20)
    assert largest <= int(re.findall(r"\d+", prompt)[-1]) <= largest + 20


def test_the_few_shot_format_is_a_setting():
    prompt, environment = ask("addition", 0, examples="2 and 3: 5\n", question="{a} and {b}:")
    assert re.fullmatch(r"2 and 3: 5\n\d+ and \d+:", prompt)
    assert environment.step(expected("addition", prompt)).reward == 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"largest_of_a": 3}, "no setting 'largest_of_a'; did you mean 'largest_a'"),
        ({"zzz": 3}, "known: examples, largest_a, largest_b, num_held_out, num_tasks, question"),
        ({"largest_a": "3"}, r"largest_a: must be int, like its default 60 \(got '3'\)"),
        ({"problem": 3}, "no setting 'problem'"),
    ],
)
def test_wrong_settings_name_the_right_ones(settings, message):
    with pytest.raises(ConfigError, match=message):
        BUILTIN["addition"](**settings)


def test_toml_integers_and_lists_fit_floats_and_tuples():
    class Custom(SingleTurn):
        ratio: float = 0.5
        names: tuple = ("a",)

        def problem(self, rng: random.Random) -> tuple[str, str]:
            return f"{self.ratio} {self.names} {rng.random()}", ""

    assert settings_of(Custom).keys() == {"ratio", "names", "num_tasks", "num_held_out"}
    custom = Custom(ratio=2, names=["b"])
    assert (custom.ratio, type(custom.ratio), custom.names) == (2.0, float, ("b",))


def test_a_user_environment_takes_five_lines():
    class Parity(SingleTurn):
        def problem(self, rng):
            a = rng.randint(0, 999)
            return f"{a} is", ("even", "odd")[a % 2]

    environment = Parity()
    parity = int(environment.reset(Task(5, 0)).split()[0]) % 2
    assert environment.step(" odd").reward == parity


def test_too_few_problems_to_hold_any_out_is_an_error_and_not_a_leak():
    class Constant(SingleTurn):
        def problem(self, rng):
            return "always", "x"

    index = Constant.num_tasks if not is_held_out("always") else 0
    with pytest.raises(EnvironmentFailedError, match="more different prompts"):
        Constant().reset(Task(index, 0))
