"""Axes that one outlier does not flatten: they end at the other values; the outlier is marked and its value given."""

from __future__ import annotations

from collections.abc import Sequence

OUTLIER_COLOR = "#d98a35"
OUTLIER_LEGEND = ("longer than the axis: cut, its value stands beside it", OUTLIER_COLOR)

FACTOR = 5.0
"""A value so many times the next smaller one is beyond the axis; then the others keep a fifth of it at least."""

MOST_SHARE = 1 / 3
"""Share of the values that may be outliers. More are a second group, which the axis holds."""


def axis_end(sizes: Sequence[float]) -> float:
    """Largest of `sizes` that an axis from zero has to hold; a larger one is an outlier.

    >>> axis_end([1.0, 1.1, 1.2, 90.0])
    1.2
    >>> axis_end([1.0, 90.0]), axis_end([1.0, 1.1, 80.0, 90.0])
    (90.0, 90.0)
    """
    ordered = sorted(sizes, reverse=True)
    for i in range(int(len(ordered) * MOST_SHARE), 0, -1):
        if 0 < FACTOR * ordered[i] < ordered[i - 1]:
            return ordered[i]
    return ordered[0]
