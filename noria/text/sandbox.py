"""Chat templates as programs that nobody trusts: jinja2's immutable sandbox with the names that transformers offers, and bounds on what they use.

A template ends: every turn of a loop, call of a macro or block and test of a filtered loop is counted (they are marked in the syntax tree), text
and numbers that it builds have a largest size (`text/bounds.py`), and so has its output. Times are those of `TODAY`: a prompt is the same every day.
Deliberately not here: what a chat is (`text/chat.py`). The bounds stop broken templates; memory and time are not measured.
"""

from collections.abc import Callable, Mapping
from datetime import date
from typing import Any, Final, NoReturn, final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from noria.errors import ChatTemplateError
from noria.text.bounds import (
    HIDDEN,
    MAX_CHARS,
    BoundedFormatter,
    bounded_filters,
    check_method,
    check_operator,
    join,
    require,
    written,
)

TODAY: Final = date(2024, 7, 26)
"""What `strftime_now` formats: the date that Llama 3.1's template falls back to."""

MAX_TURNS: Final = 10**5
"""Turns of loops and calls of macros in one render: a hundred for each message of a very long chat."""

_FAILURES: Final = (
    *(jinja2.TemplateError, ArithmeticError, AssertionError, AttributeError, LookupError),
    *(MemoryError, RuntimeError, SyntaxError, TypeError, ValueError),
)


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
                require(size <= MAX_CHARS, f"writes more than {MAX_CHARS} characters")
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
        require(self._count <= MAX_TURNS, f"takes more than {MAX_TURNS} turns")
        return True


def _join_all(parts: Any) -> str:
    return join("", parts)


def _concatenate(*parts: Any) -> str:
    return join("", parts)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "**", "+", "%"))
    concat = staticmethod(_join_all)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation], finalize=written)
        self.filters = bounded_filters(self.filters)
        self.globals = {
            "range": self.globals["range"],
            "dict": lambda *args, **fields: dict(*args, **fields),
            "namespace": _PublicNamespace,
            "joiner": self.globals["joiner"],
            "cycler": self.globals["cycler"],
            "raise_exception": _refuse,
            "strftime_now": TODAY.strftime,
            "noria_join": _concatenate,
        }

    def _generate(self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False) -> str:
        return super()._generate(_Bounds().visit(source), name, filename, defer_init)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        is_hidden = attr in HIDDEN and isinstance(obj, str | int)
        return not is_hidden and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            fields = args[0] if value.__name__ == "format_map" and args else kwargs
            BoundedFormatter(self).vformat(value.__self__, args, fields)
            return formatted(*args, **kwargs)

        return bounded

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | int):
            if __obj.__name__ == "join" and args:
                args = (list(args[0]), *args[1:])  # which may be read once only
            check_method(owner, __obj.__name__, *args, **kwargs)
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

    def visit_Block(self, node: nodes.Block) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("noria_turn"), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("noria_join", *node.nodes)


def _call(name: str, *args: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load"), list(args), [], None, None)


def _refuse(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _require_public(name: object) -> None:
    require(not str(name).startswith("_"), f"stores {name!r} in a namespace")


def _tell(error: BaseException) -> str:
    line = getattr(error, "lineno", None)
    return f"{error or type(error).__name__}" + (f" (line {line})" if line else "")


def plain(value: Any) -> Any:
    """`value` with mappings as dicts and tuples as lists, all the way down: nothing that a template could call into."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value
