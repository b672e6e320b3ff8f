"""`meshwright bench device`: matrix products, attention, memory, training steps, collectives of this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshwright.cli.needs import require_torch
from meshwright.cli.options import budget_option, json_option, run_argument, set_option, verb
from meshwright.errors import InputError

if TYPE_CHECKING:
    from meshwright.bench.device import DeviceOutcome
    from meshwright.records.points import PointFamily, Workload

DEFAULT_FOLDER = Path("bench")
DEFAULT_SEQUENCE = 2048
MOST_PROCESSES = 64
ON_CPU = (2, 4)


def _families(ctx: click.Context, param: click.Parameter, text: str | None) -> list[PointFamily]:
    from meshwright.records.points import PointFamily

    words = list(PointFamily) if text is None else [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in list(PointFamily):
            raise InputError("unknown family", got=word, allowed=", ".join(PointFamily))
    if not words:
        raise InputError("--families names none", allowed=", ".join(PointFamily))
    return [PointFamily(word) for word in words]


def _counts(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and 1 <= int(word) <= MOST_PROCESSES for word in words):
        raise InputError(
            "--processes is not a list of numbers", got=text, allowed=f"1 to {MOST_PROCESSES}, as in 2,4"
        )
    return tuple(sorted({int(word) for word in words}))


@verb(
    "device",
    examples=[
        "meshwright bench device",
        "meshwright bench device examples/runs/tiny-llama-cpu.yaml --budget 30s",
        "meshwright bench device --model llama3.1-8b --families gemm,attention --out bench/gpu --resume",
    ],
)
@run_argument(required=False)
@set_option
@click.option("--model", metavar="MODEL", help="Measure the shapes of this model first; without a run file.")
@click.option(
    "--seq", "sequence_length", type=click.IntRange(min=1), default=DEFAULT_SEQUENCE, show_default=True,
    metavar="TOKENS", help="Tokens per sequence of --model.",
)  # fmt: skip
@click.option(
    "--families", callback=_families, metavar="F,F,...",
    help="What to measure: gemm, attention, memory, elementwise, optimizer, launch, transfer, training, "
    "collectives.  [default: all]",
)  # fmt: skip
@budget_option(default="170s", help="Time to measure for, shared out over the families.")
@click.option(
    "--out", "folder", type=click.Path(file_okay=False, path_type=Path), default=DEFAULT_FOLDER,
    show_default=True, metavar="DIR", help="Where records.csv and records.json go.",
)  # fmt: skip
@click.option(
    "--resume", is_flag=True, help="Add to the records in --out; what they hold is not measured again."
)
@click.option(
    "--processes", "num_processes", callback=_counts, metavar="N,N,...",
    help="Local processes that exchange and train together.  [default: 2, 4 and so on up to one a GPU; 2,4 on a CPU]",
)  # fmt: skip
@json_option
def command(
    run_path: Path | None,
    overrides: tuple[str, ...],
    model: str | None,
    sequence_length: int,
    families: list[PointFamily],
    budget_s: float,
    folder: Path,
    resume: bool,
    num_processes: tuple[int, ...] | None,
    as_json: bool,
) -> None:
    """Measure this machine's device: matrix products, attention, memory, whole training steps, collectives.

    First the shapes of a model and its plan, in the formats that the run uses, then a grid. Each measurement is
    repeated until its median is known to 3 %, or its part of the time is spent, and written at once: Ctrl-C keeps
    what was measured, --resume goes on.
    `meshwright calibrate DIR` makes of it what the planner uses.
    """
    workload = _workload(run_path, overrides, model, sequence_length)
    require_torch("measuring a device")

    from dataclasses import replace

    from meshwright.cli.output import emit_json, progress

    with progress("starting PyTorch"):
        from meshwright.bench.device import DeviceBenchRequest, fewer_threads, measure_device, sidecar_of
        from meshwright.records.device import DeviceRecorder
        from meshwright.training import device as devices

    found = devices.find_device()
    request = DeviceBenchRequest(
        families=families,
        budget_s=budget_s,
        num_processes=num_processes or ON_CPU,
        workload=workload,
        command=("meshwright", *sys.argv[1:]),
    )
    request = replace(request, threads=fewer_threads(request.num_processes))
    if found.type == "cuda":
        request = _on_gpus(request, devices.num_devices(found), asked=num_processes)
    recorder = DeviceRecorder(folder, sidecar=sidecar_of(found, request), resume=resume)
    try:
        with progress(f"measuring {devices.device_name(found)}", total=budget_s) as advance:
            outcome = measure_device(request, device=found, recorder=recorder, advance=advance)
    except KeyboardInterrupt:
        print(
            f"note: {len(recorder.done)} measurements are in {recorder.path}; go on with --resume",
            file=sys.stderr,
        )
        raise
    if as_json:
        emit_json(_document(recorder.path, recorder.sidecar, outcome))
    else:
        _show(recorder.path, recorder.sidecar, outcome)


def _on_gpus(request: Any, num_gpus: int, *, asked: tuple[int, ...] | None) -> Any:
    from dataclasses import replace

    if asked is not None and max(asked) > num_gpus:
        raise InputError("--processes is more than there are GPUs", got=max(asked), allowed=f"<= {num_gpus}")
    counts = [2**power for power in range(1, num_gpus.bit_length()) if 2**power < num_gpus]
    return replace(request, num_processes=asked or (*counts, num_gpus))


def _workload(
    run_path: Path | None, overrides: tuple[str, ...], model: str | None, sequence_length: int
) -> Workload | None:
    """The model and plan whose shapes come first; None: the grid alone."""
    from meshwright import catalog, runfile
    from meshwright.records.points import Workload
    from meshwright.specs.plan import Plan

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


def _document(path: Path, sidecar: dict[str, Any], outcome: DeviceOutcome) -> dict[str, Any]:
    return {
        "records": path,
        "device": sidecar["device"],
        "families": {family.value: counts for family, counts in outcome.counts.items()},
        "seconds": outcome.seconds,
        "notes": outcome.notes,
    }


def _show(path: Path, sidecar: dict[str, Any], outcome: DeviceOutcome) -> None:
    from meshwright.cli.output import note, print_line, print_table

    print_line(sidecar["device"]["name"], style="bold")
    print_table(
        {"family": "left", "known to 3 %": "right", "less well": "right", "failed": "right"},
        [(family.value, *counts.values()) for family, counts in outcome.counts.items()],
    )
    print_line(f"Measured in {outcome.seconds:.0f} s; the records are in {path}.")
    for caution in outcome.notes:
        note(caution)
