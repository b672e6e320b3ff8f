"""Tests that compute: few threads, a cache of their own, and ranks that start warm."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.answer_runs import lines_of


@pytest.fixture(autouse=True)
def _small(one_thread_and_a_cache: None, warm_ranks: None) -> None: ...


@pytest.fixture
def data(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A file with the RECORDS of the test's module."""
    file = tmp_path / "records.jsonl"
    file.write_text(lines_of(request.module.RECORDS), encoding="utf-8")
    return file
