"""Tests that compute: few threads and a cache of their own."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _small(one_thread_and_a_cache: None) -> None: ...
