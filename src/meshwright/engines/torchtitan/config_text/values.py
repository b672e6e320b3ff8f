"""Values of a program that is read as text, and the limits of reading it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from meshwright.errors import InputError

MOST_STEPS = 3_000_000
"""Steps of one configuration: expressions, and items of lists. The largest of torchtitan takes 1,400,000."""

MOST_CLASSES = 256
"""Classes above one class, with those that several bases share."""


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
    """A function of the program; `call` evaluates it."""

    name: str
    qualname: str
    arguments: ast.arguments
    body: list[ast.stmt] | ast.expr
    scope: NameScope
    defaults: dict[str, Any]
    call: Callable[..., Any]
    owner: Class | None = None

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


@dataclass(eq=False, repr=False)
class Partial:
    """`functools.partial`, and a method with its instance or class."""

    function: Any
    positional: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False, repr=False)
class Wrapped:
    """A property, a static method or a class method."""

    kind: str
    function: Any


@dataclass(eq=False, repr=False)
class Lazy:
    """A name that is imported where it is first used."""

    module: str
    name: str


@dataclass(eq=False, repr=False)
class ModuleName:
    """A module whose text is read."""

    name: str


@dataclass(eq=False, repr=False)
class Field:
    """A field of a dataclass."""

    name: str = ""
    default: Any = None
    factory: Any = None
    has_default: bool = False
    init: bool = True

    def value(self) -> Any:
        """Return the default."""
        return self.factory() if self.factory is not None else self.default

    @property
    def is_required(self) -> bool:
        return not self.has_default and self.factory is None


@dataclass(eq=False, repr=False)
class Class:
    """A class of the program."""

    name: str
    qualname: str
    bases: tuple[Any, ...]
    names: dict[str, Any]
    fields: dict[str, Field] = field(default_factory=dict)
    is_dataclass: bool = False

    def __post_init__(self) -> None:
        above = [one for base in self.bases for one in (base.mro if isinstance(base, Class) else [base])]
        if len(above) > MOST_CLASSES:
            raise NotReadError(f"class {self.name} has more than {MOST_CLASSES} classes above it")
        self.mro: list[Any] = [self, *(one for i, one in enumerate(above) if one not in above[i + 1 :])]
        """This class and those above: each before its bases, a shared base after all that share it."""
        self.is_enum = any(isinstance(one, Outside) and one.name.endswith("Enum") for one in self.mro)

    def find(self, name: str, *, after: Class | None = None) -> Iterator[Any]:
        """Yield what `name` is in this class and those above; after `after` only."""
        mro = self.mro
        for one in mro[mro.index(after) + 1 if after else 0 :]:
            if isinstance(one, Class) and name in one.names:
                yield one.names[name]

    @property
    def outside_base(self) -> Outside | None:
        return next((one for one in self.mro if isinstance(one, Outside)), None)


@dataclass(eq=False, repr=False)
class Instance:
    """An instance of a class of the program."""

    cls: Class
    values: dict[str, Any]

    def __eq__(self, other: object) -> bool:
        if self.cls.is_enum and isinstance(other, str):
            return bool(self.values["value"] == other)
        if not (isinstance(other, Instance) and other.cls is self.cls and self.cls.is_dataclass):
            return self is other
        return self.values == other.values

    def __hash__(self) -> int:
        return id(self)


@dataclass(eq=False, repr=False)
class Above:
    """`super()`."""

    instance: Any
    cls: Class
    after: Class
