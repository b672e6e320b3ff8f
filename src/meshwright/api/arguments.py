"""Checks of what a caller passes: every wrong value is an InputError that says what, got and allowed."""

from __future__ import annotations

import errno
import operator
import os
import re
from collections.abc import Iterable, Mapping
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, Literal

from meshwright.errors import InputError

MAX_COUNT = 10**9
MAX_NUMBER = 1e18
BUDGET = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>s|m|h|)")
UNIT_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
LONGEST_S = 7 * 24 * 3600.0
MAX_DEPTH = 20
"""Nested mappings end here; no run file is as deep."""


def count(name: str, value: object, *, most: int = MAX_COUNT, least: int = 1) -> int:
    """Return `value` as an int between `least` and `most`.

    >>> count("top", 5)
    5
    """
    allowed = f"a whole number, {least} to {most}"
    if isinstance(value, bool):
        raise InputError(name, got=value, allowed=allowed)
    try:
        number = operator.index(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        raise InputError(name, got=value, allowed=allowed) from None
    if not least <= number <= most:
        raise InputError(name, got=number, allowed=allowed)
    return number


def checkpoint_step(value: object) -> int | Literal["best"] | None:
    """Return the number of a step, `best`, or None."""
    if value is None:
        return None
    return "best" if value == "best" else count("step", value, least=0)


def number(name: str, value: object, *, most: float = MAX_NUMBER) -> float:
    """Return `value` as a float above 0, up to `most`."""
    if isinstance(value, bool | str):
        raise InputError(name, got=value, allowed="a number above 0")
    try:
        found = float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, OverflowError):
        raise InputError(name, got=_type(value), allowed="a number above 0") from None
    if not 0 < found <= most:  # nor is a NaN
        raise InputError(name, got=found, allowed=f"above 0, up to {most:g}")
    return found


def seconds(name: str, value: object) -> float:
    """Return a time in seconds: a number of them, or text.

    >>> seconds("budget", 90), seconds("budget", "1.5h")
    (90.0, 5400.0)
    """
    found = BUDGET.fullmatch(str(value).strip())
    number_s = float(found["number"]) * UNIT_S[found["unit"]] if found else 0.0
    if not 0 < number_s <= LONGEST_S:
        raise InputError(f"{name} is not a time", got=value, allowed="above 0 to 168h, as in 180s, 3m or 1h")
    return number_s


def flag(name: str, value: object) -> bool:
    """Return `value`, which is True or False."""
    if not isinstance(value, bool):
        raise InputError(name, got=value, allowed="True or False")
    return value


def choice(name: str, value: object, allowed: Iterable[str]) -> str:
    """Return `value`, which is one of `allowed`."""
    known = tuple(allowed)
    if not isinstance(value, str) or value not in known:
        raise InputError(name, got=value, allowed=", ".join(known))
    return value


def path(name: str, value: object) -> Path:
    """Return `value`, text or a path, as a Path."""
    if not isinstance(value, str | os.PathLike):
        raise InputError(name, got=_type(value), allowed="a path")
    try:
        found = os.fspath(value)
    except TypeError:
        raise InputError(name, got=_type(value), allowed="a path") from None
    if not isinstance(found, str) or not found or "\0" in found:
        raise InputError(name, got=found, allowed="a path as text")
    try:
        Path(found).stat()
    except ValueError:
        raise InputError(name, got=found, allowed="a path as text") from None
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES):
            raise InputError(f"{name}: {error.strerror}", got=found) from None
    return Path(found)


def items(name: str, value: object, *, example: str = "[64, 128]") -> list[Any]:
    """Return the items of a list or tuple. Text is no list: it is nearly always a mistake."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InputError(name, got=value, allowed=f"a list, as in {example}")
    return list(value)


def overrides(value: object) -> tuple[str, ...]:
    """Return overrides of a run file as `key.path=value` lines.

    >>> overrides({"train.steps": 20, "precision": "fp8"})
    ('train.steps=20', 'precision="fp8"')
    >>> overrides(["train.steps=20"])
    ('train.steps=20',)
    """
    import json

    if not isinstance(value, Mapping):
        found = items("overrides", value, example='["train.steps=20"], or a mapping')
        for item in found:
            if not isinstance(item, str):
                raise InputError("overrides", got=item, allowed='text such as "train.steps=20", or a mapping')
        return tuple(found)
    lines = []
    for key, given in plain("overrides", value).items():
        try:
            lines.append(f"{key}={json.dumps(given, allow_nan=False)}")
        except (TypeError, ValueError):
            raise InputError(f"overrides: {key}", got=given, allowed="a finite number, text, or a list") from None
    return tuple(lines)


def plan_fields(name: str, value: object) -> dict[str, Any]:
    """Return fields of a plan, given as a mapping, as text or as a list of texts: {"tensor": 8}, "tensor=8,pipeline=4".

    A mapping may have the values that a `Plan` has, None among them where a plan leaves a field unsaid.

    >>> plan_fields("fixed", {"tensor": 8, "sharding": "parameters"})
    {'tensor': 8, 'sharding': <Sharding.PARAMETERS: 3>}
    """
    from meshwright.planner.fixed import UNSAID, fixed_fields

    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts):
        return fixed_fields(texts)
    if not isinstance(value, Mapping):
        raise InputError(name, got=_type(value), allowed='a mapping such as {"tensor": 8}')
    unsaid = {key: None for key, given in value.items() if given is None and key in UNSAID}
    said = fixed_fields(f"{key}={_field_text(given)}" for key, given in value.items() if key not in unsaid)
    return {**said, **unsaid}


def _field_text(value: object) -> str:
    if isinstance(value, IntEnum):
        return value.name.lower()
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool):
        return str(value).lower()
    return (",".join(map(str, value)) or "none") if isinstance(value, list | tuple) else str(value)


def questions(name: str, value: object) -> list[dict[str, Any]]:
    """Return questions about plans: one mapping or text, or a list of them."""
    asked = [value] if isinstance(value, str | Mapping) else items(name, value, example='[{"tensor": 8}]')
    return [plan_fields(name, item) for item in asked]


def plain(name: str, value: Any, depth: int = 0) -> Any:
    """Return `value` with paths, enums and NumPy scalars as plain text and numbers.

    Raises InputError where a key is no text, or the nesting has no end.
    """
    if depth > MAX_DEPTH:
        raise InputError(f"{name} is nested too deeply", allowed=f"<= {MAX_DEPTH} levels")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InputError(f"{name}: a key is no text", got=key, allowed="text")
        return {key: plain(f"{name}: {key}", item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(name, item, depth + 1) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, os.PathLike):
        return str(path(name, value))
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise InputError(name, got=_type(value), allowed="text, a number, True, False, None, a list or a mapping")


def _type(value: object) -> str:
    return type(value).__name__
