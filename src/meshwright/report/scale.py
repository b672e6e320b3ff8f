"""A scaling study: its tables for the terminal and the page, and the page with figures and assumptions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from meshwright.answers.cluster import hardware_line
from meshwright.answers.provenance import calibration_sentence
from meshwright.answers.quantities import memory, percent, rate, seconds
from meshwright.answers.scale_study import ScaleReport
from meshwright.answers.text_table import TextTable
from meshwright.catalog.reliability import failure_range
from meshwright.catalog.stacks import stack_facts
from meshwright.cost.goodput_simulation import SimulatedGoodput
from meshwright.planner import scaling
from meshwright.planner.training import price_sentence, unknown_price
from meshwright.report.charts import (
    BLUE,
    FAINT,
    GRAY,
    INK,
    ORANGE,
    RED,
    WIDTH,
    across,
    alt,
    chart_of,
    color_by,
    lines_of,
    up,
)
from meshwright.report.figures import svg
from meshwright.report.html import PageSection, document, explained_figure, page_table, paragraph, sortable_table, tiles
from meshwright.runfile import stated_text
from meshwright.specs.estimate import Estimate
from meshwright.units import DAY_S, format_count, format_seconds, ms
from meshwright.version import __version__


def tables_of(report: ScaleReport) -> list[TextTable]:
    """The tables of the parts that were computed, in reading order."""
    found: list[TextTable] = []
    if report.curve is not None:
        found += _curve_tables(report, report.curve)
    if report.emulation is not None:
        found += _emulation_tables(report.emulation)
    if report.replicas:
        found.append(_replica_table(report))
    if report.sensitivity is not None:
        found.append(_sensitivity_table(report.sensitivity))
    return found


def days(seconds_: float) -> str:
    """Days with three digits.

    >>> [days(x) for x in (1_969_920, 216_000, 864_000, 1000)]
    ['22.8', '2.50', '10.0', '0.0116']
    """
    return _digits(seconds_ / DAY_S)


def _digits(number: float) -> str:
    """Three digits, trailing zeros kept."""
    if number < 1:
        return f"{number:#.3g}"
    return f"{number:,.{0 if number >= 100 else 1 if number >= 10 else 2}f}"


def interval(estimate: Estimate, form: Callable[[float], str] = percent) -> str:
    """Both ends of an interval."""
    return f"{form(estimate.low)} to {form(estimate.high)}"


# --- curve ---


def _curve_tables(report: ScaleReport, curve: scaling.ScaleCurve) -> list[TextTable]:
    base, device = curve.points[0], report.study.request.cluster.accelerator.name
    scaled = TextTable.of(
        f"{report.run.model.name} on {device}, {report.study.mode.value} scaling",
        curve.points,
        {
            "devices": lambda p: f"{p.num_devices:,}",
            "batch": lambda p: _batch(p.costed),
            "step": lambda p: seconds(p.costed.step_s),
            "tokens/s/device": lambda p: rate(p.costed.rate.value),
            "efficiency": lambda p: percent(p.efficiency.value),
            "80 % interval": lambda p: "base" if p is base else interval(p.efficiency),
            "speed-up": lambda p: f"{p.speedup:.2f} of {p.num_devices / base.num_devices:.4g}",
            "DP wait": lambda p: f"{ms(scaling.exposed_data_parallel_s(p.costed)):,.0f} ms",
        },
        caption="".join(f"{u.num_devices:,} devices: {u.why_not}\n" for u in curve.unreached).strip(),
    )
    tables = [scaled, _plan_table([p.costed for p in curve.points])]
    if curve.points[0].training is not None or curve.points[0].goodput is not None:
        tables.append(_training_table(curve, report.deadline))
    if curve.points[0].simulation is not None:
        tables += _simulation_tables([(p, p.simulation) for p in curve.points if p.simulation is not None])
    return tables


def _plan_table(found: Sequence[scaling.Costed]) -> TextTable:
    columns: dict[str, Callable[[scaling.Costed], str]] = {
        "devices": lambda c: f"{c.num_devices:,}",
        "plan": lambda c: c.plan.describe(),
        "replica": lambda c: f"{scaling.replica_devices(c.plan):,}",
        "micro-batches": lambda c: f"{c.plan.num_micro_batches(c.global_batch):,}",
        "memory": _memory,
    }
    return TextTable.of("Plans", found, columns, text_columns=("plan",))


def _memory(costed: scaling.Costed) -> str:
    found = costed.estimate.step.memory
    return memory(found.reserved_bytes, found.capacity_bytes)


def deadline_sentence(found: scaling.Deadline) -> str:
    """The fewest devices, and those that are in time by the upper end of the interval."""
    sure = found.num_devices_at_high_end
    later = "no size that was tried is in time" if sure is None else f"{sure:,} devices are in time"
    within = f"{found.days:g} {'day' if found.days == 1 else 'days'}"
    return f"{found.num_devices:,} devices train in {within}; by the upper end of the interval {later}"


def _training_table(curve: scaling.ScaleCurve, deadline: scaling.Deadline | None) -> TextTable:
    """Columns without a value at any point, such as an unknown price, are omitted."""
    tokens = curve.study.num_tokens
    columns = [_training_cells(p, _scale_of(curve)) for p in curve.points]
    headings = [h for h in columns[0] if any(cells[h] for cells in columns)]
    return TextTable(
        title="Training" if tokens is None else f"Training of {format_count(tokens)} tokens",
        headings=headings,
        rows=[[cells[h] for h in headings] for cells in columns],
        caption="\n".join(filter(None, (deadline and deadline_sentence(deadline), _price_caption(curve.study)))),
    )


def _price_caption(study: scaling.Study) -> str:
    """The price behind the costs; if no price is known, the way to give one."""
    if study.num_tokens is None:
        return ""
    said = price_sentence(study.request.cluster, study.costs)
    return f"price: {said or unknown_price(study.request.cluster)}"


def _scale_of(curve: scaling.ScaleCurve) -> tuple[float, float]:
    """MWh in the unit of energy and USD in the unit of money: thousands and millions for long trainings."""
    trainings = [p.training for p in curve.points if p.training]
    is_large = max((t.energy.value for t in trainings if t.energy), default=0.0) >= 1000
    is_dear = max((t.cost.value for t in trainings if t.cost), default=0.0) >= 1e6
    return (1000.0 if is_large else 1.0, 1e6 if is_dear else 1.0)


def _training_cells(point: scaling.ScalePoint, scale_of: tuple[float, float]) -> dict[str, str]:
    """Cells by heading; empty where the value is unknown."""
    goodput, training = point.goodput, point.training
    cells = {"devices": f"{point.num_devices:,}"}
    cells["days of steps"] = days(training.productive.value) if training else ""
    cells["goodput"] = percent(goodput.value) if goodput else ""
    cells["published range"] = f"{percent(goodput.low)} to {percent(goodput.high)}" if goodput else ""
    cells["failure every"] = format_seconds(goodput.mtbf_s) if goodput else ""
    cells["days"] = days(training.wall.value) if training else ""
    cells["80 % interval"] = interval(training.wall, days) if training else ""
    energy, usd = (training.energy, training.cost) if training else (None, None)
    megawatt_hours, dollars = scale_of
    cells["MWh" if megawatt_hours == 1 else "GWh"] = _digits(energy.value / megawatt_hours) if energy else ""
    cells["USD" if dollars == 1 else "million USD"] = _digits(usd.value / dollars) if usd else ""
    return cells


def _simulation_tables(played: Sequence[tuple[scaling.ScalePoint, SimulatedGoodput]]) -> list[TextTable]:
    first = played[0][1]
    goodputs = TextTable.of(
        f"Goodput of {first.days:g} days, {first.num_runs} times, failure by failure",
        played,
        {
            "devices": lambda each: f"{each[0].num_devices:,}",
            "spares": lambda each: f"{each[1].num_spares:,}",
            "goodput": lambda each: percent(each[1].mean),
            "p10 to p90": lambda each: f"{percent(each[1].p10)} to {percent(each[1].p90)}",
            "formula": lambda each: percent(each[1].closed_form),
            "restarts": lambda each: f"{each[1].restarts:,.1f}",
            "interval": lambda each: format_seconds(each[1].interval_s),
            "best interval": lambda each: format_seconds(each[1].best_interval_s),
            "goodput then": lambda each: percent(each[1].best_mean),
        },
        caption="spares: nodes; interval: work between two checkpoints, of the formula and the best that was tried",
    )
    rows = [
        (
            f"{p.num_devices:,}", *(f"{s.lost_h[kind]:,.1f}" for kind in KINDS_OF_LOSS),
            *(f"{s.causes[cause].lost_h:,.1f}" for cause in first.causes),
        )
        for p, s in played
    ]  # fmt: skip
    hours = TextTable(
        title=f"Hours lost in {first.days:g} days, by kind and by the cause of the failure",
        headings=("devices", *KINDS_OF_LOSS, *first.causes),
        rows=rows,
        caption="rework: work since the last whole checkpoint; spares: waiting for a node; causes: all but the saves",
    )
    return [goodputs, hours]


# --- emulation ---


def _emulation_tables(emulation: scaling.Emulation) -> list[TextTable]:
    base = emulation.base
    causes = list(next((p.difference_s for p in emulation.points if p.real), {}))
    emulated = TextTable.of(
        f"Emulated on {base.num_devices:,} devices: {base.plan.describe()}",
        emulation.points,
        {
            "stands for": lambda p: f"{p.num_devices:,}",
            "batch": lambda p: _batch(p.emulated),
            "micro-batches": lambda p: f"{p.emulated.plan.num_micro_batches(p.emulated.global_batch):,}",
            "step": lambda p: seconds(p.emulated.step_s),
            "efficiency": lambda p: f"{p.efficiency.value:.3f}",
            "80 % interval": lambda p: f"{p.efficiency.low:.3f} to {p.efficiency.high:.3f}",
        },
        caption="".join(f"{u.num_devices:,} devices: {u.why_not}\n" for u in emulation.unreached).strip(),
    )
    rows = [
        (
            f"{p.real.num_devices:,}", _batch(p.real), seconds(p.real.step_s), f"{p.real_efficiency.value:.3f}",
            *(f"{ms(p.difference_s[cause]):+,.0f}" for cause in causes),
        )
        for p in emulation.points
        if p.real is not None and p.real_efficiency is not None
    ]  # fmt: skip
    title = "The same replicas for real, and what the emulation cannot see (milliseconds of a step)"
    return [emulated, TextTable(title=title, headings=("devices", "batch", "step", "efficiency", *causes), rows=rows)]


# --- replicas and sensitivity ---


def _replica_table(report: ScaleReport) -> TextTable:
    return TextTable.of(
        f"Replica sizes on {report.replica_cluster}, rates against the best",
        report.replicas,
        {
            "replica": lambda r: f"{r.num_devices:,}",
            "plan": lambda r: r.costed.plan.describe(),
            "step": lambda r: seconds(r.costed.step_s),
            "rate": lambda r: percent(r.relative_ratio),
            "batch each": lambda r: _batch(r.costed, parts=r.costed.num_devices / r.num_devices),
            "memory": lambda r: _memory(r.costed),
        },
        text_columns=("plan",),
    )


def _sensitivity_table(found: scaling.Sensitivity) -> TextTable:
    return TextTable.of(
        f"Efficiency is {found.efficiency:.3f}; with one assumption changed it is",
        [s for s in found.swings if s.change is not None and s.efficiency is not None],
        {
            "assumption": lambda s: s.assumption,
            "changed to": lambda s: s.value,
            "first step": lambda s: "" if s.base_step_s is None else seconds(s.base_step_s),
            "last step": lambda s: "" if s.end_step_s is None else seconds(s.end_step_s),
            "efficiency": lambda s: f"{s.efficiency:.3f}",
            "change": lambda s: f"{s.change:+.3f}",
        },
        text_columns=("changed to",),
        caption="\n".join(f"{s.assumption}, {s.value}: {s.why_not}" for s in found.swings if s.change is None),
    )


def _batch(costed: scaling.Costed, *, parts: float = 1.0) -> str:
    """Tokens of a batch, or of one of its parts."""
    return f"{format_count(costed.global_batch * costed.request.seq_len / parts)} tokens"


# --- the page ---


def scale_page(report: ScaleReport, *, command: str = "") -> str:
    """The whole page. `command` is the command line that makes it."""
    request = report.study.request
    sections = [PageSection(title=t.title, parts=_parts(report, t, command)) for t in tables_of(report)]
    sections.append(_assumptions(report))
    if report.run.text:
        sections.append(PageSection(title="The run file", parts=[f"<pre>{escape(stated_text(report.run))}</pre>"]))
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
    if report.curve is not None and "rework" in shown.headings:
        return "Share of time that is lost, over the number of devices", losses_svg(report.curve)
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


# --- figures ---


KINDS_OF_LOSS = {"save": BLUE, "rework": ORANGE, "restart": RED, "spares": GRAY}
HEIGHT = 300
MAX_BARS = 16
MOST_LABELS = 9
"""Points of a line that each have a label."""


def efficiency_svg(curve: scaling.ScaleCurve) -> str:
    """Efficiency over devices with its interval; a second line counts failures in."""
    steps = _efficiencies(curve.points)
    series = [{**row, "what": "steps"} for row in steps]
    first = curve.points[0].goodput
    if first is not None:
        series += [
            {"devices": p.num_devices, "y": p.efficiency.value * p.goodput.value / first.value,
             "what": "steps and failures"}
            for p in curve.points
            if p.goodput is not None
        ]  # fmt: skip
    ends = _ends(steps, series)
    chart = _band(steps, ends) + _lines(series, ends, {"steps": BLUE, "steps and failures": RED})
    chart += _labels([{**row, "text": f"{row['y']:.0%}"} for row in steps], _ratio("y:Q", ends))
    return _finish(chart, title="Efficiency against the smallest size, over the number of devices")


def days_svg(curve: scaling.ScaleCurve) -> str:
    """Days of training over devices on logarithmic axes; the thin line is perfect scaling."""
    trained = [(p.num_devices, p.training) for p in curve.points if p.training is not None]
    first, days = trained[0][0], trained[0][1].productive.value / DAY_S
    series = [
        {"devices": n, "y": y, "what": what}
        for n, t in trained
        for what, y in (
            ("perfect", days * first / n),
            ("steps", t.productive.value / DAY_S),
            ("steps and failures", t.wall.value / DAY_S),
        )
    ]
    colors = {"perfect": GRAY, "steps": BLUE, "steps and failures": RED}
    y = up("y", title="days", scale=alt.Scale(type="log"))
    named = [{"devices": n, "y": t.wall.value / DAY_S, "text": f"{t.wall.value / DAY_S:,.3g}"} for n, t in trained]
    chart = _plot(series, y, colors) + _labels(named, y)
    return _finish(chart, title="Days of training over the number of devices")


def losses_svg(curve: scaling.ScaleCurve) -> str:
    """Share of the simulated time that each kind of loss takes, over devices."""
    rows = [
        {"devices": f"{p.num_devices:,}", "y": hours / 24 / p.simulation.days, "what": kind}
        for p in curve.points
        if p.simulation is not None
        for kind, hours in p.simulation.lost_h.items()
    ]
    colors = alt.Scale(domain=list(KINDS_OF_LOSS), range=list(KINDS_OF_LOSS.values()))
    chart = chart_of(rows).mark_bar().encode(
        x=alt.X("devices:N", sort=None, title="devices", axis=alt.Axis(labelAngle=0)),
        y=up("y", title="lost", format="%"),
        color=alt.Color("what:N", scale=colors, title=None, legend=alt.Legend(orient="top")),
    )  # fmt: skip
    return _finish(chart, title="Share of time that is lost, over the number of devices")


def emulation_svg(emulation: scaling.Emulation) -> str:
    """Efficiency of the emulation with its interval, and of the clusters that it stands for."""
    steps = _efficiencies(emulation.points)
    small = f"emulated on {emulation.base.num_devices:,} devices"
    series = [{**row, "what": small} for row in steps]
    series += [
        {"devices": p.num_devices, "y": p.real_efficiency.value, "what": "the same replicas for real"}
        for p in emulation.points
        if p.real_efficiency is not None
    ]
    colors = {small: BLUE, "the same replicas for real": ORANGE}
    ends = _ends(steps, series)
    title = "Efficiency of the emulation and of the clusters that it stands for"
    named = [{**row, "text": f"{row['y']:.0%}"} for row in steps]
    chart = _band(steps, ends) + _lines(series, ends, colors) + _labels(named, _ratio("y:Q", ends))
    return _finish(chart, title=title)


def tornado_svg(found: scaling.Sensitivity) -> str:
    """Change of the efficiency by each changed assumption."""
    rows: list[dict[str, Any]] = [
        {"what": f"{s.assumption}: {s.value}", "from": found.efficiency, "to": s.efficiency,
         "side": "better" if s.change > 0 else "worse", "text": f"{s.efficiency:.3f}"}
        for s in found.swings
        if s.change is not None and s.efficiency is not None
    ][:MAX_BARS]  # fmt: skip
    ends = [row["to"] for row in rows] + [found.efficiency]
    pad = max(0.05 * (max(ends) - min(ends)), 0.005) * 5  # room for a number on a phone
    scale = alt.Scale(domain=[min(ends) - pad, max(ends) + pad], nice=False)
    base = lines_of(rows, "what", labelLimit=360)
    x, color = across("from", title="efficiency", scale=scale, tickCount=6), {"better": BLUE, "worse": RED}
    bars = base.mark_bar(height={"band": 0.7}).encode(x=x, x2="to:Q", color=color_by("side", color))
    better = base.transform_filter("datum.side == 'better'").mark_text(align="left", dx=4, color=INK)
    worse = base.transform_filter("datum.side == 'worse'").mark_text(align="right", dx=-4, color=INK)
    text = [mark.encode(x="to:Q", text="text:N") for mark in (better, worse)]
    chart = alt.layer(bars, *text).properties(width=WIDTH - 120, height={"step": 22})
    return svg(chart, title="Efficiency with one assumption changed")


def _efficiencies(points: Sequence[scaling.ScalePoint] | Sequence[scaling.EmulatedPoint]) -> list[dict[str, Any]]:
    return [
        {"devices": p.num_devices, "low": p.efficiency.low, "high": p.efficiency.high, "y": p.efficiency.value}
        for p in points
    ]


def _ends(steps: Sequence[dict[str, Any]], series: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Ends of the axis of efficiencies: all intervals and lines, with room for the values above the points."""
    low = min(row[key] for rows in (steps, series) for row in rows for key in ("low", "y") if key in row)
    high = max(1.0, *(row["high"] for row in steps))
    return max(0.0, low - 0.1 * (high - low)), high + 0.12 * (high - low)


