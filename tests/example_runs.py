"""Paths of the run files that ship: the folder, one with an open plan and one with a pinned plan."""

from __future__ import annotations

from pathlib import Path

EXAMPLE_RUNS = Path(__file__).parents[1] / "examples" / "runs"
OPEN_RUN = EXAMPLE_RUNS / "llama3.1-8b-pretrain.yaml"
PINNED_RUN = EXAMPLE_RUNS / "llama3.1-70b-pinned.yaml"
