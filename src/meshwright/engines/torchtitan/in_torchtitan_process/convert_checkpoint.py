"""Convert a checkpoint of torchtitan to Hugging Face weights with torchtitan's own adapter of names and shapes.

    python -m meshwright.engines.torchtitan.in_torchtitan_process.convert_checkpoint FOLDER CHECKPOINT OUT DTYPE

with the configuration module and the run file in FOLDER. Uses one process; the whole model is in host memory.
"""

from __future__ import annotations

import runpy
import sys
import warnings
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as read_state

from meshwright import runfile
from meshwright.engines.torchtitan.lower import FUNCTION, MODULE, RUN_FILE
from meshwright.training.checkpoints.metadata import CheckpointReader
from meshwright.training.conversion import FORMATS
from meshwright.training.weights.config import config_of
from meshwright.training.weights.safetensors_format import TensorEntry
from meshwright.training.weights.writing import write_folder

NOT_WEIGHTS = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.")


def main(folder: Path, checkpoint: Path, out: Path, dtype: torch.dtype) -> None:
    """Convert `checkpoint` and write the result to `out`."""
    model = runfile.load(folder / RUN_FILE).model
    spec = runpy.run_path(str(folder / MODULE))[FUNCTION]().model_spec
    adapter = spec.state_dict_adapter(spec.model, None)
    tensors: dict[str, Tensor] = adapter.to_hf(read_weights(checkpoint))
    entries = [
        TensorEntry(
            name=name,
            shape=tuple(tensor.shape),
            dtype=torch.float32 if name.endswith("e_score_correction_bias") else dtype,
            make=partial(torch.Tensor.contiguous, tensor),
        )
        for name, tensor in tensors.items()
    ]
    write_folder(out, entries, config=config_of(model, dtype=str(dtype).removeprefix("torch.")))


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    """Return the unsharded weights and routing biases of a checkpoint by torchtitan's names."""
    about = CheckpointReader(checkpoint).read_metadata().state_dict_metadata
    whole = {
        name: torch.empty(held.size, dtype=held.properties.dtype)
        for name, held in about.items()
        if isinstance(held, TensorStorageMetadata) and not name.startswith(NOT_WEIGHTS)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the assumption of one process, which is true
        read_state(whole, storage_reader=CheckpointReader(checkpoint))
    return whole


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), FORMATS[sys.argv[4]])
