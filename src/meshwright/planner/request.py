"""Request to the planner, and the tables of numbers it works with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from meshwright.calibration import device as device_calibration
from meshwright.calibration.memory import MemoryConstants, memory_constants
from meshwright.calibration.parameters import Calibration, fitted
from meshwright.cost.rates import SystemFacts, fused_kernels, system_facts
from meshwright.cost.tables import BatchTable, ModelTable, PrecisionTable, WeightCache, model_row, precision_row
from meshwright.errors import InputError
from meshwright.planner.fixed import check_field
from meshwright.specs.adapters import absent_targets
from meshwright.specs.hardware import Accelerator, Cluster, Stack
from meshwright.specs.memory_budget import PLANNING_RATIO, MemoryBudget
from meshwright.specs.model import Lora, Model
from meshwright.specs.plan import Recompute
from meshwright.specs.precision import Precision
from meshwright.specs.reinforcement import Grpo
from meshwright.specs.run import (
    NATIVE,
    KernelChoices,
    Optimizer,
    Preference,
    Run,
    Train,
    has_removable_reference,
    with_label_ratio,
)

UNCOUNTED_GENERATION = (
    "train.grpo: the predicted step is the update only: how long the model writes completions follows from their "
    "lengths, which are not known, and neither that time, nor its keys and values, nor the whole copy of the weights "
    "in the compute format that sharded plans write with, is counted"
)


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """One question to the planner.

    `fixed` maps fields of `specs.plan.Plan` to the only value they may take. `global_batch` is in sequences,
    `seq_len` in tokens.
    """

    model: Model
    lora: Lora | None = None
    cluster: Cluster
    seq_len: int
    global_batch: int
    precision: Precision
    stack: Stack
    engine: str = NATIVE
    fixed: Mapping[str, object] = field(default_factory=dict)
    offloads_to_fit: bool = False  # the planner has fixed `offload`, as nothing fits without
    usable_memory_ratio: float = PLANNING_RATIO
    calibration: Calibration | None = None  # None: the one that ships
    kernels: KernelChoices = field(default_factory=KernelChoices)
    optimizer: Optimizer = field(default_factory=Optimizer)
    part_batch: int | None = None  # sequences of a part of a step that labels size; None: a step is one part
    is_compiled: bool = False
    preference: Preference | None = None  # loss of pairs of answers, one pair a sequence
    grpo: Grpo | None = None  # loss of completions, one a sequence
    residual_dropout: float = 0.0
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in self.fixed:
            check_field(name)
        _check_recomputation(self.fixed)
        for name in ("seq_len", "global_batch"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is out of range", got=getattr(self, name), allowed=">= 1")
        _ = self.memory_budget  # raises for a ratio out of range

    @property
    def batch_of_part(self) -> int:
        """Sequences that divide into micro-batches: a step, or each part of one that labels size."""
        return self.part_batch or self.global_batch

    @cached_property
    def model_table(self) -> ModelTable:
        return model_row(self.model, lora=self.lora)

    @cached_property
    def batch_table(self) -> BatchTable:
        pairs, grpo = self.preference, self.grpo
        by_token = (pairs is not None and not self.model.num_labels) or grpo is not None
        has_reference = has_removable_reference(Train(preference=pairs, grpo=grpo), self.lora)
        old_passes = 1 / grpo.iterations if grpo is not None and grpo.iterations > 1 else 0
        return BatchTable(
            seq_len=self.seq_len,
            global_batch=self.global_batch,
            head_passes=int(by_token and self.stack.framework == NATIVE),  # others hold all logits
            reference_passes=has_reference + old_passes,
        )

    @cached_property
    def precision_table(self) -> PrecisionTable:
        is_native = self.stack.framework == "native"
        own = WeightCache.AUTO if is_native else WeightCache.CALIBRATED
        cache = {"on": WeightCache.ON, "off": WeightCache.OFF}.get(self.kernels.weight_cache, own)
        return precision_row(
            self.precision,
            stored_activations=self.kernels.stored_activations,
            weight_cache=cache,
            frozen_in_16_bits=self.memory_constants.frozen_in_16_bits,
            loss_chunk=self.kernels.loss_chunk,
            dequantises_in_parts=int(is_native),
        )

    @cached_property
    def memory_constants(self) -> MemoryConstants:
        """The stack's, with the run's routes of kernels on its device."""
        accelerator = self.cluster.accelerator
        on_cpu, routes = is_processor(accelerator), self.kernels.routes
        if not (on_cpu or fused_kernels(accelerator, routes=routes).loss):
            routes = {"linear_cross_entropy": "cached", **routes}
        found = memory_constants(self.stack, routes=routes, on_cpu=on_cpu, precision=self.precision.name)
        element = max(self.precision.linear_input_bytes, 2.0)
        if self.residual_dropout:  # PyTorch keeps a byte of each element on a GPU, and on a CPU a factor of its format
            found = replace(found, keeps_dropout_masks=element if on_cpu else 1)
        if self.attention_dropout and on_cpu:  # probabilities, factors and their products; GPUs draw them again
            found = replace(found, unfused_attention=1, blockwise_attention=0, probability_bytes=3 * element)
        return found

    @cached_property
    def system_facts(self) -> SystemFacts:
        """Device, fabric and stack, with the run's routes of kernels."""
        return system_facts(self.cluster, self.precision, self.stack, routes=self.kernels.routes)

    @property
    def num_devices(self) -> int:
        return self.cluster.num_devices

    @property
    def memory_budget(self) -> MemoryBudget:
        """Device memory, and how much of it a plan may reserve."""
        return self.memory_budget_of(self.cluster)

    def memory_budget_of(self, part: Cluster) -> MemoryBudget:
        """The same of the devices of `part`, one part of the cluster."""
        capacity, log_sd = part.accelerator.memory_bytes, fitted().memory_sd
        return MemoryBudget(capacity_bytes=capacity, ratio=self.usable_memory_ratio, log_sd=log_sd)

    @property
    def usable_bytes(self) -> float:
        """Device memory that a plan may reserve."""
        return self.memory_budget.usable_bytes

    @property
    def usable_host_bytes(self) -> float:
        """Host memory that a plan may fill for each device: the same share as of its own; inf where it is unknown."""
        known = self.cluster.host_bytes_per_device
        return float("inf") if known is None else known * self.usable_memory_ratio

    @property
    def peak_flops_per_s(self) -> float:
        """Peak of a device in the format of GEMMs; the mean of a cluster of several parts."""
        parts = self.cluster.parts or (self.cluster,)
        peaks = [part.num_devices * part.accelerator.peak_flops_per_s[self.precision.matmul] for part in parts]
        return sum(peaks) / sum(part.num_devices for part in parts)

    def fixing(self, **values: object) -> PlanRequest:
        """The same question with more fields fixed."""
        return replace(self, fixed={**self.fixed, **values})


