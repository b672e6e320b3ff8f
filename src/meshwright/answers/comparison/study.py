"""A comparison: sides, ratios to the baseline, what differs, warnings, hardware, the split gap, endnotes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from meshwright import runfile
from meshwright.answers.comparison import ratios
from meshwright.answers.comparison.cautions import ConditionRow, cautions, differences, unlike
from meshwright.answers.comparison.opening import open_sides
from meshwright.answers.comparison.ratios import MeanRatio, Verdict
from meshwright.answers.comparison.sides import MEMORY, Breakdown, Side, known_accelerator, shortened
from meshwright.catalog.accelerators import line_of_succession
from meshwright.errors import InfeasibleError, InputError
from meshwright.json_values import jsonable
from meshwright.result import Result
from meshwright.specs.hardware import Accelerator
from meshwright.specs.run import Run


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SideComparison(Result):
    """Sides beside each other. The first is the baseline of every ratio.

    Attributes:
        sides: records, estimates and published figures, the baseline first.
        means: for each other side and metric the ratios by workload and their geometric mean.
        differing: conditions of the compared workloads, side by side.
        cautions: warnings.
        hardware: datasheet ratios beside the measured one.
        gaps: like for like: time per token split by cause.
        is_like_for_like: the conditions were required to be equal.
    """

    sides: tuple[Side, ...]
    means: tuple[MeanRatio, ...]
    differing: tuple[ConditionRow, ...]
    cautions: tuple[str, ...]
    hardware: tuple[HardwareRatio, ...]
    gaps: tuple[Gap, ...]
    is_like_for_like: bool = False

    def to_dict(self) -> dict[str, Any]:
        document = {
            "like_for_like": self.is_like_for_like,
            "sides": [
                {
                    "name": s.name, "kind": s.kind, "facts": s.facts, "unreadable": s.unreadable,
                    "values": [asdict(v) for v in s.values],
                }
                for s in self.sides
            ],
            "means": [
                {
                    "baseline": m.baseline, "side": m.other, "metric": m.metric, "unit": m.unit, "n": m.n,
                    "geometric_mean": m.value, "low": m.low, "high": m.high, "leave_one_out_low": m.lowest,
                    "leave_one_out_high": m.highest, "whole_time_ratio": m.whole_time,
                    "verdicts": {r.workload: r.verdict for r in m.ratios}, "only_baseline": m.only_baseline,
                    "only_side": m.only_other,
                }
                for m in self.means
            ],
            "ratios": self.to_rows(),
            "differences": [{**asdict(d), "differs": d.differs} for d in self.differing],
            "cautions": self.cautions,
            "hardware": [asdict(h) for h in self.hardware],
            "gaps": [
                {
                    "workload": g.workload, "baseline": g.baseline, "side": g.other, "total_s_per_token": g.total_s,
                    "before": asdict(g.before), "after": asdict(g.after),
                    "difference_s_per_token": {part: g.part_s(part) for part in PARTS},
                }
                for g in self.gaps
            ],
            "bootstrap": {"resamples": ratios.RESAMPLES, "random_state": ratios.RANDOM_STATE, "confidence": 0.95},
            "endnotes": endnotes(self.sides),
        }  # fmt: skip
        return jsonable(document)

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each ratio: sides, metric, workload, values, ratio with its 95 % interval, verdict."""
        return [
            {
                "baseline": m.baseline, "side": m.other, "metric": m.metric, "unit": m.unit, "workload": r.workload,
                "baseline_value": r.baseline.value, "value": r.other.value, "ratio": r.value, "ratio_low": r.low,
                "ratio_high": r.high, "verdict": r.verdict.value, "evidence": r.other.evidence.value,
            }
            for m in self.means
            for r in m.ratios
        ]  # fmt: skip

    def summary(self) -> str:
        """Return the geometric means, one after another."""
        parts = [f"{m.other} over {m.baseline}, {m.metric}: {m.value:.3g} x (n = {m.n})" for m in self.means]
        return "; ".join(parts)


