"""Run configurations of torchtitan, and print their trees: the reference of what the package reads as text.

    python -m tests.engines.torchtitan.executed llama3:llama3_8b titan/meshwright_run.py:train

prints one object: name of a configuration -> its tree as `config_text.tree` describes it, or the error.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import json
import sys
from enum import Enum
from pathlib import Path
from typing import Any

from meshwright.engines.software_line import found_lines

PACKAGES = ("torchtitan.models", "torchtitan.experiments")  # torchtitan's `--module` searches them too


def evaluate(source: str) -> dict[str, Any]:
    """Return the tree of MODULE:FUNCTION or PATH.py:FUNCTION, or `{"error": ...}`."""
    name, _, function = source.rpartition(":")
    try:
        module = load_module(name)
        tree, lines = node(getattr(module, function)()), found_lines(Path(module.__file__).read_text(encoding="utf-8"))
        return tree | {"software": lines} if lines else tree
    except Exception as error:  # a program may raise any exception
        return {"error": f"{type(error).__name__}: {error}"}


def load_module(source: str) -> Any:
    """Import a module by its path, by its name, or by torchtitan's name of its model."""
    if source.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(source).stem, source)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    names = [f"{package}.{source}.config_registry" for package in PACKAGES] if "." not in source else []
    for name in (*names, f"{source}.config_registry", source):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not name.startswith(error.name or name):  # a module that it imports is absent
                raise
    raise ModuleNotFoundError(f"there is no module {source}, and torchtitan has no model of this name")


def node(value: Any) -> Any:
    """Return `value` as JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f for f in dataclasses.fields(value) if f.init]
        return {
            "is": (getattr(value, "_owner", None) or type(value)).__name__,
            "fields": {f.name: node(getattr(value, f.name)) for f in fields},
            "given": [f.name for f in fields if _is_given(getattr(value, f.name), f)],
        }
    if isinstance(value, dict):
        return {str(key): node(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [node(one) for one in value]
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, functools.partial):
        return {"function": _name(value.func), **node(value.keywords)}
    return {"function": _name(value)}


def _is_given(value: Any, field: dataclasses.Field[Any]) -> bool:
    if field.default is not dataclasses.MISSING:
        return value != field.default
    return field.default_factory is dataclasses.MISSING or value != field.default_factory()


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__


if __name__ == "__main__":
    print(json.dumps({source: evaluate(source) for source in sys.argv[1:]}))
