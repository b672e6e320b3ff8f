"""Tables of a report on records."""

from __future__ import annotations

from dataclasses import replace

from meshwright.answers.comparison.sides import MEMORY, MFU, THROUGHPUT, SideValue
from meshwright.answers.overview.collect import RecordReport, ReportEntry
from meshwright.answers.overview.cost import CostRow, CostSensitivity
from meshwright.answers.quantities import seconds
from meshwright.answers.text_table import TextTable
from meshwright.report.comparison.tables import value_text


def entries_table(found: RecordReport) -> TextTable:
    """One row for each entry; columns that no record has a value for are left out."""
    table = TextTable(
        title="Records",
        headings=(
            "name", "kind", "workload", "device", "devices", "precision", "plan", "engine", "step time",
            "tokens/s/device", "MFU", "memory", "measured over predicted", "loss", "date",
        ),
        rows=[_entry_row(e) for e in found.entries],
        text_columns=("kind", "workload", "device", "precision", "plan", "engine"),
    )  # fmt: skip
    return table.without_empty_columns()


def _entry_row(entry: ReportEntry) -> tuple[str, ...]:
    run = entry.run
    step_s = run.statistics["step_s"].get("median") if run is not None else None
    loss = run.statistics["last_loss"] if run is not None else None
    ratio = predicted_ratio(entry)
    workloads = list(dict.fromkeys(v.workload for v in entry.side.values))
    workload = workloads[0] if len(workloads) == 1 else f"{len(workloads):,} workloads"
    return (
        entry.name, entry.side.kind, workload, entry.condition("accelerator"), entry.condition("devices"),
        entry.condition("precision"), entry.condition("parallelism"), entry.condition("engine"),
        seconds(step_s) if step_s else "", *(_text(entry.value(m)) for m in (THROUGHPUT, MFU, MEMORY)),
        "" if ratio is None else f"{ratio:.2f}", "" if loss is None else f"{loss:.3f}",
        entry.side.facts.get("date", "")[:10],
    )  # fmt: skip


def predicted_ratio(entry: ReportEntry) -> float | None:
    """Measured over predicted tokens/s/device of a training."""
    if entry.run is None:
        return None
    rows = [r for r in entry.run.measured_quantities() if r.unit == "tokens/s"]
    return rows[0].ratio if rows else None


def values_table(found: RecordReport) -> TextTable:
    """One row for each value of records that have several workloads."""
    several = [e for e in found.entries if len(e.side.values) > len({v.metric for v in e.side.values})]
    values = [(e.name, v, value_text(v)) for e in several for v in e.side.values]
    rows = [  # "19.6 ms" needs no unit, "408" does
        (name, v.workload, v.metric.name, text, v.metric.unit if text[-1].isdigit() else "", len(v.samples) or "",
         v.evidence.value)
        for name, v, text in values
    ]  # fmt: skip
    return TextTable(
        title="Values by workload",
        headings=("name", "workload", "metric", "value", "unit", "n", "evidence"), rows=rows,
        text_columns=("workload", "metric", "unit", "evidence"),
    )  # fmt: skip


def cost_table(rows: list[CostRow], *, missing: str) -> TextTable:
    """Cost per million tokens and of runs whose length is known. `missing`: what has no price."""
    has_length = any(r.usd_per_run is not None for r in rows)
    return TextTable(
        title="USD per million tokens",
        headings=(
            "name", "accelerator", "offer", "date", "USD per device-hour", "USD per million tokens", "interval",
            *(["USD per run"] if has_length else []),
        ),
        rows=[
            (
                r.name, r.accelerator, r.offer, r.date, f"{r.usd_per_device_hour:.3f}", usd(r.usd_per_million_tokens),
                "" if r.low is None or r.high is None else f"{usd(r.low)} to {usd(r.high)}",
                *(["" if r.usd_per_run is None else usd(r.usd_per_run)] if has_length else []),
            )
            for r in rows
        ],
        caption=missing,
        text_columns=("accelerator", "offer"),
    )  # fmt: skip


def sensitivity_table(name: str, rows: list[CostSensitivity]) -> TextTable:
    """USD per million tokens when one assumption changes."""
    return TextTable(
        title=f"Sensitivity of the cost of {name}, USD per million tokens",
        headings=("assumption", "low", "with", "high", "with this"),
        rows=[(s.what, usd(s.low), s.low_case, usd(s.high), s.high_case) for s in rows],
        text_columns=("with", "with this"),
    )  # fmt: skip


def usd(value: float) -> str:
    """
    >>> usd(0.012345), usd(1234.5)
    ('0.01235', '1,234')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def value_cells(value: SideValue) -> tuple[str, str]:
    """Value, and range of its samples or interval."""
    ends = [e for e in (value.low, value.high) if e is not None] or list(value.samples)
    if not ends:
        return value_text(value), ""
    low, high = (value_text(replace(value, value=end)) for end in (min(ends), max(ends)))
    return value_text(value), f"{low} to {high}"


def _text(value: SideValue | None) -> str:
    return "" if value is None else value_text(value)
