"""Ratios: direction, interval, means, leave-one-out, verdicts; against arithmetic done another way."""

from __future__ import annotations

import math
import re
import statistics
from pathlib import Path

import numpy as np
import pytest

from benchmarks import compare_verdicts
from meshwright.answers.comparison.ratios import Verdict, geometric_mean, mean_ratios, paired
from meshwright.answers.comparison.sides import MEMORY, THROUGHPUT, TIME_TO_TRAIN, Evidence, Side, SideValue, Statistic


def side(name, values, *, metric=THROUGHPUT, samples=None, statistic=Statistic.MEDIAN, **interval):
    return Side(
        name=name, kind="test", facts={},
        values=tuple(
            SideValue(
                workload=w, metric=metric, value=v, evidence=Evidence.MEASURED, samples=(samples or {}).get(w, ()),
                statistic=statistic, **interval,
            )
            for w, v in values.items()
        ),
    )  # fmt: skip


def test_higher_is_better_for_rates_and_lower_for_times():
    (rate,) = mean_ratios(side("a", {"w": 100.0}), side("b", {"w": 150.0}))
    (time,) = mean_ratios(side("a", {"w": 100.0}, metric=TIME_TO_TRAIN), side("b", {"w": 150.0}, metric=TIME_TO_TRAIN))
    assert rate.value == pytest.approx(1.5)
    assert time.value == pytest.approx(1 / 1.5)
    assert rate.ratios[0].verdict is Verdict.WIN
    assert time.ratios[0].verdict is Verdict.LOSS


def test_geometric_mean_leave_one_out_and_whole_time_by_hand():
    (mean,) = mean_ratios(side("a", {"x": 10.0, "y": 10.0, "z": 10.0}), side("b", {"x": 10.0, "y": 20.0, "z": 40.0}))
    assert mean.n == 3
    assert mean.value == pytest.approx(2.0)
    assert (mean.lowest.workload, mean.lowest.value) == ("z", pytest.approx(math.sqrt(2)))
    assert (mean.highest.workload, mean.highest.value) == ("x", pytest.approx(math.sqrt(8)))
    assert mean.whole_time == pytest.approx(0.3 / (0.1 + 0.05 + 0.025))
    assert mean.low < mean.value < mean.high


def test_exchanged_sides_give_the_inverse_ratio_and_the_inverse_interval():
    random = np.random.default_rng(3)
    draws = {"w": tuple(random.normal(100, 5, 40))}, {"w": tuple(random.normal(120, 9, 30))}
    a = side("a", {"w": statistics.median(draws[0]["w"])}, samples=draws[0])
    b = side("b", {"w": statistics.median(draws[1]["w"])}, samples=draws[1])
    (there,), (back,) = mean_ratios(a, b), mean_ratios(b, a)
    assert there.value * back.value == pytest.approx(1)
    assert there.ratios[0].low == pytest.approx(1 / back.ratios[0].high, rel=0.02)
    assert there.ratios[0].verdict is Verdict.WIN
    assert back.ratios[0].verdict is Verdict.LOSS


def test_the_interval_covers_the_true_ratio_about_as_often_as_it_says():
    random = np.random.default_rng(7)
    inside = 0
    for _ in range(120):
        ours, theirs = (tuple(np.exp(random.normal(0, 0.1, 24))) for _ in range(2))
        a = side("a", {"w": statistics.median(ours)}, samples={"w": ours})
        b = side("b", {"w": statistics.median(theirs)}, samples={"w": theirs})
        (mean,) = mean_ratios(a, b)
        inside += mean.ratios[0].low <= 1 <= mean.ratios[0].high
    assert 0.88 <= inside / 120 <= 1.0


@pytest.mark.parametrize("statistic", [Statistic.MEAN, Statistic.MEDIAN])
@pytest.mark.parametrize(("ours", "theirs"), [(2, 3), (3, 3), (3, 10), (4, 4), (5, 5), (6, 9), (10, 10)])
def test_two_samples_of_one_thing_are_seldom_told_apart(statistic, ours, theirs):
    """A/A: at most 5 % of the verdicts are false, of 300 at most 28 with a chance of 0.9995."""
    random = np.random.default_rng([11, ours, theirs])
    central = statistics.mean if statistic is Statistic.MEAN else statistics.median
    false = 0
    for _ in range(300):
        sides = []
        for count in (ours, theirs):
            runs = tuple(np.exp(random.normal(0, 0.02, count)))
            sides.append(side("s", {"w": central(runs)}, samples={"w": runs}, statistic=statistic, sampled="run"))
        (mean,) = mean_ratios(*sides)
        false += mean.ratios[0].verdict is not Verdict.TIE
    assert false <= (28 if ours > 2 else 0)


