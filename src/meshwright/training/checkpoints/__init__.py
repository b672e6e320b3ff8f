"""Training states on disk: complete or absent, verified before they are read, and independent of the plan."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshwright.training.checkpoints.content import Content, as_manifest, content, content_of, origin_of
from meshwright.training.checkpoints.files import (
    BEST,
    MANIFEST,
    NAME,
    ONLY_BEST,
    SavedCheckpoint,
    StepChoice,
    at_step,
    best_step,
    checkpoints,
    choose,
    newest,
    newest_good,
    read_manifest,
    verify,
    without_manifest,
)
from meshwright.training.checkpoints.saver import CheckpointSaver

if TYPE_CHECKING:
    from meshwright.training.checkpoints.writing import load, save


def __getattr__(name: str) -> Any:
    if name not in ("load", "save"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.writing"), name)  # which imports distributed tensors
