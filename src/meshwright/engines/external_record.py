"""The record of a training by another program, composed from the files of its processes. Imports no torch.

FOLDER/OUTPUT/start.json        decisions and prediction from before the training
FOLDER/OUTPUT/facts.json        device and software, as a process of the training detected them
FOLDER/OUTPUT/steps.jsonl       one line per step; of a step that a restart repeated, the last line counts
FOLDER/OUTPUT/validation.jsonl  one line per evaluation
FOLDER/OUTPUT/ending.json       reason for the end of the training, if a process wrote one
FOLDER/OUTPUT/rank-N.json       step times and memory of every process
FOLDER/profile/summary.json     time of the profiled steps by category of kernel, if any were profiled

Metrics follow `training.metrics`, so that records of all engines have the same meaning.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from meshwright import runfile
from meshwright.cost.flops import count_parameters
from meshwright.cost.tables import model_row
from meshwright.errors import InputError
from meshwright.files import write_atomically
from meshwright.json_values import load_json, parse_json
from meshwright.records.environment import environment_facts
from meshwright.records.files import whole_lines
from meshwright.records.training import (
    RECORD,
    STEP,
    STEP_OPTIONAL,
    Ending,
    Record,
    complete_statistics,
    read_record,
    step_line,
)
from meshwright.specs.hardware import Accelerator
from meshwright.specs.run import Run
from meshwright.training.clock import TrainingPhase
from meshwright.training.metrics import (
    WARM_UP_STEPS,
    Yardstick,
    above_peak,
    rank_statistics,
    rates_of,
    spread_of,
    target_reached,
    yardstick,
)
from meshwright.training.profiling.steps import FOLDER, SUMMARY
from meshwright.training.run_identity import IDENTITY, BatchHistory, as_document, read_identity, tokens_seen

START, FACTS, STEPS, VALIDATION = "start.json", "facts.json", "steps.jsonl", "validation.jsonl"
ENDING = "ending.json"
NOT_MEASURED = ("prediction_losses", "validation_losses", "best", "label_tokens", "data_progress")
"""Statistics of a record that no process of another program writes."""
NO_PROFILE = "the steps to profile left no profile: logs/ say why, or the training ended before them"
BETWEEN = "between_steps"
PHASES = (
    TrainingPhase.START_UP, TrainingPhase.WARM_UP, TrainingPhase.TRAINING, TrainingPhase.PROFILING, BETWEEN,
    TrainingPhase.CLOSING,
)  # fmt: skip


def step_folders(folder: Path, *, with_file: str = "") -> list[Path]:
    """Return the checkpoints `step-N` in `folder` that have this file, oldest first."""
    found = {path.name.removeprefix("step-"): path for path in folder.glob("step-*") if (path / with_file).exists()}
    return [found[step] for step in sorted(filter(str.isdecimal, found), key=int)]


@dataclass(frozen=True, kw_only=True)
class OutputLayout:
    """Names of the files that an engine's processes write."""

    output: str  # folder of the measurements, in the folder of the results
    run_file: str  # the run with its plan, in the folder of the results
    checkpoints: Callable[[Path], list[Path]]  # paths in a folder, oldest first; names end in their step

    def newest_step(self, folder: Path) -> int | None:
        """Return the step of the newest checkpoint in `folder`; None: there is none."""
        found = self.checkpoints(folder)
        return int(found[-1].name.rpartition("-")[2]) if found else None

    def checkpoint_of(self, folder: Path, step: int | None, *, program: str) -> Path:
        """Return the checkpoint of `step`, None for the newest one. Raises InputError if there is none."""
        found = {int(path.name.rpartition("-")[2]): path for path in self.checkpoints(folder)}
        if not found:
            raise InputError(f"there is no checkpoint of {program}", got=str(folder))
        if step is not None and step not in found:
            raise InputError("no checkpoint of this step", got=step, allowed=", ".join(map(str, [*found][-12:])))
        return found[max(found) if step is None else step]


