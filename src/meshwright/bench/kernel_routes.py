"""Every route of a kernel on the same call: time, share of the roofline, memory, error, and the fastest one.

The routes are those of `meshwright.kernels`, and `compile`: the reference through `torch.compile`.

    roofline    the longer of FLOPs over the measured GEMM rate and least bytes over the measured copy rate, over the
                time; above 1 where operands stay in a cache
    memory      most bytes allocated by a forward and backward pass beyond the operands; on a GPU
    error       ‖got - exact‖ / ‖exact‖ of the outputs and of the gradients, the largest, against the reference in
                float64, on at most `CHECKED_TOKENS` tokens
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwright.bench.harness import AbsurdClockError, measure
from meshwright.bench.kernel_cases import KernelCase, cases_of
from meshwright.errors import InputError
from meshwright.kernels.dispatch import KernelRouting, using
from meshwright.kernels.routes import routes_of
from meshwright.kernels.tuned import TunedCall, TunedTable, triton_version
from meshwright.records.kernel_routes import ROUNDING_FACTOR
from meshwright.records.measurement import Measurement
from meshwright.specs.model import Model
from meshwright.training import device as devices

COMPILED = "compile"
CHECKED_TOKENS = 256
LONGEST_S = 2.0  # of one measurement


@dataclass(frozen=True, kw_only=True)
class RouteRow:
    """One route on one call. Without `forward_s` it was not measured, for `reason`."""

    op: str
    model: str
    shape: str
    format: str
    route: str
    reason: str = ""
    is_failure: bool = False  # it serves the call and failed; otherwise it refused
    forward_s: Measurement | None = None
    backward_s: Measurement | None = None
    flops: float | None = None  # of both passes
    least_bytes: float | None = None  # to read and write, of both passes
    roofline_ratio: float | None = None
    peak_bytes: int | None = None
    error: float | None = None
    is_default: bool = False
    is_fastest: bool = False

    @property
    def seconds(self) -> float:
        """Median of a forward and backward pass."""
        return sum(m.median for m in (self.forward_s, self.backward_s) if m is not None)

    def document(self) -> dict[str, Any]:
        """The row for JSON: medians and 95 % intervals in seconds."""
        found = asdict(self)
        for name in ("forward_s", "backward_s"):
            m: Measurement | None = getattr(self, name)
            found[name] = None if m is None else {
                "median": m.median, "low": m.interval[0], "high": m.interval[1], "samples": m.n,
            }  # fmt: skip
        return found


@dataclass(kw_only=True)
class RouteOutcome:
    """All rows, and the fastest route of every call."""

    rows: list[RouteRow] = field(default_factory=list)
    fastest: dict[TunedCall, str] = field(default_factory=dict)
    cases: list[tuple[KernelCase, RouteRow]] = field(default_factory=list)  # with their fastest rows


def measure_routes(
    ops: Sequence[str],
    models: Sequence[Model],
    *,
    tokens: int,
    formats: Sequence[str],
    device: torch.device,
    compiles: bool,
    budget_s: float,
    advance: Callable[[float], None] = lambda seconds: None,
) -> RouteOutcome:
    """Time all routes of `ops` on the shapes of `models`. `compiles` adds the route of `torch.compile`."""
    rates = devices.measure_rates(device, deadline_s=time.perf_counter() + budget_s / 10)
    wanted = [(op, model, format) for op in ops for model in models for format in formats]
    most = sum(2 * (len(routes_of(op)) + 1) for op, _, _ in wanted)
    outcome = RouteOutcome()
    for op, model, format in wanted:
        checked = cases_of(op, model, tokens=min(tokens, CHECKED_TOKENS), format=format, device=device)
        cases = cases_of(op, model, tokens=tokens, format=format, device=device)
        for case, small in zip(cases, checked, strict=True):
            start_s = time.perf_counter()
            names = (*routes_of(op), *([COMPILED] if compiles else []))
            _measure_case(case, small, format, names, outcome, rates=rates, device=device, budget_s=budget_s / most)
            advance(time.perf_counter() - start_s)
    return outcome


def _measure_case(
    case: KernelCase,
    small: KernelCase,
    format: str,
    names: Sequence[str],
    outcome: RouteOutcome,
    *,
    rates: devices.Rates,
    device: torch.device,
    budget_s: float,
) -> None:
    with using(KernelRouting()) as routing, torch.no_grad():
        case.run(*case.tensors)
    own = next(choice for choice in routing.choices.values() if choice.call.op == case.op)
    peak = rates.matmul_flops_per_s.get("fp8" if case.op == "fp8_gemm" else format, 0.0)
    bound_s = case.bytes / rates.copy_bytes_per_s
    if peak:
        bound_s = max(bound_s, case.flops / peak)
    exact = _exact(small)
    rows: list[RouteRow] = []
    for name in names:
        row = partial(RouteRow, op=case.op, model=case.model, shape=case.shape, format=format, route=name)
        try:
            forward, backward, peak_bytes = _timed(case, name, device=device, budget_s=min(budget_s, LONGEST_S))
            error = _error(small, name, exact)
        except InputError as refusal:  # of the dispatcher
            reason = refusal.message.partition("cannot serve this call: ")[2] or refusal.message
            rows.append(row(reason=reason.partition(": got")[0]))
            continue
        except AbsurdClockError as absurd:
            rows.append(row(reason=absurd.message))
            continue
        except Exception as failure:  # libraries and compilers raise what they like, and the next route is measured
            reason = str(failure).partition("\n")[0][:200]
            rows.append(row(reason=f"{type(failure).__name__}: {reason}", is_failure=True))
            continue
        passes = 1.0 + (case.backward if backward is not None else 0.0)
        seconds = forward.median + (0.0 if backward is None else backward.median)
        rows.append(row(
            forward_s=forward, backward_s=backward, flops=passes * case.flops, least_bytes=passes * case.bytes,
            roofline_ratio=passes * bound_s / seconds, peak_bytes=peak_bytes, error=error,
            is_default=name == own.route,
        ))  # fmt: skip
    fastest = _fastest(rows)
    outcome.rows += [replace(one, is_fastest=True) if one is fastest else one for one in rows]
    if fastest is not None:
        outcome.cases.append((case, fastest))
        outcome.fastest[TunedCall(op=case.op, shapes=own.call.shapes, dtypes=own.call.dtypes)] = fastest.route


def _fastest(rows: Sequence[RouteRow]) -> RouteRow | None:
    """The fastest route of the dispatcher that rounds about as the reference does."""
    measured = [row for row in rows if row.forward_s is not None and row.route != COMPILED]
    usual = next((row.error for row in measured if row.route == "reference"), None)
    limit = None if usual is None else ROUNDING_FACTOR * max(usual, 1e-9)
    able = [row for row in measured if limit is None or row.error is None or row.error <= limit]
    return min(able, key=lambda row: row.seconds, default=None)


def _by(case: KernelCase, route: str) -> Callable[..., tuple[Tensor, ...]]:
    """The call through one route."""
    routing = KernelRouting(demanded={case.op: "reference" if route == COMPILED else route})

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        with using(routing):
            out = case.run(*tensors)
        return out if isinstance(out, tuple) else (out,)

    if route != COMPILED:
        return run
    torch.compiler.reset()  # one function for all calls: they would count as one that is compiled again and again
    return torch.compile(run, dynamic=False)


def _timed(
    case: KernelCase, route: str, *, device: torch.device, budget_s: float
) -> tuple[Measurement, Measurement | None, int | None]:
    run = _by(case, route)
    options: dict[str, Any] = {"synchronize": lambda: devices.synchronize(device), "budget_s": budget_s}
    with torch.no_grad():
        forward = measure(lambda: run(*case.tensors), **options)
    if not case.num_trained:
        return forward, None, None
    tensors = _trained(case, case.tensors)
    kept: list[Any] = []
    peak_bytes = None
    if device.type == "cuda":
        devices.release_memory(device)
        before = torch.cuda.memory_allocated(device)
        out = run(*tensors)
        torch.autograd.backward(out, [torch.ones_like(x) for x in out])
        del out
        peak_bytes = torch.cuda.max_memory_allocated(device) - before

    def ahead() -> None:
        for x in tensors:
            x.grad = None
        out = run(*tensors)
        kept[:] = [out, [torch.ones_like(x) for x in out]]

    backward = measure(lambda: torch.autograd.backward(kept[0], kept[1]), before=ahead, **options)
    return forward, backward, peak_bytes


def _trained(case: KernelCase, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(t.detach().requires_grad_(i < case.num_trained) for i, t in enumerate(tensors))


def _results(case: KernelCase, run: Callable[..., tuple[Tensor, ...]], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Outputs and gradients, in float64."""
    inputs = _trained(case, tensors)
    out = run(*inputs)
    found = [x.detach().double() for x in out]
    if case.num_trained:
        generator = torch.Generator().manual_seed(0)
        grads = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device, x.dtype) for x in out]
        torch.autograd.backward(out, grads)
        found += [x.grad.double() for x in inputs if x.grad is not None]
    return found


