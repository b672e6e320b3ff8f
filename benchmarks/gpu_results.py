"""Results in an archive of `benchmarks/gpu.py` as tables, and the best order of the routes of a kernel.

    results = read_results(folder)      an unpacked archive
    results.tables()                    measurements, routes beside rivals, steps beside other engines and predictions
    best_orders(results.calls)          for each operation the routes by preference, as in `kernels/data/defaults.toml`

A route's rivals are PyTorch eager (`reference`), `torch.compile` of the same (`compile`) and Liger. Imports no PyTorch.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from pathlib import Path
from typing import Any

from meshwright.bench.training_summary import Summary, contests, summaries
from meshwright.errors import InputError
from meshwright.kernels.operations import OPERATIONS, TRITON
from meshwright.records import kernel_routes, trainings
from meshwright.records.kernel_routes import TimedRoute
from meshwright.report.quantities import percent
from meshwright.report.text_table import TextTable
from meshwright.report.training_sweep import speed_table, use_table
from meshwright.units import format_seconds

RECORD = "gpu.json"
REFERENCE, COMPILED, LIGER = "reference", "compile", "liger"
RIVALS = {REFERENCE: "PyTorch", COMPILED: "torch.compile", LIGER: "Liger"}
ROUNDING_FACTOR = 2.0
"""Largest error of a route over that of the reference; `meshwright bench kernels` has the same rule."""
TIMES = "A rival's time is a multiple of that of our default, forward and backward together: above 1 it is slower."
CALLS = "Calls beside their rivals"


@dataclass(frozen=True, kw_only=True)
class RoutedCall:
    """One call of an operation with the routes that were measured on it, and the reasons of those that were not."""

    op: str
    name: str
    routes: Mapping[str, TimedRoute]
    reasons: Mapping[str, str]

    @property
    def default(self) -> TimedRoute | None:
        """The route that was the default when it was measured."""
        return next((r for r in self.routes.values() if r.is_default), None)

    @cached_property
    def able(self) -> dict[str, float]:
        """Seconds of the dispatcher's routes that round about as the reference does."""
        reference = self.routes.get(REFERENCE)
        limit = (
            None
            if reference is None or reference.error is None
            else ROUNDING_FACTOR * max(reference.error, 1e-9)
        )
        return {
            name: route.seconds
            for name, route in self.routes.items()
            if name in OPERATIONS[self.op].routes
            and (limit is None or route.error is None or route.error <= limit)
        }

    def ratio(self, rival: str) -> float | None:
        """Seconds of a rival over those of the default; None where either was not measured."""
        if self.default is None or rival not in self.routes:
            return None
        return self.routes[rival].seconds / self.default.seconds


@dataclass(frozen=True, kw_only=True)
class GpuResults:
    """Results of one device, as they lie in a folder."""

    folder: Path
    measurements: Sequence[Mapping[str, Any]]
    calls: Sequence[RoutedCall]
    steps: Mapping[str, Sequence[Summary]]  # by measurement
    is_dry_run: bool
    command: str

    @property
    def device(self) -> Mapping[str, Any]:
        return self.measurements[-1]["device"]

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

    @property
    def succeeded(self) -> list[str]:
        return [row["name"] for row in self.measurements if row["exit_code"] == 0]

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
            rows.append((row["name"], result, f"{row['wall_s']:.0f} s", row["started"][:16], reason[:300]))
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
                    ""
                    if default is None or default.roofline_ratio is None
                    else percent(default.roofline_ratio),
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
                first = next(iter(losses), None)
                for engine, others in list(losses.items())[1:]:
                    pairs = list(zip(losses[str(first)], others, strict=False))
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

    def _losses(self, name: str, found: Summary) -> list[float]:
        """Losses of the first run, a line each; none where its step log is not there."""
        path = self.folder / name / found.rows[0].folder / "steps.jsonl"
        try:
            return [float(json.loads(line)["loss"]) for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError, KeyError, TypeError):
            return []


def read_results(folder: Path) -> GpuResults:
    """Read an unpacked archive. Raises InputError where it has no measurement, or a damaged record."""
    try:
        document = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        measurements = list(document["measurements"])
        command = str(document["command"])
        if not all(_is_measurement(row) for row in measurements):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(
            f"no {RECORD} that can be read", got=str(folder), allowed="a file of --archive"
        ) from None
    if not measurements:
        raise InputError("nothing was measured", got=str(folder), hint="run benchmarks/gpu.py first")
    names = [row["name"] for row in measurements]
    routes = [
        route
        for name in names
        if (folder / name / kernel_routes.NAME).is_file()
        for route in kernel_routes.read_kernel_routes(folder / name).rows
    ]
    steps = {}
    for name in names:
        path = folder / name / trainings.CSV_NAME
        if path.is_file():
            found = trainings.read(path, whole=False)
            steps[name] = summaries(found.rows, names=list(found.sidecar["configurations"]))
    return GpuResults(
        folder=folder, measurements=measurements, calls=_calls(routes), steps=steps,
        is_dry_run=bool(document.get("dry_run")), command=command,
    )  # fmt: skip


