"""Evaluation of integer and list expressions in arguments: `([0]*3+[1]*58)`, `8*4`. Nothing else is evaluated."""

from __future__ import annotations

import ast
import operator
from typing import Any

from meshwright.errors import InputError

OPERATIONS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
    ast.Div: operator.floordiv, ast.FloorDiv: operator.floordiv,  # `/` as in the shell
}  # fmt: skip
MAX_LENGTH = 10_000  # of a list: layers of a pattern


def evaluate(text: str, *, what: str) -> Any:
    """Return the integer or the list. Raises InputError for anything else."""
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError, ZeroDivisionError, RecursionError):
        raise InputError(f"{what}: not an expression of whole numbers", got=text) from None


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.List(elts=elements):
            return [_value(element) for element in elements]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            first, second = _value(left), _value(right)
            for count, other in ((first, second), (second, first)):
                if isinstance(count, int) and isinstance(other, list) and count * len(other) > MAX_LENGTH:
                    raise ValueError
            return OPERATIONS[type(op)](first, second)
    raise ValueError
