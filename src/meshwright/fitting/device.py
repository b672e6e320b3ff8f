"""From records of a device to its calibration: rates, parameters of the cost model, surfaces, errors.

    peak of a format          the best rate of a product           (a catalogued device keeps its datasheet's)
    memory rate               the best copy that no cache holds, else the largest
    gemm_ratio                so that half of the larger products take longer than modelled, half shorter
    attention ratios          likewise, 16 bits
    elementwise_factor        bytes that activation and norm seem to move, over the least they must
    optimizer_passes          likewise, of AdamW
    kernel_s                  a launch
    scale_up_ratio, latency   so that all-reduce of the largest and of the smallest message take what was measured

What is left of each kernel, shape by shape, becomes a surface (`calibration.correction`). A parameter's spread is
that of the points around it. How wrong all this is, each point left out in turn says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwright import catalog
from meshwright.calibration.communication import Curve, MeasuredCollectives
from meshwright.calibration.correction import EfficiencyCorrection, fit_correction
from meshwright.calibration.device import Check, DeviceCalibration, Kernels
from meshwright.calibration.parameters import MeasuredParameter, prior
from meshwright.cost.collectives import all_reduce_s, constants_for, network_row
from meshwright.cost.compute import gemm_s
from meshwright.cost.groups import groups_of
from meshwright.cost.tables import plan_row
from meshwright.cost.update import OPTIMIZER_BYTES
from meshwright.errors import InputError
from meshwright.fitting.kernel_times import HOST, TODAY
from meshwright.fitting.residual import fit_residual
from meshwright.records.device import DeviceRow, Records, in_windows
from meshwright.records.points import Point, PointFamily
from meshwright.records.steps import run_file_of
from meshwright.specs.hardware import THIS_MACHINE, Accelerator, Fabric
from meshwright.specs.plan import Plan

AXES = {
    PointFamily.GEMM: ("m", "n", "k"),
    PointFamily.ATTENTION: ("rows", "seq_len", "head_dim"),
    PointFamily.ELEMENTWISE: ("elements",),
    PointFamily.OPTIMIZER: ("parameters",),
}
NARROW_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0}
BF16 = "bf16"
LEAST_COPY_BYTES = 2**25  # few caches hold it twice
LAUNCH_SHARE = 0.1
"""Of a call's seconds that starting it may take where bytes are judged."""

LEAST_SD, MOST_SD = 0.02, 1.0
RESIDUAL_SD = 0.25
"""Of the logarithm of a step's time beside the sum of its kernels, on a device whose whole steps nobody has timed: an
assumption, as wide as what published fits of kernels leave unexplained. A training's own quick measurement has none."""

BISECTIONS = 60

APART = {"isolated", "concurrent"}
LONGEST_CHECK_S = 0.15
"""Of a step that a training takes a few times before it begins."""


@dataclass(frozen=True, kw_only=True)
class Errors:
    """|predicted / measured - 1| of points that were left out, and of the cost model without surfaces."""

    num_points: int
    median: float
    p90: float
    formula_median: float
    formula_p90: float


@dataclass(frozen=True, kw_only=True)
class _Kernel:
    """Points of one kernel in one format, beside the model with its ratio."""

    rows: list[DeviceRow]
    log_ratios: np.ndarray[Any, Any]  # log(measured / modelled)
    correction: EfficiencyCorrection | None


