"""Tables and the JSON document of results of other serving clients (`bench serve --from FILE`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.answers.quantities import rate
from meshwright.answers.text_table import TextTable
from meshwright.bench.serving.importers import ImportedResult
from meshwright.bench.serving.summary import InterTokenDefinition, LoadSummary, best_by_bound, best_under
from meshwright.records.serving import Latency


def results_document(found: Sequence[ImportedResult], *, bound_s: float) -> dict[str, Any]:
    """All values for JSON, and the best loads of each client by bound."""
    return {"results": found, "best": [_best(name, group, bound_s) for name, group in _groups(found).items()]}


def _groups(found: Sequence[ImportedResult]) -> dict[tuple[str, str], list[ImportedResult]]:
    """Results of one client and model: only they are points of one curve."""
    groups: dict[tuple[str, str], list[ImportedResult]] = {}
    for result in found:
        groups.setdefault((result.format, result.model), []).append(result)
    return groups


def _best(name: tuple[str, str], group: Sequence[ImportedResult], bound_s: float) -> dict[str, Any]:
    loads = [LoadSummary(load=result.point.load, points=(result.point,)) for result in group]
    by_definition = {d: best_by_bound(loads, d) for d in InterTokenDefinition}
    return {
        "format": name[0], "model": name[1], "bound_s": bound_s,
        **{d: {"steps": steps, "under_bound": best_under(steps, bound_s)} for d, steps in by_definition.items()},
    }  # fmt: skip


def tables(found: Sequence[ImportedResult], *, bound_s: float) -> list[TextTable]:
    """One table of all results, and one of the limits to their comparison."""
    rows = [
        (
            f"{r.format} {r.model}".strip(), r.point.load.name if r.point.load.concurrency or r.point.load.offered_per_s
            else "not stated", rate(r.point.output_tokens_per_s), rate(r.point.total_tokens_per_s), _ms(r.point.ttft_s),
            _ms(r.point.tpot_s), _ms(r.point.chunk_gap_s), _ms(r.point.e2e_s),
        )
        for r in found
    ]  # fmt: skip
    made = TextTable(
        title="Results of other clients",
        headings=("client, model", "load", "output tokens/s", "total tokens/s", "TTFT ms", "per token ms", "gap ms",
                  "whole answer ms"),
        rows=rows,
        caption="Medians. Per token: time per output token of each request. Gap: between chunks over all requests. "
        "Compare only values of one column.",
        text_columns=("load",),
    )  # fmt: skip
    gaps = [(r.format, text) for r in found for text in r.gaps]
    gaps += [
        (r.format, f"{sum(r.point.errors.values())} of {r.point.num_requests} requests failed: no best load")
        for r in found
        if r.point.errors
    ]
    limits = TextTable(
        title="Values that the files lack or define otherwise, and failures",
        headings=("client", "what"),
        rows=list(dict.fromkeys(gaps)),
        text_columns=("what",),
    )
    return [made, limits] if gaps else [made]


def _ms(found: Latency | None) -> str:
    return "" if found is None else f"{found.median * 1e3:.2f}"
