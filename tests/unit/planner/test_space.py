from dataclasses import fields, replace

import numpy as np
import pytest
from tests.plan_requests import plan_request

from meshwright.catalog.lookup import engine_names
from meshwright.cost.plan_rows import plan_from_row
from meshwright.cost.tables import PlanTable, plan_row
from meshwright.errors import InputError
from meshwright.planner.legality import legal_mask, legality_context
from meshwright.planner.request import PlanRequest
from meshwright.planner.space import (
    RecomputeChoice,
    Space,
    choices,
    default_space,
    divisors,
    enumerate_plans,
    num_rows,
    shapes,
)
from meshwright.specs.plan import Recompute, Schedule, Sharding


def request(model="qwen3-0.6b", cluster="h100-8x2", engine="native", **changes) -> PlanRequest:
    return plan_request(model, cluster, engine=engine, **{"seq_len": 4096} | changes)


def small_space() -> Space:
    return Space(
        num_devices=12,
        tensor=(1, 2, 4),
        context=(1, 2),
        pipeline=(1, 2, 3),
        virtual_pipeline=(1, 2, 3),
        schedule=(Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED),
        expert=(1, 2, 4),
        expert_tensor=(1, 2),
        sharding=(Sharding.NONE, Sharding.PARAMETERS),
        data_replicate=(1, 2, 3),
        micro_batch=(1, 2),
        recompute=(RecomputeChoice(), RecomputeChoice(kind=Recompute.FULL)),
    )


