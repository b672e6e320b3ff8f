"""The calibration of a device from the records of `bench device`.

device_rates     peaks, memory rate and launch time
device_kernels   parameters and efficiency corrections of the kernels
device_fabric    latency and rate of the machine's fabric, and its measured collectives
residual         parameters of whole steps

Errors come from leave-one-out: the other points predict each point.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshwright.calibration.device import Check, DeviceCalibration, Kernels
from meshwright.calibration.parameters import MeasuredParameter
from meshwright.errors import InputError
from meshwright.fitting.device_fabric import fit_fabric, measured_collectives
from meshwright.fitting.device_kernels import MAX_RATIO, KernelFits, fit_kernels
from meshwright.fitting.device_rates import (
    MeasuredRates,
    RowsByFamily,
    accelerator_of,
    copy_bytes_per_s,
    launch_s,
    peaks_of,
    rows_by_family,
)
from meshwright.fitting.errors import LEAST_SD, errors_of
from meshwright.fitting.kernel_times import HOST, TODAY
from meshwright.fitting.residual import fit_residual
from meshwright.records.device import DeviceRow, Records, in_windows
from meshwright.records.fields import Count, Fields, Positive, Whole, check
from meshwright.records.points import PointFamily
from meshwright.records.steps import run_file_of
from meshwright.specs.hardware import THIS_MACHINE, Accelerator

RESIDUAL_SD = 0.25
"""Standard deviation of the logarithm of a step's time over the sum of its kernels, on a device whose whole steps were
not timed. An assumption, as wide as what published fits of kernels leave unexplained. A training's own quick
measurement has no such term."""

WITHOUT_COMMUNICATION = {"isolated", "concurrent"}
LONGEST_CHECK_S = 0.15
"""Longest step that a training repeats a few times before it begins."""


class MeasuredDevice(Fields):
    """The device of records, as the sidecar of `bench device` has it."""

    name: str
    type: str
    accelerator: str | None
    count: Whole
    threads: Whole
    memory_bytes: Positive
    compute_units: Count


def calibrate(files: Sequence[Records]) -> DeviceCalibration:
    """One calibration of the device that all `files` are records of.

    Raises InputError for records of different devices and for records without GEMMs or copies.
    """
    device = _one_device(files)
    rows = [row for file in files for row in file.measured]
    of = rows_by_family(rows, threads=0)
    for needed in (PointFamily.GEMM, PointFamily.MEMORY):
        if not of[needed]:
            raise InputError(
                f"the records hold no {needed} measurement", got=str(files[0].path),
                hint=f"meshwright bench device --families {needed} --resume",
            )  # fmt: skip
    found = _fit(device, of)
    kernels = _assemble(files, device, rows, found)
    steps = in_windows(of[PointFamily.TRAINING])
    if kernels.shares_host:
        kernels = replace(kernels, checks=_checks(steps))
    fit = fit_residual(kernels, steps)
    if fit is None:
        return kernels
    errors = {**found.errors, PointFamily.TRAINING: errors_of(fit.leave_one_out, fit.before)}
    return replace(fit.device, details={**kernels.details, "errors": _errors_document(errors)})


def _fit(device: Mapping[str, Any], of: RowsByFamily) -> KernelFits:
    """Parameters and corrections of kernels that have the whole device."""
    accelerator = accelerator_of(device, of)
    on_host = device["type"] == "cpu"
    memory_ratio = 1.0 if on_host else copy_bytes_per_s(of[PointFamily.MEMORY]) / accelerator.memory_bytes_per_s
    rates = MeasuredRates(accelerator=accelerator, memory_ratio=min(memory_ratio, MAX_RATIO), kernel_s=launch_s(of))
    known = {**(HOST if on_host else {}), **TODAY}
    parameters = {name: MeasuredParameter(value=value, sd=0.0) for name, value in known.items()}
    if accelerator.vendor == THIS_MACHINE:
        parameters["general_factor"] = MeasuredParameter(value=1.0, sd=RESIDUAL_SD)
    if not on_host:
        parameters["memory_ratio"] = MeasuredParameter(value=rates.memory_ratio, sd=LEAST_SD)
    if of[PointFamily.LAUNCH]:
        parameters["kernel_s"] = MeasuredParameter(value=rates.kernel_s, sd=LEAST_SD)
    return fit_kernels(rates, of, parameters=parameters)


def _assemble(
    files: Sequence[Records], device: Mapping[str, Any], rows: Sequence[DeviceRow], found: KernelFits
) -> DeviceCalibration:
    """The calibration without whole steps."""
    accelerator = found.rates.accelerator
    collectives = [r for r in rows if r.point.family is PointFamily.COLLECTIVES and not r.point.threads]
    fabric, of_fabric = fit_fabric(accelerator, device, collectives)
    sidecar = files[-1].sidecar
    torch = sidecar["software"].get("torch", "?")
    return DeviceCalibration(
        accelerator=accelerator,
        fabric=fabric,
        num_devices=device["count"],
        shares_host=device["type"] == "cpu",
        num_cores=device["threads"],
        collectives=measured_collectives(collectives),
        parameters={**found.parameters, **of_fabric},
        corrections=found.corrections,
        by_threads={
            count: _with_threads(accelerator, rows, threads=count, kernel_s=found.rates.kernel_s)
            for count in {row.point.threads for row in rows} - {0}
        },
        made=f"{len(rows)} measurements of {sidecar['device']['name']}, PyTorch {torch}, {sidecar['started'][:10]}",
        details={
            "device": device,
            "records": [_origin(file) for file in files],
            "errors": _errors_document(found.errors),
        },
    )


def _with_threads(accelerator: Accelerator, rows: Iterable[DeviceRow], *, threads: int, kernel_s: float) -> Kernels:
    """Kernels of a process that has so many threads of the CPU."""
    of = rows_by_family(rows, threads=threads)
    own = replace(
        accelerator,
        peak_flops_per_s=peaks_of(of[PointFamily.GEMM]),
        memory_bytes_per_s=copy_bytes_per_s(of[PointFamily.MEMORY]),
    )
    found = fit_kernels(MeasuredRates(accelerator=own, memory_ratio=MAX_RATIO, kernel_s=kernel_s), of)
    return Kernels(
        peak_flops_per_s=own.peak_flops_per_s,
        memory_bytes_per_s=own.memory_bytes_per_s,
        parameters=found.parameters,
        corrections=found.corrections,
    )


def _checks(steps: Iterable[DeviceRow]) -> tuple[Check, ...]:
    """The longest of the short steps without communication, for each number of processes and format."""
    chosen: dict[tuple[int, str], DeviceRow] = {}
    for row in steps:
        of = row.point.num_processes, row.point.format
        if row.point.kernel in WITHOUT_COMMUNICATION and row.seconds_median <= LONGEST_CHECK_S:
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


def _one_device(files: Sequence[Records]) -> Mapping[str, Any]:
    first = files[0].sidecar["device"]
    for file in files[1:]:
        if file.sidecar["device"] != first:
            raise InputError(
                f"{file.path}: records of another device",
                got=file.sidecar["device"].get("name"), allowed=first.get("name"),
                hint="calibrate each device by itself",
            )  # fmt: skip
    check(first, kind=MeasuredDevice, where=str(files[0].path.with_suffix(".json")))
    return first


def _errors_document(errors: Mapping[PointFamily, Any]) -> dict[str, Any]:
    return {family.value: vars(found) for family, found in errors.items()}


def _origin(file: Records) -> dict[str, Any]:
    keys = ("started", "ended", "software", "driver", "git_commit", "command")
    return {"num_points": len(file.measured), **{key: file.sidecar[key] for key in keys}}
