"""Which fabric a published source means by its words about links and network."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib.resources import files


@cache
def _rules() -> tuple[dict[str, object], ...]:
    text = (files("meshwright.catalog") / "data" / "interconnects.toml").read_text(encoding="utf-8")
    return tuple(tomllib.loads(text)["interconnect"])


@cache
def fabric_named_by(words: str, accelerator: str) -> str | None:
    """The fabric of the first rule that matches, or None: the accelerator's usual fabric.

    >>> fabric_named_by("NVLink4 8-GPU; AWS EFA between nodes", "h100")
    'aws-efa-p5'
    """
    for rule in _rules():
        if accelerator in rule["accelerators"] and re.search(str(rule["words"]), words, re.IGNORECASE):  # pyright: ignore[reportOperatorIssue]
            return str(rule["fabric"])
    return None
