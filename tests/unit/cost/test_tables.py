"""Structs of arrays and back."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from tests.every_member import check_every

from meshwright.catalog import lookup as catalog
from meshwright.cost.plan_rows import plan_from_row
from meshwright.cost.rates import system_rates
from meshwright.cost.tables import RECOMPUTES, SCHEDULES, ModelTable, PlanTable, model_row, plan_row, precision_row
from meshwright.specs.hardware import Stack
from meshwright.specs.model import Lora
from meshwright.specs.plan import RECOMPUTE_MODULES, Offload, Plan, Recompute, Schedule, Sharding
from meshwright.specs.precision import PRECISIONS

PLANS = [
    Plan(),
    Plan(tensor=8, sequence_parallel=False, data_shard=4, sharding=Sharding.NONE),
    Plan(pipeline=4, virtual_pipeline=2, schedule=Schedule.INTERLEAVED, micro_batch=2),
    Plan(expert=8, expert_tensor=2, tensor=2, context=2, data_shard=8, data_replicate=2),
    Plan(recompute=Recompute.SELECTIVE, recompute_modules=("core_attention", "alternate_matmuls")),
    Plan(recompute=Recompute.FULL, recompute_layers=0),
    Plan(recompute=Recompute.FULL, recompute_layers=7, offload=Offload.OPTIMIZER),
    Plan(sharding=Sharding.PARAMETERS, schedule=Schedule.ZBV),
]


@pytest.mark.parametrize("plan", PLANS, ids=Plan.describe)
def test_a_plan_survives_the_table(plan):
    assert plan_from_row(plan_row(plan)) == plan


@pytest.mark.parametrize(
    ("layers", "virtual", "schedule", "columns"),
    [
        ((3, 1), 1, Schedule.ONE_F_ONE_B, (3, 3, 1)),  # two ranks have none between: the fuller of the two
        ((1, 3), 1, Schedule.ONE_F_ONE_B, (1, 3, 3)),
        ((3, 3, 1), 1, Schedule.ONE_F_ONE_B, (3, 3, 1)),
        ((2, 2, 2, 1), 2, Schedule.INTERLEAVED, (4, 4, 3)),  # ranks hold stages 0 and 2, 1 and 3
        ((3, 2, 2, 1), 2, Schedule.ZBV, (4, 4, 4)),  # and here 0 and 3, 1 and 2
    ],
)
def test_an_uneven_plan_survives_the_table_with_its_split(layers, virtual, schedule, columns):
    pipeline = len(layers) // virtual
    plan = Plan(pipeline=pipeline, virtual_pipeline=virtual, schedule=schedule, layers_per_stage=layers)
    row = plan_row(plan)
    assert (row.first_layers, row.middle_layers, row.last_layers) == columns
    others = ((2, 2), (2, 2, 3), (1, 1, 1, 1))
    assert plan_from_row(row, splits=(*others, layers)) == plan
    with pytest.raises(ValueError, match="no split has"):
        plan_from_row(row, splits=others)


def test_stacked_plans_come_out_again():
    table = PlanTable.stack([plan_row(p) for p in PLANS])
    assert [plan_from_row(table.take(i)) for i in range(len(PLANS))] == PLANS


def test_derived_columns_are_those_of_the_plan():
    table = PlanTable.stack([plan_row(p) for p in PLANS])
    assert table.num_devices.tolist() == [p.num_devices for p in PLANS]
    assert table.data.tolist() == [p.data for p in PLANS]
    assert table.expert_data.tolist() == [p.expert_data for p in PLANS]


@pytest.mark.parametrize("module", RECOMPUTE_MODULES)
def test_recomputed_modules_are_bits(module):
    one = plan_row(Plan(recompute=Recompute.SELECTIVE, recompute_modules=(module,)))
    assert [bool(one.recomputes(m)) for m in RECOMPUTE_MODULES] == [m == module for m in RECOMPUTE_MODULES]


def test_take_keeps_order_and_leaves_numbers_alone():
    table = replace(PlanTable.stack([plan_row(p) for p in PLANS]), micro_batch=3)
    taken = table.take(np.array([3, 1, 3]))
    assert taken.tensor.tolist() == [2, 8, 2]
    assert taken.micro_batch == 3


def test_tables_inside_tables_are_stacked_and_taken_too():
    rows = [
        system_rates(catalog.cluster(name), PRECISIONS["bf16"], Stack(framework="nemo"))
        for name in ("h100-8x2", "gb200-4x18")
    ]
    table = type(rows[0]).stack(rows)
    assert table.network.domain.tolist() == [8, 72]
    assert table.take(1).device.num_units == rows[1].device.num_units
    assert table.take(np.array([1, 0])).network.domain.tolist() == [72, 8]


def test_every_model_of_the_catalogue_is_a_row_of_numbers():
    check_every(catalog.model_names(), is_a_row_of_numbers)


def is_a_row_of_numbers(name):
    row = model_row(catalog.model(name))
    assert all(np.isscalar(getattr(row, f.name)) for f in fields(ModelTable))
    assert row.num_dense_layers + row.num_moe_layers == row.num_layers


def test_adapter_widths_are_inputs_and_outputs_of_the_matrices():
    model = catalog.model("llama3-8b")

    def width(*targets: str) -> int:
        return model_row(model, lora=Lora(targets=targets)).lora_width

    assert width("query") == 4096 + 4096
    assert width("key") == width("value") == 4096 + 1024
    assert width("gate", "up", "down") == 3 * (4096 + 14_336)


def test_enumerations_are_whole():
    assert set(SCHEDULES) == set(Schedule)
    assert set(RECOMPUTES) == set(Recompute)


def test_a_recipe_gives_its_byte_counts():
    row = precision_row(PRECISIONS["mxfp4"])
    recipe = vars(PRECISIONS["mxfp4"])
    assert {name: value for name, value in vars(row).items() if name in recipe}.items() <= recipe.items()
    assert set(vars(row)) - set(recipe) == {
        "stored_ffn_bytes",
        "stored_norm_bytes",
        "weight_cache",
        "frozen_in_16_bits",
        "loss_chunk",
        "dequantises_in_parts",
    }


def test_stored_activations_have_a_byte_and_their_scales():
    row = precision_row(PRECISIONS["bf16"], stored_activations={"feed_forward": "int8"})
    assert row.stored_ffn_bytes == 1 + 4 / 128
    assert row.stored_norm_bytes == 0


def test_a_model_has_nothing_of_parts_that_it_lacks():
    row = model_row(catalog.model("llama3.1-8b"))
    parts = ("num_experts", "top_k", "expert", "latent", "shared", "groups", "state_", "index_", "lora_", "adapts")
    steps = {"expert_hidden": 4096, "state_chunk": 1, "index_stride": 1}  # divisors and widths of none
    found = {f.name: float(getattr(row, f.name)) for f in fields(row) if f.name.startswith(parts)}
    assert {name: value for name, value in found.items() if value} == steps
    adapted = model_row(catalog.model("llama3.1-8b"), lora=Lora(rank=8, dropout=0.0))
    assert (adapted.lora_rank, adapted.lora_dropout) == (8, 0)
