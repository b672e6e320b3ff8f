"""Repositories of the Hugging Face hub, through `huggingface_hub`: its cache, its settings, its login.

OWNER/NAME             the main branch
OWNER/NAME@REVISION    a branch, a tag or a commit

HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE and HF_TOKEN work as in transformers. Without a connection a cached copy is used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.errors import InputError, MissingDependencyError

HUB_NAME = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w.][\w./-]*))?")


def is_hub_name(name: str) -> bool:
    """Return True if `name` may be a repository of the hub: OWNER/NAME or OWNER/NAME@REVISION.

    >>> [is_hub_name(name) for name in ("openai/gpt-oss-20b", "a/b@main", "a", "a/b/c", "./a", "a/b@")]
    [True, True, False, False, False, False]
    """
    return HUB_NAME.fullmatch(name) is not None


def fetch(name: str, *, patterns: Sequence[str], what: str) -> Path:
    """The folder of the cache that holds the files of `name` that match; downloaded where they are not there.

    `what` begins the messages: "the weights". Raises InputError when the hub does not provide them,
    MissingDependencyError without `huggingface_hub`.
    """
    found = HUB_NAME.fullmatch(name)
    if found is None:
        raise InputError("not a repository of the Hugging Face hub", got=name, allowed="OWNER/NAME[@REVISION]")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MissingDependencyError(
            f"{what}: {name} is on the Hugging Face hub", hint="pip install huggingface_hub"
        ) from error
    wanted = {"revision": found["revision"], "allow_patterns": list(patterns)}
    try:
        return Path(snapshot_download(found["repository"], **wanted))
    except Exception as error:  # connection, unknown or gated name, full disk: the library raises all kinds
        if (cached := _cached(found["repository"], wanted)) is not None:
            return cached
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise InputError(
            f"there is no such folder or file, and the Hugging Face hub does not provide {what}: {reason}", got=name,
            hint="without a connection, download the repository elsewhere and give the path of its folder",
        ) from error  # fmt: skip


def _cached(repository: str, wanted: dict[str, Any]) -> Path | None:
    """The folder of the cache. The library itself asks the hub where a commit is named, even when it is offline."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repository, local_files_only=True, **wanted))
    except Exception:  # the reason why it cannot be downloaded says more
        return None
    is_there = any(next(folder.glob(pattern), None) for pattern in wanted["allow_patterns"])
    return folder if is_there else None
