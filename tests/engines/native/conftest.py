"""Tests that compute: few threads, a cache of their own, and ranks that start warm."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _small(one_thread_and_a_cache: None, warm_ranks: None) -> None: ...