def _check_recomputation(fixed: Mapping[str, object]) -> None:
    """Raises InputError for fixed modules or layers that the fixed kind of recomputation does not have."""
    kind, modules, layers = (fixed.get(n) for n in ("recompute", "recompute_modules", "recompute_layers"))
    for name, value, needed in (
        ("recompute_modules", modules, Recompute.SELECTIVE),
        ("recompute_layers", layers, Recompute.FULL),
    ):
        if value and kind not in (None, needed):
            raise InputError(
                f"{name} belongs to recompute={needed}", got=f"recompute={kind}", hint="leave one of both out"
            )
    if modules and layers:
        raise InputError(
            "recompute_modules and recompute_layers are two kinds of recomputation", got="both", hint="give one of them"
        )


def is_processor(accelerator: Accelerator) -> bool:
    """Return True for the catalogue's generic CPU, and for one that was measured: its GEMMs have no output tiles."""
    return accelerator.name == "cpu" or not accelerator.output_tiles


def note_on_labels(run: Run, *, ratio: float | None = None) -> list[str]:
    """The size of a step that is predicted for `run`; nothing for steps of one global batch.

    `ratio`: labels over tokens of its data; None: unknown, and each token counts as a label.
    """
    if run.label_tokens is None:
        return []
    num_sequences = with_label_ratio(run, 1.0 if ratio is None else ratio).global_batch
    known = "each token were a label" if ratio is None else f"{100 * ratio:.1f} % of the tokens are labels"
    data = "; data with fewer labels takes more" if ratio is None else ", as in the data"
    return [f"batch.label_tokens: a step is predicted to take {num_sequences:,} sequences, as if {known}{data}"]


def request_for(run: Run, **changes: object) -> PlanRequest:
    """The question a run file asks. Its cluster must be known: measure `here` first."""
    if run.cluster is None:
        raise InputError(
            "the planner needs a known cluster", got=run.cluster_name,
            hint="name one of the catalogue, as in `cluster: h100-8x4`, or measure this machine: "
            "`meshwright bench device`, then `meshwright calibrate bench --install`",
        )  # fmt: skip
    if run.lora is not None and (absent := absent_targets(run.model, run.lora.targets)):
        raise InputError(
            f"no layer of {run.model.name} has such a matrix with adapters", got=f"lora.targets: {', '.join(absent)}",
            hint="experts, linear attention, state space and compressed attention have no adapters here",
        )  # fmt: skip
    calibration = None
    if run.calibration is not None:
        measured = device_calibration.load(run.calibration)
        calibration = measured.calibration(num_devices=run.cluster.num_devices)
    fixed = {} if run.micro_batch is None else {"micro_batch": run.micro_batch}
    request = PlanRequest(
        model=run.model,
        lora=run.lora,
        cluster=run.cluster,
        seq_len=run.sequence_length,
        global_batch=with_label_ratio(run).global_batch,
        precision=run.precision,
        stack=run.stack,
        engine=run.engine,
        fixed=fixed,
        calibration=calibration,
        # The compiler decides what a compiled layer saves.
        kernels=replace(run.kernels, is_storage_open=run.kernels.is_storage_open and not run.train.compile),
        optimizer=run.optimizer,
        part_batch=None if run.label_tokens is None else run.global_batch,
        is_compiled=run.train.compile,
        preference=run.train.preference,
        grpo=run.train.grpo,
        residual_dropout=run.train.residual_dropout,
        attention_dropout=run.train.attention_dropout,
    )
    return replace(request, **changes) if changes else request  # pyright: ignore[reportArgumentType]
