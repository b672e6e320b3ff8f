"""A plan: the distribution of one training step over devices.

Degrees obey   data_replicate * data_shard * context * tensor * pipeline = number of devices,
and expert layers re-use the same ranks:  expert * expert_tensor divides tensor * context * data.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from itertools import groupby


class Sharding(IntEnum):
    """Tensors that the data-parallel ranks shard (ZeRO stages). HSDP is PARAMETERS with data_replicate > 1."""

    NONE = 0  # every rank holds everything (DDP)
    OPTIMIZER = 1  # ZeRO-1, Megatron's distributed optimizer
    GRADIENTS = 2  # ZeRO-2
    PARAMETERS = 3  # ZeRO-3, FSDP


class Schedule(StrEnum):
    """Order of forward and backward passes in the pipeline."""

    GPIPE = "gpipe"  # all forward, then all backward
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"  # virtual stages, Megatron-LM (Narayanan et al. 2021)
    ZERO_BUBBLE = "zero_bubble"  # ZB-H1 (Qi et al. 2023): weight gradients fill the bubble
    ZBV = "zbv"  # two chunks per rank in a V
    DUALPIPE = "dualpipe"  # bidirectional, DeepSeek-V3: needs twice the weights
    DUALPIPE_V = "dualpipev"  # one half of DualPipe's ranks, two chunks each in a V: the weights once


SCHEDULES = tuple(Schedule)
"""Tables of plans store the index into this tuple."""


class Recompute(StrEnum):
    """Activations that the backward pass recomputes."""

    NONE = "none"
    SELECTIVE = "selective"  # the modules named in Plan.recompute_modules
    FULL = "full"  # whole layers; only their inputs are kept


RECOMPUTE_MODULES = (
    "core_attention",
    "norm",
    "activation",
    "mla_up_projection",
    "mlp",
    "moe",
    "shared_experts",
    "alternate_matmuls",  # every second GEMM and all other operations: torchtitan's selective "op"
)
"""Modules that selective recomputation may name; Megatron-Core's names where it has one."""

DROPPED_MODULES = ("norm", "activation", "mla_up_projection")
"""Modules whose output is recomputed. Of the other modules the activations inside them are."""


STORED_MODULES = ("feed_forward", "norm")
"""Modules of a layer that can keep their activations in 8 bits."""

WEIGHT_CACHES = ("on", "off")
"""Values of the cache that keeps 8-bit weights from the first micro-batch of a step to the last."""

ALL_TOKENS = "all"
"""Logits of all tokens of a micro-batch are in memory at once, not of a chunk of tokens."""


class AxisOrder(StrEnum):
    """Parallel axes over the ranks of a cluster, innermost first: inner axes lie inside a node or an NVLink domain.

    Names as in Megatron-Core. Expert parallelism folds over the axes inside the outermost.
    """

    PIPELINE_OUTERMOST = "tp-cp-dp-pp"  # data-parallel ranks are neighbours, stages are far apart
    DATA_OUTERMOST = "tp-cp-pp-dp"  # stages are neighbours: Megatron's --use-tp-pp-dp-mapping


