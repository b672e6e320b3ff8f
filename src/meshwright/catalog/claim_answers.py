"""Figures that others have published about their systems, and the answer to each claim.

A claim is predicted, reproduced, explained, used as input, or not yet answered, and never calibrated on.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cache
from shlex import quote

from meshwright.catalog.clusters import cluster
from meshwright.catalog.entries import DATA, by_name
from meshwright.errors import value_named
from meshwright.files import record_of, toml_table


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One published figure. Text fields are empty and counts None where the document does not say."""

    claim_id: str
    document: str  # title, publisher, date
    kind: str  # rate, time, ratio, efficiency, price, spec, plan, capacity, spread, rule
    model: str
    method: str  # pretrain, lora, ...
    precision: str
    accelerator: str
    num_accelerators: int | None
    num_nodes: int | None
    baseline: str  # what a ratio is against
    metric: str
    value: float
    unit: str
    conditions: str
    quote_or_note: str


@cache
def all_claims() -> tuple[Claim, ...]:
    """All claims, in the order of the documents."""
    with (DATA / "claims.csv").open(encoding="utf-8", newline="") as file:
        return tuple(_claim(row) for row in csv.DictReader(file))


@by_name
def claim(claim_id: str) -> Claim:
    """The claim `claim_id`; raises UnknownNameError."""
    return value_named("claim", claim_id, {c.claim_id: c for c in all_claims()})


def _claim(row: dict[str, str]) -> Claim:
    values: dict[str, object] = {f.name: row[f.name] for f in fields(Claim)}
    for count in ("num_accelerators", "num_nodes"):
        values[count] = int(row[count]) if row[count] else None
    return Claim(**{**values, "value": float(row["value"])})  # pyright: ignore[reportArgumentType]


_FILE = DATA / "claims_answers.toml"


class AnswerKind(StrEnum):
    """Treatment of a claim."""

    PREDICTED = "predicted"  # computed by the cost model
    REPRODUCED = "reproduced"  # by the catalogue's own value
    EXPLAINED = "explained"  # our value differs for a known reason
    INPUT = "input"  # an assumption, or solved for: agreement means nothing
    NOT_YET = "not-yet"  # a command to come will answer it


class ClaimQuantity(StrEnum):
    """Quantity of an answer that is compared with the claim."""

    RATE = "rate"  # tokens/s per device of `run`
    RATIO = "ratio"  # that of `run` over that of `against`
    FITS = "fits"  # 1 when a plan of `run` fits, 0 when none does
    EFFICIENCY = "efficiency"  # of the claim's number of devices, emulated on those of `run`
    DAYS = "days"  # of steps on the claim's devices, for what `run` trains in the days of claim `solved_by`
    SPEEDUP = "speedup"  # of the claim's number of devices against those of `run`
    CATALOGUE = "catalogue"  # a value of the accelerator
    SERVING = "serving"  # inference and its memory; `value` names what is computed
    PRICE = "price"  # of a rented node in the region `value`
    MINUTES = "minutes"  # mean score of the published MLPerf sets `sets`
    MINUTES_RATIO = "minutes-ratio"  # that of `against_sets` over that of `sets`, or over `solved_by`
    MINUTES_SPREAD = "minutes-spread"  # largest distance of `against_sets` from `sets`, relative


@dataclass(frozen=True, kw_only=True)
class ClaimRun:
    """Options of a command line that describe a run."""

    model: str
    cluster: str
    gbs: int  # sequences
    seq: int  # tokens
    precision: str
    engine: str
    fix: tuple[str, ...] = ()
    set: tuple[str, ...] = ()

    def options(self) -> str:
        """Return the options as they are typed."""
        arguments = ["--model", self.model, "--cluster", self.cluster, "--gbs", self.gbs, "--seq", self.seq]
        arguments += ["--precision", self.precision, "--engine", self.engine]
        arguments += [argument for fixed in self.fix for argument in ("--fix", fixed)]
        arguments += [argument for changed in self.set for argument in ("--set", changed)]
        return " ".join(quote(str(argument)) for argument in arguments)


@dataclass(frozen=True, kw_only=True)
class ClaimAnswer:
    """Treatment of one claim: the commands that compute it and the assumptions they need."""

    kind: AnswerKind
    commands: tuple[str, ...] = ()
    reads: ClaimQuantity | None = None
    run: ClaimRun | None = None
    against: ClaimRun | None = None
    value: str = ""  # CATALOGUE: path of the value; SERVING: what is computed; PRICE: region
    solved_by: str = ""  # DAYS: the claim that the length of the training is solved for
    sets: tuple[str, ...] = ()  # published MLPerf results
    against_sets: tuple[str, ...] = ()
    within: float = 0.0  # half of the last printed digit
    assumed: str = ""


def claim_answer(found: Claim) -> ClaimAnswer:
    """The answer to a claim; every claim has one."""
    row = toml_table(_FILE)["answers"][found.claim_id]
    runs = {key: _runs()[row[key]] for key in ("run", "against") if key in row}
    answer = record_of(ClaimAnswer, row, **runs)
    return answer if answer.commands else replace(answer, commands=_commands(found, answer))


@cache
def _runs() -> dict[str, ClaimRun]:
    return {name: record_of(ClaimRun, options) for name, options in toml_table(_FILE)["runs"].items()}


def _commands(found: Claim, answer: ClaimAnswer) -> tuple[str, ...]:
    """The commands that compute what `answer` reads."""
    run = answer.run
    if run is None:
        return (f"meshwright catalog accelerators {found.accelerator.lower()}",)
    asked = [run] if answer.against is None else [run, answer.against]
    if answer.reads in (ClaimQuantity.RATE, ClaimQuantity.RATIO, ClaimQuantity.FITS):
        return tuple(f"meshwright plan {a.options()} --top 1" for a in asked)
    base = cluster(run.cluster).num_devices
    if answer.reads is ClaimQuantity.EFFICIENCY:
        return (f"meshwright scale {run.options()} --emulate {base} --devices {found.num_accelerators}",)
    days = f" --days {claim(answer.solved_by).value:g}" if answer.solved_by else ""
    return (f"meshwright scale {run.options()} --devices {base},{found.num_accelerators}{days}",)
