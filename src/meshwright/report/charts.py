"""Parts of figures: the package that draws them, colours, charts of rows, channels and scales.

Text, axes and grid are drawn in two placeholder colours that the page's style sheet replaces by its own, so that one
figure serves a light page, a dark one and paper.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import altair as alt
else:

    class Altair:
        """The package, imported at its first use: it takes a third of a second, which terminal tables do not need."""

        def __getattr__(self, name: str) -> Any:
            return getattr(import_module("altair"), name)

    alt = Altair()

INK, FAINT = "#16191d", "#c8ccd2"
"""Placeholders for the page's text and line colours."""

BLUE, ORANGE, GREEN, RED, PURPLE = "#3f78b5", "#d98a35", "#4c9a6a", "#b5525c", "#8b6bb1"
TEAL, GRAY = "#6bb0b8", "#8a919b"
WIDTH = 560
ROOMY = "roomy"
"""Style of a mark that a phone has no room for."""


def chart_of(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A chart of these rows."""
    return alt.Chart(alt.Data(values=list(rows)))


def lines_of(rows: Sequence[Mapping[str, Any]], field: str = "name", **axis: Any) -> Any:
    """A chart with a line for each name in the `field` of these rows, in their order."""
    return chart_of(rows).encode(y=names_of(rows, field, **axis))


def names_of(rows: Sequence[Mapping[str, Any]], field: str = "name", **axis: Any) -> Any:
    """The y channel of the names in the `field` of these rows, in their order."""
    shown = alt.Axis(**axis) if axis else alt.Undefined
    return alt.Y(f"{field}:N", sort=list(dict.fromkeys(row[field] for row in rows)), title=None, axis=shown)


def across(field: str, **about: Any) -> Any:
    """The x channel of a quantity; `about` is its title and scale, and what its axis has."""
    return _quantity(alt.X, field, about)


def up(field: str, **about: Any) -> Any:
    """The y channel of a quantity, as `across`."""
    return _quantity(alt.Y, field, about)


def _quantity(channel: Any, field: str, about: dict[str, Any]) -> Any:
    own = {key: about.pop(key) for key in ("title", "scale") if key in about}
    return channel(f"{field}:Q", **own, **({"axis": alt.Axis(**about)} if about else {}))


def rule_at(x: float, *, scale: Any, **mark: Any) -> Any:
    """A vertical line at `x`."""
    return chart_of([{"x": x}]).mark_rule(**mark).encode(x=across("x", scale=scale))


def bounded_scale(ends: list[float]) -> Any:
    """A logarithmic scale that ends at `ends`, outside which nothing is drawn."""
    return alt.Scale(type="log", domain=ends, nice=False, clamp=True)


def stacked(sizes: Mapping[str, float], **row: object) -> list[dict[str, Any]]:
    """Rows of the parts of a bar, each of which begins where the one before it ends. `row`: what all have."""
    ends = accumulate(sizes.values(), initial=0.0)
    return [{**row, "part": name, "start": a, "end": b} for name, (a, b) in zip(sizes, pairwise(ends), strict=True)]


def color_by(field: str, colors: Mapping[str, str], present: Iterable[str] | None = None) -> Any:
    """The colour of a row by a field: of the names that are present, or of all of `colors`."""
    names = [name for name in colors if present is None or name in {*present}]
    scale = alt.Scale(domain=names, range=[colors[name] for name in names])
    return alt.Color(f"{field}:N", scale=scale, legend=None)


OUTLIER_COLOR = ORANGE
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
