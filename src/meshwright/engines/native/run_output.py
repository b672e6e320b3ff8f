"""Outputs of a training: progress, `steps.jsonl`, `events.jsonl`, trackers, `record.json`.

Every process has a `RunOutput`. Only the main process opens the step log and the trackers. The `ranks` and `statistics`
of the record (docs/reference/record.md) follow from the measurements of the loop.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from meshwright.engines.base import TrainOptions
from meshwright.engines.native.assembly import Assembly
from meshwright.engines.native.batch_loader import BatchLoader
from meshwright.engines.native.data_position import BatchCounts, DataPosition
from meshwright.engines.native.loop_checkpoints import LoopCheckpoints
from meshwright.engines.native.parallel.mesh import MeshCoordinates
from meshwright.engines.native.prepared import PreparedRun
from meshwright.engines.native.progress import ProgressDisplay
from meshwright.engines.native.validation import ValidationLosses
from meshwright.records.training import Ending, Record, complete_statistics
from meshwright.specs.run import Run
from meshwright.training import device, telemetry
from meshwright.training.data import Tokenizer
from meshwright.training.metrics import Yardstick, rank_statistics, rates_of, spread_of, target_reached
from meshwright.training.profiling.profiler import StepProfiler
from meshwright.training.profiling.steps import steps_to_profile
from meshwright.training.run_identity import IDENTITY, RunIdentity, write_identity
from meshwright.training.telemetry import gather_scalars
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
    def loss_before(self) -> float | None:
        """Loss of the last step before a resume, as the step log has it."""
        return None if self.log is None or self.log.last is None else self.log.last["loss"]

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

    def sync(self) -> None:
        """Make the step log survive a power cut."""
        if self.log is not None:
            self.log.sync()

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


def open_profiler(
    options: TrainOptions, *, done: int, num_steps: int, coordinates: MeshCoordinates, say: Callable[[str], None]
) -> StepProfiler | None:
    """The profiler that `options` ask for, of a run that has `done` steps behind it; None where nothing is profiled."""
    if not options.is_profiled:
        return None
    steps = steps_to_profile(options.profile_steps, done=done, num_steps=num_steps)
    if steps is None:
        say("the steps to profile were taken before: nothing is profiled")
        return None
    is_first = not (coordinates.data_rank or coordinates.context_rank or coordinates.tensor_rank)
    return StepProfiler(
        steps, folder=options.folder, device=coordinates.device, is_main=coordinates.is_main,
        pipeline_rank=coordinates.pipeline_rank if is_first and coordinates.plan.pipeline > 1 else None,
    )  # fmt: skip


@dataclass(kw_only=True)
class RunMeasurements:
    """Numbers that the loop gathers for the record."""

    step_s: list[float] = field(default_factory=list)  # without steps under the profiler
    counts: list[BatchCounts] = field(default_factory=list)  # of the same steps
    first_loss: float | None = None
    last_loss: float | None = None
    prediction_losses: tuple[float, ...] = ()  # of the last step, of each multi-token prediction module
    validation: ValidationLosses | None = None  # the last ones
    num_steps: int = 0  # of the whole run, those before a resume included
    elapsed_s: float = 0.0  # since the first step, with everything in between and before a resume


def gather_rank_statistics(measured: RunMeasurements, *, coordinates: MeshCoordinates) -> dict[str, Any]:
    """`ranks` of the record: numbers that differ between processes. All processes call it."""
    mine = {
        "step_s": float(spread_of(measured.step_s).get("median", math.nan)),
        "peak_memory_bytes": float(device.peak_memory_bytes(coordinates.device)),
    }
    ranks = gather_scalars(mine, num_ranks=coordinates.num_ranks)
    return rank_statistics(step_s=ranks["step_s"], peak_memory_bytes=[int(size) for size in ranks["peak_memory_bytes"]])


def run_statistics(
    measured: RunMeasurements,
    *,
    run: Run,
    yardstick: Yardstick,
    assembly: Assembly,
    loader: BatchLoader,
    position: DataPosition,
    checkpoints: LoopCheckpoints,
    ranks: dict[str, Any],
    ending: Ending,
) -> dict[str, Any]:
    """`statistics` of the record."""
    step_s, saver = spread_of(measured.step_s), checkpoints.saver
    if run.label_tokens is not None and measured.counts:
        num_batches = statistics.fmean(counts.num_batches for counts in measured.counts)
        yardstick = replace(yardstick, tokens_per_step=round(num_batches * run.tokens_per_batch))
    found = {
        "steps": measured.num_steps,
        "tokens": position.tokens,
        "first_loss": measured.first_loss,
        "last_loss": measured.last_loss,
        "prediction_losses": list(measured.prediction_losses) or None,
        "validation_loss": measured.validation and measured.validation.loss,
        "validation_losses": measured.validation and (measured.validation.named or None),
        "best": checkpoints.best(),
        "target": target_reached(run, steps=measured.num_steps, tokens=position.tokens, elapsed_s=measured.elapsed_s)
        if ending is Ending.REACHED
        else None,
        "elapsed_s": measured.elapsed_s,
        "label_tokens": _label_tokens(measured, run),
        "peak_memory_bytes": max(ranks["peak_memory_bytes"]),
        "parameters": assembly.num_parameters,
        "trained_parameters": assembly.num_trained,
        "checkpoint": None if saver is None or saver.newest is None else str(saver.newest),
        "data_workers": {what: choice and asdict(choice) for what, choice in loader.workers().items()},
        "data_usage": loader.corpus.usage,
        "data_progress": {name: asdict(source) for name, source in loader.progress(position.next_batch).items()},
        "num_checkpoints": 0 if saver is None else saver.num_saved,
        "checkpoint_stall_s": None if saver is None else sum(saver.stalls.seconds),
        **rates_of(step_s, by=yardstick),
    }
    return complete_statistics(found)


def _label_tokens(measured: RunMeasurements, run: Run) -> dict[str, Any] | None:
    """Sizes of the steps of `batch.label_tokens`; None without it."""
    if run.label_tokens is None:
        return None
    return {
        "aim": run.label_tokens,
        "labels": spread_of([counts.num_labels for counts in measured.counts]),
        "sequences": spread_of([float(run.global_batch * counts.num_batches) for counts in measured.counts]),
    }
