"""Train every configuration several times, each time in a process of its own, and record the measurements.

Two trainings have only the file system in common. A training that fails becomes a line with the reason, and
the next training starts.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.cost.mfu import mfu
from meshwright.engines.torchrun import ASKED_TO_STOP
from meshwright.errors import InputError, sigterm_interrupts
from meshwright.json_values import load_json, parse_json
from meshwright.programs import with_found_program
from meshwright.records.files import driver_version, now
from meshwright.records.sweep import Configuration
from meshwright.records.trainings import OF_THE_CONFIGURATION, TrainingRecorder, TrainingRow, TrainingStatus

TRAININGS = "trainings"  # folder of the trainings' files, inside that of the records
GRACE_S = 20.0  # between SIGTERM and SIGKILL
REFUSALS = (2, 3)  # exit codes: bad input, a package or a device is missing
OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|can't allocate memory|MemoryError", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class TrainingBenchRequest:
    """Configurations, number of runs, and launcher."""

    configurations: Sequence[Configuration]
    num_runs: int
    warmup: int  # first steps, which do not count
    launcher: tuple[str, ...]  # words before `-m meshwright train`
    timeout_s: float  # of one training


def rounds(request: TrainingBenchRequest) -> Iterator[tuple[Configuration, int]]:
    """All runs in the order of training."""
    count = len(request.configurations)
    for number in range(1, request.num_runs + 1):
        for i in range(count):
            yield request.configurations[(i + number - 1) % count], number


def train_all(
    request: TrainingBenchRequest,
    *,
    recorder: TrainingRecorder,
    begin: Callable[[Configuration, int], object] = lambda configuration, run: None,
    done: Callable[[TrainingRow], object] = lambda row: None,
) -> None:
    """Train all runs that `recorder` does not hold yet. `begin` and `done` are called before and after each training.

    Raises KeyboardInterrupt, on SIGTERM too; the running training is then ended, and earlier rows
    are kept. Raises InputError if a training ran on another device or other software than the others.
    """
    given_up: set[str] = set()
    try:
        with sigterm_interrupts():
            for configuration, run in rounds(request):
                if (configuration.name, run) in recorder.done or configuration.name in given_up:
                    continue
                begin(configuration, run)
                row = _trained(configuration, run, request, recorder)
                recorder.append(row)
                done(row)
                if row.status in OF_THE_CONFIGURATION:
                    given_up.add(configuration.name)
    finally:
        recorder.save(ended=now())


def _trained(
    configuration: Configuration, run: int, request: TrainingBenchRequest, recorder: TrainingRecorder
) -> TrainingRow:
    """One training in a process of its own, as a line of the records."""
    if configuration.refusal:
        return TrainingRow(
            configuration=configuration.name, engine=configuration.engine, run=run, status=TrainingStatus.REFUSED,
            reason=configuration.refusal, started=now(), wall_s=0.0,
        )  # fmt: skip
    root = recorder.path.parent
    folder = _free_folder(root / TRAININGS / _safe(configuration.name))
    about: dict[str, Any] = {
        "configuration": configuration.name, "engine": configuration.engine, "run": run, "started": now(),
        "folder": str(folder.relative_to(root)),
    }  # fmt: skip
    start_s = time.perf_counter()
    ended = _run(_command(configuration, folder, request), folder, timeout_s=request.timeout_s)
    about["wall_s"] = time.perf_counter() - start_s
    if ended.status is not TrainingStatus.OK:
        return TrainingRow(**about, status=ended.status, reason=ended.reason)
    try:
        record = load_json(folder / "record.json")
        text = (folder / "steps.jsonl").read_text(encoding="utf-8")
        measured = measured_of(record, [parse_json(line)["step_s"] for line in text.splitlines()][request.warmup :])
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"it left no record of its steps ({type(error).__name__}: {error})"
        return TrainingRow(**about, status=TrainingStatus.FAILED, reason=reason)
    recorder.identify(record, engine=configuration.engine, driver=driver_version(record["device"]["type"]))
    return TrainingRow(**about, status=TrainingStatus.OK, **measured)


def _command(configuration: Configuration, folder: Path, request: TrainingBenchRequest) -> list[str]:
    overrides = [f"--set={override}" for override in configuration.overrides]
    command = [*request.launcher, "-m", "meshwright", "train", configuration.path, *overrides]
    return [*command, "--out", str(folder), "--only-steps", "--json"]


def _free_folder(parent: Path) -> Path:
    """Make a new folder in `parent`, named by the first free number."""
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        with suppress(FileExistsError):
            (parent / str(number)).mkdir()
            return parent / str(number)
        number += 1


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._=-]+", "_", name).strip(".")[:100] or "_"


# --- a process ---


@dataclass(frozen=True, kw_only=True)
class _Ended:
    status: TrainingStatus
    reason: str = ""


def _run(command: Sequence[str], folder: Path, *, timeout_s: float) -> _Ended:
    """Run `command` to its end. On any interruption its processes are ended first."""
    log = folder / "stderr.txt"
    with log.open("w", encoding="utf-8") as stderr:
        try:
            process = subprocess.Popen(
                with_found_program(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, text=True,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise InputError(
                "--launcher cannot be started", got=command[0], allowed="a program", hint=error.strerror
            ) from None
        try:
            stdout, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return _Ended(status=TrainingStatus.TIMED_OUT, reason=f"it took more than {timeout_s:g} s")
        finally:
            _end(process)
    return _verdict(process.returncode, stdout, log.read_text(encoding="utf-8", errors="replace"))


def _end(process: subprocess.Popen[str]) -> None:
    """End the training with all its processes, by SIGTERM and then SIGKILL."""
    try:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=GRACE_S)
    finally:  # also processes that it started and left behind
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _verdict(returncode: int, stdout: str, stderr: str) -> _Ended:
    """Status and reason from an exit code and the output."""
    if returncode == 0:
        return _Ended(status=TrainingStatus.OK)
    error = _error(stdout)
    code = error.get("exit_code", returncode)
    lines = [line for line in stderr.splitlines() if line.strip()]
    reason = " ".join(str(error.get("message") or (lines[-1] if lines else f"exit code {returncode}")).split())
    if OUT_OF_MEMORY.search(f"{reason}\n{stderr}"):
        return _Ended(status=TrainingStatus.OUT_OF_MEMORY, reason=reason)
    if code in REFUSALS:
        return _Ended(status=TrainingStatus.REFUSED, reason=reason)
    if returncode < 0:
        perhaps = ", as the kernel does when memory runs out" if -returncode == signal.SIGKILL else ""
        return _Ended(status=TrainingStatus.KILLED, reason=f"killed by {signal.Signals(-returncode).name}{perhaps}")
    if returncode in ASKED_TO_STOP:
        return _Ended(status=TrainingStatus.KILLED, reason="stopped by a signal")
    return _Ended(status=TrainingStatus.FAILED, reason=reason)


def _error(stdout: str) -> Mapping[str, Any]:
    """The error that the command wrote as JSON; under a launcher, the first process's error."""
    with suppress(ValueError, TypeError, AttributeError):
        document, _ = json.JSONDecoder().raw_decode(stdout.lstrip())
        return dict(document.get("error") or {})
    return {}


