"""Efficiency corrections of a catalogued accelerator from published kernel tables.

    y = log(measured / modelled seconds)  -  its median over the GEMMs (attention kernels) above 1 TFLOP

The tables give the dependence of a kernel's rate on its shape. Large kernels in training keep the rate of the
shipped calibration, which was found in whole steps: isolated kernels run at another clock, and in other
software, than a step. Hence the median of the large kernels is subtracted, and no parameter of the cost model
changes.

Tens of thousands of shapes become one point per octave of each axis, the median of its shapes: a point then does not
depend on the tile waves of one shape. Where there are more octave cells than points allowed, every second cell is used,
like the black squares of a chessboard. The reported error covers all shapes, each predicted without its own
octave.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.calibration import communication
from meshwright.calibration.communication import Curve, MeasuredCollectives
from meshwright.calibration.correction import MAX_POINTS, EfficiencyCorrection, fit_correction
from meshwright.calibration.device import DeviceCalibration
from meshwright.calibration.parameters import fitted, prior
from meshwright.catalog import lookup as catalog
from meshwright.cost.compute import gemm_s
from meshwright.cost.unit_ports import unit_pace
from meshwright.errors import InputError
from meshwright.fitting import aiconfigurator
from meshwright.fitting.aiconfigurator import COLLECTIVES, GEMM_FORMATS, KernelTable, Package
from meshwright.fitting.device_fabric import curve_of
from meshwright.fitting.device_kernels import AXES
from meshwright.fitting.device_rates import BF16
from meshwright.fitting.errors import MAD_TO_SD, Errors, errors_of
from meshwright.records.device import DeviceRow, PointStatus
from meshwright.records.points import KERNELS, Point, PointFamily
from meshwright.specs.hardware import Accelerator

Floats = NDArray[np.float64]

LARGE_FLOPS = 1e12
LEAST_GEMM = (256, 512, 512)
"""m, n, k. Training has no smaller GEMMs, and the times of smaller ones include the host."""
MULTIPLE = 8  # of all sizes; serving also measures one row more than a tile
LEAST_SHARE = 0.5
"""Least share of a row's time that counts as the kernel's: inputs that are still in the cache quantize faster than the
memory rate allows."""
LEAST_SEQUENCE = 512
FEWEST_ROWS = 64
MOST_IMPOSSIBLE = 0.01
"""Share of rows that may be faster than the peak. A table with more is not of this accelerator."""
FALLS = 0.9
"""A note is made where more work takes less than this share of the time."""
MOST_TIMES_SLOWER = 100.0
"""A row this many times slower than modelled is a stall."""

LIKE = {PointFamily.GEMM: KERNELS[PointFamily.GEMM], PointFamily.ATTENTION: ("forward",)}
"""Kernels that a correction applies to. The GEMMs of gradients have other layouts, which the tables lack; their rate is
assumed to depend on the shape in the same way. Backward attention is another algorithm."""

NARROW_BYTES = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5}


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Valid rows of a table in one format, with the cost model's seconds."""

    x: Floats  # log2 of the shape, rows x 3
    flops: Floats
    seconds: Floats  # of the kernel alone
    modelled_s: Floats  # by the model at `utilisation`
    utilisation: float  # median share of the peak above LARGE_FLOPS
    notes: tuple[str, ...]  # refused and unusual rows

    @property
    def log_ratios(self) -> Floats:
        """y of the module's docstring, one per row."""
        y = np.log(self.seconds / self.modelled_s)
        return y - np.median(y[self.flops >= LARGE_FLOPS])


def calibrate_from_tables(device: str, *, framework: str) -> DeviceCalibration:
    """Corrections of `device` from the tables of aiconfigurator-core for `framework`; everything else as shipped.

    Raises MissingDependencyError without the package, InputError for an accelerator or framework it does not have and
    for tables that cannot be of this accelerator.
    """
    package = aiconfigurator.installed()
    accelerator = catalog.accelerator(device)
    table = aiconfigurator.gemms(package, accelerator.name, framework)
    corrections: dict[str, EfficiencyCorrection] = {}
    used: dict[str, Any] = {}
    errors: dict[str, Errors] = {}
    for name, shapes, source in _measured(package, accelerator, table, framework):
        family, number_format = name.split("/")
        correction, error = _fit_correction(shapes, AXES[PointFamily(family)])
        corrections |= {f"{family}/{kernel}/{number_format}": correction for kernel in LIKE[PointFamily(family)]}
        errors[name] = errors_of(error, shapes.log_ratios)
        used[name] = {
            "file": source.file,
            "sha256": source.sha256,
            "framework": f"{source.framework} {source.version}",
            "num_rows": len(shapes.seconds),
            "utilisation": round(shapes.utilisation, 4),
            "notes": list(shapes.notes),
        }
    devices_per_node = catalog.usual_devices_per_node(accelerator.name)
    made = f"{package.name} {package.version}, {table.framework} {table.version} on {accelerator.name}"
    return DeviceCalibration(
        accelerator=accelerator,
        fabric=catalog.fabric(catalog.default_fabric_name(accelerator.name)),
        num_devices=devices_per_node,
        shares_host=False,
        parameters={},
        corrections=corrections,
        made=f"shapes of kernels from {made}; their level from {fitted().made}",
        details={
            "device": {"name": accelerator.name, "accelerator": accelerator.name, "type": "cuda"},
            "tables": {
                "package": package.name, "version": package.version, "licence": package.licence,
                "corrections": used,
            },
            "errors": {name: vars(e) for name, e in errors.items()},
            "collectives": _collectives(package, accelerator.name),
        },
    )  # fmt: skip


