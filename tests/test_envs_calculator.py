"""The calculator: arithmetic that cannot be abused, problems whose answers are right, and reward components that say what was earned."""

import random
import re
from contextlib import suppress
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.envs.arithmetic_expression import ExpressionError, evaluate
from noria.envs.calculator import QUESTIONS, TOOL, Calculator, judge
from noria.errors import ConfigError, EnvironmentFailedError
from noria.types import Message, Task, ToolCall


def call(expression, name=TOOL.name):
    return ToolCall(name, {"expression": expression}, "call-1")


def calling(*calls):
    return Message("assistant", "", calls)


def saying(content):
    return Message("assistant", content)


def started(index=0, **settings):
    environment = Calculator(**settings)
    return environment, environment.reset(Task(index, 0))


def answer_of(question):
    """Worked out from the numbers in the question, by Python."""
    for form, expression in QUESTIONS:
        pattern = re.escape(form)
        for name in "abc":
            slot = re.escape(f"{{{name}}}")
            pattern = pattern.replace(slot, f"(?P<{name}>[0-9]+)", 1).replace(slot, f"(?P={name})")
        if found := re.fullmatch(pattern, question):
            return str(eval(expression.format(**found.groupdict())))
    raise AssertionError(question)


# Arithmetic


@st.composite
def expressions(draw, depth=3):
    """A text, and its value as an exact fraction."""
    if depth == 0 or draw(st.booleans()):
        number = draw(st.integers(0, 999))
        return str(number), Fraction(number)
    (left, a), (right, b) = draw(expressions(depth - 1)), draw(expressions(depth - 1))
    sign = draw(st.sampled_from("+-*"))
    return f"({left} {sign} {right})", {"+": a + b, "-": a - b, "*": a * b}[sign]


@given(expressions())
def test_whole_numbers_are_exact(pair):
    text, value = pair
    if len(text) <= 200 and abs(value) < 2**200:
        assert evaluate(text) == str(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1/3", "0.3333333333"),
        ("7 // 2 + 7 % 2", "4"),
        ("2**10", "1024"),
        ("-2**2", "-4"),
        ("+5 - -5", "10"),
        (" 6 / 3 ", "2"),
        ("2 ** -1", "0.5"),
        ("1.5 * 4", "6"),
        ("9 ** 0.5", "3"),
        ("1 ** (9 ** 60)", "1"),
        ("2 ** 255 // 2 ** 254", "2"),
        ("(" * 99 + "1" + ")" * 99, "1"),
    ],
)
def test_values_are_told_as_a_calculator_would(text, value):
    assert evaluate(text) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("9**9**9**9", "too large"),
        ("(9**80) ** (9**80)", "too large"),
        ("10 ** 400 * 1.0", "too large"),
        ("2 ** 256", "too large"),
        ("9.0 ** 400", "too large"),
        ("1 / 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("(-8) ** 0.5", "not a real number"),
        ("1" * 201, "201 characters"),
        ("", "understood"),
        ("  ", "not an arithmetic expression"),
        ("1 +", "not an arithmetic expression"),
        ("1 2", "not an arithmetic expression"),
        ("1.2.3", "not an arithmetic expression"),
        ("()", "not an arithmetic expression"),
        ("__import__('os')", "understood"),
        ("x", "understood"),
        ("1e9", "understood"),
        ("1_000", "understood"),
        ("[1]", "understood"),
        ("1, 2", "understood"),
        ("\u0663 + 1", "understood"),
        ("1\x00", "understood"),
    ],
)
def test_what_has_no_value_says_why(text, message):
    with pytest.raises(ExpressionError, match=message):
        evaluate(text)


@given(st.text("0123456789+-*/%(). ", max_size=200))
def test_every_expression_has_a_short_value_or_none(text):
    with suppress(ExpressionError):
        assert len(evaluate(text)) < 120


# The environment


