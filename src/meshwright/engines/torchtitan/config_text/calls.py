"""Attributes and calls of a program that is read as text: of its own classes and functions, and of Python."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from pathlib import Path
from typing import Any

from meshwright.engines.torchtitan.config_text import natives
from meshwright.engines.torchtitan.config_text.values import (
    MOST_STEPS,
    Above,
    Class,
    Field,
    Function,
    Instance,
    Lazy,
    ModuleName,
    NameScope,
    NotReadError,
    Outside,
    Partial,
    Wrapped,
)

ABSENT = object()
LONGEST = 1000
"""Characters of a value in a message."""


class Calls(ABC):
    """Attributes and calls; `Expressions` adds expressions, and `Reader` statements."""

    def __init__(self) -> None:
        self._steps = 0
        self.place = ""
        self._functions: Mapping[str, Any] = natives.FUNCTIONS | {
            "isinstance": self._is_instance, "issubclass": self._is_subclass, "getattr": self._getattr,
            "setattr": self.set_attribute, "hasattr": self._hasattr,
            "type": _type_of, "callable": callable,
        }  # fmt: skip
        self.of_packages: Mapping[str, Any] = natives.DEVICES | natives.PATHS | {
            **{f"math.{name}": value for name, value in natives.MATH.items()},
            "functools.partial": lambda of, *positional, **named: Partial(of, positional, named),
            "copy.deepcopy": self._copied, "copy.copy": self._replaced,
            "dataclasses.replace": self._replaced, "dataclasses.field": self._field,
            "dataclasses.fields": lambda of: [*(of.cls if isinstance(of, Instance) else of).fields.values()],
            "dataclasses.is_dataclass": lambda of: isinstance(of, Instance) and of.cls.is_dataclass,
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
        if isinstance(value, Class) and value.is_enum:
            value = [one for one in value.names.values() if isinstance(one, Instance)]
        if isinstance(value, Outside | Instance | Class | Function):
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
        is_object = any(isinstance(part, Instance) and not part.cls.is_enum for part in parts)
        if is_object or any(isinstance(part, tuple | frozenset) for part in parts):
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
            elif isinstance(one, Instance):
                waiting += one.values.values()
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
            case Instance():
                return self._of_instance(of, name)
            case Above():
                return next((self._bound(one, of.instance, of.cls) for one in of.cls.find(name, after=of.after)),
                            lambda *_, **__: None)  # fmt: skip
            case Class():
                return self._of_class(of, name)
            case Function() | type() if name in ("__name__", "__qualname__"):
                return of.__name__ if isinstance(of, type) else of.qualname
            case Partial() if name in ("func", "keywords", "args"):
                return {"func": of.function, "keywords": of.named, "args": of.positional}[name]
            case Exception() if name == "args":
                return of.args
            case Path() if name in natives.PATH_PARTS:
                return getattr(of, name)
            case Field() if name in ("name", "default", "init"):
                return getattr(of, name)
        if of is object and name == "__setattr__":
            return self.set_attribute
        kind = of if isinstance(of, type) else type(of)
        if name in natives.METHODS.get(kind, ()) or (of is dict and name == "fromkeys"):
            return Partial(self._method, (of, name))
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

    def _of_instance(self, of: Instance, name: str) -> Any:
        if name in of.values:
            return of.values[name]
        if name == "__class__":
            return of.cls
        if name == "__dict__":
            return of.values
        for found in of.cls.find(name):
            return self._bound(found, of, of.cls)
        if name in of.cls.fields and not of.cls.fields[name].is_required:
            return of.cls.fields[name].value()
        if base := of.cls.outside_base:
            return Outside(f"{base.name}.{name}", is_call=True)
        raise AttributeError(f"{of.cls.name!r} object has no attribute {name!r}")

    def _of_class(self, of: Class, name: str) -> Any:
        if name in ("__name__", "__qualname__", "__dict__", "__mro__"):
            return {"__name__": of.name, "__qualname__": of.qualname, "__dict__": of.names}.get(name, of.mro)
        for found in of.find(name):
            return self._bound(found, None, of)
        if base := of.outside_base:
            return Outside(f"{base.name}.{name}")
        raise AttributeError(f"type object {of.name!r} has no attribute {name!r}")

    def _bound(self, found: Any, instance: Any, cls: Class) -> Any:
        if isinstance(found, Wrapped):
            if found.kind == "property" and instance is not None:
                return self.call(found.function, (instance,), {})
            return Partial(found.function, (cls,)) if found.kind == "classmethod" else found.function
        if isinstance(found, Function) and isinstance(instance, Instance):
            return Partial(found, (instance,))
        return found

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
        if isinstance(of, Instance):
            if (
                of.cls.is_dataclass
                and name not in of.cls.fields
                and not any(of.cls.find(name))
                and not of.cls.outside_base
            ):
                raise AttributeError(f"{of.cls.qualname!r} object has no attribute {name!r}")
            if isinstance(next(of.cls.find(name), None), Wrapped):
                raise NotReadError(f"{self.place}: a property is set", got=name)
            of.values[name] = value
        elif isinstance(of, Class) and name in ("__name__", "__qualname__"):
            setattr(of, name.strip("_"), value)
        elif isinstance(of, Class):
            of.names[name] = value
        elif not isinstance(of, Outside) or of.is_call:
            raise NotReadError(f"{self.place}: an attribute is set on a value that the text does not state", got=name)

    # ---- calls

    def call(self, function: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Return what a function of the program, of Python or of another package returns."""
        self.spend()
        if isinstance(function, Outside):
            return Outside(function.name, is_call=True, positional=positional, named=named)
        if isinstance(function, Partial):
            return self.call(function.function, (*function.positional, *positional), function.named | named)
        if isinstance(function, Class):
            return self._made(function, positional, named)
        if isinstance(function, Instance):
            return self.call(self._of_instance(function, "__call__"), positional, named)
        if not callable(function):
            raise TypeError(f"{said(function)} is not callable")
        if function in natives.BUILTINS:
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
        if function in natives.EAGER or any(isinstance(one, Class) for one in positional):
            positional = tuple(
                [*self.iterated(one)] if isinstance(one, Class | Iterable) and not isinstance(one, str | dict) else one
                for one in positional
            )
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

    def _made(self, cls: Class, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Return a new instance, or the member of an enum with this value."""
        if cls.is_enum and positional:
            members = [one for one in cls.names.values() if isinstance(one, Instance)]
            self.spend(len(members))
            self.weigh(positional[0])
            for one in members:
                if one.values["value"] == positional[0]:
                    return one
            raise ValueError(f"{positional[0]!r} is not a valid {cls.name}")
        made = Instance(cls, {})
        self.spend(len(cls.fields))
        for start in cls.find("__init__"):
            self.call(start, (made, *positional), named)
            return made
        if not cls.is_dataclass:
            if base := cls.outside_base:
                return Outside(f"{base.name}", is_call=True, positional=positional, named=named)
            return made
        taken = [one for one in cls.fields.values() if one.init]
        if len(positional) > len(taken):
            raise TypeError(f"{cls.qualname}() takes {len(taken)} arguments, and {len(positional)} are given")
        given = {one.name: value for one, value in zip(taken, positional, strict=False)} | named
        if unknown := sorted(given.keys() - {one.name for one in taken}):
            raise TypeError(f"{cls.qualname}() has no argument {unknown[0]!r}")
        if missing := [one.name for one in taken if one.is_required and one.name not in given]:
            raise TypeError(f"{cls.qualname}() is missing {', '.join(missing)}")
        made.values = {
            name: given[name] if name in given else one.value()
            for name, one in cls.fields.items()
            if name in given or not one.is_required
        }
        for after in cls.find("__post_init__"):
            self.call(after, (made,), {})
            break
        return made

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

    def _field(self, *, default: Any = ABSENT, default_factory: Any = None, init: bool = True, **others: Any) -> Field:
        has = default is not ABSENT
        factory = None if default_factory is None else lambda: self.call(default_factory, (), {})
        return Field(default=default if has else None, factory=factory, has_default=has, init=init)

    def _replaced(self, of: Any, **named: Any) -> Any:
        """`dataclasses.replace`, and `copy.copy` without names."""
        self.spend(len(of.values if isinstance(of, Instance) else of if isinstance(of, list | dict | set) else ()))
        if not isinstance(of, Instance):
            return of.copy() if isinstance(of, list | dict | set) else of
        if not named:
            return Instance(of.cls, dict(of.values))
        inits = {name: value for name, value in of.values.items() if of.cls.fields[name].init}
        return self._made(of.cls, (), inits | named)

    def _copied(self, of: Any, memo: dict[int, Any] | None = None) -> Any:
        """`copy.deepcopy`."""
        self.spend()
        memo = {} if memo is None else memo
        if id(of) in memo:
            return memo[id(of)]
        if isinstance(of, list):
            memo[id(of)] = made = []
            made.extend(self._copied(one, memo) for one in of)
            return made
        if isinstance(of, dict):
            return {key: self._copied(value, memo) for key, value in of.items()}
        if isinstance(of, tuple):
            return tuple(self._copied(one, memo) for one in of)
        if isinstance(of, Instance) and not of.cls.is_enum:
            memo[id(of)] = other = Instance(of.cls, {})
            other.values.update((key, self._copied(value, memo)) for key, value in of.values.items())
            return other
        return self._replaced(of) if isinstance(of, set) else of

    def _is_instance(self, of: Any, kinds: Any) -> Any:
        found = [self._is_one(of, kind) for kind in (kinds if isinstance(kinds, tuple) else (kinds,))]
        if True not in found and None in found:
            return Outside(f"isinstance({said(of)}, {said(kinds)})", is_call=True)
        return True in found

    def _is_one(self, of: Any, kind: Any) -> bool | None:
        """Return True, False, or None where the text does not say."""
        if isinstance(of, Outside) and not isinstance(kind, Class):  # no class of the text, as far as it says
            is_same = isinstance(kind, Outside) and kind.name.rpartition(".")[2] == of.name.rpartition(".")[2]
            return is_same or (None if of.is_call and not of.constructor else False)
        if kind is None:
            return of is None
        if isinstance(kind, type):
            return isinstance(of, kind)
        if isinstance(kind, Outside) and kind.name.endswith("Callable"):
            return callable(of) or isinstance(of, Class | Partial)
        return isinstance(of, Instance) and kind in of.cls.mro

    def _is_subclass(self, cls: Any, kinds: Any) -> bool:
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        return isinstance(cls, Class) and any(kind in cls.mro for kind in kinds)


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


def _type_of(of: Any) -> Any:
    if isinstance(of, Outside):
        return Outside(of.name, is_call=of.constructor is None)
    return of.cls if isinstance(of, Instance) else type(of)


def said(value: Any) -> str:
    """Return a value as a message names it."""
    match value:
        case Exception():
            return (value.message if isinstance(value, NotReadError) else f"{type(value).__name__}: {value}")[:LONGEST]
        case Outside():
            return value.name[:LONGEST]
        case Instance() | Class():
            return f"<{value.cls.qualname if isinstance(value, Instance) else value.qualname}>"
        case Function():
            return value.qualname
        case str() | int() | float() | None:
            return repr(value)[:100]
    return f"<{type(value).__name__}>"
