"""Folders that are built once, by one process, and are complete or absent.

A folder is built under another name and renamed when its manifest (size and digest of every file) is on disk,
so a process killed at any moment leaves no folder that opens. Several processes may ask at once: one builds,
the others wait. A folder whose files differ from its manifest is refused and built again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.files import sync_tree, write_atomically
from meshwright.json_values import load_json
from meshwright.units import GIB, MIB

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FULLY_CHECKED_BYTES = 4 * GIB
"""Digests are checked at every opening up to this size (about a second a GiB); beyond it sizes only."""

SAMPLE_BYTES = 2**16
REMEMBERED_BYTES = 256 * MIB
"""Source files from this size on are not read again to see whether they are the same."""


def build_once(
    folder: Path, build: Callable[[Path], None], *, about: Mapping[str, Any], continues: bool = False
) -> None:
    """Make sure that `folder` exists and matches its manifest; otherwise `build` fills an empty folder.

    A `build` that `continues` gets the folder that it left when it was killed or interrupted.
    Raises InputError when the cache cannot be written, and whatever `build` raises.
    """
    if find_fault(folder) is None:
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_name(f".{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the system frees the lock of a killed process
            fault = find_fault(folder)  # another process may have built it while this one waited
            if fault is None:
                return
            if folder.exists():
                log.warning("%s is damaged (%s) and is built again", folder, fault)
                shutil.rmtree(folder)
            _build(folder, build, about, continues=continues)
    except OSError as error:
        raise InputError(
            f"cannot build data in the cache: {error.strerror or error}", got=str(folder.parent),
            hint="set MESHWRIGHT_CACHE to a folder that can be written and has room",
        ) from error  # fmt: skip


def find_fault(folder: Path) -> str | None:
    """The first difference between a built folder and its manifest, or None."""
    try:
        files = load_json(folder / MANIFEST)["files"]
        facts = {name: (int(fact["bytes"]), str(fact["blake2b"])) for name, fact in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "it has no readable manifest"
    for name, (num_bytes, _) in facts.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != num_bytes:
            return f"{name} has {file.stat().st_size} bytes instead of {num_bytes}"
    if sum(num_bytes for num_bytes, _ in facts.values()) <= FULLY_CHECKED_BYTES:
        for name, (_, digest) in facts.items():
            if digest_of(folder / name) != digest:
                return f"{name} was altered"
    return None


def digest_of(file: Path) -> str:
    """BLAKE2b of a file's content."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=20)).hexdigest()


def sampled(files: Iterable[tuple[str, Path]], starts: Callable[[int], Iterable[int]]) -> str:
    """SHA-256 of sizes, names and samples of files; `starts` gives the places of the samples of a file by its size."""
    digest = hashlib.sha256()
    for name, path in files:
        size = path.stat().st_size
        digest.update(f"{name}:{size}:".encode())
        with path.open("rb") as file:
            for start in starts(size):
                file.seek(start)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def remembered_digest(file: Path, *, cache: Path) -> str:
    """`digest_of` a source file. A large file's digest is cached until its size or modification time changes."""
    fact = file.stat()
    if fact.st_size < REMEMBERED_BYTES:
        return digest_of(file)
    memory, state = memory_of(file, cache / "digests"), f"{fact.st_size} {fact.st_mtime_ns}"
    if (known := recalled(memory, state)) is None:
        remember(memory, state, known := [digest_of(file)])
    return known[0]


def memory_of(file: Path, folder: Path) -> Path:
    """The file in `folder` with what is known of `file`."""
    return folder / hashlib.blake2b(str(file.resolve()).encode(), digest_size=16).hexdigest()


def recalled(memory: Path, state: str) -> list[str] | None:
    """Facts that are kept of a file in this state; None: there are none."""
    found, *known = memory.read_text(encoding="utf-8").split("\n") if memory.is_file() else [""]
    return known if found == state else None


def remember(memory: Path, state: str, known: Iterable[object]) -> None:
    """Keep what is known of a file in this state."""
    memory.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(memory, "\n".join([state, *map(str, known)]))


def _build(folder: Path, build: Callable[[Path], None], about: Mapping[str, Any], *, continues: bool) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    if not continues:
        shutil.rmtree(partial, ignore_errors=True)  # what a killed process left
    partial.mkdir(exist_ok=True)
    try:
        build(partial)
        files = sorted(f for f in partial.rglob("*") if f.is_file())
        facts = {
            file.relative_to(partial).as_posix(): {"bytes": file.stat().st_size, "blake2b": digest_of(file)}
            for file in files
        }
        write_atomically(partial / MANIFEST, json.dumps({"about": dict(about), "files": facts}, indent=1) + "\n")
        sync_tree(partial)
        partial.rename(folder)
    except BaseException as error:
        if not (continues and isinstance(error, KeyboardInterrupt)):
            shutil.rmtree(partial, ignore_errors=True)
        raise
