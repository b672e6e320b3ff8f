"""Load checkpoints. A tensor is stored under the name of its parameter, whatever pipeline stage or shard it came from,
so a checkpoint loads under another plan and on another number of processes."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as read_state

from meshwright.errors import InputError
from meshwright.training.checkpoints.files import SavedCheckpoint, read_manifest
from meshwright.training.checkpoints.metadata import CheckpointReader


def load(saved: SavedCheckpoint, *, into: dict[str, Tensor], zero_if_absent: str | None = None) -> dict[str, Any]:
    """Read `saved` into the tensors of `into`, in place, and return the manifest. Every process calls it.

    Tensors whose names begin with `zero_if_absent` are set to 0 where the checkpoint lacks them.

    Raises InputError when a tensor is missing or has another shape.
    """
    manifest = read_manifest(saved.path)
    reader = CheckpointReader(saved.path)
    stored = reader.read_metadata().state_dict_metadata
    absent = [n for n in into if zero_if_absent and n.startswith(zero_if_absent) and n not in stored]
    for name in absent:
        into[name].zero_()
    into = {name: tensor for name, tensor in into.items() if name not in absent}
    for name, tensor in into.items():
        held = getattr(stored.get(name), "size", None)
        if held is None:
            raise InputError(
                f"checkpoint {saved.path} has no tensor {name!r}", hint="it is of another model or optimizer"
            )
        if tuple(held) != tuple(tensor.shape):
            raise InputError(
                f"checkpoint {saved.path}: {name} has another shape", got=tuple(held), allowed=tuple(tensor.shape)
            )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read_state(into, storage_reader=reader)
    return manifest
