"""Python source of a tree of calls, for configuration modules.

A tree consists of `Call` and `Name`, lists, tuples, dicts and scalars. The first part of a dotted name is imported; the
caller has a table of the modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

WIDTH = 100


@dataclass(frozen=True)
class Name:
    """An expression that is written as it is: `nn.init.ones_`, `index`."""

    text: str


@dataclass(frozen=True)
class Call:
    """`function(*positional, name=value, ...)`."""

    function: str
    positional: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...]


def call(function: str, /, *positional: Any, **named: Any) -> Call:
    """A call whose arguments are trees."""
    return Call(function, positional, tuple(named.items()))


def render(tree: Any, *, indent: int = 0) -> str:
    """Return the source of `tree`: one line if that is short enough, else one line per argument.

    >>> print(render(call("Linear.Config", in_features=8, param_init=Name("INIT"))))
    Linear.Config(in_features=8, param_init=INIT)
    """
    flat = _flat(tree)
    if len(flat) + indent <= WIDTH or not isinstance(tree, Call | list | tuple | dict):
        return flat
    opening, parts, closing = _delimited(tree)
    inner = indent + 4
    lines = [f"{' ' * inner}{prefix}{render(value, indent=inner)}," for prefix, value in parts]
    return "\n".join([opening, *lines, " " * indent + closing])


def _flat(tree: Any) -> str:
    if isinstance(tree, Name):
        return tree.text
    if isinstance(tree, float) and tree == float("inf"):
        return 'float("inf")'
    if isinstance(tree, Call | list | tuple | dict):
        opening, parts, closing = _delimited(tree)
        inside = ", ".join(f"{prefix}{_flat(value)}" for prefix, value in parts)
        return f"{opening}{inside}{',' if isinstance(tree, tuple) and len(tree) == 1 else ''}{closing}"
    return _quoted(tree) if isinstance(tree, str) else repr(tree)


def _quoted(text: str) -> str:
    quoted = repr(text)
    return f'"{quoted[1:-1]}"' if quoted.startswith("'") and '"' not in quoted else quoted


def _delimited(tree: Any) -> tuple[str, list[tuple[str, Any]], str]:
    if isinstance(tree, Call):
        parts = [("", value) for value in tree.positional]
        return f"{tree.function}(", [*parts, *((f"{name}=", value) for name, value in tree.named)], ")"
    if isinstance(tree, dict):
        return "{", [(f"{_quoted(key)}: ", value) for key, value in tree.items()], "}"
    opening, closing = ("[", "]") if isinstance(tree, list) else ("(", ")")
    return opening, [("", value) for value in tree], closing


def roots(tree: Any) -> Iterator[str]:
    """Yield the first part of every dotted name in `tree`, with repetitions, including names that are not imported."""
    if isinstance(tree, Name):
        cleaned = "".join(c if c.isalnum() or c in "_." else " " for c in tree.text)
        yield from [word.partition(".")[0] for word in cleaned.split()]
    elif isinstance(tree, Call):
        yield tree.function.partition(".")[0]
        for value in (*tree.positional, *(v for _, v in tree.named)):
            yield from roots(value)
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from roots(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from roots(value)


def imports(names: set[str], *, table: Mapping[str, str]) -> str:
    """Return import lines for those of `names` that `table` (name -> module) contains, sorted as isort does.

    >>> print(imports({"nn", "Linear", "RMSNorm"}, table={"nn": "torch", "Linear": "a.b", "RMSNorm": "a.b"}))
    from a.b import Linear, RMSNorm
    from torch import nn
    """
    modules: dict[str, list[str]] = {}
    for name in sorted(names & set(table), key=lambda n: (n.isupper() is False, n.lower())):
        modules.setdefault(table[name], []).append(name)
    lines = []
    for module in sorted(modules):
        line = f"from {module} import {', '.join(modules[module])}"
        if len(line) > WIDTH:
            line = f"from {module} import (\n" + "".join(f"    {n},\n" for n in modules[module]) + ")"
        lines.append(line)
    return "\n".join(lines)