def calibrate(files: Sequence[Records]) -> DeviceCalibration:
    """One calibration of the device that all `files` are records of. Raises InputError when there is too little."""
    device = _one_device(files)
    rows = [row for file in files for row in file.measured]
    of = _by_family(rows, threads=0)
    for needed in (PointFamily.GEMM, PointFamily.MEMORY):
        if not of[needed]:
            raise InputError(
                f"the records hold no {needed} measurement", got=str(files[0].path),
                hint=f"meshwright bench device --families {needed} --resume",
            )  # fmt: skip
    accelerator = _accelerator(device, of)
    on_host = device["type"] == "cpu"
    memory_ratio = 1.0 if on_host else _copy_rate(of[PointFamily.MEMORY]) / accelerator.memory_bytes_per_s
    rates = _Rates(accelerator=accelerator, memory_ratio=min(memory_ratio, 1 - 1e-6), kernel_s=_launch_s(of))
    parameters = {
        name: MeasuredParameter(value=value, sd=0.0) for name, value in (HOST if on_host else {}).items()
    }
    parameters |= {name: MeasuredParameter(value=value, sd=0.0) for name, value in TODAY.items()}
    if accelerator.vendor == THIS_MACHINE:
        parameters["general_factor"] = MeasuredParameter(value=1.0, sd=RESIDUAL_SD)
    if not on_host:
        parameters["memory_ratio"] = MeasuredParameter(value=rates.memory_ratio, sd=LEAST_SD)
    if of[PointFamily.LAUNCH]:
        parameters["kernel_s"] = MeasuredParameter(value=rates.kernel_s, sd=LEAST_SD)
    found = _found(rates, parameters, of)
    shares = {row.point.threads for row in rows} - {0}
    fabric, collectives = _fabric(accelerator, device, of[PointFamily.COLLECTIVES], parameters)
    kernels = DeviceCalibration(
        accelerator=accelerator,
        fabric=fabric,
        num_devices=device["count"],
        shares_host=on_host,
        num_cores=device["threads"],
        collectives=collectives,
        parameters=parameters,
        corrections=found.corrections,
        by_threads={
            count: _kernels_of(accelerator, rows, threads=count, kernel_s=rates.kernel_s) for count in shares
        },
        made=_made(files, num_points=len(rows)),
        details={
            "device": device,
            "records": [_origin(file) for file in files],
            "errors": {family.value: vars(errors) for family, errors in found.errors.items()},
        },
    )
    steps = in_windows(of[PointFamily.TRAINING])
    kernels = replace(kernels, checks=_checks(steps) if on_host else ())
    added = fit_residual(kernels, steps)
    if added is None:
        return kernels
    found.errors[PointFamily.TRAINING] = errors_of(added.leave_one_out, added.before)
    errors = {family.value: vars(errors) for family, errors in found.errors.items()}
    return replace(added.device, details={**kernels.details, "errors": errors})


def _checks(steps: Iterable[DeviceRow]) -> tuple[Check, ...]:
    """For each number of processes the longest of the short steps, of each format, that processes took apart."""
    chosen: dict[tuple[int, str], DeviceRow] = {}
    for row in steps:
        of = row.point.num_processes, row.point.format
        if row.point.kernel in APART and row.seconds_median <= LONGEST_CHECK_S:
            chosen[of] = max(chosen.get(of, row), row, key=lambda r: r.seconds_median)
    return tuple(
        Check(
            run=run_file_of(row.point),
            num_processes=row.point.num_processes,
            seconds=row.seconds_median,
            spread=row.seconds_high / row.seconds_low,
        )
        for row in chosen.values()
    )


def _by_family(rows: Iterable[DeviceRow], *, threads: int) -> dict[PointFamily, list[DeviceRow]]:
    own = [r for r in rows if r.point.threads == threads]
    return {family: [r for r in own if r.point.family is family] for family in PointFamily}


def _found(
    rates: _Rates, parameters: dict[str, MeasuredParameter], of: Mapping[PointFamily, list[DeviceRow]]
) -> _Found:
    """Everything about kernels."""
    found = _Found(rates=rates, parameters=parameters, kernels={}, errors={})
    found.products(of[PointFamily.GEMM])
    found.attention(of[PointFamily.ATTENTION])
    found.bytes_moved("elementwise_factor", of[PointFamily.ELEMENTWISE], lambda p: p.bytes)
    found.bytes_moved("optimizer_passes", of[PointFamily.OPTIMIZER], lambda p: OPTIMIZER_BYTES * p.m)
    return found


def _kernels_of(
    accelerator: Accelerator, rows: Iterable[DeviceRow], *, threads: int, kernel_s: float
) -> Kernels:
    """Of a process with so many threads of a processor."""
    of = _by_family(rows, threads=threads)
    own = replace(
        accelerator,
        peak_flops_per_s=_peaks(of[PointFamily.GEMM]),
        memory_bytes_per_s=_copy_rate(of[PointFamily.MEMORY]),
    )
    found = _found(_Rates(accelerator=own, memory_ratio=1 - 1e-6, kernel_s=kernel_s), {}, of)
    return Kernels(
        peak_flops_per_s=own.peak_flops_per_s,
        memory_bytes_per_s=own.memory_bytes_per_s,
        parameters=found.parameters,
        corrections=found.corrections,
    )


