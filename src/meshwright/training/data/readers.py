"""Documents from one file: plain text, JSONL and Parquet. A failure names the file, and the line if there is one."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO, cast

from meshwright.errors import InputError, MissingDependencyError
from meshwright.training.data.documents import Chat, TextDocument, document_from_record

Reader = Callable[..., Iterator[TextDocument]]
"""`reader(file, text_key=..., chat=...)`."""


def read_text(file: Path, *, text_key: str | None, chat: Chat) -> Iterator[TextDocument]:
    """The whole file is one document."""
    if text_key is not None:
        raise InputError(
            "a text file has no keys", got=f"text={text_key}", allowed="JSONL and Parquet have them"
        )
    try:
        with _open_text(file) as stream:
            yield TextDocument(text=stream.read())
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise _unreadable(file, error) from error


def read_json_lines(file: Path, *, text_key: str | None, chat: Chat) -> Iterator[TextDocument]:
    """One JSON object a line; empty lines are skipped."""
    try:
        with _open_text(file) as stream:
            for number, line in enumerate(stream, start=1):
                if not line.strip():
                    continue
                where = f"{file}:{number}"
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise InputError(f"{where}: not JSON: {error}") from error
                if not isinstance(record, dict):
                    raise InputError(f"{where}: a line is one JSON object", got=type(record).__name__)
                yield document_from_record(record, where=where, text_key=text_key, chat=chat)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise _unreadable(file, error) from error


def read_parquet(file: Path, *, text_key: str | None, chat: Chat) -> Iterator[TextDocument]:
    """One record a row, in batches; only the column `text_key` is read where it is given."""
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise MissingDependencyError("Parquet needs pyarrow", hint="pip install pyarrow") from error
    try:
        with parquet.ParquetFile(file) as table:
            columns = None if text_key is None else [text_key]
            names = table.schema_arrow.names
            if text_key is not None and text_key not in names:
                raise InputError(f"{file}: no column of that name", got=text_key, allowed=", ".join(names))
            number = 0
            for batch in table.iter_batches(batch_size=1024, columns=columns):
                for record in batch.to_pylist():
                    number += 1
                    where = f"{file}: row {number}"
                    yield document_from_record(record, where=where, text_key=text_key, chat=chat)
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(file, error) from error


READERS: dict[str, Reader] = {
    ".txt": read_text,
    ".text": read_text,
    ".md": read_text,
    ".rst": read_text,
    ".py": read_text,
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".parquet": read_parquet,
}
"""Which suffix is read how; text and JSON lines may also end in `.gz`."""


def reader_of(file: Path) -> Reader | None:
    """The reader of a file by its suffix, or None."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes[-1:] == [".gz"]:
        reader = READERS.get(suffixes[-2]) if len(suffixes) > 1 else None
        return None if reader is read_parquet else reader
    return READERS.get(suffixes[-1]) if suffixes else None


def _open_text(file: Path) -> TextIO:
    """UTF-8, with or without a byte order mark; line ends become \\n."""
    if file.suffix.lower() == ".gz":
        return cast(TextIO, gzip.open(file, "rt", encoding="utf-8-sig"))
    return file.open(encoding="utf-8-sig")


def _unreadable(file: Path, error: Exception) -> InputError:
    if isinstance(error, UnicodeDecodeError):
        return InputError(
            f"{file} is not UTF-8: byte {error.object[error.start]:#04x} near offset {error.start}",
            hint="convert it, for example with iconv",
        )
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return InputError(f"cannot read {file}: {reason}")
