"""A set of runs of one benchmark: N runs with seeds of the system, each in a process of its own, resumable.

    DIR/set.json         description of the set, and its seeds, drawn once
    DIR/run.yaml         the run file of all runs
    DIR/runs/I/          run I: log, task, results of its training with the record
    DIR/runs/I.K/        attempt K at run I that was interrupted: kept, and not counted
    DIR/result_I.txt     the log of run I, once it has ended
    DIR/records/I.json   its record
    DIR/system.json      description of the system

A run that was interrupted starts again from nothing, with its own seed: its clock cannot pause.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.engines.folders import locked
from meshwright.errors import InputError, MeshwrightError
from meshwright.files import record_of, write_atomically
from meshwright.json_values import load_json
from meshwright.mlperf.inputs import BenchmarkInputs
from meshwright.mlperf.log import RunLog, read_log
from meshwright.mlperf.worker import LOG, TRAINING, RunTask, clear_page_cache
from meshwright.programs import with_found_program
from meshwright.training.parent_watch import PARENT, signal_at_end_of_parent
from meshwright.version import __version__

SET, RUN_FILE, RUNS, RECORDS = "set.json", "run.yaml", "runs", "records"
FORMAT = 1
MAX_SEED = 10**9
"""Largest seed of a run file."""
POLL_S = 0.2
GRACE_S = 10.0
STDERR = "stderr.txt"


class RunFailedError(MeshwrightError):
    """A run of the set ended with an error."""

    exit_code = 1


@dataclass(frozen=True, kw_only=True)
class RunSet:
    """Description of a set. Two sets with another value of any field but `seeds` are not the same."""

    benchmark: str
    round: str
    num_runs: int
    seeds: tuple[int, ...]
    seeds_from: str  # system, or given
    run_text: str  # the run file
    division: str
    submission: Mapping[str, str]
    train_samples: int
    facts: Mapping[str, Any]
    warm_up_steps: int
    threads: int | None
    num_concurrent: int
    launcher: tuple[str, ...] = ()  # command that starts the processes of a run; empty: this machine's are started
    version: str = __version__
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """One run that has ended."""

    index: int
    seed: int
    status: str
    seconds: float  # run_start to run_stop
    samples: int  # consumed
    loss: float  # of the last evaluation
    log: Path


def new_seeds(count: int) -> tuple[int, ...]:
    """Seeds from the system's entropy, all different."""
    found: dict[int, None] = {}
    while len(found) < count:
        found[secrets.randbelow(MAX_SEED + 1)] = None
    return tuple(found)


def open_set(folder: Path, wanted: RunSet) -> RunSet:
    """The set in `folder`, which must be `wanted` except for its seeds; `wanted` itself where there is none.

    Raises InputError that names every difference, and where other result files are in the way.
    """
    path = folder / SET
    if not path.is_file():
        if others := sorted(p.name for p in folder.glob("result_*.txt")):
            raise InputError(
                f"{folder} holds results of other runs", got=", ".join(others[:3]), hint="name a new folder with --out"
            )
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / RUN_FILE, wanted.run_text)
        write_atomically(path, json.dumps(asdict(wanted), indent=2) + "\n")
        return wanted
    held = _read_set(path)
    differences = [
        f"{key}: {_short(asdict(held)[key])} -> {_short(value)}"
        for key, value in asdict(wanted).items()
        if key not in ("seeds", "num_concurrent") and asdict(held)[key] != value
    ]
    if wanted.seeds_from == "given" and wanted.seeds != held.seeds:
        differences.append("seeds")
    if differences:
        raise InputError(
            f"{folder} holds another set of runs: {'; '.join(differences)}",
            hint="continue it with its own settings, or name a new folder with --out",
        )
    return held


def _read_set(path: Path) -> RunSet:
    try:
        return record_of(RunSet, load_json(path))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"{path} does not describe a set of runs: {error}", hint="name a new folder with --out"
        ) from error


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) < 60 else "another text"


def results_of(folder: Path, held: RunSet) -> dict[int, RunResult]:
    """The runs that have ended, by number."""
    found: dict[int, RunResult] = {}
    for index, seed in enumerate(held.seeds):
        path = folder / f"result_{index}.txt"
        if path.is_file() and (result := _result(read_log(path), index=index, seed=seed)) is not None:
            found[index] = result
    return found


