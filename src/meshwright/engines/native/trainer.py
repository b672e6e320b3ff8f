"""The training loop of one process. Every process of a run executes this file in step with the others.

for each step:   read the next batch, or batches until they have `batch.label_tokens` labels
                 forward and backward                             -> gradients, loss
                 sum loss, stop requests and disk errors          -> one all-reduce
                 judge loss and gradient norm; then clip and update, or skip, roll back, stop
                 validate, save and log where they are due

`train_rank` is the entry of a process, `Trainer.train` the order of events, `Trainer._take_step` one pass of the loop.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.engines.native import run_output
from meshwright.engines.native.assembly import Assembly, assemble
from meshwright.engines.native.batch_loader import BatchLoader, LoadedBatch, open_batch_loader
from meshwright.engines.native.closing import sample_of, write_adapters
from meshwright.engines.native.compiling import import_compiler
from meshwright.engines.native.data_position import BatchCounts, DataPosition
from meshwright.engines.native.expectation import Expectation, measure_expectation
from meshwright.engines.native.fault_detector import Fault, FaultDetector
from meshwright.engines.native.kernel_routing import gathered_choices, notes_on_routes, routing_of
from meshwright.engines.native.loop_checkpoints import LoopCheckpoints
from meshwright.engines.native.parallel.mesh import MeshCoordinates, mesh_coordinates
from meshwright.engines.native.prepared import PreparedRun
from meshwright.engines.native.progress import ProgressDisplay, reading
from meshwright.engines.native.reference import score_references
from meshwright.engines.native.rollouts import Rollouts
from meshwright.engines.native.route_timing import measured_routes
from meshwright.engines.native.validation import ValidationHistory, ValidationLosses, validation_losses
from meshwright.engines.native.warm_up import warm_up
from meshwright.kernels.dispatch import KernelRouting, active
from meshwright.kernels.dispatch import using as using_routes
from meshwright.planner.request import UNCOUNTED_GENERATION
from meshwright.records.environment import environment_facts
from meshwright.records.training import Ending, Record, step_line
from meshwright.specs.run import FaultAction
from meshwright.training import device, telemetry
from meshwright.training.clock import Clock, TrainingPhase
from meshwright.training.gemm_tuning import using
from meshwright.training.metrics import WARM_UP_STEPS, above_peak, spread_of
from meshwright.training.models import expert_load_ratio, rewards_from
from meshwright.training.models.reinforcement import means_from
from meshwright.training.optimizer import learning_rate
from meshwright.training.profiling.profiler import StepProfiler
from meshwright.training.run_identity import as_document
from meshwright.training.signals import StopRequest, say_stopping, stop_on_signals
from meshwright.training.watchdog import Watchdog

COMPLETE = (Ending.DONE, Ending.REACHED, Ending.NO_IMPROVEMENT)
STEPS_OF_ESTIMATE = 20  # the time that is left follows from the median of so many steps


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """The result of one step, the same on all processes."""

    loss: float  # mean of its labels
    norm: float  # of the gradients, before clipping
    is_asked_to_stop: bool  # any process was
    fault: Fault | None  # not None: the update was not applied
    load_ratio: float  # rows of the busiest expert over the mean; 0 without experts
    rewards: dict[str, float]  # of pairs of answers, or of completions; empty without
    prediction_losses: tuple[float, ...]  # of the multi-token prediction modules, each over its labels
    counts: BatchCounts


def train_rank(rank: int, num_ranks: int, prepared: PreparedRun) -> None:
    """Train as process `rank` of `num_ranks`. The main process writes the steps and the record."""
    options, run = prepared.options, prepared.run
    prepared.observer.initializing(rank=rank)
    clock = Clock(started_s=options.started_s)
    progress = ProgressDisplay(quiet=options.quiet or rank > 0, num_steps=run.num_steps, log_every=run.train.log_every)
    watchdog = Watchdog(options.folder, rank=rank, timeout_s=options.timeout_s)
    try:
        with stop_on_signals(say_stopping if rank == 0 else None) as request, watchdog:
            local_device = device.find_device(local_rank=rank)
            coordinates = mesh_coordinates(plan=prepared.plan, device=local_device, rank=rank, num_ranks=num_ranks)
            device.disable_malloc_trim(local_device)
            with using(prepared.gemm_choices, local_device), request.at_once():
                kernels, notes = _choose_routes(prepared, local_device=local_device, progress=progress)
            prepared = replace(prepared, notes=(*prepared.notes, *notes))
            with using(prepared.gemm_choices, local_device), using_routes(kernels):
                with request.at_once():
                    trainer = _open_trainer(
                        prepared, coordinates, request=request, clock=clock, progress=progress, watchdog=watchdog
                    )
                trainer.train()
    finally:
        progress.close()


def _choose_routes(
    prepared: PreparedRun, *, local_device: torch.device, progress: ProgressDisplay
) -> tuple[KernelRouting, tuple[str, ...]]:
    """The routes of kernels, and notes on those that were measured here."""
    routing = routing_of(prepared.run, device=local_device)
    with progress.phase("measuring routes of kernels"):
        found = measured_routes(
            prepared.run, plan=prepared.plan, device=local_device, measuring=prepared.options.measuring,
            routing=routing,
        )  # fmt: skip
    for line in found.notes:
        progress.say(line)
    return replace(routing, measured=found.routes), found.notes


def _open_trainer(
    prepared: PreparedRun,
    coordinates: MeshCoordinates,
    *,
    request: StopRequest,
    clock: Clock,
    progress: ProgressDisplay,
    watchdog: Watchdog,
) -> Trainer:
    """Measure the machine, build the model, open the data."""
    run, plan, weights = prepared.run, prepared.plan, prepared.weights
    # The labels in the data decide how large a step is, and so what to expect of it.
    loader = None if run.label_tokens is None else _open_loader(prepared, coordinates, progress=progress)
    import_compiler(run, plan=plan)
    with progress.phase("measuring this machine"), using_routes(active().fresh()):
        expectation = measure_expectation(
            run, plan=plan, device=coordinates.device, measuring=prepared.options.measuring,
            label_ratio=loader and loader.corpus.label_ratio,
        )  # fmt: skip
    for line in expectation.lines():
        progress.say(line)
    with progress.phase("building the model"):
        assembly = assemble(run, coordinates=coordinates, weights=weights and weights.folder)
    with progress.phase("taking warm-up steps"):
        warm_up(run, assembly=assembly, coordinates=coordinates, num_steps=prepared.warm_up_steps)
    if loader is None:
        before_bytes = device.resident_bytes()
        loader = _open_loader(prepared, coordinates, progress=progress)
        if coordinates.device.type == "cpu":
            expectation = expectation.holding(device.resident_bytes() - before_bytes)
    return Trainer(
        prepared, coordinates=coordinates, expectation=expectation, assembly=assembly, loader=loader,
        request=request, clock=clock, progress=progress, watchdog=watchdog,
    )  # fmt: skip


def _open_loader(prepared: PreparedRun, coordinates: MeshCoordinates, *, progress: ProgressDisplay) -> BatchLoader:
    with coordinates.in_step():
        prepared.observer.opening_data()
    with progress.phase("opening the data"):
        loader = open_batch_loader(prepared.run, coordinates=coordinates, report=reading(progress))
    for line in loader.corpus.notes:
        progress.say(f"note: {line}")
    return loader


class Trainer:
    """The training of one process: its parts, and how far it has come."""

    def __init__(
        self,
        prepared: PreparedRun,
        *,
        coordinates: MeshCoordinates,
        expectation: Expectation,
        assembly: Assembly,
        loader: BatchLoader,
        request: StopRequest,
        clock: Clock,
        progress: ProgressDisplay,
        watchdog: Watchdog,
    ) -> None:
        self.prepared, self.coordinates, self.expectation = prepared, coordinates, expectation
        self.assembly, self.loader, self.request = assembly, loader, request
        self.clock, self.progress, self.watchdog = clock, progress, watchdog
        self.run, self.observer = prepared.run, prepared.observer
        assert self.run.num_steps is not None  # `check` refuses a run without
        self.num_steps = self.run.num_steps
        self.measured = run_output.RunMeasurements()
        self.detector = FaultDetector(self.run.train.faults)
        self.position = DataPosition()
        self.history = ValidationHistory()
        self.output = run_output.RunOutput(prepared, is_main=coordinates.is_main, progress=progress)
        self.checkpoints = LoopCheckpoints(
            prepared, sync_log=self.output.sync, history=self.history,
            num_ranks=coordinates.num_ranks, assembly=assembly, detector=self.detector,
            position=self.position, corpus=loader.corpus, clock=clock, progress=progress,
        )  # fmt: skip
        self.profiler: StepProfiler | None = None
        self.rollouts: Rollouts | None = None
        if self.run.train.grpo is not None:
            self.rollouts = Rollouts(self.run, assembly=assembly, loader=loader, coordinates=coordinates)
            progress.say(f"note: {UNCOUNTED_GENERATION}")
        self.is_compiling = self.run.train.compile  # in its first step
        self.first_step = 0  # steps taken before a resume
        self.begin_s = 0.0  # when the first step would have begun without a resume

    def train(self) -> None:
        """Set up, take all steps, finish, and write the record."""
        self._set_up()
        try:
            ending = self._take_steps()
            self.observer.ended(num_samples=self._num_samples(), ending=ending)
            sample = self._finish(ending)
        except Exception:
            self.checkpoints.abandon()
            raise
        finally:
            self.output.close()
        ranks = run_output.gather_rank_statistics(self.measured, coordinates=self.coordinates)
        kernels = gathered_choices(active(), num_ranks=self.coordinates.num_ranks)
        self.output.finish(
            lambda: self._record(ending, sample, ranks, kernels), sample=sample, num_steps=self.measured.num_steps
        )

    def _set_up(self) -> None:
        """Load the checkpoint to resume from, if any, and open outputs and profiler."""
        if self.loader.needs_reference:
            with self.progress.phase("computing the reference of the pairs"):
                score_references(self.loader, self.assembly.stepper, num_steps=self.num_steps)
        self.first_step = self.checkpoints.start()
        self.measured.num_steps = self.first_step
        self.loader.begin_at(self.checkpoints.identity.sequence_offset)
        for line in self.loader.planned_epochs(
            num_steps=max(0, self.num_steps - self.first_step), next_batch=self.position.next_batch
        ):
            self.progress.say(f"note: {line}")
        self.output.open(
            after_step=self.first_step, tokenizer=self.loader.tokenizer, identity=self.checkpoints.identity
        )
        self.measured.last_loss = self.output.loss_before
        self.profiler = run_output.open_profiler(
            self.prepared.options,
            done=self.first_step,
            num_steps=self.num_steps,
            coordinates=self.coordinates,
            say=self.progress.say,
        )

    def _take_steps(self) -> Ending:
        """Take steps until the last one, the target loss, the end of patience, a request to stop, or a fault that stops
        the run."""
        self.begin_s = time.perf_counter() - self.output.elapsed_before_s
        if self.first_step == 0 and self.detector.rolls_back:
            self.checkpoints.save(0, now=True)  # so that there is always a checkpoint to go back to
        step = self.first_step
        if self.history.is_exhausted(self.run.train.evaluate):
            return Ending.NO_IMPROVEMENT
        self.observer.training(num_samples=self._num_samples())
        while step < self.num_steps:
            outcome, step_s = self._timed_step(step)
            if outcome.fault is not None:
                next_step = self._handle_fault(outcome.fault, step=step, counts=outcome.counts)
                if next_step is None:
                    return Ending.DIVERGED
                step = next_step
                continue
            validation_loss = self._complete_step(step, outcome, step_s=step_s)
            step += 1
            is_last = step == self.num_steps
            ending = self._ending_by(validation_loss, step=step)
            if validation_loss is not None and ending is None and not is_last:
                self.observer.training(num_samples=self._num_samples())
            self.checkpoints.save(step, now=is_last or ending is not None or outcome.is_asked_to_stop)
            if ending is not None:
                return ending
            if outcome.is_asked_to_stop and not is_last:
                return Ending.STOPPED
        return Ending.DONE

    def _finish(self, ending: Ending) -> str | None:
        """Close the profiler and the last save; of a complete run write the adapters and return a sample."""
        if self.profiler is not None:
            self.profiler.close()
        self.clock.enter(TrainingPhase.CLOSING)
        self.checkpoints.finish()
        if ending not in COMPLETE or self.prepared.options.only_steps:
            return None
        with self.assembly.optimizer.averaged():
            with self.progress.phase("writing a sample"):
                sample = sample_of(self.run, assembly=self.assembly, loader=self.loader, coordinates=self.coordinates)
            folder = write_adapters(self.prepared, assembly=self.assembly, is_main=self.coordinates.is_main)
        if folder is not None:
            self.progress.say(f"wrote the adapter to {folder}")
        return sample

    # --- one step ---

    def _timed_step(self, step: int) -> tuple[StepOutcome, float]:
        """Take `step` under the watchdog and, where it is due, the profiler; its outcome and seconds."""
        self.clock.enter(self._phase(step))
        self.watchdog.start_timer()
        with self.profiler.around(step + 1) if self.profiler else nullcontext():
            start_s = time.perf_counter()
            outcome = self._take_step(step)
            step_s = time.perf_counter() - start_s
        self.watchdog.stop_timer()
        return outcome, step_s

    def _phase(self, step: int) -> TrainingPhase:
        if self.profiler is not None and self.profiler.covers(step + 1):
            return TrainingPhase.PROFILING
        is_warm_up = step < self.first_step + WARM_UP_STEPS
        return TrainingPhase.WARM_UP if is_warm_up else TrainingPhase.TRAINING

    def _take_step(self, step: int) -> StepOutcome:
        """Forward, backward, agreement, and the update unless the step is faulty."""
        self.assembly.before_step(step)
        batch = (self.rollouts or self.loader).batch(self.position.next_batch)
        self.position.next_batch = batch.counts.last + 1
        self.assembly.scale_router_losses(batch.counts.router_loss_scale)
        if not batch.counts.num_labels:  # a stream of documents of one token each: samples of answers have a label
            self.progress.say("note: a batch has no label; it counts with a loss of 0")
        local_loss = self.assembly.stepper.forward_backward(batch.tensors, scale=batch.counts.loss_scale)
        has_failed = self.checkpoints.has_failed
        load_LE = self.assembly.collect_expert_load()
        # The load is the same on all processes: each adds its share of the ratio to the sum.
        ratio = 0.0 if load_LE is None else expert_load_ratio(load_LE) / self.coordinates.num_ranks
        sums = self.assembly.collect_reward_sums()
        loss, num_stop, num_failed, load_ratio, *others = self._sum_over_processes(
            local_loss, float(self.request.asked), float(has_failed), ratio,
            *sums, *self.assembly.collect_prediction_losses(),
        )  # fmt: skip
        rewards, predicted = others[: len(sums)], others[len(sums) :]
        if num_failed:
            self.checkpoints.wait()  # raises in all processes the disk error of one
        fault: Fault | None = None

        def accepts(norm: float) -> bool:
            nonlocal fault
            fault = self.detector.judge(loss=loss, gradient_norm=norm)
            return fault is None

        norm = self.assembly.optimizer.step(learning_rate=self._learning_rate(step), accepts=accepts)
        if fault is None:
            self.detector.accept(loss=loss, gradient_norm=norm)
            self.assembly.after_step(load_LE)
            self.position.tokens += batch.counts.num_batches * self.run.tokens_per_batch
        return StepOutcome(
            loss=loss, norm=norm, is_asked_to_stop=num_stop > 0 and self._is_between(batch.counts), fault=fault,
            load_ratio=load_ratio,
            rewards=self._rewards(batch, rewards),
            prediction_losses=tuple(s / max(1.0, n) for s, n in zip(predicted[::2], predicted[1::2], strict=True)),
            counts=batch.counts,
        )  # fmt: skip

    def _is_between(self, counts: BatchCounts) -> bool:
        """True if the next step writes new completions: a resumed training could not write the old ones again."""
        grpo = self.run.train.grpo
        return grpo is None or (counts.last + 1) % grpo.iterations == 0

    def _rewards(self, batch: LoadedBatch, sums: list[float]) -> dict[str, float]:
        if self.run.train.grpo is None:
            return rewards_from(sums) if sums else {}
        return {**batch.rewards, **means_from(sums, has_reference=self.run.train.has_reference)}

    def _learning_rate(self, step: int) -> float:
        return learning_rate(self.run.optimizer, step=step, num_steps=self.num_steps)

    def _sum_over_processes(self, local_loss: torch.Tensor, *others: float | torch.Tensor) -> list[float]:
        """Sums over all processes: of the losses (each counted once) and of `others`."""
        # Tensor ranks compute the same loss; ranks without the last stage have 0.
        copies = self.coordinates.plan.tensor
        like = {"dtype": torch.float32, "device": local_loss.device}
        local = torch.stack([local_loss.float() / copies, *(torch.as_tensor(other, **like) for other in others)])
        if self.coordinates.num_ranks > 1:
            dist.all_reduce(local)
        return local.tolist()

    def _handle_fault(self, fault: Fault, *, step: int, counts: BatchCounts) -> int | None:
        """Do what the run says about `fault`; the step to continue with, or None to end."""
        action, first_skipped, back_to = self.detector.action(fault), counts.first, None
        if action is FaultAction.ROLL_BACK:
            checkpoint = self.checkpoints.roll_back()
            if checkpoint is None:
                action = FaultAction.STOP
            else:
                back_to, first_skipped = checkpoint.step, checkpoint.next_batch
                self.output.rewind(after_step=back_to)
        event = self.detector.note(
            fault, action=action, step=step, batch=counts.first, skipped=(first_skipped, counts.last),
            back_to=back_to,
        )  # fmt: skip
        self.output.event(event)
        if action is FaultAction.STOP:
            return None
        return step if back_to is None else back_to

    def _num_samples(self) -> int:
        """Sequences of the steps taken."""
        return self.position.tokens // self.run.sequence_length

    # --- after a step ---

    def _complete_step(self, step: int, outcome: StepOutcome, *, step_s: float) -> float | None:
        """Validate where it is due, and log the step; the validation loss that decides."""
        m = self.measured
        m.num_steps, m.last_loss = step + 1, outcome.loss
        m.prediction_losses = outcome.prediction_losses
        m.first_loss = outcome.loss if m.first_loss is None else m.first_loss
        if self.clock.phase is not TrainingPhase.PROFILING and not self.is_compiling:
            m.step_s.append(step_s)
            m.counts.append(outcome.counts)
        self.is_compiling = False
        validation = self._validate(step + 1)
        m.elapsed_s = time.perf_counter() - self.begin_s
        if self.coordinates.is_main:
            entry = self._log_entry(step, outcome, step_s=step_s, validation=validation)
            usual_s = spread_of(m.step_s[-STEPS_OF_ESTIMATE:]).get("median", step_s)
            self.output.step(entry, left_s=usual_s * (self.num_steps - step - 1))
        return validation and validation.loss

    def _validate(self, num_steps: int) -> ValidationLosses | None:
        """The validation losses after `num_steps` steps; None where no validation is due."""
        evaluate = self.run.train.evaluate
        if evaluate is None or not evaluate.is_due(num_steps, is_last=num_steps == self.num_steps):
            return None
        self.observer.evaluating(num_samples=self._num_samples())
        self.assembly.eval_mode()
        timed, averaged = self.clock.during(TrainingPhase.VALIDATION), self.assembly.optimizer.averaged()
        with timed, self.progress.phase("validating"), averaged:
            settings: Any = {"best_by": evaluate.best_by, "before_batch": self.watchdog.start_timer}
            if self.rollouts is not None:
                losses = self.rollouts.validation(**settings)
            else:
                losses = validation_losses(self.loader, self._loss_of, **settings)
            if self.run.train.preference and (sums := self.assembly.collect_reward_sums()):
                losses = replace(losses, rewards=rewards_from(self._sum_over_processes(torch.zeros(()), *sums)[1:]))
        self.watchdog.stop_timer()
        self.assembly.train_mode()
        self.measured.validation = losses
        self.observer.evaluated(num_samples=self._num_samples(), loss=losses.loss)
        self.progress.say(f"step {num_steps}  validation loss {losses.describe()}")
        return losses

    def _loss_of(self, batch: LoadedBatch) -> float:
        """Mean loss of a global batch, without gradients."""
        loss = self.assembly.stepper.loss(batch.tensors, scale=batch.counts.loss_scale)
        return self._sum_over_processes(loss)[0]

    def _ending_by(self, validation_loss: float | None, *, step: int) -> Ending | None:
        """The ending that a validation brings about. Every process sums the same losses, so all of them agree."""
        evaluate = self.run.train.evaluate
        if evaluate is None or validation_loss is None:
            return None
        self.history.note(validation_loss, num_steps=step, min_delta=evaluate.min_delta)
        if evaluate.target_loss is not None and validation_loss <= evaluate.target_loss:
            return Ending.REACHED
        if step < self.num_steps and self.history.is_exhausted(evaluate):
            self.progress.say(f"{self.history.num_worse} evaluations without improvement: the training ends")
            return Ending.NO_IMPROVEMENT
        return None

    def _log_entry(
        self, step: int, outcome: StepOutcome, *, step_s: float, validation: ValidationLosses | None
    ) -> dict[str, Any]:
        """One line of `steps.jsonl`."""
        counts, saver = outcome.counts, self.checkpoints.saver
        num_tokens = counts.num_batches * self.run.tokens_per_batch
        yardstick = replace(self.expectation.yardstick, tokens_per_step=num_tokens)
        entry = {
            "step": step + 1,
            "batch": counts.first,
            "loss": outcome.loss,
            "gradient_norm": outcome.norm,
            "learning_rate": self._learning_rate(step),
            "tokens": self.position.tokens,
            "step_s": step_s,
            "elapsed_s": self.measured.elapsed_s,
            "tokens_per_s_per_device": yardstick.tokens_per_s_per_device(step_s),
            "mfu": yardstick.mfu(step_s),
            "memory_bytes": device.peak_memory_bytes(self.coordinates.device),
        }
        if self.run.label_tokens is not None:
            entry |= {"batches": counts.num_batches, "labels": round(counts.num_labels)}
        if self.clock.phase is TrainingPhase.PROFILING:
            entry["profiled"] = True
        if validation is not None:
            entry["validation_loss"] = validation.loss
            if validation.named:
                entry["validation_losses"] = validation.named
            if validation.rewards:
                entry["validation_rewards"] = validation.rewards
        if outcome.rewards:
            entry["rewards"] = outcome.rewards
        if self.rollouts is not None and (validation is not None or step + 1 == self.num_steps):
            entry["completions"] = self.rollouts.shown
        if outcome.prediction_losses:
            entry["prediction_losses"] = list(outcome.prediction_losses)
        if outcome.load_ratio:
            entry["expert_load_ratio"] = outcome.load_ratio
        if saver is not None:
            entry["checkpoint_stall_s"] = saver.stalls.new_s()
        return step_line(entry)

    # --- at the end ---

    def _record(
        self, ending: Ending, sample: str | None, ranks: dict[str, Any], kernels: tuple[dict[str, Any], ...]
    ) -> Record:
        prepared = self.prepared
        statistics = run_output.run_statistics(
            self.measured,
            run=self.run,
            yardstick=self.expectation.yardstick,
            assembly=self.assembly,
            loader=self.loader,
            position=self.position,
            checkpoints=self.checkpoints,
            ranks=ranks,
            ending=ending,
        )
        return Record(
            run=telemetry.resolved(self.run, plan=prepared.plan),
            device=telemetry.device_facts(self.coordinates.device, accelerator=prepared.accelerator),
            software=telemetry.software_facts(),
            environment=environment_facts(),
            ending=ending,
            statistics=statistics,
            time_s=self.clock.seconds(),
            ranks=ranks,
            started=telemetry.utc_timestamp(self.clock.started_s),
            ended=telemetry.utc_timestamp(time.time()),
            predicted=self.expectation.predicted,
            git_commit=telemetry.git_commit(Path.cwd()),
            command=prepared.options.command,
            sample=sample,
            events=tuple(self.detector.events),
            profile=None if self.profiler is None else self.profiler.summary,
            identity=as_document(self.checkpoints.identity),
            kernels=kernels,
            notes=(
                *prepared.notes,
                *notes_on_routes(self.run, kernels),
                *self.expectation.notes,
                *above_peak(statistics["mfu"], by=self.expectation.yardstick),
                *self.output.notes,
            ),
        )
