"""Checkpoints as Hugging Face weights, whichever engine wrote them: whole weights, adapters, adapters in their base."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, cast

from meshwright.engines.base import ExportingEngine, find_engine
from meshwright.engines.megatron import convert
from meshwright.errors import InputError
from meshwright.specs.model import Lora
from meshwright.specs.run import Run
from meshwright.training import checkpoints
from meshwright.training import conversion as exchange
from meshwright.training.checkpoints import Saved

Dtype = Literal["bf16", "fp32"]
Kind = Literal["weights", "merged weights", "adapter"]


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written: the weights of `checkpoint` in the folder `weights`."""

    checkpoint: Path
    step: int
    weights: Path
    kind: Kind
    dtype: Dtype
    model: str


def has_own_checkpoints(engine: str) -> bool:
    """Whether the checkpoints of this engine are for itself to read; others are as the native engine's."""
    return hasattr(find_engine(engine), "export_weights")


def export_own(run: Run, folder: Path, *, step: int | None, dtype: Dtype | None, merge: bool) -> Exported:
    """Write a checkpoint (None: the newest) of `run`, whose engine has its own, to `folder`.

    `dtype` None: fp32 for adapters, else bf16. `merge` adds adapters to their base's weights.
    Raises InputError where there is no such checkpoint, no adapters to merge, or `folder` is not empty;
    MissingDependencyError where the engine must be installed.
    """
    engine = cast("ExportingEngine", find_engine(run.engine))
    kind = _kind(run.lora, merge=merge, where=run.source)
    dtype = dtype or _usual_dtype(kind)
    if merge:
        with TemporaryDirectory() as scratch:
            adapters = Path(scratch) / "adapter"
            checkpoint = engine.export_weights(run, step=step, folder=adapters, dtype="fp32")
            exchange.export_merged_folder(run, adapters, folder, dtype=dtype)
    else:
        checkpoint = engine.export_weights(run, step=step, folder=folder, dtype=dtype)
    return Exported(
        checkpoint=checkpoint,
        step=int(checkpoint.name.rpartition("-")[2]),
        weights=folder,
        kind=kind,
        dtype=dtype,
        model=run.model.name,
    )


def export_saved(
    saved: Saved, folder: Path, *, run: Run | None, dtype: Dtype | None, merge: bool
) -> Exported:
    """Write `saved`, a checkpoint in our own folders, to `folder`; otherwise as `export_own`.

    `run` is needed for old checkpoints alone, which do not say their model's shapes. Raises InputError also where a
    file is damaged.
    """
    _require_whole(saved)
    manifest = checkpoints.read_manifest(saved.path)
    held = checkpoints.content_of(manifest)
    held = held or (run and checkpoints.content(run, weights=None))
    if held is None:
        raise InputError(
            "this checkpoint does not say its model's shapes: to-hf needs the run file", got=str(saved.path),
            allowed="RUN.yaml",
        )  # fmt: skip
    kind = _kind(held.lora, merge=merge, where=str(saved.path))
    dtype = dtype or _usual_dtype(kind)
    if manifest.get("engine") == "megatron":
        convert.export_weights(saved, held, folder, dtype=dtype)
    elif held.lora is None:
        exchange.export_weights(saved, held, folder, dtype=dtype)
    elif merge:
        exchange.export_merged(saved, held, folder, dtype=dtype, base=run and run.weights)
    else:
        exchange.export_adapters(saved, held, folder, dtype=dtype)
    return Exported(
        checkpoint=saved.path, step=saved.step, weights=folder, kind=kind, dtype=dtype, model=held.shapes.name
    )


def _kind(lora: Lora | None, *, merge: bool, where: str) -> Kind:
    """What is written. Raises InputError where whole weights are to be merged."""
    if merge and lora is None:
        raise InputError("--merge is about adapters; this checkpoint holds whole weights", got=where)
    return "weights" if lora is None else "merged weights" if merge else "adapter"


def _usual_dtype(kind: Kind) -> Dtype:
    return "fp32" if kind == "adapter" else "bf16"


def _require_whole(saved: Saved) -> None:
    if damage := checkpoints.damage_of(saved.path):
        raise InputError(
            f"checkpoint {saved.path} is damaged: {damage}",
            hint="`meshwright checkpoint verify` names the last good one; choose it with --step",
        )
