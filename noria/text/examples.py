"""Files of training examples: JSON lines in, token ids and which of them train out. Every bad line is an error that names file and line.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}], "tools": [...], "weight": 1.0}
    {"prompt": "...", "completion": "...", "weight": 1.0}

The first form goes through the base's chat template: what the assistants say and the token that ends their turn train. Messages and tools have the
form of OpenAI's chat API; a key that no template could show is refused. The second is plain text: the completion and the end-of-text token train.
`tools` and `weight` may be left out or null. An example of weight 0 trains nothing, one of a negative weight is made less likely: what the loss is
multiplied by (rl/supervised.py). Blank lines are passed over. Deliberately not here: which examples make a batch (rl/supervised.py).
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import numpy as np

from noria.errors import ChatTemplateError, DatasetError, InvalidRequestError
from noria.plain_json import parse_json
from noria.protocols import Tokenizer
from noria.text.chat import ChatFormat
from noria.types import Example, Ids, Message, Role, ToolCall, ToolSpec

T = TypeVar("T")

TooLong: TypeAlias = Literal["error", "skip", "truncate"]

_SMALLEST, _LARGEST = (float(bound) for bound in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))


@dataclass(frozen=True, slots=True)
class ExampleFile:
    """The examples of a file in the order of its lines, and how many were too long and so skipped or truncated. sha256: of the file, hexadecimal."""

    examples: tuple[Example, ...] = field(repr=False)
    num_skipped: int = 0
    num_truncated: int = 0
    sha256: str = ""


def read_examples(path: Path, tokenizer: Tokenizer, chat: ChatFormat | None, *, max_positions: int, too_long: TooLong) -> ExampleFile:
    """All examples of a file.

    chat: the base's template, if it has one. max_positions: what a path may take in the learner; an example takes one position for each of its ids
    but the last. too_long: what becomes of a longer one; "truncate" keeps its head, and skips it if nothing of that trains.

    Raises DatasetError: no such file, not UTF-8, no usable example; of a line: not JSON, unknown or missing keys, wrong types, text that the
    tokenizer or the template refuses, nothing that trains, or too long.
    """
    assert max_positions >= 1
    examples: list[Example] = []
    num_skipped = num_truncated = 0
    content = _content(path)
    for number, line in enumerate(_lines(content, path), 1):
        if not line.strip():
            continue
        try:
            example = _example(line, tokenizer, chat)
            fitted = _fitted(example, max_positions, too_long)
        except (ValueError, ChatTemplateError, InvalidRequestError) as error:
            raise DatasetError(f"{path}, line {number}: {error}") from error
        if fitted is None:
            num_skipped += 1
            continue
        num_truncated += fitted is not example
        examples.append(fitted)
    if not examples:
        raise DatasetError(f"{path} holds no example" + (f" of at most {max_positions} positions; {num_skipped} are longer" if num_skipped else ""))
    if not any(example.weight for example in examples):
        raise DatasetError(f"{path}: all {len(examples)} examples have the weight 0; nothing would train")
    return ExampleFile(tuple(examples), num_skipped, num_truncated, hashlib.sha256(content).hexdigest())


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DatasetError(f"cannot read {path}: {error.strerror or error}") from error


def _lines(content: bytes, path: Path) -> list[str]:
    try:
        return content.decode("utf-8-sig").split("\n")  # and not splitlines: JSON strings may hold U+2028
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path} is not UTF-8: {error}") from error


def _fitted(example: Example, max_positions: int, too_long: TooLong) -> Example | None:
    """The example if it fits; else what `too_long` makes of it, None to skip it. Raises ValueError."""
    needed = len(example.ids_T) - 1
    if needed <= max_positions:
        return example
    if too_long == "error":
        raise ValueError(
            f"the example needs {needed} positions, the learner's largest microbatch has {max_positions}: shorten it, raise learner.max_positions, "
            'or set supervised.too_long to "skip" or "truncate"'
        )
    kept = Example(example.ids_T[: max_positions + 1], example.is_trained_T[: max_positions + 1], example.weight)
    return kept if too_long == "truncate" and kept.is_trained_T.any() else None


def _example(line: str, tokenizer: Tokenizer, chat: ChatFormat | None) -> Example:
    """The example of one line. Raises ValueError (JSON's too), ChatTemplateError, InvalidRequestError."""
    data = _typed(parse_json(line), dict, "the line", "an object")
    data = {key: value for key, value in data.items() if value is not None or key not in ("tools", "weight")}
    if "messages" in data:
        _only_keys(data, "messages", "tools", "weight")
        ids, is_trained = _chat_ids(data, chat)
    else:
        _only_keys(data, "prompt", "completion", "weight")
        ids, is_trained = _plain_ids(_text(data, "prompt"), _text(data, "completion"), tokenizer)
    if is_trained[:1] == (True,):
        raise ValueError("nothing precedes the first trained token: give the example a prompt")
    if not any(is_trained):
        raise ValueError("nothing of the example would train: it needs a completion, or a message of the assistant")
    return Example(np.array(ids, np.int32), np.array(is_trained, np.bool_), _weight(data.get("weight", 1.0)))


def _weight(value: Any) -> float:
    """A number that is finite, and not 0 unless it says so, as the learner's float32."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"weight must be a finite number (got {_short(value)})")
    if abs(value) > _LARGEST or 0 < abs(value) < _SMALLEST:
        raise ValueError(f"weight must be 0 or between {_SMALLEST:.3g} and {_LARGEST:.3g}, either sign, for 32-bit training (got {_short(value)})")
    return float(value)


def _plain_ids(prompt: str, completion: str, tokenizer: Tokenizer) -> tuple[Ids, tuple[bool, ...]]:
    """Prompt and completion are encoded apart, as when the completion is sampled: the border between them is a border of tokens."""
    head, tail = tokenizer.encode(prompt), tokenizer.encode(completion)
    if tokenizer.bos_id is not None and head[:1] != (tokenizer.bos_id,):
        head = (tokenizer.bos_id, *head)
    if not tail:
        raise ValueError("the completion is empty")
    if tail[-1] not in tokenizer.end_ids:
        tail = (*tail, tokenizer.eos_id)
    return head + tail, (False,) * len(head) + (True,) * len(tail)


def _chat_ids(data: Mapping[str, Any], chat: ChatFormat | None) -> tuple[Ids, tuple[bool, ...]]:
    if chat is None:
        raise ValueError("the base has no chat template: give {prompt, completion} instead of messages, or use a base that has one")
    messages = _each(data["messages"], _message, "messages")
    tools = _each(data.get("tools", []), _tool, "tools")
    if not messages:
        raise ValueError("messages is empty")
    _check_names(data["messages"], messages)
    return chat.encode_example(messages, tools)


def _check_names(data: Sequence[Mapping[str, Any]], messages: Sequence[Message]) -> None:
    """A message's name can only say once more which tool it is from. Raises ValueError for any other: no template would show it."""
    called = {call.call_id: call.name for message in messages for call in message.tool_calls if call.call_id}
    for number, (fields, message) in enumerate(zip(data, messages, strict=True)):
        name = fields.get("name")
        if name is not None and (message.role != "tool" or called.get(message.call_id) != name):
            raise ValueError(
                f"messages[{number}]: name {_short(name)} would be lost: only a tool's message may have one, that of the call of its tool_call_id"
            )


def _message(data: Mapping[str, Any]) -> Message:
    """A key that is null is left out: tables of messages have them."""
    data = {key: value for key, value in data.items() if value is not None}
    _only_keys(data, "role", "content", "tool_calls", "tool_call_id", "reasoning_content", "name")
    role: Any = data.get("role")
    if role not in get_args(Role):
        raise ValueError(f"role must be one of {', '.join(get_args(Role))} (got {_short(role)})")
    for key, owner in {"tool_calls": "assistant", "reasoning_content": "assistant", "tool_call_id": "tool"}.items():
        if data.get(key) and role != owner:
            raise ValueError(f"{key} is for messages of role {owner} (got it of {role})")
    calls = data.get("tool_calls", [])
    content = data.get("content")
    return Message(
        role=role,
        content="" if content is None and calls else _typed(content, str, "content", "a text"),
        tool_calls=_each(calls, _tool_call, "tool_calls"),
        call_id=_typed(data.get("tool_call_id", ""), str, "tool_call_id", "a text"),
        reasoning=_typed(data.get("reasoning_content", ""), str, "reasoning_content", "a text"),
    )


def _tool_call(data: Mapping[str, Any]) -> ToolCall:
    function = _function(data, "id", known=("name", "arguments"))
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):  # as OpenAI's API has them
        arguments = parse_json(arguments)
    return ToolCall(_text(function, "name"), _typed(arguments, dict, "arguments", "an object"), _typed(data.get("id", ""), str, "id", "a text"))


