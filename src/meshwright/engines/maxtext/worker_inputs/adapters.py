"""Adapters that MaxText trains: the first ones, and the weights that those in its checkpoints belong to.

FOLDER/maxtext/adapters            the first ones, as PEFT keeps them: those of the native engine
CHECKPOINTS/maxtext/base.json      the frozen weights; checkpoints hold adapters alone
"""

from __future__ import annotations

import json
from pathlib import Path

from meshwright.engines.maxtext.lower import NAME
from meshwright.files import write_atomically
from meshwright.specs.run import Run

FIRST, FILE, BASE = "adapters", "adapter_model.safetensors", "base.json"


def write_first(run: Run, output: Path) -> None:
    """Write what training begins with, where it is not there yet."""
    from meshwright.training.conversion import export_initial_adapters

    if not (output / FIRST).is_dir():
        export_initial_adapters(run, output / FIRST)


def note_base(run: Run) -> None:
    """Write down the frozen weights of the run's checkpoints, where nobody has yet."""
    from meshwright.training.weights import find_weights

    path = _base_file(run)
    if path is None or path.is_file():
        return
    origin = find_weights(run.weights) if run.weights else None
    about = {"fingerprint": origin and origin.fingerprint, "name": origin and origin.name}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(about) + "\n")


def refuse_other_base(run: Run) -> None:
    """Raise InputError where the run's checkpoints hold adapters of other weights than the run's."""
    from meshwright.training.conversion import require_base
    from meshwright.training.weights import find_weights

    path = _base_file(run)
    if path is not None and path.is_file():
        origin = find_weights(run.weights) if run.weights else None
        require_base(origin, **json.loads(path.read_text(encoding="utf-8")))


def _base_file(run: Run) -> Path | None:
    saves = run.train.checkpoint
    return Path(saves.folder) / NAME / BASE if saves and run.lora is not None else None
