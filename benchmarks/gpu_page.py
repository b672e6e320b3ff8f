"""The page of `benchmarks/gpu.py --page`: measurements of a GPU beside rivals and predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.gpu_results import RIVALS, GpuResults, by_operation, geometric_mean

from meshwright.answers.overview.collect import RecordReport, collect
from meshwright.answers.text_table import TextTable
from meshwright.errors import InputError
from meshwright.report.charts import WIDTH
from meshwright.report.html import write_page
from meshwright.report.overview.page import ReportFigure, ReportSection, record_page

COLORS = {"our default": "#3f78b5", "PyTorch": "#8a8f98", "torch.compile": "#d98a35", "Liger": "#5a9a5a"}


def write(results: GpuResults, *, path: Path) -> None:
    """Write the page; after its own sections stand those of `meshwright report` for all records of the archive."""
    try:
        found = collect([str(results.folder)])
    except InputError:  # every measurement failed, or left no record
        found = RecordReport(entries=())
    text = record_page(
        found,
        heading=f"{'A dry run' if results.is_dry_run else 'Measured'} on {results.device['name']}",
        first=sections(results),
        command=results.command,
    )
    write_page(text, path=path)


def sections(results: GpuResults) -> list[ReportSection]:
    """Sections on the measurements, the routes of kernels, and the steps."""
    tables = {table.title: table for table in results.tables()}
    measured = tables.pop("Measurements")
    kernels = [table for title, table in tables.items() if "beside their rivals" in title]
    steps = [table for table in tables.values() if table not in kernels]
    made = [
        ReportSection(
            title="What was measured, and what failed", text=results.conditions.replace("`", ""),
            tables=(measured,), is_wide=True,
        )
    ]  # fmt: skip
    if kernels:
        shares = roofline_shares(results)
        figures = (_figure(shares),) if shares else ()
        made.append(
            ReportSection(title="Kernels beside their rivals", tables=tuple(kernels), figures=figures, is_wide=True)
        )
    if steps:
        made.append(
            ReportSection(title="Steps beside other engines and predictions", tables=tuple(steps), is_wide=True)
        )
    return made


def roofline_shares(results: GpuResults) -> list[tuple[str, str, float]]:
    """(operation, who, share): geometric means over the calls that have a share, for our default and each rival."""
    rows = []
    for op, calls in by_operation(results.calls).items():
        routes = {"our default": [c.default for c in calls]}
        routes |= {name: [c.routes.get(rival) for c in calls] for rival, name in RIVALS.items()}
        for who, found in routes.items():
            shares = [r.roofline_ratio for r in found if r is not None and r.roofline_ratio]
            if shares:
                rows.append((op, who, geometric_mean(shares)))
    return rows


def _figure(shares: list[tuple[str, str, float]]) -> ReportFigure:
    data = TextTable(
        title="Share of the roofline: data", headings=("operation", "who", "share"),
        rows=[(op, who, f"{share:.3f}") for op, who, share in shares], text_columns=("who",),
    )  # fmt: skip
    return ReportFigure(
        title="Share of the roofline, of our default and its rivals", data=data, chart=_chart(shares),
        legend=tuple(COLORS.items()),
    )  # fmt: skip


def _chart(shares: list[tuple[str, str, float]]) -> Any:
    import altair as alt

    rows = [{"operation": op, "who": who, "share": share} for op, who, share in shares]
    names = list(dict.fromkeys(op for op, _, _ in shares))
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_circle(size=90, opacity=0.85)
        .encode(
            y=alt.Y("operation:N", sort=names, title=None),
            x=alt.X("share:Q", title="share of the roofline", axis=alt.Axis(format="%")),
            color=alt.Color("who:N", scale=alt.Scale(domain=list(COLORS), range=list(COLORS.values())), legend=None),
        )
        .properties(width=WIDTH - 100, height={"step": 22})
    )