def _tool(data: Mapping[str, Any]) -> ToolSpec:
    function = _function(data, known=("name", "description", "parameters"))
    description = _typed(function.get("description", ""), str, "description", "a text")
    return ToolSpec(_text(function, "name"), description, _typed(function.get("parameters", {}), dict, "parameters", "an object"))


def _function(data: Mapping[str, Any], *beside: str, known: Sequence[str]) -> Mapping[str, Any]:
    """The function of a tool or call, as OpenAI's API has it or without the frame around it. Raises ValueError for keys that would be lost."""
    if data.get("type", "function") != "function":
        raise ValueError(f"type must be 'function' (got {_short(data['type'])})")
    if "function" not in data:
        _only_keys(data, "type", *beside, *known)
        return data
    _only_keys(data, "type", "function", *beside)
    function = _typed(data["function"], dict, "function", "an object")
    _only_keys(function, *known)
    return function


def _each(values: Any, make: Callable[[Mapping[str, Any]], T], name: str) -> tuple[T, ...]:
    """What `make` makes of each object of a list; its errors say which."""
    made: list[T] = []
    for number, value in enumerate(_typed(values, list, name, "a list")):
        try:
            made.append(make(_typed(value, dict, "it", "an object")))
        except ValueError as error:
            raise ValueError(f"{name}[{number}]: {error}") from error
    return tuple(made)


def _only_keys(data: Mapping[str, Any], *known: str) -> None:
    if unknown := sorted(set(data) - set(known)):
        raise ValueError(f"unknown keys {', '.join(unknown)}; known: {', '.join(known)}")


def _text(data: Mapping[str, Any], key: str) -> str:
    if key not in data:
        raise ValueError(f"no {key!r} in it")
    return _typed(data[key], str, key, "a text")


def _typed(value: Any, kind: type[T], name: str, description: str) -> T:
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be {description} (got {_short(value)})")
    return value


def _short(value: Any, limit: int = 40) -> str:
    shown = repr(value)
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."
