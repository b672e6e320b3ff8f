"""Progress on stderr: a live line on a terminal, one plain line every some seconds elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from meshwright.units import format_bytes, format_seconds

PLAIN_EVERY_S = 10.0


class Progress:
    """Shows steps as they come. Nothing is drawn when `quiet`."""

    def __init__(self, *, num_steps: int, quiet: bool) -> None:
        self.num_steps = num_steps
        self.quiet = quiet
        self.last_s = 0.0
        self.bar: Any = None
        if not quiet and sys.stderr.isatty():
            self.bar = _bar()
            self.task = self.bar.add_task("", total=num_steps)
            self.bar.start()

    def step(self, entry: dict[str, Any], *, left_s: float) -> None:
        """Show one step of the log and the time that is left."""
        if self.quiet:
            return
        words = describe(entry, num_steps=self.num_steps, left_s=left_s)
        if self.bar is not None:
            self.bar.update(self.task, completed=entry["step"], description=words)
            return
        now_s, is_edge = time.monotonic(), entry["step"] in (1, self.num_steps)
        if is_edge or now_s - self.last_s >= PLAIN_EVERY_S:
            self.last_s = now_s
            print(words, file=sys.stderr, flush=True)

    def say(self, words: str) -> None:
        """Print a line that stays."""
        if self.quiet:
            return
        if self.bar is not None:
            self.bar.console.print(words, markup=False, highlight=False)
        else:
            print(words, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Take the live line away."""
        if self.bar is not None:
            self.bar.stop()


def describe(entry: dict[str, Any], *, num_steps: int, left_s: float) -> str:
    """One step in words.

    >>> describe({"step": 5, "loss": 2.5, "tokens_per_s_per_device": 1234.5, "mfu": 0.41,
    ...           "memory_bytes": 2**30}, num_steps=10, left_s=65)
    'step 5/10  loss 2.5000  1,234 tokens/s/device  MFU 41.0 %  1.0 GiB  65.00 s left'
    """
    parts = [
        f"step {entry['step']}/{num_steps}",
        f"loss {entry['loss']:.4f}",
        f"{entry['tokens_per_s_per_device']:,.0f} tokens/s/device",
        f"MFU {100 * entry['mfu']:.1f} %",
        format_bytes(entry["memory_bytes"]),
        f"{format_seconds(left_s)} left",
    ]
    return "  ".join(parts)


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as RichProgress

    console = Console(stderr=True, highlight=False)
    return RichProgress(
        BarColumn(bar_width=24), TextColumn("{task.description}", markup=False), console=console
    )
