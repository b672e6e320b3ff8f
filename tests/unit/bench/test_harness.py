"""The harness on clocks whose truth is known."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.bench.harness import LEAST_SAMPLE_S, MAX_SAMPLES, AbsurdClockError, measure
from meshwright.records.measurement import Measurement


class Machine:
    """A clock, and work that takes `seconds` of it, one after the other; the last one for ever."""

    def __init__(self, seconds: Iterator[float]) -> None:
        self.seconds, self.now_s, self.num_runs, self.log = seconds, 0.0, 0, []

    def run(self) -> None:
        self.num_runs += 1
        self.log.append("run")
        self.now_s += next(self.seconds)

    def clock(self) -> float:
        return self.now_s


def constant(seconds: float) -> Machine:
    return Machine(iter(lambda: seconds, None))


def noisy(seconds: float, *, sd: float, seed: int = 0) -> Machine:
    draw = random.Random(seed)
    return Machine(iter(lambda: seconds * math.exp(draw.gauss(0, sd)), None))


def measurement(*seconds: float) -> Measurement:
    return Measurement(seconds=seconds, calls=1, target_ratio=0.03)


def test_a_constant_is_known_after_six_samples():
    machine = constant(0.01)
    found = measure(machine.run, clock=machine.clock)
    assert found.n == 6
    assert found.median == pytest.approx(0.01)
    assert found.is_narrow
    assert machine.num_runs == 8  # the first two are not kept


def test_a_first_call_that_takes_all_the_time_is_followed_by_one_that_counts():
    machine = constant(0.5)
    found = measure(machine.run, clock=machine.clock, budget_s=0.4)
    assert found.seconds == (0.5,)
    assert machine.num_runs == 2


def test_the_first_calls_do_not_count():
    machine = Machine(iter([5.0, 1.0, *[0.01] * 100]))
    assert measure(machine.run, clock=machine.clock, budget_s=100).median == pytest.approx(0.01)


def test_calls_too_short_for_the_clock_are_repeated_in_one_sample():
    machine = constant(1e-6)
    found = measure(machine.run, clock=machine.clock)
    assert found.calls == round(LEAST_SAMPLE_S / 1e-6)
    assert found.median == pytest.approx(1e-6)


def test_what_runs_ahead_is_not_timed_and_runs_ahead_of_every_call():
    machine = constant(1e-5)

    def before() -> None:
        machine.log.append("before")
        machine.now_s += 3.0

    found = measure(machine.run, before=before, clock=machine.clock)
    assert found.median == pytest.approx(1e-5)
    assert machine.log == ["before", "run"] * machine.num_runs


def test_more_noise_takes_more_samples_until_the_interval_is_narrow():
    calm, wild = noisy(0.01, sd=0.01), noisy(0.01, sd=0.08)
    few, many = (measure(m.run, clock=m.clock, budget_s=60) for m in (calm, wild))
    assert few.n < many.n < MAX_SAMPLES
    for found in (few, many):
        low, high = found.interval
        assert (high - low) / 2 <= 0.03 * found.median
        assert low <= found.median <= high


def test_the_budget_ends_what_does_not_settle():
    machine = noisy(0.01, sd=1.0)
    found = measure(machine.run, clock=machine.clock, budget_s=0.2)
    assert not found.is_narrow
    assert machine.now_s < 1.0


def test_a_sample_far_from_the_others_is_named():
    outliers = measurement(1.0, 1.01, 0.99, 1.0, 9.0, 1.02, 0.98).outliers
    assert [(o.sample, o.seconds) for o in outliers] == [(5, 9.0)]


def test_few_samples_have_their_range_and_are_not_narrow():
    found = measurement(1.0, 1.0, 1.0)
    assert found.interval == (1.0, 1.0)
    assert not found.is_narrow  # three equal numbers are no 95 %
    assert measurement(2.0).quartiles == (2.0, 2.0)


@pytest.mark.parametrize(("n", "rank"), [(6, 1), (9, 2), (12, 3), (20, 6), (100, 40)])
def test_ranks_of_the_interval_are_those_of_the_tables(n, rank):
    found = measurement(*(float(i) for i in range(1, n + 1)))
    assert found.interval == (rank, n + 1 - rank)


@given(st.integers(0, 10_000))
def test_the_interval_holds_the_median_about_as_often_as_it_says(seed):
    draw = random.Random(seed)
    held = 0
    for _ in range(100):
        low, high = measurement(*(draw.lognormvariate(0, 1) for _ in range(15))).interval
        held += low <= 1.0 <= high
    assert held >= 87  # 96.5 % expected; 5 standard deviations


@pytest.mark.parametrize("times", [[0, 0, 0, 0, 0, 0], [5.0, 4.0], [0.0, math.nan], [0.0, math.inf]], ids=str)
def test_an_absurd_clock_is_refused(times):
    clock = iter([*times, *[times[-1]] * 100])
    with pytest.raises(AbsurdClockError):
        measure(lambda: None, clock=lambda: next(clock))


def test_processes_stop_by_the_same_seconds():
    machine = noisy(0.01, sd=0.3)
    found = measure(machine.run, clock=machine.clock, agree=lambda seconds: 0.5)
    assert set(found.seconds) == {0.5}


def test_what_the_callable_raises_comes_through():
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(interrupted)
