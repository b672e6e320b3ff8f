"""Atomic writes, documents with a schema, tables that ship, folder locks and the cache folder.

A killed process never leaves a partial file under a file's name; what it leaves beside it, the next one removes.
"""

from __future__ import annotations

import csv
import errno
import io
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from meshwright.errors import InputError, NewerFormatError

Record = TypeVar("Record")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name `path` in every OSError that names no file: a full disk fails in `write`, which knows none."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def is_there(name: str) -> bool:
    """Return True if `name` is that of a file or folder; False also for text that can be the name of none."""
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # too long, a null byte
        return False


def write_atomically(path: Path, text: str | bytes) -> None:
    """Write bytes or UTF-8 text beside `path` and rename it into place. Raises OSError; then `path` is as before.

    Characters that UTF-8 lacks, as of file names in other encodings, become escapes. A device or a pipe is written to
    directly: a rename would take its name from it.
    """
    data = text if isinstance(text, bytes) else text.encode(errors="backslashreplace")
    if (path.exists() and not path.is_file()) or str(path.absolute()).startswith(OPEN_FILES):
        with naming(path), path.open("wb") as stream:
            stream.write(data)
        return
    _sweep(path.parent.absolute())
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        with naming(path), partial.open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    with suppress(OSError):  # some file systems sync no folders
        sync(path.parent)


PARTIAL, STALE_S = ".partial", 3600.0
OPEN_FILES = ("/dev/std", "/dev/fd/", "/proc/")


@cache
def _sweep(folder: Path) -> None:
    """Remove what killed processes left of files that they wrote in `folder`; no write takes an hour."""
    with suppress(OSError):
        for left in folder.glob(f".*{PARTIAL}"):
            if left.is_file() and time.time() - left.stat().st_mtime > STALE_S:
                left.unlink()


def swap_names(one: Path, other: Path) -> bool:
    """Swap two names on one disk in a single step; False where the system or the file system cannot."""
    import ctypes  # `os` has no function for it

    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)  # Linux with glibc 2.28
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return renameat2 is not None and renameat2(here, os.fsencode(one), here, os.fsencode(other), swap) == 0


def sync(path: Path) -> None:
    """Make a file, or renames in a folder, survive a power cut. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems sync no folders
            raise
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Make `folder` with everything in it survive a power cut, before it gets its name. Raises OSError."""
    for path in (folder, *folder.rglob("*")):
        if path.is_file() or path.is_dir():  # and no link to nothing
            sync(path)


def append(path: Path, text: str) -> None:
    """Append lines to a file; a power cut leaves them there when this has returned. Raises OSError.

    Half a line that a power cut left at its end goes first.
    """
    with naming(path), path.open("a+b") as stream:
        if stream.tell() and (stream.seek(-1, os.SEEK_END), stream.read(1))[1] != b"\n":
            stream.seek(0)
            stream.truncate(stream.read().rfind(b"\n") + 1)
        stream.write(text.encode())
        stream.flush()
        os.fsync(stream.fileno())


def write_csv(path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]], *, columns: Sequence[str] = ()) -> None:
    """Write rows as CSV, with a heading. Raises InputError if `path` cannot be written.

    `columns` empty: the keys of the first row, which all rows have.
    """
    text = io.StringIO(newline="")
    writer = csv.DictWriter(
        text, columns or list(rows[0]), extrasaction="ignore" if columns else "raise", lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(rows)
    try:
        write_atomically(Path(path), text.getvalue())
    except OSError as error:
        raise InputError(f"cannot write {os.fspath(path)}: {error.strerror or error}") from None


FORMAT = 1
"""Format of records of trainings and of manifests of checkpoints, their key `format`."""


def require_format(document: object, *, where: object, schema: str = "") -> None:
    """Raise NewerFormatError for a document of a format above FORMAT, or above the number that ends `schema`.

    A document without the key `format`, or `schema`, is of the first format.
    """
    kind, _, number = schema.rpartition(" ")
    newest = int(number) if schema else FORMAT
    found = document.get("schema" if schema else "format", 1) if isinstance(document, dict) else 1
    is_ours, text = not schema or str(found).startswith(f"{kind} "), str(found).removeprefix(f"{kind} ")[:9]
    if is_ours and text.isdecimal() and int(text) > newest:
        raise NewerFormatError(where, got=found, allowed=schema or FORMAT)


def document_of(document: object, *, schema: str, refusal: str) -> dict[str, Any]:
    """Return a parsed JSON document that names `schema`: a kind, and the number of its format.

    Raises InputError with the words of `refusal`, NewerFormatError for a higher number.
    """
    if isinstance(document, dict) and document.get("schema") == schema:
        return document
    got = document.get("schema") if isinstance(document, dict) else type(document).__name__
    require_format(document, where=refusal.partition(":")[0], schema=schema)
    raise InputError(refusal, got=got, allowed=schema)


@contextmanager
def refused_with(refusal: str, *, hint: str | None = None) -> Iterator[None]:
    """Raise InputError with these words where a key of a document is missing or a value is none of its kind."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else error
        raise InputError(f"{refusal}: {what}", hint=hint) from None


@cache
def toml_table(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file that ships; it is read once."""
    import tomllib  # only the commands that read such a file pay for it

    return tomllib.loads(path.read_text(encoding="utf-8"))


def record_of(kind: type[Record], row: Mapping[str, Any], **more: Any) -> Record:
    """Return the dataclass `kind` of a row, with enums of their values, tuples of lists, dataclasses of tables.

    Other values stay as they are. Raises TypeError for a missing or an unknown key, ValueError for no value of an enum.
    """
    hints = _hints_of(kind)
    return kind(**{key: _typed(hints.get(key), value) for key, value in {**row, **more}.items()})


@cache
def _hints_of(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _typed(hint: Any, value: Any) -> Any:
    if get_origin(hint) in (Union, UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        return value if value is None or len(kinds) > 1 else _typed(kinds[0], value)
    if get_origin(hint) is tuple:
        return tuple(_typed(get_args(hint)[0], item) for item in value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    return record_of(hint, value) if is_dataclass(hint) and isinstance(value, Mapping) else value  # pyright: ignore


@contextmanager
def held(lock: Path, *, by: str) -> Iterator[str | None]:
    """Lock the file `lock` while the context is open; None, or the holder's `by` if another process holds the lock.

    The kernel releases the lock when this process and all that have inherited its descriptor (`held_locks`) have ended.
    On a file system without locks the result is None.
    """
    import fcntl  # absent on Windows, where runs are planned and not trained

    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a+", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            yield stream.read().strip() or "a process that has not said which"
            return
        except OSError:
            pass
        stream.truncate(0)
        stream.write(by)
        stream.flush()
        held_locks.append(stream.fileno())
        try:
            yield None
        finally:
            held_locks.remove(stream.fileno())


held_locks: list[int] = []
"""Descriptors of the locks that this process holds: for workers, which hold them too until they end."""


def default_cache() -> Path:
    """Folder of built data: $MESHWRIGHT_CACHE, else $XDG_CACHE_HOME/meshwright, else ~/.cache/meshwright."""
    named = os.environ.get("MESHWRIGHT_CACHE")
    if named:
        return Path(named).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "meshwright"
