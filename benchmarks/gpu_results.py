"""Results in an archive of `benchmarks/gpu.py` as tables, and the best order of the routes of a kernel.

    results = read_results(folder)      an unpacked archive
    results.tables()                    measurements, routes beside rivals, steps beside other engines and predictions
    best_orders(results.calls)          for each operation the routes by preference, as in `kernels/data/defaults.toml`

A route's rivals are PyTorch eager (`reference`), `torch.compile` of the same (`compile`) and Liger. Imports no PyTorch.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from html import escape
from itertools import permutations
from pathlib import Path
from typing import Any

from meshwright.answers.quantities import percent
from meshwright.answers.text_table import TextTable
from meshwright.bench.training_summary import Summary, contests, summaries
from meshwright.errors import InputError
from meshwright.kernels.operations import OPERATIONS, TRITON
from meshwright.records import kernel_routes, trainings
from meshwright.records.kernel_routes import ROUNDING_FACTOR, TimedRoute
from meshwright.report.training_sweep import speed_table, use_table
from meshwright.units import format_seconds

RECORD = "gpu.json"
REFERENCE, COMPILED, LIGER = "reference", "compile", "liger"
RIVALS = {REFERENCE: "PyTorch", COMPILED: "torch.compile", LIGER: "Liger"}
NAME = re.compile(r"[\w.-]+")
DEVICE_NAME = re.compile(r"[\w .,()+/@:-]{1,100}")
ARCHITECTURE = re.compile(r"sm\d+|gfx[0-9a-f]+")
CPU = "cpu"
MOST_S = 1e9
"""Allowed in the name of a measurement, of a device, and of an architecture; most seconds of a measurement."""
TIMES = "A rival's time is a multiple of that of our default, forward and backward together: above 1 it is slower."
CALLS = "Calls beside their rivals"


@dataclass(frozen=True, kw_only=True)
class RoutedCall:
    """One call of an operation with the routes that were measured on it, and the reasons of those that were not.

    `limit`: largest error that a route may have; None: the call was not checked.
    """

    op: str
    name: str
    routes: Mapping[str, TimedRoute]
    reasons: Mapping[str, str]
    failures: frozenset[str]
    limit: float | None

    @property
    def default(self) -> TimedRoute | None:
        """The route that was the default when it was measured."""
        return next((r for r in self.routes.values() if r.is_default), None)

    @cached_property
    def passes(self) -> bool:
        """True if a forward and backward pass of the call were measured, by any route."""
        return any(route.backward_s is not None for route in self.routes.values())

    def is_exact(self, name: str) -> bool:
        """Return True if a measured route rounds about as the reference does, and was measured in all passes."""
        route = self.routes[name]
        has_passes = not self.passes or route.backward_s is not None
        return has_passes and (self.limit is None or (route.error is not None and route.error <= self.limit))

    @cached_property
    def able(self) -> dict[str, float]:
        """Seconds of the dispatcher's routes that are exact."""
        return {
            name: route.seconds
            for name, route in self.routes.items()
            if name in OPERATIONS[self.op].routes and self.is_exact(name)
        }

    @property
    def wrong(self) -> set[str]:
        """Routes of the dispatcher that served the call and failed, or are not exact."""
        found = {*self.failures, *(name for name in self.routes if not self.is_exact(name))}
        return found & {*OPERATIONS[self.op].routes}

    def ratio(self, rival: str) -> float | None:
        """Seconds of a rival over those of the default; None where either was not measured in all passes."""
        if self.default is None or rival not in self.routes:
            return None
        pair = (self.default, self.routes[rival])
        if self.passes and any(route.backward_s is None for route in pair):
            return None
        return pair[1].seconds / pair[0].seconds


