"""`meshwright checkpoint`: what is saved, whether it is whole, and weights to and from Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from meshwright.cli.needs import require_torch
from meshwright.cli.options import json_option, verb
from meshwright.errors import InputError

if TYPE_CHECKING:
    from meshwright.specs.run import Run
    from meshwright.training.checkpoints import SavedCheckpoint

Document = dict[str, Any]
RUN_SUFFIXES = (".yaml", ".yml")


@verb(
    "checkpoint",
    examples=[
        "meshwright checkpoint show run.yaml",
        "meshwright checkpoint verify checkpoints/llama",
        "meshwright checkpoint to-hf checkpoints/llama exported/llama --step 1000 --dtype bf16",
        "meshwright checkpoint to-hf checkpoints/tuned exported/tuned --merge",
        "meshwright checkpoint from-hf run.yaml downloads/llama",
    ],
)
@click.argument("kind", type=click.Choice(["show", "verify", "to-hf", "from-hf"]))
@click.argument("where", type=click.Path(path_type=Path))
@click.argument("weights", required=False, type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--step", type=click.IntRange(min=0), metavar="N", help="Which checkpoint.  [default: the newest]"
)
@click.option(
    "--dtype", type=click.Choice(["bf16", "fp32"]),
    help="Number format of to-hf.  [default: bf16; of adapters fp32]",
)  # fmt: skip
@click.option("--merge", is_flag=True, help="to-hf of adapters: write the base's weights with them added.")
@json_option
def command(
    kind: str,
    where: Path,
    weights: Path | None,
    step: int | None,
    dtype: Literal["bf16", "fp32"] | None,
    merge: bool,
    as_json: bool,
) -> None:
    """Look at checkpoints, check them, and exchange weights with Hugging Face.

    \b
    show WHERE              step, tokens, plan, model, size and date of every checkpoint
    verify WHERE            read every file again; exit 1 if one is damaged, the last good one named
    to-hf WHERE DIR         write the weights of a checkpoint as safetensors with a config.json, and adapters as
                            PEFT has them; with --merge the base's weights with the adapters added
    from-hf RUN.yaml DIR    put the weights (or adapters) of DIR under step 0, for `meshwright train RUN.yaml --resume`

    WHERE is a run file, a folder of checkpoints, or one of them.
    """
    from meshwright.cli.output import emit_json

    _require_options(kind, weights=weights, step=step, dtype=dtype, merge=merge)
    run = _run_at(where) if where.suffix in RUN_SUFFIXES else None
    folder = where if run is None else _folder_of(run)
    require_torch("a checkpoint")
    if kind == "show":
        document = _show(_chosen(folder, step), run=run, folder=folder)
    elif kind == "verify":
        document = _verify(_chosen(folder, step), folder=folder)
    elif kind == "to-hf":
        assert weights is not None
        document = _to_hf(run, folder, weights, step=step, dtype=dtype, merge=merge)
    elif run is None:
        raise InputError(
            "from-hf needs the run file, which says the model", got=str(where), allowed="RUN.yaml"
        )
    else:
        assert weights is not None
        document = _from_hf(run, folder, weights)
    if as_json:
        emit_json(document)
    else:
        _PRINTERS[kind](document)
    if document.get("damaged"):
        raise click.exceptions.Exit(1)


def _require_options(
    kind: str, *, weights: Path | None, step: int | None, dtype: str | None, merge: bool
) -> None:
    if kind in ("to-hf", "from-hf"):
        if weights is None:
            raise InputError(f"{kind} needs two places", hint=f"meshwright checkpoint {kind} WHERE DIR")
    elif weights is not None:
        raise InputError(f"{kind} takes one place", got=str(weights))
    if dtype is not None and kind != "to-hf":
        raise InputError("--dtype is about to-hf", got=kind)
    if merge and kind != "to-hf":
        raise InputError("--merge is about to-hf", got=kind)
    if step is not None and kind == "from-hf":
        raise InputError("from-hf always writes step 0", got=f"--step {step}")


def _run_at(path: Path) -> Run:
    from meshwright import runfile

    return runfile.load(path)


def _folder_of(run: Run) -> Path:
    if run.train.checkpoint is None:
        raise InputError(
            "the run file names no folder of checkpoints", got=run.source, hint="set train.checkpoint.folder"
        )
    return Path(run.train.checkpoint.folder)


def _chosen(folder: Path, step: int | None) -> list[SavedCheckpoint]:
    """All checkpoints of `folder`, oldest first, or the one of `step`."""
    from meshwright.training.checkpoints import NAME, SavedCheckpoint, checkpoints

    name = NAME.fullmatch(folder.name)
    if name is not None and folder.is_dir():  # one checkpoint, not the folder of all
        return [SavedCheckpoint(path=folder, step=int(name[1]))]
    found = checkpoints(folder)
    if not found:
        raise InputError("there is no checkpoint", got=str(folder))
    if step is None:
        return found
    if step not in [saved.step for saved in found]:
        steps = ", ".join(str(saved.step) for saved in found[-12:])
        raise InputError("no checkpoint of this step", got=step, allowed=steps)
    return [saved for saved in found if saved.step == step]


# --- what is there ---


def _show(found: list[SavedCheckpoint], *, run: Run | None, folder: Path) -> Document:
    return {"folder": folder, "checkpoints": [_about(saved, run=run) for saved in found]}


def _about(saved: SavedCheckpoint, *, run: Run | None) -> Document:
    """What the manifest says; tokens from the run file where the manifest has none."""
    from datetime import UTC, datetime

    from meshwright.training.checkpoints import MANIFEST, read_manifest

    manifest = read_manifest(saved.path)
    if not isinstance(manifest, dict):
        raise InputError(f"the manifest of checkpoint {saved.path} is not one", allowed="a JSON object")
    tokens = None if run is None else saved.step * run.tokens_per_step
    written = datetime.fromtimestamp((saved.path / MANIFEST).stat().st_mtime, tz=UTC)
    return {
        "path": saved.path,
        "step": saved.step,
        "tokens": manifest.get("tokens", tokens),
        "run": manifest.get("run"),
        "model": manifest.get("model"),
        "plan": manifest.get("plan"),
        "bytes": sum(file.stat().st_size for file in saved.path.iterdir()),
        "date": written.isoformat(timespec="seconds"),
    }


def _verify(found: list[SavedCheckpoint], *, folder: Path) -> Document:
    from meshwright.training.checkpoints import verify

    checked = [{"path": s.path, "step": s.step, "damage": verify(s.path)} for s in found]
    good = [c["path"] for c in checked if c["damage"] is None]
    damaged = [c["path"] for c in checked if c["damage"] is not None]
    return {
        "folder": folder,
        "checkpoints": checked,
        "damaged": damaged,
        "last_good": good[-1] if good else None,
    }


# --- Hugging Face ---


def _to_hf(
    run: Run | None,
    folder: Path,
    weights: Path,
    *,
    step: int | None,
    dtype: Literal["bf16", "fp32"] | None,
    merge: bool,
) -> Document:
    from dataclasses import asdict

    from meshwright.engines import exporting

    if run is not None and exporting.has_own_checkpoints(run.engine):
        return asdict(exporting.export_own(run, weights, step=step, dtype=dtype, merge=merge))
    saved = _chosen(folder, step)[-1]
    return asdict(exporting.export_saved(saved, weights, run=run, dtype=dtype, merge=merge))


def _from_hf(run: Run, folder: Path, weights: Path) -> Document:
    """Step 0 of the run."""
    from meshwright.training import checkpoints as checkpoint
    from meshwright.training import conversion as exchange

    if found := checkpoint.checkpoints(folder):
        raise InputError(
            f"{folder} already holds checkpoints, the newest after step {found[-1].step}",
            hint="name another folder in train.checkpoint.folder",
        )
    path = exchange.import_weights(run, weights, folder=folder)
    return {"checkpoint": path, "step": 0, "weights": weights, "model": run.model.name}


# --- words ---


def _print_show(document: Document) -> None:
    from meshwright.cli.output import print_table
    from meshwright.units import format_bytes, format_count

    rows = []
    for saved in document["checkpoints"]:
        tokens = "" if saved["tokens"] is None else format_count(saved["tokens"])
        size = format_bytes(saved["bytes"])
        rows.append((f"{saved['step']:,}", tokens, saved["model"], saved["plan"], size, saved["date"]))
    columns = {
        "step": "right",
        "tokens": "right",
        "model": "left",
        "plan": "left",
        "size": "right",
        "date": "left",
    }
    print_table(columns, rows, title=str(document["folder"]))  # pyright: ignore[reportArgumentType]


def _print_verify(document: Document) -> None:
    from meshwright.cli.output import print_line, print_table

    rows = [(f"{c['step']:,}", c["damage"] or "whole") for c in document["checkpoints"]]
    print_table({"step": "right", "files": "left"}, rows, title=str(document["folder"]))
    if document["damaged"]:
        good = document["last_good"]
        print_line(
            "No checkpoint is whole." if good is None else f"The last good one is {good}.", style="bold"
        )


def _print_to_hf(document: Document) -> None:
    from meshwright.cli.output import print_line

    print_line(
        f"Wrote the {document['kind']} of {document['model']} after step {document['step']:,} as {document['dtype']}: "
        f"{document['weights']}"
    )


def _print_from_hf(document: Document) -> None:
    from meshwright.cli.output import print_line

    print_line(
        f"Wrote {document['checkpoint']}; `meshwright train RUN.yaml --resume` begins with these weights."
    )


_PRINTERS = {"show": _print_show, "verify": _print_verify, "to-hf": _print_to_hf, "from-hf": _print_from_hf}