@pytest.mark.parametrize("num_steps", [10, 60, 200])
def test_two_trainings_whose_steps_follow_each_other_are_seldom_told_apart(num_steps):
    """A slow step follows a slow one: neighbours correlate by 0.5. As independent steps, 14 to 18 % are."""
    random = np.random.default_rng([13, num_steps])
    false = 0
    for _ in range(200):
        sides = []
        for _ in range(2):
            noise = random.normal(0, 1, num_steps)
            for i in range(1, num_steps):
                noise[i] = 0.5 * noise[i - 1] + math.sqrt(1 - 0.5**2) * noise[i]
            steps = tuple(np.exp(0.02 * noise))
            sides.append(side("s", {"w": statistics.median(steps)}, samples={"w": steps}, sampled="step"))
        (mean,) = mean_ratios(*sides)
        false += mean.ratios[0].verdict is not Verdict.TIE
    assert false <= 22  # 5 % is 10 of 200; more than 22 have a chance of 0.0002


def test_the_guides_table_is_of_this_program():
    """Each false share is below 5 %; one cell of each kind is simulated again, with other random numbers."""
    text = (Path(__file__).parents[4] / "docs/guides/compare.md").read_text(encoding="utf-8")
    rows = {int(m[1]): [float(c) / 100 for c in re.findall(r"([\d.]+)%", m[2])]
            for m in re.finditer(r"^\| (\d+) \|((?: [\d.]+% \|){6})$", text, re.MULTILINE)}  # fmt: skip
    assert list(rows) == list(compare_verdicts.NUM_RUNS)
    assert all(max(cells[:2]) < 0.05 for cells in rows.values())
    for column, (num_runs, shift) in {1: (5, 0.0), 3: (6, 2.0), 4: (4, 3.0)}.items():
        share = compare_verdicts.verdict_share(
            num_runs=num_runs, shift=shift, statistic=Statistic.MEDIAN, num_trials=300, state=2
        )
        assert share == pytest.approx(rows[num_runs][column], abs=0.1)


def test_five_runs_tell_a_difference_of_three_standard_deviations():
    runs = {"a": (1.00, 1.01, 0.99, 1.005, 0.995), "b": (1.04, 1.05, 1.03, 1.035, 1.045)}
    a, b = (side(n, {"w": statistics.mean(r)}, samples={"w": r}, statistic=Statistic.MEAN, sampled="run")
            for n, r in runs.items())  # fmt: skip
    assert mean_ratios(a, b)[0].ratios[0].verdict is Verdict.WIN


def test_the_same_input_gives_the_same_digits():
    samples = {"w": (9.0, 10.0, 11.0, 12.0)}
    sides = side("a", {"w": 10.5}, samples=samples), side("b", {"w": 10.5}, samples=samples)
    first, again = (mean_ratios(*sides)[0].ratios[0] for _ in range(2))
    assert (first.low, first.high) == (again.low, again.high)
    assert first.verdict is Verdict.TIE


def test_two_samples_give_no_interval_and_a_prediction_gives_its_own():
    few = {"w": (10.0, 11.0)}
    (mean,) = mean_ratios(side("a", {"w": 10.5}, samples=few), side("b", {"w": 10.5}, samples=few))
    assert mean.ratios[0].low is None
    predicted = side("b", {"w": 12.0}, statistic=Statistic.NONE, low=10.0, high=15.0)
    (mean,) = mean_ratios(side("a", {"w": 10.0}), predicted)
    low, high = mean.ratios[0].low, mean.ratios[0].high
    # 95 % of a lognormal is 1.9600 / 1.2816 times as wide, in the logarithm, as its 80 %.
    assert math.log(1.2 / low) == pytest.approx(math.log(1.2) * 1.96 / 1.2816, rel=0.1)
    assert math.log(high / 1.2) == pytest.approx(math.log(1.25) * 1.96 / 1.2816, rel=0.1)


def test_values_within_a_percent_without_samples_are_undecided():
    (mean,) = mean_ratios(side("a", {"w": 1000.0}, metric=MEMORY), side("b", {"w": 1004.0}, metric=MEMORY))
    assert mean.ratios[0].verdict is Verdict.TIE


def test_workloads_of_one_side_are_listed_and_in_no_mean():
    (mean,) = mean_ratios(side("a", {"x": 1.0, "y": 1.0}), side("b", {"x": 2.0, "z": 9.0}))
    assert (mean.n, mean.value) == (1, pytest.approx(2.0))
    assert (mean.only_baseline, mean.only_other) == (("y",), ("z",))


def test_metrics_never_meet():
    assert mean_ratios(side("a", {"w": 1.0}), side("b", {"w": 1.0}, metric=MEMORY)) == []


def test_a_workload_that_states_less_meets_one_candidate_only():
    assert paired(["m, pretrain"], ["m, pretrain, 512 tokens", "m, pretrain, 1,024 tokens"]) == {}
    assert paired(["m, pretrain"], ["m, pretrain, 512 tokens"]) == {"m, pretrain": "m, pretrain, 512 tokens"}
    assert paired(["llama3-8b"], ["llama3-8b-instruct"]) == {}


def test_geometric_mean_does_not_overflow():
    assert geometric_mean([1e300, 1e300, 1e-300, 1e-300]) == pytest.approx(1.0)
