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
    from meshwright.training.data.lengths import DataLengths, Example, Spread

    Found = Mapping[str, Mapping[str, DataLengths]]


def _named(found: Found) -> dict[str, DataLengths]:
    """The sources by the names that a table has for them."""
    return {
        part if name == part else f"{part}, {name}": of_source
        for part, sources in found.items()
        for name, of_source in sources.items()
    }


def data_table(found: Found) -> TextTable:
    """Counts and lengths, a column for each source."""
    named = _named(found)
    columns = [_cells(of_source) for of_source in named.values()]
    return TextTable(
        title="Data of one epoch",
        headings=("", *named),
        rows=[(heading, *(cells[heading] for cells in columns)) for heading in columns[0]],
        caption="Tokens are counted before the cut, labels (tokens with a loss) after it. An example is a document, a "
        "pair of answers or a judged answer; its number is its place in the source, from 1, without empty records.",
    )


def _cells(found: DataLengths) -> dict[str, str]:
    usage, percentiles = found.usage, found.tokens.percentiles
    return {
        "examples": f"{found.num_examples:,} {found.kind}",
        "tokens": f"{found.tokens.total:,}",
        "labels": f"{found.num_labels:,}",
        "labels over tokens": percent(found.num_labels / found.tokens.total),
        "samples": f"{usage.num_samples:,}",
        "padding of samples": percent(usage.padding_ratio),
        "documents cut": f"{usage.num_cut:,} ({percent(usage.num_cut / max(1, usage.num_documents))})",
        "documents without a label": f"{usage.num_without_labels:,}",
        **{f"tokens, percentile {p}": f"{tokens:,}" for p, tokens in percentiles.items()},
        "shortest example, tokens": _example(found.shortest),
        "longest example, tokens": _example(found.longest),
    }


def _example(found: Example) -> str:
    return f"{found.num_tokens:,} (number {found.number:,})"


def data_page(found: Found, *, name: str, sequence_length: int) -> str:
    """The whole page of the run `name`."""
    table = data_table(found)
    sections = [PageSection(title=table.title, parts=[page_table(table)], is_wide=True)]
    for source, lengths in _named(found).items():
        spreads = {"Tokens": lengths.tokens} | ({} if lengths.labels is None else {"Labels": lengths.labels})
        for what, spread in spreads.items():
            title = f"{what} of {lengths.kind}: {source}"
            sections.append(PageSection(title=title, parts=[figure(_histogram(spread, title=title))]))
    lead = f"Samples have {sequence_length:,} tokens (data.sequence_length)."
    return document(
        title=f"{name}: its data", lead=paragraph(lead, css_class="lead"), sections=sections,
        footer=f"Meshwright {__version__}. Counted by a dry run.",
    )  # fmt: skip


def _histogram(spread: Spread, *, title: str) -> str:
    bars = {str(low) if low == high else f"{low:,}–{high:,}": count for low, high, count in spread.histogram}
    shares = {name: count / sum(bars.values()) for name, count in bars.items()}
    labels = {name: f"{count:,}, {percent(shares[name])}" for name, count in bars.items()}
    return shares_svg(shares, title=title, labels=labels)