def _measured(
    package: Package, accelerator: Accelerator, table: KernelTable, framework: str
) -> Iterator[tuple[str, Shapes, KernelTable]]:
    """Name, shapes and table of each correction."""
    for number_format, theirs in GEMM_FORMATS.items():
        rows = table.where(table.columns["gemm_dtype"] == theirs)
        if number_format in accelerator.peak_flops_per_s and len(rows) >= FEWEST_ROWS:
            shapes = _gemms(rows, accelerator, number_format)
            if shapes is not None:
                yield f"gemm/{number_format}", shapes, table
    rows = aiconfigurator.attention(package, accelerator.name, framework)
    if rows is not None and len(rows) >= FEWEST_ROWS:
        shapes = _attention(rows, accelerator)
        if shapes is not None:
            yield f"attention/{BF16}", shapes, rows


# --- from rows to shapes ---


def _gemms(table: KernelTable, accelerator: Accelerator, number_format: str) -> Shapes | None:
    streaming, kernel_s = _streaming(accelerator), prior().parameters["kernel_s"].prior
    narrow = NARROW_BYTES[number_format]
    peak = accelerator.peak_flops_per_s[number_format]
    shape, seconds = table.numbers("m", "n", "k"), table.seconds
    # The planner counts the quantization by itself: one kernel that reads 16 bits and writes the narrow format.
    quantization_s = (2 + narrow) * shape[:, 0] * shape[:, 2] / streaming + kernel_s
    other_s = np.zeros(len(shape)) if number_format == BF16 else quantization_s

    def model_s(shape: Floats, ratio: float) -> Floats:
        return np.asarray(
            gemm_s(
                *shape.T, flops_per_s=peak * ratio, bytes_per_s=streaming, kernel_s=kernel_s,
                num_units=accelerator.num_compute_units, element_bytes=narrow,
            )
        )  # fmt: skip

    as_in_training = (shape >= LEAST_GEMM).all(axis=1) & (shape % MULTIPLE == 0).all(axis=1)
    return _shapes(
        shape[as_in_training],
        seconds[as_in_training],
        other_s=other_s[as_in_training],
        flops=lambda shape: 2 * shape.prod(axis=1),
        peak=peak,
        model_s=model_s,
    )


def _attention(table: KernelTable, accelerator: Accelerator) -> Shapes | None:
    peak, kernel_s = accelerator.peak_flops_per_s[BF16], prior().parameters["kernel_s"].prior
    sequences, heads, seq_len, head_dim = table.numbers("batch_size", "num_heads", "isl", "head_dim").T
    shape = np.stack([sequences * heads, seq_len, head_dim], axis=1)

    def flops(shape: Floats) -> Floats:
        rows, keys, width = shape.T
        return 4 * rows * keys * (keys + 1) / 2 * width

    long_enough = seq_len >= LEAST_SEQUENCE
    return _shapes(
        shape[long_enough],
        table.seconds[long_enough],
        other_s=np.zeros(int(long_enough.sum())),
        flops=flops,
        peak=peak,
        model_s=lambda shape, ratio: flops(shape) / (peak * ratio) + kernel_s,
    )


def _streaming(accelerator: Accelerator) -> float:
    reached = prior().parameters["memory_ratio"].prior
    return accelerator.memory_bytes_per_s * reached / (1 + reached * unit_pace(accelerator))


