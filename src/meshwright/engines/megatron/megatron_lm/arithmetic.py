"""Sums of whole numbers and lists of them, as arguments hold them: `([0]*3+[1]*58)`, `8*4`. Nothing else is run."""

from __future__ import annotations

import ast
import operator
from typing import Any

from meshwright.errors import InputError

OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,  # as the shell divides
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
LONGEST = 10_000  # layers of a pattern


def evaluated(text: str, *, what: str) -> Any:
    """The number or the list. Raises InputError for anything else."""
    try:
        found = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError, ZeroDivisionError, RecursionError):
        raise InputError(f"{what}: not a sum of whole numbers", got=text) from None
    return found


def whole(text: str, *, what: str) -> int:
    """The number."""
    found = evaluated(text, what=what)
    if not isinstance(found, int):
        raise InputError(f"{what}: not a whole number", got=text)
    return found


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.List(elts=elements):
            return [_value(element) for element in elements]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            first, second = _value(left), _value(right)
            for count, other in ((first, second), (second, first)):
                if isinstance(count, int) and isinstance(other, list) and count * len(other) > LONGEST:
                    raise ValueError
            return OPERATIONS[type(op)](first, second)
    raise ValueError
