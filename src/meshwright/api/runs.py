"""The run that a function is about: a `Run`, a run file, a mapping, or keyword arguments."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright import runfile
from meshwright.api import arguments
from meshwright.api.question import AnyName, AnyPath, Count, OneOf, Parsed, QuestionParameter, Unchecked
from meshwright.errors import InputError
from meshwright.specs.run import Objective, Run

RunSource = Run | str | os.PathLike[str] | Mapping[str, Any]
"""A resolved run, the path or the shipped name of a run file, or the content of one."""

Overrides = Sequence[str] | Mapping[str, Any]
"""Keys of a run file with new values: {"train.steps": 20} or ["train.steps=20"]."""

OVERRIDES = Parsed(
    "Set one key of the run file, as in --set batch.micro=2; VALUE is YAML.",
    parse=lambda name, value: arguments.overrides(value),
    flag="--set",
    metavar="KEY=VALUE",
)


@dataclass(frozen=True, kw_only=True)
class RunParameter(AnyPath):
    """A run file by its path or shipped name; from Python also a `Run`, or the content of a file."""

    is_folder: bool = False

    def one(self, name: str, value: object) -> Any:
        if not isinstance(value, Run | Mapping | str | os.PathLike):
            allowed = "a Run, the path or name of a run file, or a mapping"
            raise InputError(name, got=type(value).__name__, allowed=allowed)
        return value


class EngineName(Unchecked):
    """The name of an engine. The option lists those to plan for."""


RUN = RunParameter("A `Run`, the path or shipped name of a run file, or its content.", metavar="RUN.yaml")
MODEL = Unchecked(
    "Catalogue name (see `meshwright catalog models`), Hugging Face config.json, or OWNER/NAME on its hub.",
    key="model",
    metavar="MODEL",
)
CLUSTER = Unchecked(
    "ACCELERATOR-DEVICESxNODES: mi355x-8x64 has 64 nodes of 8 devices (see `meshwright catalog clusters`).",
    key="cluster",
    metavar="CLUSTER",
)
ACCELERATOR = AnyPath(
    "Your own accelerator NAME, from NAME.toml, for --cluster NAME-8x4. `meshwright catalog template accelerator` "
    "prints such a file.",
    key="cluster.accelerator",
    is_folder=False,
    metavar="FILE.toml",
)
NETWORK = Unchecked(
    "Network of a node in place of the usual one: 25Gb/s, 4x100Gb/s, or with its kind '8x400Gb/s RoCE' "
    "(InfiniBand, RoCE, EFA, Ethernet).",
    key="cluster.network",
    metavar="RATE",
)
DEVICE_MEMORY = Unchecked(
    "Memory of a device that the run may use, as in 40GiB: a partition, or what others leave.",
    key="cluster.device_memory",
    metavar="SIZE",
)
GLOBAL_SEQUENCES = Count("Global batch size: sequences per optimizer step.", key="batch.global_sequences", flag="--gbs")
SEQUENCE_LENGTH = Count("Sequence length in tokens.", key="data.sequence_length", flag="--seq", metavar="TOKENS")
PRECISION = Unchecked(
    "Number formats: fp32, bf16, fp16, fp8, fp8_delayed, fp8_rowwise, fp8_blockwise, mxfp8, nvfp4 or mxfp4.",
    key="precision",
    unset="the run file's, or bf16",
    metavar="RECIPE",
)
ENGINE = EngineName(
    "Program that trains; only plans that it supports are searched. `any`: whatever program trains, with every choice "
    "of a plan that the cost model knows.",
    key="engine",
    unset="the run file's, or native; without a run file the one with most measured runs on the accelerators",
)
OBJECTIVE = OneOf(
    "What to optimize: tokens per second and device, time to train, cost, or energy.",
    key="objective",
    unset="the run file's, or throughput",
    values=tuple(goal.value for goal in Objective),
    synonyms=("tokens",),
)
CALIBRATION = AnyName(
    "Device calibration written by `meshwright calibrate`.",
    key="calibration",
    unset="for cluster `here` the installed one",
    metavar="FILE",
)
KEYS: Mapping[str, QuestionParameter] = {
    "model": MODEL, "cluster": CLUSTER, "accelerator": ACCELERATOR, "network": NETWORK, "device_memory": DEVICE_MEMORY,
    "global_sequences": GLOBAL_SEQUENCES, "sequence_length": SEQUENCE_LENGTH, "precision": PRECISION, "engine": ENGINE,
    "objective": OBJECTIVE, "calibration": CALIBRATION,
}  # fmt: skip
"""Parameters and options of keys of the run file, in the order in which they replace the keys of a run."""

FIXED = Parsed(
    'Fix fields of the plan, as in tensor=8,micro_batch=1, tp=8,mbs=1 or "TP8 mbs1".',
    parse=arguments.plan_fields,
    flag="--fix",
    metavar="NAME=VALUE",
)
WHY_NOT = Parsed(
    'Explain why no plan with these fields is best, as in tensor=8 or "TP8 PP4".',
    parse=arguments.questions,
    metavar="NAME=VALUE",
)

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
    changes = arguments.overrides(overrides)
    if isinstance(source, Run):
        return _reloaded(source, (*source.overrides, *changes)) if changes else source
    if isinstance(source, Mapping):
        content = arguments.plain("run", source)
        run = runfile.from_mapping(content, overrides=changes)
        return run if "name" in content else replace(run, name=run.model.name)
    return runfile.load(arguments.path("run", RUN.one("run", source)), overrides=changes)


def calibrating(calibration: str | None) -> list[str]:
    """The override of a run file that names a calibration; none without one."""
    return [] if calibration is None else [f"calibration={json.dumps(calibration)}"]


def planned_run(source: RunSource) -> Run:
    """Load a run to plan for. A run for this machine gets the installed calibration, if there is one."""
    from meshwright.calibration.device import installed_path

    run = load_run(source)
    if run.cluster is None and run.calibration is None and (installed := installed_path()).is_file():
        return _reloaded(run, (*calibrating(str(installed)), *run.overrides))
    return run


def given_run(
    source: RunSource | None,
    *,
    overrides: Overrides = (),
    are_options: bool = False,
    may_replace: bool = False,
    **keys: Any,
) -> Run:
    """Load the run that is given as `source`, or by `keys`, arguments of `KEYS` by name; None is none.

    Options replace keys of `source`, and errors name them as options; arguments do where they `may_replace`. Raises
    InputError where other arguments of a function are given with `source`, or not all that a run needs.
    """
    from meshwright.runfile import NamedOverride

    given = {name: arguments.plain(name, keys[name]) for name in KEYS if keys.get(name) is not None}
    called = {name: KEYS[name].option(name) if are_options else name for name in KEYS}
    _refuse_given_twice(given, called, arguments.overrides(overrides), are_options=are_options)
    if source is None:
        return planned_run(_run_of_keys(given, called, overrides=overrides, is_command=are_options))
    if given and not (are_options or may_replace):
        name = next(iter(given))
        raise InputError(
            f"a run and {', '.join(given)} are both given",
            hint=f"change the run: load_run(run, overrides={{{KEYS[name].key!r}: {given[name]!r}}})",
        )
    replaced = [
        NamedOverride(f"{KEYS[name].key}={json.dumps(value)}", name=called[name]) for name, value in given.items()
    ]
    if "global_sequences" in given:
        replaced.append(NamedOverride("batch.global_tokens=null", name=called["global_sequences"]))
    return planned_run(load_run(source, overrides=[*replaced, *arguments.overrides(overrides)]))


def with_run(asked: dict[str, Any], *, may_replace: bool) -> dict[str, Any]:
    """Arguments of a question with the run that they describe as `run`, by `given_run`."""
    keys = {name: asked.pop(name) for name in KEYS if name in asked}
    return asked | {
        "run": given_run(asked["run"], overrides=asked.pop("overrides", ()), may_replace=may_replace, **keys)
    }


def _refuse_given_twice(
    given: Mapping[str, Any], called: Mapping[str, str], overrides: Sequence[str], *, are_options: bool
) -> None:
    """Raise InputError if an argument and an override both give a key; an override may give its whole section."""
    for changed in (override.partition("=")[0].strip() for override in overrides):
        for name, value in given.items():
            key = KEYS[name].key
            if key == changed or key.startswith(f"{changed}."):
                other = f"--set {changed}=" if are_options else f"the override of {changed}"
                raise InputError(
                    f"{called[name]} and {other} are both given", got=str(value), hint="leave one of both out"
                )


def _run_of_keys(given: Mapping[str, Any], called: Mapping[str, str], *, overrides: Overrides, is_command: bool) -> Run:
    """The run of nothing but the values of keys by name; `called`: what errors call the names."""
    from meshwright.engines.choice import with_usual_engine

    missing = [called[name] for name in _REQUIRED if name not in given]
    if missing:
        *most, last = (called[name] for name in _REQUIRED)
        what = "a run file" if is_command else "a run"
        raise InputError(f"missing {', '.join(missing)}", hint=f"give {what}, or {', '.join(most)} and {last}")
    content: dict[str, Any] = {}
    for name, value in given.items():
        section, _, key = KEYS[name].key.rpartition(".")
        if section == "cluster":
            of = content[section]
            content[section] = dict(of) if isinstance(of, Mapping) else {"name": of}
        (content.setdefault(section, {}) if section else content)[key] = value
    run = runfile.from_mapping(
        content,
        file="command line" if is_command else "run",
        overrides=arguments.overrides(overrides),
        names={KEYS[name].key: called[name] for name in given},
    )
    named = replace(run, name=run.model.name)
    return with_usual_engine(named) if run.is_engine_open else named


def _reloaded(run: Run, overrides: Sequence[str]) -> Run:
    """The same run file with other overrides. A plan that was pinned later is lost with its run file."""
    return replace(runfile.loads(run.text, file=run.source, overrides=overrides), name=run.name)