def compare_items(
    items: Sequence[str], *, is_like_for_like: bool = False, read_run: Callable[[Path], Run] = runfile.load
) -> SideComparison:
    """Open the arguments and compare them; `read_run` reads a run file. Raises InputError for fewer than two."""
    if len(items) < 2:
        raise InputError("a comparison needs two sides", got=len(items), allowed="two arguments or more")
    return compare_sides(open_sides(items, read_run=read_run), is_like_for_like=is_like_for_like)


def compare_sides(sides: Sequence[Side], *, is_like_for_like: bool = False) -> SideComparison:
    """Compare all sides with the first.

    Raises InputError where nothing is common, InfeasibleError where a like-for-like comparison is not one.
    """
    baseline, *others = sides
    means = [mean for other in others for mean in ratios.mean_ratios(baseline, other)]
    if not means:
        raise InputError(
            "the sides have no workload and metric in common",
            got="; ".join(f"{s.name}: {_workloads(s)}" for s in sides),
            hint="compare the same model, task and sequence length, or the same loads",
        )  # fmt: skip
    if is_like_for_like and (reasons := unlike(means)):
        raise InfeasibleError(
            f"not like for like: {'; '.join(reasons[:6])}",
            hint="without --like-for-like the sides are compared, and what differs is listed",
        )
    # A gap could be split where one of its sides could be, or both are trainings.
    unsplit = [
        f"the gap of {side.name} is not split into kernels and waiting: {side.not_split}"
        for side in (baseline, *others)
        if side.not_split and any(p.breakdowns or p.not_split for p in (others if side is baseline else [baseline]))
    ]
    return SideComparison(
        sides=tuple(sides), means=tuple(means), differing=tuple(differences(sides, means)),
        cautions=(*cautions(sides, means), *unsplit),
        hardware=tuple(hardware_ratios(means)),
        gaps=tuple(gap for other in others for gap in gaps(baseline, other)), is_like_for_like=is_like_for_like,
    )  # fmt: skip


def _workloads(side: Side) -> str:
    names = list(dict.fromkeys(f"{v.workload} [{v.metric.name}]" for v in side.values))
    return shortened(names, most=3, separator=", ") or "none"


def endnotes(sides: Sequence[Side]) -> list[str]:
    """One sentence for each side, from its record: hardware, software, date, command, n, statistic."""
    notes = []
    for side in sides:
        facts = side.facts
        sampled = sorted({(v.sampled, len(v.samples)) for v in side.values if v.samples})
        n = ", ".join(f"n = {size:,} {kind}s" for kind, size in sampled)
        known = (
            ("", facts.get("hardware")), ("software ", facts.get("software")), ("", facts.get("date")),
            ("command `", f"{facts['command']}`" if facts.get("command") else ""),
            ("", facts.get("statistic")), ("", n), ("", facts.get("notes")), ("from ", facts.get("file")),
        )  # fmt: skip
        notes.append(f"{side.name} ({side.kind}): " + ". ".join(f"{before}{text}" for before, text in known if text))
    return notes


METHOD = (
    f"Ratio: side over baseline where higher is better, baseline over side where lower is, so that above 1 is better. "
    f"Its {ratios.CONFIDENCE:.0%} interval is Student's t of fewer than {ratios.FEWEST_OF_BOOTSTRAP} samples, else a "
    f"bootstrap, of both sides with {ratios.RESAMPLES:,} draws and random state {ratios.RANDOM_STATE}; "
    "without samples there is none. The geometric mean weighs each workload alike; leave-one-out is its range without "
    "one workload; whole time is the time of one unit of every workload, baseline over side"
)


def gap_rows(gap: Gap) -> list[tuple[str, str, str, str, str]]:
    """Part, both times and the difference in microseconds per token and device, share of the gap."""

    def us(seconds: float) -> str:
        return f"{seconds * 1e6:,.2f}"

    rows = []
    for part, name in PARTS.items():
        change = gap.part_s(part)
        share = f"{round(100 * change / gap.total_s)} %" if change and gap.total_s else ""
        rows.append((name, us(getattr(gap.before, part)), us(getattr(gap.after, part)), f"{change * 1e6:+,.2f}", share))
    rows.append(("sum", us(gap.before.total_s), us(gap.after.total_s), f"{gap.total_s * 1e6:+,.2f}", ""))
    return rows


