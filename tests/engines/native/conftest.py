"""What tests of the native engine share: few threads, a cache of their own, and that plans equal one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from meshwright.specs.plan import Plan
from meshwright.specs.run import Run


@pytest.fixture(autouse=True)
def _one_thread_and_a_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """What tests compute is small, and the processes that they start share few cores."""
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def equals_one_process() -> Callable[..., None]:
    """`equals_one_process([(run, plan), ...])`: plans of as many processes give what one process gives."""
    from meshwright.engines.native.check import check_plan
    from meshwright.engines.native.rehearsal import TIMEOUT_S, compare_each

    def check(
        runs: Sequence[tuple[Run, Plan]], *, tolerance: float = 1e-6, timeout_s: float = TIMEOUT_S
    ) -> None:
        for run, plan in runs:
            assert check_plan(plan, run=run) == []
        comparisons = compare_each(runs, timeout_s=timeout_s)
        for (_, plan), found in zip(runs, comparisons, strict=True):
            assert found.num_processes == plan.num_devices
            assert found.loss_error < tolerance, found.plan
            assert found.gradient_error < 10 * tolerance, (found.plan, found.gradient_errors)
            assert found.weight_error < 10 * tolerance, (found.plan, found.weight_errors)
            assert found.losses[-1] != found.losses[0]

    return check
