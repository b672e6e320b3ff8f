"""`meshwright bench serve --server NAME`: start a server, measure it, and end it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from meshwright import runfile
from meshwright.bench.serving.servers.running import RunningServer, running
from meshwright.bench.serving.servers.table import ServedModel, parse_options, server_command
from meshwright.cli.output import load_with_torch, note, progress
from meshwright.errors import InputError
from meshwright.training.rendezvous import free_port

RUN_SUFFIXES = (".yaml", ".yml")
MOST_BY_DEFAULT = 64


@contextmanager
def started(options: dict[str, Any], *, folder: Path) -> Iterator[RunningServer]:
    """Start the server that the options name; its log is in `folder`. Raises ServerStartError when it does not answer.

    A run file or a checkpoint is exported first, in a folder that is removed afterwards.
    """
    if options["address"] or options["url"]:
        raise InputError(
            "--server starts a server, and an address is given too", got=options["address"] or options["url"]
        )
    with TemporaryDirectory(prefix="meshwright-serve-") as scratch:
        model = model_to_serve(options["model"], Path(scratch))
        in_flight = max(options["concurrency"] or (options["most_in_flight"] or MOST_BY_DEFAULT,))
        command = server_command(
            options["server"], model, port=free_port(), options=parse_options(options["server_options"]),
            in_flight=in_flight,
        )  # fmt: skip
        command = replace(command, environment={**command.environment, **(options.get("environment") or {})})
        note(*command.notes)
        with ExitStack() as stack:
            with progress(f"starting {command.name}"):
                server = stack.enter_context(running(command, folder=folder, timeout_s=options["start_timeout_s"]))
            yield server


def model_to_serve(text: str | None, scratch: Path) -> ServedModel | None:
    """The model to load: run files and checkpoints are exported as Hugging Face folders."""
    if text is None:
        return None
    where = Path(text)
    run = runfile.load(where) if where.suffix in RUN_SUFFIXES else None
    if run is not None and run.train.checkpoint is None:
        raise InputError("the run file names no folder of checkpoints", got=text, hint="set train.checkpoint.folder")
    if run is not None and run.train.checkpoint is not None:
        where = Path(run.train.checkpoint.folder)
    is_checkpoint = run is not None or any(where.glob("step-*")) or where.name.startswith("step-")
    if not is_checkpoint or (where / "config.json").is_file():
        return ServedModel(text=text, scratch=scratch)
    export = load_with_torch("meshwright.cli.checkpoint_torch:to_hf", what="exporting a checkpoint")
    has_adapters = run is not None and run.lora is not None
    done = export(where, run=run, weights=scratch / "hf", step=None, dtype=None, merge=has_adapters)
    note(*done["notes"])
    return ServedModel(text=str(scratch / "hf"), scratch=scratch)


def document(server: RunningServer, options: dict[str, Any]) -> dict[str, Any]:
    """The server for the records."""
    command = server.command
    return {
        "name": command.name, "options": parse_options(options["server_options"]), "model": options["model"],
        "start_s": round(server.start_s, 3), "log": server.log.name, "notes": list(command.notes),
        "served": command.served,
    }  # fmt: skip
