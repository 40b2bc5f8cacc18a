"""Arithmetic that a policy wrote, evaluated safely: numbers, + - * / // % ** and parentheses, and nothing that could take long or reach anything.

The text is parsed by Python's own parser and walked here; it is never executed. Names, calls, attributes and everything else that is not arithmetic
do not pass the alphabet, the length bounds the tree, and every intermediate result is bounded, so that powers of powers stay small.
"""

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

MAX_LENGTH = 200
"""Characters of an expression; also bounds the depth of its tree."""

MAX_BITS = 256
"""Of any whole number on the way: 77 digits are more than anybody asks for."""

_ALPHABET = re.compile(r"[\d+\-*/%().\s]+", re.ASCII)


def _power(base: int | float, exponent: int | float) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1 and abs(exponent) * math.log2(abs(base)) > MAX_BITS:
        raise OverflowError
    return base**exponent


_OPERATORS: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}


class ExpressionError(ValueError):
    """An expression without a value; the message is for the policy."""


def evaluate(expression: str) -> str:
    """The value as text: whole numbers in full, others to ten digits. Raises ExpressionError."""
    if len(expression) > MAX_LENGTH:
        raise ExpressionError(f"the expression has {len(expression)} characters; at most {MAX_LENGTH} are read")
    if not _ALPHABET.fullmatch(expression):
        raise ExpressionError("only numbers, + - * / // % ** and parentheses are understood")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError):
        raise ExpressionError("this is not an arithmetic expression") from None
    except ZeroDivisionError:
        raise ExpressionError("division by zero") from None
    except OverflowError:
        raise ExpressionError("the result is too large") from None
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return str(value) if isinstance(value, int) else f"{value:.10g}"


def _value(node: ast.AST) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return _bounded(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _bounded(_OPERATORS[type(op)](_value(left), _value(right)))
    raise ExpressionError("this is not an arithmetic expression")


def _bounded(value: Any) -> int | float:
    """The value, unless it is too large, or not real: roots of negative numbers are complex."""
    if isinstance(value, complex):
        raise ExpressionError("the result is not a real number")
    if not math.isfinite(value) or (isinstance(value, int) and value.bit_length() > MAX_BITS):
        raise OverflowError
    return value  # type: ignore[no-any-return]
