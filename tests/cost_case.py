"""One system, one model and one plan as the tables that the cost model takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.cost.compute import LayerCompute, layer_compute
from meshwright.cost.flops import count_parameters
from meshwright.cost.groups import groups_of
from meshwright.cost.layer_shapes import LayerShapes
from meshwright.cost.layers import StepContext
from meshwright.cost.rates import SystemRates
from meshwright.cost.step import StepTable, estimate_steps
from meshwright.cost.tables import BatchTable, ModelTable, PlanTable, PrecisionTable


@dataclass(frozen=True, kw_only=True)
class Case:
    """Everything `estimate_steps` asks for."""

    model: ModelTable
    batch: BatchTable
    plan: PlanTable
    precision: PrecisionTable
    rates: SystemRates

    def steps(self, **keywords: float) -> StepTable:
        return estimate_steps(**vars(self), **keywords)

    @property
    def step_s(self) -> float:
        return float(self.steps().step_s)

    def layer(self, *, load_factor: float = 1.0) -> LayerCompute:
        return layer_compute(
            LayerShapes(
                model=self.model, batch=self.batch, plan=self.plan, precision=self.precision,
                rates=self.rates.device, load_factor=load_factor,
            )
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
