"""Laws of failures, checkpoints and spares."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import pdtr

from meshwright.catalog import reliability
from meshwright.cost import goodput as gp
from meshwright.cost.goodput_simulation import simulate_goodput
from meshwright.units import DAY_S

mtbfs = st.floats(300, 1e8)
stalls = st.floats(0.01, 600)
restarts = st.floats(0, 3600)
lags = st.floats(0, 3600)
intervals = st.floats(10, 1e5)


def young_interval_s(*, stall_s, mtbf_s):
    """J. W. Young, Communications of the ACM 17(9), 1974."""
    return np.sqrt(2 * stall_s * mtbf_s)


def daly_interval_s(*, stall_s, mtbf_s):
    """The series of Daly 2006, for delta < 2 M."""
    x = stall_s / (2 * mtbf_s)
    return np.sqrt(2 * stall_s * mtbf_s) * (1 + np.sqrt(x) / 3 + x / 9) - stall_s


@given(interval_s=intervals, stall_s=stalls, mtbf_s=mtbfs, restart_s=restarts, lag_s=lags)
def test_goodput_is_a_share(interval_s, stall_s, mtbf_s, restart_s, lag_s):
    g = gp.goodput_ratio(interval_s=interval_s, stall_s=stall_s, mtbf_s=mtbf_s, restart_s=restart_s, lag_s=lag_s)
    assert 0 <= g <= 1
    # Never better than the same run without failures.
    assert g <= interval_s / (interval_s + stall_s)


@pytest.mark.parametrize(("name", "sign"), [("mtbf_s", 1), ("stall_s", -1), ("restart_s", -1), ("lag_s", -1)])
@given(interval_s=intervals, stall_s=stalls, mtbf_s=mtbfs, restart_s=restarts, lag_s=lags, more=st.floats(1.01, 10))
def test_goodput_is_monotone(name, sign, more, **case):
    better, worse = gp.goodput_ratio(**case), gp.goodput_ratio(**(case | {name: case[name] * more + 1e-3}))
    assert sign * (worse - better) >= -1e-12


@given(stall_s=stalls, mtbf_s=mtbfs, factor=st.floats(0.05, 20))
def test_optimal_interval_is_the_optimum(stall_s, mtbf_s, factor):
    best = gp.optimal_interval_s(stall_s=stall_s, mtbf_s=mtbf_s)
    case = {"stall_s": stall_s, "mtbf_s": mtbf_s, "restart_s": 100.0}
    assert gp.goodput_ratio(interval_s=best * factor, **case) <= gp.goodput_ratio(interval_s=best, **case) * (1 + 1e-12)


@given(stall_s=stalls, mtbf_s=mtbfs)
def test_optimal_interval_solves_its_equation(stall_s, mtbf_s):
    u = gp.optimal_interval_s(stall_s=stall_s, mtbf_s=mtbf_s) / mtbf_s
    assert 0 < u < 1
    assert u == pytest.approx(-np.expm1(-(u + stall_s / mtbf_s)), rel=1e-9)


@given(mtbf_s=mtbfs, share=st.floats(1e-7, 1e-2))
def test_young_daly_and_exact_agree_for_short_saves(mtbf_s, share):
    case = {"stall_s": share * mtbf_s, "mtbf_s": mtbf_s}
    exact = gp.optimal_interval_s(**case)
    assert daly_interval_s(**case) == pytest.approx(exact, rel=share)
    assert young_interval_s(**case) == pytest.approx(exact, rel=share**0.5)


@given(mtbf_s=st.floats(1e6, 1e8), stall_s=st.floats(1, 10), restart_s=st.floats(0, 600))
def test_first_order_agrees_when_failures_are_rare(mtbf_s, stall_s, restart_s):
    case = {"stall_s": stall_s, "mtbf_s": mtbf_s, "restart_s": restart_s}
    case["interval_s"] = young_interval_s(stall_s=stall_s, mtbf_s=mtbf_s)
    loss = 1 - gp.goodput_ratio(**case)
    first_order = 1 - stall_s / case["interval_s"] - (case["interval_s"] / 2 + restart_s) / mtbf_s
    assert first_order == pytest.approx(1 - loss, abs=loss**2 + 2 * stall_s / mtbf_s)


@given(load=st.floats(1e-3, 1e3), num_spares=st.integers(0, 300))
def test_more_spares_wait_less(load, num_spares):
    fewer, more = (gp.spares_exhausted_ratio(num_spares=k, nodes_in_repair=load) for k in (num_spares, num_spares + 1))
    assert 0 <= more <= fewer <= 1
    # Nothing fails during the wait, so the run waits less than one that never pauses is short of nodes: Poisson.
    assert fewer <= 1 - pdtr(num_spares, load) + 1e-12


@given(
    num_devices=st.integers(500, 200_000),
    stall_s=st.floats(0.1, 120),
    lag_s=st.floats(0, 600),
    restart_s=st.floats(0, 1500),
    repair_s=st.floats(600, 40_000),
    num_spares=st.sampled_from([None, 0, 1, 5, 30]),
    share=st.sampled_from([None, 0.3, 3.0]),
    seed=st.integers(0, 1000),
)
def test_the_closed_form_lies_within_the_spread_of_the_simulation(
    num_devices, stall_s, lag_s, restart_s, repair_s, num_spares, share, seed
):
    """Within five standard errors of the mean, and what the ends of the days are worth."""
    mtbf_s = reliability.failure_range().value.device_mtbf_s / num_devices
    best_s = gp.optimal_interval_s(stall_s=stall_s, mtbf_s=mtbf_s)
    interval_s = None if share is None else max(float(share * best_s), lag_s)
    found = simulate_goodput(
        num_devices=num_devices,
        checkpoint=gp.CheckpointCost(stall_s=stall_s, lag_s=lag_s),
        restart=gp.RestartCost(detect_s=0.0, reschedule_s=0.0, load_s=restart_s, warm_up_s=0.0),
        given={"repair_s": repair_s},
        interval_s=interval_s,
        num_spares=num_spares,
        days=(days := 30),
        num_runs=(runs := 24),
        seed=seed,
    )
    # A run begins without a restart and with all spares, each of which saves one wait for the next repair, and the work
    # of its last interval is not lost. From p10 to p90 are 2.56 standard deviations, 0.7 of that in so few runs.
    ends_s = restart_s + found.interval_s + stall_s + lag_s + min(mtbf_s, restart_s)
    spares_s = 0.001 * days * DAY_S if num_spares is None else 2 * repair_s
    error = (found.p90 - found.p10) / 2.56 / 0.7 / runs**0.5
    assert abs(found.mean - found.closed_form) <= 5 * error + (ends_s + spares_s) / (days * DAY_S)
    assert found.best_mean >= found.mean
