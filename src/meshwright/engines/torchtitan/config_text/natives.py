"""Functions, methods and operators of Python that the reader has. None reaches a file or a module."""

from __future__ import annotations

import ast
import builtins
import math
import operator
import os
import re
from collections.abc import Callable, Mapping, Sized
from dataclasses import MISSING, Field
from enum import auto
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.engines.torchtitan.config_text.values import Outside

OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_, ast.BitXor: operator.xor, ast.LShift: operator.lshift, ast.RShift: operator.rshift,
}  # fmt: skip

COMPARISONS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: lambda left, right: is_same(left, right),
    ast.IsNot: lambda left, right: not is_same(left, right), ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}  # fmt: skip


def is_same(left: Any, right: Any) -> bool:
    """Return True for one value; names from outside are values of their own."""
    return left == right if isinstance(left, Outside) else left is right


_FUNCTIONS = """
    abs all any bool dict divmod enumerate filter float frozenset int iter len list map max min next print reversed
    round set sorted str sum tuple zip object range repr
"""
FUNCTIONS = {name: getattr(builtins, name) for name in _FUNCTIONS.split()} | {
    name: value for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, Exception)
}
"""Builtin functions and exceptions. Those that need values of the reader are in the reader."""

MATH = {
    name: getattr(math, name)
    for name in ("sqrt", "ceil", "floor", "log", "log2", "log10", "exp", "gcd", "isclose", "inf", "pi", "trunc")
}

_METHODS = {
    str: """lower upper strip lstrip rstrip split rsplit splitlines startswith endswith replace join partition title
        rpartition removeprefix removesuffix capitalize isdigit isidentifier find count""",
    list: "append extend insert pop remove index count copy reverse sort clear",
    tuple: "index count",
    dict: "get items keys values pop update setdefault copy",
    set: "add update discard remove union intersection difference issubset issuperset copy",
    frozenset: "union intersection difference issubset issuperset",
    int: "bit_length",
    float: "is_integer",
    type(Path()): "absolute joinpath with_suffix with_name as_posix",
}
METHODS = {kind: frozenset(names.split()) for kind, names in _METHODS.items()}

PARTS: Mapping[type, tuple[str, ...]] = {
    Path: ("parent", "name", "stem", "suffix"), Field: ("name", "default", "init"), Exception: ("args",),
    partial: ("func", "keywords", "args"), type: ("__name__", "__qualname__"),
}  # fmt: skip
"""Attributes of other values of Python."""

PATHS: dict[str, Any] = {"pathlib.Path": Path} | {
    f"os.path.{name}": getattr(os.path, name) for name in ("join", "dirname", "basename", "abspath")
}
"""Operations on names of files, which look at no file."""

BUILTINS = frozenset(one for one in (*FUNCTIONS.values(), *MATH.values(), *PATHS.values()) if callable(one))


DEVICES: dict[str, Any] = {
    "torch.cuda.is_available": lambda: True,
    "torch.cuda.get_device_capability": lambda: (10, 0),
    "torch.version.hip": None,
    "typing.TYPE_CHECKING": False,
    "dataclasses.MISSING": MISSING,
    "enum.auto": auto,
    "importlib.util.find_spec": lambda name: name,
    "torch.nn.attention.flex_attention._DEFAULT_SPARSE_BLOCK_SIZE": 128,
}
"""Answers about the machine and PyTorch. A configuration is read for a cluster with all functions that it asks for;
whether the accelerator has them is checked later."""

WITHOUT_EFFECT = re.compile(r"(^|\.)(logger|logging|warnings|log|print)(\.|$)")
"""Calls whose results and effects do not concern a configuration."""

KEPT = frozenset(("abstractmethod", "contextmanager", "override", "cache", "lru_cache", "final", "no_grad", "wraps"))
"""Last names of decorators that leave the value of a function as it is."""

FORMAT = re.compile(r"[<>^=]?[+ ]?0?\d{0,2},?(\.\d{1,2})?[a-zA-Z%]?")

EAGER = frozenset((all, any, dict, enumerate, filter, frozenset, list, map, max, min, set, sorted, sum, tuple, zip))
"""Functions whose arguments are counted item by item before they are called."""

COMPARED = (sorted, min, max, str, repr, set, frozenset, dict)
"""Functions that compare or print their arguments to any depth."""

MOST_BITS = 4096


def weight(function: Callable[..., Any], left: Any, right: Any) -> int:
    """Return the steps of `left` OPERATOR `right`. Raises ValueError for a number of too many digits."""
    sizes = [len(one) if hasattr(one, "__len__") else 0 for one in (left, right)]
    if function is operator.mul and any(sizes):
        count = right if sizes[0] else left
        return max(sizes) * max(count, 0) if isinstance(count, int) else 1
    if any(isinstance(one, Path) for one in (left, right)):
        return len(str(left)) + len(str(right))
    if isinstance(left, int) and isinstance(right, int):
        bits = max(left.bit_length(), right.bit_length() if function is not operator.pow else 0)
        grown = {operator.pow: bits * abs(right), operator.lshift: bits + abs(right), operator.mul: bits * 2}
        if max(bits, grown.get(function, 0)) > MOST_BITS:
            raise ValueError(f"an integer of more than {MOST_BITS} bits")
    return sum(sizes)


ITEMS = frozenset(["extend", "update", "join", "union", "intersection", "difference", "issubset", "fromkeys"])
"""Methods that take all items of what they are given."""

HASHED = frozenset(["get", "pop", "setdefault", "add", "discard", "remove", "index", "count"])
"""Methods that hash or compare their first argument."""


def grown(method: str, of: Any, arguments: tuple[Any, ...]) -> int:
    """Return the characters or items that a method may make."""
    if method == "replace":
        return len(of) * max(1, len(arguments[1]))
    if method == "join":
        return sum(len(part) + len(of) for part in arguments[0] if isinstance(part, str))
    if method in ("append", "get", "add", "setdefault"):
        return 1
    return 1 + sum(
        len(str(one) if isinstance(one, Path) else one) for one in (of, *arguments) if isinstance(one, Sized | Path)
    )
