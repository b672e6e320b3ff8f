"""One system, one model and one plan as the tables that the cost model takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.cost_case import Case

from meshwright.calibration.parameters import prior
from meshwright.catalog import lookup as catalog
from meshwright.cost.rates import system_rates
from meshwright.cost.tables import BatchTable, model_row, plan_row, precision_row
from meshwright.specs.hardware import Stack
from meshwright.specs.model import Lora, Model
from meshwright.specs.plan import Plan
from meshwright.specs.precision import PRECISIONS


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
