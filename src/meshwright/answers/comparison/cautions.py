"""Table of conditions that differ between sides, and warnings where a comparison mixes causes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.answers.comparison.ratios import FEWEST_SAMPLES, RUNS, STEP, MeanRatio, Ratio
from meshwright.answers.comparison.sides import CONDITIONS, Evidence, Side, shortened

MONTHS_APART = 6
FEW_SAMPLES = 5

MEASURED = (Evidence.MEASURED, Evidence.MLPERF, Evidence.MLPERF_UNVERIFIED, Evidence.PUBLISHED)
LIKE_FOR_LIKE = ("model", "tokens of a sequence", "sequences of a step", "tokens of a request", "load", "FLOP rule")
"""Conditions that a like-for-like comparison needs equal."""


@dataclass(frozen=True, kw_only=True)
class ConditionRow:
    """One condition with its values on every side; an empty text is not stated."""

    condition: str
    values: tuple[str, ...]  # in the order of the sides

    @property
    def differs(self) -> bool:
        return len(set(self.values)) > 1


def differences(sides: Sequence[Side], pairs: Sequence[MeanRatio]) -> list[ConditionRow]:
    """Conditions of the compared workloads, in the order of the table; those that no side states are absent."""
    compared = {id(v) for m in pairs for r in m.ratios for v in (r.baseline, r.other)}
    found = []
    for condition in CONDITIONS:
        texts = []
        for side in sides:
            values = [v.conditions[condition] for v in side.values if id(v) in compared and v.conditions.get(condition)]
            texts.append(shortened(list(dict.fromkeys(values)), most=4))
        if any(texts):
            found.append(ConditionRow(condition=condition, values=tuple(texts)))
    return found


def cautions(sides: Sequence[Side], pairs: Sequence[MeanRatio]) -> list[str]:
    """Warnings, each one sentence that names the sides."""
    found: list[str] = []
    for mean in pairs:
        found += _mixed_causes(mean)
        found += _mixed_evidence(mean)
        found += _definitions(mean)
        found += _dates(mean)
        found += _samples(mean)
        less = [r.workload for r in mean.ratios if r.baseline.workload != r.other.workload]
        if less:
            found.append(f"{mean.metric}: one side does not state all of the work of {'; '.join(less[:3])}")
        if mean.only_baseline or mean.only_other:
            unpaired = [
                *(f"{w} ({mean.baseline})" for w in mean.only_baseline),
                *(f"{w} ({mean.other})" for w in mean.only_other),
            ]
            shown = shortened(unpaired, most=5)
            found.append(f"{mean.metric}: only one side has these, and they are in no mean: {shown}")
    for side in sides:
        found += [f"{side.name}: not read: {reason}" for reason in side.unreadable]
        found += [f"{side.name}: {text}" for text in side.cautions]
        several = {
            v.conditions.get("accelerator", "") for v in side.values if ", " in v.conditions.get("accelerator", "")
        }
        found += [f"{side.name} is a mean over different accelerators: {names}" for names in sorted(several)]
        if any(v.evidence is Evidence.MLPERF_UNVERIFIED for v in side.values):
            found.append(f"{side.name}: an MLPerf score that is not verified by the MLCommons Association")
    return list(dict.fromkeys(found))


def unlike(pairs: Sequence[MeanRatio]) -> list[str]:
    """Reasons why a comparison is not like for like: conditions that differ, or that one side does not state."""
    found = []
    for mean in pairs:
        for ratio in mean.ratios:
            for condition in LIKE_FOR_LIKE:
                ours, theirs = _both(ratio, condition)
                if condition == "FLOP rule" and ratio.baseline.metric.name != "MFU":
                    continue
                if _rule(ours) != _rule(theirs):
                    found.append(
                        f"{ratio.workload}: {condition}: {ours or 'not stated'} ({mean.baseline}), "
                        f"{theirs or 'not stated'} ({mean.other})"
                    )
    return list(dict.fromkeys(found))


def _rule(text: str) -> str:
    return text.strip().lower()


def _both(ratio: Ratio, condition: str) -> tuple[str, str]:
    return ratio.baseline.conditions.get(condition, ""), ratio.other.conditions.get(condition, "")


def _differs(mean: MeanRatio, condition: str) -> bool:
    both = [_both(r, condition) for r in mean.ratios]
    return any(a and b and a != b for a, b in both)


def _mixed_causes(mean: MeanRatio) -> list[str]:
    """Hardware with parallelism, engine or precision in one ratio."""
    if not _differs(mean, "accelerator"):
        return []
    with_it = [c for c in ("parallelism", "engine", "precision", "sequences of a step") if _differs(mean, c)]
    if not with_it:
        return []
    text = " and ".join([", ".join(with_it[:-1]), with_it[-1]] if len(with_it) > 1 else with_it)
    return [
        f"{mean.metric} of {mean.other} against {mean.baseline}: the hardware differs together with {text}: "
        "the ratio is not the hardware's alone"
    ]


def _mixed_evidence(mean: MeanRatio) -> list[str]:
    kinds = [sorted({getattr(r, side).evidence for r in mean.ratios}) for side in ("baseline", "other")]
    if kinds[0] == kinds[1]:
        return []
    found = []
    names = (mean.baseline, mean.other)
    for ours, theirs in ((0, 1), (1, 0)):
        for odd in (Evidence.EXTRAPOLATED, Evidence.MODELLED):
            if odd in kinds[ours] and any(k in MEASURED for k in kinds[theirs]):
                others = " and ".join(k.value for k in kinds[theirs])
                found.append(f"{mean.metric}: {names[ours]} is {odd.value}, {names[theirs]} is {others}")
    if not found and {Evidence.MEASURED} in (set(kinds[0]), set(kinds[1])):
        others = next(k for k in kinds if set(k) != {Evidence.MEASURED})
        text = " and ".join(k.value for k in others)
        found.append(
            f"{mean.metric}: one side was measured here, the other is {text}: its conditions are as stated there"
        )
    return found


def _definitions(mean: MeanRatio) -> list[str]:
    found = [
        f"{mean.metric}: the {condition} differs between {mean.baseline} and {mean.other}"
        for condition in ("client", "metric definition", "power")
        if _differs(mean, condition)
    ]
    if mean.metric == "MFU" and (_differs(mean, "precision") or _differs(mean, "accelerator")):
        found.append(f"MFU: {mean.baseline} and {mean.other} refer to different peaks; compare throughput")
    if mean.metric == "MFU" and _differs(mean, "FLOP rule"):
        found.append(f"MFU: {mean.baseline} and {mean.other} count FLOPs by different rules; compare throughput")
    return found


def _dates(mean: MeanRatio) -> list[str]:
    def months(text: str) -> int | None:
        year, dash, month = text[:7].partition("-")
        return int(year) * 12 + int(month) if dash and year.isdecimal() and month.isdecimal() else None

    for ratio in mean.ratios:
        ours, theirs = (months(t) for t in _both(ratio, "software date"))
        if ours is not None and theirs is not None and abs(ours - theirs) > MONTHS_APART:
            apart = abs(ours - theirs)
            return [f"{mean.metric}: the software of {mean.baseline} and {mean.other} is {apart} months apart"]
    return []


def _samples(mean: MeanRatio) -> list[str]:
    values = [pair for r in mean.ratios for pair in ((mean.baseline, r.baseline), (mean.other, r.other))]
    few = {
        name
        for name, v in values
        if v.evidence is Evidence.MEASURED and v.sampled in RUNS and len(v.samples) < FEW_SAMPLES
    }
    steps = {name for name, v in values if v.sampled == STEP}
    found = [f"{mean.metric}: {' and '.join(sorted(few))}: fewer than {FEW_SAMPLES} repeats"] if few else []
    unjudged = [r.workload for r in mean.ratios if r.has_too_few_runs]
    if unjudged:
        found.append(
            f"{mean.metric}: fewer than {FEWEST_SAMPLES} runs of a side, and so no verdict: {'; '.join(unjudged)}"
        )
    if steps and mean.metric == "throughput":
        found.append(
            f"{mean.metric}: samples of {' and '.join(sorted(steps))} are steps of one run: "
            "the interval holds no difference between runs"
        )
    return found
