"""Sizes of the work of one layer's kernels: the tables of a plan, and tokens of one micro-batch on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from meshwright.arrays import Array
from meshwright.cost.tables import BatchTable, ModelTable, PlanTable, PrecisionTable

if TYPE_CHECKING:
    from meshwright.cost.compute import DeviceRates


@dataclass(frozen=True, kw_only=True)
class LayerShapes:
    """One micro-batch of one layer on one rank, and the rates that its kernels run at.

    load_factor: tokens of the busiest expert rank over the mean.
    """

    model: ModelTable
    batch: BatchTable
    plan: PlanTable
    precision: PrecisionTable
    rates: DeviceRates
    load_factor: Array = 1.0

    @cached_property
    def tokens(self) -> Array:
        return self.batch.seq_len * self.plan.micro_batch / self.plan.context

    @cached_property
    def expert_tokens(self) -> Array:
        """Tokens that the experts of this rank receive."""
        here = self.tokens / self.plan.tensor * self.plan.expert_tensor
        return here * self.model.top_k * self.load_factor

    @property
    def trained(self) -> Array:
        """1 where weights have gradients; frozen weights under adapters have none."""
        return 1 - (self.model.lora_rank > 0) * 1

    @property
    def streaming_bytes_per_s(self) -> Array:
        return self.rates.streaming_bytes_per_s

    @property
    def element_s(self) -> Array:
        """Seconds of one access to an activation."""
        return self.precision.activation_bytes / self.streaming_bytes_per_s

    @property
    def stream_split(self) -> Array:
        """Ranks over which the residual stream is split."""
        return np.where(self.plan.sequence_parallel > 0, self.plan.tensor, 1)

    @property
    def stream(self) -> Array:
        """Elements of the residual stream."""
        return self.tokens * self.model.hidden / self.stream_split

    @property
    def has_experts(self) -> Array:
        return (self.model.num_experts > 0) * 1.0

    @property
    def num_experts(self) -> Array:
        return np.maximum(self.model.num_experts, 1)

    @property
    def routed(self) -> Array:
        """Elements of the hidden tensors of routed experts."""
        return self.expert_tokens * self.model.expert_ffn / self.plan.expert_tensor

    @property
    def fused_experts(self) -> Array:
        """1 where grouped GEMMs quantise, activate and permute by themselves: kernels of gated experts alone
        (NVIDIA-NeMo/Megatron-Bridge issue 2885: grouped GEMMs with SwiGLU and quantisation)."""
        return self.rates.fused_experts * (self.model.ffn_matrices > 2)

    def correction(self, kernel: str, elements: Array) -> Array:
        """Factor on the seconds of a memory-bound `kernel` that was measured on the device itself."""
        return self.rates.corrections.factor(f"elementwise/{kernel}", elements)
