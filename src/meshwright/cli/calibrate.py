"""`meshwright calibrate`: a calibration of a device from its records."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from meshwright.answers.quantities import interval_of, percent, value_of
from meshwright.calibration import communication
from meshwright.calibration.device import DeviceCalibration, installed_path, to_document
from meshwright.cli.output import emitted_json, note, print_line, print_table, write_document
from meshwright.cli.run_input import run_from
from meshwright.cost.uncertainty import Z80
from meshwright.errors import InputError
from meshwright.fitting.advice import Advice, advise
from meshwright.fitting.device import calibrate
from meshwright.json_values import picked
from meshwright.records.device import busy_note, read
from meshwright.specs.hardware import HERE
from meshwright.units import format_seconds

NUM_CANDIDATES = 5
"""Measurements that --for lists."""


def run(*, paths: tuple[Path, ...], out: Path | None, install: bool, run_path: Path | None) -> None:
    """Calibrate, write the files, and show the errors."""
    if not paths:
        raise InputError("there is nothing to calibrate from", hint="name the records of `meshwright bench device`")
    files = [read(path) for path in paths]
    note(*(f"{file.path}: {busy_note(file.sidecar['busy'])}" for file in files if file.sidecar.get("busy")))
    found = calibrate(files)
    targets = [out or files[0].path.with_name("calibration.json")]
    if install:
        if found.details["device"]["accelerator"] is not None:
            raise InputError(
                "--install is for a device that the catalogue lacks", got=found.accelerator.name,
                hint="name the file: meshwright plan RUN.yaml --calibration FILE",
            )  # fmt: skip
        targets.append(installed_path())
    for target in targets:
        write_document(to_document(found), target)
    advice = None if run_path is None else advise(run_from(run_path, calibration=str(targets[0])))
    if emitted_json(_document(found, targets, advice)):
        return
    _show(found, advice)
    for target in targets:
        note(f"wrote {target}")
    if run_path is not None and advice is None:
        note("the records have too few shapes for efficiency corrections, so none is ranked: measure for longer")
    if not install and found.details["device"]["accelerator"] is None:
        note(f"a run of cluster {HERE!r} uses it with --calibration {targets[0]}; --install makes it the default")


def _document(found: DeviceCalibration, targets: list[Path], advice: Advice | None) -> dict[str, Any]:
    return {
        "calibration": targets,
        **picked(found, "made", "parameters", "contention", "unexplained_sd"),
        "device": found.details["device"],
        "peak_flops_per_s": found.accelerator.peak_flops_per_s,
        "memory_bytes_per_s": found.accelerator.memory_bytes_per_s,
        "errors": found.details["errors"],
        "collectives": communication.to_document(found.collectives),
        "corrections": {name: len(s.y) for name, s in found.corrections.items()},
        "advice": advice,
    }


def _show(found: DeviceCalibration, advice: Advice | None) -> None:
    print_line(found.made, style="bold")
    peaks = ", ".join(f"{rate / 1e12:.3g} TFLOP/s {name}" for name, rate in found.accelerator.peak_flops_per_s.items())
    print_line(f"{peaks}; memory {found.accelerator.memory_bytes_per_s / 1e9:.3g} GB/s.")
    print_line()
    print_table(
        {"leave-one-out error": "left", "points": "right", "median": "right", "90th percentile": "right",
         "median of the formula": "right"},
        [
            (family, e["num_points"], percent(e["median"]), percent(e["p90"]), percent(e["formula_median"]))
            for family, e in found.details["errors"].items()
        ],
    )  # fmt: skip
    _show_collectives(found)
    if found.unexplained_sd is not None:
        print_line()
        print_line(
            f"Whole steps: 80 % of the leave-one-out predictions were within "
            f"{percent(math.exp(Z80 * found.unexplained_sd) - 1)} of the measurement."
        )
    if advice is not None:
        _show_advice(advice)


def _show_collectives(found: DeviceCalibration) -> None:
    collectives = communication.to_document(found.collectives)
    rows = [
        (kernel, count, format_seconds(curve[0][1]), f"{curve[-1][0] / curve[-1][1] / 1e9:.3g}")
        for kernel, by_count in collectives.items() for count, curve in by_count.items()
    ]  # fmt: skip
    if rows:
        print_line()
        print_table(
            {"collective": "left", "processes": "right", "smallest takes": "right", "largest, GB/s": "right"}, rows
        )


def _show_advice(advice: Advice) -> None:
    print_line()
    print_line(f"{advice.run}: a step takes {value_of(advice.step)} ({interval_of(advice.step)})", style="bold")
    rows = [
        (c.kernel, ", ".join(f"{axis} {size:g}" for axis, size in c.shape.items()), percent(c.step_share),
         percent(c.sd), percent(c.gain / advice.sd**2))
        for c in advice.candidates[:NUM_CANDIDATES]
    ]  # fmt: skip
    print_table(
        {"measure next": "left", "shape": "left", "share of the step": "right", "known to": "right",
         "gain": "right"},
        rows,
    )  # fmt: skip
    name, share = max(advice.others.items(), key=lambda item: item[1])
    print_line(
        f"Gain: share of the estimate's variance that the measurement removes. {percent(share)} of the variance is "
        f"{name}: no measurement of kernels reduces it; the quick measurement of a training does."
    )
