"""The safetensors format: 8 bytes with the length of a JSON header, the header, the tensors' bytes end to end.

Not written with the library, because it needs all tensors of a file at once, and copies them.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import InputError, MissingDependencyError
from meshwright.files import naming
from meshwright.json_values import load_json
from meshwright.programs import install_command

_FORMATS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A tensor to be written: `make` returns it when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def write_file(path: Path, entries: Sequence[TensorEntry]) -> None:
    """Write one file, holding one tensor at a time. The file is flushed to disk before this returns."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in entries:
        end = start + entry.num_bytes
        header[entry.name] = {"dtype": _FORMATS[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    with naming(path), path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            tensor = entry.make().detach().to(device="cpu", dtype=entry.dtype).contiguous()
            assert tuple(tensor.shape) == entry.shape, entry.name
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


class Folder:
    """All safetensors of a folder, opened as they are needed and read through the page cache.

    `files` maps the name of a tensor to the file that holds it.
    """

    def __init__(self, folder: Path, *, single: str = SINGLE) -> None:
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise MissingDependencyError("reading weights needs safetensors", hint=install_command("torch")) from error
        self._open_file = safe_open
        self._opened: dict[Path, Any] = {}
        self.folder = folder
        self.files = self._find(single)

    def read(self, name: str, *, where: tuple[slice, ...] = ()) -> Tensor:
        """The tensor, or the part of it at `where`."""
        part = self._opened_file(self.files[name]).get_slice(name)
        return part[where] if where else part[:] if part.get_shape() else part

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor `name`, without reading it."""
        return tuple(self._opened_file(self.files[name]).get_slice(name).get_shape())

    def format(self, name: str) -> str:
        """Number format of the tensor `name` in the file: F32, BF16, F8_E4M3 ..."""
        return self._opened_file(self.files[name]).get_slice(name).get_dtype()

    def _find(self, single: str) -> dict[str, Path]:
        if (self.folder / INDEX).is_file():
            return self._from_index(self.folder / INDEX)
        if (self.folder / single).is_file():
            path = self.folder / single
            return dict.fromkeys(self._opened_file(path).keys(), path)
        found = sorted(p.name for p in self.folder.glob("*")) if self.folder.is_dir() else None
        has_old = found is not None and any(name.endswith((".bin", ".pth")) for name in found)
        raise InputError(
            f"no weights: a folder with {single}, or with an index, is needed",
            got=str(self.folder),
            hint="it holds weights in PyTorch's own format; have transformers save them as safetensors"
            if has_old
            else "the folder does not exist"
            if found is None
            else f"it holds {', '.join(found[:6]) or 'nothing'}",
        )

    def _from_index(self, index: Path) -> dict[str, Path]:
        try:
            entries = load_json(index)["weight_map"].items()
            files = {str(name): self.folder / str(file) for name, file in entries}
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise InputError(f"the index of the weights cannot be read: {error}", got=str(index)) from error
        outside = sorted(f for f in map(str, dict(entries).values()) if f != Path(f).name)
        if outside:
            raise InputError(
                "the index names files of other folders", got=outside[0], allowed="names of files beside it"
            )
        absent = sorted({f.name for f in files.values() if not f.is_file()})
        if absent:
            raise InputError(f"the index names files that are not there: {', '.join(absent[:6])}", got=str(index))
        for path in sorted(set(files.values())):
            held = set(self._opened_file(path).keys())
            wrong = sorted(name for name, file in files.items() if file == path and name not in held)
            if wrong:
                raise InputError(f"{path.name} lacks {wrong[0]}, which the index says it holds", got=str(index))
        return files

    def _opened_file(self, path: Path) -> Any:
        if path not in self._opened:
            try:
                self._opened[path] = self._open_file(path, framework="pt")
            except Exception as error:  # the library's own error class is not public in every version
                raise InputError(
                    f"not a whole safetensors file: {error}", got=str(path), hint="download or copy it again"
                ) from error
        return self._opened[path]
