"""Measurements of a training loop, and the `ranks` and `statistics` of its record (docs/reference/record.md)."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from meshwright.engines.native.assembly import Assembly
from meshwright.engines.native.batch_loader import BatchLoader
from meshwright.engines.native.data_position import BatchCounts, DataPosition
from meshwright.engines.native.loop_checkpoints import LoopCheckpoints
from meshwright.engines.native.parallel.mesh import MeshCoordinates
from meshwright.engines.native.validation import ValidationLosses
from meshwright.records.training import Ending, complete_statistics
from meshwright.specs.run import Run
from meshwright.training import device
from meshwright.training.metrics import Yardstick, rank_statistics, rates_of, spread_of, target_reached
from meshwright.training.telemetry import gather_scalars


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
