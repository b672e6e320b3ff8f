"""The training loop of one process. Every process of a run executes this same file in step.

for each step:   read the batch of this step (a pure function of seed and step)
                 forward and backward                             -> gradients, loss
                 agree with the others on loss, stop, disk        -> one all-reduce
                 judge loss and gradient norm; clip, AdamW, or skip, roll back, stop
                 validate, save, log, when it is time
"""

from __future__ import annotations

import shutil
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.engines.base import TrainOptions
from meshwright.engines.native.assembly import Assembly, assemble
from meshwright.engines.native.batch_loader import BatchLoader, count_labels, open_batch_loader
from meshwright.engines.native.expectation import Expectation, measure_expectation
from meshwright.engines.native.fault_detector import Fault, FaultDetector
from meshwright.engines.native.generation import SAMPLE_TOKENS, generate_sample
from meshwright.engines.native.parallel.mesh import MeshCoordinates, mesh_coordinates
from meshwright.engines.native.profiling.profiler import StepProfiler, open_profiler
from meshwright.engines.native.progress import ProgressDisplay, reading
from meshwright.engines.native.run_statistics import RunMeasurements, gather_rank_statistics, run_statistics
from meshwright.engines.native.step import Batch
from meshwright.records.training import Ending, Record
from meshwright.specs.plan import Plan
from meshwright.specs.run import FaultAction, Run
from meshwright.training import checkpoints as checkpoint
from meshwright.training import device, telemetry
from meshwright.training.clock import Clock, TrainingPhase
from meshwright.training.gemm_tuning import GemmChoices, using
from meshwright.training.metrics import WARM_UP_STEPS, spread_of
from meshwright.training.models import expert_load_ratio
from meshwright.training.optimizer import learning_rate
from meshwright.training.signals import StopRequest, say_stopping, stop_on_signals
from meshwright.training.trackers import TrackedRun, Trackers
from meshwright.training.watchdog import Watchdog
from meshwright.training.weights import Origin, save_adapters

