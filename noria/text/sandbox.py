"""Chat templates as programs that nobody trusts: jinja2's immutable sandbox with the names that transformers offers, and bounds on what they use.

A template ends: every turn of a loop, call of a macro and test of a filtered loop is counted (they are marked in the syntax tree), text and numbers
that it builds have a largest size, and so has its output. Times are those of `TODAY`, so that a prompt is the same every day.
Deliberately not here: what a chat is (`text/chat.py`). The bounds stop broken templates; memory is not measured.
"""

import json
from collections.abc import Mapping
from datetime import date
from typing import Any, Final, NoReturn, final

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from noria.errors import ChatTemplateError

TODAY: Final = date(2024, 7, 26)
"""What `strftime_now` formats: the date that Llama 3.1's template falls back to."""

MAX_CHARS: Final = 2**24
"""Of one render, and of any text that it builds: a thousand times a long chat."""

MAX_TURNS: Final = 10**5
"""Turns of loops and calls of macros in one render: a hundred for each message of a very long chat."""

_MAX_BITS: Final = 2**14  # of a product or power
_FAILURES: Final = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)


@final
class Template:
    """A compiled template. Immutable; usable from any thread.

    names: all that it reads or sets: those among `tools`, `bos_token`, ... that it knows of.
    Raises ChatTemplateError if it is not valid jinja2.
    """

    def __init__(self, source: str, name: str) -> None:
        """name: of the model, for messages."""
        self._name = name or "the model"
        try:
            environment = _Environment()
            self.names = frozenset(node.name for node in environment.parse(source).find_all(nodes.Name))
            self._template = environment.from_string(source)
        except _FAILURES as error:
            raise ChatTemplateError(f"the chat template of {self._name} is broken: {_tell(error)}") from error

    def render(self, **variables: Any) -> str:
        """The text. Raises ChatTemplateError with the template's own words if it refuses, fails, or passes a bound."""
        turns = _Turns()
        parts: list[str] = []
        try:
            size = 0
            for part in self._template.generate(variables, noria_turn=turns.count):
                size += len(part)
                _require(size <= MAX_CHARS, f"writes more than {MAX_CHARS} characters")
                parts.append(part)
        except _FAILURES as error:
            raise ChatTemplateError(f"the chat template of {self._name} failed: {_tell(error)}") from error
        return "".join(parts)


@final
class _Turns:
    """Counts one render's turns; owned by the thread that renders."""

    def __init__(self) -> None:
        self._count = 0

    def count(self) -> bool:
        """True, so that it can stand in a condition."""
        self._count += 1
        _require(self._count <= MAX_TURNS, f"takes more than {MAX_TURNS} turns")
        return True


def _bounded_join(*parts: Any) -> str:
    return _bounded_join_all([str(part) for part in parts])


def _bounded_join_all(parts: Any) -> str:
    texts = list(parts)
    _require(sum(map(len, texts)) <= MAX_CHARS, f"builds a text of more than {MAX_CHARS} characters")
    return "".join(texts)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "**", "+"))
    concat = staticmethod(_bounded_join_all)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        self.filters["tojson"] = _tojson
        self.globals = {
            "range": self.globals["range"],
            "dict": lambda *args, **fields: dict(*args, **fields),
            "namespace": _PublicNamespace,
            "joiner": self.globals["joiner"],
            "cycler": self.globals["cycler"],
            "raise_exception": _refuse,
            "strftime_now": TODAY.strftime,
            "noria_join": _bounded_join,
        }

    def _generate(self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False) -> str:
        return super()._generate(_Bounds().visit(source), name, filename, defer_init)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _require(_size_bits(operator, left, right) <= _limit_bits(left, right), f"computes too large a value with {operator!r}")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        is_sized = any(isinstance(value, int) and abs(value) > MAX_CHARS for value in (*args, *kwargs.values()))
        _require(not is_sized or not isinstance(getattr(__obj, "__self__", None), str), "asks for too long a text")
        return super().call(__context, __obj, *args, **kwargs)


class _Generation(Extension):
    """`{% generation %}` marks what an assistant says in templates made for training: its body is rendered as if the marks were not there."""

    tags = {"generation"}  # noqa: RUF012  (as jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PublicNamespace(Namespace):
    """Takes no name that begins with an underscore: the way to Python's insides."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        for name in dict(*args[1:], **kwargs):
            _require_public(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)


class _Bounds(NodeTransformer):
    """Counts turns in loops and macros, and bounds `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        if node.test is None:
            node.body.insert(0, nodes.ExprStmt(_call("noria_turn"), lineno=node.lineno))
        else:
            node.test = nodes.And(_call("noria_turn"), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("noria_turn"), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("noria_join", *node.nodes)


def _call(name: str, *args: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load"), list(args), [], None, None)


def _size_bits(operator: str, left: Any, right: Any) -> int:
    """Upper bound of the result's size: bits of a number, elements of a text or list; 0 where it cannot be large."""
    sizes = [len(value) for value in (left, right) if isinstance(value, str | list | tuple)]
    ints = [value for value in (left, right) if isinstance(value, int)]
    if operator == "+":
        return sum(sizes)
    if operator == "*" and sizes and ints:
        return sizes[0] * ints[0]
    if len(ints) == 2:
        return ints[0].bit_length() * max(ints[1], 1) if operator == "**" else ints[0].bit_length() + ints[1].bit_length()
    return 0


def _limit_bits(left: Any, right: Any) -> int:
    return MAX_CHARS if isinstance(left, str | list | tuple) or isinstance(right, str | list | tuple) else _MAX_BITS


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    """As transformers': no escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise SecurityError(f"it {problem}")


def _require_public(name: object) -> None:
    _require(not str(name).startswith("_"), f"stores {name!r} in a namespace")


def _tell(error: BaseException) -> str:
    line = getattr(error, "lineno", None)
    return f"{error or type(error).__name__}" + (f" (line {line})" if line else "")


def plain(value: Any) -> Any:
    """`value` with mappings as dicts and tuples as lists, all the way down: nothing that a template could call into."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value
