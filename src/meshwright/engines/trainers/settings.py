"""Settings of a run by names that all trainers share, each with the key of the file that gave it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.engines.trainers.tables import TrainerTable
from meshwright.errors import InputError

_TRUE, _FALSE = ("true", "yes", "on", "auto", "inductor"), ("false", "no", "off", "none")
TRUTHS = dict.fromkeys(_TRUE, True) | dict.fromkeys(_FALSE, False)
LARGEST = 1 << 62
OF_DEEPSPEED = ("schedule", "optimizer")
"""Settings of its own file that DeepSpeed takes, whatever the trainer has: transformers, integrations/deepspeed.py."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """A value with the key and the file that gave it."""

    value: Any
    key: str
    file: Path


@dataclass(kw_only=True)
class Settings:
    """Settings of the files of one run, and what is said about their other keys."""

    table: TrainerTable  # of the trainer, whose configuration is `file`
    file: Path
    overlay: dict[str, str]  # keys of a run file that stood behind the files, and "key=value" of each
    given: dict[str, Given] = field(default_factory=dict)
    tables: dict[str, TrainerTable] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    refused: dict[str, list[str]] = field(default_factory=dict)  # by the reason
    unestimated: list[str] = field(default_factory=list)
    deprecated: list[str] = field(default_factory=list)

    def give(self, setting: str, given: Given, *, of: TrainerTable) -> None:
        """Add a setting. Raises InputError if another key has given it another value."""
        before = self.given.setdefault(setting, given)
        self.tables.setdefault(setting, of)
        if setting in OF_DEEPSPEED and of.title == "DeepSpeed" and self.tables[setting] is not of:
            self.notes.append(f"{before.key} {before.value} has no effect: {given.file.name} has {given.value}")
            self.given[setting], self.tables[setting] = given, of
        elif _plain(before.value) != _plain(given.value):
            got = f"{before.key}: {before.value} in {before.file}, {given.key}: {given.value} in {given.file}"
            raise InputError(f"two settings of one run contradict each other: {setting}", got=got, hint="keep one")

    def get(self, setting: str) -> Any:
        """Return a value as the files have it, else the trainer's default; None: there is neither."""
        return self.given[setting].value if setting in self.given else self.defaults.get(setting)

    def values(self, setting: str) -> Mapping[str, str]:
        """Return the values that a setting has in the file that gave it, with ours."""
        return self.tables.get(setting, self.table).values.get(setting, {})

    def key(self, setting: str) -> str:
        """Return the key of a setting, as messages name it."""
        return self.given[setting].key if setting in self.given else self.table.key_of(setting) or setting

    def error(self, setting: str, what: str, **more: Any) -> InputError:
        """Return the error that the value of a setting is, with what was got unless `more` has it."""
        more = {"got": str(self.get(setting))[:80]} | more
        return InputError(f"{self.key(setting)}: {what}", **more)

    def count(self, setting: str, *, least: int = 1) -> int | None:
        """Return a whole number, None where it is not set. Raises InputError for another value."""
        found = self.number(setting)
        if found is not None and not (found == int(found) and least <= found <= LARGEST):
            raise self.error(setting, "must be a whole number", allowed=f">= {least}")
        return None if found is None else int(found)

    def number(self, setting: str) -> float | None:
        """Return a number, None where it is not set. Raises InputError for another value."""
        found = self.get(setting)
        if found is None:
            return None
        try:
            number = math.nan if isinstance(found, bool) else float(found)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise self.error(setting, "must be a number")
        return int(found) if isinstance(found, int) else number

    def truth(self, setting: str) -> bool:
        """Return True where a setting is switched on. Raises InputError for a value that is neither true nor false."""
        found = self.get(setting)
        if found in (None, 0, 1):
            return bool(found)
        if isinstance(found, str) and found.lower() in TRUTHS:
            return TRUTHS[found.lower()]
        raise self.error(setting, "must be true or false")

    def text(self, setting: str) -> str | None:
        """Return our text for a value, which is noted where it is another one; None where it is not set.

        Raises InputError for a value that run files do not have.
        """
        found = self.get(setting)
        if found is None:
            return None
        values = self.values(setting)
        text = str(found).lower() if isinstance(found, bool) else str(found)
        known = values.get(text, values.get(text.lower())) if values else text
        if known is None:
            raise self.error(setting, "run files do not have it", allowed=", ".join(values))
        ours, colon, note = known.partition(":")
        if colon:
            read = f" is read as {ours}" if ours else ""
            self.notes.append(f"{self.key(setting)}: {text}{read}; the run file does not contain:{note}")
        return ours


def _plain(value: Any) -> Any:
    """Return a value as comparisons between files see it: texts for true and false as these."""
    return TRUTHS.get(value.lower(), value) if isinstance(value, str) else value
