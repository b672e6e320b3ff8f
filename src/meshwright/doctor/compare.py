"""Compare the reports of many nodes: find nodes that differ from the majority, and hosts to exclude.

fact      a value that most nodes share (driver, kernel, ...): more than half of the nodes that report it. A node that
          lacks a fact which more than half of all nodes have differs, too: it may have no device at all
measure   a number (GEMM rate, clock, ...): the worst device of a node against the median over the nodes
time      offset from network time: a node's clock against the median over the nodes
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.doctor.examine import REPORT, VERSION
from meshwright.doctor.verdict import DATA, CheckStatus, limits
from meshwright.errors import InputError
from meshwright.files import toml_table
from meshwright.json_values import load_json

EXCLUDE, LISTED = "exclude", "report"
CLOCK = "time.offset"
ABSENT = "not reported"


@dataclass(frozen=True, kw_only=True)
class Outlier:
    """One deviation of a node from the majority. `follows` is the consequence: exclude, or report."""

    host: str
    what: str
    value: float | str
    majority: float | str
    follows: str


@dataclass(frozen=True, kw_only=True)
class NodeComparison:
    """Comparison of all nodes. `undecided` are facts without a majority value, with the count of each value."""

    hosts: tuple[str, ...]
    failed: dict[str, tuple[str, ...]]  # host -> its own checks that failed
    outliers: tuple[Outlier, ...]
    undecided: dict[str, dict[str, int]]
    majority: dict[str, float | str]

    @property
    def exclude(self) -> tuple[str, ...]:
        """Hosts to exclude, in the order of the reports."""
        named = {o.host for o in self.outliers if o.follows == EXCLUDE} | set(self.failed)
        return tuple(host for host in self.hosts if host in named)


def read_report(path: Path) -> dict[str, Any]:
    """Read a document of `meshwright doctor --json`. Raises InputError when it is something else."""
    hint = "write one on each node with `meshwright doctor --json > REPORT.json`"
    try:
        document = load_json(path)
    except OSError as error:
        raise InputError(f"a report cannot be read: {error.strerror}", got=str(path), hint=hint) from None
    except ValueError:
        raise InputError("a report is not a JSON document", got=str(path), hint=hint) from None
    if not isinstance(document, dict) or document.get("report") != REPORT:
        raise InputError("this is not a report of a node", got=str(path), hint=hint)
    if document.get("version") != VERSION:
        raise InputError(
            "a report of another version", got=f"{path}: {document.get('version')}", allowed=VERSION, hint=hint
        )
    try:
        _ = document["host"], dict(document["facts"]), [(c["check"], c["status"]) for c in document["checks"]]
    except (KeyError, TypeError, ValueError):
        raise InputError("a report is incomplete", got=str(path), hint=hint) from None
    return document


def compare(reports: Sequence[dict[str, Any]]) -> NodeComparison:
    """Find outliers. Raises InputError for fewer than two nodes, or when one node reports twice."""
    hosts = [r["host"] for r in reports]
    if len(hosts) < 2:
        raise InputError("a comparison needs two nodes or more", got=len(hosts))
    twice = [host for host, count in Counter(hosts).items() if count > 1]
    if twice:
        raise InputError("one node has two reports", got=", ".join(twice))
    majority: dict[str, float | str] = {}
    undecided: dict[str, dict[str, int]] = {}
    outliers: list[Outlier] = []
    tables = toml_table(DATA / "compare.toml")
    for name, follows in tables["facts"].items():
        held = {r["host"]: r["facts"].get(name) for r in reports}
        outliers += _by_fact(name, held, follows, majority=majority, undecided=undecided)
    for check, shares in tables["measures"].items():
        worst = {r["host"]: low for r in reports if (low := _lowest(r, check)) is not None}
        outliers += _by_measure(check, worst, shares, majority=majority)
    offsets_s = {r["host"]: own_s for r in reports if (own_s := _lowest(r, CLOCK)) is not None}
    outliers += _by_clock(offsets_s, majority=majority)
    failed = {r["host"]: _failed(r) for r in reports}
    return NodeComparison(
        hosts=tuple(hosts),
        failed={host: checks for host, checks in failed.items() if checks},
        outliers=tuple(outliers),
        undecided=undecided,
        majority=majority,
    )


def _by_fact(
    name: str, held: dict[str, str | None], follows: str, *,
    majority: dict[str, float | str], undecided: dict[str, dict[str, int]],
) -> list[Outlier]:  # fmt: skip
    counts = Counter(own for own in held.values() if own is not None)
    if not counts:
        return []
    value, count = counts.most_common(1)[0]
    if 2 * count <= counts.total():
        undecided[name] = dict(counts)
        return []
    majority[name] = value
    is_usual = 2 * counts.total() > len(held)
    return [
        Outlier(host=host, what=name, value=ABSENT if own is None else own, majority=value, follows=follows)
        for host, own in held.items()
        if (is_usual if own is None else own != value)
    ]


def _by_measure(
    check: str, worst: dict[str, float], shares: dict[str, float], *, majority: dict[str, float | str]
) -> list[Outlier]:
    if len(worst) < 2:
        return []
    median = statistics.median(worst.values())
    majority[check] = median
    found = []
    for host, value in worst.items():
        if value < shares[LISTED] * median:
            follows = EXCLUDE if value < shares[EXCLUDE] * median else LISTED
            found.append(Outlier(host=host, what=check, value=value, majority=median, follows=follows))
    return found


def _by_clock(offsets_s: dict[str, float], *, majority: dict[str, float | str]) -> list[Outlier]:
    """Find clocks that differ from the others', of which each may be near network time."""
    if len(offsets_s) < 2:
        return []
    median_s = majority[CLOCK] = statistics.median(offsets_s.values())
    follows = {CheckStatus.WARN: LISTED, CheckStatus.FAIL: EXCLUDE}
    return [
        Outlier(host=host, what=CLOCK, value=own_s, majority=median_s, follows=follows[status])
        for host, own_s in offsets_s.items()
        if (status := limits()[CLOCK].status_of(own_s - median_s)) in follows
    ]


def _lowest(report: dict[str, Any], check: str) -> float | None:
    """Return the value of the worst device of a node."""
    values = [c.get("measured") for c in report["checks"] if c["check"] == check]
    return min((v for v in values if isinstance(v, int | float) and not isinstance(v, bool)), default=None)


def _failed(report: dict[str, Any]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(c["check"] for c in report["checks"] if c["status"] == "fail"))
