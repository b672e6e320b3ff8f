"""The page of a learning-rate range test: losses over the rate, and the suggestion."""

from __future__ import annotations

import math

from meshwright.records.rate_range import RateRange
from meshwright.report.charts import BLUE, FAINT, INK, WIDTH, across, alt, chart_of, up
from meshwright.report.figures import svg
from meshwright.report.html import PageSection, document, figure, paragraph, tiles
from meshwright.specs.run import Run
from meshwright.version import __version__

HEIGHT = 300


def learning_rate_page(found: RateRange, *, run: Run) -> str:
    """The whole page."""
    rate = "none" if found.suggested is None else f"{found.suggested:.1e}"
    divergence = "none" if found.divergence is None else f"{found.divergence:.1e}"
    steepest = "none" if found.steepest is None else f"{found.steepest:.1e}"
    lead = paragraph(
        f"Losses of {run.name} ({run.model.name}, {run.optimizer.name}) while the learning rate rises from step "
        "to step. The line is the smoothed loss.",
        css_class="lead",
    ) + tiles(
        [
            (rate, "suggested peak", "the smaller of the next two"),
            (steepest, "steepest descent", "of the smoothed loss"),
            (divergence, "divergence", "a tenth of it counts"),
            (f"{run.optimizer.learning_rate:.1e}", "before", "optimizer.learning_rate"),
        ]
    )
    sections = [PageSection(title="Loss over learning rate", parts=[figure(rate_range_svg(found))])]
    return document(
        title=f"Learning rate of {run.name}", lead=lead, sections=sections, footer=f"Meshwright {__version__}."
    )


def rate_range_svg(found: RateRange) -> str:
    """Losses as points, smoothed losses as a line, over the logarithm of the rate."""
    rows = [
        {"rate": rate, "loss": loss, "smoothed": smoothed}
        for rate, loss, smoothed in zip(found.rates, found.losses, found.smoothed, strict=True)
        if math.isfinite(loss)
    ]
    largest = max((row["smoothed"] for row in rows), default=1.0)
    scale = alt.Scale(domain=[min((row["loss"] for row in rows), default=0.0), largest], clamp=True, nice=True)
    exponents = [math.floor(math.log10(row["rate"])) for row in rows]
    decades = [10.0**k for k in range(min(exponents, default=0), max(exponents, default=0) + 2)]
    rate = across("rate", scale=alt.Scale(type="log"), title="learning rate", format=".0e", values=decades)
    base = chart_of(rows).properties(width=WIDTH, height=HEIGHT).encode(x=rate)
    layers = [
        base.mark_point(color=FAINT, size=14, filled=True).encode(y=up("loss", scale=scale, title="loss")),
        base.mark_line(color=BLUE).encode(y=up("smoothed", scale=scale)),
    ]
    if found.suggested is not None:
        mark = chart_of([{"rate": found.suggested}])
        layers.append(mark.mark_rule(color=INK, strokeDash=[4, 3]).encode(x="rate:Q"))
    return svg(alt.layer(*layers), title="Loss over learning rate, with the suggested rate")
