"""Conditions of a published run: everything that a prediction of it takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.catalog.precisions import multiplied_on
from meshwright.catalog.stacks import features_of
from meshwright.json_values import picked
from meshwright.specs.hardware import Accelerator, Stack
from meshwright.specs.model import Lora, Model
from meshwright.specs.plan import Plan
from meshwright.specs.precision import PRECISIONS, Precision
from meshwright.specs.run import Optimizer, StateFormat, precision_with

TF32 = "tf32"
"""Key of `Accelerator.peak_flops_per_s` for fp32 operands in tensor cores."""

ADAMW = "adamw"
OPTIMIZERS = {
    ADAMW: Optimizer(),
    "adamw in bf16": Optimizer(states=StateFormat.BF16),
    **{name: Optimizer(name=name) for name in ("adamw8bit", "lion", "muon")},
}
"""Optimizers by their names in `wordings.toml`."""


@dataclass(frozen=True, kw_only=True)
class RunConditions:
    """Inputs of a prediction."""

    model: Model
    lora: Lora | None  # None: every weight is trained
    accelerator: Accelerator
    devices_per_node: int
    num_nodes: int
    fabric_hint: str  # text of the source about links and network
    power_w: float | None = None  # limit of a device, as a run file states it; None: the usual one
    network: str = ""  # of a node, as a run file states it; "": the fabric's
    seq_len: int
    global_batch: int  # sequences
    plan: Plan
    precision: str  # a key of specs.precision.PRECISIONS
    stack: Stack
    fused_norm: bool = False  # the run replaced its stack's norms by a fused kernel
    tf32: bool = False  # GEMMs of fp32 are multiplied in the tensor cores' 19 bits
    narrow_gemms: str = ""  # the only GEMMs in the precision's format: experts, dense; "": all of them
    loops_experts: bool = False  # experts are computed one after the other
    optimizer: str = ADAMW  # a name of `OPTIMIZERS`
    all_in_16_bits: bool = False  # weights, gradients and optimizer states; no fp32 master weights
    overlaps_data: bool | None = None  # gradients are reduced during the backward pass; None: as the stack does
    gemm_flops_per_s: float | None = None  # of large GEMMs by themselves, measured on this very system

    @property
    def num_devices(self) -> int:
        return self.devices_per_node * self.num_nodes

    @property
    def number_formats(self) -> Precision:
        """The recipe with what the optimizer keeps and moves."""
        optimizer = replace(OPTIMIZERS[self.optimizer], master_weights=not self.all_in_16_bits)
        return precision_with(PRECISIONS[self.precision], optimizer)

    @property
    def matmul_flops_per_s(self) -> float:
        """Dense peak of the units that multiply the run's format, in FLOP/s."""
        of = TF32 if self.tf32 else multiplied_on(self.accelerator, PRECISIONS[self.precision]).matmul
        return self.accelerator.peak_flops_per_s[of]

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq_len

    @property
    def software(self) -> dict[str, str | bool | float]:
        """Stack, date and every switch that the prediction uses, stated or the release's."""
        dated: dict[str, str | bool | float] = {"framework": self.stack.framework}
        if self.stack.vintage is not None:
            dated["vintage"] = self.stack.vintage
        return dated | features_of(self.stack, self.accelerator, precision=self.precision).stated()

    @property
    def stated(self) -> dict[str, str | bool | float]:
        """The software, and what the row states of network and GEMMs that is not the usual."""
        own = picked(self, "network", "power_w", "tf32", "narrow_gemms", "loops_experts", "optimizer", "all_in_16_bits")
        own["optimizer"] = "" if self.optimizer == ADAMW else self.optimizer
        overlap = {} if self.overlaps_data is None else {"overlaps_data": self.overlaps_data}
        return self.software | {key: value for key, value in own.items() if value} | overlap
