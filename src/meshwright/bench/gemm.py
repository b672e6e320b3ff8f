"""Tuning of a run's GEMMs: try all choices, confirm the best of them, keep what is faster (docs/guides/tune-a-run.md).

One round runs every GEMM in every way, each sample long enough for the clock. A ratio compares samples of one round, so
a disturbance that is longer than a round affects both sides. Formats and the precision of fp32 GEMMs are never changed,
because that would change the results.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from meshwright.bench.harness import LEAST_SAMPLE_S, MAX_CALLS, rounds
from meshwright.bench.kernels import task_of
from meshwright.errors import InputError
from meshwright.kernels.linear import BY_ROUTE, COPYING_ROUTES, GemmKind, GemmRoute, default_route, matmul_nt, routes_of
from meshwright.records.measurement import Measurement
from meshwright.records.points import Point, PointFamily
from meshwright.training import device as devices
from meshwright.training.gemm_tuning import LIBRARIES, GemmChoices, tuned_kernels, tuning_kernels, using
from meshwright.training.step_gemms import Gemm

LEAST_ROUNDS, MAX_ROUNDS = 3, 60
LEAST_CONFIRMED = 8
"""Least number of rounds to confirm a choice. All of them are faster by chance once in 256."""

TRY_SHARE = 0.5  # of the budget
MEMORY_SHARE = 0.4  # of the device's memory, limit for all operands
MAX_TUNING_MS = 30
"""Time of TunableOp for one kernel of one GEMM: its own default."""
SHORTEST_CALL_S = 1e-7

ROUNDING_FACTOR = 2.0
"""Largest rounding error of a route, relative to the default's; two correct summations differ by this factor."""

CHECKED_ROWS = 64
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Call = Callable[[], object]
Advance = Callable[[float], None]


@dataclass(frozen=True, kw_only=True)
class GemmRow:
    """One GEMM, before and after tuning."""

    gemm: Gemm
    count: int  # in a step
    before_s: Measurement
    after_s: Measurement
    ratio: Measurement  # after over before, round by round
    route: GemmRoute | None  # None: the default


@dataclass(frozen=True, kw_only=True)
class GemmOutcome:
    """Result of the tuning. `choices` has the default where no choice was faster."""

    choices: GemmChoices
    rows: tuple[GemmRow, ...]
    before_s: Measurement  # all GEMMs of a step
    after_s: Measurement
    ratio: Measurement
    tried: tuple[str, ...]  # descriptions
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Work:
    """The GEMMs of a step with their operands, ready to run."""

    counts: Mapping[Gemm, int]
    calls: Mapping[Gemm, Call]
    device: torch.device
    repeats: dict[Gemm, int] = field(default_factory=dict)  # calls of a sample

    def sample_s(self, p: Gemm) -> float:
        """Seconds of one call."""
        if p not in self.repeats:  # the first call picks kernels, the second gives the time of one call
            self._timed(p, 1)
            once_s = self._timed(p, 1)
            self.repeats[p] = min(MAX_CALLS, max(1, round(LEAST_SAMPLE_S / max(once_s, SHORTEST_CALL_S))))
        elif self.repeats[p] > 1:
            self.calls[p]()  # warm-up after a change of threads or route
        return self._timed(p, self.repeats[p]) / self.repeats[p]

    def _timed(self, p: Gemm, calls: int) -> float:
        devices.synchronize(self.device)
        start_s = time.perf_counter()
        for _ in range(calls):
            self.calls[p]()
        devices.synchronize(self.device)
        return time.perf_counter() - start_s

    def step_s(self, seconds: Mapping[Gemm, float]) -> float:
        """Seconds of all GEMMs of a step."""
        return sum(self.counts[p] * seconds[p] for p in self.counts)


def tune(
    counts: Mapping[Gemm, int],
    *,
    device: torch.device,
    budget_s: float,
    with_routes: bool = True,
    most_threads: int | None = None,
    advance: Advance = lambda seconds: None,
) -> GemmOutcome:
    """Find the fastest choices for GEMMs that a step runs `counts` times.

    `with_routes`: the run can use routes on a CPU. `most_threads`: largest number of threads of a process; None leaves
    it unchanged. Raises InputError where the operands do not fit the memory.
    """
    work = _work(counts, device)
    begin_s = time.perf_counter()
    tried, notes = [], []
    shared = _process_wide(work, most_threads=most_threads, budget_s=budget_s * TRY_SHARE / 2, tried=tried, notes=notes)
    advance(time.perf_counter() - begin_s)
    routes: dict[Gemm, GemmRoute] = {}
    if device.type == "cpu" and with_routes:
        before_s = time.perf_counter()
        routes = _best_routes(work, shared, budget_s=budget_s * TRY_SHARE / 2, tried=tried)
        advance(time.perf_counter() - before_s)
    left_s = budget_s - (time.perf_counter() - begin_s)
    return _confirmed(work, shared, routes, budget_s=left_s, tried=tried, notes=notes, advance=advance)


