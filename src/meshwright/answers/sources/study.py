"""Every printed figure of the source documents with its answers: predicted, in published logs, measured here.

predict    the cost model, the catalogue or arithmetic (`planner.claims`, `inference.claims`)
minutes    of an MLPerf benchmark: samples to convergence of its published runs over the predicted rate
published  scores of MLCommons' repository; rates of published runs with the claim's model, device and format
measured   what this project measured on machines that it had, from `measured.toml`
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Any

from meshwright.accuracy.rows import PublishedRun, read_runs
from meshwright.accuracy.shipped import measured_runs_path
from meshwright.answers.sources.minutes import predicted_minutes
from meshwright.catalog.claim_answers import AnswerKind, ClaimAnswer, ClaimQuantity, claim_answer
from meshwright.catalog.lookup import Claim, all_claims
from meshwright.errors import InfeasibleError
from meshwright.inference.claims import predict_serving_claim
from meshwright.json_values import jsonable
from meshwright.planner.claims import ClaimPrediction, predict_claim
from meshwright.result import Advance, Result, ignore
from meshwright.specs.estimate import Estimate

HERE = Path(__file__).parent
FROM_LOGS = (ClaimQuantity.MINUTES, ClaimQuantity.MINUTES_RATIO, ClaimQuantity.MINUTES_SPREAD)
COUNTED = ("holds", "parameters", "sessions", "licence")
"""Quantities of serving that are memory arithmetic or a price: no rate is modelled."""
OWN_SOURCES = ("signal65", "primus_misc")
"""Sources of published runs that are the documents themselves."""


class AnswerClass(StrEnum):
    """Strongest evidence that stands beside a claim."""

    MEASURED = "measured here"
    LOGS = "from published logs"
    MODELLED = "modelled"
    ARITHMETIC = "catalogue and arithmetic"
    ASSUMED = "taken as input"
    UNCHECKED = "cannot be checked"


@dataclass(frozen=True, kw_only=True)
class Slip:
    """A figure or sentence of a document that is wrong or contradicts another."""

    number: int
    key: str
    document: str
    printed: str
    found: str
    why: str
    claims: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class OwnMeasurement:
    """Measurement made here for a claim, on a machine that is not the document's."""

    claims: tuple[str, ...]
    value: str
    text: str
    device: str
    date: str
    command: str


