"""The JSON document of `meshwright compare`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.answers.comparison.study import SideComparison


def comparison_document(found: SideComparison) -> dict[str, Any]:
    """Sides with all values, ratios, means, differences, warnings, gaps, endnotes."""
    from meshwright.answers.comparison.gap import PARTS
    from meshwright.answers.comparison.ratios import RANDOM_STATE, RESAMPLES
    from meshwright.answers.comparison.study import endnotes

    return {
        "like_for_like": found.is_like_for_like,
        "sides": [
            {
                "name": s.name, "kind": s.kind, "facts": s.facts, "unreadable": s.unreadable,
                "values": [asdict(v) for v in s.values],
            }
            for s in found.sides
        ],
        "means": [
            {
                "baseline": m.baseline, "side": m.other, "metric": m.metric, "unit": m.unit, "n": m.n,
                "geometric_mean": m.value, "low": m.low, "high": m.high, "leave_one_out_low": m.lowest,
                "leave_one_out_high": m.highest, "whole_time_ratio": m.whole_time,
                "verdicts": {r.workload: r.verdict for r in m.ratios}, "only_baseline": m.only_baseline,
                "only_side": m.only_other,
            }
            for m in found.means
        ],
        "ratios": found.to_rows(),
        "differences": [{**asdict(d), "differs": d.differs} for d in found.differing],
        "cautions": found.cautions,
        "hardware": [asdict(h) for h in found.hardware],
        "gaps": [
            {
                "workload": g.workload, "baseline": g.baseline, "side": g.other, "total_s_per_token": g.total_s,
                "before": asdict(g.before), "after": asdict(g.after),
                "difference_s_per_token": {part: g.part_s(part) for part in PARTS},
            }
            for g in found.gaps
        ],
        "bootstrap": {"resamples": RESAMPLES, "random_state": RANDOM_STATE, "confidence": 0.95},
        "endnotes": endnotes(found.sides),
    }  # fmt: skip
