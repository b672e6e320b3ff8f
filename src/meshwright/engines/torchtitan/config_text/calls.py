"""Attributes and calls of a program that is read as text: of its own classes and functions, and of Python."""

from __future__ import annotations

import ast
import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from enum import Enum
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

from meshwright.engines.torchtitan.config_text import natives
from meshwright.engines.torchtitan.config_text.values import (
    MOST_STEPS,
    Function,
    Lazy,
    ModuleName,
    NameScope,
    NotReadError,
    Outside,
    ProgramObject,
    is_class,
    outsides,
)

ABSENT = object()
LONGEST = 1000
"""Characters of a value in a message."""
CALLED = ("__init__", "__post_init__", "__call__")
"""Methods of the program that Python calls by itself."""


def is_special(name: str) -> bool:
    """Return True for a name that Python or its enums give a meaning, other than `CALLED`."""
    return name.startswith("_") and name.endswith("_") and name not in CALLED


class Calls(ABC):
    """Attributes and calls; `Expressions` adds expressions, and `Reader` statements."""

    def __init__(self) -> None:
        self._steps = 0
        self.place = ""
        self._functions: Mapping[str, Any] = natives.FUNCTIONS | {
            "isinstance": self._is_instance, "issubclass": self._is_subclass, "getattr": self._getattr,
            "setattr": self.set_attribute, "hasattr": self._hasattr,
            "type": _type_of, "callable": lambda of: callable(of) and not isinstance(of, Outside),
        }  # fmt: skip
        self.of_packages: Mapping[str, Any] = natives.DEVICES | natives.PATHS | {
            **{f"math.{name}": value for name, value in natives.MATH.items()},
            "functools.partial": partial,
            "copy.deepcopy": lambda of: copy.deepcopy(self.weigh(of)), "copy.copy": self._copied,
            "dataclasses.replace": self._replaced, "dataclasses.field": self._field,
            "dataclasses.fields": lambda of: [*_fields(of if isinstance(of, type) else type(of)).values()],
            "dataclasses.is_dataclass": lambda of: isinstance(of, ProgramObject) and dataclasses.is_dataclass(of),
            "typing.cast": lambda _, value: value,
        }  # fmt: skip

    @abstractmethod
    def found(self, module: str, name: str) -> Any:
        """Return a name of a module."""

    @abstractmethod
    def value(self, node: ast.expr | None, scope: NameScope) -> Any:
        """Return the value of an expression."""

    @abstractmethod
    def body(self, statements: list[ast.stmt], scope: NameScope) -> tuple[str, Any] | None:
        """Read statements."""

    def spend(self, steps: int = 1) -> None:
        """Count steps. Raises NotReadError at the limit."""
        self._steps += steps
        if self._steps > MOST_STEPS:
            raise NotReadError(f"{self.place}: the configuration takes more than {MOST_STEPS:,} steps to read")

    def iterated(self, value: Any) -> Iterator[Any]:
        """Yield the items of a value."""
        is_enum = is_class(value) and issubclass(value, Enum)
        if not is_enum and (isinstance(value, Outside | ProgramObject | Function) or is_class(value)):
            raise NotReadError(f"{self.place}: a loop over a value that the text does not state", got=said(value))
        for item in value:
            self.spend()
            yield item

    def resolved(self, names: dict[str, Any], name: str) -> Any:
        """Return a name, which is imported where it has not been."""
        if isinstance(lazy := names[name], Lazy):
            names[name] = Outside(f"{lazy.module}.{lazy.name}", is_call=True)  # of modules that import each other
            names[name] = self.found(lazy.module, lazy.name)
        return names[name]

    def key(self, key: Any) -> Any:
        parts = key if isinstance(key, tuple) else (key,)
        if any(isinstance(part, Outside) and part.is_call for part in parts):
            raise NotReadError(f"{self.place}: a key that the text does not state", got=said(key))
        if any(isinstance(part, ProgramObject | tuple | frozenset) for part in parts):
            raise NotReadError(f"{self.place}: a key that is not read", got=said(key))
        return key

    def weigh(self, value: Any) -> Any:
        """Count everything in a value, as an operation would that looks at all of it, and return the value."""
        waiting = [value]
        while waiting:
            one = waiting.pop()
            self.spend(1 + (len(one) // 64 if isinstance(one, str) else 0))
            if isinstance(one, dict):
                waiting += [*one.keys(), *one.values()]
            elif isinstance(one, list | tuple | set | frozenset | KeysView | ValuesView | ItemsView):
                waiting += one
            elif isinstance(one, ProgramObject):
                waiting += vars(one).values()
            elif isinstance(one, Outside):
                waiting += [*one.positional, *one.named.values()]
        return value

    def attribute(self, of: Any, name: str) -> Any:
        """Return an attribute of a value."""
        match of:
            case ModuleName():
                return self.found(of.name, name)
            case Outside():
                self.spend(len(of.name) // 64)
                whole = f"{of.name}.{name}"
                return self.of_packages.get(whole, Outside(whole, is_call=of.is_call, positional=of.positional))
            case super():  # of classes without text and of enums: functions without effect
                is_read = not is_special(name) and issubclass(getattr(of, "__self_class__"), ProgramObject)  # noqa: B009
                return getattr(of, name, _without_effect) if is_read else _without_effect
            case Function() if name in ("__name__", "__qualname__"):
                return of.qualname
        if any(isinstance(of, kind) and name in names for kind, names in natives.PARTS.items()):
            return getattr(of, name)
        if is_class(of) or isinstance(of, ProgramObject | Enum):
            return self._of_program(of, name)
        if of is object and name == "__setattr__":
            return self.set_attribute
        kind = of if isinstance(of, type) else type(of)
        if name in natives.METHODS.get(kind, ()) or (of is dict and name == "fromkeys"):
            return partial(self._method, of, name)
        raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")

    def _method(self, of: Any, name: str, *positional: Any, **named: Any) -> Any:
        if isinstance(of, type) and name != "fromkeys":  # `str.join(",", parts)`
            if not positional or not isinstance(positional[0], of):
                raise TypeError(f"descriptor {name!r} needs a {of.__name__!r} object")
            of, *others = positional
            positional = tuple(others)
        if name in ("index", "remove", "count", "sort"):
            self.weigh(of)
        if name in natives.ITEMS:
            positional = tuple([*self.iterated(one)] if not isinstance(one, dict) else one for one in positional)
        if name in natives.HASHED or isinstance(of, set | frozenset | type):
            self.weigh(positional[:1] if name in natives.HASHED else positional)
        self.spend(natives.grown(name, of, positional))
        if name == "join" and (unknown := next((one for one in positional[0] if isinstance(one, Outside)), None)):
            return unknown
        return getattr(of, name)(*positional, **self._weighing(named))

    def _weighing(self, named: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a builtin; what its `key` returns is counted, as it is compared."""
        key = named.get("key")
        return named if key is None else named | {"key": lambda one: self.weigh(self.call(key, (one,), {}))}

    def _of_program(self, of: Any, name: str) -> Any:
        """Return an attribute of a class of the program or of an instance, if the program has defined it."""
        cls = of if isinstance(of, type) else type(of)
        values = {} if isinstance(of, type | Enum) else vars(of)
        own = {"__class__": cls, "__dict__": values or {n: v for n, v in vars(cls).items() if not is_special(n)}}
        if name in own:
            return own[name]
        if name == "__mro__":
            return tuple(one for one in cls.__mro__ if is_class(one))
        is_defined = any(name in vars(one) for one in cls.__mro__ if is_class(one)) and not is_special(name)
        if name in values or is_defined or (isinstance(of, Enum) and name in ("name", "value")):
            return getattr(of, name)
        if bases := outsides(cls):
            return Outside(f"{bases[0].name}.{name}", is_call=of is not cls)
        raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}")

    def _getattr(self, of: Any, name: str, *default: Any) -> Any:
        try:
            return self.attribute(of, name)
        except AttributeError:
            if default:
                return default[0]
            raise

    def _hasattr(self, of: Any, name: str) -> bool:
        if isinstance(of, Outside):  # its classes have what is asked for, and its functions and values have not
            return not of.is_call and of.name.rpartition(".")[2][:1].isupper()
        return self._getattr(of, name, ABSENT) is not ABSENT

    def set_attribute(self, of: Any, name: str, value: Any) -> None:
        """Set an attribute of an instance or a class."""
        cls = type(of)
        if isinstance(of, ProgramObject) and not is_special(name):
            if dataclasses.is_dataclass(of) and not (hasattr(cls, name) or name in _fields(cls) or outsides(cls)):
                raise AttributeError(f"{cls.__qualname__!r} object has no attribute {name!r}")
            if isinstance(getattr(cls, name, None), property):
                raise NotReadError(f"{self.place}: a property is set", got=name)
            vars(of)[name] = value
        elif is_class(of) and (name in ("__name__", "__qualname__") or not is_special(name)):
            setattr(of, name, value)
        elif not isinstance(of, Outside) or of.is_call:
            raise NotReadError(f"{self.place}: an attribute is set on a value that the text does not state", got=name)

    # ---- calls

    def call(self, function: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Return what a function of the program, of Python or of another package returns."""
        self.spend()
        if isinstance(function, partial):
            return self.call(function.func, (*function.args, *positional), function.keywords | named)
        if is_class(function):
            return self._made(function, positional, named)
        if not callable(function):
            raise TypeError(f"{said(function)} is not callable")
        if not issubclass(type(function), ProgramObject) and function in natives.BUILTINS:  # objects may have no hash
            return self._called_builtin(function, positional, named)
        return function(*positional, **named)

    def _called_builtin(self, function: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        unknown = [one for one in positional if isinstance(one, Outside) and one.is_call]
        is_error = isinstance(function, type) and issubclass(function, Exception)
        if unknown and not is_error:
            return Outside(f"{function.__name__}({', '.join(map(said, positional))})", is_call=True)
        if function is int and positional and isinstance(positional[0], str) and len(positional[0]) > 300:
            raise ValueError("an integer of more than 300 digits")
        if function is round and any(isinstance(one, int) and abs(one) > natives.MOST_BITS for one in positional[1:]):
            raise ValueError(f"a number is rounded to more than {natives.MOST_BITS} digits")
        if function in natives.EAGER:
            positional = tuple(
                [*self.iterated(one)] if isinstance(one, Iterable) and not isinstance(one, str | dict) else one
                for one in positional
            )
        if function in (map, filter) and callable(called := positional[0]):
            positional = (lambda *given: self.call(called, given, {}), *positional[1:])
        if function in natives.COMPARED:
            self.weigh([*positional])
        if function in (str, repr) or is_error:
            positional = tuple(
                one if isinstance(one, int | float | str | Path | None) else said(one) for one in positional
            )
        if function is range and len(range(*positional)) > MOST_STEPS:
            raise NotReadError(f"{self.place}: a range of more than {MOST_STEPS:,} numbers")
        if function is sum and not all(isinstance(one, int | float) for one in positional[0]):
            raise NotReadError(f"{self.place}: a sum of values that are no numbers")
        if function is iter and len(positional) > 1:
            raise NotReadError(f"{self.place}: an iterator that calls a function")
        made = function(*positional, **self._weighing(named))
        if isinstance(made, list | tuple | dict | set | frozenset | str | Path):
            self.spend(len(str(made) if isinstance(made, Path) else made))
        return made

    def _made(self, cls: type, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Return a new instance, or the member of an enum with this value."""
        self.spend(len(_fields(cls)))
        if issubclass(cls, Enum):
            self.spend(len(cls))
            return cls(self.weigh(positional[0]))
        if cls.__init__ is ProgramObject.__init__ and (bases := outsides(cls)):
            return Outside(bases[0].name, is_call=True, positional=positional, named=named)
        return cls(*positional, **named)

    def call_function(self, function: Function, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Return what a function of the program returns; of a generator, all items."""
        outer = function.scope
        self.spend(len(function.defaults) + len(named))
        scope = NameScope(
            names={"<qualname>": f"{function.qualname}.<locals>."}, parent=outer, file=outer.file, module=outer.module,
            function=function, first=positional[0] if positional else None,
        )  # fmt: skip
        scope.names |= _arguments(function, positional, named)
        if isinstance(function.body, ast.expr):
            return self.value(function.body, scope)
        scope.names["<yielded>"] = yielded = []
        signal = self.body(function.body, scope)
        return iter(yielded) if function.yields else signal[1] if signal else None

    def _field(self, **named: Any) -> Any:
        if (factory := named.get("default_factory")) is not None:
            named["default_factory"] = lambda: self.call(factory, (), {})
        known = ("default", "default_factory", "init", "kw_only")
        return dataclasses.field(**{name: value for name, value in named.items() if name in known})

    def _replaced(self, of: Any, **named: Any) -> Any:
        return dataclasses.replace(self._copied(of), **named) if isinstance(of, ProgramObject) else of

    def _copied(self, of: Any) -> Any:
        """`copy.copy`."""
        self.spend(len(vars(of) if isinstance(of, ProgramObject) else of if isinstance(of, list | dict | set) else ()))
        return copy.copy(of) if isinstance(of, ProgramObject | list | dict | set) else of

    def _is_instance(self, of: Any, kinds: Any) -> Any:
        found = [self._is_one(of, kind) for kind in (kinds if isinstance(kinds, tuple) else (kinds,))]
        if True not in found and None in found:
            return Outside(f"isinstance({said(of)}, {said(kinds)})", is_call=True)
        return True in found

    def _is_one(self, of: Any, kind: Any) -> bool | None:
        """Return True, False, or None where the text does not say."""
        if isinstance(of, Outside) and not is_class(kind):  # no class of the text, as far as it says
            is_same = isinstance(kind, Outside) and kind.name.rpartition(".")[2] == of.name.rpartition(".")[2]
            return is_same or (None if of.is_call and not of.constructor else False)
        if kind is None:
            return of is None
        if isinstance(kind, Outside) and kind.name.endswith("Callable"):
            return callable(of)
        return _is_below(type(of), kind)

    def _is_subclass(self, cls: Any, kinds: Any) -> bool:
        return any(_is_below(cls, kind) for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))


def _is_below(cls: Any, kind: Any) -> bool:
    if not isinstance(cls, type):
        return False
    return issubclass(cls, kind) if isinstance(kind, type) else kind in outsides(cls)


def _fields(cls: type) -> Mapping[str, Any]:
    """Return the fields of a dataclass of the program; other classes have none."""
    return getattr(cls, "__dataclass_fields__", {}) if is_class(cls) else {}


def _arguments(function: Function, positional: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name. Raises TypeError as Python does."""
    a = function.arguments
    names = [one.arg for one in (*a.posonlyargs, *a.args)]
    found = dict(zip(names, positional, strict=False))
    if a.vararg:
        found[a.vararg.arg] = positional[len(names) :]
    elif len(positional) > len(names):
        raise TypeError(f"{function.name}() takes {len(names)} arguments, and {len(positional)} are given")
    allowed = {*names, *(one.arg for one in a.kwonlyargs)}
    others = {key: value for key, value in named.items() if key not in allowed}
    if twice := sorted(named.keys() & found.keys()):
        raise TypeError(f"{function.name}() has several values of argument {twice[0]!r}")
    if others and not a.kwarg:
        raise TypeError(f"{function.name}() has no argument {min(others)!r}")
    found |= {key: value for key, value in named.items() if key in allowed}
    if a.kwarg:
        found[a.kwarg.arg] = others
    found = function.defaults | found
    if missing := sorted(allowed - found.keys()):
        raise TypeError(f"{function.name}() is missing {', '.join(missing)}")
    return found


def _without_effect(*_: Any, **__: Any) -> None: ...


def _type_of(of: Any) -> Any:
    if isinstance(of, Outside):
        return Outside(of.name, is_call=of.constructor is None)
    is_known = of is None or isinstance(of, ProgramObject | Enum) or type(of) in natives.BUILTINS
    return type(of) if is_known else Outside("type")


def said(value: Any) -> str:
    """Return a value as a message names it."""
    match value:
        case Exception():
            return (value.message if isinstance(value, NotReadError) else f"{type(value).__name__}: {value}")[:LONGEST]
        case Outside():
            return value.name[:LONGEST]
        case ProgramObject() | Enum():
            return f"<{type(value).__qualname__}>"
        case type() if is_class(value):
            return f"<{value.__qualname__}>"
        case MethodType():
            return said(value.__func__)
        case Function():
            return value.qualname
        case str() | int() | float() | None:
            return repr(value)[:100]
    return f"<{type(value).__name__}>"
