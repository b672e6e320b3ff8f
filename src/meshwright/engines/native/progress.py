"""Progress on stderr: a live line on a terminal, plain lines elsewhere.

say(line)             a line that stays
phase(name)           something that may take long: named when it takes longer than `SILENT_S`
step(entry, left_s)   one step; plain lines come every `PLAIN_EVERY_S`, or every `log_every` steps, also on a terminal
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from meshwright.training.data.tokenization import Report
from meshwright.training.data.tokenization import TokenizationProgress as Tokenised
from meshwright.units import format_bytes, format_count, format_duration

PLAIN_EVERY_S = 10.0
SILENT_S = 1.5
WIDE_COLUMNS = 110


class ProgressDisplay:
    """Shows the progress of a training. Nothing is drawn when `quiet`."""

    def __init__(self, *, quiet: bool, num_steps: int | None = None, log_every: int | None = None) -> None:
        self.quiet = quiet
        self.num_steps, self.log_every = num_steps, log_every
        self.last_s = 0.0
        self.bar: Any = None
        if not quiet and sys.stderr.isatty():
            # The live line leaves nothing behind; a narrow terminal shows the text only.
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as RichProgress

            console = Console(stderr=True, highlight=False)
            text = TextColumn("{task.description}", markup=False)
            columns = (BarColumn(bar_width=24), text) if console.width >= WIDE_COLUMNS else (text,)
            self.bar = RichProgress(*columns, console=console, transient=True)
            self.task = self.bar.add_task("", total=None)
            self.bar.start()

    def step(self, entry: dict[str, Any], *, left_s: float) -> None:
        """Show one step of the log and the time that is left."""
        if self.quiet:
            return
        text = describe(entry, num_steps=self.num_steps or 0, left_s=left_s)
        if self.bar is not None:
            self.bar.update(self.task, total=self.num_steps, completed=entry["step"], description=text)
        if self._is_due(entry["step"]):
            self._print(text)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if not self.quiet:
            self._print(text)

    def doing(self, text: str) -> None:
        """Show how far a long phase is: on the live line, or now and then on a plain one."""
        if self.quiet:
            return
        if self.bar is not None:
            self.bar.update(self.task, description=text)
        elif self._is_time():
            self._print(text)

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Name the phase `text` when the context stays open for longer than `SILENT_S`."""
        if self.quiet:
            yield
            return
        timer = threading.Timer(SILENT_S, self._name_phase, (text,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def close(self) -> None:
        """Remove the live line."""
        if self.bar is not None:
            self.bar.stop()

    def _name_phase(self, text: str) -> None:
        if self.bar is not None:
            self.bar.update(self.task, description=f"{text} ...")
        else:
            self._print(f"{text} ...")

    def _is_due(self, step: int) -> bool:
        """True if this step has a line that stays. On a terminal only `log_every` asks for one."""
        if self.log_every is not None:
            return step in (1, self.num_steps) or step % self.log_every == 0
        return self.bar is None and (step in (1, self.num_steps) or self._is_time())

    def _is_time(self) -> bool:
        """True if the next plain line is due."""
        return time.monotonic() - self.last_s >= PLAIN_EVERY_S

    def _print(self, text: str) -> None:
        self.last_s = time.monotonic()
        if self.bar is not None:
            self.bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)


def reading(progress: ProgressDisplay) -> Report:
    """A callback that shows the progress of tokenisation."""

    def report(done: Tokenised) -> None:
        share = f" ({done.done_bytes / done.total_bytes:.0%})" if done.total_bytes else ""
        progress.doing(
            f"tokenising: {format_count(done.num_documents)} documents, "
            f"{format_count(done.num_tokens)} tokens{share.replace('%', ' %')}"
        )

    return report


def describe(entry: dict[str, Any], *, num_steps: int, left_s: float) -> str:
    """One step as a line of text.

    >>> describe({"step": 5, "loss": 2.5, "tokens_per_s_per_device": 1234.5, "mfu": 0.41,
    ...           "memory_bytes": 2**30}, num_steps=10, left_s=65)
    'step 5/10  loss 2.5000  1,234 tokens/s/device  MFU 41.0 %  1 min 5 s left  1.0 GiB'
    """
    parts = [
        f"step {entry['step']}/{num_steps}",
        f"loss {entry['loss']:.4f}",
        f"{entry['tokens_per_s_per_device']:,.0f} tokens/s/device",
    ]
    if "mean" in (rewards := entry.get("rewards", {})):
        parts.insert(2, f"reward {rewards['mean']:.3f}")
    if entry["mfu"] is not None:
        parts.append(f"MFU {100 * entry['mfu']:.1f} %")
    if entry["step"] < num_steps:
        parts.append(f"{format_duration(left_s)} left")
    return "  ".join([*parts, format_bytes(entry["memory_bytes"])])
