"""Switches of training software that change its speed more than its name does."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

from meshwright.specs.limits import Limits, Ratio

if TYPE_CHECKING:
    from meshwright.specs.hardware import Accelerator


class CudaGraphs(StrEnum):
    """Share of a step that the host replays as captured graphs instead of launching kernel by kernel."""

    NONE = "none"
    STATE_SPACE = "state-space"  # the state-space blocks of a hybrid alone
    PARTIAL = "partial"  # attention, state space, router and preprocessing; or dense layers of a mixture of experts
    FULL = "full"  # the whole iteration


class Dispatcher(StrEnum):
    """Kernels that bring tokens to their experts and back."""

    ALL_TO_ALL = "all-to-all"  # one copy for each expert
    DEEPEP = "deepep"  # one copy for each node, forwarded inside it
    HYBRIDEP = "hybridep"  # the same, with few compute units and without waiting for the host


class AttentionKernel(StrEnum):
    """Kernels of scores and values."""

    UNFUSED = "unfused"  # scores are written to memory
    FA1 = "fa1"
    FA2 = "fa2"
    FA3 = "fa3"
    CUDNN = "cudnn"
    CK = "ck"  # AMD Composable Kernel
    AITER = "aiter"
    SPLASH = "splash"  # XLA's Pallas kernel on TPUs
    TRITON = "triton"  # FlashAttention in Triton, with biases
    FLEX = "flex"  # torch.nn.attention.flex_attention


_GPUS = ("NVIDIA", "AMD")
_WRITTEN_FOR: dict[AttentionKernel | Dispatcher, tuple[str, ...]] = {
    AttentionKernel.FA1: _GPUS,
    AttentionKernel.FA2: _GPUS,
    AttentionKernel.FA3: ("Hopper",),
    AttentionKernel.CUDNN: ("NVIDIA",),
    AttentionKernel.CK: ("AMD",),
    AttentionKernel.AITER: ("AMD",),
    AttentionKernel.SPLASH: ("Google",),
    AttentionKernel.TRITON: _GPUS,
    Dispatcher.DEEPEP: _GPUS,
    Dispatcher.HYBRIDEP: ("NVIDIA",),
}
"""Vendors and architectures of accelerators; kernels that are not named run everywhere."""


def runs_on(kernel: AttentionKernel | Dispatcher, accelerator: Accelerator) -> bool:
    """Return True if `kernel` is written for `accelerator`."""
    kinds = _WRITTEN_FOR.get(kernel)
    return kinds is None or bool({accelerator.vendor, accelerator.architecture} & set(kinds))


class Preset(StrEnum):
    """Switches that a run has where its file states none."""

    ENGINE = "engine"  # as the engine's `export` and `train` set them
    RECIPE = "recipe"  # as the performance recipes of the stack's release do, which `export` then sets


class WireFormat(StrEnum):
    """Number format of gradients or parameters between data-parallel ranks."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"


WIRE_BYTES = {WireFormat.FP32: 4.0, WireFormat.BF16: 2.0, WireFormat.FP8: 1.0}

FORCED_BALANCE = 1.0
"""Tokens of the busiest expert rank over the mean where a benchmark sends equally many everywhere."""
NATURAL_ROUTING = 1.4
"""The same where routers decide: Qwen3 235B on 256 H100 takes 1.25 times as long as with forced balance at 16k tokens,
1.21 at 32k and 1.09 at 128k, where experts are a smaller part (Megatron-Core MoE model zoo)."""


FUSED_IN = "mxfp8"
"""The precision for which fused kernels of experts exist (`Features.fuses_experts`)."""

BALANCED_CAPACITY = 1.0
"""Capacity of an expert over its mean tokens where a stack drops tokens and nothing says how many.

Recipes with a capacity in Megatron-Bridge's releases of 2025 have `moe_expert_capacity_factor = 1.0`, padded.
"""


_Excess = Annotated[float, Limits(ge=1, le=64)]
_Capacity = Annotated[float, Limits(gt=0, le=64)]
_Tile = Annotated[int, Limits(ge=16, le=65536)]


@dataclass(frozen=True, kw_only=True)
class Features:
    """Switches of one run. None: as the stack's release does."""

    cuda_graphs: CudaGraphs | None = None
    dispatcher: Dispatcher | None = None
    overlaps_experts: bool | None = None  # expert communication runs behind another micro-batch or stage
    drops_tokens: bool | None = None  # experts have a capacity: static shapes, no wait for counts
    capacity_factor: _Capacity | None = None  # that capacity over an expert's mean tokens; it implies the former
    attention: AttentionKernel | None = None
    attention_tile: _Tile | None = None  # queries and keys that fused attention computes together
    fuses_attention_backward: bool | None = None  # one kernel computes the gradients of queries, keys and values
    fp8_attention: bool | None = None  # scores and values are multiplied in 8 bits
    compiles: bool | None = None  # a compiler fuses element-wise kernels
    overlaps_tensor: bool | None = None  # tensor-parallel collectives run in parts behind their GEMMs
    fuses_experts: bool | None = None  # grouped GEMMs quantise, activate and permute by themselves
    gradient_format: WireFormat | None = None  # in which data-parallel ranks reduce
    parameter_format: WireFormat | None = None  # in which they gather
    reduces_once: bool | None = None  # under FSDP, after a step's last micro-batch: gradients are whole until then
    offloaded_activations: Ratio | None = None  # share of the saved activations that is kept in host memory
    expert_imbalance: _Excess | None = None  # tokens of the busiest expert rank over the mean

    @property
    def has_capacity(self) -> bool:
        """True where an expert drops what exceeds its capacity."""
        return self.capacity_factor is not None or bool(self.drops_tokens)

    @property
    def pads_experts(self) -> bool:
        """True where an expert computes as many tokens in every step: its own are dropped or padded to them.

        DeepEP pads none: Megatron-Core's TransformerConfig refuses moe_pad_expert_input_to_capacity with it.
        """
        return self.has_capacity and self.dispatcher is not Dispatcher.DEEPEP

    @property
    def busiest_expert_ratio(self) -> float:
        """Tokens that the busiest expert rank computes over the mean: a capacity limits them, padded ones equal it."""
        capacity, imbalance = self.capacity_factor or BALANCED_CAPACITY, self.expert_imbalance or FORCED_BALANCE
        if self.pads_experts:
            return capacity
        return min(capacity, imbalance) if self.has_capacity else imbalance

    def stated(self) -> dict[str, str | bool | float]:
        """The switches that are not None, as a run file writes them."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: v if isinstance(v, int | float) else str(v) for k, v in values.items() if v is not None}

    def or_else(self, default: Features) -> Features:
        """These switches, with `default`'s in place of None."""
        mine = {f.name: getattr(self, f.name) for f in fields(self)}
        return Features(**{k: getattr(default, k) if v is None else v for k, v in mine.items()})


RELEASE_DEFAULTS = Features()
"""No switch is stated: each is as the stack's release has it."""
