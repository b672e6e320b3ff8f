"""Rows of published runs, written as a file with only the cells a test is about."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.accuracy.rows import FAILED_COLUMNS, MEASURED_COLUMNS, PublishedRun, read_failed, read_runs

LLAMA = {
    "source_key": "somebody",
    "task": "pretrain",
    "model": "Llama3 8B",
    "arch": "dense",
    "gpu": "H100-SXM-80GB",
    "num_gpus": 8,
    "gpus_per_node": 8,
    "seq_len": 8192,
    "mbs": 1,
    "gbs": 128,
    "tp": 1,
    "pp": 1,
    "cp": 2,
    "dp": 4,
    "dp_type": "DDP+distopt",
    "recompute": "none",
    "precision": "fp8",
    "framework": "NeMo",
    "framework_version": "24.07",
    "date": "2024-09-09",
    "tok_s_gpu_best": 13000,
    "metric_kind": "steady_state",
    "quality": "A-vendor-table",
}
"""A row that says everything."""


@pytest.fixture
def write_csv(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows (cells by column) as a CSV file with all columns that either kind of file needs."""

    def write(*rows: dict[str, object], name: str = "runs.csv") -> Path:
        columns = dict.fromkeys(
            (*MEASURED_COLUMNS, *FAILED_COLUMNS, *LLAMA, *(c for row in rows for c in row))
        )
        path = tmp_path / name
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(columns), restval="")
            writer.writeheader()
            writer.writerows(rows)
        return path

    return write


@pytest.fixture
def read_one(write_csv: Callable[..., Path]) -> Callable[..., PublishedRun]:
    """Reads one row: the complete one with the given cells changed ("" or None empties a cell)."""

    def read(*, failed: bool = False, **cells: object) -> PublishedRun:
        path = write_csv(LLAMA | cells)
        return (read_failed if failed else read_runs)(path)[0]

    return read


@pytest.fixture
def read_many(write_csv: Callable[..., Path]) -> Callable[..., list[PublishedRun]]:
    """Reads rows that are the complete one with the given cells changed."""

    def read(*changes: dict[str, object]) -> list[PublishedRun]:
        return read_runs(write_csv(*(LLAMA | change for change in changes)))

    return read


@pytest.fixture
def read_many_failed(write_csv: Callable[..., Path]) -> Callable[..., list[PublishedRun]]:
    """Reads failed configurations that are the complete row with the given cells changed."""

    def read(*changes: dict[str, object]) -> list[PublishedRun]:
        return read_failed(write_csv(*(LLAMA | change for change in changes), name="failed.csv"))

    return read
