from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.accuracy.metrics import (
    Predictions,
    kendall_tau,
    measure,
    memory_errors,
    rank_plans,
    signed_error,
    spearman,
    top1_regret,
)
from meshwright.accuracy.rows import PublishedRun

ReadMany = Callable[..., list[PublishedRun]]
samples = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=2, max_size=12)


def predictions(
    rates: list[float], *, width: float = 0.1, allocated: float = 40e9, reserved: float = 50e9
) -> Predictions:
    rate, ones = np.array(rates, dtype=float), np.ones(len(rates))
    return Predictions(
        tokens_per_s_per_device=rate,
        low=rate * (1 - width),
        high=rate * (1 + width),
        memory_allocated_bytes=allocated * ones,
        memory_reserved_bytes=reserved * ones,
        fit_probability=ones,
    )


def test_error_is_positive_for_optimism() -> None:
    assert signed_error(np.array([110.0, 80.0]), np.array([100.0, 100.0])) == pytest.approx([0.1, -0.2])


def test_metrics_of_known_errors(read_many: ReadMany) -> None:
    runs = read_many(*({"tok_s_gpu_best": 100} for _ in range(5)))
    m = measure(runs, predictions([90, 100, 105, 120, float("nan")]), num_rows=7)
    assert (m.num_rows, m.num_predicted) == (7, 4)
    assert m.median_abs_error == pytest.approx(0.075)  # of 0, 5, 10 and 20 %
    assert m.p90_abs_error == pytest.approx(0.17)
    assert m.bias == pytest.approx(0.025)
    assert m.interval_coverage == pytest.approx(0.5)  # 90 -> 81..99 and 120 -> 108..132 miss 100


def test_metrics_of_nothing_are_not_numbers() -> None:
    m = measure([], predictions([]), num_rows=3)
    assert (m.num_rows, m.num_predicted, m.num_plan_groups) == (3, 0, 0)
    assert np.isnan([m.median_abs_error, m.p90_abs_error, m.bias, m.interval_coverage]).all()
    assert np.isnan([m.memory_median_abs_error, m.top1_regret_mean, m.top1_regret_max]).all()


def test_memory_is_compared_with_what_the_source_counts(read_many: ReadMany) -> None:
    runs = read_many(
        {"mem_gb_per_gpu": 50, "framework": "torchtitan"},  # reserved
        {"mem_gb_per_gpu": 50, "notes": "max allocated"},
        {"mem_gb_per_gpu": 80, "framework": "nanotron"},  # not stated
        {},
    )
    errors = memory_errors(runs, predictions([1, 1, 1, 1]))
    assert {kind: e.tolist() for kind, e in errors.items()} == {
        "reserved": pytest.approx([0.0]),
        "allocated": pytest.approx([-0.2]),
        "unknown": pytest.approx([-0.5]),
    }
    m = measure(runs, predictions([1, 1, 1, 1]), num_rows=4)
    assert (m.num_memory, m.memory_median_abs_error) == (1, pytest.approx(0.2))


def test_regret_of_the_plan_predicted_fastest() -> None:
    measured = np.array([100.0, 80.0, 50.0])
    assert top1_regret(np.array([3.0, 2.0, 1.0]), measured) == 0
    assert top1_regret(np.array([1.0, 2.0, 1.0]), measured) == pytest.approx(0.2)
    assert top1_regret(np.array([2.0, 2.0, 1.0]), measured) == pytest.approx(0.1)  # a tie: mean of both


PLANS = ({"tp": 2, "cp": 1}, {"tp": 1, "cp": 2}, {"tp": 1, "cp": 1, "dp": 8}, {"tp": 4, "cp": 1, "dp": 2})


def test_a_group_ranks_plans_and_takes_repeats_once(read_many: ReadMany) -> None:
    rows = [plan | {"tok_s_gpu_best": rate} for plan, rate in zip(PLANS, (100, 80, 60, 40), strict=True)]
    runs = read_many(*rows, rows[0] | {"tok_s_gpu_best": 120})
    (group,) = rank_plans(runs, predictions([3, 4, 2, 1, 3]))
    assert group.num_plans == 4
    assert group.regret == pytest.approx(1 - 80 / 110)
    assert group.kendall_tau == pytest.approx(2 / 3)


def test_rows_that_differ_in_more_than_the_plan_are_not_ranked(read_many: ReadMany) -> None:
    runs = read_many(*(plan | {"precision": p} for plan, p in zip(PLANS, ("fp8", "bf16") * 2, strict=True)))
    assert rank_plans(runs, predictions([1, 2, 3, 4])) == []
    assert rank_plans(read_many(*PLANS[:2]), predictions([1, 2])) == []


@given(samples)
def test_rank_correlations_agree_with_scipy(sample: list[tuple[int, int]]) -> None:
    from scipy import stats

    x, y = np.array(sample, dtype=float).T
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert np.isnan([kendall_tau(x, y), spearman(x, y)]).all()
    else:
        assert kendall_tau(x, y) == pytest.approx(stats.kendalltau(x, y)[0])
        assert spearman(x, y) == pytest.approx(stats.spearmanr(x, y)[0])


def test_arrays_of_different_lengths_are_refused() -> None:
    ones = np.ones(2)
    with pytest.raises(ValueError, match="different lengths"):
        Predictions(
            tokens_per_s_per_device=np.ones(3),
            low=ones,
            high=ones,
            memory_allocated_bytes=ones,
            memory_reserved_bytes=ones,
            fit_probability=ones,
        )
