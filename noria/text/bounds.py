"""How large a text or value may become, known before it is built: what a chat template's operators, methods and filters are asked for.

All that a template can build is bounded by `MAX_CHARS`, up to a constant factor (the escapes of repr, letters that upper case makes two of), in one
of three ways: an operation is refused by the size of its result (`center(width)`, `%`, `*`); a version of our own stops at the bound (`join`,
`tojson`); or it is not offered, since no chat needs it (`LEFT_OUT`, `HIDDEN`). Deliberately not here: turns of loops, and the sandbox itself
(`text/sandbox.py`).
"""

import json
import re
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, ValuesView
from functools import wraps
from typing import Any, Final

from jinja2 import Environment, pass_environment
from jinja2.exceptions import SecurityError
from jinja2.filters import make_attrgetter
from jinja2.sandbox import SandboxedFormatter
from jinja2.utils import Namespace

MAX_CHARS: Final = 2**24
"""Of one render, and of any text that it builds: a thousand times a long chat."""

MAX_PARTS: Final = 10**5
"""Rows, columns or spaces of a level, which a filter is asked for."""

LEFT_OUT: Final = frozenset(("pprint", "random", "urlencode", "urlize", "xmlattr"))
"""Filters for web pages and chance."""

HIDDEN: Final = frozenset(("encode", "escape", "to_bytes", "translate"))
"""Methods of texts and numbers that a template does not see."""

_MAX_BITS: Final = 2**14  # of a product or power
_MAX_DIGITS: Final = 400  # that `round` keeps or drops: more than a float has
_VALUE_CHARS: Final = 64  # a value inside another counts for as much at least, so that measuring a value ends soon
_WIDTHS: Final = re.compile(r"[%)][-#0 +]*(\d*)(\*?)(?:\.(\d*)(\*?))?")  # of %-formats; a name may hold brackets: so after any closing one
_CONTAINERS: Final = (list, tuple, set, frozenset, KeysView, ItemsView, ValuesView)


def require(condition: bool, problem: str) -> None:
    """Raises SecurityError: the template did what `problem` says."""
    if not condition:
        raise SecurityError(f"it {problem}")


def require_text(size: float) -> None:
    """Raises SecurityError for a text of so many characters, a list of so many values."""
    require(size <= MAX_CHARS, f"builds a text of more than {MAX_CHARS} characters")


def written_size(value: Any) -> int:
    """About how many characters `str(value)` has. The measuring stops where they are too many."""
    if isinstance(value, str):
        return len(value)
    size, rest = 0, [value]
    while rest and size <= MAX_CHARS:
        item = rest.pop()
        size += _VALUE_CHARS
        if isinstance(item, str | bytes):
            size += len(item)
        elif isinstance(item, int):
            size += item.bit_length() // 3
        elif isinstance(item, Mapping | Namespace):
            fields = item._Namespace__attrs if isinstance(item, Namespace) else item
            size += _VALUE_CHARS * len(fields)
            rest += [*fields, *fields.values()] if size <= MAX_CHARS else []
        elif isinstance(item, _CONTAINERS):
            size += _VALUE_CHARS * len(item)
            rest += item if size <= MAX_CHARS else []
    return size


def written(value: Any) -> Any:
    """`value`, if it is not too large to be written out. Raises SecurityError."""
    require_text(written_size(value))
    return value


def join(separator: str, parts: Iterable[Any]) -> str:
    """As `separator.join(map(str, parts))`. Raises SecurityError as soon as that is too long."""
    texts, size = [], 0
    for part in parts:
        size += written_size(part) + len(separator)
        require_text(size - len(separator))
        texts.append(str(part))
    return separator.join(texts)


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Raises SecurityError if the value of `left operator right` is too large."""
    if operator == "%" and isinstance(left, str):
        check_percent(left, right)
    is_sized = isinstance(left, str | list | tuple) or isinstance(right, str | list | tuple)
    require(_size_bits(operator, left, right) <= (MAX_CHARS if is_sized else _MAX_BITS), f"computes too large a value with {operator!r}")


def _size_bits(operator: str, left: Any, right: Any) -> int:
    """Upper bound of the result's size: bits of a number, elements of a text or list; 0 where it cannot be large."""
    sizes = [len(value) for value in (left, right) if isinstance(value, str | list | tuple)]
    ints = [value for value in (left, right) if isinstance(value, int)]
    if operator == "+":
        return sum(sizes)
    if operator == "*" and sizes and ints:
        return sizes[0] * ints[0]
    if operator in ("*", "**") and len(ints) == 2:
        return ints[0].bit_length() * max(ints[1], 1) if operator == "**" else ints[0].bit_length() + ints[1].bit_length()
    return 0


