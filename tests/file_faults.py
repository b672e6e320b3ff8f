"""Faults at numbered file operations of a process, in `os`, `io` and files open for writing.

`install` replaces the functions of this process, and so of all that are forked from it. Operations below the folder
are numbered from 1 in the order in which they happen, those of all processes with the same record together; the one
with the number of the fault goes wrong:

    ENOSPC  it and all that need room after it fail: the disk stays full
    EIO     it alone fails
    KILL    all processes are killed before it: the groups of those in which this is installed, and their launcher
    ALONE   the process that would do it is killed before it, and none beside it
    TORN    a write puts down half of its bytes, and all are killed
    CUT     all are killed, and a folder loses its changes of names since its last sync
    LOST    all are killed, and a file loses its writes since its last sync: all, half of them, or zeros stay

`CUT` and `LOST` are what a power cut may leave: of the entries of folders, and of contents behind entries that stay.
Who started the command calls `cut_power` when all of its processes have ended.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import mmap
import os
import secrets
import shutil
import signal
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

OS = {name: getattr(os, name) for name in (
    "open", "write", "fsync", "fdatasync", "rename", "replace", "unlink", "remove", "mkdir", "rmdir", "link", "symlink",
    "truncate", "ftruncate", "sendfile", "copy_file_range",
)}  # fmt: skip
OPEN = io.open


class FaultKind(StrEnum):
    """The fault at the numbered operation."""

    NONE = "none"
    ENOSPC = "ENOSPC"
    EIO = "EIO"
    KILL = "kill"
    ALONE = "alone"
    TORN = "torn"
    CUT = "cut"
    LOST = "lost"


ROOM = ("open", "write", "mkdir", "link", "symlink", "rename", "sendfile")
"""Operations that need room on the disk."""


@dataclass
class Injector:
    """The counter, the log of operations and the journal of folder entries, shared by all forked processes."""

    root: Path
    kind: FaultKind
    number: int
    record: Path  # outside of `root`
    passed_over: str = ""  # a folder below `root`
    launcher: int | None = None  # number of a process that ends with these
    lock: Any = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.backups = self.record.with_suffix(".kept")
        self.backups.mkdir(exist_ok=True)
        with OPEN(self.record.with_suffix(".count"), "a+b") as file:  # of all processes, those of torchrun too
            file.truncate(8)
            self.counter = mmap.mmap(file.fileno(), 8)
        is_first = not self.record.exists()
        self.log = OS["open"](self.record, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.write(group=os.getpgrp(), launcher=self.launcher)
        for path in self.root.rglob("*") if is_first else ():
            self.durable(path)

    def is_inside(self, path: Path | None) -> bool:
        return (
            path is not None
            and path.is_relative_to(self.root)
            and not (self.passed_over and path.is_relative_to(self.root / self.passed_over))
        )

    def write(self, **entry: Any) -> None:
        OS["write"](self.log, (json.dumps(entry) + "\n").encode())

    def durable(self, path: Path, *, is_empty: bool = False) -> None:
        """Note that a power cut leaves the content that the file has now, or nothing of it."""
        if path.is_file():
            found = path.stat()
            state = [0, 0] if is_empty else [found.st_size, found.st_mtime_ns]
            self.write(file=found.st_ino, durable=state)

    def at(self, name: str, path: Path, *, tear: Callable[[], object] | None = None) -> None:
        """Count an operation; the fault, if this is its number. Raises OSError."""
        with self.lock:
            fcntl.lockf(self.log, fcntl.LOCK_EX)  # among processes
            count = struct.unpack("q", self.counter[:8])[0] + 1
            self.counter[:8] = struct.pack("q", count)
            fcntl.lockf(self.log, fcntl.LOCK_UN)
        self.write(number=count, name=name, path=str(path.relative_to(self.root)), process=os.getpid())
        full = self.kind is FaultKind.ENOSPC and count > self.number and name in ROOM
        if count != self.number and not full:
            return
        if self.kind in (FaultKind.ENOSPC, FaultKind.EIO):
            code = getattr(errno, self.kind)
            raise OSError(code, os.strerror(code), *([] if name in ("write", "fsync", "sendfile") else [str(path)]))
        if self.kind is FaultKind.TORN and tear is not None:
            tear()
        if self.kind is FaultKind.ALONE:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind is not FaultKind.NONE:
            self.kill_all()

    def kill_all(self) -> None:
        entries = [entry for entry in map(json.loads, self.record.read_text().splitlines()) if "group" in entry]
        for launcher in {entry["launcher"] for entry in entries} - {None}:
            with suppress(ProcessLookupError):
                os.kill(launcher, signal.SIGKILL)
        for group in {entry["group"] for entry in entries} - {os.getpgrp()}:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        os.killpg(0, signal.SIGKILL)
        signal.pause()

    def kept(self, path: Path) -> str | None:
        """A second name of the file that a rename will replace."""
        if not path.is_file():
            return None
        name = self.backups / secrets.token_hex(8)  # two processes may replace one file at once
        OS["link"](path, name)
        return str(name)


def cut_power(folder: Path, *, kind: FaultKind, record: Path, passed_over: str = "") -> None:
    """Leave below `folder` what `kind` says of the operations in `record`."""
    entries = [json.loads(line) for line in record.read_text().splitlines()]
    if kind is FaultKind.CUT:
        _undo(entries)
    if kind is not FaultKind.LOST:
        return
    durable = {entry["file"]: entry["durable"] for entry in entries if "file" in entry}
    left = 0
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.is_symlink() or (passed_over and path.is_relative_to(folder / passed_over)):
            continue
        found = path.stat()
        size, modified_ns = durable.get(found.st_ino, (0, 0))
        if (found.st_size, found.st_mtime_ns) == (size, modified_ns):
            continue
        kept, left = min(size, found.st_size), left + 1
        with OPEN(path, "r+b") as file:
            file.truncate((kept, (kept + found.st_size) // 2, kept)[(len(entries) + left) % 3])
            if (len(entries) + left) % 3 == 2:
                file.truncate(found.st_size)  # as long as it was, of zeros


def _undo(entries: Sequence[dict[str, Any]]) -> None:
    """Undo the changes of folders since they were last synced, newest first."""
    synced: set[str] = set()
    for entry in reversed(entries):
        if "synced" in entry:
            synced.add(entry["synced"])
        elif "made" in entry and str(Path(entry["made"]).parent) not in synced:
            _remove(Path(entry["made"]))
        elif "renamed" in entry and str(Path(entry["to"]).parent) not in synced:
            if Path(entry["to"]).exists():
                OS["rename"](entry["to"], entry["renamed"])
            if entry["kept"]:
                OS["rename"](entry["kept"], entry["to"])


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        for entry in list(path.iterdir()):
            _remove(entry)
        OS["rmdir"](path)
    elif path.is_symlink() or path.exists():
        OS["unlink"](path)


def _path(given: Any, dir_fd: int | None = None) -> Path | None:
    if isinstance(given, int):
        found = os.readlink(f"/proc/self/fd/{given}")  # noqa: PTH115  not its target
        return Path(found) if found.startswith("/") else None
    base = Path.cwd() if dir_fd is None else _path(dir_fd)
    return Path(os.path.normpath((base or Path("/")) / os.fsdecode(given)))  # not resolved: a link itself is meant


class _File(io.FileIO):
    """A file open for writing, whose writes are operations."""

    def __init__(self, injector: Injector, path: Path, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._of, self._path = injector, path

    def write(self, data: Any, /) -> int:
        half = bytes(data)[: len(data) // 2] if len(memoryview(data)) else b""
        self._of.at("write", self._path, tear=lambda: OS["write"](self.fileno(), half))
        return super().write(data) or 0


def install(
    folder: Path, *, kind: str, number: int, record: Path, passed_over: str = "", launcher: int | None = None
) -> None:
    """Number the operations below `folder` from here on; `record` gets a line for each."""
    it = Injector(
        root=folder, kind=FaultKind(kind), number=number, record=record, passed_over=passed_over, launcher=launcher
    )
    for name in ("unlink", "remove", "rmdir", "truncate"):
        setattr(os, name, _one(it, name))
    for name in ("rename", "replace"):
        setattr(os, name, _renaming(it, name))
    for name in ("link", "symlink"):
        setattr(os, name, _linking(it, name))
    for name in ("fsync", "fdatasync"):
        setattr(os, name, _syncing(it, name))
    os.mkdir, os.open, os.write = _mkdir(it), _os_open(it), _os_write(it)  # pyright: ignore
    os.sendfile = _sendfile(it)  # pyright: ignore
    shutil._USE_CP_SENDFILE = True  # pyright: ignore
    import builtins

    builtins.open = io.open = _open(it)  # pyright: ignore


def _one(it: Injector, name: str) -> Any:
    def call(path: Any, *args: Any, dir_fd: int | None = None, **options: Any) -> Any:
        found = _path(path, dir_fd)
        if it.is_inside(found):
            it.at("unlink" if name == "remove" else name, found)  # pyright: ignore
            if name == "truncate":
                it.durable(found, is_empty=True)  # pyright: ignore
        return OS[name](path, *args, **options | ({} if dir_fd is None else {"dir_fd": dir_fd}))

    return call


def _renaming(it: Injector, name: str) -> Any:
    def call(source: Any, target: Any, **options: Any) -> None:
        before, after = _path(source), _path(target)
        if not it.is_inside(after):
            return OS[name](source, target, **options)
        assert before is not None
        assert after is not None
        it.at("rename", after)
        kept = it.kept(after)
        OS[name](source, target, **options)
        it.write(renamed=str(before), to=str(after), kept=kept)
        return None

    return call


def _linking(it: Injector, name: str) -> Any:
    def call(source: Any, target: Any, *args: Any, **options: Any) -> None:
        after = _path(target, options.get("dir_fd"))
        if it.is_inside(after):
            it.at(name, after)  # pyright: ignore
        OS[name](source, target, *args, **options)
        if it.is_inside(after):
            it.write(made=str(after))

    return call


def _mkdir(it: Injector) -> Any:
    def call(path: Any, *args: Any, **options: Any) -> None:
        found = _path(path, options.get("dir_fd"))
        is_new = it.is_inside(found) and not found.exists()  # pyright: ignore
        if is_new and found is not None:
            it.at("mkdir", found)
        OS["mkdir"](path, *args, **options)
        if is_new:
            it.write(made=str(found))

    return call


def _syncing(it: Injector, name: str) -> Any:
    def call(handle: Any) -> None:
        found = _path(handle if isinstance(handle, int) else handle.fileno())
        if found is not None and it.is_inside(found):
            it.at("fsync", found)
        OS[name](handle)
        if found is not None and it.is_inside(found):
            it.durable(found)
            if found.is_dir():
                it.write(synced=str(found))

    return call


def _os_open(it: Injector) -> Any:
    def call(path: Any, flags: int, *args: Any, dir_fd: int | None = None, **options: Any) -> int:
        found = _path(path, dir_fd)
        is_new = bool(flags & os.O_CREAT) and it.is_inside(found) and not found.exists()  # pyright: ignore
        if is_new and found is not None:
            it.at("open", found)
        handle = OS["open"](path, flags, *args, dir_fd=dir_fd, **options)
        if found is not None and it.is_inside(found) and (is_new or flags & os.O_TRUNC):
            it.durable(found, is_empty=True)
        if is_new:
            it.write(made=str(found))
        return handle

    return call


def _os_write(it: Injector) -> Any:
    def call(handle: int, data: Any) -> int:
        found = _path(handle)
        if found is not None and it.is_inside(found):
            it.at("write", found, tear=lambda: OS["write"](handle, bytes(data)[: len(data) // 2]))
        return OS["write"](handle, data)

    return call


def _sendfile(it: Injector) -> Any:
    def call(out: int, *args: Any, **options: Any) -> int:
        found = _path(out)
        if found is not None and it.is_inside(found):
            it.at("sendfile", found)
        return OS["sendfile"](out, *args, **options)

    return call


def _open(it: Injector) -> Any:
    def call(
        file: Any, mode: str = "r", buffering: int = -1, encoding: str | None = None, errors: str | None = None,
        newline: str | None = None, closefd: bool = True, opener: Any = None,
    ) -> Any:  # fmt: skip
        path = _path(file) if set(mode) & set("wax+") else None
        if path is None or not it.is_inside(path):
            return OPEN(file, mode, buffering, encoding, errors, newline, closefd, opener)
        is_new = not path.exists()
        if opener is None and not isinstance(file, int) and (is_new or "w" in mode):
            it.at("open", path)
        raw = _File(it, path, file, mode.replace("b", "").replace("t", ""), closefd=closefd, opener=opener)
        if is_new or "w" in mode:
            it.durable(path, is_empty=True)
        if is_new:
            it.write(made=str(path))
        if buffering == 0:
            return raw
        size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
        buffered = io.BufferedRandom(raw, size) if "+" in mode else io.BufferedWriter(raw, size)
        if "b" in mode:
            return buffered
        text = io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)
        text.mode = mode  # pyright: ignore
        return text

    return call
