"""Initial adapters of a training, and the base weights of the adapters in its checkpoints.

FOLDER/maxtext/adapters            initial adapters in PEFT's format, equal to those of the native engine
CHECKPOINTS/maxtext/base.json      the frozen weights; checkpoints contain only adapters
"""

from __future__ import annotations

import json
from pathlib import Path

from meshwright.engines.maxtext.lower import NAME
from meshwright.files import write_atomically
from meshwright.json_values import load_json
from meshwright.specs.run import Run

FOLDER, FILE, BASE = "adapters", "adapter_model.safetensors", "base.json"


def write_initial_adapters(run: Run, output: Path) -> None:
    """Write the initial adapters, unless they exist."""
    from meshwright.training.conversion import export_initial_adapters

    if not (output / FOLDER).is_dir():
        export_initial_adapters(run, output / FOLDER)


def write_base(run: Run) -> None:
    """Write the identity of the frozen weights to the folder of the run's checkpoints, unless it exists."""
    from meshwright.training.weights import find_weights

    path = _base_file(run)
    if path is None or path.is_file():
        return
    origin = find_weights(run.weights) if run.weights else None
    about = {"fingerprint": origin and origin.fingerprint, "name": origin and origin.name}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(about) + "\n")


def refuse_other_base(run: Run) -> None:
    """Raise InputError if the run's checkpoints contain adapters of other base weights than the run's."""
    from meshwright.training.conversion import require_base
    from meshwright.training.weights import find_weights

    path = _base_file(run)
    if path is not None and path.is_file():
        origin = find_weights(run.weights) if run.weights else None
        require_base(origin, **load_json(path))


def _base_file(run: Run) -> Path | None:
    saves = run.train.checkpoint
    return Path(saves.folder) / NAME / BASE if saves and run.lora is not None else None