@dataclass(frozen=True, kw_only=True)
class GpuResults:
    """Results of one device, as they lie in a folder."""

    folder: Path
    measurements: Sequence[Mapping[str, Any]]
    calls: Sequence[RoutedCall]
    steps: Mapping[str, Sequence[Summary]]  # by measurement
    command: str

    @property
    def device(self) -> Mapping[str, Any]:
        return self.measurements[-1]["device"]

    @property
    def is_dry_run(self) -> bool:
        return any(row.get("dry_run") for row in self.measurements)

    @property
    def architecture(self) -> str | None:
        """Name of the device's architecture, as the kernels have it; None in an archive of an older version."""
        return self.device.get("architecture")

    @property
    def software(self) -> Mapping[str, str]:
        return self.measurements[-1]["software"]

    @property
    def date(self) -> str:
        """Day of the last measurement."""
        return max(row["started"] for row in self.measurements)[:10]

    @property
    def conditions(self) -> str:
        """Device, software, date and command in one sentence."""
        versions = ", ".join(f"{name} {version}" for name, version in self.software.items())
        return f"{self.device['name']}, {self.date}; {versions}. Command: `{self.command}`."

    def tables(self) -> Iterator[TextTable]:
        """All tables, without those that have no row."""
        made = (
            self.measured_table(),
            self.routes_table(),
            self.calls_table(),
            *self._step_tables(),
            self.parity_table(),
        )
        return (table for table in made if table.rows)

    def measured_table(self) -> TextTable:
        """Table of what was done, what failed and why."""
        rows = []
        for row in self.measurements:
            code = row["exit_code"]
            result = "done" if code == 0 else code if isinstance(code, str) else f"failed with {code}"
            reason = next((line for line in reversed(row["stderr"]) if line.strip()), "")
            rows.append(
                (row["name"], result, f"{row['wall_s']:.0f} s", row["started"][:16], " ".join(reason.split())[:300])
            )
        return TextTable(
            title="Measurements", headings=("measurement", "result", "took", "started (UTC)", "why"), rows=rows,
            text_columns=("result", "started (UTC)", "why"),
        )  # fmt: skip

    def routes_table(self) -> TextTable:
        """Each operation over all of its calls: our default beside its rivals."""
        rows = []
        for op, calls in by_operation(self.calls).items():
            ratios = {rival: [r for c in calls if (r := c.ratio(rival)) is not None] for rival in RIVALS}
            shares = [c.default.roofline_ratio for c in calls if c.default and c.default.roofline_ratio]
            defaults = dict.fromkeys(c.default.route for c in calls if c.default is not None)
            rows.append(
                (op, ", ".join(defaults), len(calls), percent(geometric_mean(shares)) if shares else "",
                 *(_times(found) for found in ratios.values()))
            )  # fmt: skip
        return TextTable(
            title="Operations beside their rivals",
            headings=("operation", "default", "calls", "of the roofline", *RIVALS.values()), rows=rows,
            text_columns=("default",), caption=f"Geometric means over calls, and their range. {TIMES}",
        )  # fmt: skip

    def calls_table(self) -> TextTable:
        """Each call: our default beside its rivals, its error, and the fastest route."""
        rows = []
        for call in self.calls:
            default = call.default
            fastest = min(call.routes.values(), key=lambda r: r.seconds, default=None)
            rows.append(
                (
                    call.name,
                    "" if default is None else default.route,
                    "" if default is None else format_seconds(default.seconds),
                    "" if default is None or default.roofline_ratio is None else percent(default.roofline_ratio),
                    "" if default is None or default.error is None else f"{default.error:.1e}",
                    *("" if (r := call.ratio(rival)) is None else f"{r:.2f}" for rival in RIVALS),
                    "" if fastest is None else fastest.route,
                    "; ".join(f"{name}: {reason}" for name, reason in call.reasons.items()),
                )
            )
        return TextTable(
            title=CALLS,
            headings=(
                "call", "default", "time", "of the roofline", "error", *RIVALS.values(), "fastest", "not measured",
            ),
            rows=rows, text_columns=("default", "fastest", "not measured"), caption=TIMES,
        )  # fmt: skip

    def _step_tables(self) -> Iterator[TextTable]:
        named = [_renamed(s, name) for name, found in self.steps.items() for s in found]
        if any(s.is_measured for s in named):
            yield speed_table(named)
            yield use_table(named)

    def parity_table(self) -> TextTable:
        """Losses of other engines beside those of the first, step by step."""
        rows = []
        for name, found in self.steps.items():
            for contest in contests(found):
                losses = {engine: self._losses(name, s) for engine, s in contest.measured.items()}
                first = next(iter(losses), "")
                for engine, others in list(losses.items())[1:]:
                    pairs = [(losses[first][step], others[step]) for step in losses[first] if step in others]
                    pairs = [(a, b) for a, b in pairs if a]
                    if pairs:
                        most = max(abs(b - a) / abs(a) for a, b in pairs)
                        rate = contest.ratios[engine]
                        rows.append(
                            (
                                f"{name}: {contest.name}",
                                f"{engine} beside {first}",
                                len(pairs),
                                f"{most:.1e}",
                                f"{rate:.2f}",
                            )
                        )
        return TextTable(
            title="Engines beside each other",
            headings=("run", "engines", "steps", "largest difference of losses", "tokens/s"), rows=rows,
            text_columns=("engines",),
            caption="Differences are relative, step by step. Tokens/s are multiples of those of the second named.",
        )  # fmt: skip

    def _losses(self, name: str, found: Summary) -> dict[int, float]:
        """Loss of each step of the first run; none where its step log is not there."""
        path = (self.folder / name / found.rows[0].folder / "steps.jsonl").resolve()
        if not path.is_relative_to(self.folder.resolve()):
            return {}
        try:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            return {int(row["step"]): float(row["loss"]) for row in rows if "loss" in row}
        except (OSError, ValueError, KeyError, TypeError):
            return {}


