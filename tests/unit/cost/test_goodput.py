import math
import random

import numpy as np
import pytest

from meshwright.catalog import reliability
from meshwright.catalog.entries import DATA
from meshwright.cost import goodput as gp
from meshwright.cost.goodput import CheckpointCost, RestartCost
from meshwright.errors import InputError
from meshwright.files import toml_table
from meshwright.specs.estimate import Tier
from meshwright.units import DAY_S, HOUR_S

LLAMA3_MTBF_S = reliability.failure_rate("llama3-405b").device_mtbf_s


def simulate(*, interval_s, stall_s, mtbf_s, restart_s, lag_s, num_failures, seed):
    """Goodput of a run played event by event, without the renewal argument."""
    rng = random.Random(seed)
    wall = useful = 0.0
    for _ in range(num_failures):
        until_failure = rng.expovariate(1 / mtbf_s)
        saved = interval_s + stall_s
        while saved + lag_s <= until_failure:
            useful += interval_s
            saved += interval_s + stall_s
        wall += until_failure
        while (attempt := rng.expovariate(1 / mtbf_s)) < restart_s:
            wall += attempt
        wall += restart_s
    return useful / wall


@pytest.mark.parametrize(
    ("interval_s", "stall_s", "restart_s", "lag_s"),
    [(200.0, 10.0, 300.0, 0.0), (100.0, 1.0, 600.0, 60.0), (900.0, 120.0, 60.0, 400.0)],
)
def test_simulation_agrees_with_the_renewal_formula(interval_s, stall_s, restart_s, lag_s):
    case = {"interval_s": interval_s, "stall_s": stall_s, "restart_s": restart_s, "lag_s": lag_s, "mtbf_s": 1856.0}
    runs = [simulate(**case, num_failures=1000, seed=seed) for seed in range(12)]
    mean, error = np.mean(runs), np.std(runs, ddof=1) / math.sqrt(len(runs))
    assert abs(mean - gp.goodput_ratio(**case)) < 4 * error
    assert error < 0.01


def test_llama3_rate_is_the_published_count():
    assert pytest.approx(50_675, rel=1e-4) == LLAMA3_MTBF_S / HOUR_S
    assert gp.mtbf_s(device_mtbf_s=LLAMA3_MTBF_S, num_devices=98_304) / HOUR_S == pytest.approx(0.52, abs=0.005)


@pytest.mark.parametrize(("num_devices", "hours"), [(16_384, 1.80), (131_072, 0.225)])
def test_rsc1_rate_gives_the_published_projection(num_devices, hours):
    rate = reliability.failure_rate("rsc-1").device_mtbf_s
    assert gp.mtbf_s(device_mtbf_s=rate, num_devices=num_devices) / HOUR_S == pytest.approx(hours, rel=0.01)


@pytest.mark.parametrize("seen", toml_table(DATA / "reliability.toml")["observed"], ids=lambda o: str(o["num_devices"]))
def test_published_goodput_is_predicted(seen):
    """The size of the models differs little from 14 bytes x 4e11 parameters; the assumptions are the
    catalogue's."""
    estimate = gp.goodput_of_run(num_devices=seen["num_devices"], bytes_per_device=14 * 4e11 / seen["num_devices"])
    if seen["at_least"]:
        assert estimate.low > seen["goodput_ratio"]
    else:
        assert estimate.low < seen["goodput_ratio"] < estimate.high


@pytest.mark.parametrize(("stall_s", "restart_s", "interval_s", "goodput"), [(10, 300, 193, 0.74), (1, 60, 61, 0.94)])
def test_worked_values_at_98304_devices(stall_s, restart_s, interval_s, goodput):
    m = gp.mtbf_s(device_mtbf_s=LLAMA3_MTBF_S, num_devices=98_304)
    tau = (2 * stall_s * m) ** 0.5  # Young 1974
    assert tau == pytest.approx(interval_s, abs=1)
    first_order = 1 - stall_s / tau - (tau / 2 + restart_s) / m
    assert first_order == pytest.approx(goodput, abs=0.006)  # printed with two digits
    exact = gp.goodput_ratio(interval_s=tau, stall_s=stall_s, mtbf_s=m, restart_s=restart_s)
    assert first_order < exact < first_order + 0.04