def _shapes(
    shape: Floats,
    seconds: Floats,
    *,
    other_s: Floats,
    flops: Callable[[Floats], Floats],
    peak: float,
    model_s: Callable[[Floats, float], Floats],
) -> Shapes | None:
    """The valid rows; None when they are too few. Raises InputError when too many are impossible.

    other_s: the known part of `seconds` that other kernels took.
    """
    usable = np.isfinite(seconds) & (seconds > 0)
    notes = [] if usable.all() else [f"refused {_count(~usable)}: no time"]
    shape, seconds, other_s = shape[usable], seconds[usable], other_s[usable]
    impossible = flops(shape) / seconds > peak
    if impossible.sum() > MOST_IMPOSSIBLE * len(impossible):
        raise InputError(
            "a table is not of this accelerator: too many of its rows are faster than the peak",
            got=f"{_count(impossible)} of {len(seconds):,}", allowed=f"{MOST_IMPOSSIBLE:.0%}",
        )  # fmt: skip
    seconds = np.maximum(seconds - other_s, LEAST_SHARE * seconds)
    large = ~impossible & (flops(shape) >= LARGE_FLOPS)
    if not large.any():
        return None
    ratio = float(np.median(flops(shape[large]) / seconds[large])) / peak
    stalled = seconds > MOST_TIMES_SLOWER * model_s(shape, ratio)
    for refused, why in ((impossible, "faster than the peak"), (stalled, "a stall, no kernel")):
        if refused.any():
            notes.append(f"refused {_count(refused)}: {why}, first {_shape_text(shape[refused][0])}")
    kept = ~(impossible | stalled)
    if kept.sum() < FEWEST_ROWS:
        return None
    shape, seconds = shape[kept], seconds[kept]
    return Shapes(
        x=np.log2(shape),
        flops=flops(shape),
        seconds=seconds,
        modelled_s=model_s(shape, ratio),
        utilisation=ratio,
        notes=(*notes, *_falling(shape, seconds)),
    )


def _falling(shape: Floats, seconds: Floats) -> list[str]:
    """Notes on GEMMs that take much less time with more rows and otherwise the same shape."""
    order = np.lexsort(shape.T)  # by the first axis last
    shape, seconds = shape[order], seconds[order]
    is_next = (shape[1:, 1:] == shape[:-1, 1:]).all(axis=1) & (shape[1:, 0] > shape[:-1, 0])
    ratio = np.where(is_next, seconds[1:] / seconds[:-1], 1.0)
    if not (ratio < FALLS).any():
        return []
    worst = int(np.argmin(ratio))
    return [
        f"kept, though {_count(ratio < FALLS)} take over {1 - FALLS:.0%} less time than with less work: "
        f"{_shape_text(shape[worst + 1])} {ratio[worst]:.2f} of the time of {_shape_text(shape[worst])}"
    ]


def _count(chosen: NDArray[np.bool_]) -> str:
    number = int(chosen.sum())
    return f"{number:,} row" if number == 1 else f"{number:,} rows"


def _shape_text(shape: Floats) -> str:
    return " x ".join(f"{size:.0f}" for size in shape)


# --- from shapes to a correction ---


def _fit_correction(shapes: Shapes, axes: Sequence[str]) -> tuple[EfficiencyCorrection, Floats]:
    """The correction, and its error at every row, predicted without the row's own octave."""
    y = shapes.log_ratios
    octaves, of_row = np.unique(np.round(shapes.x), axis=0, return_inverse=True)
    of_row = of_row.ravel()
    black = octaves.sum(axis=1) % 2 == 0 if len(octaves) > MAX_POINTS else np.full(len(octaves), True)
    chosen = np.flatnonzero(black)[:MAX_POINTS]
    rows = [np.flatnonzero(of_row == octave) for octave in chosen]
    x = np.array([shapes.x[r].mean(axis=0) for r in rows])
    middle = np.array([np.median(y[r]) for r in rows])
    noise = np.array([MAD_TO_SD * np.median(np.abs(y[r] - np.median(y[r]))) / math.sqrt(len(r)) for r in rows])
    correction = fit_correction(x, middle, noise, axes=axes)
    if correction is None:
        raise InputError("a table has too few shapes for an efficiency correction", got=len(x))
    predicted = np.log(correction.factor(*(2.0**axis for axis in shapes.x.T)))
    for mean, r in zip(correction.leave_one_out().mean, rows, strict=True):
        predicted[r] = mean
    return correction, predicted - y


# --- collectives ---


def _collectives(package: Package, device: str) -> dict[str, Any]:
    """Seconds of each collective by devices and message size, for the reader of the document only.

    The shipped constants of fabrics already include these tables.
    """
    table = aiconfigurator.collectives(package, device)
    if table is None:
        return {}
    c = table.columns
    found: dict[str, dict[int, Curve]] = {}
    for theirs, ours in COLLECTIVES.items():
        rows = [
            DeviceRow(
                point=Point(
                    family=PointFamily.COLLECTIVES, kernel=ours, num_processes=int(n), size_bytes=2 * int(size)
                ),
                seconds_median=float(seconds), status=PointStatus.OK,
            )
            for op, n, size, seconds in zip(
                c["op_name"], c["num_gpus"], c["message_size"], table.seconds, strict=True
            )
            if op == theirs and seconds > 0
        ]  # fmt: skip
        for count in sorted({row.point.num_processes for row in rows}):
            of_count = {r.point.size_bytes: r for r in rows if r.point.num_processes == count}
            found.setdefault(ours, {})[count] = curve_of(list(of_count.values()))
    return communication.to_document(MeasuredCollectives(curves=found))