def read_results(folder: Path, *, source: str = "") -> GpuResults:
    """Read an unpacked archive; `source` is its name for messages.

    Raises InputError where it has no measurement, measurements of several devices, or a damaged record.
    """
    source = source or str(folder)
    try:
        document = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        measurements = list(document["measurements"])
        command = str(document["command"])
        if not all(_is_measurement(row) for row in measurements):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(f"no {RECORD} that can be read", got=source, allowed="a file of --archive") from None
    if not measurements:
        raise InputError("nothing was measured", got=source, hint="run benchmarks/gpu.py first")
    devices = dict.fromkeys((row["device"]["name"], row["device"].get("architecture")) for row in measurements)
    if len(devices) > 1:
        names = "; ".join(f"{name} ({architecture})" for name, architecture in devices)
        raise InputError("measurements of several devices", got=names, allowed="an archive for each device")
    device = measurements[-1]["device"]
    names = [row["name"] for row in measurements]
    routes: list[TimedRoute] = []
    steps: dict[str, Sequence[Summary]] = {}
    for name in names:
        if (folder / name / kernel_routes.NAME).is_file():
            read = kernel_routes.read_kernel_routes(folder / name)
            _require_device(read.document["device"], device, where=f"{name}/{kernel_routes.NAME}")
            routes += read.rows
        if (folder / name / trainings.CSV_NAME).is_file():
            found = trainings.read(folder / name / trainings.CSV_NAME, whole=False)
            _require_device(found.sidecar["device"], device, where=f"{name}/{trainings.SIDECAR_NAME}")
            steps[name] = summaries(found.rows, names=list(found.sidecar["configurations"]))
            if any(not (row.step_s_median and row.mfu is not None) for s in steps[name] for row in s.rows):
                raise InputError(
                    f"{name}/{trainings.CSV_NAME}: a training that succeeded has no step time or MFU", got=source
                )
    return GpuResults(
        folder=folder, measurements=measurements, calls=_calls(routes), steps=steps, command=plain(command)
    )


def _is_measurement(row: Any) -> bool:
    device = row["device"]
    architecture = device.get("architecture")
    fits = ARCHITECTURE.fullmatch(architecture) if device.get("type") == "cuda" and architecture else True
    is_cpu = architecture in (None, CPU) or device.get("type") == "cuda"
    return bool(
        NAME.fullmatch(row["name"])
        and row["name"].strip(".")
        and datetime.fromisoformat(row["started"])
        and 0 <= float(row["wall_s"]) < MOST_S
        and isinstance(row["exit_code"], int | str)
        and all(isinstance(line, str) for line in row["stderr"])
        and DEVICE_NAME.fullmatch(device["name"])
        and fits
        and is_cpu
        and all(isinstance(text, str) for item in row["software"].items() for text in item)
    )


def _require_device(stated: Any, device: Mapping[str, Any], *, where: str) -> None:
    """Raise InputError where a record is of another GPU than the archive."""
    name = stated.get("name") if isinstance(stated, Mapping) else None
    if device.get("type") == "cuda" and name is not None and name != device["name"]:
        raise InputError(f"{where} is of another device", got=name, allowed=str(device["name"]))


def plain(text: str) -> str:
    """Return text on one line that means nothing to Markdown or HTML.

    >>> plain("a  <b>\\n`c`")
    "a &lt;b&gt; 'c'"
    """
    return escape(" ".join(text.split()), quote=False).replace("`", "'")


def _calls(rows: Sequence[TimedRoute]) -> list[RoutedCall]:
    """Rows by call. Operations that this version has not are passed over.

    Without an error of the reference, the largest limit of the operation in this format is that of the call.
    """
    groups = defaultdict[str, dict[str, TimedRoute]](dict)
    for row in rows:
        if row.op in OPERATIONS:
            groups[row.call].setdefault(row.route, row)
    own = {
        name: ROUNDING_FACTOR * max(found[REFERENCE].error or 0.0, 1e-9)
        for name, found in groups.items()
        if REFERENCE in found and found[REFERENCE].error is not None
    }
    of_others = defaultdict[tuple[str, str], float](float)
    for name, limit in own.items():
        key = groups[name][REFERENCE].op, groups[name][REFERENCE].format
        of_others[key] = max(of_others[key], limit)
    made = []
    for name, found in groups.items():
        first = next(iter(found.values()))
        is_checked = any(row.error is not None for row in found.values())
        limit = own.get(name, of_others[first.op, first.format] if is_checked else None)
        made.append(
            RoutedCall(
                op=first.op, name=name, limit=limit,
                routes={r.route: r for r in found.values() if r.forward_s is not None},
                reasons={r.route: r.reason for r in found.values() if r.forward_s is None},
                failures=frozenset(r.route for r in found.values() if r.is_failure),
            )
        )  # fmt: skip
    return made


