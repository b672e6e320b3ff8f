"""The page of a scaling study: figures, the tables behind them, and the assumptions."""

from __future__ import annotations

from html import escape

from meshwright.answers.cluster import hardware_line
from meshwright.answers.provenance import calibration_sentence
from meshwright.answers.quantities import percent, seconds
from meshwright.answers.scale_study import ScaleReport
from meshwright.answers.text_table import TextTable
from meshwright.catalog.reliability import failure_range
from meshwright.catalog.stacks import stack_facts
from meshwright.planner.training import price_sentence
from meshwright.report.html import PageSection, document, explained_figure, page_table, paragraph, sortable_table, tiles
from meshwright.report.scale_figures import days_svg, efficiency_svg, emulation_svg, tornado_svg
from meshwright.report.scale_tables import days, interval, tables_of
from meshwright.version import __version__

MOST_COLUMNS = 7
"""Columns of a table that stands in half of a wide window."""


def scale_page(report: ScaleReport, *, command: str = "") -> str:
    """The whole page. `command` is the command line that makes it."""
    request = report.study.request
    sections = [
        PageSection(title=t.title, parts=_parts(report, t, command), is_wide=len(t.headings) > MOST_COLUMNS)
        for t in tables_of(report)
    ]
    sections.append(_assumptions(report))
    if report.run.text:
        sections.append(PageSection(title="The run file", parts=[f"<pre>{escape(report.run.text)}</pre>"]))
    return document(
        title=f"{request.model.name} on more {request.cluster.accelerator.name}",
        lead=_lead(report),
        sections=sections,
        footer=f"Meshwright {__version__}. An estimate, not a measurement. {command}",
    )


def _lead(report: ScaleReport) -> str:
    request = report.study.request
    text = (
        f"{report.study.mode.value} scaling, {request.precision.name}, sequences of {request.seq_len:,} "
        f"tokens, engine {request.engine}, software {stack_facts(request.stack.framework).title}."
        + (f" H{line[1:]}." if (line := hardware_line(request.cluster)) else "")
    )
    lead = paragraph(text[:1].upper() + text[1:], css_class="lead")
    if report.curve is None:
        return lead
    last = report.curve.points[-1]
    rows = [
        (f"{last.num_devices:,}", "devices", f"against {report.curve.points[0].num_devices:,}"),
        (percent(last.efficiency.value), "efficiency", interval(last.efficiency)),
        (seconds(last.costed.step_s), "step", last.costed.plan.describe()),
    ]
    if last.goodput is not None:
        rows.append((percent(last.goodput.value), "goodput", "share of time that becomes progress"))
    if last.training is not None:
        wall = last.training.wall
        rows.append((f"{days(wall.value)} days", "time to train", interval(wall, days)))
    return lead + tiles(rows)


def _parts(report: ScaleReport, shown: TextTable, command: str) -> list[str]:
    drawn = _figure(report, shown)
    if drawn is None:
        return [page_table(shown)]
    title, picture = drawn
    data = paragraph(f"The data is the table of this section, {shown.title}.")
    made = explained_figure(picture, title=title, data=data, command=command)
    return [f'<div class="beside">{made}<div>{page_table(shown)}</div></div>']


def _figure(report: ScaleReport, shown: TextTable) -> tuple[str, str] | None:
    """Title and drawing of the figure of a table."""
    if report.curve is not None and "speed-up" in shown.headings:
        return "Efficiency over the number of devices", efficiency_svg(report.curve)
    if report.curve is not None and "days of steps" in shown.headings:
        return "Days of training over the number of devices", days_svg(report.curve)
    if report.emulation is not None and "stands for" in shown.headings:
        return "Efficiency of the emulation and of the emulated size", emulation_svg(report.emulation)
    if report.sensitivity is not None and "assumption" in shown.headings:
        return "Efficiency with one assumption changed", tornado_svg(report.sensitivity)
    return None


def _assumptions(report: ScaleReport) -> PageSection:
    request, rates = report.study.request, failure_range()
    accelerator, fabric = request.cluster.accelerator, request.cluster.fabric
    rows = [
        ("efficiency", "tokens/s per device against the first size; failures are not in it"),
        ("its interval", "80 %, from errors that do not cancel between the two sizes; both share the rest"),
        ("accelerator", _source_text(accelerator.sources)),
        ("fabric", f"{fabric.name}: {_source_text(fabric.sources)}"),
        ("calibration", calibration_sentence(request)),
    ]
    if said := price_sentence(request.cluster, report.study.costs):
        rows.append(("price", said))
    if report.study.with_failures:
        rows.append(("failures", f"{rates.value.scope}: {rates.value.source}"))
        rows.append(("range of failures", rates.reason))
    return PageSection(
        title="What the numbers rest on",
        parts=[sortable_table(("what", "how"), rows, name="Assumptions", text_columns=("how",))],
    )


def _source_text(sources: dict[str, str]) -> str:
    return sources.get("all") or "; ".join(dict.fromkeys(sources.values()))