def verdict_word(verdict: Verdict, metric: str) -> str:
    """The verdict in a table: more memory is no loss, as long as the run fits."""
    of_memory = {Verdict.WIN: "less", Verdict.LOSS: "more"} if metric == MEMORY.name else {}
    return of_memory.get(verdict, verdict.value)


def verdicts(mean: MeanRatio) -> str:
    """Wins, losses and undecided workloads as text."""
    return ", ".join(f"{mean.count(v)} {verdict_word(v, mean.metric)}" for v in Verdict if mean.count(v))


# --- hardware beside its datasheets ---


@dataclass(frozen=True, kw_only=True)
class HardwareRatio:
    """Datasheet values of one accelerator over another's. None where a datasheet lacks the value."""

    older: str
    newer: str
    line: str  # of the vendor's products in which the other is a later generation; empty: none
    line_source: str
    measured: float  # geometric mean of the comparison
    metric: str
    bf16: float | None
    fp8: float | None
    memory_capacity: float
    memory_bandwidth: float
    scale_up_bandwidth: float | None
    design_power: float | None


def hardware_ratios(means: Sequence[MeanRatio]) -> list[HardwareRatio]:
    """One row for each mean whose two sides are one accelerator each, and not the same."""
    found = []
    for mean in means:
        names = [
            {getattr(r, side).conditions.get("accelerator", "") for r in mean.ratios} for side in ("baseline", "other")
        ]
        if any(len(n) != 1 for n in names) or mean.metric not in ("throughput", "time to train", "output rate"):
            continue
        older, newer = (known_accelerator(next(iter(n))) for n in names)
        if older is None or newer is None or older.name == newer.name:
            continue
        found.append(_row(older, newer, mean))
    return found


def _row(older: Accelerator, newer: Accelerator, mean: MeanRatio) -> HardwareRatio:
    def over(of: Accelerator, to: Accelerator, number_format: str) -> float | None:
        peaks = of.peak_flops_per_s.get(number_format), to.peak_flops_per_s.get(number_format)
        return peaks[1] / peaks[0] if peaks[0] and peaks[1] else None

    line = line_of_succession(older.name, newer.name)
    return HardwareRatio(
        older=older.name, newer=newer.name, line="" if line is None else f"{line.vendor} {line.name}",
        line_source="" if line is None else line.source, measured=mean.value, metric=mean.metric,
        bf16=over(older, newer, "bf16"), fp8=over(older, newer, "fp8"),
        memory_capacity=newer.memory_bytes / older.memory_bytes,
        memory_bandwidth=newer.memory_bytes_per_s / older.memory_bytes_per_s,
        scale_up_bandwidth=newer.scale_up_bytes_per_s / older.scale_up_bytes_per_s
        if older.scale_up_bytes_per_s else None,
        design_power=newer.tdp_w / older.tdp_w if older.tdp_w and newer.tdp_w else None,
    )  # fmt: skip


# --- like for like: the gap between two sides, split into kernel, communication, bubble and host time ---


PARTS = {
    "kernel_s": "kernels", "communication_s": "exposed communication", "bubble_s": "pipeline bubble",
    "host_s": "host and other waiting",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Time per token of two sides on one workload. Seconds of one device."""

    workload: str
    baseline: str
    other: str
    before: Breakdown
    after: Breakdown

    @property
    def total_s(self) -> float:
        """Positive where the other side is slower."""
        return self.after.total_s - self.before.total_s

    def part_s(self, part: str) -> float:
        """Difference of one part of `PARTS`."""
        return getattr(self.after, part) - getattr(self.before, part)


def gaps(baseline: Side, other: Side) -> list[Gap]:
    """The gap on each workload for which both sides have a breakdown."""
    assert {f.name for f in fields(Breakdown)} == {*PARTS, "note"}
    return [
        Gap(
            workload=workload, baseline=baseline.name, other=other.name, before=before,
            after=other.breakdowns[workload],
        )
        for workload, before in baseline.breakdowns.items()
        if workload in other.breakdowns
    ]  # fmt: skip
