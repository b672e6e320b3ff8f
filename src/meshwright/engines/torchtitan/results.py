"""Names of the files and checkpoints that torchtitan's processes write."""

from __future__ import annotations

from pathlib import Path

from meshwright.engines.external_record import OutputLayout
from meshwright.engines.torchtitan.lower import OUTPUT, RUN_FILE


def checkpoints(folder: Path) -> list[Path]:
    """Return torchtitan's checkpoints in `folder`, oldest first."""
    found = [path for path in folder.glob("step-*") if _step(path).isdecimal()]
    return sorted(found, key=lambda path: int(_step(path)))


def _step(path: Path) -> str:
    return path.name.removeprefix("step-")


LAYOUT = OutputLayout(output=OUTPUT, run_file=RUN_FILE, checkpoints=checkpoints)
