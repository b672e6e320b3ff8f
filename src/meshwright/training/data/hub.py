"""Data sets through the Hugging Face `datasets` library: by name from the hub, or a folder it saved."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.errors import InputError, MissingDependencyError
from meshwright.training.data.readers import Rows, row_of


@dataclass(frozen=True, kw_only=True)
class HubDataset:
    """One split of a data set, and the library's own hash of its content and its transformations."""

    dataset: Any = field(repr=False)
    fingerprint: str
    num_bytes: int | None

    def rows(self, name: str, *, text_key: str | None) -> Rows:
        """Every row with its place; only the column `text_key` where it is given."""
        rows = self.dataset
        if text_key is not None:
            if text_key not in rows.column_names:
                columns = ", ".join(rows.column_names)
                raise InputError(f"{name}: no column of that name", got=text_key, allowed=columns)
            rows = rows.select_columns([text_key])
        for number, record in enumerate(rows):
            yield f"{name}: row {number}", row_of(record)


def is_saved_to_disk(path: Path) -> bool:
    """Return True if `datasets.save_to_disk` wrote this folder."""
    return (path / "dataset_dict.json").is_file() or (
        (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    )


def dataset_from_disk(path: Path, *, split: str | None) -> HubDataset:
    """A folder of `datasets.save_to_disk`. Raises InputError when it cannot be read or lacks the split."""
    datasets = _require_datasets(str(path))
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # the library passes on whatever its file formats raise
        raise _failed(str(path), error) from error
    if isinstance(loaded, datasets.DatasetDict):
        chosen = split or "train"
        if chosen not in loaded:
            raise InputError(f"{path}: no such split", got=chosen, allowed=", ".join(loaded))
        return _rows(loaded[chosen])
    if split is not None and split != str(loaded.split):
        raise InputError(f"{path}: no such split", got=split, allowed=str(loaded.split))
    return _rows(loaded)


def dataset_from_hub(name: str, *, config: str | None, split: str) -> HubDataset:
    """A data set by name, downloaded once by the library. Raises InputError when it cannot be had."""
    datasets = _require_datasets(name)
    try:
        return _rows(datasets.load_dataset(name, config, split=split))
    except Exception as error:  # connection, unknown name, config or split, broken files: all in one place
        raise _failed(name, error) from error


def _rows(dataset: Any) -> HubDataset:
    return HubDataset(dataset=dataset, fingerprint=dataset._fingerprint, num_bytes=dataset.dataset_size)


def _require_datasets(name: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        message = f"the data set {name} needs the datasets library"
        raise MissingDependencyError(message, hint="pip install datasets") from error
    return datasets


def _failed(name: str, error: Exception) -> InputError:
    first_line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return InputError(
        f"the datasets library cannot load it: {first_line}", got=name,
        hint="check the name, ?config=...&split=..., and the connection; a local path needs to exist",
    )  # fmt: skip
