"""Records and texts from one file. A failure names the file, and the line if there is one.

Text files are one document. JSON lines, JSON, CSV, TSV, Parquet and Arrow hold records (see `records`). All but the
last two may be compressed.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from meshwright.errors import InputError, MissingDependencyError
from meshwright.training.data.json_stream import json_lines, json_values

Rows = Iterator[tuple[str, Mapping[str, Any]]]
Reader = Callable[[Path, str | None], Rows]
"""`reader(file, text_key)`: every record with its place; `text_key` is the only key that is needed, if not None."""

_ROWS_AT_ONCE = 1024


def read_text(file: Path, text_key: str | None) -> Rows:
    """The whole file is one document, with the ends of its lines."""
    if text_key is not None:
        raise InputError("a text file has no keys", got=f"text={text_key}", allowed="files of records have them")
    with _opened(file, newline="") as stream:
        text = stream.read()
    if "\0" in text:
        raise InputError(f"{file} holds NUL bytes: it is not text", hint="convert UTF-16 with iconv")
    yield str(file), {"text": text}


def read_json_lines(file: Path, text_key: str | None) -> Rows:
    """One JSON object a line; empty lines are skipped."""
    with _opened(file) as stream:
        yield from json_lines(stream, name=str(file))


def read_json(file: Path, text_key: str | None) -> Rows:
    """An array of objects, or objects one after the other."""
    with _opened(file) as stream:
        yield from json_values(stream, name=str(file))


def read_separated(file: Path, text_key: str | None, *, delimiter: str) -> Rows:
    """Values between commas or tabs; the first row names the columns."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    with _opened(file, newline="") as stream:
        rows = csv.reader(stream, delimiter=delimiter, strict=True)
        try:
            names = next(rows, None)
            if names is None:
                return
            if len(set(names)) != len(names) or not all(name.strip() for name in names):
                got = ", ".join(map(repr, names[:12]))
                raise InputError(f"{file}:1: the first row names the columns, each once", got=got)
            _require_column(file, names, text_key)
            line = rows.line_num + 1
            for row in rows:
                if row and len(row) != len(names):
                    message = f"{file}:{line}: a row of another number of fields"
                    raise InputError(message, got=len(row), allowed=len(names))
                if any("\0" in field for field in row):
                    raise InputError(f"{file}:{line}: a NUL byte, which text files do not hold")
                if row:
                    yield f"{file}:{line}", dict(zip(names, row, strict=True))
                line = rows.line_num + 1
        except csv.Error as error:
            raise InputError(f"{file}:{rows.line_num}: not {delimiter!r}-separated values: {error}") from error


def read_parquet(file: Path, text_key: str | None) -> Rows:
    """One record a row, in batches; only the column `text_key` is read where it is given."""
    pyarrow = _require_pyarrow("Parquet")
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as table:
            _require_column(file, table.schema_arrow.names, text_key)
            columns = None if text_key is None else [text_key]
            batches = table.iter_batches(batch_size=_ROWS_AT_ONCE, columns=columns)
            yield from rows_of_batches(batches, name=str(file))
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(file, error) from error


def read_arrow(file: Path, text_key: str | None) -> Rows:
    """Arrow's file format (also called Feather) or stream format."""
    pyarrow = _require_pyarrow("Arrow")
    try:
        with pyarrow.memory_map(str(file)) as source:
            try:
                table = pyarrow.ipc.open_file(source)
                batches = map(table.get_batch, range(table.num_record_batches))
            except pyarrow.ArrowInvalid:
                source.seek(0)
                table = batches = pyarrow.ipc.open_stream(source)
            _require_column(file, table.schema.names, text_key)
            if text_key is not None:
                batches = (batch.select([text_key]) for batch in batches)
            yield from rows_of_batches(batches, name=str(file))
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(file, error) from error


def rows_of_batches(batches: Iterator[Any], *, name: str) -> Rows:
    """The rows of Arrow's record batches."""
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
            for record in batch.slice(start, _ROWS_AT_ONCE).to_pylist():
                number += 1
                yield f"{name}: row {number}", row_of(record)


def row_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """A row as a record. Its own keys stay where they are null, so that a message can name them."""
    return {key: _without_nulls(value) for key, value in record.items()}