def by_hand(space: Space) -> set[tuple[int, ...]]:
    """The definition, one plan at a time."""
    found = set()
    for t in space.tensor:
        for c in space.context:
            for p in space.pipeline:
                if space.num_devices % (t * c * p):
                    continue
                data = space.num_devices // (t * c * p)
                stages = [(v, v > 1) for v in space.virtual_pipeline] if p > 1 else [(1, False)]
                for v, interleaved in stages:
                    for e in space.expert:
                        for z in space.expert_tensor:
                            for sharding in space.sharding:
                                for r in space.data_replicate:
                                    if data % r or (sharding is Sharding.NONE and r > 1):
                                        continue
                                    if (t * c * data // r) % (e * z):
                                        continue
                                    for b in space.micro_batch:
                                        for full in (0, 1):
                                            degrees = (t, c, p, v, int(interleaved), e, z)
                                            found.add((*degrees, data // r, r, int(sharding), b, full))
    return found


def test_every_combination_of_the_definition_is_there_exactly_once():
    plan = enumerate_plans(small_space())
    rows = list(
        zip(
            plan.tensor, plan.context, plan.pipeline, plan.virtual_pipeline, (plan.schedule == 2) * 1,
            plan.expert, plan.expert_tensor, plan.data_shard, plan.data_replicate, plan.sharding,
            plan.micro_batch, (plan.recompute > 0) * 1, strict=True,
        )
    )  # fmt: skip
    rows = [tuple(int(x) for x in row) for row in rows]
    assert len(rows) == len(set(rows))
    assert set(rows) == by_hand(small_space())


def test_degrees_multiply_to_the_devices_and_experts_fold():
    plan = enumerate_plans(default_space(request("gpt-oss-20b")))
    assert num_rows(plan) > 10_000
    assert np.all(plan.num_devices == 16)
    assert np.all((plan.tensor * plan.context * plan.data_shard) % (plan.expert * plan.expert_tensor) == 0)


def test_columns_are_wide_enough_for_products():
    plan = shapes(small_space())
    assert all(np.asarray(getattr(plan, f.name)).dtype == np.int64 for f in fields(PlanTable))


def test_fixed_fields_hold_even_where_the_space_would_not_go():
    space = default_space(request(fixed={"tensor": 16, "schedule": "gpipe", "data_shard": 1, "pipeline": 1}))
    plan = enumerate_plans(space)
    assert space.tensor == (16,)
    assert space.schedule == (Schedule.GPIPE,)
    assert set(plan.tensor.tolist()) == {16}
    assert set(plan.data_shard.tolist()) == {1}


@pytest.mark.parametrize(
    ("fixed", "expected"),
    [
        ({"recompute": Recompute.FULL, "recompute_layers": 3}, [(Recompute.FULL, (), 3)]),
        ({"recompute_modules": ("norm",)}, [(Recompute.SELECTIVE, ("norm",), None)]),
        ({"recompute": Recompute.NONE}, [(Recompute.NONE, (), None)]),
        ({"recompute": Recompute.FULL, "recompute_layers": None}, [(Recompute.FULL, (), None)]),
    ],
)
def test_fixed_recomputation(fixed, expected):
    space = small_space().restrict(fixed)
    assert [(c.kind, c.modules, c.layers) for c in space.recompute] == expected


def test_a_fixed_split_leaves_only_pipelines_of_its_stages():
    wanted = request("llama3.1-8b", "h100-8x2", "native", seq_len=4096, global_batch=64)
    table = shapes(default_space(wanted.fixing(layers_per_stage=(7, 9, 9, 7))))
    assert set(zip(table.pipeline.tolist(), table.virtual_pipeline.tolist(), strict=True)) == {(2, 2), (4, 1)}
    on_four = table.take(np.flatnonzero(table.pipeline == 4))
    assert {tuple(row) for row in np.stack([on_four.first_layers, on_four.middle_layers, on_four.last_layers], 1)} == {
        (7, 9, 7)
    }
    for fixed, message in (
        ({"layers_per_stage": (1, 2)}, "add up to the 32 layers"),
        ({"layers_per_stage": (16,)}, "16x2 are 2 stages of 16 layers"),
        ({"layers_per_stage": (16, 16), "pipeline": 4}, "a number for each stage"),
        ({"layers_per_stage": (8,) * 4, "pipeline": 2, "virtual_pipeline": 1}, "a number for each stage"),
        ({"layers_per_stage": (32,), "pipeline": 2}, "got '1 with pipeline=2'"),
        ({"layers_per_stage": (32,), "schedule": Schedule.ZBV}, "no pipeline schedule"),
    ):
        with pytest.raises(InputError, match=message):
            default_space(wanted.fixing(**fixed))


def test_one_stage_with_all_layers_is_no_pipeline():
    wanted = request("llama3.1-8b", "h100-8x2", "native", seq_len=4096, global_batch=64)
    table = shapes(default_space(wanted.fixing(layers_per_stage=(32,))))
    assert set(table.pipeline.tolist()) == {1}
    assert set(table.first_layers.tolist()) == {-1}


def test_an_even_split_can_be_asked_for():
    wanted = request("llama3.1-8b", "h100-8x2", "native", seq_len=4096, global_batch=64)
    assert default_space(wanted).splits
    assert not default_space(wanted.fixing(layers_per_stage=None)).splits


def test_lighter_ends_are_tried_where_they_help():
    """DeepSeek-V3 on 16 stages: its recipes lay four layers on each but the last, which holds the head."""
    wanted = request("deepseek-v3", "h100-8x16", "native", seq_len=4096, global_batch=64)
    splits = default_space(wanted).splits
    assert (4,) * 15 + (1,) in splits
    assert all(sum(split) == 61 and min(split) >= 1 for split in splits)
    assert default_space(replace(wanted, engine="maxtext")).splits == ()


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "gpt-oss-20b", "llama3.2-1b"])
def test_every_uneven_row_has_its_split(name):
    """Three columns stand for a split: the space names one for each row, over two ranks and virtual stages too."""
    space = default_space(request(name, "h100-8x2"))
    one = {axis: getattr(space, axis)[:1] for axis in ("tensor", "context", "expert", "expert_tensor")}
    one |= {axis: getattr(space, axis)[:1] for axis in ("sharding", "micro_batch", "recompute")}
    table = enumerate_plans(replace(space, **one))
    uneven = np.flatnonzero(table.first_layers >= 0)
    assert {2, 4} <= set(table.pipeline[uneven].tolist())
    assert table.virtual_pipeline[uneven].max() > 1
    for i in uneven:
        row = table.take(i)
        plan = plan_from_row(row, splits=space.splits)
        assert plan.layers_per_stage in space.splits
        assert vars(plan_row(plan)) == vars(row)


def test_126_layers_lie_on_16_ranks_with_8_virtual_stages():
    wanted = request("llama3.1-405b", "h100-8x1024", "megatron", seq_len=8192, global_batch=2048)
    table = shapes(default_space(wanted))
    table = table.take(np.flatnonzero(legal_mask(table, context=legality_context(wanted))))
    assert np.any((table.tensor == 8) & (table.pipeline == 16) & (table.virtual_pipeline == 8))


def test_engines_offer_only_what_they_accept():
    for engine in engine_names():
        space = default_space(request("gpt-oss-20b", engine=engine))
        plan = enumerate_plans(replace(space, micro_batch=(1,)))
        assert legal_mask(plan, context=legality_context(request("gpt-oss-20b", engine=engine))).any()
    titan = default_space(request(engine="torchtitan"))
    assert Sharding.OPTIMIZER not in titan.sharding
    assert Schedule.ZERO_BUBBLE not in titan.schedule


def test_one_device_has_plain_plans_only():
    plan = enumerate_plans(default_space(request(cluster="h100-1x1")))
    assert np.all(plan.num_devices == 1)
    assert len(np.unique(plan.pipeline)) == 1


@pytest.mark.parametrize("part", [choices, shapes])
@pytest.mark.parametrize("model", ["gpt-oss-20b", "llama3.2-1b"])
def test_neither_shapes_nor_choices_repeat(part, model):
    table = part(default_space(request(model, "h100-8x128")))
    rows = np.stack([getattr(table, f.name) for f in fields(table)], axis=1)
    assert len(np.unique(rows, axis=0)) == len(rows)


@pytest.mark.parametrize("engine", engine_names())
def test_orders_of_ranks_where_they_cost_something_else(engine):
    """A pod has 32 nodes, so on two nodes only stages that fit beside each other make a difference."""
    table = shapes(default_space(request(engine=engine)))
    other = table.take(np.flatnonzero(table.data_outermost))
    assert (num_rows(other) > 0) == (engine in ("any", "megatron"))
    assert np.all((other.pipeline > 1) & (other.data > 1) & (other.tensor * other.context < 8))


def test_a_fixed_order_of_ranks():
    fixed = default_space(request(engine="megatron", fixed={"axis_order": "tp-cp-pp-dp"}))
    assert np.all(shapes(fixed).data_outermost == 1)


def test_divisors_multiply_back():
    assert all(360 % d == 0 for d in divisors(360))
    assert len(divisors(360)) == 24


def test_who_fixes_an_unusual_schedule_asks_for_a_pipeline():
    assert 1 in default_space(request()).pipeline
    assert 1 not in default_space(request(fixed={"schedule": "zbv"})).pipeline
    assert default_space(request(fixed={"schedule": "zbv", "pipeline": 1})).pipeline == (1,)
    assert 1 in default_space(request(fixed={"schedule": "1f1b"})).pipeline  # a plan of one stage has it
