"""Engines by name, as the installed packages name them.

A package names an engine as an entry point of the group `meshwright.engines`, whose value is the module of the
engine's contract (`meshwright.engines.base`). Beside it lies the module `facts` with what must be known of the engine
to plan for it: `FACTS`, a `meshwright.planner.EngineFacts`. Names are read in the packages' metadata: to know them
imports nothing of an engine, and its facts import nothing of its contract.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from meshwright.catalog.entries import by_name
from meshwright.errors import InputError, MissingDependencyError, UnknownNameError
from meshwright.specs.hardware import THIS_MACHINE, Accelerator, Cluster

ENTRY_POINTS = "meshwright.engines"
"""Group of the entry points under which installed packages name their engines."""

FACTS_MODULE = "facts"

ANY = "any"
"""The engine of a run that is planned and estimated for no particular program: it has all choices of a plan."""

_ANY_POINT = EntryPoint(ANY, "meshwright.engines.planned_only.contract", ENTRY_POINTS)


@cache
def _installed() -> dict[str, list[EntryPoint]]:
    """Read once: it takes 10 ms where a hundred packages are installed."""
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=ENTRY_POINTS):
        found.setdefault(point.name, []).append(point)
    return found


def engine_names() -> tuple[str, ...]:
    """The engines of all installed packages."""
    return tuple(sorted(_installed()))


def planning_names() -> tuple[str, ...]:
    """The engines that a run may name: those installed, and `any`."""
    return (*engine_names(), ANY) if _installed() else ()


@by_name
def engine_contract(name: str) -> Any:
    """The contract of the engine called `name`, imported. Raises as `engine_facts`."""
    return _import(name, _point(name).load)


@by_name
def engine_facts(name: str) -> Any:
    """The `FACTS` of the engine called `name`; `meshwright.planner.engine_facts` is the typed one.

    Raises UnknownNameError where no installed package names it, InputError where several do,
    MissingDependencyError where Meshwright itself is not installed or the engine cannot be imported.
    """
    package = _point(name).module.rpartition(".")[0]
    if not package:
        raise InputError("the contract of this engine lies in no package, so that nothing lies beside it", got=name)
    return _import(name, lambda: import_module(f"{package}.{FACTS_MODULE}").FACTS)


def runs_on(engine: str, accelerator: Accelerator) -> bool:
    """Return True if `engine` runs on `accelerator`; what this machine is, it is asked before a training.

    >>> from meshwright.catalog.accelerators import accelerator
    >>> [runs_on(name, accelerator("tpu-v5p")) for name in ("maxtext", "torchtitan", "any")]
    [True, False, True]
    """
    vendors = engine_facts(engine).vendors
    return not vendors or accelerator.vendor in (*vendors, THIS_MACHINE)


def engines_on(accelerator: Accelerator) -> tuple[str, ...]:
    """Return the installed engines that run on `accelerator`."""
    return tuple(name for name in engine_names() if runs_on(name, accelerator))


def says_where(engine: str, accelerator: Accelerator) -> tuple[str, str]:
    """Return that `engine` does not run on `accelerator`, and a hint with the engines that do."""
    able = engines_on(accelerator)
    there = f"engine: {' or '.join(able)} runs there" if able else "no engine here runs there"
    return (
        f"{engine_facts(engine).title} does not run on {accelerator.name}",
        f"{there}; engine: {ANY} plans and estimates without naming a program",
    )


def refuse_engine(engine: str, cluster: Cluster) -> None:
    """Raise InputError, with the engines that run there, if `engine` does not run on the devices of `cluster`.

    Parts of a cluster have one vendor.
    """
    if not runs_on(engine, cluster.accelerator):
        message, hint = says_where(engine, cluster.accelerator)
        allowed = ", ".join((*engines_on(cluster.accelerator), ANY))
        raise InputError(message, got=engine, allowed=allowed, hint=hint)


def _point(name: str) -> EntryPoint:
    if name == ANY:
        return _ANY_POINT
    installed = _installed()
    if not installed:  # the source was moved or is on the path without its metadata
        raise MissingDependencyError(
            "this installation names no engines", hint="pip install meshwright, or pip install -e . in its source"
        )
    if name not in installed:
        raise UnknownNameError("engine", name, known=planning_names())
    values = sorted({point.value for point in installed[name]})
    if len(values) > 1:
        raise InputError(
            "several installed packages name this engine", got=name, hint=f"keep one of {', '.join(values)}"
        )
    return installed[name][0]


def _import(name: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except (ImportError, AttributeError) as error:
        raise MissingDependencyError(f"the engine {name} cannot be imported: {error}") from error
