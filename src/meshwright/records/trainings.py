"""Records of `bench train`: one line per training in `trainings.csv`, with the sidecar `trainings.json`.

A line is written when its training has ended, so an interruption costs one training. Reading is strict. `--resume`
repeats failed trainings; it refuses a run file that was changed in between, and another device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.records.files import Recorder, RowTable, differing, read_table
from meshwright.records.sweep import Configuration

SCHEMA = "meshwright bench trainings 1"
MADE_BY = "meshwright bench train"
SIGNED = {"least": -math.inf}
"""Of numbers that may be below zero."""
CSV_NAME, SIDECAR_NAME = "trainings.csv", "trainings.json"
SIDECAR_KEYS = (
    "schema", "device", "driver", "software", "command", "started", "ended", "git_commit", "steps", "warmup",
    "configurations",
)  # fmt: skip


class TrainingStatus(StrEnum):
    """End of a training."""

    OK = "ok"
    REFUSED = "refused"  # by the run file or the engine, or a package or device is missing
    OUT_OF_MEMORY = "out_of_memory"
    TIMED_OUT = "timed_out"  # took longer than allowed
    KILLED = "killed"  # by a signal
    FAILED = "failed"  # diverged, lost a process, or a bug


OF_THE_CONFIGURATION = (TrainingStatus.REFUSED, TrainingStatus.OUT_OF_MEMORY, TrainingStatus.TIMED_OUT)
"""Endings that would repeat: further runs of such a configuration are skipped."""


@dataclass(frozen=True, kw_only=True)
class TrainingRow:
    """One line of the file. Values that were not measured are 0, values that were not predicted None."""

    configuration: str
    engine: str
    run: int  # of this configuration; the first is 1
    status: TrainingStatus
    reason: str = ""
    folder: str = ""  # of this training, inside that of the records
    started: str  # ISO 8601, UTC
    wall_s: float
    model: str = ""
    precision: str = ""
    plan: str = ""
    num_devices: int = 0
    threads: int = 0  # CPU threads of one process
    sequence_length: int = 0
    global_batch: int = 0  # sequences
    micro_batch: int = 0
    steps: int = 0  # without warmup
    step_s_median: float | None = None
    step_s_low: float | None = None  # the fastest
    step_s_high: float | None = None
    tokens_per_s_per_device: float | None = None  # at the median step
    mfu: float | None = None
    mfu_convention: str = ""
    peak_memory_bytes: float | None = None
    first_loss: float | None = field(default=None, metadata=SIGNED)
    last_loss: float | None = field(default=None, metadata=SIGNED)
    predicted_step_s: float | None = None
    predicted_step_s_low: float | None = None  # 80 % interval
    predicted_step_s_high: float | None = None
    predicted_mfu: float | None = None
    predicted_memory_bytes: float | None = None
    error: float | None = field(default=None, metadata=SIGNED)  # tokens/s/device: measured over predicted, minus one
    inside: str = ""  # yes, no: the interval holds the measured step time

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.sequence_length


MEASURED = ("step_s_median", "tokens_per_s_per_device", "mfu", "peak_memory_bytes")
PREDICTED = ("predicted_step_s", "predicted_step_s_low", "predicted_step_s_high", "predicted_memory_bytes")


def _checked(row: TrainingRow, where: str) -> TrainingRow:
    """Return the row. Raises InputError for a measured training without its values, or with a part of a prediction."""
    needed = MEASURED if row.status is TrainingStatus.OK else ()
    needed += PREDICTED if any(getattr(row, name) is not None for name in PREDICTED) else ()
    if absent := [name for name in needed if getattr(row, name) is None]:
        raise InputError(f"{where}: {absent[0]} is empty", got=f"status {row.status}", allowed="a number")
    return row


TABLE = RowTable(
    kind=TrainingRow, name=CSV_NAME, what="bench trainings", made_by=MADE_BY, empty_zeros=(int,), check=_checked
)


@dataclass(frozen=True, kw_only=True)
class Trainings:
    """Content of one file, with failed trainings."""

    path: Path
    sidecar: Mapping[str, Any]
    rows: tuple[TrainingRow, ...]


class TrainingRecorder(Recorder):
    """Writer of the two files in `folder`. Raises InputError if it holds records of something else."""

    def __init__(
        self,
        folder: Path,
        *,
        configurations: Sequence[Configuration],
        steps: int,
        warmup: int,
        command: Sequence[str],
        started: str,
        resume: bool,
    ) -> None:
        sidecar = {
            "schema": SCHEMA, "device": None, "driver": None, "software": {}, "command": list(command),
            "started": started, "ended": None, "git_commit": None, "steps": steps, "warmup": warmup,
            "configurations": {
                c.name: {
                    "run_file": c.path, "sweep": list(c.assignments), "overrides": list(c.overrides),
                    "digest": c.digest,
                }
                for c in configurations
            },
        }  # fmt: skip
        super().__init__(folder, name=SIDECAR_NAME, sidecar=sidecar)
        self.path = folder / CSV_NAME
        hint = "continue with --resume, or name another --out"
        self.rows = self.begin_or_resume(TABLE, resume=resume, kept=self._kept, what="trainings", hint=hint)

    @property
    def done(self) -> set[tuple[str, int]]:
        """Configuration and number of each measured run."""
        return {(row.configuration, row.run) for row in self.rows if row.status is TrainingStatus.OK}

    def append(self, row: TrainingRow) -> None:
        """Add one line; it is in the file when this returns."""
        TABLE.append(self.path, row)
        self.rows.append(row)

    def identify(self, record: Mapping[str, Any], *, engine: str, driver: str | None) -> None:
        """Copy device and software of a training's record into the sidecar. Raises InputError if they differ."""
        device = {key: value for key, value in record["device"].items() if key != "threads"}
        software = record["software"]
        before = self.sidecar
        for what, then, now in (
            ("device", before["device"], device),
            ("driver", before["device"] and before["driver"], driver),
            (f"software ({engine})", before["software"].get(engine), software),
        ):
            if then is not None and then != now:
                raise InputError(
                    f"{self.path}: these trainings are of another {what}", got=differing(then, now),
                    hint="write to another folder with --out",
                )  # fmt: skip
        known = engine in before["software"]
        self.sidecar |= {"device": device, "driver": driver, "software": before["software"] | {engine: software}}
        if not known:
            self.save(git_commit=record["git_commit"])

    def _kept(self) -> list[TrainingRow]:
        """Measured rows of an earlier session. Settings that both sessions name must be equal."""
        before = read(self.path, whole=False)
        for key in ("steps", "warmup"):
            if before.sidecar[key] != self.sidecar[key]:
                raise InputError(
                    f"{self.path}: these trainings have another --{key}", got=self.sidecar[key],
                    allowed=before.sidecar[key], hint="write to another folder with --out",
                )  # fmt: skip
        then, now = before.sidecar["configurations"], self.sidecar["configurations"]
        changed = [name for name in then if name in now and then[name]["digest"] != now[name]["digest"]]
        if changed:
            raise InputError(
                f"{self.path}: the run file or its --set overrides were changed since", got=changed[0],
                hint="write to another folder with --out",
            )  # fmt: skip
        kept = ("device", "driver", "software", "started", "git_commit")
        self.sidecar |= {key: before.sidecar[key] for key in kept} | {"configurations": then | now}
        return [row for row in before.rows if row.status is TrainingStatus.OK]


def read(path: Path, *, whole: bool = True) -> Trainings:
    """Read the records at `path` as `read_table` does."""
    path, sidecar, rows = read_table(path, TABLE, schema=SCHEMA, keys=SIDECAR_KEYS, whole=whole)
    return Trainings(path=path, sidecar=sidecar, rows=rows)