def _is_measurement(row: Any) -> bool:
    return (
        isinstance(row["name"], str)
        and isinstance(row["started"], str)
        and isinstance(row["wall_s"], int | float)
        and isinstance(row["exit_code"], int | str)
        and isinstance(row["stderr"], list)
        and isinstance(row["device"]["name"], str)
        and isinstance(row["software"], dict)
    )


def _calls(rows: Sequence[TimedRoute]) -> list[RoutedCall]:
    """Rows by call. Operations and routes that this version has not are passed over."""
    groups = defaultdict[str, list[TimedRoute]](list)
    for row in rows:
        if row.op in OPERATIONS:
            groups[row.call].append(row)
    return [
        RoutedCall(
            op=found[0].op, name=name,
            routes={r.route: r for r in found if r.forward_s is not None},
            reasons={r.route: r.reason for r in found if r.forward_s is None},
        )
        for name, found in groups.items()
    ]  # fmt: skip


def by_operation(calls: Sequence[RoutedCall]) -> dict[str, list[RoutedCall]]:
    """Calls of each operation that was measured, in the order of the operations."""
    groups = {op: [c for c in calls if c.op == op and c.routes] for op in OPERATIONS}
    return {op: found for op, found in groups.items() if found}


def best_order(calls: Sequence[RoutedCall], *, before: Sequence[str]) -> list[str]:
    """Return the routes of one operation by preference: the first that can serve a call is the one that it gets.

    Of all orders of the measured routes it is the one with the least geometric mean, over the calls, of the time of the
    route that a call gets over that of its fastest route. Where several are as good, the one that is nearest to
    `before`, which was the order until now. Routes of `before` that were not measured follow, then the reference,
    which serves every call. A route that no call would get, and one whose error is too large on a call, has no place.
    """
    measured = {name for call in calls for name in call.able}
    wrong = {name for call in calls for name in call.routes if name not in call.able}
    rank = {name: place for place, name in enumerate(before)}
    candidates = sorted(measured - wrong, key=lambda name: rank.get(name, len(before)))

    def cost(order: tuple[str, ...]) -> float:
        logs = []
        for call in calls:
            got = next((name for name in order if name in call.able), None)
            if got is not None:
                logs.append(math.log(call.able[got] / min(s for n, s in call.able.items() if n not in wrong)))
        return round(sum(logs) / max(1, len(logs)), 9)

    best = min(
        permutations(candidates), key=cost
    )  # the first of the best ones: permutations begin with `before`
    taken = best[: best.index(REFERENCE)] if REFERENCE in best else best  # the reference serves every call
    rest = [name for name in before if name not in measured | wrong and name != REFERENCE]
    return [*taken, *rest, REFERENCE]


def best_orders(calls: Sequence[RoutedCall], *, before: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """`best_order` of every operation that was measured."""
    return {op: best_order(found, before=before.get(op, ())) for op, found in by_operation(calls).items()}


def compiled_operations(calls: Sequence[RoutedCall], *, orders: Mapping[str, Sequence[str]]) -> list[str]:
    """Return operations whose reference, compiled, is faster over all calls than the routes that the calls get."""
    found = []
    for op, group in by_operation(calls).items():
        ratios = [
            call.routes[COMPILED].seconds / call.able[got]
            for call in group
            if COMPILED in call.routes and (got := next((n for n in orders[op] if n in call.able), None))
        ]
        if ratios and geometric_mean(ratios) < 1:
            found.append(op)
    return found


def never_chosen(defaults: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return (operation, route) of our own Triton kernels that no architecture has among its routes."""
    return [
        (op, TRITON)
        for op, operation in OPERATIONS.items()
        if TRITON in operation.routes and not any(TRITON in table.get(op, ()) for table in defaults.values())
    ]


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of positive numbers."""
    return math.exp(sum(map(math.log, values)) / len(values))


def _times(ratios: Sequence[float]) -> str:
    if not ratios:
        return ""
    return f"{geometric_mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _renamed(found: Summary, measurement: str) -> Summary:
    return Summary(name=f"{measurement}: {found.name}", rows=found.rows, failures=found.failures)