def check_percent(text: str, values: Any) -> None:
    """Raises SecurityError if `text % values` is too long. A name may stand in the text many times, a value without a name only once."""
    given = list(values.values()) if isinstance(values, Mapping) else list(values) if isinstance(values, tuple) else [values]
    sizes = [written_size(value) for value in given]
    size = len(text) + (text.count("%") * max(sizes, default=0) if isinstance(values, Mapping) else sum(sizes))
    largest = max((abs(value) for value in given if isinstance(value, int)), default=0)
    for width, star, digits, other_star in _WIDTHS.findall(text):
        size += int(width or 0) + int(digits or 0) + largest * (len(star) + len(other_star))
    require_text(size)


def check_method(owner: Any, name: str, *args: Any, **kwargs: Any) -> None:
    """Raises SecurityError if what the method of a text or number is asked for is too large."""
    given = (*args, *kwargs.values())
    require(not any(isinstance(value, int) and abs(value) > MAX_CHARS for value in given), "asks for too long a text")
    if not isinstance(owner, str):
        return
    if name == "expandtabs":
        require_text(len(owner) + owner.count("\t") * max((value for value in given if isinstance(value, int)), default=8))
    elif name == "replace":
        _check_replace(owner, *args, **kwargs)
    elif name == "join":
        require_text(sum(len(owner) + written_size(part) for parts in args for part in parts))


class BoundedFormatter(SandboxedFormatter):
    """Formats one text, and refuses to once its fields are too long together."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self._size = 0

    def convert_field(self, value: Any, conversion: Any) -> Any:
        """Of `{!r}`."""
        return super().convert_field(written(value), conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        """Of `{:>8}`: numbers in it are widths and numbers of digits."""
        self._size += written_size(value) + sum(map(int, re.findall(r"\d+", format_spec)))
        require_text(self._size)
        return super().format_field(value, format_spec)


def bounded_filters(filters: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """jinja2's filters, bounded."""
    kept = {name: function for name, function in filters.items() if name not in LEFT_OUT}
    checked = {name: _checked(kept[name], check) for name, check in _CHECKS.items() if name in kept}
    return {**kept, **checked, "join": _join, "tojson": _tojson}


def _checked(function: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """The filter, which asks `check` about its arguments first: the value that it filters, then those that the template gives."""
    num_own = int(hasattr(function, "jinja_pass_arg"))  # of jinja2: the environment or a context

    @wraps(function)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        check(*args[num_own:], **kwargs)
        return function(*args, **kwargs)

    return filtered


def _check_text(value: Any, *_args: Any, **_kwargs: Any) -> None:
    require_text(written_size(value))


def _check_center(value: Any, width: int = 80) -> None:
    require_text(max(written_size(value), width))


def _check_indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> None:
    require_text(written_size(value))
    require_text(len(value) + (1 + len(str(value).splitlines())) * (len(width) if isinstance(width, str) else width))


def _check_wordwrap(value: Any, width: int = 79, break_long_words: bool = True, wrapstring: str | None = None, break_on_hyphens: bool = True) -> None:
    require_text((1 + written_size(value)) * len(wrapstring or "\n"))


def _check_replace(value: Any, old: str, new: str, count: int | None = -1) -> None:
    require_text(written_size(value))
    num = str(value).count(old)
    require_text(len(value) + (num if count is None or count < 0 else min(num, count)) * written_size(new))


def _check_format(value: Any, *args: Any, **kwargs: Any) -> None:
    require_text(written_size(value))
    check_percent(str(value), kwargs or args)


def _check_truncate(value: Any, length: int = 255, killwords: bool = False, end: str = "...", leeway: int | None = None) -> None:
    require_text(written_size(value) + len(end))


def _check_round(value: Any, precision: int = 0, method: str = "common") -> None:
    require(abs(precision) <= _MAX_DIGITS, f"rounds to {precision} digits")


def _check_parts(value: Any, number: int, fill_with: Any = None) -> None:
    require(number <= MAX_PARTS, f"asks for {number} parts")


def _check_sum(iterable: Any, attribute: Any = None, start: Any = 0) -> None:
    require(isinstance(start, int | float), "sums what is no number")


@pass_environment
def _join(environment: Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    parts = value if attribute is None else map(make_attrgetter(environment, attribute), value)
    return join(str(written(d)), parts)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers': no escapes for HTML."""
    require_text(written_size(value))
    if indent is None and separators is None:
        return json.dumps(value, ensure_ascii=ensure_ascii, sort_keys=sort_keys)
    spaces = len(indent) if isinstance(indent, str) else indent or 0
    require(spaces <= MAX_PARTS and written_size(separators) <= MAX_PARTS, "asks for too much space between JSON values")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return join("", encoder.iterencode(value))


_CHECKS: Final[Mapping[str, Callable[..., None]]] = {
    **dict.fromkeys(("capitalize", "e", "escape", "forceescape", "lower", "safe", "string", "striptags", "title", "trim", "upper"), _check_text),
    **dict.fromkeys(("wordcount",), _check_text),
    "batch": _check_parts,
    "center": _check_center,
    "format": _check_format,
    "indent": _check_indent,
    "replace": _check_replace,
    "round": _check_round,
    "slice": _check_parts,
    "sum": _check_sum,
    "truncate": _check_truncate,
    "wordwrap": _check_wordwrap,
}
