"""Read the index of a distributed checkpoint, `.metadata`, without running code in it.

PyTorch stores the index as a pickle, which can name any function of any module. Here it may name only the classes of a
distributed checkpoint; everything else is refused before it is imported. `CheckpointReader` is PyTorch's reader with
this restriction. Before another program reads a checkpoint with a reader of its own, call `require_index`.
"""

from __future__ import annotations

import io
import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from meshwright.errors import InputError

INDEX = ".metadata"
_DCP, _MEGATRON = "torch.distributed.checkpoint", "megatron.core.dist_checkpointing.strategies"
ALLOWED = frozenset(
    {
        *(
            (f"{_DCP}.metadata", name)
            for name in (
                "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
                "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
            )
        ),
        (f"{_DCP}.filesystem", "_StorageInfo"),
        # Plans of the ranks, which asynchronous saves of Megatron keep.
        *(
            (f"{_DCP}.planner", name)
            for name in ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
        ),
        (f"{_DCP}.filesystem", "_StoragePrefix"),
        (f"{_MEGATRON}.torch", "MCoreMetadata"),
        (f"{_MEGATRON}.checkpointable", "MCoreMetadata"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
    }
)  # fmt: skip
"""Modules and names that an index may refer to, besides the dtypes of PyTorch."""


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a class of a distributed checkpoint. Raises UnpicklingError for any other name."""
        if (module, name) in ALLOWED:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        found = getattr(torch, name, None) if module == "torch" and "." not in name else None
        if isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


def _member(enumeration: Any, name: str) -> Enum:
    """Return a member of an enumeration: Python 3.11.0 to 3.11.3 pickles it as `getattr` of its class and name."""
    if isinstance(enumeration, type) and issubclass(enumeration, Enum) and name in enumeration.__members__:
        return enumeration[name]
    raise pickle.UnpicklingError(f"it refers to {name!r} of {enumeration!r}, which is no enumeration that has it")


class CheckpointReader(FileSystemReader):
    """PyTorch's reader of a folder; the index is read by `read_index`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index of the checkpoint. Raises InputError as `read_index`."""
        rank = kwargs.get("rank")
        metadata = read_index(Path(self.path), name=INDEX if rank is None else f"__{rank}{INDEX}")
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata


def read_index(checkpoint: Path, *, name: str = INDEX) -> Metadata:
    """Read the index of the checkpoint at this path.

    Raises InputError for an index that cannot be read, refers to anything but the classes of a checkpoint, or places a
    tensor in a file elsewhere.
    """
    file = checkpoint / name
    try:
        metadata = _IndexUnpickler(io.BytesIO(file.read_bytes())).load()
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror or error}") from error
    except Exception as error:  # a damaged pickle raises errors of every kind
        raise InputError(f"{file} is not the index of a checkpoint: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise InputError(f"{file} is not the index of a checkpoint", got=type(metadata).__name__)
    stored = metadata.storage_data
    for place in stored.values() if isinstance(stored, dict) else ():
        path = getattr(place, "relative_path", None)
        if path is not None and (not isinstance(path, str) or Path(path).name != path):
            raise InputError(f"{file} places a tensor outside of the checkpoint", got=path)
    return metadata


def require_index(checkpoint: Path) -> None:
    """Raise InputError if a checkpoint has an index that `read_index` refuses."""
    if (checkpoint / INDEX).exists():
        read_index(checkpoint)
