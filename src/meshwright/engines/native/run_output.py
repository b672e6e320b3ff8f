"""Outputs of a training: progress, `steps.jsonl`, `events.jsonl`, trackers, `record.json`.

Every process has a `RunOutput`. Only the main process opens the step log and the trackers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshwright.engines.native.prepared import PreparedRun
from meshwright.engines.native.progress import ProgressDisplay
from meshwright.records.training import Record
from meshwright.training import telemetry
from meshwright.training.data import Tokenizer
from meshwright.training.run_identity import IDENTITY, RunIdentity, write_identity
from meshwright.training.trackers import TrackedRun, Trackers


class RunOutput:
    """The outputs of one process."""

    def __init__(self, prepared: PreparedRun, *, is_main: bool, progress: ProgressDisplay) -> None:
        self.prepared, self.is_main, self.progress = prepared, is_main, progress
        self.folder = prepared.options.folder
        self.log: telemetry.StepLogFile | None = None
        self.trackers: Trackers | None = None

    def open(self, *, after_step: int, tokenizer: Tokenizer | None, identity: RunIdentity) -> None:
        """Open the step log and the trackers of the main process, `after_step` steps into the run."""
        if not self.is_main:
            return
        self.log = telemetry.StepLogFile(self.folder, after_step=after_step)
        write_identity(self.folder / IDENTITY, identity)
        telemetry.save_tokenizer(self.folder, tokenizer)
        with self.progress.phase("opening the trackers"):
            run = self.prepared.run
            tracked = TrackedRun(
                name=run.name,
                folder=self.folder,
                settings=telemetry.resolved(run, plan=self.prepared.plan),
                after_step=after_step,
            )
            self.trackers = Trackers(run.train.trackers, run=tracked, warn=self.progress.say)

    @property
    def elapsed_before_s(self) -> float:
        """Seconds of training before a resume, as the step log has them."""
        return 0.0 if self.log is None or self.log.last is None else self.log.last["elapsed_s"]

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes of the trackers for the record."""
        return tuple(self.trackers.notes) if self.trackers else ()

    def step(self, entry: dict[str, Any], *, left_s: float) -> None:
        """Write one step and show it. Call on the main process only."""
        assert self.log is not None
        self.log.write(entry)
        if self.trackers is not None:
            self.trackers.step(entry)
        self.progress.step(entry, left_s=left_s)

    def event(self, event: dict[str, Any]) -> None:
        """Show a fault and what was done about it, and append it to `events.jsonl`."""
        self.progress.say(f"{event['words']}: {event['action'].replace('_', ' ')}")
        if self.is_main:
            telemetry.log_event(self.folder, event)

    def rewind(self, *, after_step: int) -> None:
        """Drop the lines of steps that will be repeated after a roll-back."""
        if self.log is not None:
            self.log.rewind(after_step=after_step)

    def close(self) -> None:
        """Close the step log."""
        if self.log is not None:
            self.log.close()

    def finish(self, record: Callable[[], Record], *, sample: str | None, num_steps: int) -> None:
        """Close the trackers and write `record.json`. `record` is called for each, as trackers may add notes."""
        if self.trackers is None:
            return
        if sample is not None:
            self.trackers.text("sample", sample, step=num_steps)
        self.trackers.finish(record())
        telemetry.save_record(self.folder, record())