def _one_device(files: Sequence[Records]) -> Mapping[str, Any]:
    first = files[0].sidecar["device"]
    for file in files[1:]:
        if file.sidecar["device"] != first:
            raise InputError(
                f"{file.path}: records of another device",
                got=file.sidecar["device"].get("name"), allowed=first.get("name"),
                hint="calibrate each device by itself",
            )  # fmt: skip
    return first


def _made(files: Sequence[Records], *, num_points: int) -> str:
    sidecar = files[-1].sidecar
    torch = sidecar["software"].get("torch", "?")
    return f"{num_points} measurements of {sidecar['device']['name']}, PyTorch {torch}, {sidecar['started'][:10]}"


def _origin(file: Records) -> dict[str, Any]:
    keys = ("started", "ended", "software", "driver", "git_commit", "command")
    return {"num_points": len(file.measured), **{key: file.sidecar[key] for key in keys}}


# --- rates ---


def _accelerator(device: Mapping[str, Any], of: Mapping[PointFamily, list[DeviceRow]]) -> Accelerator:
    if device["accelerator"] is not None:
        return catalog.accelerator(device["accelerator"])
    return Accelerator(
        name=device["name"],
        vendor=THIS_MACHINE,
        architecture=device["type"],
        peak_flops_per_s=_peaks(of[PointFamily.GEMM]),
        memory_bytes=device["memory_bytes"],
        memory_bytes_per_s=_copy_rate(of[PointFamily.MEMORY]),
        num_compute_units=device["compute_units"],
        output_tiles=device["type"] != "cpu",
        sources={"all": "measured: bench records"},
    )


def _peaks(products: Iterable[DeviceRow]) -> dict[str, float]:
    peaks: dict[str, float] = {}
    for row in products:
        rate = row.point.flops / row.seconds_median
        peaks[row.point.format] = max(rate, peaks.get(row.point.format, 0.0))
    return peaks


def _copy_rate(rows: Iterable[DeviceRow]) -> float:
    rows = sorted(rows, key=lambda r: -r.point.size_bytes)
    large = [r for r in rows if r.point.size_bytes >= LEAST_COPY_BYTES] or rows[:1]
    return max(r.point.bytes / r.seconds_median for r in large)


def _launch_s(of: Mapping[PointFamily, list[DeviceRow]]) -> float:
    launches = [row.seconds_median for row in of[PointFamily.LAUNCH]]
    return min(launches) if launches else prior().parameters["kernel_s"].prior


@dataclass(frozen=True, kw_only=True)
class _Rates:
    accelerator: Accelerator
    memory_ratio: float
    kernel_s: float

    @property
    def streaming(self) -> float:
        return self.accelerator.memory_bytes_per_s * self.memory_ratio

    def gemm_s(self, point: Point, ratio: float) -> float:
        """As the cost model has it."""
        a = self.accelerator
        peak = a.peak_flops_per_s[point.format]
        seconds = gemm_s(
            float(point.m), float(point.n), float(point.k),
            flops_per_s=peak * ratio, bytes_per_s=self.streaming, num_units=a.num_compute_units,
            kernel_s=self.kernel_s, output_tiles=int(a.output_tiles), element_bytes=NARROW_BYTES[point.format],
        )  # fmt: skip
        return float(seconds)

    def attention_s(self, point: Point, ratio: float) -> float:
        """As the cost model has it: at the 16-bit peak, whatever the format."""
        peaks = self.accelerator.peak_flops_per_s
        return point.flops / (peaks.get(BF16, peaks.get(point.format, 0.0)) * ratio) + self.kernel_s


