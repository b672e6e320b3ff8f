"""Tests that compute: few threads, a cache of their own, and ranks that start warm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _small(one_thread_and_a_cache: None, warm_ranks: None) -> None: ...


@pytest.fixture(scope="module")
def cache_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache folder for what fixtures of a module build."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHWRIGHT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
