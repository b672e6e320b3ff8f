"""Progress of work that takes long: a callback with the amount of work done."""

from __future__ import annotations

from collections.abc import Callable

Advance = Callable[[float], None]


def ignore(amount: float) -> None:
    """Show no progress."""
