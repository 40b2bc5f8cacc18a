"""What tenant code hands over, checked and copied into plain values: the one place that decides what an environment may return.

Runs where tenant code runs (see world.py), since reading a value may be tenant code too: a property, a `__float__`, an `__iter__`. An episode that
began with text speaks in text, one that began with a `Prompt` in messages; nothing is converted from one to the other.
"""

import json
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, get_args

import numpy as np

from noria.actors.calls import Calls
from noria.errors import EnvironmentOutputError, RewardNotFiniteError
from noria.plain_json import parse_json
from noria.protocols import Step
from noria.types import Message, Prompt, Role, ToolCall, ToolSpec

ROLES: tuple[str, ...] = get_args(Role)


def check_prompt(value: object, what: str, calls: Calls) -> str | Prompt:
    """The beginning of an episode: text that is not empty, or a prompt of at least one message. calls: of the episode, none yet.

    Raises EnvironmentOutputError.
    """
    if not isinstance(value, Prompt):
        return check_text(value, what, may_be_empty=False, expected="text, or a noria.types.Prompt")
    messages = _items(value.messages, f"{what} a Prompt whose messages are")
    if not messages:
        raise EnvironmentOutputError(f"{what} a Prompt without messages; it needs at least one")
    tools = _items(value.tools, f"{what} a Prompt whose tools are")
    said = calls.follow([_message(m, f"{what} a Prompt with") for m in messages], f"{what} a Prompt with")
    return Prompt(said, tuple(_tool(t, f"{what} a Prompt with") for t in tools))


def check_step(value: object, *, calls: Calls | None) -> Step:
    """A step with plain numbers, and an observation of the episode's kind: a `str`, or a tuple of messages.

    calls: of an episode that speaks in messages, None of one that speaks in text.

    Raises RewardNotFiniteError, EnvironmentOutputError.
    """
    if not isinstance(value, Step):
        raise EnvironmentOutputError(f"the environment's step returned {_show(value)}; it must be a noria.protocols.Step")
    if not isinstance(value.done, bool | np.bool_):
        raise EnvironmentOutputError(f"the environment's step returned done={_show(value.done)}; it must be True or False")
    is_done = bool(value.done)
    observation = None if is_done else _observation(value.observation, calls)
    if not isinstance(value.reward_parts, Mapping):
        raise EnvironmentOutputError(f"the environment's step returned reward_parts={_show(value.reward_parts)}; it must be a dict")
    parts = dict(_reward_part(name, part) for name, part in value.reward_parts.items())
    return Step(check_reward(value.reward, "the reward"), is_done, observation, parts)


def check_text(value: object, what: str, *, may_be_empty: bool, expected: str = "text") -> str:
    """`value` as a plain `str`. Raises EnvironmentOutputError, which begins with `what`, for anything else."""
    if not isinstance(value, str):
        raise EnvironmentOutputError(f"{what} {_show(value)}; it must be {expected}")
    if not value and not may_be_empty:
        raise EnvironmentOutputError(f"{what} an empty text; the policy needs at least one token to go on from")
    return str.__str__(value)


def check_reward(value: object, what: str) -> float:
    """`value` as a float. Raises RewardNotFiniteError for NaN and infinities, EnvironmentOutputError for what is no number."""
    if not isinstance(value, Real):
        raise EnvironmentOutputError(f"{what} is {_show(value)}; it must be a number")
    shown = ""
    try:
        number = float(value)
    except OverflowError:
        number, shown = math.inf, f", a {type(value).__name__} beyond the largest float"
    if not math.isfinite(number):
        raise RewardNotFiniteError(f"{what} is {number}{shown}; it must be finite. The episode fails; it is not counted as 0")
    return number


def _reward_part(name: object, part: object) -> tuple[str, float]:
    if not isinstance(name, str):
        raise EnvironmentOutputError(f"the environment's step returned reward_parts with the name {_show(name)}; names must be text")
    name = str.__str__(name)
    return name, check_reward(part, f"reward part {name!r}")


def _observation(value: object, calls: Calls | None) -> str | tuple[Message, ...]:
    what = "the environment's step is not done, and its observation is"
    if calls is None:
        hint = "text: the episode began with text. Begin it with a noria.types.Prompt to speak in messages"
        return check_text(value, what, may_be_empty=True, expected=hint)
    if isinstance(value, str) or not isinstance(value, Message | Sequence):
        raise EnvironmentOutputError(f"{what} {_show(value)}; it must be a Message, or several: the episode began with a Prompt")
    messages = tuple(_message(m, f"{what} or holds") for m in ((value,) if isinstance(value, Message) else value))
    if not messages:
        raise EnvironmentOutputError(f"{what} an empty sequence; the policy needs at least one message to go on from")
    if any(message.role == "assistant" for message in messages):
        raise EnvironmentOutputError(f"{what} or holds a message of the assistant; only the policy speaks for the assistant")
    return calls.follow(messages, f"{what} or holds")


def _message(value: object, what: str) -> Message:
    if not isinstance(value, Message):
        raise EnvironmentOutputError(f"{what} {_show(value)}; it must be a noria.types.Message")
    if value.role not in ROLES:
        raise EnvironmentOutputError(f"{what} a message of role {_show(value.role)}; known roles: {', '.join(ROLES)}")
    calls = _items(value.tool_calls, f"{what} a message whose tool_calls are")
    return Message(
        role=value.role,
        content=_text(value.content, f"{what} a message whose content is"),
        tool_calls=tuple(_tool_call(call, what) for call in calls),
        call_id=_text(value.call_id, f"{what} a message whose call_id is"),
        reasoning=_text(value.reasoning, f"{what} a message whose reasoning is"),
    )


def _tool_call(value: object, what: str) -> ToolCall:
    if not isinstance(value, ToolCall):
        raise EnvironmentOutputError(f"{what} a message with the tool call {_show(value)}; it must be a noria.types.ToolCall")
    name = _text(value.name, f"{what} a tool call whose name is")
    return ToolCall(name, _json_object(value.arguments, f"{what} a tool call whose arguments are"), _text(value.call_id, f"{what} a call_id that is"))


def _tool(value: object, what: str) -> ToolSpec:
    if not isinstance(value, ToolSpec):
        raise EnvironmentOutputError(f"{what} the tool {_show(value)}; it must be a noria.types.ToolSpec")
    name, description = _text(value.name, f"{what} a tool whose name is"), _text(value.description, f"{what} a tool whose description is")
    return ToolSpec(name, description, _json_object(value.parameters, f"{what} a tool whose parameters are"))


def _text(value: object, what: str) -> str:
    return check_text(value, what, may_be_empty=True)


def _items(value: object, what: str) -> Sequence[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise EnvironmentOutputError(f"{what} {_show(value)}; it must be a tuple")
    return tuple(value)


def _json_object(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise EnvironmentOutputError(f"{what} {_show(value)}; it must be a dict")
    try:
        plain: dict[str, Any] = parse_json(json.dumps(dict(value), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvironmentOutputError(f"{what} {_show(value)}; it must hold plain JSON values: {error}") from error
    return plain


def _show(value: object) -> str:
    return f"{type(value).__name__} {str(value)[:80]!r}"