def test_answers_are_right_and_never_fit_in_the_head():
    for index in range(100):
        environment, prompt = started(index)
        question = prompt.messages[-1].content
        right = answer_of(question)
        assert environment.step(saying(f"answer: {right}")).reward_parts == {"called": 0.0, "correct": 1.0, "format": 1.0}
        assert len(right) >= 4 or right.startswith("-") or int(right) == 0 or "(" in question


def test_the_prompt_offers_the_tool_and_the_same_task_is_the_same_problem():
    _, prompt = started(5)
    assert prompt.tools == (TOOL,)
    assert [m.role for m in prompt.messages] == ["system", "user"]
    assert Calculator().reset(Task(5, 99)) == prompt
    assert [m.role for m in started(5, instructions="")[1].messages] == ["user"]
    assert len({started(i)[1].messages[-1].content for i in range(50)}) == 50


def test_no_held_out_question_is_ever_trained_on():
    training = {started(i)[1].messages[-1].content for i in range(Calculator.num_tasks)}
    held_out = {started(Calculator.num_tasks + i)[1].messages[-1].content for i in range(Calculator.num_held_out)}
    assert not training & held_out
    assert len(held_out) > 1000


def test_each_call_is_answered_by_its_own_message_and_the_conversation_goes_on():
    environment, _ = started()
    step = environment.step(calling(call("12 * 12"), call("1 / 0"), call("2", name="browser"), ToolCall(TOOL.name, {"expr": 1})))
    assert (step.done, step.reward, step.reward_parts) == (False, 0.0, {"called": 1.0})
    assert [(m.role, m.call_id) for m in step.observation] == [("tool", "call-1")] * 3 + [("tool", "")]
    assert step.observation[0].content == "144"
    assert all(m.content.startswith("error: ") for m in step.observation[1:])


def test_the_first_valid_call_is_paid_once():
    environment, prompt = started()
    turns = [calling(call("1 +")), calling(call("2 * 3")), calling(call("2 * 3")), saying(f"It is {answer_of(prompt.messages[-1].content)}.")]
    steps = [environment.step(turn) for turn in turns]
    assert [step.reward_parts["called"] for step in steps] == [0.0, 1.0, 0.0, 0.0]
    assert [step.done for step in steps] == [False, False, False, True]
    assert steps[-1].reward_parts == {"called": 0.0, "correct": 1.0, "format": 0.25}
    assert [step.reward for step in steps] == [0.0, 0.0, 0.0, 1.0]


def test_too_many_calls_end_the_episode_with_every_component_reported():
    environment, _ = started(max_calls=2)
    assert not environment.step(calling(call("1"))).done
    last = environment.step(calling(call("1")))
    assert last.done
    assert last.reward_parts == {"called": 0.0, "correct": 0.0, "format": 0.0}


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("answer: 42", (1, 1)),
        ("First 7, then\nanswer: 42\n", (1, 1)),
        ("answer: 1,042", (0, 1)),
        ("the answer is 42", (1, 0.5)),
        ("The Answer: about 41", (0, 0.5)),
        ("The answer is 42.\nGood luck!", (1, 0.25)),
        ("42 and then 43", (0, 0.25)),
        ("answer: 42!", (1, 0.5)),
        ("answer: forty", (0, 0)),
        ("", (0, 0)),
    ],
)
def test_the_last_number_counts_and_the_last_line_is_the_form(text, verdict):
    assert judge(text, "42") == verdict


def test_thousands_may_be_separated():
    assert judge("answer: 1,234,567", "1234567") == (1, 1)


def test_its_numbers_are_settings():
    for index in range(30):
        _, prompt = started(index, smallest=2, largest=9)
        assert all(2 <= int(n) <= 9 for n in re.findall("[0-9]+", prompt.messages[-1].content))
    with pytest.raises(ConfigError, match="no setting 'larges'; did you mean 'largest'"):
        Calculator(larges=3)
    with pytest.raises(EnvironmentFailedError, match=r"no held-out problem .* more different prompts"):
        started(Calculator.num_tasks, smallest=3, largest=3)


def test_a_problem_depends_on_its_generator_only():
    assert Calculator().problem(random.Random(4)) == Calculator().problem(random.Random(4))
