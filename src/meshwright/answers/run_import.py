"""The configuration of an engine as a run file."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import signature
from io import StringIO
from pathlib import Path
from typing import Any, cast

from ruamel.yaml import YAML

from meshwright import runfile
from meshwright.answers.documents.plan import memory_document
from meshwright.answers.run_export import plan_memory
from meshwright.catalog.engines import engine_names
from meshwright.engines.base import ASSUMED, FollowedCall, Imported, ImportingEngine, StatedCluster, find_engine
from meshwright.engines.maxtext_scripts import maxtext_call
from meshwright.engines.recognition import recognised
from meshwright.engines.trainer_scripts import trainer_call
from meshwright.errors import InputError
from meshwright.files import is_there, write_atomically
from meshwright.json_values import jsonable
from meshwright.planner.engines import engine_facts
from meshwright.result import Result
from meshwright.runfile.hardware import stated_cluster
from meshwright.specs.estimate import MemoryEstimate
from meshwright.specs.run import Run


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RunImport(Result):
    """A run file that was made of another program's configuration.

    Attributes:
        run: the run.
        content: its run file as dicts and lists.
        text: its run file.
        file: the run file that was written, or None.
        memory: memory of the plan's fullest device; None where there is no plan, or it cannot be estimated.
        notes: settings without a key in a run file, and what the engine and the estimate find wrong.
    """

    run: Run
    content: Mapping[str, Any]
    text: str
    file: Path | None
    memory: MemoryEstimate | None
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        memory = memory_document(self.memory) if self.memory else None
        return jsonable({"run": self.content, "memory": memory, "notes": self.notes, "file": self.file})

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each note."""
        return [{"note": note} for note in self.notes]

    def summary(self) -> str:
        """Return the model, the engine and the number of notes."""
        count = len(self.notes)
        return f"{self.run.model.name} for {self.run.engine}, {count} {'note' if count == 1 else 'notes'}"


def import_configuration(
    source: str,
    *,
    engine: str | None,
    cluster: str | Mapping[str, Any],
    accelerator: str | os.PathLike[str] | None = None,
    network: str | None = None,
    device_memory: str | None = None,
    ignore: Sequence[str] = (),
    file: Path | None = None,
) -> RunImport:
    """Return the run that `source` describes; with `file`, its run file is written there.

    Raises InputError for what cannot be read or has no place in a run file, or where it cannot be written.
    """
    source = shlex.quote(source) if is_there(source) else source
    _require_file(source)
    name = engine or _engine_of(source)
    reader = find_engine(name)
    if not hasattr(reader, "import_run"):
        raise InputError("configurations of this engine are not read", got=name)
    hardware = {"accelerator": accelerator, "network": network, "device_memory": device_memory}
    follow = {"maxtext": maxtext_call, "native": trainer_call, "trl": trainer_call}.get(name)
    call = follow(source) if follow else FollowedCall(source=source)
    found = _read(cast("ImportingEngine", reader), call, cluster=stated_cluster(cluster, **hardware), ignore=ignore)
    stream = StringIO()
    YAML().dump(found.content, stream)
    assumed = "".join(f"# {note}\n" for note in found.notes if note.startswith(ASSUMED))
    text = (
        f"# From {' '.join(source.split())}, a configuration of {found.program or name}\n{assumed}{stream.getvalue()}"
    )
    run = runfile.loads(text, file=str(file or "run.yaml"))
    refusals = [f"the {name} engine: {problem}" for problem in reader.check(run)]
    memory, cautions = plan_memory(run)
    notes = (*call.notes, *found.notes, *refusals, *cautions)
    if file is not None:
        try:
            write_atomically(file, text)
        except OSError as error:
            raise InputError(f"cannot write {file}: {error.strerror or error}") from error
    return RunImport(run=run, content=found.content, text=text, file=file, memory=memory, notes=notes)


def _read(reader: ImportingEngine, call: FollowedCall, *, cluster: StatedCluster, ignore: Sequence[str]) -> Imported:
    """Return what the engine reads, without the keys of `ignore` if there are any."""
    more = {"contents": call.contents} if call.contents else {}
    if ignore and "ignore" not in signature(reader.import_run).parameters:
        raise InputError(
            "--ignore: the engine of this configuration has no keys to ignore", got=", ".join(ignore),
            hint="leave the setting out of a copy of the configuration",
        )  # fmt: skip
    return reader.import_run(call.source, cluster=cluster, **more, **({"ignore": ignore} if ignore else {}))


def _require_file(source: str) -> None:
    """Raise InputError if a pipe or device is among the files of `source`, which are read several times."""
    with suppress(ValueError):  # open quotes, which the reader reports
        for name in shlex.split(source):
            with suppress(OSError):
                path = Path(name)
                if path.exists() and not (path.is_file() or path.is_dir()):
                    raise InputError("a pipe or device is no configuration", got=name, hint="write it to a file first")


def _engine_of(source: str) -> str:
    """The engine of a configuration: by the content of the file, else by its ending, or MODULE:FUNCTION."""
    named = {name: engine_facts(name).configurations for name in engine_names()}
    with suppress(ValueError):  # open quotes, which the reader reports
        source = (shlex.split(source) or [""])[0]  # settings may stand behind it
    if found := recognised(Path(source)):
        return found.engine
    if Path(source).is_dir():
        hint = f"meshwright import --survey {shlex.quote(source)} lists the configurations below it"
        raise InputError("the folder is no configuration of a run", got=source, hint=hint)
    if Path(source).is_file() and not Path(source).read_bytes().strip():
        raise InputError("the file is empty", got=source)
    path, colon, function = source.rpartition(":")
    ending = Path(path if colon and function.isidentifier() else source).suffix
    claimed = [[name for name, endings in named.items() if mark in endings] for mark in (ending, colon) if mark]
    owners = next((names for names in claimed if names), [])
    if len(owners) == 1:
        return owners[0]
    allowed = [mark for endings in named.values() for mark in endings if mark != ":"]
    raise InputError(
        "the name does not show which engine this configuration is for",
        got=source,
        allowed=", ".join(owners) or f"MODULE:FUNCTION, or a name that ends with {', '.join(allowed)}",
        hint="name the engine with --engine",
    )
