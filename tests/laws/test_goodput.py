"""Laws of failures, checkpoints, spares and barriers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost import goodput as gp
from meshwright.cost import recovery
from meshwright.cost.stragglers import Barrier, barrier_delay_s, lognormal_slowdown, maximum_mean, maximum_sd

mtbfs = st.floats(300, 1e8)
stalls = st.floats(0.01, 600)
restarts = st.floats(0, 3600)
lags = st.floats(0, 3600)
intervals = st.floats(10, 1e5)
members = st.integers(1, 2**20)


@given(interval_s=intervals, stall_s=stalls, mtbf_s=mtbfs, restart_s=restarts, lag_s=lags)
def test_goodput_is_a_share(interval_s, stall_s, mtbf_s, restart_s, lag_s):
    g = gp.goodput_ratio(
        interval_s=interval_s, stall_s=stall_s, mtbf_s=mtbf_s, restart_s=restart_s, lag_s=lag_s
    )
    assert 0 <= g <= 1
    # Never better than the same run without failures.
    assert g <= interval_s / (interval_s + stall_s)


@pytest.mark.parametrize(("name", "sign"), [("mtbf_s", 1), ("stall_s", -1), ("restart_s", -1), ("lag_s", -1)])
@given(
    interval_s=intervals,
    stall_s=stalls,
    mtbf_s=mtbfs,
    restart_s=restarts,
    lag_s=lags,
    more=st.floats(1.01, 10),
)
def test_goodput_is_monotone(name, sign, more, **case):
    better, worse = gp.goodput_ratio(**case), gp.goodput_ratio(**(case | {name: case[name] * more + 1e-3}))
    assert sign * (worse - better) >= -1e-12


@given(stall_s=stalls, mtbf_s=mtbfs, factor=st.floats(0.05, 20))
def test_optimal_interval_is_the_optimum(stall_s, mtbf_s, factor):
    best = gp.optimal_interval_s(stall_s=stall_s, mtbf_s=mtbf_s)
    case = {"stall_s": stall_s, "mtbf_s": mtbf_s, "restart_s": 100.0}
    assert gp.goodput_ratio(interval_s=best * factor, **case) <= gp.goodput_ratio(interval_s=best, **case) * (
        1 + 1e-12
    )


@given(stall_s=stalls, mtbf_s=mtbfs)
def test_optimal_interval_solves_its_equation(stall_s, mtbf_s):
    u = gp.optimal_interval_s(stall_s=stall_s, mtbf_s=mtbf_s) / mtbf_s
    assert 0 < u < 1
    assert u == pytest.approx(-np.expm1(-(u + stall_s / mtbf_s)), rel=1e-9)


@given(mtbf_s=mtbfs, share=st.floats(1e-7, 1e-2))
def test_young_daly_and_exact_agree_for_short_saves(mtbf_s, share):
    case = {"stall_s": share * mtbf_s, "mtbf_s": mtbf_s}
    exact = gp.optimal_interval_s(**case)
    assert gp.daly_interval_s(**case) == pytest.approx(exact, rel=share)
    assert gp.young_interval_s(**case) == pytest.approx(exact, rel=share**0.5)


@given(mtbf_s=st.floats(1e6, 1e8), stall_s=st.floats(1, 10), restart_s=st.floats(0, 600))
def test_first_order_agrees_when_failures_are_rare(mtbf_s, stall_s, restart_s):
    case = {"stall_s": stall_s, "mtbf_s": mtbf_s, "restart_s": restart_s}
    case["interval_s"] = gp.young_interval_s(stall_s=stall_s, mtbf_s=mtbf_s)
    loss = 1 - gp.goodput_ratio(**case)
    assert gp.goodput_first_order(**case) == pytest.approx(1 - loss, abs=loss**2 + 2 * stall_s / mtbf_s)


@given(load=st.floats(1e-3, 1e3), num_spares=st.integers(0, 300))
def test_more_spares_wait_less(load, num_spares):
    fewer, more = (
        recovery.spares_exhausted_ratio(num_spares=k, nodes_in_repair=load)
        for k in (num_spares, num_spares + 1)
    )
    assert 0 <= more <= fewer <= 1
    # While it waits nothing fails, so it waits less than a run that never pauses is short of nodes.
    assert fewer <= 1 - recovery.spares_suffice_ratio(num_spares=num_spares, nodes_in_repair=load) + 1e-12


@given(n=members, m=members)
def test_expected_maximum_is_at_least_the_mean_and_grows(n, m):
    small, large = sorted((n, m))
    assert 0 <= maximum_mean(small) <= maximum_mean(large)
    assert maximum_sd(large) <= maximum_sd(small) <= 1 + 1e-12
    # The known upper bound for any n.
    assert maximum_mean(n) <= np.sqrt(2 * np.log(n)) + 1e-12


@given(n=st.integers(1, 4096), variation=st.floats(0, 1))
def test_lognormal_barrier_is_never_faster_than_the_mean(n, variation):
    slow = lognormal_slowdown(num_members=n, variation_ratio=variation)
    assert 1 <= slow <= max(n, 1) * (1 + 1e-9)  # the maximum of positive times is below their sum
    assert slow <= lognormal_slowdown(num_members=n + 1, variation_ratio=variation) + 1e-12


@given(
    sizes=st.lists(st.integers(1, 1024), min_size=1, max_size=4),
    repeats=st.lists(st.integers(1, 64), min_size=4, max_size=4),
    sigma_s=st.floats(0, 10),
    grow=st.integers(0, 3),
)
def test_nested_barriers_grow_with_every_level(sizes, repeats, sigma_s, grow):
    levels = [Barrier(axis=str(i), size=n, repeats=repeats[i]) for i, n in enumerate(sizes)]
    grown = [
        Barrier(axis=b.axis, size=b.size * (2 if i == grow else 1), repeats=b.repeats)
        for i, b in enumerate(levels)
    ]
    delay_s = barrier_delay_s(sigma_s=sigma_s, levels=levels)
    assert 0 <= delay_s <= barrier_delay_s(sigma_s=sigma_s, levels=grown) * (1 + 1e-12)
