"""Names of the files and checkpoints that Megatron's processes write."""

from __future__ import annotations

import re
from pathlib import Path

from meshwright.engines.external_record import OutputLayout
from meshwright.engines.megatron.lower import OUTPUT, RUN_FILE

NAME = re.compile(r"step-\d{8,}")
MANIFEST = "manifest.json"


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, oldest first."""
    found = [path for path in folder.glob("step-*") if NAME.fullmatch(path.name)]
    return sorted((path for path in found if (path / MANIFEST).is_file()), key=lambda path: int(path.name[5:]))


LAYOUT = OutputLayout(output=OUTPUT, run_file=RUN_FILE, checkpoints=checkpoints)