def _result(log: RunLog, *, index: int, seed: int) -> RunResult | None:
    start, stop, last = log.last("run_start"), log.last("run_stop"), log.last("eval_accuracy")
    if start is None or stop is None:
        return None
    return RunResult(
        index=index,
        seed=seed,
        status=str(stop.metadata.get("status")),
        seconds=(stop.time_ms - start.time_ms) / 1000,
        samples=int(stop.samples or 0),
        loss=float("nan") if last is None else float(last.value),
        log=log.path,
    )


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Samples and loss of a run so far, for progress."""

    index: int
    samples: int
    loss: float | None
    seconds: float


Report = Callable[[dict[int, RunResult], list[RunState]], None]


def run_set(folder: Path, held: RunSet, *, inputs: BenchmarkInputs, report: Report) -> list[RunResult]:
    """Take the runs that are missing. Raises the error of a run that failed once the others have ended."""
    with locked(folder):
        done = results_of(folder, held)
        missing = [index for index in range(held.num_runs) if index not in done]
        active: dict[int, subprocess.Popen[bytes]] = {}
        failures: list[MeshwrightError] = []
        try:
            while active or (missing and not failures):
                while missing and not failures and len(active) < held.num_concurrent:
                    index = missing.pop(0)
                    active[index] = _start(folder, held, index=index, inputs=inputs)
                time.sleep(POLL_S)
                for index, process in list(active.items()):
                    if process.poll() is None:
                        continue
                    del active[index]
                    try:
                        done[index] = _finish(folder, held, index=index, code=process.returncode)
                    except MeshwrightError as error:
                        failures.append(error)
                report(done, [_state(folder, index) for index in active])
        finally:
            _end(active)
        if failures:
            raise failures[0]
        return [done[index] for index in sorted(done)]


def _start(folder: Path, held: RunSet, *, index: int, inputs: BenchmarkInputs) -> subprocess.Popen[bytes]:
    place = folder / RUNS / str(index)
    _put_aside(place)
    place.mkdir(parents=True)
    task = RunTask(
        folder=str(place.absolute()),
        run_file=str((folder / RUN_FILE).absolute()),
        overrides=(),
        seed=held.seeds[index],
        benchmark=held.benchmark,
        train_samples=held.train_samples,
        submission={**held.submission, "division": held.division},
        cache_clear=None if held.launcher else clear_page_cache(inputs.files),
        data_paths=tuple(sorted({str(file.resolve()) for file in inputs.files})),
        warm_up_steps=held.warm_up_steps,
        extra={**held.facts, "concurrent_runs": held.num_concurrent, "meshwright_version": held.version},
    )
    environment = os.environ | ({} if held.threads is None else {"OMP_NUM_THREADS": str(held.threads)})
    if not held.launcher:  # a launcher is the parent of its workers
        environment[PARENT] = str(os.getpid())
    with (place / STDERR).open("wb") as stderr:
        return subprocess.Popen(
            [*with_found_program(held.launcher), sys.executable, "-m", "meshwright.mlperf.worker", str(task.write())],
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches it through this process alone
            preexec_fn=signal_at_end_of_parent if held.launcher else None,  # calls one function of libc
        )


def _put_aside(place: Path) -> None:
    """Rename the folder of an attempt that was interrupted."""
    if not place.exists():
        return
    number = 1
    while (other := place.with_name(f"{place.name}.{number}")).exists():
        number += 1
    place.rename(other)


def _finish(folder: Path, held: RunSet, *, index: int, code: int) -> RunResult:
    """Publish the log and the record of a run that has ended. Raises the error of one that failed."""
    place = folder / RUNS / str(index)
    log = place / LOG
    result = _result(read_log(log), index=index, seed=held.seeds[index]) if log.is_file() else None
    if code != 0 or result is None:
        raise _failure(place, index=index, code=code)
    (folder / RECORDS).mkdir(exist_ok=True)
    with suppress(FileNotFoundError):
        write_atomically(folder / RECORDS / f"{index}.json", (place / TRAINING / "record.json").read_bytes())
    write_atomically(folder / f"result_{index}.txt", log.read_bytes())  # last: a run with this file has ended
    found = _result(read_log(folder / f"result_{index}.txt"), index=index, seed=held.seeds[index])
    assert found is not None
    return found


def _failure(place: Path, *, index: int, code: int) -> MeshwrightError:
    text = (place / STDERR).read_text(encoding="utf-8", errors="replace").strip()
    last = [line for line in text.splitlines() if line.strip()][-3:]
    error = RunFailedError(
        f"run {index} ended without a result (exit code {code}): {' '.join(last) or 'it wrote nothing'}",
        hint=f"its output is {place / STDERR}; the same command continues the set",
    )
    error.exit_code = code if code in (2, 3) else 1
    return error


def _end(active: Mapping[int, subprocess.Popen[bytes]]) -> None:
    """End runs that are under way: what started them is leaving."""
    for process in active.values():
        process.terminate()  # a launcher ends its processes on other hosts
    for process in active.values():
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        process.kill()
        process.wait()


def _state(folder: Path, index: int) -> RunState:
    path = folder / RUNS / str(index) / LOG
    if not path.is_file():
        return RunState(index=index, samples=0, loss=None, seconds=0.0)
    log = read_log(path)
    start, last = log.last("run_start"), log.last("eval_accuracy")
    seconds = 0.0 if start is None else max(0.0, time.time() - start.time_ms / 1000)
    return RunState(
        index=index,
        samples=0 if last is None else int(last.samples or 0),
        loss=None if last is None else float(last.value),
        seconds=seconds,
    )
