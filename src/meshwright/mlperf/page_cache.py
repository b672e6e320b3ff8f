"""Dropping the page cache before a run, so that its data comes from the disk."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def clear_page_cache(files: Iterable[Path], *, drop_caches: Path = DROP_CACHES) -> dict[str, Any]:
    """Drop clean pages of the whole machine where that is permitted, otherwise of `files`.

    Returns the entry for `cache_clear`: `value`, and `method` with the action or the reason for none.
    """
    os.sync()
    try:
        drop_caches.write_text("3\n")
        return {"value": True, "method": "drop_caches"}
    except OSError as error:
        reason = error.strerror or str(error)
    try:
        count = sum(_evict(file) for file in files)
    except (OSError, AttributeError) as error:
        return {"value": False, "method": f"none: drop_caches: {reason}; posix_fadvise: {error}"}
    return {"value": True, "method": f"posix_fadvise of {count} files of the data; drop_caches: {reason}"}


def _evict(file: Path) -> int:
    handle = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)
    return 1
