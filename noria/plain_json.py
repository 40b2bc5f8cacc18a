"""JSON that somebody else wrote, read within bounds: whatever is wrong with it is a ValueError, which the caller turns into an error of its own."""

import json
import math
from typing import Any, Final

MAX_DEPTH: Final = 100
"""Of objects and lists in each other: deeper than any configuration, schema or call, far from the interpreter's limit."""


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text, at most `MAX_DEPTH` deep, whose numbers all fit a float; a byte order mark before
    it, NaN and infinities are read.

    Raises ValueError: not JSON (with line and column), not UTF-8, nested too deeply, a whole number beyond the largest float.
    """
    try:
        value = json.loads(text.removeprefix("\ufeff") if isinstance(text, str) else text, parse_int=_integer)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    require_flat(value)
    return value


def require_flat(value: Any) -> None:
    """Raises ValueError for lists and objects that are nested more than `MAX_DEPTH` deep, as every function that walks them would."""
    level, depth = [value], 0
    while level := [parts.values() if isinstance(parts, dict) else parts for parts in level if isinstance(parts, dict | list)]:
        level, depth = [part for parts in level for part in parts], depth + 1
        if depth > MAX_DEPTH:
            raise ValueError(_TOO_DEEP)


_TOO_DEEP: Final = f"nested more than {MAX_DEPTH} deep"
_MAX_DIGITS: Final = 309  # of the largest float


def _integer(digits: str) -> int:
    if len(digits) >= _MAX_DIGITS and (len(digits) > _MAX_DIGITS + 1 or math.isinf(float(digits))):
        raise ValueError(f"a whole number of {len(digits.lstrip('-'))} digits, beyond the largest float")
    return int(digits)


MAX_STORED_DEPTH = 32
"""Tables and lists within one another in what a user's file may set."""


def storable(value: Any, where: str, depth: int = 0) -> Any:
    """A setting as the state folder gives it back: JSON's types, tuples as lists. Raises ValueError for anything else."""
    if depth > MAX_STORED_DEPTH:
        raise ValueError(f"{where[:80]} is nested more than {MAX_STORED_DEPTH} deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value):
        return str(value)
    if isinstance(value, list | tuple):
        return [storable(item, f"{where}[{number}]", depth + 1) for number, item in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {storable(key, where): storable(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    raise ValueError(f"{where} must be text, a finite number of at most 64 bits, true or false, or a list or table of these (got {value!r:.80})")
