"""`meshwright bench device`: GEMMs, attention, memory, training steps and collectives of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright import runfile
from meshwright.catalog import lookup as catalog
from meshwright.cli.needs import load_with_torch
from meshwright.cli.output import emit_json, note, print_line, print_table
from meshwright.errors import InputError
from meshwright.records.device import DeviceRecorder
from meshwright.records.points import PointFamily, Workload
from meshwright.specs.plan import Plan

if TYPE_CHECKING:
    from meshwright.bench.device import DeviceOutcome  # imports PyTorch


def run(
    *,
    run_path: Path | None,
    overrides: tuple[str, ...],
    model: str | None,
    sequence_length: int,
    families: str | None,
    budget_s: float,
    folder: Path,
    resume: bool,
    num_processes: tuple[int, ...] | None,
    as_json: bool,
) -> None:
    """Check what is asked for, measure, and print how many points are known."""
    chosen = _families(families)
    workload = _workload(run_path, overrides, model, sequence_length)
    measure = load_with_torch("meshwright.cli.bench_device_torch:measure", what="measuring a device")
    recorder, outcome = measure(
        chosen, workload=workload, budget_s=budget_s, folder=folder, resume=resume, num_processes=num_processes
    )
    if as_json:
        emit_json(_document(recorder, outcome))
    else:
        _show(recorder, outcome)


def _families(text: str | None) -> list[PointFamily]:
    names = list(PointFamily) if text is None else [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in list(PointFamily):
            raise InputError("unknown family", got=name, allowed=", ".join(PointFamily))
    if not names:
        raise InputError("--families names none", allowed=", ".join(PointFamily))
    return [PointFamily(name) for name in names]


def _workload(
    run_path: Path | None, overrides: tuple[str, ...], model: str | None, sequence_length: int
) -> Workload | None:
    """The model and plan whose shapes are measured first; None for the grid of shapes only."""
    if run_path is None:
        if overrides:
            raise InputError("--set changes a run file, and none is given", hint="name it: RUN.yaml")
        if model is None:
            return None
        return Workload(model=catalog.model(model), plan=Plan(), seq_len=sequence_length)
    if model is not None:
        raise InputError("a run file and --model are both given", hint="--set model=NAME changes the file's")
    run = runfile.load(run_path, overrides=overrides)
    plan = run.plan or Plan(micro_batch=run.micro_batch or 1)
    formats = (run.precision.matmul, "bf16")  # attention, router and head stay in 16 bits
    return Workload(model=run.model, plan=plan, seq_len=run.sequence_length, formats=formats)


def _document(recorder: DeviceRecorder, outcome: DeviceOutcome) -> dict[str, Any]:
    return {
        "records": recorder.path,
        "device": recorder.sidecar["device"],
        "families": {family.value: counts for family, counts in outcome.counts.items()},
        "seconds": outcome.seconds,
        "notes": outcome.notes,
    }


def _show(recorder: DeviceRecorder, outcome: DeviceOutcome) -> None:
    print_line(recorder.sidecar["device"]["name"], style="bold")
    print_table(
        {"family": "left", "known to 3 %": "right", "less well": "right", "failed": "right"},
        [(family.value, *counts.values()) for family, counts in outcome.counts.items()],
    )
    print_line(f"Measured in {outcome.seconds:.0f} s; the records are in {recorder.path}.")
    for caution in outcome.notes:
        note(caution)
