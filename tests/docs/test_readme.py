"""The README's first command, with fewer steps: what a new user meets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
FEWER = (
    "train.steps=21", "train.evaluate.every_steps=21", "train.evaluate.num_batches=1", "optimizer.warmup_steps=4",
    "batch.global_sequences=8", "data.sequence_length=128",
)  # fmt: skip


def first_command() -> list[str]:
    """The README's first block without its set-up: the environment is the one that runs this test."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"```bash\n(.*?)```", readme, flags=re.DOTALL)
    assert block is not None
    return block[1].rpartition("&& .venv/bin/")[2].split()


def test_the_first_command_trains_on_real_text(tmp_path, meshwright, monkeypatch):
    """In the test's process, which has PyTorch loaded."""
    program, *arguments = first_command()
    assert program == "meshwright"
    for override in FEWER:
        arguments += ["--set", override]
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "110")
    done = meshwright(*arguments, "--out", tmp_path / "results")
    assert done.exit_code == 0, done.stderr
    first, last = re.search(r"loss, first to last step +([\d.]+) to ([\d.]+)", done.stdout).groups()
    assert float(last) < float(first) - 1
    for words in ("predicted (80 % interval)", "tokens/s/device", "The model writes:", "report.html"):
        assert words in done.stdout
    assert "expected:" in done.stderr
    assert (tmp_path / "results" / "report.html").stat().st_size > 10_000
