"""Communication behind compute, by the timeline that the formula stands for."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshwright.cost.overlap import exposed_s


def timeline_s(comm: float, compute: float, gamma: float, delta: float) -> float:
    """Seconds until both are done when each slows the other while both are active."""
    together = min(comm * delta, compute * gamma)
    return together + (comm - together / delta) + (compute - together / gamma)


SECONDS = st.floats(0.0, 3.0)
SLOWDOWN = st.floats(1.0, 1.5)


# Drawn numbers are often 0 or 1, where terms vanish: each of the two ends first here while both are slowed.
@example(comm=0.5, compute=2.0, gamma=1.1, delta=1.2)
@example(comm=3.0, compute=0.8, gamma=1.1, delta=1.2)
@settings(max_examples=200)
@given(comm=SECONDS, compute=SECONDS, gamma=SLOWDOWN, delta=SLOWDOWN)
def test_against_the_timeline(comm, compute, gamma, delta):
    """As long as running beside is not worse than running after."""
    added = min(timeline_s(comm, compute, gamma, delta) - compute, comm)
    assert exposed_s(comm, compute, gamma, comm_slowdown=delta) == pytest.approx(added, abs=1e-12)


def test_without_slowdown_the_longer_one_counts():
    assert exposed_s(3.0, 2.0) == 1.0
    assert exposed_s(2.0, 3.0) == 0.0


@pytest.mark.parametrize("ratio", [0.0, 0.25, 1.0])
def test_only_a_share_may_overlap(ratio):
    assert exposed_s(4.0, 100.0, 1.0, ratio) == 4.0 * (1 - ratio)


def test_slow_enough_side_by_side_is_one_after_the_other():
    assert exposed_s(2.0, 3.0, 50.0, comm_slowdown=50.0) == 2.0
