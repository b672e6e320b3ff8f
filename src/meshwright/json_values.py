"""Values as JSON can hold them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any

NUM_DIGITS = 12
"""Significant digits of a JSON number. Fewer than a double has, so that the order in which a sum was taken
(BLAS, number of cores) does not change the document."""


def picked(value: Any, *names: str) -> dict[str, Any]:
    """Attributes of a value that its document has by their own names."""
    return {name: getattr(value, name) for name in names}


def jsonable(value: Any) -> Any:
    """`value` as dicts, lists and scalars that JSON can hold.

    Dataclasses become objects of their fields, or what their `as_json()` returns; NumPy arrays and scalars
    become lists and numbers; NaN and infinities, which JSON lacks, become null; integer enums become their
    lower-case names; sets are sorted.

    >>> jsonable({"step_s": float("nan"), "degrees": (1, 2), "share": 1 / 3})
    {'step_s': None, 'degrees': [1, 2], 'share': 0.333333333333}
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return value.value if isinstance(value.value, str) else value.name.lower()
    if isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return float(f"{value:.{NUM_DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, PurePath):
        return str(value)
    return _jsonable_container(value)


def _jsonable_container(value: Any) -> Any:
    if hasattr(value, "as_json"):
        return jsonable(value.as_json())
    if hasattr(value, "tolist"):  # NumPy array or scalar, told by its method: no import of NumPy here
        return jsonable(value.tolist())
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: jsonable(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {_key(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((jsonable(v) for v in value), key=str)
    if isinstance(value, Iterable):
        return [jsonable(v) for v in value]
    raise TypeError(f"no JSON form for {type(value).__name__}")


def _key(key: Any) -> str:
    key = jsonable(key)
    return key if isinstance(key, str) else json.dumps(key)