# --- the work ---


def _work(counts: Mapping[Gemm, int], device: torch.device) -> _Work:
    needed = sum(2 * (p.m * p.k + p.n * p.k + p.m * p.n) * (2 if p.format == "fp32" else 1) for p in counts)
    if needed > MEMORY_SHARE * devices.memory_bytes(device):
        raise InputError("the operands of all GEMMs do not fit the memory", hint="--set batch.micro=1")
    return _Work(counts=counts, calls={p: _call(p, device) for p in counts}, device=device)


def _call(p: Gemm, device: torch.device) -> Call:
    if p.format == "fp8":
        m, n, k = p.shape
        return task_of(Point(family=PointFamily.GEMM, kernel=p.kernel.value, format="fp8", m=m, n=n, k=k), device).run
    x, y = _operands(p, device)
    return lambda: matmul_nt(x, y)


def _operands(p: Gemm, device: torch.device) -> tuple[Tensor, Tensor]:
    """Operands of `matmul_nt` from a linear layer of m rows, n outputs and k inputs."""
    like = {"dtype": DTYPES[p.format], "device": device}

    def random(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, **like)

    match p.kernel:
        case GemmKind.FORWARD:
            return random(p.m, p.k), random(p.n, p.k)
        case GemmKind.INPUT_GRADIENT:
            return random(p.m, p.n), random(p.n, p.k).T
        case _:
            return random(p.m, p.n).T, random(p.m, p.k).T


# --- try ---


def _process_wide(
    work: _Work, *, most_threads: int | None, budget_s: float, tried: list[str], notes: list[str]
) -> GemmChoices:
    """The settings of the whole process with the fastest GEMMs of a step, before confirmation."""
    candidates = _settings(work, most_threads, tried, notes)
    if len(candidates) == 1:
        return candidates[0]

    def step_s() -> float:
        return work.step_s({p: work.sample_s(p) for p in work.counts})

    return candidates[_fastest(candidates, step_s, device=work.device, budget_s=budget_s)]


def _fastest(ways: Sequence[GemmChoices], sample: Callable[[], float], *, device: torch.device, budget_s: float) -> int:
    """Number of the choices whose samples have the least median."""
    taken: list[list[float]] = [[] for _ in ways]
    for number in rounds(least=LEAST_ROUNDS, most=MAX_ROUNDS, budget_s=budget_s):
        for samples, choices in zip(taken, ways, strict=True):
            with using(choices, device):
                seconds = sample()
            if number:
                samples.append(seconds)
    return min(range(len(ways)), key=lambda i: statistics.median(taken[i]))


def _settings(work: _Work, most_threads: int | None, tried: list[str], notes: list[str]) -> list[GemmChoices]:
    """Candidate settings of the whole process, the present one first."""
    usual = GemmChoices()
    if work.device.type == "cpu":
        if most_threads is None:
            notes.append("threads: OMP_NUM_THREADS sets their number, so it was not changed")
            return [usual]
        here = torch.get_num_threads()
        counts = sorted({2**i for i in range(most_threads.bit_length())} | {most_threads})
        others = [n for n in counts if n != here and n <= most_threads]
        tried += [f"{n} threads" if n > 1 else "1 thread" for n in others]
        return [usual, *(GemmChoices(threads=n) for n in others)]
    if torch.version.hip is None:
        tried += LIBRARIES.values()
        return [usual, *(GemmChoices(library=name) for name in LIBRARIES)]
    tried.append("TunableOp: kernels of rocBLAS and hipBLASLt")
    with tuning_kernels(most_ms=MAX_TUNING_MS):
        for call in work.calls.values():
            call()
        devices.synchronize(work.device)
        lines = tuned_kernels()
    return [usual, *([GemmChoices(tunable_op=lines)] if lines else [])]


def _best_routes(work: _Work, shared: GemmChoices, *, budget_s: float, tried: list[str]) -> dict[Gemm, GemmRoute]:
    """The fastest route of each GEMM, where it is not the default."""
    formats = {DTYPES[p.format] for p in work.counts}
    tried += [f"route: {route}" for route in GemmRoute if any(route in routes_of(f) for f in formats)]
    found = {}
    with using(shared, work.device):
        for p in work.counts:
            usual = default_route(DTYPES[p.format])
            routes = [usual, *(r for r in _sound_routes(p) if r is not usual)]
            ways, sample = [replace(shared, routes={p: route}) for route in routes], partial(work.sample_s, p)
            best = routes[_fastest(ways, sample, device=work.device, budget_s=budget_s / len(work.counts))]
            if best is not usual:
                found[p] = best
    return found


