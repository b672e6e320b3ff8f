"""A run from a file, from options, or from both: options replace the file's keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright import runfile
from meshwright.api.runs import planned_run
from meshwright.catalog.accelerators import accelerator_names, status_of
from meshwright.cli.options import text_override
from meshwright.cli.output import note
from meshwright.errors import InputError
from meshwright.specs.run import Run

_FLAGS = {
    "model": "--model", "cluster": "--cluster", "batch.global_sequences": "--gbs", "data.sequence_length": "--seq",
    "precision": "--precision", "engine": "--engine", "objective": "--objective", "cluster.network": "--network",
    "cluster.device_memory": "--device-memory", "cluster.accelerator": "--accelerator", "calibration": "--calibration",
}  # fmt: skip
"""Options that replace keys of a run file."""
_REQUIRED = ("model", "cluster", "batch.global_sequences", "data.sequence_length")


def run_from(run_path: Path | None, *, overrides: Sequence[str] = (), **run_options: Any) -> Run:
    """Return the run that a command line describes; on this machine with its installed calibration, if any.

    Arguments are those of `_run`, which raises InputError.
    """
    run = planned_run(_run(run_path, overrides=overrides, **run_options))
    for device in dict.fromkeys(_devices(run)):
        if device in accelerator_names() and (status := status_of(device)):
            note(f"{device}: {status}")
    return run


def _devices(run: Run) -> list[str]:
    """The accelerators of the run's cluster by name; none where it is not known."""
    parts = (run.cluster.parts or (run.cluster,)) if run.cluster else ()
    return [part.accelerator.name for part in parts]


def _run(
    run_path: Path | None,
    *,
    overrides: Sequence[str] = (),
    model: str | None = None,
    cluster: str | None = None,
    accelerator: Path | None = None,
    network: str | None = None,
    device_memory: str | None = None,
    global_batch: int | None = None,
    sequence_length: int | None = None,
    precision: str | None = None,
    engine: str | None = None,
    objective: str | None = None,
    calibration: str | None = None,
) -> Run:
    """The run that a command line describes. `overrides` are those of `--set`; they come last.

    Raises InputError when there is neither a file nor all options that are needed without one.
    """
    given = {
        "model": model, "cluster": cluster, "data.sequence_length": sequence_length,
        "batch.global_sequences": global_batch, "precision": precision, "engine": engine, "objective": objective,
    }  # fmt: skip
    hardware = {
        "cluster.accelerator": None if accelerator is None else str(accelerator),
        "cluster.network": network, "cluster.device_memory": device_memory,
    }  # fmt: skip
    _refuse_keys_given_twice({**given, **hardware}, overrides)
    stated = {"calibration": calibration, **hardware}
    named = [_named(key, one) for key, text in stated.items() for one in text_override(key, text)]
    overrides = [*named, *overrides]
    goal = [] if objective is None else [f"objective={objective}"]
    if run_path is not None:
        replaced = [_named(key, f"{key}={value}") for key, value in given.items() if value is not None]
        if global_batch is not None:
            replaced.append("batch.global_tokens=null")  # the file may count the batch in tokens
        return runfile.load(run_path, overrides=[*replaced, *overrides])
    if model is None or cluster is None or global_batch is None or sequence_length is None:
        missing = [_FLAGS[key] for key in _REQUIRED if given[key] is None]
        raise InputError(
            f"missing {', '.join(missing)}", hint="give a run file, or --model, --cluster, --gbs and --seq"
        )
    return runfile.from_options(
        model=model,
        cluster=cluster,
        global_batch=global_batch,
        sequence_length=sequence_length,
        precision=precision or "bf16",
        engine=engine,
        overrides=[*goal, *overrides],
    )


def _named(key: str, assignment: str) -> str:
    """The override of an option, which errors call by the option's name."""
    return runfile.NamedOverride(assignment, name=_FLAGS[key])


def _refuse_keys_given_twice(given: Mapping[str, object], overrides: Sequence[str]) -> None:
    """Raise InputError if an option and --set both give a key of the run file; --set may give its whole section."""
    for key in (override.partition("=")[0].strip() for override in overrides):
        for name, value in given.items():
            if value is not None and (name == key or name.startswith(f"{key}.")):
                raise InputError(
                    f"{_FLAGS[name]} and --set {key}= are both given", got=str(value), hint="leave one of both out"
                )


def check_targets(write_path: Path | None, *others: Path | None, is_apply: bool, overrides: Sequence[str]) -> None:
    """Raise InputError if --apply, --write and --set contradict each other, or the folder of a file is missing."""
    if is_apply and write_path is not None:
        raise InputError("--apply and --write are both given", allowed="one of them")
    if is_apply and overrides:
        raise InputError(
            "--apply changes the file, and --set changes the run only", hint="--write OUT.yaml writes both"
        )
    for path in (write_path, *others):
        if path is not None and not path.parent.is_dir():
            raise InputError(f"cannot write {str(path)!r} (no such folder)")