# --- results of a training ---


def measured_of(record: Mapping[str, Any], step_s: Sequence[float]) -> dict[str, Any]:
    """Measured and predicted columns of a `TrainingRow`. Raises KeyError or ValueError for an incomplete record."""
    if not step_s:
        raise ValueError("no steps after the warm-up")
    run, found = record["run"], record["statistics"]
    plan = run["plan"]
    median_s = statistics.median(step_s)
    steps_by_labels = found.get("label_tokens") or {"sequences": {"median": run["global_batch"]}}
    num_sequences = round(steps_by_labels["sequences"]["median"])
    tokens = num_sequences * run["sequence_length"]
    rate = tokens / median_s / found["num_devices"]
    row: dict[str, Any] = {
        "model": run["model"]["name"],
        "precision": run["precision"]["name"],
        "plan": run["plan_in_words"],
        "num_devices": found["num_devices"],
        "threads": record["device"]["threads"],
        "sequence_length": run["sequence_length"],
        "global_batch": num_sequences,
        "micro_batch": plan["micro_batch"],
        "steps": len(step_s),
        "step_s_median": median_s,
        "step_s_low": min(step_s),
        "step_s_high": max(step_s),
        "tokens_per_s_per_device": rate,
        "mfu": mfu(
            tokens_per_s_per_device=rate,
            flops_per_token=found["model_flops_per_token"],
            peak_flops_per_s=found["peak_flops_per_s"],
        ),
        "mfu_convention": found["mfu_convention"],
        "peak_memory_bytes": float(found["peak_memory_bytes"]),
        "first_loss": found["first_loss"],
        "last_loss": found["last_loss"],
    }
    predicted = record["predicted"]
    if predicted is None:
        return row
    step = predicted["step"]
    return row | {
        "predicted_step_s": step["value"],
        "predicted_step_s_low": step["low"],
        "predicted_step_s_high": step["high"],
        "predicted_mfu": predicted["mfu"]["value"],
        "predicted_memory_bytes": predicted["memory_bytes"],
        "error": step["value"] / median_s - 1,
        "inside": "yes" if step["low"] <= median_s <= step["high"] else "no",
    }