def _without_nulls(value: Any) -> Any:
    """Without keys that are null: a column of objects gives every object the keys of all."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


READERS: dict[str, Reader] = {
    ".txt": read_text,
    ".text": read_text,
    ".md": read_text,
    ".rst": read_text,
    ".py": read_text,
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".json": read_json,
    ".csv": partial(read_separated, delimiter=","),
    ".tsv": partial(read_separated, delimiter="\t"),
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".feather": read_arrow,
}
"""Readers by suffix."""

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
_NOT_COMPRESSED = (read_parquet, read_arrow)


def reader_of(file: Path) -> Reader | None:
    """The reader of a file by its suffix, or None."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        reader = READERS.get(suffixes[-2]) if len(suffixes) > 1 else None
        return None if reader in _NOT_COMPRESSED else reader
    return READERS.get(suffixes[-1]) if suffixes else None


class _opened:  # noqa: N801  (used as a function)
    """The text of a file, decompressed: UTF-8, with or without a byte order mark. Line ends become \\n."""

    def __init__(self, file: Path, *, newline: str | None = None) -> None:
        self.file, self.newline = file, newline

    def __enter__(self) -> TextIO:
        try:
            opener = _OPENERS.get(self.file.suffix.lower(), open)
            self.stream = io.TextIOWrapper(opener(self.file, "rb"), encoding="utf-8-sig", newline=self.newline)
        except OSError as error:
            raise _unreadable(self.file, error) from error
        return self.stream

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.stream.close()
        if isinstance(error, (*_READ_ERRORS, *_zstandard_errors())):
            raise _unreadable(self.file, error) from error


def _open_zstandard(file: Path, mode: str) -> Any:
    try:
        zstandard = import_module("zstandard")
    except ImportError as error:
        raise MissingDependencyError(
            "files in .zst need zstandard", hint="pip install zstandard==0.25.0, or meshwright[data]"
        ) from error
    return io.BufferedReader(_ZstandardReader(file.open(mode), zstandard.ZstdDecompressor().decompressobj))


class _ZstandardReader(io.RawIOBase):
    """All frames of a file. The library's own reader takes a cut file for a whole one."""

    def __init__(self, file: Any, new_frame: Callable[[], Any]) -> None:
        self.file, self.new_frame = file, new_frame
        self.frame: Any = None  # the open one
        self.ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            given = self.file.read(_CHUNK_BYTES) if self.frame is None else self.frame.unused_data
            if self.frame is not None and not self.frame.eof:
                given = self.file.read(_CHUNK_BYTES)
                if not given:
                    raise EOFError("the file ends within a zstandard frame")
            elif self.frame is not None:
                self.frame, given = None, given or self.file.read(_CHUNK_BYTES)
            if not given:
                return 0
            self.frame = self.frame or self.new_frame()
            self.ready = self.frame.decompress(given)
        count = min(len(buffer), len(self.ready))
        buffer[:count], self.ready = self.ready[:count], self.ready[count:]
        return count

    def close(self) -> None:
        self.file.close()
        super().close()


_CHUNK_BYTES = 1 << 16


def _zstandard_errors() -> tuple[type[Exception], ...]:
    library = sys.modules.get("zstandard")
    return () if library is None else (library.ZstdError,)


_OPENERS: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstandard,
}
_READ_ERRORS = (OSError, EOFError, UnicodeDecodeError, zlib.error, lzma.LZMAError)


def _require_pyarrow(what: str) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        raise MissingDependencyError(f"{what} needs pyarrow", hint="pip install pyarrow") from error
    return pyarrow


def _require_column(file: Path, names: list[str], text_key: str | None) -> None:
    if text_key is not None and text_key not in names:
        raise InputError(f"{file}: no column of that name", got=text_key, allowed=", ".join(names))


def _unreadable(file: Path, error: BaseException) -> InputError:
    if isinstance(error, UnicodeDecodeError):
        return InputError(
            f"{file} is not UTF-8: byte {error.object[error.start]:#04x} near offset {error.start}",
            hint="convert it, for example with iconv",
        )
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return InputError(f"cannot read {file}: {reason}")
