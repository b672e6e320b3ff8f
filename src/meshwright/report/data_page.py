"""The data of a run before it trains: a table of the sources, and histograms of the lengths of their examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from meshwright.answers.quantities import percent
from meshwright.answers.text_table import TextTable
from meshwright.report.figures import shares_svg
from meshwright.report.html import PageSection, document, figure, page_table, paragraph
from meshwright.version import __version__

if TYPE_CHECKING:
    from meshwright.training.data.usage import DataUsage


def data_table(usages: Mapping[str, DataUsage]) -> TextTable:
    """Counts and lengths, a column for each source."""
    columns = [_cells(usage) for usage in usages.values()]
    return TextTable(
        title="Data of one epoch",
        headings=("", *usages),
        rows=[(heading, *(cells.get(heading, "") for cells in columns)) for heading in max(columns, key=len)],
        caption="Tokens are counted before the cut, labels (tokens with a loss) after it. An example is a document or "
        "a pair of answers; its number is its place in the source, from 1, without empty records.",
    )


def _cells(usage: DataUsage) -> dict[str, str]:
    found = {
        "samples": f"{usage.num_samples:,}",
        "labels of samples": percent(usage.label_ratio),
        "padding of samples": percent(usage.padding_ratio),
        "documents cut": f"{usage.num_cut:,} ({percent(usage.num_cut / max(1, usage.num_documents))})",
        "documents without a label": f"{usage.num_without_labels:,}",
    }
    if (lengths := usage.lengths) is None:
        return found
    tokens, labels = lengths.tokens, lengths.labels
    return found | {
        "examples": f"{lengths.num_examples:,}",
        "tokens": f"{tokens.total:,}",
        "labels": f"{labels.total:,} ({percent(labels.total / tokens.total)})",
        **{f"tokens, percentile {p}": f"{value:,}" for p, value in tokens.percentiles.items()},
        "shortest and longest example": f"{lengths.shortest:,}, {lengths.longest:,}",
    }


def data_page(usages: Mapping[str, DataUsage], *, name: str, sequence_length: int) -> str:
    """The whole page of the run `name`."""
    table = data_table(usages)
    sections = [PageSection(title=table.title, parts=[page_table(table)], is_wide=True)]
    for source, usage in usages.items():
        spreads = {} if usage.lengths is None else {"Tokens": usage.lengths.tokens, "Labels": usage.lengths.labels}
        for what, spread in spreads.items():
            bars = {str(low) if low == high else f"{low:,}–{high:,}": count for low, high, count in spread.histogram}
            shares = {bar: count / sum(bars.values()) for bar, count in bars.items()}
            labels = {bar: f"{count:,}, {percent(shares[bar])}" for bar, count in bars.items()}
            title = f"{what} of an example: {source}"
            drawn = figure(shares_svg(shares, title=title, labels=labels))
            sections.append(PageSection(title=title, parts=[drawn]))
    lead = paragraph(f"Samples have {sequence_length:,} tokens (data.sequence_length).", css_class="lead")
    footer = f"Meshwright {__version__}. Counted by a dry run."
    return document(title=f"{name}: its data", lead=lead, sections=sections, footer=footer)