def estimate(**changes):
    settings = {
        "num_devices": 98_304,
        "checkpoint": CheckpointCost(stall_s=3.0, lag_s=14.0),
        "restart": RestartCost(detect_s=60.0, reschedule_s=60.0, load_s=14.0, warm_up_s=120.0),
    }
    return gp.estimate_goodput(**(settings | changes))


@pytest.mark.parametrize("num_spares", [None, 40])
def test_goodput_and_losses_add_up(num_spares):
    e = estimate(num_spares=num_spares)
    parts = (e.losses.save_ratio, e.losses.rework_ratio, e.losses.restart_ratio, e.losses.spares_ratio)
    assert all(part >= 0 for part in parts)
    assert e.value + sum(parts) == pytest.approx(1.0)
    assert 0 < e.low < e.value < e.high <= 1
    assert e.tier is Tier.GUESSED
    assert (e.losses.spares_ratio > 0) == (num_spares is not None)


def test_rework_is_half_an_interval_and_the_lag_per_failure():
    """To first order in time over M, which 128 devices make small."""
    e = estimate(num_devices=128)
    assert e.losses.rework_ratio == pytest.approx(((e.interval_s + 3.0) / 2 + 14.0) / e.mtbf_s, rel=0.01)


def test_interval_waits_for_the_last_write():
    slow = estimate(checkpoint=CheckpointCost(stall_s=3.0, lag_s=500.0))
    assert slow.interval_s == 500.0  # a save begins when its work is done
    assert estimate().interval_s < 500.0


def test_json_has_the_numbers():
    document = estimate().as_json()
    assert document["tier"] == "guessed"
    assert document["losses"]["spares_ratio"] == 0.0
    assert 0.7 < document["value"] < 0.9


@pytest.mark.parametrize(
    "wrong", [{"num_devices": 0}, {"checkpoint": CheckpointCost(stall_s=0.0)}, {"interval_s": -1.0}, {"num_spares": -1}]
)
def test_senseless_input_is_refused(wrong):
    with pytest.raises(InputError, match="got"):
        estimate(**wrong)


def test_sensitivity_orders_the_assumptions_by_what_they_move():
    size = {"num_devices": 98_304, "bytes_per_device": 14 * 2e12 / 98_304}
    swings = gp.sensitivity(**size)
    widths = [abs(swing.at_high - swing.at_low) for swing in swings]
    assert widths == sorted(widths, reverse=True)
    by_name = {swing.name: swing for swing in swings}
    assert by_name["detect_s"].at_low > gp.goodput_of_run(**size).value > by_name["detect_s"].at_high
    assert by_name["storage_bytes_per_s"].at_low < by_name["storage_bytes_per_s"].at_high
    # Without a number of spares, repair does not matter; jitter belongs to the step.
    assert by_name.keys().isdisjoint({"repair_s", "replaced_ratio", "persistent_jitter_ratio"})
    assert "repair_s" in {swing.name for swing in gp.sensitivity(**size, num_spares=40)}


def test_what_the_caller_knows_replaces_the_assumption():
    size = {"num_devices": 8192, "bytes_per_device": 1e9}
    known = {"detect_s": 0.0, "reschedule_s": 0.0, "warm_up_s": 0.0, "storage_bytes_per_s": 1e30}
    assert gp.goodput_of_run(**size, given=known).losses.restart_ratio == pytest.approx(0.0)
    with pytest.raises(InputError, match="detect_s"):
        gp.goodput_of_run(**size, given={"detekt_s": 1.0})


def test_wall_time_divides_by_goodput():
    assert gp.wall_s(productive_s=8 * DAY_S, goodput_ratio=0.8) == pytest.approx(10 * DAY_S)