def by_operation(calls: Sequence[RoutedCall]) -> dict[str, list[RoutedCall]]:
    """Calls of each operation that was measured, in the order of the operations."""
    groups = {op: [c for c in calls if c.op == op and c.routes] for op in OPERATIONS}
    return {op: found for op, found in groups.items() if found}


def best_order(calls: Sequence[RoutedCall], *, before: Sequence[str]) -> list[str]:
    """Return the routes of one operation by preference: the first that can serve a call is the one that it gets.

    The best order has the least geometric mean, over the calls, of the time of a call's route over the time of its
    fastest one. Among equal orders the one nearest to `before` wins, which was the order until now. The reference is
    last and serves every call that no other route does. An order that leaves it a call on which it failed comes after
    all others. Three kinds of routes have no place: those that failed on a call, those whose error is too large, and
    those that no call gets and that are slower than the reference. Routes of `before` that no call measured stay,
    unless a call gets the reference.
    """
    measured = {name for call in calls for name in call.able}
    wrong = {name for call in calls for name in call.wrong}
    rank = {name: place for place, name in enumerate(before)}
    candidates = sorted(measured - wrong - {REFERENCE}, key=lambda name: rank.get(name, len(before)))

    def served(order: Sequence[str], call: RoutedCall) -> str:
        return next((name for name in order if name in call.able), REFERENCE)

    def cost(order: Sequence[str]) -> float:
        logs = []
        for call in calls:
            got = served(order, call)
            fastest = min((s for name, s in call.able.items() if name not in wrong - {REFERENCE}), default=0.0)
            logs.append(math.log(call.able[got] / fastest) if got in call.able else math.inf)
        return round(sum(logs) / max(1, len(logs)), 9)

    orders = (order for size in range(len(candidates), -1, -1) for order in permutations(candidates, size))
    best = min(orders, key=cost)  # the first of the best ones: with all candidates, and in the order of before
    taken = {served(best, call) for call in calls}
    kept = [name for name in best if name in taken or not _is_slower(name, calls)]
    rest = [name for name in before if name not in measured | wrong | {REFERENCE}]
    return [*kept, *([] if REFERENCE in taken else rest), REFERENCE]


def _is_slower(name: str, calls: Sequence[RoutedCall]) -> bool:
    """Return True if a route takes longer than the reference over the calls on which both were measured."""
    ratios = [c.able[name] / c.able[REFERENCE] for c in calls if name in c.able and REFERENCE in c.able]
    return bool(ratios) and geometric_mean(ratios) > 1


def best_orders(calls: Sequence[RoutedCall], *, before: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """`best_order` of every operation of which several routes of the dispatcher were measured, or one failed."""
    return {
        op: best_order(found, before=before.get(op, ()))
        for op, found in by_operation(calls).items()
        if any(len(call.able) > 1 or call.wrong for call in found) and any(call.able for call in found)
    }


def compiled_operations(calls: Sequence[RoutedCall], *, orders: Mapping[str, Sequence[str]]) -> list[str]:
    """Return operations whose reference, compiled, is faster than the routes that the calls get: on all, and exact."""
    found = []
    for op, order in orders.items():
        ratios = []
        for call in by_operation(calls)[op]:
            got = next((name for name in order if name in call.able), None)
            if got is None or COMPILED not in call.routes or not call.is_exact(COMPILED):
                ratios = []
                break
            ratios.append(call.routes[COMPILED].seconds / call.able[got])
        if ratios and geometric_mean(ratios) < 1:
            found.append(op)
    return found


def never_chosen(
    before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]
) -> list[tuple[str, str]]:
    """Return operations whose Triton kernels an architecture chose before and none does now, with their modules.

    A module that also has kernels of an operation that some architecture chooses is not among them.
    """

    def chosen(tables: Mapping[str, Mapping[str, Any]]) -> set[str]:
        return {op for op in OPERATIONS for table in tables.values() if TRITON in table.get(op, ())}

    used = {OPERATIONS[op].kernels for op in chosen(after)}
    gone = [op for op in OPERATIONS if op in chosen(before) - chosen(after)]
    return [(op, str(OPERATIONS[op].kernels)) for op in gone if OPERATIONS[op].kernels not in used]


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of positive numbers."""
    return math.exp(sum(map(math.log, values)) / len(values))


def _times(ratios: Sequence[float]) -> str:
    if not ratios:
        return ""
    return f"{geometric_mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _renamed(found: Summary, measurement: str) -> Summary:
    return Summary(name=f"{measurement}: {found.name}", rows=found.rows, failures=found.failures)
