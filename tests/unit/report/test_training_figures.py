"""Tick labels of a training's figures never run into each other, whatever was measured."""

from __future__ import annotations

import re
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("altair")

from meshwright.report.training_figures import loss_svg, ratio_svg, ratio_ticks, step_time_svg

LABELS = re.compile(r'<g class="mark-text role-axis-label".*?</g>', re.DOTALL)
TEXT = re.compile(r'<text text-anchor="(\w+)" transform="translate\(([-\d.]+),\s*([-\d.]+)\)"([^>]*)>([^<]*)<')
CHARACTER, HEIGHT = 6.6, 10  # pixels at 12 points, about


def overlaps(svg: str) -> list[tuple[str, str]]:
    """Neighbouring labels of an axis whose boxes meet."""
    found = []
    for group in LABELS.findall(svg):
        boxes = []
        for anchor, x, y, attributes, text in TEXT.findall(group):
            width = CHARACTER * len(text)
            left = float(x) - {"start": 0, "middle": width / 2, "end": width}[anchor]
            if 'opacity="0"' not in attributes:
                boxes.append((left, left + width, float(y), text))
        assert boxes
        for (_, end, y, text), (start, _, next_y, other) in pairwise(sorted(boxes)):
            if start < end and abs(y - next_y) < HEIGHT:
                found.append((text, other))
    return found


def quantity(low: float, measured: float, high: float) -> SimpleNamespace:
    return SimpleNamespace(
        name="step time",
        measured=measured,
        predicted=SimpleNamespace(value=1.0, low=low, high=high),
        is_inside=low <= measured <= high,
    )


@pytest.mark.parametrize(("low", "measured", "high"), [(0.98, 1.0, 1.02), (0.02, 0.21, 1.3), (0.9, 41.0, 50.0)])
def test_ratios(low, measured, high):
    assert overlaps(ratio_svg([quantity(low, measured, high)])) == []


@pytest.mark.parametrize(
    ("first", "count", "step_s", "spread"), [(1, 2, 1.0, 1.0), (964, 39, 0.3, 1.0), (29_990, 40, 1e-4, 30.0)]
)
def test_steps(first, count, step_s, spread):
    steps = [
        {"step": first + i, "loss": 3.0 / (i + 1), "step_s": step_s * (spread if i % 7 == 3 else 1)}
        for i in range(count)
    ]
    assert overlaps(loss_svg(steps)) == []
    assert overlaps(step_time_svg(steps, predicted=None)) == []


@given(st.floats(0.001, 0.99), st.floats(1.01, 1000))
def test_one_is_a_tick_of_ratios(low, high):
    assert 1.0 in ratio_ticks(low, high)
