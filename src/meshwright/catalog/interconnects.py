"""Map a published source's description of links and network to a fabric of the catalogue."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def _rules() -> tuple[dict[str, Any], ...]:
    text = (files("meshwright.catalog") / "data" / "interconnects.toml").read_text(encoding="utf-8")
    return tuple(tomllib.loads(text)["interconnect"])


@cache
def fabric_named_by(description: str, accelerator: str) -> str | None:
    """Return the fabric of the first rule that matches, or None for the accelerator's usual fabric.

    >>> fabric_named_by("NVLink4 8-GPU; AWS EFA between nodes", "h100")
    'aws-efa-p5'
    """
    for rule in _rules():
        if accelerator in rule["accelerators"] and re.search(rule["description"], description, re.IGNORECASE):
            return rule["fabric"]
    return None
