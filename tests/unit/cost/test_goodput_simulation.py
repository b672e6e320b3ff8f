"""Runs that are played failure by failure."""

import time

import pytest

from meshwright.catalog import reliability
from meshwright.cost.goodput import CheckpointCost, RestartCost
from meshwright.cost.goodput_simulation import simulate_goodput
from meshwright.errors import InputError

CHECKPOINT = CheckpointCost(stall_s=3.0, lag_s=14.0)
RESTART = RestartCost(detect_s=60.0, reschedule_s=60.0, load_s=14.0, warm_up_s=120.0)


def simulate(**changes):
    settings = {"num_devices": 98_304, "checkpoint": CHECKPOINT, "restart": RESTART, "days": 10, "num_runs": 40}
    return simulate_goodput(**(settings | changes))


@pytest.mark.parametrize("num_spares", [None, 10])
def test_all_hours_are_progress_or_lost_and_every_lost_one_has_a_cause(num_spares):
    found = simulate(num_spares=num_spares)
    assert found.mean * 240 + sum(found.lost_h.values()) == pytest.approx(240)
    assert all(hours > 0 for hours in found.lost_h.values() if num_spares)
    by_cause = sum(cause.lost_h for cause in found.causes.values())
    assert by_cause == pytest.approx(sum(found.lost_h.values()) - found.lost_h["save"], rel=1e-9)
    assert sum(cause.failures for cause in found.causes.values()) == pytest.approx(found.restarts)


def test_failures_have_the_published_rate_and_causes():
    rate = reliability.failure_range().value
    assert sum(rate.causes.values()) == 419  # of the paper's table, row by row
    found = simulate(num_runs=200)
    waited = 1 - found.lost_h["spares"] / 240
    expected = 10 * 86_400 * waited / (rate.device_mtbf_s / 98_304)
    deviation = (expected / 200) ** 0.5  # Poisson, of the mean
    assert abs(found.restarts - expected) < 4 * deviation
    for name, count in rate.causes.items():
        share = expected * count / 419
        assert abs(found.causes[name].failures - share) < 4 * (share / 200) ** 0.5, name


def test_one_seed_is_one_answer():
    assert simulate() == simulate()
    assert simulate(seed=1) != simulate()


def test_failures_strike_during_restarts_and_saves():
    """To first order R / M of the restarts, and the window of a save over its cycle of the failures."""
    found = simulate(num_runs=200)
    mtbf_s = reliability.failure_range().value.device_mtbf_s / 98_304
    hit = 1 - 2.718281828 ** (-254.0 / mtbf_s)
    assert found.restarts_hit / found.restarts == pytest.approx(hit, rel=0.05)
    window = (3.0 + 14.0) / (found.interval_s + 3.0)
    assert found.saves_hit / (found.restarts - found.restarts_hit) == pytest.approx(window, rel=0.1)


def test_without_failures_only_saves_cost():
    found = simulate(num_devices=1, num_runs=2, days=1, interval_s=100.0)
    assert found.restarts == 0
    assert found.p10 == found.mean == pytest.approx(100 / 103, rel=1e-3)


def test_a_save_waits_for_the_last_one():
    """A write of 500 s bears no save each 100 s: work is saved as often as it can be."""
    slow = CheckpointCost(stall_s=3.0, lag_s=500.0)
    found = simulate(num_devices=1, num_runs=2, days=1, checkpoint=slow, interval_s=100.0)
    assert found.mean == pytest.approx(100 / 503, rel=1e-2)
    assert found.best_interval_s == pytest.approx(400)


def test_fewer_spares_than_repairs_wait():
    found = simulate(num_spares=0, num_runs=4)
    assert found.lost_h["spares"] > 200
    assert found.mean == pytest.approx(found.closed_form, abs=0.03)


def test_a_large_run_takes_seconds():
    begun_s = time.process_time()
    found = simulate(num_devices=100_000, days=90, num_runs=200)
    assert time.process_time() - begun_s < 10
    assert found.p10 < found.closed_form < found.p90


def test_too_many_failures_are_refused_with_the_days_that_are_not():
    with pytest.raises(InputError, match="too many failures") as caught:
        simulate(num_devices=10_000_000, days=90, num_runs=200)
    assert "days on 10,000,000 devices" in str(caught.value)
