"""`meshwright import`: the configuration of another engine as a run file."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any, cast

from ruamel.yaml import YAML

from meshwright import runfile
from meshwright.catalog.engines import engine_names
from meshwright.cli.export import lint
from meshwright.cli.output import emit_json, note
from meshwright.engines.base import ImportingEngine, find_engine
from meshwright.errors import InputError
from meshwright.files import write_atomically
from meshwright.planner.engines import engine_facts
from meshwright.runfile.hardware import stated_cluster


def run(
    *, source: str, engine_name: str | None, cluster: str, out: Path | None, as_json: bool, **hardware: Any
) -> None:
    """Read the configuration, write the run file, and note what is wrong with the run."""
    name = engine_name or _engine_of(source)
    engine = find_engine(name)
    if not hasattr(engine, "import_run"):
        raise InputError("configurations of this engine are not read", got=name)
    found = cast("ImportingEngine", engine).import_run(source, cluster=stated_cluster(cluster, **hardware))
    stream = StringIO()
    YAML().dump(found.content, stream)
    text = f"# From {source}, a configuration of {name}\n{stream.getvalue()}"
    run = runfile.loads(text, file=str(out or Path(source).with_suffix(".yaml")))
    refusals = [f"the {name} engine: {problem}" for problem in engine.check(run)]
    notes = [*found.notes, *refusals, *lint(run)]
    if out is not None:
        try:
            write_atomically(out, text)
        except OSError as error:
            raise InputError(f"cannot write {out}: {error.strerror or error}") from error
    if as_json:
        emit_json({"run": found.content, "notes": notes, "file": out})
        return
    if out is None:
        print(text, end="")
    for caution in notes:
        note(caution)


def _engine_of(source: str) -> str:
    """The engine whose configuration `source` is, by its name: a file's ending, or MODULE:FUNCTION."""
    named = {name: engine_facts(name).configurations for name in engine_names()}
    source = source.partition(" ")[0]  # settings may stand behind it
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
