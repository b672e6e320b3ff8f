"""Formulas of benchmark rules: arithmetic over logged values, as the MLPerf rules print them.

    ceil(12288 / global_batch_size) * global_batch_size

Numbers, names, + - * / // ** and the functions of `FUNCTIONS` alone are evaluated.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from meshwright.errors import InputError

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "ceil": math.ceil,
    "floor": math.floor,
    "max": max,
    "min": min,
    "round": round,
    "sqrt": math.sqrt,
}

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow, ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip


def evaluate_formula(text: str, values: Mapping[str, object]) -> float:
    """Return the value of a formula. Raises InputError for bad syntax, absent or non-numeric names and overflow.

    >>> evaluate_formula("ceil(12288 / global_batch_size) * global_batch_size", {"global_batch_size": 36})
    12312
    """
    try:
        result = _value(ast.parse(text.strip(), mode="eval").body, values)
    except (SyntaxError, RecursionError, ValueError, TypeError) as error:
        raise InputError(f"formula cannot be read: {error}", got=text) from error
    except ArithmeticError as error:
        raise InputError(f"formula has no value: {error}", got=text) from error
    if not is_number(result):
        raise InputError("formula has no real value", got=text)
    return result


def names_in(text: str) -> frozenset[str]:
    """Return the names of values that a formula reads."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, RecursionError, ValueError) as error:
        raise InputError(f"formula cannot be read: {error}", got=text) from error
    return frozenset(n.id for n in ast.walk(tree) if isinstance(n, ast.Name)) - FUNCTIONS.keys()


def _value(node: ast.AST, values: Mapping[str, object]) -> Any:
    if isinstance(node, ast.Constant) and is_number(node.value):
        return node.value
    if isinstance(node, ast.Name):
        found = values.get(node.id)
        if not is_number(found):
            raise InputError(f"formula needs a number for {node.id!r}", got=found)
        return found
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left, values), _value(node.right, values)
        if isinstance(node.op, ast.Pow) and (abs(right) > 64 or abs(left) > 1e18):
            raise InputError("formula has too large a power", got=right)
        return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand, values))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
        if node.keywords:
            raise InputError("formula names an argument", got=node.func.id)
        return FUNCTIONS[node.func.id](*(_value(a, values) for a in node.args))
    raise InputError("formula holds more than arithmetic", got=ast.unparse(node), allowed=", ".join(FUNCTIONS))


def is_number(value: object) -> TypeGuard[int | float]:
    """Return True for a finite int or float; False for a bool, NaN and infinity.

    >>> is_number(8), is_number(True), is_number(float("nan"))
    (True, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the floats
        return False
