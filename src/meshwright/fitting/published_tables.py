"""From kernel tables that others measured and published to surfaces of a catalogued accelerator.

    y = log(measured / modelled seconds)  -  its median over the products (attentions) above 1 TFLOP

The tables say how a kernel's rate depends on its shape. How fast the large ones are in training stays what the shipped
calibration found in whole steps: short kernels alone run at another clock, in other software than a step. So the median
of the large ones is taken off, and no parameter of the cost model changes.

Tens of thousands of shapes become one point for each octave of each axis: the median of the shapes there, so that a
point does not hang on one shape's waves of tiles; every other octave cell, as black squares of a chessboard. What the
surface then says of all shapes, each octave left out in turn, is the error that is reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright import catalog
from meshwright.calibration import communication
from meshwright.calibration.communication import Curve, MeasuredCollectives
from meshwright.calibration.correction import MOST_POINTS, EfficiencyCorrection, fit_correction
from meshwright.calibration.device import DeviceCalibration
from meshwright.calibration.parameters import fitted, prior
from meshwright.cost.compute import gemm_s
from meshwright.errors import InputError
from meshwright.fitting import aiconfigurator
from meshwright.fitting.aiconfigurator import COLLECTIVES, PRODUCTS, KernelTable, Package
from meshwright.fitting.device_fabric import curve_of
from meshwright.fitting.device_kernels import AXES
from meshwright.fitting.device_rates import BF16
from meshwright.fitting.errors import Errors, errors_of
from meshwright.records.device import DeviceRow, PointStatus
from meshwright.records.points import KERNELS, Point, PointFamily
from meshwright.specs.hardware import Accelerator

Floats = NDArray[np.float64]

LARGE_FLOPS = 1e12
LEAST_PRODUCT = (256, 512, 512)
"""Rows, columns, depth: training has no smaller ones, and below them the host is measured too."""
MULTIPLE = 8  # of which sizes are: serving also has batches of one more than a tile
LEAST_SHARE = 0.5
"""Of a row's time that is the kernel's: quantising what the cache still holds is faster than memory says."""
LEAST_SEQUENCE = 512
FEWEST_ROWS = 64
MOST_IMPOSSIBLE = 0.01
"""Share of rows that may be faster than the peak. With more, the table is not of this accelerator."""
FALLS = 0.9
"""More work in less than this share of the time is odd."""
MOST_TIMES_SLOWER = 100.0
"""Than modelled: that is no kernel but a stall."""

LIKE = {PointFamily.GEMM: KERNELS[PointFamily.GEMM], PointFamily.ATTENTION: ("forward",)}
"""Kernels that a surface is used for. The gradients of a product are products of other layouts, which the tables do not
have: they are taken to depend on the shape alike. Backward attention is another algorithm."""

NARROW_BYTES = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5}


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Rows of a table in one format that can be believed, beside the cost model."""

    x: Floats  # log2 of the shape, rows x 3
    flops: Floats
    seconds: Floats  # of the kernel alone
    modelled_s: Floats  # by the model at `utilisation`
    utilisation: float  # median share of the peak above LARGE_FLOPS
    notes: tuple[str, ...]  # what was refused, what is odd

    @property
    def log_ratios(self) -> Floats:
        """y above, n."""
        y = np.log(self.seconds / self.modelled_s)
        return y - np.median(y[self.flops >= LARGE_FLOPS])


def calibrate_from_tables(device: str, *, framework: str) -> DeviceCalibration:
    """Surfaces of `device` as aiconfigurator-core has it in `framework`; everything else as it ships.

    Raises MissingDependencyError without the package, InputError for an accelerator or framework it does not have and
    for tables that cannot be of this accelerator.
    """
    package = aiconfigurator.installed()
    accelerator = catalog.accelerator(device)
    table = aiconfigurator.products(package, accelerator.name, framework)
    corrections: dict[str, EfficiencyCorrection] = {}
    used: dict[str, Any] = {}
    errors: dict[str, Errors] = {}
    for name, shapes, source in _measured(package, accelerator, table, framework):
        family, number_format = name.split("/")
        correction, leave_one_out = _surface(shapes, AXES[PointFamily(family)])
        corrections |= {
            f"{family}/{kernel}/{number_format}": correction for kernel in LIKE[PointFamily(family)]
        }
        errors[name] = errors_of(leave_one_out, shapes.log_ratios)
        used[name] = _provenance(source, shapes)
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
    """Name, shapes and table of each surface."""
    for number_format, theirs in PRODUCTS.items():
        rows = table.where(table.columns["gemm_dtype"] == theirs)
        if number_format in accelerator.peak_flops_per_s and len(rows) >= FEWEST_ROWS:
            shapes = _products(rows, accelerator, number_format)
            if shapes is not None:
                yield f"gemm/{number_format}", shapes, table
    rows = aiconfigurator.attention(package, accelerator.name, framework)
    if rows is not None and len(rows) >= FEWEST_ROWS:
        shapes = _attention(rows, accelerator)
        if shapes is not None:
            yield f"attention/{BF16}", shapes, rows


def _provenance(table: KernelTable, shapes: Shapes) -> dict[str, Any]:
    return {
        "file": table.file,
        "sha256": table.sha256,
        "framework": f"{table.framework} {table.version}",
        "num_rows": len(shapes.seconds),
        "utilisation": round(shapes.utilisation, 4),
        "notes": list(shapes.notes),
    }


# --- from rows to shapes ---


