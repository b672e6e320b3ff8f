"""`meshwright checkpoint`: list, verify and convert checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click

from meshwright import runfile
from meshwright.cli.options import AmountRange, AmountType, CountRange, PathType, StepType
from meshwright.cli.output import Align, emit, exit_unless, load_with_torch, note, print_line, print_table
from meshwright.cli.verbs import verb
from meshwright.errors import InputError
from meshwright.specs.run import Run
from meshwright.units import format_bytes, format_count

Document = dict[str, Any]
StepChoice = int | Literal["best"] | None
PRUNED = ("ties", "dare_linear", "dare_ties", "magnitude_prune")
"""Combinations of adapters that need a density."""
RUN_SUFFIXES = (".yaml", ".yml")


@verb("checkpoint")
@click.argument("kind", metavar="ACTION", type=click.Choice(["show", "verify", "to-hf", "from-hf"]))
@click.argument("where", type=PathType())
@click.argument("weights", metavar="[DIR]", required=False, type=PathType(file_okay=False))
@click.option("--step", type=StepType(), metavar="N", help="Step of the checkpoint, or `best`.  [default: the newest]")
@click.option(
    "--dtype", type=click.Choice(["bf16", "fp32"]),
    help="to-hf: number format of the weights.  [default: bf16; fp32 for adapters]",
)  # fmt: skip
@click.option("--merge", is_flag=True, help="to-hf of adapters: merge them into the base weights.")
@click.option(
    "--adapter", "adapters", multiple=True, metavar="FOLDER",
    help="With --merge, where WHERE is a folder of base weights: an adapter to merge. May be repeated.",
)  # fmt: skip
@click.option(
    "--factor", "factors", multiple=True, type=AmountType(), metavar="X",
    help="A factor of each --adapter, in their order, for a weighted sum.  [default: 1]",
)  # fmt: skip
@click.option(
    "--combination", type=click.Choice(["cat", "linear", "svd", *PRUNED]), default="cat", show_default=True,
    help="How the adapters are added, as PEFT names it.",
)  # fmt: skip
@click.option(
    "--density", type=AmountRange(1), metavar="X",
    help="With ties, dare_linear, dare_ties and magnitude_prune: the share of each adapter's values that they keep.",
)  # fmt: skip
@click.option(
    "--seed",
    type=CountRange(0, 2**63 - 1),
    metavar="N",
    help="With dare_linear and dare_ties: of the values kept.  [default: 0]",
)
@click.option(
    "--dequantised", is_flag=True,
    help="With --merge: into the quantised base of the training, rounded to its format and back.",
)  # fmt: skip
def command(*, kind: str, where: Path, weights: Path | None, step: StepChoice, **of_export: Any) -> None:
    """List, verify and convert checkpoints; Hugging Face weights in and out.

    \b
    show WHERE            list step, tokens, plan, model, size and date
    verify WHERE          read every file again; exits with 1 if one is damaged
    to-hf WHERE DIR       write the weights to DIR as Hugging Face safetensors
    from-hf RUN.yaml DIR  import the Hugging Face weights of DIR as step 0

    WHERE is a run file, a folder of checkpoints, or one checkpoint. --step best is the one with the lowest validation
    loss, which runs with train.checkpoint.keep_best have.

    With --merge and --adapter WHERE is a folder of Hugging Face weights, to which the adapters are added.

    verify names the last good checkpoint. to-hf writes the config.json and the tokenizer too, and LoRA adapters in the
    PEFT format, or with --merge merged into the base weights. from-hf also takes adapters; `meshwright train RUN.yaml
    --resume` starts from step 0.
    """
    _require_options(kind, weights=weights, step=step, dtype=of_export["dtype"], merge=of_export["merge"])
    if of_export["adapters"] and not of_export["merge"]:
        raise InputError("--adapter needs --merge", hint="add --merge")
    if of_export["factors"] and len(of_export["factors"]) != len(of_export["adapters"]):
        raise InputError("--factor", got=len(of_export["factors"]), allowed=f"{len(of_export['adapters'])}, or none")
    how = of_export["combination"]
    if how != "cat" and len(of_export["adapters"]) < 2:
        raise InputError("--combination needs two adapters", hint="--factor takes one adapter times a number")
    if (of_export["density"] is None) == (how in PRUNED):
        raise InputError(f"--density is for --combination {', '.join(PRUNED)}, which need it", hint="--density 0.5")
    if of_export["seed"] is not None and not how.startswith("dare"):
        raise InputError("--seed is for --combination dare_linear and dare_ties", got=how)
    if of_export["dequantised"] and not of_export["merge"]:
        raise InputError("--dequantised needs --merge", hint="add --merge")
    run = runfile.load(where) if where.suffix in RUN_SUFFIXES else None
    folder = where if run is None else _folder_of(run)
    if kind == "from-hf" and run is None:
        raise InputError("from-hf needs the run file, which says the model", got=str(where), allowed="RUN.yaml")
    options: dict[str, Any] = {} if kind == "verify" else {"run": run}
    options |= {} if kind == "from-hf" else {"step": step}
    options |= {} if weights is None else {"weights": weights}
    options |= of_export if kind == "to-hf" else {}
    name = kind.replace("-", "_")
    act = load_with_torch(f"meshwright.cli.checkpoint_torch:{name}", what="a checkpoint")
    document: Document = act(folder, **options)
    emit(document, _PRINTERS[kind])
    exit_unless(not document.get("damaged"))


def _require_options(kind: str, *, weights: Path | None, step: StepChoice, dtype: str | None, merge: bool) -> None:
    if kind in ("to-hf", "from-hf"):
        if weights is None:
            raise InputError(f"{kind} needs two paths", hint=f"meshwright checkpoint {kind} WHERE DIR")
    elif weights is not None:
        raise InputError(f"{kind} takes one path", got=str(weights))
    if dtype is not None and kind != "to-hf":
        raise InputError("--dtype is for to-hf", got=kind)
    if merge and kind != "to-hf":
        raise InputError("--merge is for to-hf", got=kind)
    if step is not None and kind == "from-hf":
        raise InputError("from-hf always writes step 0", got=f"--step {step}")


def _folder_of(run: Run) -> Path:
    if run.train.checkpoint is None:
        raise InputError(
            "the run file names no folder of checkpoints", got=run.source, hint="set train.checkpoint.folder"
        )
    return Path(run.train.checkpoint.folder)


# --- tables ---


def _print_show(document: Document) -> None:
    rows = []
    for saved in document["checkpoints"]:
        tokens = "" if saved["tokens"] is None else format_count(saved["tokens"])
        size = format_bytes(saved["bytes"])
        best = "best" if saved["is_best"] else ""
        rows.append((f"{saved['step']:,}", best, tokens, saved["model"], saved["plan"], size, saved["date"]))
    columns: dict[str, Align] = {"step": "right", "": "left", "tokens": "right", "model": "left", "plan": "left"}
    columns |= {"size": "right", "date": "left"}
    print_table(columns, rows, title=str(document["folder"]))


def _print_verify(document: Document) -> None:
    rows = [(f"{c['step']:,}", c["damage"] or "whole") for c in document["checkpoints"]]
    print_table({"step": "right", "files": "left"}, rows, title=str(document["folder"]))
    if document["damaged"]:
        good = document["last_good"]
        print_line("No checkpoint is whole." if good is None else f"The last good one is {good}.", style="bold")


def _print_to_hf(document: Document) -> None:
    print_line(
        f"Wrote the {document['kind']} of {document['model']}"
        + ("" if document["step"] is None else f" after step {document['step']:,}")
        + f" as {document['dtype']}: {document['weights']}"
    )
    note(*document["notes"])


def _print_from_hf(document: Document) -> None:
    print_line(f"Wrote {document['checkpoint']}; `meshwright train RUN.yaml --resume` starts from these weights.")


_PRINTERS = {"show": _print_show, "verify": _print_verify, "to-hf": _print_to_hf, "from-hf": _print_from_hf}
