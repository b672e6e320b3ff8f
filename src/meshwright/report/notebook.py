"""Results as HTML for a notebook: the key figures, one figure and one table of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from meshwright.answers.components import bound_by, label, shown_components
from meshwright.answers.quantities import interval_of, percent, rate, seconds, value_of
from meshwright.answers.text_table import TextTable
from meshwright.cost.memory import memory_parts
from meshwright.json_values import picked
from meshwright.report.charts import BLUE, FAINT, INK, RED, WIDTH, across, alt, chart_of, color_by, lines_of
from meshwright.report.figures import family_legend, memory_legend, memory_svg, svg, waterfall_svg
from meshwright.report.html import figure, fragment, table, text_table, tiles
from meshwright.report.serving import latency_table, rate_table
from meshwright.report.training_figures import loss_svg
from meshwright.units import gib

if TYPE_CHECKING:
    from meshwright.answers.accuracy_study import AccuracyStudy
    from meshwright.answers.catalog_listing import CatalogItem, CatalogListing
    from meshwright.answers.evaluation import Evaluation
    from meshwright.answers.explanation import Explanation
    from meshwright.answers.generation import Generation
    from meshwright.answers.ingest_result import IngestBenchmark
    from meshwright.answers.plan_ranking import PlanRanking
    from meshwright.answers.record_files import DeviceMeasurements, OfflineMeasurements, RecordSet, TrainingSweep
    from meshwright.answers.run_estimate import RunEstimate
    from meshwright.answers.scale_study import ScaleReport
    from meshwright.answers.serving_capacity import ServingCapacity
    from meshwright.answers.training_run import TrainingRun
    from meshwright.planner.explain import Difference
    from meshwright.result import Result
    from meshwright.specs.estimate import StepEstimate

MAX_ROWS = 200
"""Longer tables end here; `to_frame()` has every row."""


def ranking_html(ranking: PlanRanking) -> str:
    """Return the ranked plans as a table, and their throughput with its interval as a figure."""

    request = ranking.request
    rows = [
        (rank, done.plan.describe(), value_of(done.step.step), rate(done.step.tokens_per_s_per_device.value),
         interval_of(done.step.tokens_per_s_per_device), percent(done.step.mfu.value),
         f"{gib(done.step.memory.reserved_bytes):.1f}", bound_by(done.step.components_s))
        for rank, done in enumerate(ranking, start=1)
    ]  # fmt: skip
    headings = (
        "", "plan", "step", "tokens/s/device", "80 % interval", "MFU",
        f"GiB of {gib(request.cluster.accelerator.memory_bytes):.0f}", "bound by",
    )  # fmt: skip
    lead = (
        f"{request.global_batch:,} sequences of {request.seq_len:,} tokens, {request.precision.name}, engine "
        f"{request.engine}; {ranking.search.counts.enumerated:,} plans enumerated."
    )
    parts = [table(headings, rows, name="Plans", text_columns=("plan", "bound by")), figure(ranking_svg(ranking))]
    title = f"{request.model.name} on {ranking.run.cluster_name} ({request.num_devices:,} devices)"
    return fragment(title, parts, lead=lead)


def estimate_html(done: RunEstimate) -> str:
    """Return step time, throughput, MFU and memory with their intervals, and where time and memory go."""
    step = done.estimate.step
    shares = [
        (label(n), seconds(s), percent(s / step.step.value)) for n, s in shown_components(step.components_s).items()
    ]
    memory = memory_parts(done.memory)
    parts = [
        tiles(_step_tiles(step)),
        figure(waterfall_svg(step.components_s), legend=family_legend(step.components_s)),
        figure(memory_svg(memory, capacity_bytes=step.memory.capacity_bytes), legend=memory_legend()),
        table(("component", "time", "share"), shares, name="Time of a step"),
    ]
    title = f"{done.request.model.name} on {done.run.cluster_name}: {done.plan.describe()}"
    return fragment(title, parts, lead=" ".join(f"Note: {note}." for note in done.notes))


def _step_tiles(step: StepEstimate) -> list[tuple[str, str, str]]:
    memory = step.memory
    estimates = (
        ("step time", step.step), ("tokens/s/device", step.tokens_per_s_per_device), ("MFU", step.mfu),
    )  # fmt: skip
    return [
        *((value_of(e), name, interval_of(e)) for name, e in estimates),
        (
            f"{gib(memory.reserved_bytes):.1f} GiB", "memory per device", f"of {gib(memory.capacity_bytes):.1f} GiB",
        ),
    ]  # fmt: skip


def explanation_html(answer: Explanation) -> str:
    """Return both plans by component, in milliseconds of a step, and the answers to "why not"."""
    from meshwright.answers.documents.plan import why_not_sentence

    parts = []
    difference = answer.difference
    if difference is not None:
        comparison = difference.comparison
        headings = ("ms of a step", "first", "second", "difference")
        rows = [
            (label(d.name), f"{d.winner:,.1f}", f"{d.loser:,.1f}", f"{d.delta:+,.1f}")
            for d in (*comparison.components_ms, comparison.step_ms)
            if max(abs(d.winner), abs(d.loser)) >= 0.05
        ]
        compared = [
            ("first", answer.this_name, difference.this.plan.describe()),
            ("second", answer.other_name, difference.other.plan.describe()),
        ]
        parts += [
            table(("", "plan of", "plan"), compared, name="Plans", text_columns=("plan of", "plan")),
            figure(difference_svg(comparison.components_ms)),
            table(headings, rows, name="Time of a step"),
        ]
    lead = " ".join(f"Why not {why_not_sentence(answered)}." for answered in answer.why_not)
    return fragment(answer.summary(), parts, lead=lead)


def scale_html(report: ScaleReport) -> str:
    """Return the tables of the study, and efficiency over devices as a figure."""
    from meshwright.report.scale import efficiency_svg, tables_of

    parts = [] if report.curve is None else [figure(efficiency_svg(report.curve))]
    parts += [text_table(shown) for shown in tables_of(report)]
    return fragment(report.summary(), parts)


def accuracy_html(study: AccuracyStudy) -> str:
    """Return errors by subset as a table, and by accelerator as a figure."""
    from meshwright.report.accuracy import errors_svg, metrics_table

    svg = errors_svg(study.report, by="accelerator")
    parts = [text_table(metrics_table("Error of tokens/s per device", study.report.by_subset))]
    parts += [] if svg is None else [figure(svg)]
    return fragment(study.summary(), parts)


def training_html(done: TrainingRun) -> str:
    """Return measured and predicted quantities as a table, and the loss over steps as a figure."""
    from meshwright.report.training_page import quantity_text

    rows = [
        (
            q.name, quantity_text(q.measured, q.unit),
            "not predicted" if q.predicted is None else value_of(q.predicted),
            "" if q.predicted is None or q.predicted.low == q.predicted.high else interval_of(q.predicted),
        )
        for q in done.measured_quantities()
    ]  # fmt: skip
    parts = [table(("", "measured", "predicted", "80 % interval"), rows, name="Predicted and measured")]
    if done.steps:
        parts.append(figure(loss_svg(done.steps)))
    return fragment(f"{done.run['name']}: {done.summary()}", parts, lead=str(done.folder))


def generation_html(done: Generation) -> str:
    """Return the completions as a table."""
    rows = [(_prompt_text(c.prompt), c.text, f"{len(c.tokens):,}", c.ending.value) for c in done.completions[:MAX_ROWS]]
    headings = ("prompt", "completion", "tokens", "ending")
    parts = [table(headings, rows, name="Completions", text_columns=("prompt", "completion", "ending"))]
    return fragment(f"Generated by {done.model['name']}", parts, lead=done.summary())


def evaluation_html(done: Evaluation) -> str:
    """Return the metrics as a table."""
    rows = [
        (row["on"], row["metric"], f"{row['value']:.4f}",
         "" if row["standard_error"] is None else f"{row['standard_error']:.4f}",
         "" if row["number"] is None else f"{row['number']:,}")
        for row in done.to_rows()
    ]  # fmt: skip
    headings = ("on", "metric", "value", "standard error", "tokens or samples")
    return fragment(
        f"Evaluation of {done.model['name']}", [table(headings, rows, name="Metrics", text_columns=("metric",))]
    )


def _prompt_text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """A prompt, or the last message of a conversation."""
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))


def device_html(found: DeviceMeasurements) -> str:
    """Return the number of measurements of each family, and the highest rates that were measured."""
    families: dict[str, list[float]] = {}
    for row in found.records.measured:
        families.setdefault(row.point.family.value, []).append(row.point.flops / row.seconds_median / 1e12)
    rows = [(name, len(values), f"{max(values):,.1f}" if max(values) > 0 else "") for name, values in families.items()]
    return fragment(
        found.summary(),
        [table(("family", "measured", "highest TFLOP/s"), rows, name="Kernels by family")],
        lead=str(found.folder),
    )


def sweep_html(sweep: TrainingSweep) -> str:
    """Return the throughput of each configuration, measured and predicted, as table and figure."""
    from meshwright.report.training_sweep import rates_svg, tables

    measured = [s for s in sweep.summaries if s.is_measured]
    parts = [figure(rates_svg(measured))] if measured else []
    parts += [text_table(shown) for shown in tables(sweep.summaries)]
    return fragment(sweep.summary(), parts, lead=str(sweep.folder))


def records_html(found: RecordSet) -> str:
    """Return one line for each record."""
    rows = [(type(r).__name__, str(r.folder), r.summary()) for r in found]
    unreadable = "; ".join(f"{path}: {reason}" for path, reason in found.unreadable)
    parts = [table(("record", "folder", "content"), rows, name="Records", text_columns=("folder", "content"))]
    return fragment(found.summary(), parts, lead=f"Not readable: {unreadable}" if unreadable else "")


def listing_html(listing: CatalogListing) -> str:
    """Return the entries as a table."""
    rows = listing.to_rows()
    columns = [name for name in rows[0] if any(_short(row.get(name)) for row in rows)] if rows else []
    shown = TextTable(
        title=listing.kind,
        headings=[name.replace("_", " ") for name in columns],
        rows=[[_cell(row.get(name)) for name in columns] for row in rows[:MAX_ROWS]],
        caption=f"The first {MAX_ROWS} of {len(rows)}." if len(rows) > MAX_ROWS else "",
        text_columns=("title",),
    )
    return fragment(listing.summary(), [text_table(shown)])


def entry_html(entry: CatalogItem) -> str:
    """Return every field with its source; a run file as its text."""
    if "text" in entry.document:
        return fragment(entry.summary(), [f"<pre>{escape(entry.document['text'])}</pre>"])
    rows = [(r["field"], _cell(r["value"]), r["source"] or "") for r in entry.to_rows()]
    return fragment(
        entry.summary(), [table(("field", "value", "source"), rows, name="Fields", text_columns=("value", "source"))]
    )


def ingest_html(done: IngestBenchmark) -> str:
    """Return the tables of a benchmark of ingestion."""
    from meshwright.report.ingest import tables

    lead = " ".join(f"Note: {note}." for note in done.notes)
    return fragment("Retrieval ingestion", [text_table(t) for t in tables(done.records)], lead=lead)


def offline_html(found: OfflineMeasurements) -> str:
    """Return the rates of each pair of lengths."""
    rows = [
        (r["pair"], f"{r['num_replicas']}", rate(r["output_tokens_per_s"]), rate(r["total_tokens_per_s"]))
        for r in found.to_rows()
    ]
    headings = ("input/output", "replicas", "output tokens/s", "total tokens/s")
    return fragment("Batch throughput", [table(headings, rows, name="Rates")], lead=found.summary())


def capacity_html(found: ServingCapacity) -> str:
    """Return the sessions that each layout holds."""
    rows = [
        (f.layout.describe(), f"{f.max_sessions:,}", f"{f.max_tokens:,}", f"{gib(f.device.weights):.1f}")
        for f in found.layouts
    ]
    headings = ("layout", "sessions", "tokens", "weights, GiB/device")
    return fragment(
        "Serving capacity", [table(headings, rows, name="Layouts", text_columns=("layout",))], lead=found.summary()
    )


TABLES: dict[str, tuple[str, Callable[[Any], Iterable[TextTable]]]] = {
    "ServingAccuracy": ("Accuracy of inference", lambda done: done.tables("source")),
    "ServingCalibrationResult": ("Calibration of a server", lambda done: done.tables()),
    "ServingEstimate": ("Serving", lambda found: found.tables()),
    "ServingMeasurements": ("Serving", lambda found: (rate_table(found.summaries), latency_table(found.summaries))),
    "ServingPlan": ("Serving plan", lambda found: (found.layout_table(8), found.front_table())),
}
"""Title and tables of answers that have no figure, by the name of their class."""


def tables_html(found: Result) -> str:
    """Return the tables of an answer in `TABLES`."""
    title, tables = next(TABLES[kind.__name__] for kind in type(found).__mro__ if kind.__name__ in TABLES)
    return fragment(title, [text_table(shown) for shown in tables(found)], lead=found.summary())


TEXT_COLUMNS = (
    "accelerator", "benchmark", "file", "folder", "label", "line", "log", "message", "optimizer", "precision",
    "problems", "round", "rule", "set", "severity", "sharding", "source", "status", "submitter", "system",
)  # fmt: skip
"""Columns of these answers that hold text."""


def rows_html(found: Result) -> str:
    """Return the rows of an answer as a table."""
    rows = found.to_rows()
    headings = tuple(rows[0]) if rows else ("nothing",)
    cells = [[_number(v) for v in row.values()] for row in rows]
    return fragment(found.summary(), [table(headings, cells, name="Rows", text_columns=TEXT_COLUMNS)])


def _number(value: object) -> str:
    return "" if value is None else f"{value:,.6g}" if isinstance(value, float) else str(value)


def _short(value: object) -> bool:
    return value is not None and not isinstance(value, list | dict)


def _cell(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return "" if value is None else str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.6g}" if isinstance(value, float) else str(value)


# --- figures ---


MAX_COMPONENTS = 14
NEGLIGIBLE_RATIO = 0.005
"""Differences below this share of the largest are not drawn."""


def ranking_svg(ranking: PlanRanking) -> str:
    """Throughput of each plan: a point, and its 80 % interval as a line."""
    estimates = [(done.plan.describe(), done.step.tokens_per_s_per_device) for done in ranking]
    rows = [
        picked(e, "value", "low", "high") | {"plan": "\n".join(wrap(f"{rank} {plan}", 42)), "text": rate(e.value)}
        for rank, (plan, e) in enumerate(estimates, start=1)
    ]
    scale = alt.Scale(domain=[0, max(e.high for _, e in estimates) * 1.08], nice=False)
    base = lines_of(rows, "plan", labelLimit=300, labelExpr=r"split(datum.label, '\n')")
    x = across("low", scale=scale, title="tokens/s/device, 80 % interval", format="~s", tickCount=6)
    value = across("value", scale=scale)
    interval = base.mark_rule(color=BLUE, strokeWidth=2).encode(x=x, x2="high:Q")
    point = base.mark_point(color=BLUE, filled=True, size=70, opacity=1).encode(x=value)
    text = base.mark_text(dy=-9, color=INK).encode(x=value, text="text:N")
    chart = alt.layer(interval, point, text).properties(width=WIDTH, height={"step": 40})
    return svg(chart, title="Throughput of each plan with its interval")


def difference_svg(components_ms: Sequence[Difference]) -> str:
    """Milliseconds by which the second plan's components are longer (right) or shorter (left)."""
    largest = sorted(components_ms, key=lambda d: -abs(d.delta))[:MAX_COMPONENTS]
    largest = [d for d in largest if abs(d.delta) >= NEGLIGIBLE_RATIO * abs(largest[0].delta)]
    rows = [
        {"component": label(d.name), "start": 0.0, "end": d.delta, "side": "longer" if d.delta > 0 else "shorter"}
        for d in largest
    ]
    x = across("start", title="milliseconds of a step, second plan minus first", tickCount=7)
    color = color_by("side", {"longer": RED, "shorter": BLUE})
    bars = lines_of(rows, "component").mark_bar(height={"band": 0.7}).encode(x=x, x2="end:Q", color=color)
    axis = chart_of([{"x": 0}]).mark_rule(color=FAINT).encode(x="x:Q")
    return svg((bars + axis).properties(width=WIDTH, height={"step": 22}), title="Difference by component")
