"""What torchtitan's processes leave behind, and where."""

from __future__ import annotations

from pathlib import Path

from meshwright.engines.external_record import Layout
from meshwright.engines.torchtitan.lower import OUTPUT, RUN_FILE


def checkpoints(folder: Path) -> list[Path]:
    """Torchtitan's checkpoints in `folder`, oldest first."""
    found = [path for path in folder.glob("step-*") if _step(path).isdecimal()]
    return sorted(found, key=lambda path: int(_step(path)))


def _step(path: Path) -> str:
    return path.name.removeprefix("step-")


LAYOUT = Layout(output=OUTPUT, run_file=RUN_FILE, checkpoints=checkpoints)