ADAPTER = "adapter"  # folder of what LoRA trained, below the results


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """What every process is given: the run with all that was decided for it. Pickles."""

    run: Run
    plan: Plan
    options: TrainOptions
    device_name: str  # as its driver has it
    accelerator: str | None = None  # as the catalogue has it; None: it knows no such device
    notes: tuple[str, ...] = ()
    weights: Origin | None = None  # where training starts; None: random ones
    products: GemmChoices | None = None  # how matrix products are made; None: as usual
    is_restart: bool = False  # after a process was lost: go on from the newest checkpoint, if there is one

    @property
    def num_processes(self) -> int:
        """One a device."""
        return self.plan.num_devices


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What one pass through a step found out; all processes have the same."""

    loss: float  # mean of the global batch
    norm: float  # of the gradients, before clipping
    is_asked_to_stop: bool  # any process was
    fault: Fault | None  # not None: the update was not applied


def train_rank(rank: int, num_ranks: int, job: PreparedRun) -> None:
    """Train as process `rank` of `num_ranks`. The main process writes the steps and the record."""
    clock = Clock(started_s=job.options.started_s)
    progress = ProgressDisplay(quiet=job.options.quiet or rank > 0, num_steps=job.run.num_steps)
    watchdog = Watchdog(job.options.folder, rank=rank, timeout_s=job.options.timeout_s)
    try:
        with stop_on_signals(say_stopping if rank == 0 else None) as request, watchdog:
            coordinates = mesh_coordinates(
                plan=job.plan, device=device.find_device(local_rank=rank), rank=rank, num_ranks=num_ranks
            )
            device.disable_malloc_trim(coordinates.device)
            with using(job.products, coordinates.device):
                _loop(
                    job, coordinates, request=request, clock=clock, progress=progress, watchdog=watchdog
                ).run()
    finally:
        progress.close()


def _loop(
    job: PreparedRun,
    coordinates: MeshCoordinates,
    *,
    request: StopRequest,
    clock: Clock,
    progress: ProgressDisplay,
    watchdog: Watchdog,
) -> _Loop:
    """Measure, build the model, open the data."""
    with progress.phase("measuring this machine"):
        expected = measure_expectation(job.run, plan=job.plan, device=coordinates.device)
    for words in expected.words():
        progress.say(words)
    with progress.phase("building the model"):
        parts = assemble(job.run, coordinates=coordinates, weights=job.weights and job.weights.folder)
    with progress.phase("opening the data"):
        loader = open_batch_loader(job.run, coordinates=coordinates, report=reading(progress))
    return _Loop(
        job=job, expected=expected, coordinates=coordinates, parts=parts, loader=loader, request=request, clock=clock,
        progress=progress, watchdog=watchdog,
    )  # fmt: skip


class _Loop:
    """One training: what it works with, and how far it is."""

    def __init__(
        self,
        *,
        job: PreparedRun,
        expected: Expectation,
        coordinates: MeshCoordinates,
        parts: Assembly,
        loader: BatchLoader,
        request: StopRequest,
        clock: Clock,
        progress: ProgressDisplay,
        watchdog: Watchdog,
    ) -> None:
        self.job, self.expected, self.coordinates = job, expected, coordinates
        self.parts, self.loader, self.request = parts, loader, request
        self.clock, self.progress, self.watchdog = clock, progress, watchdog
        assert job.run.num_steps is not None  # `check` refuses a run without
        self.num_steps = job.run.num_steps
        self.measured = RunMeasurements()
        self.is_compiling = job.run.train.compile  # in its first step
        self.guard = FaultDetector(job.run.train.faults)
        self.load_ratio = 0.0  # rows of the busiest expert over the mean, in the step; 0 without experts
        settings = job.run.train.checkpoint
        self.saver = (
            checkpoint.CheckpointSaver(settings, num_ranks=coordinates.num_ranks) if settings else None
        )
        self.log: telemetry.StepLogFile | None = None
        self.trackers: Trackers | None = None
        self.profiler: StepProfiler | None = None

    def run(self) -> None:
        """All steps from the first, or from the checkpoint, to the last; then the record."""
        done = self._resume() if self.job.options.resume or self._has_checkpoint() else 0
        if self.coordinates.is_main:
            self.log = telemetry.StepLogFile(self.job.options.folder, after_step=done)
            telemetry.save_tokenizer(self.job.options.folder, self.loader.tokenizer)
            with self.progress.phase("opening the trackers"):
                self.trackers = self._open_trackers(done)  # the main process alone has any
        self.measured.num_steps = done
        self.profiler = open_profiler(
            self.job.options,
            done=done,
            num_steps=self.num_steps,
            coordinates=self.coordinates,
            say=self.progress.say,
        )
        try:
            ending = self._steps(done)
            if self.profiler is not None:
                self.profiler.close()
            self.clock.enter(TrainingPhase.CLOSING)
            if self.saver is not None:
                with (
                    self.clock.during(TrainingPhase.CHECKPOINT),
                    self.progress.phase("finishing the checkpoint"),
                ):
                    self.saver.wait()
            sample = None
            if ending in (Ending.DONE, Ending.REACHED) and not self.job.options.only_steps:
                with self.progress.phase("writing a sample"):
                    sample = self._sample()
                self._save_adapters()
        except Exception:
            if self.saver is not None:
                with suppress(Exception):  # the first error is the one to report
                    self.saver.wait()
            raise
        finally:
            if self.log is not None:
                self.log.close()
        ranks = gather_rank_statistics(self.measured, coordinates=self.coordinates)
        if self.trackers is not None:
            if sample is not None:
                self.trackers.text("sample", sample, step=self.measured.num_steps)
            self.trackers.finish(self._record(ending, sample, ranks))
            telemetry.save_record(self.job.options.folder, self._record(ending, sample, ranks))

    def _steps(self, done: int) -> Ending:
        step = done
        self.begin_s = time.perf_counter() - self._elapsed_before_s()
        if done == 0 and self.guard.rolls_back:
            self._save(0, now=True)  # so that there is always a checkpoint to go back to
        while step < self.num_steps:
            self.clock.enter(self._phase(step, done))
            self.watchdog.alive()
            with self.profiler.around(step + 1) if self.profiler else nullcontext():
                start_s = time.perf_counter()
                taken = self._step(step)
                step_s = time.perf_counter() - start_s
            self.watchdog.rest()
            if taken.fault is not None:
                goes_on_at = self._answer(taken.fault, step=step)
                if goes_on_at is None:
                    return Ending.DIVERGED
                step = goes_on_at
                continue
            validation_loss = self._note(step, taken, step_s=step_s)
            step += 1
            is_last, is_reached = step == self.num_steps, self._is_reached(validation_loss)
            self._save(step, now=is_last or is_reached or taken.is_asked_to_stop)
            if is_reached:
                return Ending.REACHED
            if taken.is_asked_to_stop and not is_last:
                return Ending.STOPPED
        return Ending.DONE

    def _note(self, step: int, taken: StepOutcome, *, step_s: float) -> float | None:
        """Validate when it is time, and log the step; the validation loss."""
        m = self.measured
        m.num_steps, m.last_loss = step + 1, taken.loss
        m.first_loss = taken.loss if m.first_loss is None else m.first_loss
        if self.clock.phase is not TrainingPhase.PROFILING and not self.is_compiling:
            m.step_s.append(step_s)
        self.is_compiling = False
        validation_loss = self._validate(step + 1, is_last=step + 1 == self.num_steps)
        m.elapsed_s = time.perf_counter() - self.begin_s
        self._log(step, loss=taken.loss, norm=taken.norm, step_s=step_s, validation_loss=validation_loss)
        return validation_loss

    def _is_reached(self, validation_loss: float | None) -> bool:
        """Whether training may end: every process sums the same losses, so all of them agree."""
        evaluate = self.job.run.train.evaluate
        target = None if evaluate is None else evaluate.target_loss
        return target is not None and validation_loss is not None and validation_loss <= target

    def _elapsed_before_s(self) -> float:
        """Seconds of training before a resume, as the log has them."""
        return 0.0 if self.log is None or self.log.last is None else self.log.last["elapsed_s"]

    def _phase(self, step: int, done: int) -> TrainingPhase:
        if self.profiler is not None and self.profiler.covers(step + 1):
            return TrainingPhase.PROFILING
        return TrainingPhase.WARM_UP if step < done + WARM_UP_STEPS else TrainingPhase.TRAINING

    def _step(self, step: int) -> StepOutcome:
        self.parts.before_step(step)
        batch = self.loader.batch(self.guard.batch_of(step))
        local_loss = self.parts.stepper.forward_backward(batch, scale=self._scale(batch))
        has_failed = self.saver is not None and self.saver.has_failed
        load_LE = self.parts.collect_expert_load()
        # All processes have the same ratio: their parts add up to it.
        ratio = 0.0 if load_LE is None else expert_load_ratio(load_LE) / self.coordinates.num_ranks
        loss, stop, failed, self.load_ratio = self._agreed(
            local_loss, float(self.request.asked), float(has_failed), ratio
        )
        if failed and self.saver is not None:
            self.saver.wait()  # raises in all processes what the disk of one said
        fault: Fault | None = None

        def accepts(norm: float) -> bool:
            nonlocal fault
            fault = self.guard.judge(loss=loss, gradient_norm=norm)
            return fault is None

        rate = learning_rate(self.job.run.optimizer, step=step, num_steps=self.num_steps)
        norm = self.parts.optimizer.step(learning_rate=rate, accepts=accepts)
        if fault is None:
            self.guard.accept(loss=loss, gradient_norm=norm)
            self.parts.after_step(load_LE)
        return StepOutcome(loss=loss, norm=norm, is_asked_to_stop=stop > 0, fault=fault)

    def _answer(self, fault: Fault, *, step: int) -> int | None:
        """Do what the run says about `fault` and return the step to go on with, or None to end."""
        action, batch, back_to = self.guard.action(fault), self.guard.batch_of(step), None
        if action is FaultAction.ROLL_BACK:
            back_to = self._roll_back()
            action = FaultAction.STOP if back_to is None else action
        event = self.guard.note(fault, action=action, step=step, batch=batch, back_to=back_to)
        self.progress.say(f"{event['words']}: {event['action'].replace('_', ' ')}")
        if self.coordinates.is_main:
            telemetry.log_event(self.job.options.folder, event)
        if action is FaultAction.STOP:
            return None
        return step if back_to is None else back_to

    def _roll_back(self) -> int | None:
        """Load the newest good checkpoint; the steps taken there, None where no checkpoint is whole."""
        assert self.saver is not None  # a run that rolls back saves
        self.saver.wait()
        saved = checkpoint.newest_good(Path(self.saver.settings.folder))
        if saved is None:
            return None
        self.guard.rewind(self._load(saved))
        if self.log is not None:
            self.log.rewind(after_step=saved.step)
        return saved.step

    def _scale(self, batch: Batch) -> float:
        """One over the labels that count in the global batch."""
        count = count_labels(batch)
        if self.coordinates.num_ranks > 1:
            dist.all_reduce(count)
        return self.coordinates.num_copies / max(1.0, count.item())

    def _agreed(self, local_loss: torch.Tensor, *others: float | torch.Tensor) -> list[float]:
        """Sums over all processes: of the losses (each counted once) and of `others`."""
        copies = (
            self.coordinates.plan.tensor
        )  # tensor ranks compute the same loss; ranks before the last stage none
        local = torch.stack(
            [
                local_loss.float() / copies,
                *(torch.as_tensor(x, dtype=torch.float32, device=local_loss.device) for x in others),
            ]
        )
        if self.coordinates.num_ranks > 1:
            dist.all_reduce(local)
        return local.tolist()

    def _validate(self, taken: int, *, is_last: bool) -> float | None:
        evaluate = self.job.run.train.evaluate
        if evaluate is None or not (is_last or taken % evaluate.every_steps == 0):
            return None
        self.parts.evaluating()
        losses = []
        with self.clock.during(TrainingPhase.VALIDATION), self.progress.phase("validating"):
            for i in range(evaluate.num_batches):
                self.watchdog.alive()
                batch = self.loader.validation_batch(i)
                losses += self._agreed(self.parts.stepper.loss(batch, scale=self._scale(batch)))
        self.watchdog.rest()
        self.parts.training()
        self.measured.validation_loss = sum(losses) / len(losses)
        self.progress.say(f"step {taken}  validation loss {self.measured.validation_loss:.4f}")
        return self.measured.validation_loss

    def _save(self, taken: int, *, now: bool) -> None:
        if self.saver is None or not (now or taken % self.saver.settings.every_steps == 0):
            return
        run, plan = self.job.run, self.job.plan
        about = {
            "run": run.name,
            "model": run.model.name,
            "plan": plan.describe(),
            "guard": self.guard.state(),
            **checkpoint.as_manifest(checkpoint.content(run, weights=self.job.weights)),
        }
        with self.clock.during(TrainingPhase.CHECKPOINT), self.progress.phase("saving a checkpoint"):
            self.saver.save(self.parts.state(), step=taken, about=about)

    def _save_adapters(self) -> None:
        """What low-rank training is for: the adapters, in the folder of results."""
        run, folder = self.job.run, self.job.options.folder / ADAPTER
        if run.lora is None:
            return
        if self.coordinates.is_main:
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was resumed
        base = self.job.weights and self.job.weights.name
        save_adapters(self.parts.trained(), folder, model=run.model, lora=run.lora, base=base)
        self.progress.say(f"wrote the adapter to {folder}")

    def _has_checkpoint(self) -> bool:
        """Whether a run that lost a process can go on."""
        settings = self.job.run.train.checkpoint
        return (
            self.job.is_restart
            and settings is not None
            and bool(checkpoint.checkpoints(Path(settings.folder)))
        )

    def _resume(self) -> int:
        settings = self.job.run.train.checkpoint
        assert settings is not None  # the engine refuses to resume without
        saved = checkpoint.newest(Path(settings.folder))
        manifest = checkpoint.read_manifest(saved.path)
        checkpoint.refuse_mismatch(manifest, self.job.run, weights=self.job.weights)
        with self.progress.phase(f"reading {saved.path}"):
            self.guard.load(self._load(saved))
        self.progress.say(f"resumed from {saved.path} after step {saved.step}")
        return saved.step

    def _load(self, saved: checkpoint.SavedCheckpoint) -> dict[str, Any]:
        """Take the states of `saved`; what it says of the guard."""
        state = self.parts.state()
        manifest = checkpoint.load(saved, into=state)
        self.parts.optimizer.restore(state, step=saved.step)
        return manifest.get("guard", {})

    def _log(
        self, step: int, *, loss: float, norm: float, step_s: float, validation_loss: float | None = None
    ) -> None:
        if self.log is None:
            return
        run, yardstick = self.job.run, self.expected.yardstick
        entry = {
            "step": step + 1,
            "batch": self.guard.batch_of(step),
            "loss": loss,
            "gradient_norm": norm,
            "learning_rate": learning_rate(run.optimizer, step=step, num_steps=self.num_steps),
            "tokens": (step + 1) * run.tokens_per_step,
            "step_s": step_s,
            "elapsed_s": self.measured.elapsed_s,
            "tokens_per_s_per_device": yardstick.tokens_per_s_per_device(step_s),
            "mfu": yardstick.mfu(step_s),
            "memory_bytes": device.peak_memory_bytes(self.coordinates.device),
        }
        if self.clock.phase is TrainingPhase.PROFILING:
            entry["profiled"] = True
        if validation_loss is not None:
            entry["validation_loss"] = validation_loss
        if self.load_ratio:
            entry["expert_load_ratio"] = self.load_ratio
        if self.saver is not None:
            entry["checkpoint_stall_s"] = self.saver.stalls.new_s()
        self.log.write(entry)
        if self.trackers is not None:
            self.trackers.step(entry)
        usual_s = spread_of(self.measured.step_s[-20:]).get("median", step_s)
        self.progress.step(entry, left_s=usual_s * (self.num_steps - step - 1))

    def _sample(self) -> str | None:
        """Text that the model writes now."""
        if self.loader.tokenizer is None:
            return None
        self.parts.evaluating()
        with torch.compiler.set_stance("force_eager"):  # a text grows, and compiled layers have one length
            tokens = generate_sample(
                self.parts.stepper.logits,
                coordinates=self.coordinates,
                prompt=self.loader.prompt(),
                num_tokens=SAMPLE_TOKENS,
                context=self.job.run.sequence_length,
                seed=self.job.run.train.seed,
            )
        return self.loader.tokenizer.decode(tokens)

    def _open_trackers(self, done: int) -> Trackers:
        run, folder = self.job.run, self.job.options.folder
        settings = telemetry.resolved(run, plan=self.job.plan)
        opening = TrackedRun(name=run.name, folder=folder, settings=settings, after_step=done)
        return Trackers(run.train.trackers, opening=opening, warn=self.progress.say)

    def _record(self, ending: Ending, sample: str | None, ranks: dict[str, Any]) -> Record:
        job = self.job
        return Record(
            run=telemetry.resolved(job.run, plan=job.plan),
            device=telemetry.device_facts(self.coordinates.device, accelerator=job.accelerator),
            software=telemetry.software_facts(),
            ending=ending,
            statistics=run_statistics(
                self.measured,
                run=job.run,
                yardstick=self.expected.yardstick,
                parts=self.parts,
                loader=self.loader,
                saver=self.saver,
                ranks=ranks,
                ending=ending,
            ),
            time_s=self.clock.seconds(),
            ranks=ranks,
            started=telemetry.utc_timestamp(self.clock.started_s),
            ended=telemetry.utc_timestamp(time.time()),
            predicted=self.expected.predicted,
            git_commit=telemetry.git_commit(Path.cwd()),
            command=job.options.command,
            sample=sample,
            events=tuple(self.guard.events),
            profile=None if self.profiler is None else self.profiler.summary,
            notes=(*job.notes, *self.expected.notes, *(self.trackers.notes if self.trackers else ())),
        )