class Offload(StrEnum):
    """Tensors kept in host memory."""

    NONE = "none"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One point of the planner's space."""

    tensor: int = 1
    sequence_parallel: bool = True  # norms and residuals split along the sequence when tensor > 1
    context: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1  # model chunks per pipeline rank
    expert: int = 1
    expert_tensor: int = 1
    data_shard: int = 1
    data_replicate: int = 1
    sharding: Sharding = Sharding.OPTIMIZER
    micro_batch: int = 1  # sequences per model replica and micro-batch
    schedule: Schedule = Schedule.ONE_F_ONE_B
    recompute: Recompute = Recompute.NONE
    recompute_modules: tuple[str, ...] = ()
    recompute_layers: int | None = None  # FULL: layers per pipeline rank that are recomputed; None: all
    layers_per_stage: tuple[int, ...] | None = None  # None: equal stages, with the rest on the two ends
    offload: Offload = Offload.NONE
    axis_order: AxisOrder = AxisOrder.PIPELINE_OUTERMOST
    stored_activations: tuple[str, ...] | None = None  # modules that keep them in 8 bits; None: as the run says
    weight_cache: str | None = None  # WEIGHT_CACHES; None: as the run says
    loss_chunk: int | str | None = None  # tokens whose logits are in memory at once, or ALL_TOKENS; None: as the run

    @property
    def data(self) -> int:
        """Data-parallel width: number of micro-batches that run at once."""
        return self.data_shard * self.data_replicate

    @property
    def num_devices(self) -> int:
        return self.data * self.context * self.tensor * self.pipeline

    @property
    def expert_data(self) -> int:
        """Ranks that hold a copy (or shard) of the same experts."""
        return self.num_devices // (self.expert * self.expert_tensor * self.pipeline)

    @property
    def keeps_weights_whole(self) -> bool:
        """True if the parameters of a rank stay whole between the micro-batches of a step."""
        return self.sharding is not Sharding.PARAMETERS or self.pipeline > 1 or self.data_shard == 1

    def num_micro_batches(self, global_batch: int) -> int:
        """Micro-batches per step for a global batch in sequences; divisibility is the caller's check."""
        return global_batch // (self.micro_batch * self.data)

    def describe(self) -> str:
        """Short form for tables.

        >>> Plan(tensor=4, pipeline=8, virtual_pipeline=5, data_shard=16, schedule=Schedule.INTERLEAVED).describe()
        'TP4 PP8 VPP5 DP16 zero1 mbs1 interleaved'
        """
        degrees = [
            (self.tensor, "TP"),
            (self.context, "CP"),
            (self.expert, "EP"),
            (self.expert_tensor, "ETP"),
            (self.pipeline, "PP"),
            (self.virtual_pipeline, "VPP"),
        ]
        parts = [f"{name}{width}" for width, name in degrees if width > 1]
        if self.sharding is Sharding.PARAMETERS:
            parts.append(f"FSDP{self.data_shard}")
            parts += [f"DP{self.data_replicate}"] if self.data_replicate > 1 else []
        else:
            parts += [f"DP{self.data}", ("ddp", "zero1", "zero2")[self.sharding]]
        parts.append(f"mbs{self.micro_batch}")
        if self.pipeline > 1:
            parts.append(self.schedule.value)
            parts += [f"layers={listed_layers(self.layers_per_stage)}"] if self.layers_per_stage else []
            parts += [f"order={self.axis_order}"] if self.axis_order is not AxisOrder.PIPELINE_OUTERMOST else []
        if self.recompute is not Recompute.NONE:
            what = "+".join(self.recompute_modules) if self.recompute_modules else self.recompute.value
            layers = "" if self.recompute_layers is None else f" of {self.recompute_layers} layers"
            parts.append(f"recompute={what}{layers}")
        if self.offload is not Offload.NONE:
            parts.append(f"offload={self.offload}")
        if self.stored_activations:
            parts.append(f"8bit={'+'.join(self.stored_activations)}")
        if self.weight_cache is not None:
            parts.append(f"cache={self.weight_cache}")
        if self.loss_chunk is not None:
            parts.append(f"loss={self.loss_chunk}")
        return " ".join(parts)


def listed_layers(layers_per_stage: tuple[int, ...]) -> str:
    """Layers of each stage, neighbours that are equal once with their number.

    >>> listed_layers((7, 8, 8, 8, 6))
    '7,8x3,6'
    """
    groups = [(count, len(list(group))) for count, group in groupby(layers_per_stage)]
    return ",".join(str(count) if n == 1 else f"{count}x{n}" for count, n in groups)


MAX_STAGES = 10_000


def read_layers(listed: str) -> tuple[int, ...]:
    """The inverse of `listed_layers`. Raises ValueError for anything else and for more than `MAX_STAGES`.

    >>> read_layers("7,8x3,6")
    (7, 8, 8, 8, 6)
    """
    found: list[int] = []
    for part in listed.split(","):
        count, _, times = part.partition("x")
        repeats = int(times) if "x" in part else 1
        if not 0 < repeats <= MAX_STAGES - len(found):
            raise ValueError(f"{listed!r} are no layers of 1 to {MAX_STAGES:,} stages")
        found += [int(count)] * repeats
    return tuple(found)
