"""Documents to ingest: files of a folder, lines of a JSONL file, one file, or Python's standard library.

A file that cannot be read as text is skipped and counted by reason: binary data, an encoding other than
UTF-8, an empty file, a file that cannot be opened, and a special file (a FIFO would block). Symbolic links to
folders are not followed. A JSONL file is refused at its first wrong line.
"""

from __future__ import annotations

import hashlib
import os
import platform
import random
import stat
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatch
from pathlib import Path

from meshwright.errors import InputError
from meshwright.json_values import parse_json

OTHER_FOLDERS = ("site-packages", "dist-packages", "__pycache__")
"""Folders of the standard library with installed packages and compiled files."""
LONGEST_DOCUMENT = 256 * 2**20
"""Bytes. A longer file is skipped: it would be held in memory, with its tokens."""


class SkipReason(StrEnum):
    """Reason why a file is no document."""

    EMPTY = "empty"
    BINARY = "binary"
    NOT_UTF8 = "not UTF-8"
    UNREADABLE = "unreadable"
    NOT_A_FILE = "not a regular file"
    TOO_LONG = "longer than 256 MiB"
    NO_TOKENS = "without tokens"


class SkippedDocumentError(Exception):
    """A document that cannot be used; the benchmark goes on without it."""

    def __init__(self, reason: SkipReason) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Document:
    """A file, or `num_bytes` from `offset` on in a JSONL file."""

    path: Path
    offset: int = 0
    num_bytes: int | None = None  # None: the whole file
    text_key: str | None = None

    def read(self) -> str:
        """The text. Raises SkippedDocumentError."""
        if self.num_bytes is None:
            return _file_text(self.path)
        try:
            with self.path.open("rb") as stream:
                stream.seek(self.offset)
                text = _json_text(stream.read(self.num_bytes), self.text_key or "")
        except (OSError, ValueError, KeyError, TypeError):  # changed since it was opened
            raise SkippedDocumentError(SkipReason.UNREADABLE) from None
        if not text.strip():
            raise SkippedDocumentError(SkipReason.EMPTY)
        return text


def _file_text(path: Path) -> str:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise SkippedDocumentError(SkipReason.NOT_A_FILE)
        if found.st_size > LONGEST_DOCUMENT:
            raise SkippedDocumentError(SkipReason.TOO_LONG)
        data = path.read_bytes()
    except OSError:
        raise SkippedDocumentError(SkipReason.UNREADABLE) from None
    if b"\0" in data:
        raise SkippedDocumentError(SkipReason.BINARY)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise SkippedDocumentError(SkipReason.NOT_UTF8) from None
    if not text.strip():
        raise SkippedDocumentError(SkipReason.EMPTY)
    return text


@dataclass(frozen=True, kw_only=True)
class IngestSource:
    """Candidates of one source, in a seeded random order, so that any first part is a sample."""

    name: str
    documents: Sequence[Document]


@dataclass(kw_only=True)
class DocumentTally:
    """Documents that were used and skipped, and a digest of the used texts in their order."""

    num_used: int = 0
    num_bytes: int = 0
    skipped: Counter[SkipReason] = field(default_factory=Counter)
    _digest: hashlib._Hash = field(default_factory=hashlib.sha256)

    def add(self, text: str) -> None:
        data = text.encode("utf-8", errors="replace")
        self.num_used += 1
        self.num_bytes += len(data)
        self._digest.update(len(data).to_bytes(8, "big") + data)

    @property
    def reasons(self) -> dict[str, int]:
        """Skipped documents by reason."""
        return {str(reason): count for reason, count in self.skipped.items()}

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


def open_source(
    path: Path | None, *, pattern: str | None = None, text_key: str = "text", seed: int = 0
) -> IngestSource:
    """Find the documents of `path`, or of Python's standard library. Raises InputError when there is none."""
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        found = [Document(path=p) for p in _files(root, pattern or "*.py", skip=OTHER_FOLDERS)]
        name = f"standard library of Python {platform.python_version()}"
    elif path.is_dir():
        found, name = [Document(path=p) for p in _files(path, pattern or "*")], str(path)
    elif not path.exists():
        raise InputError("no such folder or file", got=str(path))
    else:
        if pattern is not None:
            raise InputError("--pattern selects files of a folder", got=pattern, allowed=f"none with {path}")
        is_lines = path.suffix.lower() in (".jsonl", ".ndjson")
        found, name = (_lines(path, text_key) if is_lines else [Document(path=path)]), str(path)
    if not found:
        of = f" that match {pattern!r}" if pattern else ""
        raise InputError(f"there are no documents{of}", got=name, allowed="a folder with text files, or a file")
    random.Random(f"documents {seed}").shuffle(found)
    return IngestSource(name=name, documents=found)


def _files(root: Path, pattern: str, *, skip: Sequence[str] = ()) -> list[Path]:
    """Files below `root` in the order of their names. Folders that cannot be listed have none."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in skip)
        found += [Path(folder) / name for name in sorted(names) if fnmatch(name, pattern)]
    return found


def _lines(path: Path, text_key: str) -> list[Document]:
    found, offset = [], 0
    for number, line in enumerate(_raw_lines(path), start=1):
        if line.strip():
            try:
                _json_text(line, text_key)
            except (ValueError, KeyError, TypeError) as error:
                what = f"no {text_key!r}" if isinstance(error, KeyError) else str(error)
                raise InputError(
                    f"{path}:{number}: not a document ({what})",
                    allowed=f'a text, or {{"{text_key}": "..."}}; --text-key names another key',
                ) from None
            found.append(Document(path=path, offset=offset, num_bytes=len(line), text_key=text_key))
        offset += len(line)
    return found


def _raw_lines(path: Path) -> Iterator[bytes]:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError("not a regular file", got=str(path))
        with path.open("rb") as stream:
            yield from stream
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None


def _json_text(line: bytes, text_key: str) -> str:
    found = parse_json(line)
    text = found[text_key] if isinstance(found, dict) else found
    if not isinstance(text, str):
        raise TypeError(f"a {type(text).__name__} instead of a text")
    return text
