"""A folder that appears whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import distributed

from meshwright.errors import InputError
from meshwright.files import naming, sync_tree


def is_writer() -> bool:
    """Return True if this process writes for all: rank 0, or the only one."""
    return not distributed.is_initialized() or distributed.get_rank() == 0


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to fill, which is renamed to `folder` at the end of the block.

    Raises InputError when `folder` is not empty, and OSError, which names a path, when it cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError("the folder is not empty", got=str(folder), hint="name a folder that does not exist")
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        with naming(folder):
            yield unfinished
        if folder.exists():
            folder.rmdir()  # empty: its place is needed
        with naming(folder):
            sync_tree(unfinished)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
