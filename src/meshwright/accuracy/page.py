"""The accuracy report as one HTML file that opens without a network: a figure and the tables behind it."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

from meshwright.accuracy.columns import HEADINGS, cells
from meshwright.accuracy.metrics import Metrics
from meshwright.accuracy.report import AccuracyReport
from meshwright.errors import InputError

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; color: #1a1a1a }
table { border-collapse: collapse; margin: 1rem 0 2rem; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left }
svg { max-width: 100%; height: auto }
"""


def write_page(report: AccuracyReport, path: Path) -> None:
    """Write the page. Raises InputError when the file cannot be written."""
    try:
        path.write_text(page(report), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from None


def page(report: AccuracyReport) -> str:
    """The whole document: figure of predicted over measured, metrics by group, reasons for the rest."""
    sections = [
        "<h1>Predicted beside measured</h1>",
        "<p>Tokens/s per device of published training runs: each point is one run, the line is a perfect "
        "prediction, the band is 20 % to either side.</p>",
        figure_svg(report),
        "<h2>Subsets</h2>",
        _metrics_table({"all rows": report.summary, **report.groups["subset"]}),
    ]
    for kind, groups in report.groups.items():
        if kind != "subset":
            sections += [f"<h2>By {escape(kind)}</h2>", _metrics_table(groups)]
    reasons = ((str(number), reason) for reason, number in report.unpredicted.items())
    sections += ["<h2>Not predicted</h2>", _table(("rows", "reason"), reasons)]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>Predicted beside measured</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(sections)}</body></html>\n"
    )


def figure_svg(report: AccuracyReport) -> str:
    """Predicted over measured on logarithmic axes, as SVG text; coloured by accelerator."""
    import altair as alt
    import vl_convert

    points = [
        {"measured": row.measured, "predicted": row.predicted, "accelerator": row.run.groups["accelerator"]}
        for row in report.rows
        if row.predicted > 0 and row.measured > 0
    ]
    rates = [rate for p in points for rate in (p["measured"], p["predicted"])] or [1.0]
    ends = [min(rates) / 1.5, max(rates) * 1.5]
    scale = alt.Scale(type="log", domain=ends, nice=False)
    line = [{"x": e, "y": e, "low": e * 0.8, "high": e * 1.2} for e in ends]
    band = alt.Chart(alt.Data(values=line)).mark_area(opacity=0.12, color="#555", clip=True)
    exact = alt.Chart(alt.Data(values=line)).mark_line(color="#555", strokeWidth=1)
    dots = alt.Chart(alt.Data(values=points)).mark_circle(size=14, opacity=0.5)

    def x(field: str) -> alt.X:
        return alt.X(field, type="quantitative", scale=scale, title="measured tokens/s per device")

    def y(field: str) -> alt.Y:
        return alt.Y(field, type="quantitative", scale=scale, title="predicted tokens/s per device")

    chart = alt.layer(
        band.encode(x=x("x"), y=y("low"), y2="high:Q"),
        exact.encode(x=x("x"), y=y("y")),
        dots.encode(
            x=x("measured"),
            y=y("predicted"),
            color=alt.Color("accelerator:N", title=None),
        ),
    ).properties(width=560, height=560)
    return vl_convert.vegalite_to_svg(chart.to_dict())


def _metrics_table(groups: dict[str, Metrics]) -> str:
    return _table(("", *HEADINGS), ((name, *cells(metrics)) for name, metrics in groups.items()))


def _table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{escape(h)}</th>" for h in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
