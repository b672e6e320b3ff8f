"""A configuration of torchtitan, read as text, as the tree of its classes. A node is

    {"is": "Linear", "fields": {name: value, ...}, "given": [names of the fields that are not at their defaults]}

with the class that the configuration builds. A function is {"function": name} with its bound arguments. The line of an
exported module that states the software of its run is under "software".
"""

from __future__ import annotations

from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

from meshwright.engines.software_line import found_lines
from meshwright.engines.torchtitan.config_text.calls import said
from meshwright.engines.torchtitan.config_text.modules import ProjectModules, changed_ns, module_of
from meshwright.engines.torchtitan.config_text.reader import Reader
from meshwright.engines.torchtitan.config_text.values import Function, NotReadError, Outside, ProgramObject
from meshwright.errors import InputError

PACKAGES = ("torchtitan.models", "torchtitan.experiments")  # torchtitan's `--module` searches them too
OF_FUNCTIONS = frozenset(("param_init", "sharding_config"))
"""Fields whose values functions of other packages make when the model is built."""


_last: dict[tuple[str, str, Path], tuple[dict[str, int], dict[str, Any] | InputError]] = {}
"""The last configuration with the times of its files: a survey asks for it once for each cluster."""


def read_tree(module: str, function: str) -> dict[str, Any]:
    """Return the tree of FUNCTION of a module, given by its path, its name or torchtitan's name of its model.

    Raises InputError for a module that is not there, and for a configuration that its text does not state.
    """
    key = (module, function, Path.cwd())
    times, found = _last.get(key, ({}, None))
    if found is None or any(changed_ns(file) != time for file, time in times.items()):
        modules = ProjectModules(module_of(Path(module))[0] if module.endswith(".py") else Path())
        try:
            found = _read(modules, module, function)
        except InputError as error:
            found = error
        _last.clear()
        _last[key] = (modules.times, found)
    if isinstance(found, InputError):
        raise found
    return found


def _read(modules: ProjectModules, module: str, function: str) -> dict[str, Any]:
    if module.endswith(".py"):
        if not Path(module).is_file():
            raise InputError("there is no such file", got=module)
        names = [module_of(Path(module))[1]]
    else:
        named = [f"{package}.{module}.config_registry" for package in PACKAGES] if "." not in module else []
        names = [*named, f"{module}.config_registry", module]
    name = next((one for one in names if modules.find(one)), None)
    text = modules.find(name) if name else None
    if name is None or text is None:
        raise InputError(
            f"there is no text of a module {module}, and torchtitan has no model of this name",
            hint="name the file: PATH.py:FUNCTION",
        )
    tree = _Nodes(Reader(modules)).of_function(name, function, file=text.file)
    lines = found_lines(text.text)
    return tree | {"software": lines} if lines and isinstance(tree, dict) else tree


class _Nodes:
    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._unknown: list[str] = []

    def of_function(self, module: str, function: str, *, file: str) -> dict[str, Any]:
        """Return the tree of what a function without arguments returns."""
        reader = self._reader
        source = f"{file}:{function}"
        try:
            scope = reader.module(module)
            if scope is None or function not in scope.names:
                names = scope.names if scope else {}
                known = [
                    name for name, value in names.items() if isinstance(value, Function) and not name.startswith("_")
                ]
                raise InputError(f"{file} has no function {function}", got=function, allowed=", ".join(known) or None)
            tree = self.node(reader.call(reader.resolved(scope.names, function), (), {}))
        except NotReadError as error:
            raise InputError(f"{source} is not read as text: {error.message}", hint=_HINT) from None
        except InputError:
            raise
        except RecursionError:
            raise InputError(f"{source} is not read as text: it is nested too deeply") from None
        except Exception as error:  # a program may raise any exception
            raise InputError(f"torchtitan cannot build {source}: {said(error)}", got=reader.place or None) from None
        if self._unknown:
            raise InputError(
                f"the text of {source} does not state {len(self._unknown)} of its values",
                got="; ".join(self._unknown[:20]) + "; ..." * (len(self._unknown) > 20), hint=_HINT,
            )  # fmt: skip
        return tree

    def node(self, value: Any, path: str = "") -> Any:
        """Return `value` as JSON."""
        self._reader.spend(1 + (len(path) + (len(value) if isinstance(value, str) else 0)) // 64)
        match value:
            case Enum():
                return value.name
            case ProgramObject() if is_dataclass(value):
                return self._instance(value, path)
            case dict():
                return {str(key): self.node(one, f"{path}.{key}") for key, one in value.items()}
            case list() | tuple():
                return [self.node(one, f"{path}.{i}") for i, one in enumerate(value)]
            case None | bool() | int() | float() | str():
                return value
            case partial():
                return {"function": _name(value.func), **self.node(value.keywords, path)}
            case Outside() if value.is_call:
                return self._outside(value, path)
        return {"function": _name(value)}

    def _instance(self, value: Any, path: str) -> dict[str, Any]:
        held = [one for one in fields(value) if one.init and one.name in vars(value)]
        owner = getattr(type(value), "_owner", type(value))
        return {
            "is": owner.__name__,
            "fields": {one.name: self.node(getattr(value, one.name), f"{path}.{one.name}") for one in held},
            "given": [one.name for one in held if self._is_given(getattr(value, one.name), one)],
        }

    def _is_given(self, value: Any, field: Field[Any]) -> bool:
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if not isinstance(default, int | float | str | None):
            self._reader.weigh([value, default])
        return default is MISSING or bool(value != default)

    def _outside(self, value: Outside, path: str) -> dict[str, Any]:
        if value.constructor is None and not OF_FUNCTIONS.intersection(path.split(".")):
            self._unknown.append(f"{path.strip('.')} = {said(value)}")
        named = self.node(value.named, path)
        if value.constructor is None:
            return {"function": _name(value), **named}
        kind, other = value.constructor
        fields = named | ({other: self.node([*value.positional], path)} if other else {})
        return {"is": kind, "fields": fields, "given": [*fields]}


_HINT = "state the values in a copy of the configuration"


def _name(function: Any) -> str:
    match function:
        case Outside():
            return function.name.rpartition(".")[2]
        case Function():
            return function.qualname
        case MethodType():
            return _name(function.__func__)
    return getattr(function, "__qualname__", None) or type(function).__name__
