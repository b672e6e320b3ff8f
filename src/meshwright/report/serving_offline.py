"""Tables of `bench offline`."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.answers.quantities import percent, rate
from meshwright.answers.text_table import TextTable
from meshwright.bench.serving.offline import OfflineComparison, OfflinePoint


def tables(found: Sequence[OfflinePoint], comparison: OfflineComparison | None) -> list[TextTable]:
    """The rates of each pair, and the unmeasured pairs."""
    made = [rate_table(found, comparison)]
    failures = [
        (p.pair.name, name.replace("_", " "), str(count), f"of {p.point.num_requests} requests")
        for p in found
        for name, count in p.point.errors.items()
    ]
    failures += [(p.pair.name, "refused", "", p.point.refusal) for p in found if p.point.refusal]
    if failures:
        headings = ("input/output", "ended", "count", "why")
        made.append(TextTable(title="Not measured", headings=headings, rows=failures, text_columns=("ended", "why")))
    return made


def rate_table(found: Sequence[OfflinePoint], comparison: OfflineComparison | None) -> TextTable:
    """Measured rates; extrapolated ones in a column of their own."""
    factors = {p.extrapolated.label: p.extrapolated.num_replicas for p in found if p.extrapolated}
    headings = ["input/output", "replicas", "input tokens", "output tokens/s", "total tokens/s"]
    headings += [f"{n} replicas, extrapolated" for n in factors.values()]
    headings += ["ratio"] if comparison else []
    rows = []
    for p in found:
        if p.point.is_usable:
            mean_input = p.point.input_tokens / p.point.num_ok
            row = [p.pair.name, p.num_replicas, rate(mean_input), rate(p.point.output_tokens_per_s)]
            row.append(rate(p.point.total_tokens_per_s))
            row += [rate(p.extrapolated.output_tokens_per_s)] if p.extrapolated else []
            ratio = comparison.ratios.get(p.pair.name) if comparison else None
            row += [f"{ratio:.3f}" if ratio else ""] if comparison else []
            rows.append(row)
    caption = "Measured together: all replicas at the same time. Input tokens: mean by the server's count."
    caption += "".join(f" Extrapolated: {label}, output tokens/s." for label in factors)
    if comparison and comparison.geometric_mean:
        caption += (
            f" Ratio of output tokens/s to --against: geometric mean {comparison.geometric_mean:.3f} over "
            f"{len(comparison.ratios)} pairs."
        )
    return TextTable(title="Batch throughput", headings=headings, rows=rows, caption=caption)


WAIT_LIMIT = 0.05
"""Share of its time without a processor above which a caution says so."""


def cautions(found: Sequence[OfflinePoint]) -> list[str]:
    """Cautions for the reader of the rates, one sentence each."""
    said = []
    short = sum(p.point.num_short for p in found)
    if short:
        said.append(f"{short} answers are shorter than asked for")
    waited = max((p.point.server_wait_ratio or 0.0 for p in found), default=0.0)
    if waited > WAIT_LIMIT:
        said.append(
            f"a replica waited for a processor in up to {percent(waited)} of its time: other programs, or other "
            "replicas, ran on its cores"
        )
    return said
