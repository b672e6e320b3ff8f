"""The log of one run, written by `mlperf-logging` while the run trains.

    cache_clear, init_start, facts ... | init_stop, run_start | block, evaluation, block, ... | run_stop

One process writes: first the one that prepares the run, then rank 0. Every line is on the disk before training goes
on. Samples are those that the training loop counts.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.engines.observer import TrainingObserver
from meshwright.errors import MeshwrightError, MissingDependencyError
from meshwright.programs import install_command
from meshwright.records.training import Ending

ROOT = Path(__file__).parents[2]
SUCCESS, ABORTED = "success", "aborted"


class EarlyDataError(MeshwrightError):
    """A file of the data set was opened before the clock started."""

    exit_code = 1


class LogWriter:
    """Appends records to a file, each flushed to the disk."""

    def __init__(self, path: Path) -> None:
        try:
            from mlperf_logging.mllog.mllog import MLLogger
        except ImportError as error:
            raise MissingDependencyError(
                "logs of benchmark runs are written by mlperf-logging, which is not installed",
                hint=install_command("mlperf"),
            ) from error
        logger = logging.Logger(f"mllog {path}")  # not registered: nothing else adds handlers to it
        self._file = _SyncedHandler(path, encoding="utf-8")
        logger.addHandler(self._file)
        # The call site of a record is that of the method below that was called.
        self._logger = MLLogger(logger=logger, root_dir=str(ROOT), default_stack_offset=2)

    def event(self, key: str, value: Any = None, **metadata: Any) -> None:
        """A point in time."""
        self._logger.event(key, value, metadata=metadata)

    def start(self, key: str, value: Any = None, **metadata: Any) -> None:
        """The start of an interval."""
        self._logger.start(key, value, metadata=metadata)

    def end(self, key: str, value: Any = None, **metadata: Any) -> None:
        """The end of an interval."""
        self._logger.end(key, value, metadata=metadata)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _SyncedHandler(logging.FileHandler):
    """Waits for the disk after each record."""

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        if self.stream is not None:
            os.fsync(self.stream.fileno())

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # a name of logging
        """A record that cannot be written ends the run."""
        raise  # logging calls it while it handles the error


@dataclass(kw_only=True)
class RunLogger(TrainingObserver):
    """Logs the events of a training. Pickled to its processes, of which rank 0 writes."""

    path: Path
    data_paths: tuple[str, ...]  # of the data set: nothing below them is opened before the clock starts
    max_clock_jump_s: float = 1.0
    writer: LogWriter | None = field(default=None, init=False)
    is_timed: bool = field(default=False, init=False)
    is_in_block: bool = field(default=False, init=False)
    started_s: tuple[float, float] = field(default=(0.0, 0.0), init=False)  # Unix time, monotonic clock

    def initializing(self, *, rank: int) -> None:
        """See `TrainingObserver`. Guards the data set in every process."""
        if self.data_paths:
            sys.addaudithook(self._guard)
        if rank == 0:
            self.writer = LogWriter(self.path)

    def _guard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_timed or event != "open" or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        opened = os.path.realpath(os.fsdecode(arguments[0]))
        if opened.startswith(self.data_paths):
            raise EarlyDataError(f"data was opened before the clock started: {opened}")

    def opening_data(self) -> None:
        """See `TrainingObserver`. The clock starts."""
        if self.writer is not None:
            self.writer.end("init_stop")
            self.started_s = (time.time(), time.monotonic())
            self.writer.start("run_start")
        self.is_timed = True

    def training(self, *, num_samples: int) -> None:
        """See `TrainingObserver`."""
        if self.writer is not None:
            self.writer.start("block_start", samples_count=num_samples)
            self.is_in_block = True

    def evaluating(self, *, num_samples: int) -> None:
        """See `TrainingObserver`."""
        if self.writer is not None:
            self._end_block(num_samples)
            self.writer.start("eval_start", samples_count=num_samples)

    def evaluated(self, *, num_samples: int, loss: float) -> None:
        """See `TrainingObserver`."""
        if self.writer is not None:
            self.writer.event("eval_accuracy", loss, samples_count=num_samples)
            self.writer.end("eval_stop", samples_count=num_samples)

    def ended(self, *, num_samples: int, ending: Ending) -> None:
        """See `TrainingObserver`. A run that was stopped from outside has no end: the clock cannot pause."""
        if self.writer is None:
            return
        if ending is not Ending.STOPPED:
            assert self.writer is not None
            self._end_block(num_samples)
            status = SUCCESS if ending is Ending.REACHED else ABORTED
            self.writer.end("run_stop", samples_count=num_samples, status=status)
            unix_s, monotonic_s = (
                now - then for now, then in zip((time.time(), time.monotonic()), self.started_s, strict=True)
            )
            if abs(unix_s - monotonic_s) > self.max_clock_jump_s:
                self.writer.event("clock_jump", unix_s - monotonic_s)
        self.writer.close()

    def _end_block(self, num_samples: int) -> None:
        if self.is_in_block and self.writer is not None:
            self.writer.end("block_stop", samples_count=num_samples)
            self.is_in_block = False
