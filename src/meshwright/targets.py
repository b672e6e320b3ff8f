"""Names of functions that are imported when they are called: "package.module:attribute"."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def load(target: str) -> Any:
    """Import "package.module:attribute" and return the attribute."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)
