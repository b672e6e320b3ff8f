"""Keys of programs that no reader takes, by what they change, as `key_classes.toml` has them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class KeyClasses:
    """Keys of one program, by what they change."""

    harmless: frozenset[str]
    harmless_prefixes: tuple[str, ...]
    unestimated: Mapping[str, tuple[str, ...]]  # with the values of the estimate, besides none or the default
    older: Mapping[str, str]  # by names of earlier versions

    def is_harmless(self, key: str) -> bool:
        """Return True for a key that concerns neither speed nor memory nor the loss."""
        return key in self.harmless or key.startswith(self.harmless_prefixes)


@cache
def key_classes(program: str) -> KeyClasses:
    """Return the keys of `program`, a table of the file."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))[program]
    return KeyClasses(
        harmless=frozenset(table.get("harmless", "").split()),
        harmless_prefixes=tuple(table.get("harmless_prefixes", "").split()),
        older=table.get("older", {}),
        unestimated=dict.fromkeys(table["unestimated"].split(), ())
        | {key: tuple(values) for key, values in table.get("values", {}).items()},
    )
