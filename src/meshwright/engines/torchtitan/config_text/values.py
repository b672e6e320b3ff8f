"""Values of a program that is read as text, and the limits of reading it.

Its classes and their instances are those of Python, without methods that Python calls by itself.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from types import MethodType
from typing import Any

from meshwright.errors import InputError

MOST_STEPS = 3_000_000
"""Steps of one configuration: expressions, and items of lists. The largest of torchtitan takes 1,400,000."""


def once(node: ast.AST, name: str, make: Callable[..., Any], *given: Any) -> Any:
    """Return what `make` makes of a part of the program, which a loop may ask for often."""
    known = vars(node)
    if name not in known:
        known[name] = make(*given)
    return known[name]


def source_of(node: ast.AST) -> str:
    """Return the text of a part of the program."""
    return str(once(node, "source", ast.unparse, node))


class NotReadError(InputError):
    """A part of the program that the reader does not understand."""


@dataclass(eq=False, repr=False)
class Outside:
    """A name of a package whose text is not read, or an expression with one (`is_call`), whose value is unknown."""

    name: str
    is_call: bool = False
    positional: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Outside)
            and (self.name, self.is_call, self.positional, self.named)
            == (other.name, other.is_call, other.positional, other.named)
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash(self.name)

    def __deepcopy__(self, memo: object) -> Outside:
        return self

    def __call__(self, *positional: Any, **named: Any) -> Outside:
        return Outside(self.name, is_call=True, positional=positional, named=named)

    @property
    def constructor(self) -> tuple[str, str] | None:
        """Return the class whose instance this is, and its alternative constructor if that is called."""
        above, name = ["", *self.name.removesuffix(".Config").split(".")][-2:]
        if not self.is_call or not self.name.replace(".", "").isidentifier():
            return None
        return (name, "") if name[:1].isupper() else (above, name) if above[:1].isupper() else None


@dataclass(eq=False, repr=False)
class NameScope:
    """Names of a module, a class body or a call. A call in a class body does not see the names of the class."""

    names: dict[str, Any]
    parent: NameScope | None
    file: str
    module: str
    is_class: bool = False
    function: Function | None = None
    first: Any = None
    outside_star: str = ""  # a package without text whose names are all imported
    globals_: frozenset[str] = frozenset()

    @property
    def of_module(self) -> NameScope:
        scope = self
        while scope.parent is not None:
            scope = scope.parent
        return scope

    def enclosing(self) -> NameScope:
        """Return the scope that functions defined here see."""
        assert self.parent is not None or not self.is_class
        return self.parent.enclosing() if self.is_class and self.parent else self


@dataclass(eq=False, repr=False)
class Function:
    """A function of the program; `call` evaluates it. Its class, `owner`, binds it as Python binds functions."""

    name: str
    qualname: str
    arguments: ast.arguments
    body: list[ast.stmt] | ast.expr
    scope: NameScope
    defaults: dict[str, Any]
    call: Callable[..., Any]
    owner: type | None = None

    @property
    def yields(self) -> bool:
        """True for a generator."""
        return bool(once(self.arguments, "yields", self._found_yield))

    def _found_yield(self) -> bool:
        waiting: list[ast.AST] = [*self.body] if isinstance(self.body, list) else []
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.Yield | ast.YieldFrom):
                return True
            if not isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
                waiting.extend(ast.iter_child_nodes(node))
        return False

    def __call__(self, *positional: Any, **named: Any) -> Any:
        return self.call(self, positional, named)

    def __get__(self, instance: object, cls: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __deepcopy__(self, memo: object) -> Function:
        return self


@dataclass(eq=False, repr=False)
class Lazy:
    """A name that is imported where it is first used."""

    module: str
    name: str


@dataclass(eq=False, repr=False)
class ModuleName:
    """A module whose text is read."""

    name: str


class ProgramObject:
    """The base of all classes of the program except its enums. A class above it without text is an `Outside` in it."""

    def __init__(self, *_: Any, **__: Any) -> None: ...


def is_class(value: object) -> bool:
    """Return True for a class of the program."""
    return isinstance(value, type) and issubclass(value, ProgramObject | Enum)


def outsides(cls: type) -> list[Outside]:
    """Return the classes above `cls` whose text is not read."""
    return [vars(one)["<outside>"] for one in cls.__mro__ if "<outside>" in vars(one)]
