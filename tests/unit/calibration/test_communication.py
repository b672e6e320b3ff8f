"""Collectives take what was measured, and between measurements something between."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.calibration.communication import Curve, MeasuredCollectives, from_document, to_document

KERNELS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_receive")
FORMULA_S = 123.0

sizes = st.integers(1, 2**34).map(float)
seconds = st.floats(1e-6, 10.0)


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    """Like those of a machine: larger messages take longer."""
    size_bytes = draw(st.lists(sizes, min_size=1, max_size=6, unique=True).map(sorted))
    of_each = draw(st.lists(seconds, min_size=len(size_bytes), max_size=len(size_bytes)).map(sorted))
    return Curve(size_bytes=tuple(size_bytes), seconds=tuple(of_each))


@st.composite
def measured(draw: st.DrawFn) -> MeasuredCollectives:
    counts = draw(st.lists(st.integers(2, 64), min_size=1, max_size=4, unique=True).map(sorted))
    kernels = draw(st.lists(st.sampled_from(KERNELS), min_size=1, max_size=3, unique=True))
    return MeasuredCollectives(curves={kernel: {count: draw(curves()) for count in counts} for kernel in kernels})


def one_of(collectives: MeasuredCollectives) -> tuple[str, list[int]]:
    """One kernel of it, and its numbers of processes."""
    kernel, by_count = next(iter(collectives.curves.items()))
    return kernel, sorted(by_count)


def taken(collectives: MeasuredCollectives, kernel: str, size_bytes: float, count: float) -> float:
    return float(collectives.seconds(kernel, size_bytes, count, FORMULA_S))


@given(measured(), sizes, st.floats(0, 1), st.floats(1, 1e4), st.floats(0.01, 1))
def test_a_point_of_a_curve(collectives, size, share, longer, shorter):
    """All of these of the same curves: to draw curves takes most of the time."""
    what_was_measured_comes_back(collectives)
    between_two_sizes_it_takes_something_between(collectives, size)
    between_two_numbers_of_processes_likewise(collectives, size, share)
    above_the_largest_its_seconds_grow_like_its_bytes(collectives, longer)
    below_the_smallest_it_takes_what_the_smallest_took(collectives, shorter)
    where_nothing_was_measured_the_formula_stands(collectives, size)
    one_process_and_an_empty_message_take_no_time(collectives, size)
    a_document_reads_back(collectives)


def what_was_measured_comes_back(collectives):
    for kernel, by_count in collectives.curves.items():
        for count, curve in by_count.items():
            found = collectives.seconds(kernel, np.array(curve.size_bytes), count, FORMULA_S)
            assert found == pytest.approx(curve.seconds, rel=1e-9)


def between_two_sizes_it_takes_something_between(collectives, size):
    kernel, (count, *_) = one_of(collectives)
    curve = collectives.curves[kernel][count]
    found = taken(collectives, kernel, size, count)
    below = [s for b, s in zip(curve.size_bytes, curve.seconds, strict=True) if b <= size]
    above = [s for b, s in zip(curve.size_bytes, curve.seconds, strict=True) if b >= size]
    if below:
        assert found >= below[-1] * (1 - 1e-9)
    if above:
        assert found <= above[0] * (1 + 1e-9)


def between_two_numbers_of_processes_likewise(collectives, size, share):
    kernel, counts = one_of(collectives)
    for low, high in pairwise(counts):
        ends = sorted(taken(collectives, kernel, size, count) for count in (low, high))
        count = math.exp(math.log(low) + share * math.log(high / low))
        found = taken(collectives, kernel, size, min(max(count, low), high))
        assert ends[0] * (1 - 1e-6) <= found <= ends[1] * (1 + 1e-6)


def above_the_largest_its_seconds_grow_like_its_bytes(collectives, factor):
    kernel, (count, *_) = one_of(collectives)
    curve = collectives.curves[kernel][count]
    found = taken(collectives, kernel, factor * curve.size_bytes[-1], count)
    assert found == pytest.approx(factor * curve.seconds[-1], rel=1e-6)


def below_the_smallest_it_takes_what_the_smallest_took(collectives, factor):
    kernel, (count, *_) = one_of(collectives)
    curve = collectives.curves[kernel][count]
    assert taken(collectives, kernel, factor * curve.size_bytes[0], count) == pytest.approx(curve.seconds[0], rel=1e-9)


@given(measured(), sizes, st.integers(2, 8))
def test_several_groups_at_once_take_turns(collectives, size, num_groups):
    """Each of several groups with `count` processes communicates through the same memory."""
    kernel, (count, *_) = one_of(collectives)
    alone = MeasuredCollectives(curves=collectives.curves, processes_per_host=count)
    together = MeasuredCollectives(curves=collectives.curves, processes_per_host=num_groups * count)
    assert taken(alone, kernel, size, count) == pytest.approx(taken(collectives, kernel, size, count))
    assert taken(together, kernel, size, count) == pytest.approx(num_groups * taken(alone, kernel, size, count))


def where_nothing_was_measured_the_formula_stands(collectives, size):
    kernel, counts = one_of(collectives)
    assert taken(collectives, kernel, size, counts[-1] + 1) == FORMULA_S
    unknown = next(name for name in KERNELS if name not in collectives.curves)
    assert taken(collectives, unknown, size, counts[0]) == FORMULA_S
    assert taken(MeasuredCollectives(), kernel, size, counts[0]) == FORMULA_S


def one_process_and_an_empty_message_take_no_time(collectives, size):
    kernel, counts = one_of(collectives)
    assert taken(collectives, kernel, size, 1) == 0
    assert taken(collectives, kernel, 0, counts[0]) == 0


def test_arrays_give_what_numbers_give():
    collectives = MeasuredCollectives(
        curves={
            "all_reduce": {
                2: Curve(size_bytes=(1e3, 1e6), seconds=(1e-4, 1e-2)),
                4: Curve(size_bytes=(1e3, 1e6), seconds=(3e-4, 4e-2)),
            }
        }
    )
    size, count = np.array([[1e2], [5e4], [1e7]]), np.array([1, 2, 3, 4, 8])
    found = collectives.seconds("all_reduce", size, count, FORMULA_S)
    assert found.shape == (3, 5)
    for i, j in np.ndindex(found.shape):
        assert found[i, j] == pytest.approx(taken(collectives, "all_reduce", size[i, 0], count[j]))


def a_document_reads_back(collectives):
    """Seconds are kept to four digits."""
    again = from_document(json.loads(json.dumps(to_document(collectives))))
    assert to_document(again) == to_document(collectives)
    for kernel, by_count in collectives.curves.items():
        assert list(again.curves[kernel]) == list(by_count)
        for count, curve in by_count.items():
            assert again.curves[kernel][count].size_bytes == curve.size_bytes
            assert again.curves[kernel][count].seconds == pytest.approx(curve.seconds, rel=1e-3)


@pytest.mark.parametrize(
    "document",
    [
        {"all_reduce": {"2": []}},
        {"all_reduce": {"2": [[1024, 1e-4], [1024, 2e-4]]}},
        {"all_reduce": {"2": [[4096, 1e-4], [1024, 2e-4]]}},
        {"all_reduce": {"2": [[1024, 0.0]]}},
        {"all_reduce": {"2": [[0, 1e-4]]}},
        {"all_reduce": {"2": [[1024, float("nan")]]}},
        {"all_reduce": {"2": [[1024, 1e-4, 3]]}},
        {"all_reduce": {"2": [[1024, "fast"]]}},
        {"all_reduce": {"two": [[1024, 1e-4]]}},
        {"all_reduce": {"2": 7}},
    ],
)
def test_an_altered_document_is_refused(document):
    with pytest.raises((KeyError, TypeError, ValueError)):
        from_document(document)
