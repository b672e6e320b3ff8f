"""Extensions of torchtitan at its own extension points. Runs in torchtitan's processes.

RunFileDataLoader   the data of the run file, in the order of the native engine
RunLearningRates    the learning rates of the native engine, step by step
RunValidator        evaluations at the steps of the native engine, which end the training at a target loss
StepLogMetrics      measurements of each step, one line per step, and those of each process
AbsentTokenizer     placeholder for the tokenizer that torchtitan requires: the data consist of tokens
ExpertsInFp32       experts that multiply in the format of their tokens; torchtitan's round them to bf16

Symbols: R rows (a token for each of its experts), D hidden, E experts, F their hidden width.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.tools.utils import device_type

from meshwright import runfile
from meshwright.engines.external_record import ENDING, FACTS, STEPS, VALIDATION
from meshwright.engines.observer import observer_of_environment
from meshwright.errors import InputError
from meshwright.files import append, write_atomically
from meshwright.records.training import Ending
from meshwright.specs.run import DecayShape, LearningRateSchedule, Optimizer
from meshwright.training import data, telemetry
from meshwright.training import device as devices
from meshwright.training.models.experts import run_experts
from meshwright.training.optimizer import learning_rate
from meshwright.training.profiling.profiler import profiler_of_environment
from meshwright.training.weights import find_weights

V_SCHEDULES = ("ZBVZeroBubble", "DualPipeV")  # their first rank has the last stage


def weights_folder(given: str) -> str:
    """Return the absolute path, which torchtitan requires, of the weights `given` in a run file."""
    return str(find_weights(given).folder)


class RunFileDataLoader(BaseDataLoader):
    """The batches of one data rank, one micro-batch at a time.

    The only state is their number, so that any number of processes resumes a checkpoint of any other number. The data
    is opened when the first batch is asked for: all is built then.
    """

    is_over = False  # of the training data, once a target is reached: torchtitan ends where its data does

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """`dataset_path` is the run file."""

        is_validation: bool = False
        infinite: bool = True  # torchtitan sets it for validation; the order is always endless

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any) -> None:
        self.run, self.is_validation = runfile.load(config.dataset_path or ""), config.is_validation
        self.size, self.num_loaded = local_batch_size, 0
        self.rank, self.width = dp_rank, dp_world_size
        self.per_batch = self.run.global_batch // dp_world_size // local_batch_size

    def _open(self) -> data.Batches:
        run = self.run
        is_main = dist.get_rank() == 0
        if not is_main:
            dist.barrier()
        corpus = data.open_data(run)  # the main process tokenises, the others read its files
        if is_main:
            dist.barrier()
        samples = corpus.validation if self.is_validation else corpus.train
        if samples is None:
            raise InputError(f"{run.source}: there is no data to validate on")
        return data.Batches(
            samples=samples,
            global_batch=run.global_batch,
            seed=run.train.seed,
            data_rank=self.rank,
            data_width=self.width,
            vocab=run.model.vocab,
            is_shuffled=not self.is_validation,
        )

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield micro-batches from the position of a checkpoint on, prefetched by a thread."""
        start, skip = divmod(self.num_loaded, self.per_batch)
        observer = observer_of_environment()
        if not self.is_validation:
            dist.barrier()
            observer.opening_data()
        batches = self._open()
        if not self.is_validation:
            observer.training(num_samples=start * self.run.global_batch)
        for batch in batches.iterate(start=start):
            for micro in list(batch.micro_batches(self.size))[skip:]:
                if not self.is_validation and RunFileDataLoader.is_over:
                    return
                self.num_loaded += 1
                yield {"input": micro.tokens_BT, "positions": micro.positions_BT}, micro.labels_BT
            skip = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the number of loaded sequences of all ranks, which is independent of the micro-batch size."""
        return {"global_sequences": self.num_loaded * self.size * self.width}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the position of `state_dict`."""
        if state_dict:
            self.num_loaded = state_dict["global_sequences"] // (self.size * self.width)


class RunLearningRates(LRSchedulersContainer):
    """The native engine's rates, as factors of the peak."""

    @dataclass(kw_only=True, slots=True)
    class Config(LRSchedulersContainer.Config):
        """The upstream meaning of `warmup_steps`, `decay_ratio`, `decay_type` and `min_lr_factor` is kept."""

        schedule: str = "cosine"
        cycles: int = 1
        power: float = 1.0

        def build(self, *, optimizers: Any, training_steps: int) -> RunLearningRates:
            """Return the learning rates of all steps."""
            settings = Optimizer(
                learning_rate=1.0,
                schedule=LearningRateSchedule(self.schedule),
                warmup_steps=self.warmup_steps,
                final_ratio=self.min_lr_factor,
                decay_ratio=self.decay_ratio or 0.0,
                decay_shape=DecayShape(self.decay_type),
                cycles=self.cycles,
                power=self.power,
            )
            num_steps = self.total_steps or training_steps
            return RunLearningRates(optimizers, lambda step: learning_rate(settings, step=step, num_steps=num_steps))


