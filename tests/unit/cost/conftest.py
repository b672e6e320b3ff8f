"""One system, one model and one plan as the tables that the cost model takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from meshwright import catalog
from meshwright.calibration.parameters import prior
from meshwright.cost.compute import LayerCompute, layer_compute
from meshwright.cost.flops import count_parameters
from meshwright.cost.groups import groups_of
from meshwright.cost.layers import StepContext
from meshwright.cost.rates import SystemRates, system_rates
from meshwright.cost.step import StepTable, estimate_steps
from meshwright.cost.tables import (
    BatchTable,
    ModelTable,
    PlanTable,
    PrecisionTable,
    model_row,
    plan_row,
    precision_row,
)
from meshwright.specs.hardware import Stack
from meshwright.specs.model import Lora, Model
from meshwright.specs.plan import Plan
from meshwright.specs.precision import PRECISIONS


@dataclass(frozen=True, kw_only=True)
class Case:
    """Everything `estimate_steps` asks for."""

    model: ModelTable
    batch: BatchTable
    plan: PlanTable
    precision: PrecisionTable
    rates: SystemRates

    def steps(self, *, load_factor: float = 1.0) -> StepTable:
        return estimate_steps(
            model=self.model, batch=self.batch, plan=self.plan, precision=self.precision, rates=self.rates,
            load_factor=load_factor,
        )  # fmt: skip

    def layer(self, *, load_factor: float = 1.0) -> LayerCompute:
        return layer_compute(
            model=self.model, batch=self.batch, plan=self.plan, precision=self.precision,
            rates=self.rates.device, load_factor=load_factor,
        )  # fmt: skip

    @property
    def context(self) -> StepContext:
        return StepContext(
            model=self.model, batch=self.batch, plan=self.plan, precision=self.precision, rates=self.rates,
            groups=groups_of(self.plan, self.rates.network), parameters=count_parameters(self.model),
        )  # fmt: skip

    def with_rates(self, **changes: float) -> Case:
        """The same with other rates; names of the device's rates work too."""
        own = {k: v for k, v in changes.items() if hasattr(self.rates, k)}
        device = {k: v for k, v in changes.items() if k not in own}
        return replace(self, rates=replace(self.rates, **own, device=replace(self.rates.device, **device)))

    def planned(self, **changes: int) -> Case:
        """The same with other columns of the plan."""
        return replace(self, plan=replace(self.plan, **changes))


@pytest.fixture
def case() -> Callable[..., Case]:
    """Builds a `Case`. Rates are those of the prior: what is tested must not move with a new fit."""

    def build(
        *,
        model: str | Model = "llama3-8b",
        cluster: str = "h100-8x4",
        plan: Plan | None = None,
        seq_len: int = 8192,
        global_batch: int = 128,
        precision: str = "bf16",
        framework: str = "megatron-bridge",
        lora: Lora | None = None,
    ) -> Case:
        system = catalog.cluster(cluster)
        recipe = PRECISIONS[precision]
        return Case(
            model=model_row(catalog.model(model) if isinstance(model, str) else model, lora=lora),
            batch=BatchTable(seq_len=seq_len, global_batch=global_batch),
            plan=plan_row(plan or Plan(data_shard=system.num_devices)),
            precision=precision_row(recipe),
            rates=system_rates(system, recipe, Stack(framework=framework), calibration=prior()),
        )

    return build
