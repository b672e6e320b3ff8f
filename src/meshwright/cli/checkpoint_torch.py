"""The part of `meshwright checkpoint` that imports PyTorch: read, verify and convert checkpoints.

Each function takes the folder of the checkpoints, or one checkpoint, and returns the JSON document of its action.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from meshwright.engines import exporting
from meshwright.errors import InputError
from meshwright.specs.run import Run
from meshwright.training import checkpoints
from meshwright.training.checkpoints import SavedCheckpoint, StepChoice
from meshwright.training.checkpoints import verify as verify_files
from meshwright.training.conversion import import_weights

Document = dict[str, Any]


def show(folder: Path, *, run: Run | None, step: StepChoice) -> Document:
    """List the checkpoints."""
    chosen, best = _chosen(folder, step), checkpoints.best_step(folder)
    found = [_about(saved, run=run) | {"is_best": saved.step == best} for saved in chosen]
    return {"folder": folder, "checkpoints": found, "best_step": best}


def verify(folder: Path, *, step: StepChoice) -> Document:
    """Read every file of the checkpoints again."""
    checked = [
        {"path": s.path, "step": s.step, "damage": verify_files(s.path)} for s in _chosen(folder, step, incomplete=True)
    ]
    good = [c["path"] for c in checked if c["damage"] is None]
    damaged = [c["path"] for c in checked if c["damage"] is not None]
    return {"folder": folder, "checkpoints": checked, "damaged": damaged, "last_good": good[-1] if good else None}


def to_hf(
    folder: Path,
    *,
    run: Run | None,
    weights: Path,
    step: StepChoice,
    dtype: Literal["bf16", "fp32"] | None,
    merge: bool,
    dequantised: bool = False,
    adapters: Sequence[str] = (),
    factors: Sequence[float] = (),
    **sums: Any,
) -> Document:
    """Write a checkpoint, or base weights with `adapters` added, as Hugging Face weights to the folder `weights`.

    `sums`: the combination of adapters, its density and its seed.
    """
    if adapters:
        if run is not None or step is not None or dequantised:
            raise InputError("--adapter is for a folder of base weights", got="a run file, --step or --dequantised")
        done = exporting.export_sum(folder, weights, adapters=adapters, factors=factors, dtype=dtype, **sums)
        return asdict(done) | {"step": None}
    if run is not None and exporting.has_own_checkpoints(run.engine):
        if dequantised:
            raise InputError("--dequantised is for checkpoints of the native engine", got=run.engine)
        return asdict(exporting.export_own(run, weights, step=step, dtype=dtype, merge=merge))
    saved = _chosen(folder, step)[-1]
    return asdict(exporting.export_saved(saved, weights, run=run, dtype=dtype, merge=merge, dequantised=dequantised))


def from_hf(folder: Path, *, run: Run, weights: Path) -> Document:
    """Write the Hugging Face weights in the folder `weights` as step 0 of the run."""
    if found := checkpoints.checkpoints(folder):
        raise InputError(
            f"{folder} already holds checkpoints, the newest after step {found[-1].step}",
            hint="name another folder in train.checkpoint.folder",
        )
    path = import_weights(run, weights, folder=folder)
    return {"checkpoint": path, "step": 0, "weights": weights, "model": run.model.name}


def _chosen(folder: Path, step: StepChoice, *, incomplete: bool = False) -> list[SavedCheckpoint]:
    """All checkpoints of `folder`, oldest first, or the one of `step`. `incomplete`: also without a manifest."""
    name = checkpoints.NAME.fullmatch(folder.name)
    if name is not None and folder.is_dir():  # one checkpoint, not the folder of all
        return [SavedCheckpoint(path=folder, step=int(name[1]))]
    if step is not None:
        return [checkpoints.choose(folder, step)]
    found = [*checkpoints.checkpoints(folder), *(checkpoints.without_manifest(folder) if incomplete else ())]
    found.sort(key=lambda saved: saved.step)
    if not found:
        raise InputError("there is no checkpoint", got=str(folder))
    return found


def _about(saved: SavedCheckpoint, *, run: Run | None) -> Document:
    """The manifest's facts, with the number of tokens from the run file if the manifest has none."""
    manifest = checkpoints.read_manifest(saved.path)
    tokens = None if run is None else saved.step * run.tokens_per_step
    written = datetime.fromtimestamp((saved.path / checkpoints.MANIFEST).stat().st_mtime, tz=UTC)
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
