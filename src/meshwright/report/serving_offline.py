"""Tables and the page of `bench offline`: batch throughput by pair, replicas, comparison, conditions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.answers.quantities import percent, rate
from meshwright.answers.text_table import TextTable
from meshwright.bench.serving.offline import OfflineComparison, OfflinePoint
from meshwright.report.charts import BLUE, RED, WIDTH, across, alt, chart_of, color_by
from meshwright.report.figures import svg
from meshwright.report.html import PageSection, figure, measured_page, page_table, table_sections
from meshwright.report.serving import WAIT_LIMIT, failures_by_kind


def tables(found: Sequence[OfflinePoint], comparison: OfflineComparison | None) -> list[TextTable]:
    """The rates of each pair, and the unmeasured pairs."""
    made = [rate_table(found, comparison)]
    failures = [
        (p.pair.name, name.replace("_", " "), str(count), f"of {p.point.num_requests} requests")
        for p in found
        for name, count in failures_by_kind(p.point).items()
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
    caption += "".join(f" {label.capitalize()}, output tokens/s." for label in factors)
    if comparison and comparison.geometric_mean:
        caption += (
            f" Ratio of output tokens/s to --against: geometric mean {comparison.geometric_mean:.3f} over "
            f"{len(comparison.ratios)} pairs."
        )
    return TextTable(title="Batch throughput", headings=headings, rows=rows, caption=caption)


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


BAR = 18


def offline_page(
    found: Sequence[OfflinePoint], *, comparison: OfflineComparison | None, about: Mapping[str, Any]
) -> str:
    """The whole page."""
    usable = [p for p in found if p.point.is_usable]
    what = about["engine"] or about["server"] or "a server"
    num = about["num_replicas"]
    replicas = "1 replica" if num == 1 else f"{num} replicas measured together"
    lead = (
        f"{what}, {replicas}, {about['num_requests']} requests a batch, {len(usable)} of {about['num_pairs']} pairs "
        "of input/output tokens measured."
    )
    shown = tables(found, comparison)
    sections = []
    if usable:
        legend = [("measured", BLUE)]
        legend += [("extrapolated", RED)] if any(p.extrapolated for p in usable) else []
        parts = [figure(rates_svg(usable), legend=legend), page_table(shown[0])]
        sections.append(PageSection(title="Batch throughput", parts=parts))
    sections += table_sections(*shown[1:])
    return measured_page(
        f"Batch throughput of {about['model']}", lead=lead, key_figures=_tiles(usable, comparison),
        notes=cautions(found), sections=sections, conditions=_conditions(about), about=about,
    )  # fmt: skip


def _tiles(usable: Sequence[OfflinePoint], comparison: OfflineComparison | None) -> list[tuple[str, str, str]]:
    shown = []
    for kind in ("output", "total"):
        name = f"{kind}_tokens_per_s"
        best = max(usable, key=lambda p: getattr(p.point, name), default=None)
        if best is not None:
            shown.append((rate(getattr(best.point, name)), f"{kind} tokens/s, the most", best.pair.name))
    if comparison is not None and comparison.geometric_mean:
        pairs = f"geometric mean of {len(comparison.ratios)} pairs"
        shown.append((f"{comparison.geometric_mean:.3f}", "of the other measurement", pairs))
    return shown


def rates_svg(usable: Sequence[OfflinePoint]) -> str:
    """Output tokens/s of each pair as bars; extrapolated rates in another colour."""
    rows: list[dict[str, Any]] = []
    for p in usable:
        rows.append({"pair": p.pair.name, "kind": "measured", "rate": p.point.output_tokens_per_s})
        if p.extrapolated:
            rows.append({"pair": p.pair.name, "kind": "extrapolated", "rate": p.extrapolated.output_tokens_per_s})
    chart = chart_of(rows).mark_bar(height=BAR / 2).encode(
        x=across("rate", title="output tokens/s"), y=alt.Y("pair:N", sort=None, title=None),
        yOffset=alt.YOffset("kind:N", sort=["measured", "extrapolated"]),
        color=color_by("kind", {"measured": BLUE, "extrapolated": RED}),
    )  # fmt: skip
    return svg(chart.properties(width=WIDTH), title="Output tokens/s of each pair of lengths")


def _conditions(about: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model": about["model"],
        "engine": about["engine"],
        "server": about["server"],
        "options": ", ".join([*about["engine_options"], *about["server_options"]]),
        "software": ", ".join(f"{name} {version}" for name, version in (about.get("software") or {}).items()),
        "devices": about["devices"],
        "cores": about["cores"],
        "warm-up requests of a replica": str(about["num_warmup"]),
        "seed": str(about["seed"]),
    }
