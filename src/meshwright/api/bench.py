"""`meshwright.bench_device` and `meshwright.bench_train`: a device and trainings, measured and kept as records."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from meshwright.api import arguments, runs
from meshwright.api.question import Amount, AnyPath, Count, Flag, PlainText, Unchecked, answered_by_body, question
from meshwright.api.runs import Overrides, RunSource, calibrating, load_run
from meshwright.errors import InputError
from meshwright.training.cpu_libraries import require_torch

if TYPE_CHECKING:
    from meshwright.answers.record_files import DeviceMeasurements, TrainingSweep
    from meshwright.bench.device import DeviceBenchRequest
    from meshwright.bench.training import TrainingBenchRequest
    from meshwright.records.device import DeviceRecorder
    from meshwright.records.points import PointFamily, Workload
    from meshwright.records.trainings import TrainingRecorder

MAX_PROCESSES = 64
ON_CPU = (2, 4)
"""Numbers of processes that are measured on a CPU."""
LAUNCHER_HINT = "--launcher 'torchrun --nproc-per-node 2'"


@question("meshwright.api.bench:device_measurements")
def bench_device(
    run: Annotated[RunSource | None, runs.RUN] = None,
    *,
    overrides: Annotated[Overrides, runs.OVERRIDES] = (),
    model: Annotated[
        str | None,
        Unchecked("Measure the shapes of this catalogue model first, in place of a run file.", metavar="MODEL"),
    ] = None,
    sequence_length: Annotated[
        int, Count("Sequence length of --model in tokens.", flag="--seq", metavar="TOKENS")
    ] = 2048,
    families: Annotated[
        Sequence[str],
        PlainText(
            "What to measure, of gemm, attention, memory, elementwise, optimizer, launch, transfer, training and "
            "collectives.",
            unset="all",
            metavar="F",
            is_joined=True,
        ),
    ] = (),
    budget: Annotated[
        float | str, Unchecked("Time to measure, split over the families: 90s, 3m, 1h.", metavar="TIME")
    ] = "170s",
    out: Annotated[
        str | os.PathLike[str], AnyPath("Folder of the results, records.csv and records.json.", is_file=False)
    ] = "bench",
    resume: Annotated[bool, Flag("Keep the records in --out, and measure only what they lack.")] = False,
    num_processes: Annotated[
        Sequence[int],
        Count(
            "Numbers of local processes for collectives and training.",
            unset="2, 4, ... up to the number of GPUs; 2,4 on a CPU",
            flag="--processes",
            high=MAX_PROCESSES,
            is_joined=True,
        ),
    ] = (),
) -> DeviceMeasurements:
    """Measure GEMMs, attention, memory, training steps and collectives of this machine.

    Returns:
        All measurements of the folder, also those of earlier sessions.

    Raises:
        InputError: a wrong value, or records in `out` that are of another device or would be written over.
        MissingDependencyError: PyTorch is absent.

    Example:
        >>> import meshwright as mw
        >>> mw.bench_device(model="llama3.1-8b", budget="60s").to_frame()  # doctest: +SKIP
    """
    return answered_by_body()


def device_measurements(**asked: Any) -> DeviceMeasurements:
    """The answer to `bench_device`."""
    request, device, recorder = device_request(**asked, command=("meshwright.bench_device",))

    from meshwright.answers.record_files import DeviceMeasurements
    from meshwright.bench.device import measure_device
    from meshwright.records.device import read

    measure_device(request, device=device, recorder=recorder)
    return DeviceMeasurements(folder=recorder.folder, records=read(recorder.folder))


def device_request(
    *,
    families: Sequence[str],
    budget: float | str,
    out: str | Path,
    resume: bool,
    num_processes: Sequence[int],
    command: Sequence[str],
    **of_workload: Any,
) -> tuple[DeviceBenchRequest, Any, DeviceRecorder]:
    """Check the arguments of `bench_device`, find the device (a `torch.device`) and open the records."""
    budget_s = arguments.seconds("--budget", budget)
    chosen = _families(families)
    workload = _workload(**of_workload)
    require_torch("measuring a device")

    from meshwright.bench.device import DeviceBenchRequest, fewer_threads, sidecar_of
    from meshwright.records.device import DeviceRecorder
    from meshwright.training import device as devices

    found, asked = devices.find_device(), tuple(sorted(set(num_processes)))
    request = DeviceBenchRequest(
        families=chosen, budget_s=budget_s, num_processes=asked or ON_CPU, workload=workload, command=tuple(command)
    )
    request = replace(request, threads=fewer_threads(request.num_processes))
    if found.type == "cuda":
        request = replace(request, num_processes=_on_gpus(asked, devices.num_devices(found)))
    return request, found, DeviceRecorder(Path(out), sidecar=sidecar_of(found, request), resume=resume)


def _on_gpus(asked: tuple[int, ...], num_gpus: int) -> tuple[int, ...]:
    if max(asked, default=0) > num_gpus:
        raise InputError("--processes is more than there are GPUs", got=max(asked), allowed=f"<= {num_gpus}")
    return asked or (*(2**power for power in range(1, num_gpus.bit_length()) if 2**power < num_gpus), num_gpus)


def _families(names: Sequence[str]) -> list[PointFamily]:
    from meshwright.records.points import PointFamily

    for name in names:
        if name not in list(PointFamily):
            raise InputError("unknown family", got=name, allowed=", ".join(PointFamily))
    return [PointFamily(name) for name in names or PointFamily]


def _workload(
    *, run: RunSource | None, overrides: Sequence[str], model: str | None, sequence_length: int
) -> Workload | None:
    """The model and plan whose shapes are measured first; None for the grid of shapes only."""
    from meshwright.catalog import lookup as catalog
    from meshwright.records.points import Workload
    from meshwright.specs.plan import Plan

    if run is None:
        if overrides:
            raise InputError("--set changes a run file, and none is given", hint="name it: RUN.yaml")
        if model is None:
            return None
        return Workload(model=catalog.model(model), plan=Plan(), seq_len=sequence_length)
    if model is not None:
        raise InputError("a run file and --model are both given", hint="--set model=NAME changes the file's")
    found = load_run(run, overrides=overrides)
    plan = found.plan or Plan(micro_batch=found.micro_batch or 1)
    formats = (found.precision.matmul, "bf16")  # attention, router and head stay in 16 bits
    return Workload(model=found.model, plan=plan, seq_len=found.sequence_length, formats=formats)


@question("meshwright.api.bench:training_sweep")
def bench_train(
    *paths: Annotated[str | os.PathLike[str], AnyPath("Run files.", least=1, metavar="RUN.yaml")],
    sweeps: Annotated[
        Sequence[str],
        PlainText(
            "Values of one key of the run file, as in --sweep batch.micro=1,2,4; every combination is trained.",
            flag="--sweep",
            metavar="KEY=V,V,...",
        ),
    ] = (),
    engines: Annotated[
        Sequence[str], PlainText("Compare engines: short for --sweep engine=E,E,...", metavar="E", is_joined=True)
    ] = (),
    overrides: Annotated[Overrides, runs.OVERRIDES] = (),
    calibration: Annotated[str | None, runs.CALIBRATION] = None,
    num_runs: Annotated[
        int, Count("Trainings of each configuration, each in a new process.", flag="--runs", high=1000)
    ] = 5,
    steps: Annotated[int, Count("Measured steps of each training.", high=10**6)] = 20,
    warmup: Annotated[int, Count("Warm-up steps before them.", low=0, high=10**6)] = 3,
    launcher: Annotated[
        str | None,
        Unchecked(
            "Command that starts `-m meshwright train`, such as torchrun or srun ... python.",
            unset="this Python",
            metavar="COMMAND",
        ),
    ] = None,
    timeout_s: Annotated[
        float, Amount("Time after which one training is ended.", flag="--timeout", metavar="SECONDS")
    ] = 3600.0,
    out: Annotated[
        str | os.PathLike[str],
        AnyPath("Folder of trainings.csv, trainings.json and one folder per training.", is_file=False),
    ] = "bench-train",
    resume: Annotated[bool, Flag("Keep the trainings in --out, and run only what they lack.")] = False,
) -> TrainingSweep:
    """Measure training throughput over a sweep of configurations. Each training runs in a process of its own.

    Returns:
        All trainings of the folder, also those of earlier sessions, compared with their predictions.

    Raises:
        InputError: a wrong value, or trainings in `out` that are of another device or would be written over.
        MissingDependencyError: PyTorch is absent.

    Example:
        >>> import meshwright as mw
        >>> mw.bench_train("run.yaml", sweeps=["batch.micro=1,2"], num_runs=3).to_frame()  # doctest: +SKIP
    """
    return answered_by_body()


def training_sweep(**asked: Any) -> TrainingSweep:
    """The answer to `bench_train`."""
    request, recorder = sweep_request(**asked, command=("meshwright.bench_train",))

    from meshwright.answers.record_files import TrainingSweep
    from meshwright.bench.training import train_all
    from meshwright.records.trainings import read

    train_all(request, recorder=recorder)
    return TrainingSweep(folder=recorder.folder, trainings=read(recorder.folder))


def sweep_request(
    *,
    paths: Sequence[Path],
    sweeps: Sequence[str],
    engines: Sequence[str],
    overrides: Sequence[str],
    calibration: str | None,
    steps: int,
    warmup: int,
    launcher: str | None,
    out: str | Path,
    resume: bool,
    command: Sequence[str],
    **asked: Any,
) -> tuple[TrainingBenchRequest, TrainingRecorder]:
    """Check the arguments of `bench_train`, and open the records."""
    from meshwright.bench.training import TrainingBenchRequest
    from meshwright.records.files import now
    from meshwright.records.sweep import configurations, parse_sweep
    from meshwright.records.trainings import TrainingRecorder

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError(
            "this command starts the trainings itself: it does not run under a launcher", hint=LAUNCHER_HINT
        )
    found = configurations(
        paths,
        sweeps=[parse_sweep(text) for text in (*sweeps, *([f"engine={','.join(engines)}"] if engines else []))],
        overrides=[*calibrating(calibration), *overrides],
        steps=steps + warmup,
    )
    if all(configuration.engine == "native" for configuration in found):
        require_torch("training")  # of several engines, an absent one is a row with its reason
    request = TrainingBenchRequest(configurations=found, warmup=warmup, launcher=_launched(launcher), **asked)
    recorder = TrainingRecorder(
        Path(out), configurations=found, steps=steps, warmup=warmup, command=command, started=now(), resume=resume
    )
    return request, recorder


def _launched(launcher: str | None) -> tuple[str, ...]:
    """The arguments of the launcher, or this Python."""
    if launcher is None:
        return (sys.executable,)
    try:
        argv = tuple(shlex.split(launcher))
    except ValueError as error:
        raise InputError(f"--launcher is no command line ({error})", got=launcher) from None
    if not argv:
        raise InputError("--launcher is empty", hint=LAUNCHER_HINT)
    return argv