def _band(rows: Sequence[dict[str, Any]], ends: tuple[float, float]) -> Any:
    area = chart_of(rows).mark_area(opacity=0.15, color=BLUE)
    return area.encode(x=_devices(r["devices"] for r in rows), y=_ratio("low:Q", ends), y2="high:Q")


def _lines(series: Sequence[dict[str, Any]], ends: tuple[float, float], colors: dict[str, str]) -> Any:
    ideal = chart_of([{"y": 1.0}]).mark_rule(color=FAINT).encode(y=_ratio("y:Q", ends))
    return ideal + _plot(series, _ratio("y:Q", ends), colors)


def _plot(series: Sequence[dict[str, Any]], y: Any, colors: dict[str, str]) -> Any:
    present = {row["what"] for row in series}
    domain = [name for name in colors if name in present]
    scale = alt.Scale(domain=domain, range=[colors[name] for name in domain])
    color = alt.Color("what:N", scale=scale, title=None, legend=alt.Legend(orient="top"))
    lines = chart_of(series).mark_line(point=True, strokeWidth=2)
    return lines.encode(x=_devices(row["devices"] for row in series), y=y, color=color)


def _labels(rows: Sequence[dict[str, Any]], y: Any) -> Any:
    """The value above each point; every other one where there are many."""
    text = chart_of(rows[:: 1 + len(rows) // MOST_LABELS]).mark_text(dy=-11, color=INK)
    return text.encode(x=_devices(r["devices"] for r in rows), y=y, text="text:N")


def _devices(sizes: Iterable[int]) -> Any:
    axis = alt.Axis(format=",", values=sorted(set(sizes)), labelOverlap=True)
    return alt.X("devices:Q", title="devices", scale=alt.Scale(type="log", base=2, nice=False, padding=16), axis=axis)


def _ratio(field: str, ends: tuple[float, float]) -> Any:
    scale = alt.Scale(domain=ends, nice=False, zero=False)
    return alt.Y(field, title="efficiency", scale=scale, axis=alt.Axis(format="%"))


def _finish(chart: Any, *, title: str) -> str:
    return svg(chart.properties(width=WIDTH, height=HEIGHT), title=title)
