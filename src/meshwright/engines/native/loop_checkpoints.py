"""Checkpoints of a training loop: resume, save, and go back after a fault.

A checkpoint holds the tensors of the assembly (weights, optimizer states, routing biases). Its manifest holds the
state of the fault detector under the key `guard`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.engines.beginning import notes_of
from meshwright.engines.native.assembly import Assembly
from meshwright.engines.native.data_position import DataPosition, next_batch_of
from meshwright.engines.native.fault_detector import FaultDetector
from meshwright.engines.native.fp8 import CHECKPOINTED
from meshwright.engines.native.prepared import PreparedRun
from meshwright.engines.native.progress import ProgressDisplay
from meshwright.engines.native.validation import ValidationHistory
from meshwright.training import checkpoints, run_identity
from meshwright.training.clock import Clock, TrainingPhase
from meshwright.training.data import Corpus


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """A checkpoint that a fault went back to."""

    step: int
    next_batch: int  # that its next step would have trained on


class LoopCheckpoints:
    """Saves and restores the states of one training. Every process makes one and calls the same methods."""

    def __init__(
        self,
        prepared: PreparedRun,
        *,
        sync_log: Callable[[], None],
        num_ranks: int,
        assembly: Assembly,
        detector: FaultDetector,
        position: DataPosition,
        corpus: Corpus,
        history: ValidationHistory,
        clock: Clock,
        progress: ProgressDisplay,
    ) -> None:
        self.prepared, self.assembly, self.detector = prepared, assembly, detector
        self.sync_log = sync_log
        self.position, self.history = position, history
        self.corpus, self.clock, self.progress = corpus, clock, progress
        self.weights = prepared.weights  # where training started
        settings = prepared.run.train.checkpoint
        self.identity = prepared.identity  # of the run, with what came before a resume
        self.saver = checkpoints.CheckpointSaver(settings, num_ranks=num_ranks) if settings else None

    @property
    def has_failed(self) -> bool:
        """True if the last save could not be written; `wait` raises the reason."""
        return self.saver is not None and self.saver.has_failed

    def wait(self) -> None:
        """Wait until no save is under way. Raises the InputError of one that failed."""
        if self.saver is not None:
            self.saver.wait()

    def finish(self) -> None:
        """Wait for the last save at the end of a training."""
        if self.saver is not None:
            with self.clock.during(TrainingPhase.CHECKPOINT), self.progress.phase("finishing the checkpoint"):
                self.saver.wait()

    def abandon(self) -> None:
        """Wait for the last save after an error, and hide errors of its own."""
        with suppress(Exception):  # the first error is the one to report
            self.wait()

    def start(self) -> int:
        """Resume where the options or a restart ask for it; the number of steps behind the training."""
        if self.prepared.options.resume or self._can_restart():
            return self._resume()
        return 0

    def _can_restart(self) -> bool:
        """True if this is a restart after a lost process and there is a checkpoint to continue from."""
        settings = self.prepared.run.train.checkpoint
        return (
            self.prepared.is_restart and settings is not None and bool(checkpoints.checkpoints(Path(settings.folder)))
        )

    def _resume(self) -> int:
        settings = self.prepared.run.train.checkpoint
        assert settings is not None  # the engine refuses to resume without
        saved = checkpoints.newest(Path(settings.folder))
        manifest = checkpoints.read_manifest(saved.path)
        self.weights = self.weights or checkpoints.origin_of(manifest)
        with self.progress.phase(f"reading {saved.path}"):
            self.detector.load(self._load(saved).get("guard", {}))
        self.history.load(manifest.get("validation"))
        held = run_identity.identity_of_manifest(manifest)
        batches = held.batches if held is not None and held.batches else self.prepared.identity.batches
        self.position.load(manifest, step=saved.step, tokens=run_identity.tokens_seen(batches, steps=saved.step))
        if held is not None:
            self._continue(held, step=saved.step)
        self.progress.say(f"resumed from {saved.path} after step {saved.step}")
        return saved.step

    def _continue(self, held: run_identity.RunIdentity, *, step: int) -> None:
        """Continue the run of the checkpoint. Other processes have compared it; its data may have been replaced."""
        ours = self.prepared.identity
        found = run_identity.compare(held, ours)
        self.identity = run_identity.continued(
            held, ours, step=step, batch=self.position.next_batch, changes=found.changed
        )
        for line in notes_of(found, step=step):
            self.progress.say(f"note: {line}")

    def roll_back(self) -> LoadedCheckpoint | None:
        """Load the newest good checkpoint; None where no checkpoint is whole. What was read of the data stays read."""
        assert self.saver is not None  # a run that rolls back saves
        self.saver.wait()
        saved = checkpoints.newest_good(Path(self.saver.settings.folder))
        if saved is None:
            return None
        manifest = self._load(saved)
        self.detector.rewind(manifest.get("guard", {}))
        self.history.load(manifest.get("validation"))
        self.position.tokens = manifest.get("tokens", 0)
        tokens_per_step = self.prepared.identity.batches[-1][1]
        history = run_identity.with_batch(self.identity.batches, step=saved.step, tokens_per_step=tokens_per_step)
        self.identity = replace(self.identity, batches=history)
        return LoadedCheckpoint(step=saved.step, next_batch=next_batch_of(manifest, step=saved.step))

    def save(self, num_steps: int, *, now: bool) -> None:
        """Save after `num_steps` steps if the settings ask for it there, the validation loss is the best, or `now`."""
        if self.saver is None:
            return
        settings = self.saver.settings
        is_due = now or num_steps % settings.every_steps == 0
        best = self.history.best_step if settings.keep_best else None
        if not is_due and best != num_steps:
            return
        run, plan, corpus = self.prepared.run, self.prepared.plan, self.corpus
        content = checkpoints.content(
            run, weights=self.weights, tokenizer=corpus.tokenizer, has_conversations=corpus.has_conversations
        )
        about = {
            "run": run.name,
            "model": run.model.name,
            "plan": plan.describe(),
            **self.position.state(),
            "guard": self.detector.state(),
            "validation": self.history.state(),
            checkpoints.BEST: best,
            checkpoints.ONLY_BEST: not is_due,
            "identity": run_identity.as_document(self.identity),
            **checkpoints.as_manifest(content),
        }
        with self.clock.during(TrainingPhase.CHECKPOINT), self.progress.phase("saving a checkpoint"):
            self.sync_log()  # a checkpoint without the lines of its steps would resume with a gap
            self.saver.save(self.assembly.state(), step=num_steps, about=about)

    def best(self) -> dict[str, Any] | None:
        """Loss and step of the best evaluation for the record, and its checkpoint where it is kept."""
        if self.history.best_step is None:
            return None
        saved = None
        if self.saver is not None and self.saver.settings.keep_best:
            path = checkpoints.at_step(Path(self.saver.settings.folder), self.history.best_step)
            saved = str(path) if path.is_dir() else None  # an evaluation before `keep_best` was set
        return {"loss": self.history.best_loss, "step": self.history.best_step, "checkpoint": saved}

    def _load(self, saved: checkpoints.SavedCheckpoint) -> dict[str, Any]:
        """Load the states of `saved` and return its manifest."""
        state = self.assembly.state()
        manifest = checkpoints.load(saved, into=state, zero_if_absent=CHECKPOINTED)
        self.assembly.optimizer.restore(state, step=saved.step)
        return manifest