class RunValidator(Validator):
    """The evaluations of the run file. They end the training at its target, and are reported to the observer."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        """The same as upstream."""

    def __init__(self, config: Config, **others: Any) -> None:
        super().__init__(config, **others)
        self.run = runfile.load(config.dataloader.dataset_path or "")

    def should_validate(self, step: int) -> bool:
        """Return True after the steps that the run file gives, and after the last one."""
        evaluate = self.run.train.evaluate
        return evaluate is not None and evaluate.is_due(step, is_last=step == self.run.num_steps)

    def validate(self, model_parts: list[torch.nn.Module], step: int) -> None:
        """Evaluate; every process decides by the loss that those of the last stage know."""
        observer, evaluate, log = observer_of_environment(), self.run.train.evaluate, self.metrics_processor
        assert evaluate is not None
        assert isinstance(log, StepLogMetrics)
        num_samples = step * self.run.global_batch
        observer.evaluating(num_samples=num_samples)
        super().validate(model_parts, step)
        known = torch.tensor(log.validation_loss, device=device_type, dtype=torch.float64)
        dist.all_reduce(known, op=dist.ReduceOp.MAX)  # other stages have a negative number
        loss = known.item()
        observer.evaluated(num_samples=num_samples, loss=loss)
        is_reached = evaluate.target_loss is not None and loss <= evaluate.target_loss
        if not is_reached and step != self.run.num_steps:
            observer.training(num_samples=num_samples)
            return
        RunFileDataLoader.is_over = True
        ending = Ending.REACHED if is_reached else Ending.DONE
        if dist.get_rank() == 0:
            write_atomically(log.folder / ENDING, json.dumps({"ending": ending.value}))
        observer.ended(num_samples=num_samples, ending=ending)


class StepLogMetrics(MetricsProcessor):
    """Writes one line per step to the dump folder, in addition to torchtitan's log."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """The same as upstream."""

    def __init__(self, config: Config, *, dump_folder: str, pp_schedule: str = "1F1B", **others: Any) -> None:
        super().__init__(config, dump_folder=dump_folder, pp_schedule=pp_schedule, **others)
        self.folder = Path(dump_folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.device = torch.device(device_type)
        self.rank, self.begin_s, self.step_s = dist.get_rank(), 0.0, []
        self.peak_bytes, self.validation_loss = 0, float("nan")
        self.profiler = profiler_of_environment(self.folder.parent, device=self.device, is_main=self.rank == 0)
        self.is_profiled, self.step_profile = False, ExitStack()
        self.writes = self.rank == _metrics_rank(self.parallel_dims, pp_schedule)
        if self.writes:
            facts = {
                "device": telemetry.device_facts(self.device, accelerator=devices.catalog_name(self.device)),
                "software": telemetry.software_facts(),
            }
            write_atomically(self.folder / FACTS, json.dumps(facts))
            (self.folder / ENDING).unlink(missing_ok=True)  # of a training that is resumed

    def should_log(self, step: int) -> bool:
        """Called at the beginning of a step."""
        if self.profiler is not None:
            self.is_profiled = self.profiler.covers(step)
            self.step_profile.enter_context(self.profiler.around(step))
        self.begin_s = time.perf_counter()
        return super().should_log(step)

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Called at the end of a step in every process; only some of them know the loss."""
        step_s, ended_s = time.perf_counter() - self.begin_s, time.time()
        self.step_profile.close()
        if not self.is_profiled:
            self.step_s.append(step_s)
        self.peak_bytes = max(self.peak_bytes, devices.peak_memory_bytes(self.device))
        if self.writes:
            rates = [value for name, value in (extra_metrics or {}).items() if name.startswith("lr/")]
            entry = {
                "step": step, "loss": global_avg_loss, "gradient_norm": grad_norm,
                "learning_rate": rates[0] if rates else None, "step_s": step_s,
                "ended_s": ended_s, "memory_bytes": self.peak_bytes,
            }  # fmt: skip
            entry |= {"profiled": True} if self.is_profiled else {}
            append(self.folder / STEPS, json.dumps(entry) + "\n")
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)

    def log_validation(self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
        """Called after an evaluation in every process; only those of the last stage know the loss."""
        self.validation_loss = loss
        if self.writes:
            append(self.folder / VALIDATION, json.dumps({"step": step, "validation_loss": loss}) + "\n")
        super().log_validation(loss, step, extra_metrics)

    def close(self) -> None:
        """Write the measurements of this process."""
        if self.profiler is not None:
            self.profiler.close()
        measured = {"step_s": self.step_s, "peak_memory_bytes": self.peak_bytes}
        write_atomically(self.folder / f"rank-{self.rank}.json", json.dumps(measured))
        super().close()


def _metrics_rank(parallel_dims: Any, pp_schedule: str) -> int:
    """Return the first rank of the last pipeline stage, which knows the loss."""
    if parallel_dims.pp == 1 or pp_schedule in V_SCHEDULES:
        return 0
    return parallel_dims.world_size // parallel_dims.pp * (parallel_dims.pp - 1)


class AbsentTokenizer(BaseTokenizer):
    """No tokenizer: the data loader provides tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """No fields."""

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        """Raise InputError."""
        raise InputError("the data of this run are tokens already")

    def decode(self, *args: Any, **kwargs: Any) -> str:
        """Raise InputError."""
        raise InputError("the data of this run are tokens already")

    def get_vocab_size(self) -> int:
        """Raise InputError: models contain the size of their vocabulary."""
        raise InputError("the vocabulary is the model's")


class ExpertsInFp32(GroupedExperts):
    """Torchtitan's experts with the same weights, without rounding to bf16."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """The same as upstream."""

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Return [R, D] for rows sorted by expert; expert e of this process has `num_tokens_per_expert_E[e]` rows."""
        gate_EFD, down_EDF, up_EFD = (
            w.to_local() if isinstance(w, DTensor) else w for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        )
        return run_experts(
            x_RD, num_tokens_per_expert_E, gate=gate_EFD, up=up_EFD, down=down_EDF,
            activation=lambda gate_RF, up_RF: functional.silu(gate_RF) * up_RF,
        )  # fmt: skip
