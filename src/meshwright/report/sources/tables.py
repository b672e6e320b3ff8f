"""Tables of the report on the source documents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshwright.answers.sources.study import Slip, SourceReport, SourceRow
from meshwright.answers.text_table import TextTable
from meshwright.files import toml_table

TEXTS = toml_table(Path(__file__).with_name("page.toml"))


def document_of(row: SourceRow) -> str:
    """Short name of a claim's document."""
    return TEXTS["documents"][row.claim.claim_id.partition("_")[0]]


def claims_table(rows: Sequence[SourceRow], *, title: str) -> TextTable:
    """One row for each claim."""
    return TextTable(
        title=title,
        headings=(
            "claim", "what", "printed", "predicted", "interval", "published logs", "published tables", "measured here",
            "class", "agrees", "reason or assumption", "slips",
        ),
        rows=[_cells(row) for row in rows],
        text_columns=("what", "published tables", "measured here", "class", "agrees", "reason or assumption", "slips"),
    )  # fmt: skip


def _cells(row: SourceRow) -> tuple[str, ...]:
    c, p = row.claim, row.predicted
    interval = f"{number(p.low)} to {number(p.high)}" if p is not None and p.low < p.high else ""
    agrees = "" if row.agrees is None else "yes" if row.agrees else "no"
    return (
        c.claim_id, what(row), f"{number(c.value)} {c.unit}".strip(), "" if p is None else number(p.value), interval,
        "" if row.logs is None else number(row.logs), row.published,
        "" if row.measured is None else f"{row.measured.value} ({row.measured.device})", row.answer_class.value, agrees,
        row.reason, ", ".join(map(str, row.slips)),
    )  # fmt: skip


def what(row: SourceRow) -> str:
    """The claim in a line: metric, model, method, format, devices, baseline."""
    c = row.claim
    devices = f"{c.num_accelerators} x {c.accelerator}" if c.num_accelerators and c.accelerator else c.accelerator
    against = f"against {c.baseline}" if c.baseline else ""
    parts = (c.metric.replace("_", " "), c.model, c.method, c.precision, devices, against)
    return ", ".join(p for p in parts if p)


def slips_table(slips: Sequence[Slip]) -> TextTable:
    """Table of errors and contradictions."""
    return TextTable(
        title="Slips in the documents",
        headings=("n", "document", "printed", "found", "why"),
        rows=[(s.number, s.document, s.printed, s.found, s.why) for s in slips],
        text_columns=("document", "printed", "found", "why"),
    )  # fmt: skip


def summary_table(found: SourceReport) -> TextTable:
    """Claims of each document by class, and how many agree."""
    classes = list(dict.fromkeys(r.answer_class for r in found.rows))
    documents = list(dict.fromkeys(document_of(r) for r in found.rows))
    rows = []
    for name in documents:
        own = [r for r in found.rows if document_of(r) == name]
        rated = [r for r in own if r.agrees is not None]
        counts = (sum(r.answer_class is c for r in own) or "" for c in classes)
        rows.append((name, len(own), *counts, f"{sum(bool(r.agrees) for r in rated)} of {len(rated)}"))
    return TextTable(
        title="Claims by document and class of the answer",
        headings=("document", "claims", *(c.value for c in classes), "agree"), rows=rows,
    )  # fmt: skip


def number(value: float) -> str:
    """
    >>> number(31190.0), number(0.9635), number(570e9), number(2.0)
    ('31,190', '0.9635', '570e9', '2')
    """
    if value >= 1e9:
        return f"{value / 1e9:.4g}e9"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