@dataclass(frozen=True, kw_only=True)
class SourceRow:
    """One claim with its answers. `agrees`: the printed value lies in the interval, or within its rounding."""

    claim: Claim
    answer: ClaimAnswer
    predicted: Estimate | None
    plans: tuple[str, ...]
    logs: float | None
    published: str  # rates of other publications
    measured: OwnMeasurement | None
    answer_class: AnswerClass
    agrees: bool | None
    reason: str
    slips: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SourceReport(Result):
    """The report on the source documents.

    Attributes:
        rows: one for each claim, in the order of the documents.
        slips: errors and contradictions in the documents.
    """

    rows: tuple[SourceRow, ...]
    slips: tuple[Slip, ...]

    def to_dict(self) -> dict[str, Any]:
        return jsonable({"claims": self.to_rows(), "slips": [asdict(s) for s in self.slips]})

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each claim: printed, predicted, logs, published, measured, class, reason."""
        return [
            {
                "claim": r.claim.claim_id, "document": r.claim.document, "model": r.claim.model,
                "method": r.claim.method, "precision": r.claim.precision, "accelerator": r.claim.accelerator,
                "devices": r.claim.num_accelerators, "metric": r.claim.metric, "unit": r.claim.unit,
                "printed": r.claim.value, "predicted": r.predicted and r.predicted.value,
                "predicted_low": r.predicted and r.predicted.low, "predicted_high": r.predicted and r.predicted.high,
                "logs": r.logs, "published": r.published, "measured": r.measured and r.measured.value,
                "class": r.answer_class.value, "agrees": r.agrees, "reason": r.reason,
                "commands": list(r.answer.commands), "slips": list(r.slips),
            }
            for r in self.rows
        ]  # fmt: skip

    def to_html(self, path: str | Path) -> None:
        """Write the report as one page that opens offline. Raises InputError when it cannot be written."""
        self.write_html(path)

    def summary(self) -> str:
        """Return the number of claims of each class, and of slips."""
        counts = Counter(r.answer_class.value for r in self.rows)
        listed = ", ".join(f"{n} {name}" for name, n in counts.items())
        return f"{len(self.rows)} claims: {listed}; {len(self.slips)} slips"


def source_report(*, advance: Advance = ignore) -> SourceReport:
    """Predict every claim and put its answers beside it; `advance(1)` is called after each."""
    from meshwright.answers.sources.facts import slip_facts

    slips = _slips(slip_facts)
    own = _own_measurements()
    runs = [r for r in read_runs(measured_runs_path()) if r.conditions is not None and r.tokens_per_s_per_device]
    rows = []
    for found in all_claims():
        rows.append(_row(found, slips=slips, own=own, runs=runs))
        advance(1)
    return SourceReport(rows=tuple(rows), slips=tuple(slips))


def _row(found: Claim, *, slips: list[Slip], own: list[OwnMeasurement], runs: list[PublishedRun]) -> SourceRow:
    answer = claim_answer(found)
    why_not, prediction = "", None
    try:
        prediction = predict_claim(found) or predict_serving_claim(found)
    except InfeasibleError as error:
        why_not = error.message
    logs, predicted, plans = _split(found, answer, prediction)
    measured = next((m for m in own if found.claim_id in m.claims), None)
    published = _published(found, runs)
    if answer.reads is None and logs is None:
        logs = _rule(found)
    answer_class = _class(answer, predicted, logs, measured)
    agrees = None if prediction is None else prediction.is_inside
    if prediction is None and logs is not None:
        agrees = abs(logs / found.value - 1) < 1e-9
    return SourceRow(
        claim=found, answer=answer, predicted=predicted, plans=plans, logs=logs, published=published,
        measured=measured, answer_class=answer_class, agrees=agrees,
        reason=why_not or answer.assumed or _REASONS.get(found.claim_id, ""),
        slips=tuple(s.number for s in slips if found.claim_id in s.claims),
    )  # fmt: skip


def _split(
    found: Claim, answer: ClaimAnswer, prediction: ClaimPrediction | None
) -> tuple[float | None, Estimate | None, tuple[str, ...]]:
    """Value of published logs, prediction, and its grounds."""
    minutes = predicted_minutes(found)
    if prediction is None:
        return None, minutes and minutes.value, minutes.plans if minutes else ()
    if answer.reads in FROM_LOGS:
        return (
            prediction.value.value,
            minutes and minutes.value,
            (*prediction.plans, *(minutes.plans if minutes else ())),
        )
    return None, prediction.value, prediction.plans


def _class(
    answer: ClaimAnswer, predicted: Estimate | None, logs: float | None, measured: OwnMeasurement | None
) -> AnswerClass:
    if logs is not None:
        return AnswerClass.LOGS
    if answer.kind is AnswerKind.INPUT and predicted is None:
        return AnswerClass.ASSUMED
    if predicted is not None:
        looked_up = answer.reads in (ClaimQuantity.CATALOGUE, ClaimQuantity.PRICE)
        counted = answer.reads is ClaimQuantity.SERVING and answer.value in COUNTED
        return AnswerClass.ARITHMETIC if looked_up or counted else AnswerClass.MODELLED
    return AnswerClass.MEASURED if measured is not None else AnswerClass.UNCHECKED


_REASONS = {
    "s65_17": "the document names neither encoder, index, size nor the other GPU; `bench ingest` measures the stages",
    "dive_01": "the document names neither the number of workers nor the machine's cores",
    "dive_02": "the document names neither the number of workers nor the machine's cores",
    "dive_04": "a rule of the benchmark, which the rules of MLPerf Training 5.1 in this package repeat",
}


def _rule(found: Claim) -> float | None:
    """A value of the rules of a benchmark, which the checker of logs holds submissions to."""
    if found.metric != "eval_sequences":
        return None
    from meshwright.mlperf.benchmarks import load_benchmark

    return float(load_benchmark("llama31_8b", round="5.1").evaluation.samples)


def _published(found: Claim, runs: list[PublishedRun]) -> str:
    """Rates of published runs with the model, device and format of the claim, from other sources."""
    if found.metric not in ("tokens_per_s_per_gpu", "throughput_ratio") or found.method != "pretrain":
        return ""

    def rates(accelerator: str) -> list[float]:
        return [
            r.tokens_per_s_per_device
            for r in runs
            if r.conditions is not None and r.tokens_per_s_per_device
            and r.source_key not in OWN_SOURCES
            and r.conditions.accelerator.name == accelerator.lower()
            and r.conditions.model.name == found.model
            and r.conditions.precision == found.precision
        ]  # fmt: skip

    parts = []
    for accelerator in dict.fromkeys((found.accelerator, found.baseline)):
        known = rates(accelerator)
        if known:
            parts.append(f"{accelerator}: {median(known):,.0f} tokens/s/GPU ({_runs(len(known))})")
    return "; ".join(parts)


def _runs(n: int) -> str:
    return f"median of {n} published runs" if n > 1 else "one published run"


def _slips(facts: Callable[[], dict[str, float]]) -> list[Slip]:
    known = facts()
    document = tomllib.loads((HERE / "slips.toml").read_text(encoding="utf-8"))
    return [
        Slip(
            number=number, key=row["key"], document=row["document"], printed=row["printed"],
            found=row["found"].format(**known), why=row["why"].format(**known), claims=tuple(row["claims"]),
        )
        for number, row in enumerate(document["slip"], start=1)
    ]  # fmt: skip


def _own_measurements() -> list[OwnMeasurement]:
    document = tomllib.loads((HERE / "measured.toml").read_text(encoding="utf-8"))
    return [OwnMeasurement(**{**row, "claims": tuple(row["claims"])}) for row in document.get("measurement", ())]