def read(folder: Path, layout: OutputLayout) -> Record:
    """Return the record of a training that has ended; compose it from its files if there is none yet."""
    return read_record(folder) if (folder / RECORD).is_file() else compose(folder, layout)


def compose(folder: Path, layout: OutputLayout) -> Record:
    """Write `steps.jsonl` and `record.json` of `folder`, and return the record.

    Raises InputError if no training has ended there.
    """
    output = folder / layout.output
    try:
        start, facts = (load_json(output / name) for name in (START, FACTS))
        measured = list(_by_step(output / STEPS).values())
        rank_files = {int(path.stem.partition("-")[2]): path for path in output.glob("rank-*.json")}
        ranks = [load_json(path) for _, path in sorted(rank_files.items())]
        resolved = load_json(folder / "resolved.json")
    except OSError as error:
        raise InputError(
            f"no complete training in {folder}: {error.strerror or error}", got=str(error.filename or folder)
        ) from None
    if not measured or not ranks:
        raise InputError(f"no step was taken in {folder}", hint=f"see {folder / 'logs'}")
    run = runfile.load(folder / layout.run_file)
    assert run.plan is not None
    metrics = yardstick(run, accelerator=_accelerator(start["accelerator"]), plan=run.plan)
    identity = read_identity(folder / IDENTITY)
    history = ((0, metrics.tokens_per_step),) if identity is None else identity.batches
    losses = {step: line["validation_loss"] for step, line in _by_step(output / VALIDATION).items()}
    entries = list(_entries(measured, losses=losses, metrics=metrics, history=history))
    summary = folder / FOLDER / SUMMARY
    profile = load_json(summary) if summary.is_file() else None
    ending = Ending.DONE if entries[-1]["step"] == run.num_steps else Ending.STOPPED
    if (path := output / ENDING).is_file():
        ending = Ending(load_json(path)["ending"])
    _write(folder / "steps.jsonl", "".join(json.dumps(entry) + "\n" for entry in entries))
    statistics = complete_statistics(
        _statistics(entries, run=run, metrics=metrics, ranks=ranks, layout=layout, ending=ending)
        | {"data_usage": start.get("data_usage")},
        lacks=NOT_MEASURED,
    )
    record = Record(
        run=resolved,
        device=facts["device"],
        software=facts["software"],
        environment=environment_facts(),
        ending=ending,
        statistics=statistics,
        time_s=_time_s(measured, started_s=start["started_s"]),
        ranks=rank_statistics(
            step_s=[float(spread_of(rank["step_s"]).get("median", math.nan)) for rank in ranks],
            peak_memory_bytes=[rank["peak_memory_bytes"] for rank in ranks],
        ),
        started=_timestamp(start["started_s"]),
        ended=_timestamp(time.time()),
        predicted=start["predicted"],
        git_commit=start["git_commit"],
        command=tuple(start["command"]),
        profile=profile,
        identity=None if identity is None else as_document(identity),
        notes=(
            *start["notes"],
            *above_peak(statistics["mfu"], by=metrics),
            *([NO_PROFILE] if start.get("profiled") and profile is None else []),
        ),
    )
    _write(folder / RECORD, json.dumps(asdict(record), indent=2) + "\n")
    return record


def _write(path: Path, text: str) -> None:
    try:
        write_atomically(path, text)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


def _accelerator(stated: dict[str, Any]) -> Accelerator:
    values: dict[str, Any] = {key: tuple(stated.get(key, ())) for key in ("aliases", "driver_names")}
    return Accelerator(**stated | values)


def _by_step(path: Path) -> dict[int, dict[str, Any]]:
    """Lines by step, in order. A later line of a step replaces the earlier one and all steps after it."""
    found: dict[int, dict[str, Any]] = {}
    if not path.is_file():
        return found
    for line in whole_lines(path.read_text(encoding="utf-8", errors="replace")).splitlines():
        entry = parse_json(line)
        found = {step: kept for step, kept in found.items() if step < entry["step"]}
        found[entry["step"]] = entry
    return found


