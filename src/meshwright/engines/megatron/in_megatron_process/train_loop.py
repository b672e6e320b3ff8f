"""The training loop of one of Megatron's processes.

for each step:   read the batch of this step (a pure function of seed and step)
                 forward and backward by Megatron's schedule          -> gradients, loss
                 Megatron's optimizer at the step's learning rate     -> gradient norm
                 log; validate and save (in the background) at their intervals; stop after a signal
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from meshwright import runfile
from meshwright.engines.external_record import ENDING, FACTS, STEPS, VALIDATION
from meshwright.engines.megatron.in_megatron_process import checkpoint_state, optimizer_shards
from meshwright.engines.megatron.in_megatron_process.checkpoint_saving import BackgroundSaver
from meshwright.engines.megatron.in_megatron_process.forward_backward import ForwardBackward
from meshwright.engines.megatron.in_megatron_process.model import ModelAndOptimizer, build
from meshwright.engines.megatron.lower import OUTPUT, SETTINGS
from meshwright.engines.observer import observer_of_environment
from meshwright.errors import InputError
from meshwright.files import append, write_atomically
from meshwright.records.training import Ending
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run
from meshwright.training import checkpoints as checkpoint
from meshwright.training import data, telemetry
from meshwright.training import device as devices
from meshwright.training.data import Batch, Batches, Tokenizer
from meshwright.training.optimizer import learning_rate
from meshwright.training.profiling.profiler import profiler_of_environment
from meshwright.training.run_identity import IDENTITY, as_document, read_identity, tokens_seen
from meshwright.training.signals import StopRequest, stop_on_signals
from meshwright.training.weights import find_weights


def train(path: Path) -> Ending:
    """Train the run at `path` with the running processes; return the ending."""
    device = torch.empty(0, device="cuda").device
    devices.disable_malloc_trim(device)
    run = runfile.load(path)
    assert run.plan is not None
    settings = json.loads((path.parent / SETTINGS).read_text(encoding="utf-8"))
    with stop_on_signals() as request:
        parts = build(run, settings, device=device)
        log = MeasurementLog(path.parent / OUTPUT, device=device)
        ending = MegatronTrainLoop(run, run.plan, parts=parts, log=log, request=request, device=device).train()
        log.close()
    dist.barrier()
    parallel_state.destroy_model_parallel()
    return ending


class MegatronTrainLoop:
    """The loop of one training, with its model, data and checkpoints."""

    def __init__(
        self,
        run: Run,
        plan: Plan,
        *,
        parts: ModelAndOptimizer,
        log: MeasurementLog,
        request: StopRequest,
        device: torch.device,
    ) -> None:
        assert run.num_steps is not None  # `check` refuses a run without
        self.run, self.parts, self.log, self.request = run, parts, log, request
        self.plan, self.num_steps = plan, run.num_steps
        self.passes = ForwardBackward(run=run, plan=plan, parts=parts, device=device)
        self.device = device
        self.observer = observer_of_environment()
        dist.barrier()  # all have built the model
        self.observer.opening_data()
        self.batches, self.validation, tokenizer = open_batches(run)
        weights = None if run.weights is None else find_weights(run.weights)
        self.about = checkpoint_state.about(run, plan, weights=weights, tokenizer=tokenizer)
        self.identity = read_identity(log.folder.parent / IDENTITY)
        self.saver = None if run.train.checkpoint is None else BackgroundSaver(run.train.checkpoint)

    def train(self) -> Ending:
        """Train from the first step, or from the newest checkpoint, to the last step."""
        done = self._resume()
        taken, ending = done, Ending.DONE
        self.observer.training(num_samples=done * self.run.global_batch)
        batches = self.batches.iterate(start=done, stop=self.num_steps)
        for step, batch in zip(range(done, self.num_steps), batches, strict=False):
            with self.log.profiled(step + 1) as mark:
                entry = self._step(step, batch) | mark
            if self.saver is not None:
                self.saver.poll()
                entry["checkpoint_stall_s"] = self.saver.stalls.new_s()
            self.log.step(entry)
            if not (math.isfinite(entry["loss"]) and math.isfinite(entry["gradient_norm"])):
                ending = Ending.DIVERGED
                break
            taken = step + 1
            is_last, is_asked = taken == self.num_steps, self._is_asked_to_stop()
            is_reached = self._validate(taken, is_last=is_last)
            if self.saver and (is_last or is_asked or is_reached or taken % self.saver.settings.every_steps == 0):
                state = checkpoint_state.state_of(self.parts)
                ranges = optimizer_shards.ranges_text(self.parts, state)
                self.saver.save(state, ranges=ranges, step=taken, about=self.about | self._identity_at(taken))
            if is_reached:
                ending = Ending.REACHED
                break
            if is_asked and not is_last:
                ending = Ending.STOPPED
                break
        if self.saver is not None:
            self.saver.wait()
            self.log.stall_s = sum(self.saver.stalls.seconds)
        self.log.ending(ending)
        self.observer.ended(num_samples=taken * self.run.global_batch, ending=ending)
        return ending

    def _step(self, step: int, batch: Batch) -> dict[str, Any]:
        start_s = time.perf_counter()
        for module in self.parts.chunks:
            module.train()
            module.zero_grad_buffer()
        self.parts.optimizer.zero_grad()
        loss = self.passes.loss(batch)
        rate = learning_rate(self.run.optimizer, step=step, num_steps=self.num_steps)
        for group in self.parts.optimizer.param_groups:  # in Megatron, its scheduler sets both
            group["lr"] = rate
            group["weight_decay"] = self.run.optimizer.weight_decay * group.get("wd_mult", 1.0)
        _, norm, _ = self.parts.optimizer.step()
        assert norm is not None
        devices.synchronize(self.device)
        return {
            "step": step + 1,
            "loss": loss,
            "gradient_norm": float(norm),
            "learning_rate": rate,
            "step_s": time.perf_counter() - start_s,
            "ended_s": time.time(),
        }

    def _identity_at(self, taken: int) -> dict[str, Any]:
        """The part of the manifest that says of which run the checkpoint is; empty for files of an older release."""
        if self.identity is None:
            return {}
        tokens = tokens_seen(self.identity.batches, steps=taken)
        return {"identity": as_document(self.identity), "tokens": tokens}

    def _is_asked_to_stop(self) -> bool:
        """Return True if any process has received a stop signal."""
        asked = torch.tensor(float(self.request.asked), device=self.device)
        dist.all_reduce(asked)
        return asked.item() > 0

    def _validate(self, taken: int, *, is_last: bool) -> bool:
        """Return True if a validation is due and reaches the target."""
        evaluate, num_samples = self.run.train.evaluate, taken * self.run.global_batch
        if evaluate is None or not evaluate.is_due(taken, is_last=is_last):
            return False
        assert self.validation is not None
        self.observer.evaluating(num_samples=num_samples)
        for module in self.parts.chunks:
            module.eval()
        total = num_labels = 0.0
        most = evaluate.batches_of(self.run.global_batch)
        for batch in self.validation.iterate(stop=min(most, self.validation.num_to_the_end)):
            count = torch.tensor(batch.num_trained_tokens, device=self.device, dtype=torch.float64)
            dist.all_reduce(count, group=parallel_state.get_data_parallel_group())
            total += self.passes.loss(batch, forward_only=True) * count.item()
            num_labels += count.item()
        loss = total / num_labels
        self.log.validation({"step": taken, "validation_loss": loss})
        self.observer.evaluated(num_samples=num_samples, loss=loss)
        is_reached = evaluate.target_loss is not None and loss <= evaluate.target_loss
        if not (is_reached or is_last):
            self.observer.training(num_samples=num_samples)
        return is_reached

    def _resume(self) -> int:
        """Return the number of completed steps. Without `--resume`, a folder with checkpoints is refused earlier."""
        if self.saver is None or not checkpoint.checkpoints(self.saver.folder):
            return 0
        saved = checkpoint.newest(self.saver.folder)
        checkpoint_state.load(self.parts, saved, plan=self.plan)
        return saved.step


def open_batches(run: Run) -> tuple[Batches, Batches | None, Tokenizer | None]:
    """Return the training and validation data of this process, and their tokenizer.

    The main process tokenises, the others wait and read its files.
    """
    is_main = dist.get_rank() == 0
    if not is_main:
        dist.barrier()
    corpus = data.open_data(run)
    if is_main:
        dist.barrier()
    batches = Batches(
        samples=corpus.train,
        global_batch=run.global_batch,
        seed=run.train.seed,
        data_rank=parallel_state.get_data_parallel_rank(),
        data_width=parallel_state.get_data_parallel_world_size(),
        vocab=run.model.vocab,
    )
    if run.train.evaluate is None:
        return batches, None, corpus.tokenizer
    if corpus.validation is None:
        raise InputError(f"{run.source}: there is no data to validate on")
    validation = replace(batches, samples=corpus.validation, is_shuffled=False, is_once=True)
    return batches, validation, corpus.tokenizer


class MeasurementLog:
    """Measurements: the main process writes one line per step, and every process a file of its own."""

    def __init__(self, folder: Path, *, device: torch.device) -> None:
        self.folder, self.device, self.rank = folder, device, dist.get_rank()
        self.step_s: list[float] = []
        self.profiler = profiler_of_environment(folder.parent, device=device, is_main=self.rank == 0)
        self.stall_s: float | None = None  # total stall of checkpoints, if any are saved
        folder.mkdir(parents=True, exist_ok=True)
        if self.rank == 0:
            facts = {
                "device": telemetry.device_facts(device, accelerator=devices.catalog_name(device)),
                "software": telemetry.software_facts(),
            }
            write_atomically(folder / FACTS, json.dumps(facts))
            (folder / ENDING).unlink(missing_ok=True)  # of a training that is resumed

    @contextmanager
    def profiled(self, step: int) -> Iterator[dict[str, Any]]:
        """Profile `step` (1 is the first) if it is to be profiled; gives what its measurements say of that."""
        if self.profiler is None:
            yield {}
            return
        mark = {"profiled": True} if self.profiler.covers(step) else {}
        with self.profiler.around(step):
            yield mark

    def step(self, entry: dict[str, Any]) -> None:
        """Write the measurements of one step."""
        if not entry.get("profiled"):
            self.step_s.append(entry["step_s"])
        self._add(STEPS, entry | {"memory_bytes": devices.peak_memory_bytes(self.device)})

    def validation(self, entry: dict[str, Any]) -> None:
        """Write the loss of an evaluation."""
        self._add(VALIDATION, entry)

    def ending(self, ending: Ending) -> None:
        """Write the ending of the training."""
        if self.rank == 0:
            write_atomically(self.folder / ENDING, json.dumps({"ending": ending.value}))

    def close(self) -> None:
        """Write the measurements of this process."""
        if self.profiler is not None:
            self.profiler.close()
        measured = {
            "step_s": self.step_s,
            "peak_memory_bytes": devices.peak_memory_bytes(self.device),
            "checkpoint_stall_s": self.stall_s,
        }
        write_atomically(self.folder / f"rank-{self.rank}.json", json.dumps(measured))

    def _add(self, name: str, entry: dict[str, Any]) -> None:
        if self.rank == 0:
            append(self.folder / name, json.dumps(entry) + "\n")