def _exact(case: KernelCase) -> list[Tensor] | None:
    """The reference in float64; None for cases that are not checked."""
    if not case.is_checked:
        return None
    tensors = [t.double() if t.is_floating_point() else t for t in case.tensors]
    return _results(case, _by(case, "reference"), tensors)


def _error(case: KernelCase, route: str, exact: Sequence[Tensor] | None) -> float | None:
    if exact is None:
        return None
    got = _results(case, _by(case, route), case.tensors)
    return max(float((a - b).norm() / b.norm()) for a, b in zip(got, exact, strict=True) if b.numel())


def tuned_table(outcome: RouteOutcome, *, device: torch.device) -> TunedTable:
    """The table of the fastest routes, for `kernels.tuned` of runs on this device with these versions."""
    name = devices.device_name(device)
    return TunedTable(device=name, torch=torch.__version__, triton=triton_version(), routes=outcome.fastest)


def rows_to_print(rows: Sequence[RouteRow]) -> Iterator[tuple[str, ...]]:
    """Operation, shape, route, ms forward and backward, roofline, memory, error, remarks."""
    last = ""
    for row in rows:
        title = f"{row.op}, {row.model}, {row.format}: {row.shape}"
        shown, last = ("" if title == last else title), title
        if row.forward_s is None:
            yield shown, row.route, "", "", "", "", "", row.reason
            continue
        remark = ", ".join(w for w, on in (("default", row.is_default), ("fastest", row.is_fastest)) if on)
        yield (
            shown, row.route, f"{1e3 * row.forward_s.median:.3f}",
            "" if row.backward_s is None else f"{1e3 * row.backward_s.median:.3f}",
            "" if row.roofline_ratio is None else f"{100 * row.roofline_ratio:.0f} %",
            "" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.0f} MiB",
            "" if row.error is None else f"{row.error:.1e}", remark,
        )  # fmt: skip