def _products(table: KernelTable, accelerator: Accelerator, number_format: str) -> Shapes | None:
    streaming, kernel_s = _streaming(accelerator), prior().parameters["kernel_s"].prior
    narrow = NARROW_BYTES[number_format]
    peak = accelerator.peak_flops_per_s[number_format]
    shape, seconds = table.numbers("m", "n", "k"), table.seconds
    # The planner counts quantising by itself: one kernel that reads 16 bits and writes the narrow format.
    quantising_s = (2 + narrow) * shape[:, 0] * shape[:, 2] / streaming + kernel_s
    besides_s = np.zeros(len(shape)) if number_format == BF16 else quantising_s

    def model_s(shape: Floats, ratio: float) -> Floats:
        return np.asarray(
            gemm_s(
                *shape.T, flops_per_s=peak * ratio, bytes_per_s=streaming, kernel_s=kernel_s,
                num_units=accelerator.num_compute_units, element_bytes=narrow,
            )
        )  # fmt: skip

    as_in_training = (shape >= LEAST_PRODUCT).all(axis=1) & (shape % MULTIPLE == 0).all(axis=1)
    return _shapes(
        shape[as_in_training],
        seconds[as_in_training],
        besides_s=besides_s[as_in_training],
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
        besides_s=np.zeros(int(long_enough.sum())),
        flops=flops,
        peak=peak,
        model_s=lambda shape, ratio: flops(shape) / (peak * ratio) + kernel_s,
    )


def _streaming(accelerator: Accelerator) -> float:
    return accelerator.memory_bytes_per_s * prior().parameters["memory_ratio"].prior


def _shapes(
    shape: Floats,
    seconds: Floats,
    *,
    besides_s: Floats,
    flops: Callable[[Floats], Floats],
    peak: float,
    model_s: Callable[[Floats, float], Floats],
) -> Shapes | None:
    """What can be believed of the rows; None when that is too little. Raises InputError when too many cannot be.

    besides_s: the part of `seconds` that other kernels took, as far as that is known.
    """
    usable = np.isfinite(seconds) & (seconds > 0)
    notes = [] if usable.all() else [f"refused {_count(~usable)}: no time"]
    shape, seconds, besides_s = shape[usable], seconds[usable], besides_s[usable]
    impossible = flops(shape) / seconds > peak
    if impossible.sum() > MOST_IMPOSSIBLE * len(impossible):
        raise InputError(
            "a table is not of this accelerator: too many of its rows are faster than the peak",
            got=f"{_count(impossible)} of {len(seconds):,}", allowed=f"{MOST_IMPOSSIBLE:.0%}",
        )  # fmt: skip
    seconds = np.maximum(seconds - besides_s, LEAST_SHARE * seconds)
    large = ~impossible & (flops(shape) >= LARGE_FLOPS)
    if not large.any():
        return None
    ratio = float(np.median(flops(shape[large]) / seconds[large])) / peak
    stalled = seconds > MOST_TIMES_SLOWER * model_s(shape, ratio)
    for refused, why in ((impossible, "faster than the peak"), (stalled, "a stall, no kernel")):
        if refused.any():
            notes.append(f"refused {_count(refused)}: {why}, first {_words(shape[refused][0])}")
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
    """Where a product with more rows and else the same shape takes much less time."""
    order = np.lexsort(shape.T)  # by the first axis last
    shape, seconds = shape[order], seconds[order]
    is_next = (shape[1:, 1:] == shape[:-1, 1:]).all(axis=1) & (shape[1:, 0] > shape[:-1, 0])
    ratio = np.where(is_next, seconds[1:] / seconds[:-1], 1.0)
    if not (ratio < FALLS).any():
        return []
    worst = int(np.argmin(ratio))
    return [
        f"kept, though {_count(ratio < FALLS)} take over {1 - FALLS:.0%} less time than with less work: "
        f"{_words(shape[worst + 1])} {ratio[worst]:.2f} of the time of {_words(shape[worst])}"
    ]


def _count(chosen: NDArray[np.bool_]) -> str:
    number = int(chosen.sum())
    return f"{number:,} row" if number == 1 else f"{number:,} rows"


def _words(shape: Floats) -> str:
    return " x ".join(f"{size:.0f}" for size in shape)


# --- from shapes to a surface ---


def _surface(shapes: Shapes, axes: Sequence[str]) -> tuple[EfficiencyCorrection, Floats]:
    """The surface, and what it says of every row when the row's octaves are left out."""
    y = shapes.log_ratios
    octaves, of_row = np.unique(np.round(shapes.x), axis=0, return_inverse=True)
    of_row = of_row.ravel()
    black = octaves.sum(axis=1) % 2 == 0 if len(octaves) > MOST_POINTS else np.full(len(octaves), True)
    chosen = np.flatnonzero(black)[:MOST_POINTS]
    rows = [np.flatnonzero(of_row == octave) for octave in chosen]
    x = np.array([shapes.x[r].mean(axis=0) for r in rows])
    middle = np.array([np.median(y[r]) for r in rows])
    noise = np.array([1.4826 * np.median(np.abs(y[r] - np.median(y[r]))) / math.sqrt(len(r)) for r in rows])
    correction = fit_correction(x, middle, noise, axes=axes)
    if correction is None:
        raise InputError("a table has too few shapes for a surface", got=len(x))
    said = np.log(correction.factor(*(2.0**axis for axis in shapes.x.T)))
    for mean, r in zip(correction.leave_one_out().mean, rows, strict=True):
        said[r] = mean
    return correction, said - y


# --- collectives ---


def _collectives(package: Package, device: str) -> dict[str, Any]:
    """What each took by devices and size of the message, to be read: the shipped constants of fabrics know these
    tables."""
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
