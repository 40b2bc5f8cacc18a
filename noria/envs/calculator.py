"""Arithmetic too hard to do in the head, and a calculator to do it with: the multi-turn tool environment.

    question ──▶ calls of the calculator ──▶ their results ──▶ more calls, or ──▶ "answer: 4182"

It speaks in messages, so it needs a base with a chat template. Its reward has three named components, which a run file may weigh:

    correct   the last number that the policy said is the answer
    called    at least one call gave a number: the tool is worth learning before the answers are
    format    the last line is "answer: NUMBER"; a half if it speaks of the answer and has a number, a quarter for a number anywhere
"""

import random
import re
from typing import final

from noria.envs.arithmetic_expression import ExpressionError, evaluate
from noria.envs.problems import problem_of
from noria.envs.settings import Settings
from noria.protocols import Step
from noria.types import Message, Prompt, Task, ToolCall, ToolSpec

TOOL = ToolSpec(
    name="calculator",
    description="Evaluates an arithmetic expression and returns the number.",
    parameters={
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "numbers, + - * / // % ** and parentheses, for example (12 + 5) * 3"}},
        "required": ["expression"],
    },
)

QUESTIONS = (
    ("What is {a} * {b} + {c}?", "{a} * {b} + {c}"),
    ("What is {a} * ({b} - {c})?", "{a} * ({b} - {c})"),
    ("A hall has {a} rows of {b} seats, and {c} people stand. How many people fit in?", "{a} * {b} + {c}"),
    ("A farm fills {a} crates with {b} apples each and sells {c} of the apples. How many apples are left?", "{a} * {b} - {c}"),
    ("{a} ships carry {b} containers each, and {c} trucks carry {a} each. How many containers are that?", "{a} * {b} + {c} * {a}"),
)
"""A question, and the expression that answers it."""


@final
class Calculator(Settings):
    """Satisfies `protocols.Environment`; an object serves one episode. Public class attributes are settings."""

    num_tasks: int = 4096
    """Training tasks: indices [0, num_tasks)."""
    num_held_out: int = 1024
    """Held-out tasks: indices [num_tasks, num_tasks + num_held_out)."""
    instructions: str = 'Use the calculator for every calculation. End with a line that says "answer: " and the number.'
    """The system message; empty for none."""
    smallest: int = 100
    largest: int = 999
    """Of the numbers in the questions."""
    max_calls: int = 4
    """Turns with calls; after so many the episode is over."""
    _num_calls = 0
    _has_called = False
    _answer = ""

    def problem(self, rng: random.Random) -> tuple[str, str]:
        """A question about three numbers, and its answer."""
        question, expression = rng.choice(QUESTIONS)
        numbers = {name: rng.randint(self.smallest, self.largest) for name in "abc"}
        return question.format(**numbers), evaluate(expression.format(**numbers))

    def reset(self, task: Task) -> Prompt:
        """The task's question, with the calculator at hand. Raises EnvironmentFailedError if the settings leave too few questions."""
        question, self._answer = problem_of(task, self.problem, num_tasks=self.num_tasks, name=type(self).__name__)
        system = (Message("system", self.instructions),) if self.instructions else ()
        return Prompt((*system, Message("user", question)), (TOOL,))

    def step(self, action: Message) -> Step:
        """The results of the calls, one message each; without calls, or after too many, the reward."""
        results = [_answer_call(call) for call in action.tool_calls]
        is_first = not self._has_called and any(is_valid for is_valid, _ in results)
        self._has_called = self._has_called or is_first
        self._num_calls += bool(results)
        parts = {"called": float(is_first)}
        if results and self._num_calls < self.max_calls:
            return Step(0.0, done=False, observation=tuple(message for _, message in results), reward_parts=parts)
        correct, form = judge(action.content, self._answer)
        return Step(correct, reward_parts={**parts, "correct": correct, "format": form})


def judge(text: str, answer: str) -> tuple[float, float]:
    """1 if the last number of the text is the answer; and 1 if its last line has the form that was asked for, a half if that line speaks of the
    answer and has a number, a quarter if the text has a number at all.
    """
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
    last_line = text.strip().rsplit("\n", 1)[-1]
    if re.fullmatch(r"answer: -?[\d,]+(\.\d+)?", last_line.strip()):
        form = 1.0
    else:
        form = 0.5 if re.search(r"answer.*\d", last_line, re.IGNORECASE) else 0.25 * bool(numbers)
    return float(numbers[-1:] == [answer]), form


def _answer_call(call: ToolCall) -> tuple[bool, Message]:
    """Whether the call is valid, and what the policy gets for it: a number, or what was wrong."""
    expression = call.arguments.get("expression")
    if call.name != TOOL.name:
        return False, Message("tool", f"error: there is no tool {call.name!r}; there is {TOOL.name!r}", call_id=call.call_id)
    if not isinstance(expression, str):
        return False, Message("tool", "error: the calculator needs an expression, a string", call_id=call.call_id)
    try:
        return True, Message("tool", evaluate(expression), call_id=call.call_id)
    except ExpressionError as error:
        return False, Message("tool", f"error: {error}", call_id=call.call_id)