# --- kernels ---


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What is known so far."""

    rates: _Rates
    parameters: dict[str, MeasuredParameter]
    kernels: dict[str, _Kernel]
    errors: dict[PointFamily, Errors]

    @property
    def corrections(self) -> dict[str, EfficiencyCorrection]:
        return {name: k.correction for name, k in self.kernels.items() if k.correction is not None}

    def products(self, rows: list[DeviceRow]) -> None:
        """Matrix products: one ratio, a surface for each layout and format."""
        a = self.rates.accelerator
        rows = [r for r in rows if r.point.format in a.peak_flops_per_s]
        ratio = _ratio(rows, self.rates.gemm_s)
        kernels = _kernels(rows, lambda point: self.rates.gemm_s(point, ratio))
        self._keep(PointFamily.GEMM, kernels)
        self.parameters["gemm_ratio"] = MeasuredParameter(value=ratio, sd=_sd(kernels.values(), a))

    def attention(self, rows: list[DeviceRow]) -> None:
        """Scores and values: a ratio for each direction, a surface for each format too."""
        found: dict[str, _Kernel] = {}
        for kernel in ("forward", "backward"):
            own = [r for r in rows if r.point.kernel == kernel]
            half = [r for r in own if r.point.format == BF16] or own
            if not half:
                continue
            ratio = _ratio(half, self.rates.attention_s)
            kernels = _kernels(own, lambda point, ratio=ratio: self.rates.attention_s(point, ratio))
            found |= kernels
            sd = _sd(kernels.values(), self.rates.accelerator)
            self.parameters[f"attention_{kernel}_ratio"] = MeasuredParameter(value=ratio, sd=sd)
        if found:
            self._keep(PointFamily.ATTENTION, found)

    def bytes_moved(self, name: str, rows: list[DeviceRow], least_bytes: Callable[[Point], float]) -> None:
        """`name`: bytes that a kernel's seconds are worth, over `least_bytes`; where starting it is little of them."""
        start_s, streaming = self.rates.kernel_s, self.rates.streaming
        large = [r for r in rows if start_s < LAUNCH_SHARE * r.seconds_median]
        if not large:
            return
        logs = np.array(
            [math.log((r.seconds_median - start_s) * streaming / least_bytes(r.point)) for r in large]
        )
        factor = math.exp(float(np.median(logs)))
        kernels = _kernels(rows, lambda p: least_bytes(p) * factor / streaming + start_s)
        self.parameters[name] = MeasuredParameter(
            value=factor, sd=_sd(kernels.values(), self.rates.accelerator)
        )
        self._keep(large[0].point.family, kernels)

    def _keep(self, family: PointFamily, kernels: dict[str, _Kernel]) -> None:
        self.kernels.update(kernels)
        left = [
            k.correction.leave_one_out().mean - k.correction.y
            for k in kernels.values()
            if k.correction is not None
        ]
        plain = [k.log_ratios for k in kernels.values() if k.correction is not None]
        if left:
            self.errors[family] = errors_of(np.concatenate(left), np.concatenate(plain))


def coordinates(point: Point) -> tuple[float, ...]:
    """Where a point lies on its surface: log2 of the axes."""
    match point.family:
        case PointFamily.GEMM:
            sizes = (point.m, point.n, point.k)
        case PointFamily.ATTENTION:
            sizes = (point.sequences * point.heads, point.seq_len, point.head_dim)
        case _:
            sizes = (point.m * max(point.n, 1),)
    return tuple(math.log2(size) for size in sizes)


def correction_name(point: Point) -> str:
    """The key of its surface."""
    return f"{point.family}/{point.kernel}/{point.format}"