def _entries(
    measured: list[dict[str, Any]], *, losses: dict[int, float], metrics: Yardstick, history: BatchHistory
) -> Iterator[dict[str, Any]]:
    """Lines of `steps.jsonl` (docs/reference/record.md)."""
    begin_s = measured[0]["ended_s"] - measured[0]["step_s"]
    for line in measured:
        step, step_s = line["step"], line["step_s"]
        entry = {name: line[name] for name in (*STEP, *STEP_OPTIONAL) if name in line}
        entry |= {
            "batch": step - 1,
            "tokens": tokens_seen(history, steps=step),
            "elapsed_s": line["ended_s"] - begin_s,
            "tokens_per_s_per_device": metrics.tokens_per_s_per_device(step_s),
            "mfu": metrics.mfu(step_s),
        }
        yield step_line(entry | ({"validation_loss": losses[step]} if step in losses else {}))


def _statistics(
    entries: list[dict[str, Any]],
    *,
    run: Run,
    metrics: Yardstick,
    ranks: list[dict[str, Any]],
    layout: OutputLayout,
    ending: Ending,
) -> dict[str, Any]:
    step_s = spread_of([entry["step_s"] for entry in entries if not entry.get("profiled")])
    parameters = trained = int(count_parameters(model_row(run.model)).total)
    if run.lora is not None:  # rank x (inputs + outputs) of every adapter
        trained = int(run.model.num_layers * count_parameters(model_row(run.model, lora=run.lora)).lora_layer)
    saves = run.train.checkpoint
    saved = layout.checkpoints(Path(saves.folder)) if saves else []
    validated = [entry["validation_loss"] for entry in entries if "validation_loss" in entry]
    return {
        "steps": entries[-1]["step"],
        "tokens": entries[-1]["tokens"],
        "first_loss": entries[0]["loss"],
        "last_loss": entries[-1]["loss"],
        "validation_loss": validated[-1] if validated else None,
        "target": target_reached(
            run, steps=entries[-1]["step"], tokens=entries[-1]["tokens"], elapsed_s=entries[-1]["elapsed_s"]
        )
        if ending is Ending.REACHED
        else None,
        "elapsed_s": entries[-1]["elapsed_s"],
        "peak_memory_bytes": max(rank["peak_memory_bytes"] for rank in ranks),
        "parameters": parameters,
        "trained_parameters": trained,
        "checkpoint": str(saved[-1]) if saved else None,
        "data_workers": {"training": None, "validation": None},
        "num_checkpoints": len(saved),
        "checkpoint_stall_s": ranks[0].get("checkpoint_stall_s"),
        **rates_of(step_s, by=metrics),
    }


def _time_s(measured: list[dict[str, Any]], *, started_s: float) -> dict[str, float]:
    """Wall time from the command's start, each second in one phase.

    Time between two steps is `profiling` after a profiled one, as its trace is written then, `warm_up` before a step
    that warms up, and else `between_steps`.
    """
    before_s = measured[0]["ended_s"] - measured[0]["step_s"]
    phases = dict.fromkeys(PHASES, 0.0) | {TrainingPhase.START_UP: before_s - started_s}
    before = TrainingPhase.START_UP
    for i, line in enumerate(measured):
        phase = TrainingPhase.WARM_UP if i < WARM_UP_STEPS else TrainingPhase.TRAINING
        phase = TrainingPhase.PROFILING if line.get("profiled") else phase
        gap_s = line["ended_s"] - line["step_s"] - before_s
        between = phase if phase is TrainingPhase.WARM_UP else BETWEEN
        phases[before if before is TrainingPhase.PROFILING else between] += gap_s
        phases[phase] += line["step_s"]
        before, before_s = phase, line["ended_s"]
    phases[TrainingPhase.CLOSING] = time.time() - before_s
    return {str(phase): seconds for phase, seconds in phases.items()} | {"total": sum(phases.values())}


def _timestamp(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, tz=UTC).isoformat(timespec="seconds")
