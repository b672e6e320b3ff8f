"""Laws of the memory of every plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshwright.catalog import lookup as catalog
from meshwright.cost.flops import count_parameters
from meshwright.cost.memory import MemoryTable, estimate_memory, memory_constants
from meshwright.cost.memory.states import RankLayers, rank_parameters
from meshwright.cost.stages import split_layers
from meshwright.cost.tables import BatchTable, PlanTable, model_row, plan_row, precision_row
from meshwright.specs.features import RELEASE_DEFAULTS, Features
from meshwright.specs.hardware import Stack
from meshwright.specs.plan import RECOMPUTE_MODULES, Offload, Plan, Recompute, Schedule, Sharding
from meshwright.specs.precision import PRECISIONS

MODELS = {name: model_row(catalog.model(name)) for name in ("llama3-8b", "llama3.1-405b", "deepseek-v3", "qwen3-0.6b")}
STACKS = ("megatron-lm", "torchtitan", "nanotron", "aa-scaling", "megatron-deepspeed", "torchtune", "maxtext")

models = st.sampled_from(sorted(MODELS))
stacks = st.sampled_from(STACKS)
widths = st.sampled_from([1, 2, 4, 8])


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    schedule = draw(st.sampled_from([Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED, Schedule.ZBV]))
    chunks = {Schedule.INTERLEAVED: draw(st.sampled_from([2, 4])), Schedule.ZBV: 2}.get(schedule, 1)
    pipeline = draw(st.sampled_from([2, 4])) if chunks > 1 else draw(st.sampled_from([1, 2, 4]))
    kind = draw(st.sampled_from(Recompute))
    modules = draw(st.lists(st.sampled_from(RECOMPUTE_MODULES), min_size=1, unique=True))
    return Plan(
        tensor=draw(widths),
        sequence_parallel=draw(st.booleans()),
        context=draw(st.sampled_from([1, 2])),
        pipeline=pipeline,
        virtual_pipeline=chunks,
        data_shard=draw(widths),
        data_replicate=draw(st.sampled_from([1, 2])),
        sharding=draw(st.sampled_from(Sharding)),
        micro_batch=draw(st.sampled_from([1, 2, 4])),
        schedule=schedule,
        recompute=kind,
        recompute_modules=tuple(modules) if kind is Recompute.SELECTIVE else (),
        recompute_layers=draw(st.sampled_from([None, 1, 2])) if kind is Recompute.FULL else None,
        offload=draw(st.sampled_from(Offload)),
    )


def memory(
    plan: Plan, model: str, *, num_micro: int = 16, stack: str = "megatron-lm", features: Features = RELEASE_DEFAULTS
) -> MemoryTable:
    return estimate_memory(
        model=MODELS[model],
        batch=BatchTable(seq_len=4096, global_batch=plan.micro_batch * plan.data * num_micro),
        plan=plan_row(plan),
        precision=precision_row(PRECISIONS["bf16"]),
        constants=memory_constants(Stack(framework=stack, features=features)),
    )


def allocated(plan: Plan, model: str, **options: int) -> float:
    return float(memory(plan, model, **options).allocated_bytes)  # pyright: ignore[reportArgumentType]


def at_most(small: float, large: float) -> bool:
    return small <= large * (1 + 1e-9)


@given(plans(), models, st.sampled_from([Sharding.NONE, Sharding.OPTIMIZER]))
def test_more_sharding_needs_less(plan: Plan, model: str, sharding: Sharding) -> None:
    less, more = (replace(plan, sharding=s) for s in (sharding, Sharding(sharding + 1)))
    assert at_most(allocated(more, model), allocated(less, model))


@pytest.mark.when_touched  # test_more_sharding_needs_less estimates the same memory
@given(plans(), models)
def test_wider_sharding_needs_less(plan: Plan, model: str) -> None:
    assume(plan.sharding is not Sharding.PARAMETERS or plan.data_shard > 1)  # FSDP on one rank gathers nothing
    wider = replace(plan, data_shard=2 * plan.data_shard)
    assert at_most(allocated(wider, model), allocated(plan, model))


@pytest.mark.when_touched  # test_more_sharding_needs_less estimates the same memory
@given(plans(), models)
def test_more_tensor_ranks_need_less(plan: Plan, model: str) -> None:
    assert at_most(allocated(replace(plan, tensor=2 * plan.tensor), model), allocated(plan, model))


@pytest.mark.when_touched  # test_every_part_is_there_and_positive has every micro-batch
@given(plans(), models, stacks)
def test_a_larger_micro_batch_needs_more(plan: Plan, model: str, stack: str) -> None:
    small, large = (memory(replace(plan, micro_batch=b), model, stack=stack) for b in (1, 2))
    assert at_most(float(small.reserved_bytes), float(large.reserved_bytes))


@given(plans(), models, stacks)
def test_recomputation_saves(plan: Plan, model: str, stack: str) -> None:
    none = replace(plan, recompute=Recompute.NONE, recompute_modules=(), recompute_layers=None)
    full = replace(none, recompute=Recompute.FULL)
    modules = plan.recompute_modules or ("norm", "core_attention")
    some = replace(none, recompute=Recompute.SELECTIVE, recompute_modules=modules)
    kept = [float(memory(p, model, stack=stack).activations_bytes) for p in (full, some, none)]
    assert at_most(kept[0], kept[1])
    assert at_most(kept[1], kept[2])


@given(plans(), models, stacks)
def test_every_part_is_there_and_positive(plan: Plan, model: str, stack: str) -> None:
    table = memory(plan, model, stack=stack)
    parts = [getattr(table, f"{name}_bytes") for name in ("weights", "gradients", "optimizer", "workspace")]
    assert min(parts) >= 0
    assert float(table.activations_bytes) > 0
    assert float(table.reserved_bytes) >= float(table.allocated_bytes)


@given(st.lists(plans(), min_size=1, max_size=5), models, stacks)
def test_many_plans_at_once_are_as_one_by_one(many: list[Plan], model: str, stack: str) -> None:
    batch = BatchTable(seq_len=4096, global_batch=4096)
    arguments = {
        "model": MODELS[model],
        "batch": batch,
        "precision": precision_row(PRECISIONS["fp8"]),
        "constants": memory_constants(Stack(framework=stack)),
    }
    together = estimate_memory(plan=PlanTable.stack([plan_row(p) for p in many]), **arguments)
    alone = [estimate_memory(plan=plan_row(p), **arguments).reserved_bytes for p in many]
    np.testing.assert_allclose(np.broadcast_to(together.reserved_bytes, len(many)), alone)


@given(models, st.sampled_from([1, 2]), widths, widths)
def test_ranks_hold_every_parameter_once(model: str, pipeline: int, tensor: int, expert: int) -> None:
    """Split parameters times tensor ranks, experts times expert ranks, the rest once: a whole number, the total."""
    table = MODELS[model]
    plan = plan_row(Plan(pipeline=pipeline, tensor=tensor, expert=expert if table.num_experts else 1))
    parameters, layers = count_parameters(table), split_layers(table, plan)
    first = RankLayers(dense=layers.first_dense, moe=layers.first_moe, embedding=1, head=int(pipeline == 1))
    last = RankLayers(dense=layers.last_dense, moe=layers.last_moe, embedding=0, head=1)
    held = [rank_parameters(table, parameters, plan, rank) for rank in ([first, last] if pipeline > 1 else [first])]
    total = sum(h.split * tensor + h.repeated + h.expert * plan.expert for h in held)
    copy = table.vocab * table.hidden if table.tied and pipeline > 1 else 0
    assert float(total).is_integer()
    assert total == parameters.total + copy


@pytest.mark.when_touched  # test_ranks_hold_every_parameter_once divides experts
@given(plans(), st.sampled_from([1, 2, 4]), st.floats(1, 64))
def test_no_expert_rank_keeps_more_than_all_tokens(plan: Plan, expert: int, imbalance: float) -> None:
    def size(ratio: float) -> float:
        uneven = Features(expert_imbalance=ratio)
        return float(memory(replace(plan, expert=expert), "deepseek-v3", features=uneven).activations_bytes)

    assert size(imbalance) == size(min(imbalance, expert))
    assert size(expert) >= size(1.0)