def _ratio(rows: list[DeviceRow], model_s: Callable[[Point, float], float]) -> float:
    """The share of the peak at which half of the larger rows take longer than modelled."""
    flops = float(np.median([r.point.flops for r in rows]))
    large = [r for r in rows if r.point.flops >= flops]

    def is_too_slow(ratio: float) -> bool:
        return float(np.median([math.log(r.seconds_median / model_s(r.point, ratio)) for r in large])) < 0

    low, high = 1e-6, 1 - 1e-6
    for _ in range(BISECTIONS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_too_slow(middle) else (low, middle)
    return low


def _kernels(rows: list[DeviceRow], model_s: Callable[[Point], float]) -> dict[str, _Kernel]:
    by_name: dict[str, list[DeviceRow]] = {}
    for row in rows:
        by_name.setdefault(correction_name(row.point), []).append(row)
    return {name: _kernel(own, model_s) for name, own in by_name.items()}


def _kernel(rows: list[DeviceRow], model_s: Callable[[Point], float]) -> _Kernel:
    y = np.array([math.log(r.seconds_median / model_s(r.point)) for r in rows])
    x = np.array([coordinates(r.point) for r in rows])
    noise = np.array([r.log_sd for r in rows])
    axes = AXES[rows[0].point.family]
    return _Kernel(rows=rows, log_ratios=y, correction=fit_correction(x, y, noise, axes=axes))


def _sd(kernels: Iterable[_Kernel], accelerator: Accelerator) -> float:
    """Of the logarithm of a kernel's time: as far as points lie from what the others say of them."""
    logs = [
        k.log_ratios if k.correction is None else k.correction.y - k.correction.leave_one_out().mean
        for k in kernels
    ]
    return _clipped(_robust_sd(np.concatenate(logs)))


def _robust_sd(logs: Any) -> float:
    """As the median distance from the median has it (of a normal distribution: the standard deviation)."""
    return float(np.median(np.abs(logs - np.median(logs)))) * 1.4826


def _clipped(sd: float) -> float:
    return min(max(sd, LEAST_SD), MOST_SD)


def errors_of(leave_one_out: Any, formula: Any) -> Errors:
    """Of logarithms of predicted over measured."""
    with_surface, without = (np.abs(np.expm1(logs)) for logs in (leave_one_out, formula))
    return Errors(
        num_points=len(leave_one_out),
        median=float(np.median(with_surface)),
        p90=float(np.quantile(with_surface, 0.9)),
        formula_median=float(np.median(without)),
        formula_p90=float(np.quantile(without, 0.9)),
    )


# --- collectives ---


def _fabric(
    accelerator: Accelerator,
    device: Mapping[str, Any],
    rows: list[DeviceRow],
    parameters: dict[str, MeasuredParameter],
) -> tuple[Fabric, MeasuredCollectives]:
    """The fabric of this machine, and what each collective took by processes and size."""
    collectives = MeasuredCollectives(
        curves={
            kernel: {
                count: curve_of(
                    [r for r in rows if (r.point.kernel, r.point.num_processes) == (kernel, count)]
                )
                for count in sorted({r.point.num_processes for r in rows if r.point.kernel == kernel})
            }
            for kernel in sorted({r.point.kernel for r in rows})
        }
    )
    half = accelerator.memory_bytes_per_s / 2  # processes exchange through memory: one copy in, one out
    rate = accelerator.scale_up_bytes_per_s or half
    fabric = Fabric(
        name=f"inside {device['name']}",
        scale_up_domain=max(2, device["count"]),
        scale_up_bytes_per_s=rate,
        scale_up_peer_bytes_per_s=accelerator.scale_up_peer_bytes_per_s or rate,
        scale_up_latency_s=0.0,
        scale_out_bytes_per_s=rate,
        scale_out_latency_s=0.0,
    )
    reduces = sorted((r for r in rows if r.point.kernel == "all_reduce"), key=lambda r: r.point.size_bytes)
    if not reduces:
        return fabric, collectives
    small, large = reduces[0], reduces[-1]
    latency_s = _bisect(lambda s: _reduce_s(fabric, small, latency_s=s) < small.seconds_median, 1e-9, 1.0)
    fabric = replace(fabric, scale_up_latency_s=latency_s, scale_out_latency_s=latency_s)
    ratio = _bisect(lambda r: _reduce_s(fabric, large, ratio=r) > large.seconds_median, 1e-4, 1e4)
    fabric = replace(
        fabric,
        scale_up_bytes_per_s=rate * ratio,
        scale_up_peer_bytes_per_s=fabric.scale_up_peer_bytes_per_s * ratio,
        scale_out_bytes_per_s=rate * ratio,
    )
    parameters["scale_up_ratio"] = MeasuredParameter(value=1.0, sd=_clipped(large.log_sd))
    return fabric, collectives


def _reduce_s(fabric: Fabric, row: DeviceRow, *, latency_s: float | None = None, ratio: float = 1.0) -> float:
    tried = replace(
        fabric,
        scale_up_latency_s=fabric.scale_up_latency_s if latency_s is None else latency_s,
        scale_up_bytes_per_s=fabric.scale_up_bytes_per_s * ratio,
        scale_up_peer_bytes_per_s=fabric.scale_up_peer_bytes_per_s * ratio,
    )
    network = network_row(tried, constants_for(tried))
    group = groups_of(plan_row(Plan(data_shard=row.point.num_processes)), network).whole
    return float(all_reduce_s(float(row.point.size_bytes), group))


def _bisect(is_too_low: Callable[[float], bool], low: float, high: float) -> float:
    for _ in range(BISECTIONS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_too_low(middle) else (low, middle)
    return low


def curve_of(rows: list[DeviceRow]) -> Curve:
    """What one collective took between so many processes."""
    rows = sorted(rows, key=lambda r: r.point.size_bytes)
    return Curve(
        size_bytes=tuple(float(r.point.size_bytes) for r in rows),
        seconds=tuple(r.seconds_median for r in rows),
    )
