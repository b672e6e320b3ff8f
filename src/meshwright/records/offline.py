"""Records of `bench offline`: `offline.json`, one entry for each pair of input and output lengths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshwright.errors import InputError

SCHEMA = "meshwright bench offline 1"
NAME = "offline.json"
POINT_KEYS = (
    "wall_s", "num_ok", "input_tokens", "output_tokens", "output_tokens_per_s", "total_tokens_per_s", "refusal",
)  # fmt: skip


def read_offline(path: Path) -> dict[str, Any]:
    """Read the file. Raises InputError when it is absent, damaged or of another kind."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA:
            raise ValueError(document["schema"])
        missing = [key for key in ("model", "num_replicas", "started") if key not in document]
        for pair in document["pairs"]:
            missing += [key for key in ("name", "num_replicas") if key not in pair]
            missing += [key for key in POINT_KEYS if key not in pair["point"]]
        if missing:
            raise ValueError(f"{missing[0]} is missing")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path}: no result of bench offline ({type(error).__name__}: {error})") from None
    return document
