"""What a policy said, as a message: reasoning and tool calls parsed out of sampled text, in the formats that models are trained on.

    text ──▶ reasoning between <think> marks ──▶ tool calls in the template's format ──▶ what is left: content

Nothing here raises on a policy's text: what does not parse stays content. `FORMATS` holds the formats; a template's own text says which it is.
Deliberately not here: how messages become text, which is the template's work (`text/chat.py`); `write` serves templates that know no tool calls.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias, final

from noria.types import Message, ToolCall

THINK: Final = ("<think>", "</think>")
Parsed: TypeAlias = tuple[str, list[ToolCall]]
"""Content and calls; a call that the text gives no id has call_id ""."""

_MAX_DEPTH: Final = 32  # of nested arguments: deeper than any schema, far from the interpreter's limit


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A way to write tool calls. marks: texts that open or close calls and may be special tokens, which decoding would leave out.

    read: content and calls of a text, no calls if none parses. write: calls as text.
    """

    marks: tuple[str, ...]
    read: Callable[[str], Parsed]
    write: Callable[[Sequence[ToolCall]], str]


def format_of(template: str) -> str:
    """The name in `FORMATS` of the format that a chat template writes; "hermes" for one that shows none."""
    signs = {
        "hermes": ("<tool_call>",),
        "mistral": ("[TOOL_CALLS]",),
        "pythonic": ("<|tool_call_start|>", "<|python_start|>", "[func_name"),
        "llama": ("<|python_tag|>", '"parameters": '),
    }
    return next((name for name, texts in signs.items() if any(text in template for text in texts)), "hermes")


def parse_message(text: str, tool_format: ToolFormat, *, num_calls: int = 0, is_thinking: bool = False) -> Message:
    """The assistant's message of a sampled text. Never raises.

    num_calls: calls of the conversation so far; they number the ids of calls that have none ("call00000": nine letters or digits, which Mistral's
    templates insist on). is_thinking: the prompt ended inside an open <think>.
    """
    reasoning, said = _split_reasoning(text, is_thinking)
    content, calls = tool_format.read(said)
    named = tuple(
        call if call.call_id else ToolCall(call.name, call.arguments, f"call{number:05d}") for number, call in enumerate(calls, start=num_calls)
    )
    return Message("assistant", content, named, reasoning=reasoning)


def _split_reasoning(text: str, is_thinking: bool) -> tuple[str, str]:
    before, closing, after = text.partition(THINK[1])
    if not closing:
        return (text.strip(), "") if is_thinking and THINK[0] not in text else ("", text)
    outside, opening, inside = before.partition(THINK[0])
    if not opening:
        return (before.strip(), after.lstrip()) if is_thinking else ("", text)
    return inside.strip(), (outside + after).lstrip()


def _read_hermes(text: str) -> Parsed:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them anywhere; one that does not parse stays where it is."""
    kept, calls, place = [], [], 0
    while (start := text.find("<tool_call>", place)) >= 0:
        try:
            value, stop = _read_json(text, start + len("<tool_call>"))
            call, stop = _call_of(value), _skip(text, stop, "</tool_call>")
        except (ValueError, RecursionError):
            stop = start + len("<tool_call>")
            kept.append(text[place:stop])
        else:
            kept.append(text[place:start].rstrip())
            calls.append(call)
        place = stop
    kept.append(text[place:].lstrip() if calls else text[place:])
    return "".join(kept), calls


def _read_llama(text: str) -> Parsed:
    """`{"name": ..., "parameters": {...}}` and nothing else, or after <|python_tag|>; several are separated by `;` or white space."""
    content, tag, rest = text.partition("<|python_tag|>")
    body = rest if tag else text
    calls, place = [], 0
    try:
        while place < len(body.rstrip()):
            value, place = _read_json(body, place)
            calls.append(_call_of(value))
            place += len(body[place:]) - len(body[place:].lstrip("; \n\t\r"))
    except (ValueError, RecursionError):
        return text, []
    return (content.rstrip() if tag else "", calls) if calls else (text, [])


def _read_mistral(text: str) -> Parsed:
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}, "id": ...}, ...]` at the end."""
    content, tag, rest = text.partition("[TOOL_CALLS]")
    try:
        value, stop = _read_json(rest, 0)
        if not tag or not isinstance(value, list) or not value or rest[stop:].strip():
            return text, []
        return content.rstrip(), [_call_of(item) for item in value]
    except (ValueError, RecursionError):
        return text, []


def _read_pythonic(text: str) -> Parsed:
    """`[name(key=value, ...), ...]` of literals, alone or between marks."""
    content, tag, rest = text.partition("<|tool_call_start|>")
    if not tag:
        content, tag, rest = text.partition("<|python_start|>")
    body = re.sub(r"<\|(?:tool_call|python)_end\|>\s*\Z", "", rest) if tag else text
    try:
        return (content.rstrip() if tag else ""), _Literals(body).calls()
    except (ValueError, RecursionError):
        return text, []


def _read_json(text: str, place: int) -> tuple[Any, int]:
    """The JSON value that begins at or after `place`, and where it ends. Raises ValueError, RecursionError."""
    return _DECODER.raw_decode(text, _skip(text, place, ""))


def _skip(text: str, place: int, mark: str) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    if not text.startswith(mark, place):
        raise ValueError(f"{mark} is missing")
    return place + len(mark)


