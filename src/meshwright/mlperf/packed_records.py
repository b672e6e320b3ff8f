"""Records that are packed to a fixed length already, as token files with a mask: one record, one document.

    NAME.parquet   columns `input_ids` and `labels`; -100 is a token that the loss does not count
    NAME.npy       rows {input_ids, loss_mask}, as NeMo reads them: an array of Python objects, which is refused,
                   because reading one runs whatever its author wrote

Converted once into the cache. A label belongs to the token it predicts, as in Hugging Face and NeMo: position i of
`labels` says whether token i counts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from meshwright.errors import InputError, MissingDependencyError
from meshwright.files import default_cache
from meshwright.kernels.labels import IGNORED_LABEL
from meshwright.training.data.cache import build_once, remembered_digest
from meshwright.training.data.megatron import IndexedWriter
from meshwright.training.data.store import TRAINED_SUFFIX


def indexed_from_packed(path: Path, *, length: int, cache: Path | None = None) -> Path:
    """The token files of `path`, whose records have `length` tokens each. Built at the first use.

    Raises InputError for another kind of file, columns or lengths, MissingDependencyError without pyarrow.
    """
    if path.suffix != ".parquet":
        raise InputError(
            "packed records are read from Parquet", got=str(path), allowed="columns input_ids and labels",
            hint="an .npy of Python objects runs code when it is read: use the Parquet file that it was made from",
        )  # fmt: skip
    if find_spec("pyarrow") is None:
        raise MissingDependencyError("packed records are read by pyarrow", hint="pip install pyarrow")
    cache = default_cache() if cache is None else cache
    key = hashlib.sha256(f"{remembered_digest(path, cache=cache)} {length}".encode()).hexdigest()[:24]
    folder = cache / "packed" / key

    def build(empty: Path) -> None:
        masks = []
        with IndexedWriter(empty / "tokens", dtype=np.int32) as writer:
            for tokens_T, trained_T in _records(path, length=length):
                writer.add(tokens_T)
                masks.append(trained_T)
        (empty / f"tokens{TRAINED_SUFFIX}").write_bytes(np.concatenate(masks).tobytes())

    build_once(folder, build, about={"packed": path.name})
    return folder / "tokens"


def _records(path: Path, *, length: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        table = parquet.read_table(path, columns=["input_ids", "labels"])
    except (pyarrow.ArrowException, OSError, KeyError) as error:
        raise InputError(f"{path}: packed records cannot be read: {error}") from error
    if table.column_names != ["input_ids", "labels"] or not table.num_rows:
        raise InputError(f"{path}: packed records have the columns input_ids and labels", got=table.column_names)
    for number in range(table.num_rows):
        row = [np.asarray(table[name][number].as_py(), dtype=np.int64) for name in table.column_names]
        if any(len(values) != length for values in row):
            raise InputError(f"{path}: record {number} has another length", got=len(row[0]), allowed=length)
        yield row[0], row[1] != IGNORED_LABEL