def _sound_routes(p: Gemm) -> list[GemmRoute]:
    """Return distinct routes with a rounding error of at most `ROUNDING_FACTOR` times the default's."""
    x, y = _operands(p, torch.device("cpu"))
    exact = x[:CHECKED_ROWS].double() @ y.double().T
    norm = exact.norm()

    def error(route: GemmRoute) -> float:
        got = BY_ROUTE[route](x, y)[:CHECKED_ROWS]
        return ((got.double() - exact).norm() / norm).item()

    limit = ROUNDING_FACTOR * error(default_route(x.dtype))
    in_rows = p.kernel is GemmKind.FORWARD
    routes = [r for r in routes_of(x.dtype) if not (in_rows and r in COPYING_ROUTES)]
    return [route for route in routes if error(route) <= limit]


# --- confirm and keep ---


def _confirmed(
    work: _Work,
    shared: GemmChoices,
    routes: Mapping[Gemm, GemmRoute],
    *,
    budget_s: float,
    tried: Sequence[str],
    notes: Sequence[str],
    advance: Advance,
) -> GemmOutcome:
    """Measure in each round: before, with the process settings, and with the routes as well. Keep faster choices."""
    ways = [GemmChoices(), shared, replace(shared, routes=dict(routes))]
    taken = _rounds(work, ways, budget_s=budget_s, advance=advance)
    before, settings, after = ([{p: r[p][i] for p in work.counts} for r in taken] for i in range(3))
    ratio = _ratio([work.step_s(s) for s in settings], [work.step_s(b) for b in before])
    if ratio.interval[1] >= 1:
        shared, settings = GemmChoices(), before
    kept = {}
    if ways[1] == shared:  # the routes were tried with the settings that are kept
        kept = {
            p: route
            for p, route in routes.items()
            if _ratio([a[p] for a in after], [s[p] for s in settings]).interval[1] < 1
        }
    final = [{p: (a if p in kept else s)[p] for p in work.counts} for a, s in zip(after, settings, strict=True)]
    rows = tuple(
        GemmRow(
            gemm=p, count=count, route=kept.get(p),
            before_s=_measurement([b[p] for b in before]), after_s=_measurement([f[p] for f in final]),
            ratio=_ratio([f[p] for f in final], [b[p] for b in before]),
        )
        for p, count in work.counts.items()
    )  # fmt: skip
    before_s, after_s = [work.step_s(b) for b in before], [work.step_s(f) for f in final]
    return GemmOutcome(
        choices=replace(shared, routes=kept),
        rows=rows,
        before_s=_measurement(before_s),
        after_s=_measurement(after_s),
        ratio=_ratio(after_s, before_s),
        tried=tuple(tried),
        notes=tuple(notes),
    )


def _rounds(
    work: _Work, ways: Sequence[GemmChoices], *, budget_s: float, advance: Advance
) -> list[dict[Gemm, list[float]]]:
    """Seconds of each GEMM in each way, by round. Ways with equal effect on a GEMM are measured once.

    The first round is a warm-up. Every second round runs in reverse order.
    """
    made = []
    for round_ in rounds(least=LEAST_CONFIRMED, most=MAX_ROUNDS, budget_s=budget_s):
        before_s = time.perf_counter()
        taken: dict[Gemm, list[float]] = {}
        for p in work.counts:
            found = [math.nan] * len(ways)
            distinct = [i for i in range(len(ways)) if _effect(ways[i], p) not in [_effect(w, p) for w in ways[:i]]]
            for i in distinct if round_ % 2 else reversed(distinct):
                with using(ways[i], work.device):
                    found[i] = work.sample_s(p)
            same = [next(j for j in distinct if _effect(ways[j], p) == _effect(way, p)) for way in ways]
            taken[p] = [found[j] for j in same]
        if round_:
            made.append(taken)
        advance(time.perf_counter() - before_s)
    return made


def _effect(choices: GemmChoices, p: Gemm) -> GemmChoices:
    """The part of `choices` that affects `p`."""
    return replace(choices, routes={q: r for q, r in choices.routes.items() if q == p})


def _ratio(after: Sequence[float], before: Sequence[float]) -> Measurement:
    return _measurement([a / b for a, b in zip(after, before, strict=True)])


def _measurement(values: Sequence[float]) -> Measurement:
    return Measurement(seconds=tuple(values))


def free_threads(num_processes: int) -> int | None:
    """Threads for one of `num_processes` processes on this machine; None where OMP_NUM_THREADS is set."""
    if "OMP_NUM_THREADS" in os.environ:
        return None
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, num_cores // num_processes)