def _call_of(value: Any) -> ToolCall:
    """Raises ValueError if the value is no call of a named tool with arguments by name, which JSON and UTF-8 can carry."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        raise ValueError("no name")
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # as OpenAI's API carries them
        arguments = _DECODER.decode(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("arguments are not an object")
    call_id = value.get("id")
    json.dumps([name, arguments, call_id], ensure_ascii=False, allow_nan=False).encode()
    if _depth_of(arguments) > _MAX_DEPTH:
        raise ValueError("arguments are nested too deeply")
    return ToolCall(name, arguments, call_id if isinstance(call_id, str) else "")


def _depth_of(value: Any) -> int:
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth_of, inside), default=0)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER: Final = json.JSONDecoder(parse_constant=_no_constant)


@final
class _Literals:
    """Reads calls with literal arguments, and nothing else: no names, no operators. Python's own parser may exhaust the stack on a policy's text."""

    _TOKEN: Final = re.compile(
        r"""\s*(?:(?P<word>[A-Za-z_][\w.-]*)|(?P<number>-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)"""
        r"""|(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<mark>[][(){},:=]))""",
        re.DOTALL | re.ASCII,
    )
    _WORDS: Final = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}

    def __init__(self, text: str) -> None:
        self._text, self._place, self._depth = text.rstrip(), 0, 0
        self._kind, self._token = "", ""
        self._advance()

    def calls(self) -> list[ToolCall]:
        """Raises ValueError."""
        self._take("[")
        found = self._list("]", self._call)
        if self._kind or not found:
            raise ValueError("not a list of calls")
        return found

    def _call(self) -> ToolCall:
        name = self._word()
        self._take("(")
        return _call_of({"name": name, "arguments": self._named(self._list(")", self._argument))})

    def _argument(self) -> tuple[str, Any]:
        name = self._word()
        self._take("=")
        return name, self._value()

    def _entry(self) -> tuple[str, Any]:
        key = self._value()
        if not isinstance(key, str):
            raise ValueError("a key that is no text")
        self._take(":")
        return key, self._value()

    def _value(self) -> Any:
        kind, token = self._kind, self._token
        self._advance()
        if kind == "number":
            return float(token) if set(token) & set(".eE") else int(token)
        if kind == "text":
            return _unquoted(token)
        if kind == "word" and token in self._WORDS:
            return self._WORDS[token]
        if token == "[":
            return self._list("]", self._value)
        if token == "{":
            return self._named(self._list("}", self._entry))
        raise ValueError(f"{token!r} is no literal")

    def _list(self, closing: str, item: Callable[[], Any]) -> list[Any]:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ValueError("nested too deeply")
        items = []
        while self._token != closing:
            items.append(item())
            if self._token != closing:
                self._take(",")
        self._take(closing)
        self._depth -= 1
        return items

    @staticmethod
    def _named(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        named = dict(pairs)
        if len(named) != len(pairs):
            raise ValueError("a name is given twice")
        return named

    def _word(self) -> str:
        word = self._token
        if self._kind != "word":
            raise ValueError(f"{word!r} is no name")
        self._advance()
        return word

    def _take(self, mark: str) -> None:
        if self._kind != "mark" or self._token != mark:
            raise ValueError(f"{self._token!r} is not {mark!r}")
        self._advance()

    def _advance(self) -> None:
        if self._place == len(self._text):
            self._kind = self._token = ""
            return
        match = self._TOKEN.match(self._text, self._place)
        if match is None or match.lastgroup is None:
            raise ValueError(f"{self._text[self._place : self._place + 10]!r} begins no literal")
        self._kind, self._token, self._place = match.lastgroup, match[match.lastgroup], match.end()


def _unquoted(token: str) -> str:
    """The text that a quoted literal stands for, read as JSON's, with the quotes of Python."""
    inside = re.sub(r"\\'|\"|\\.", lambda m: {"\\'": "'", '"': '\\"'}.get(m[0], m[0]), token[1:-1], flags=re.DOTALL)
    text: str = json.loads(f'"{inside}"', strict=False)
    return text


def _write_hermes(calls: Sequence[ToolCall]) -> str:
    return "\n".join(f"<tool_call>\n{_json({'name': call.name, 'arguments': call.arguments})}\n</tool_call>" for call in calls)


def _write_llama(calls: Sequence[ToolCall]) -> str:
    return "; ".join(_json({"name": call.name, "parameters": call.arguments}) for call in calls)


def _write_mistral(calls: Sequence[ToolCall]) -> str:
    return "[TOOL_CALLS] " + _json([{"name": call.name, "arguments": call.arguments, "id": call.call_id} for call in calls])


def _write_pythonic(calls: Sequence[ToolCall]) -> str:
    written = (f"{call.name}({', '.join(f'{key}={_json(value)}' for key, value in call.arguments.items())})" for call in calls)
    return f"[{', '.join(written)}]"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


FORMATS: Final[Mapping[str, ToolFormat]] = {
    "hermes": ToolFormat(("<tool_call>", "</tool_call>"), _read_hermes, _write_hermes),
    "llama": ToolFormat(("<|python_tag|>",), _read_llama, _write_llama),
    "mistral": ToolFormat(("[TOOL_CALLS]",), _read_mistral, _write_mistral),
    "pythonic": ToolFormat(("<|tool_call_start|>", "<|tool_call_end|>", "<|python_start|>", "<|python_end|>"), _read_pythonic, _write_pythonic),
}
"""Hermes: Qwen, SmolLM and most fine-tunes. Llama: 3.1 and later. Mistral: before its version 11 tokenizer. Pythonic: Llama 4, LFM2 and others."""
