"""A run from a file, from options, or from both: options replace the file's keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright import runfile
from meshwright.api.runs import KEYS, RunSource, given_run
from meshwright.catalog.accelerators import accelerator_names, status_of
from meshwright.cli.output import note
from meshwright.errors import InputError
from meshwright.specs.run import NATIVE, Run


def take_run(asked: dict[str, Any], **keys: Any) -> Run:
    """Return the run of a question, which replaces `run` in `asked`; its keys and overrides are taken out."""
    keys |= {name: asked.pop(name) for name in KEYS if name in asked}
    asked["run"] = run_from(asked["run"], overrides=asked.pop("overrides"), **keys)
    return asked["run"]


def run_from(source: RunSource | None, *, overrides: Sequence[str] = (), **keys: Any) -> Run:
    """Return the run that a command line describes; on this machine with its installed calibration, if any.

    `keys`: options of `KEYS` by name. `overrides` are the values of `--set`; they come last. Raises InputError
    when there is neither a file nor all options that are needed without one.
    """
    run = given_run(source, overrides=overrides, are_options=True, **keys)
    parts = (run.cluster.parts or (run.cluster,)) if run.cluster else ()
    for device in dict.fromkeys(part.accelerator.name for part in parts):
        if device in accelerator_names() and (status := status_of(device)):
            note(f"{device}: {status}")
    return run


def tuned_run(
    what: str, *others: Path | None, run_path: Path, overrides: Sequence[str], write_path: Path | None, is_apply: bool
) -> tuple[Run, Path | None]:
    """Return the run to tune and the run file to write: its own with --apply, the file of --write, or None.

    Raises InputError if --apply, --write and --set contradict each other, if the folder of a file is missing, or for
    another engine than the native one, of which `what` is tuned.
    """
    if is_apply and write_path is not None:
        raise InputError("--apply and --write are both given", allowed="one of them")
    if is_apply and overrides:
        raise InputError(
            "--apply changes the file, and --set changes the run only", hint="--write OUT.yaml writes both"
        )
    for path in (write_path, *others):
        if path is not None and not path.parent.is_dir():
            raise InputError(f"cannot write {str(path)!r} (no such folder)")
    run = runfile.load(run_path, overrides=overrides)
    if run.engine != NATIVE:
        raise InputError(f"only the native engine's {what} tuned", got=run.engine, hint="--set engine=native")
    return run, run_path.resolve() if is_apply else write_path
