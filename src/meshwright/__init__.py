"""Meshwright plans, trains and measures large language models on any GPU cluster.

    import meshwright as mw

    plans = mw.plan(model="llama3.1-8b", cluster="h100-8x4", global_sequences=512, sequence_length=8192)
    done = mw.estimate(plans.pinned())

The names in `__all__` are the public interface and follow semantic versioning; everything else is private and
may change. They are imported when they are first used, so that `import meshwright` costs nothing. Only `train`,
`generate`, `evaluate`, `bench_device`, `bench_ingest` and `mlperf_run` import a tensor framework.

To read the source, start at `meshwright.specs` (what things are), then `meshwright.cost.step` (how long a step
takes), then `meshwright.planner` (which plan is best).
"""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from meshwright.version import __version__ as __version__


def _homes() -> dict[str, str]:
    """The modules of the public names, from the imports of `__init__.pyi`, where they stand once."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    return {a.name: str(n.module) for n in stub.body if isinstance(n, ast.ImportFrom) for a in n.names}


_HOME_OF = _homes()

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name == "catalog":
        return import_module("meshwright.api.catalog")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """This package, whose public names stay what they are.

    Python binds a submodule to its package under its own name when it is first imported. The package
    `meshwright.accuracy` must not replace the function `accuracy`, nor `meshwright.catalog` the API's catalogue.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if name in _HOME_OF and isinstance(value, ModuleType):
            return
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
