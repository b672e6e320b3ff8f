"""The run that a function is about: a `Run`, a run file, a mapping, or keyword arguments."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshwright.api import arguments
from meshwright.api.question import Changes
from meshwright.errors import InputError
from meshwright.specs.run import Objective, Run

RunSource = Run | str | os.PathLike[str] | Mapping[str, Any]
"""A resolved run, the path or the shipped name of a run file, or the content of one."""

Overrides = Sequence[str] | Mapping[str, Any]
"""Keys of a run file with new values: {"train.steps": 20} or ["train.steps=20"]."""

OVERRIDES = Changes(
    "Set one key of the run file, as in --set batch.micro=2; VALUE is YAML.", flag="--set", metavar="KEY=VALUE"
)

_KEYS = {
    "model": "model",
    "cluster": "cluster",
    "accelerator": "cluster.accelerator",
    "network": "cluster.network",
    "device_memory": "cluster.device_memory",
    "global_sequences": "batch.global_sequences",
    "sequence_length": "data.sequence_length",
    "precision": "precision",
    "engine": "engine",
    "objective": "objective",
}
"""Keyword arguments and the keys of the run file that they stand for."""

_REQUIRED = ("model", "cluster", "global_sequences", "sequence_length")


def load_run(source: RunSource, *, overrides: Overrides = ()) -> Run:
    """Load a run: everything one training run needs, resolved and checked.

    Args:
        source: path of a run file, name of one that ships (`mw.catalog.runs()`), or its content as a mapping.
            A `Run` is loaded again with the overrides.
        overrides: keys of the run file with new values, as {"train.steps": 20} or ["train.steps=20"].

    Returns:
        The run. Names are looked up and units are SI; what the run file leaves to the planner is None.

    Raises:
        RunFileError: the run file is wrong; the message has file, line, key and the nearest known key.
        UnknownNameError: a model, cluster or precision is not in the catalogue.

    Example:
        >>> import meshwright as mw
        >>> run = mw.load_run("llama3-8b", overrides={"cluster": "h100-8x2"})
        >>> run.model.name, run.cluster_name, run.sequence_length
        ('llama3-8b', 'h100-8x2', 8192)
    """
    from meshwright import runfile

    changes = arguments.overrides(overrides)
    if isinstance(source, Run):
        return _reloaded(source, (*source.overrides, *changes)) if changes else source
    if isinstance(source, Mapping):
        content = arguments.plain("run", source)
        run = runfile.from_mapping(content, overrides=changes)
        return run if "name" in content else replace(run, name=run.model.name)
    if isinstance(source, str | os.PathLike):
        return runfile.load(arguments.path("run", source), overrides=changes)
    raise InputError("run", got=type(source).__name__, allowed="a Run, the path or name of a run file, or a mapping")


def planned_run(source: RunSource) -> Run:
    """Load a run to plan for. A run for this machine gets the installed calibration, if there is one."""
    from meshwright.calibration.device import installed_path

    run = load_run(source)
    if run.cluster is None and run.calibration is None and (installed := installed_path()).is_file():
        return _reloaded(run, (f"calibration={json.dumps(str(installed))}", *run.overrides))
    return run


def given_run(source: RunSource | None, *, overrides: Overrides = (), **given: Any) -> Run:
    """Load the run that is given either as `source` or by the keyword arguments of `_KEYS`.

    Raises InputError when both are given, neither, or not all that a run needs.
    """
    named = {name: value for name, value in given.items() if value is not None}
    if source is not None:
        if named:
            name = next(iter(named))
            raise InputError(
                f"a run and {', '.join(named)} are both given",
                hint=f"change the run: load_run(run, overrides={{{_KEYS[name]!r}: {named[name]!r}}})",
            )
        return planned_run(load_run(source, overrides=overrides))
    missing = [name for name in _REQUIRED if name not in named]
    if missing:
        raise InputError(
            f"missing {', '.join(missing)}", hint=f"give a run, or {', '.join(_REQUIRED[:-1])} and {_REQUIRED[-1]}"
        )
    if "accelerator" in named:
        named["accelerator"] = str(arguments.path("accelerator", named["accelerator"]))
    for name in ("global_sequences", "sequence_length"):
        named[name] = arguments.count(name, named[name])
    if "objective" in named:
        arguments.choice("objective", named["objective"], [goal.value for goal in Objective])
    content: dict[str, Any] = {}
    for name, value in named.items():
        section, _, key = _KEYS[name].rpartition(".")
        if section == "cluster":
            of = content[section]
            content[section] = dict(of) if isinstance(of, Mapping) else {"name": of}
        (content.setdefault(section, {}) if section else content)[key] = value
    from meshwright import runfile

    run = runfile.from_mapping(
        arguments.plain("run", content),
        overrides=arguments.overrides(overrides),
        names={_KEYS[name]: name for name in named},
    )
    return planned_run(replace(run, name=run.model.name))


def _reloaded(run: Run, overrides: Sequence[str]) -> Run:
    """The same run file with other overrides. A plan that was pinned later is lost with its run file."""
    from meshwright import runfile

    return replace(runfile.loads(run.text, file=run.source, overrides=overrides), name=run.name)
