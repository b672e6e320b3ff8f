"""Laws that hold for models with layers of any kind: through the cost model, and through every planning verb."""

from __future__ import annotations

import math
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.layer_families import models, twice

import meshwright as mw
from meshwright.calibration.parameters import fitted
from meshwright.catalog import lookup as catalog
from meshwright.cost.flops import count_parameters, model_flops_per_token
from meshwright.cost.memory import estimate_memory, memory_parts
from meshwright.cost.rates import system_rates
from meshwright.cost.step import StepTable, estimate_steps
from meshwright.cost.tables import plan_row
from meshwright.errors import InfeasibleError, InputError
from meshwright.planner.legality import legality_context, violations
from meshwright.planner.request import PlanRequest, request_for
from meshwright.specs.plan import Plan, Sharding

LOADED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Examples take as long as the machine's other programs let them."""


def run_of(model: str | dict[str, Any], **changes: Any) -> mw.Run:
    """A run of `model` on 8 devices; refused models are no examples."""
    run = {
        "model": model, "cluster": "h100-8x1", "engine": "any", "data": {"sequence_length": 2048},
        "batch": {"global_sequences": 16},
    }  # fmt: skip
    try:
        return mw.load_run(run | changes)
    except InputError:
        assume(False)
        raise


@st.composite
def plans(draw) -> Plan:
    tensor, context = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 1, 2]))
    return Plan(
        tensor=tensor, context=context, data_shard=8 // (tensor * context), expert=draw(st.sampled_from([1, 1, 2])),
        sharding=draw(st.sampled_from(list(Sharding))),
        micro_batch=draw(st.sampled_from([1, 2])),
    )  # fmt: skip


def steps_of(request: PlanRequest, plan: Plan) -> StepTable:
    calibration = fitted()
    rates = system_rates(request.cluster, request.precision, request.stack, calibration=calibration)
    return estimate_steps(
        model=request.model_table, batch=request.batch_table, plan=plan_row(plan),
        precision=request.precision_table, rates=rates,
    )  # fmt: skip


def memory_of(request: PlanRequest, plan: Plan):
    return estimate_memory(
        model=request.model_table, batch=request.batch_table, plan=plan_row(plan),
        precision=request.precision_table, constants=request.memory_constants,
    )  # fmt: skip


@given(model=models(), plan=plans())
@settings(LOADED, max_examples=50)
def test_every_part_is_finite_and_not_negative(model, plan):
    request = request_for(run_of(model))
    assume(not violations(plan, context=legality_context(request)))
    steps, memory = steps_of(request, plan), memory_of(request, plan)
    parts = [float(np.ravel(value)[0]) for value in steps.components_s.values()]
    assert all(0 <= part < math.inf for part in parts)
    assert sum(parts) == pytest.approx(float(np.ravel(steps.step_s)[0]), rel=1e-6)
    assert all(np.all(np.asarray(v) >= 0) for v in memory_parts(memory).values())
    parameters = count_parameters(request.model_table)
    assert parameters.active > 0
    assert 0 < parameters.total < math.inf
    assert model_flops_per_token(request.model_table, seq_len=2048) > 0


@pytest.mark.when_touched  # test_every_part_is_finite_and_not_negative costs the same models
@given(model=models(), plan=plans())
@settings(LOADED, max_examples=25)
def test_twice_the_layers_are_more_of_everything(model, plan):
    few, many = (request_for(run_of(m)) for m in (model, twice(model)))
    assume(not violations(plan, context=legality_context(few)))
    assert not violations(plan, context=legality_context(many))
    seconds = [float(np.ravel(steps_of(r, plan).step_s)[0]) for r in (few, many)]
    reserved = [float(np.ravel(memory_of(r, plan).reserved_bytes)[0]) for r in (few, many)]
    sizes = [count_parameters(r.model_table) for r in (few, many)]
    flops = [float(model_flops_per_token(r.model_table, seq_len=2048)) for r in (few, many)]
    assert seconds[0] < seconds[1] <= 2 * seconds[0] * (1 + 1e-9)
    assert reserved[0] < reserved[1]
    assert sizes[0].total < sizes[1].total < 2 * sizes[0].total
    assert flops[0] < flops[1] < 2 * flops[0]


SIZES = {
    "nemotron3-super": (
        "state_space.state_size", "state_space.num_heads", "state_space.num_groups", "experts.latent",
        "experts.shared_ffn_hidden", "experts.top_k", "attention.num_heads", "num_mtp_layers",
    ),
    "qwen3-next-80b-a3b": (
        "linear_attention.num_value_heads", "linear_attention.key_head_dim", "linear_attention.value_head_dim",
        "experts.num_experts", "attention.head_dim", "num_mtp_layers",
    ),
    "kimi-linear-48b-a3b": ("linear_attention.value_head_dim", "attention.kv_lora_rank"),
    "deepseek-v3.2": (
        "attention.indexer.num_heads", "attention.indexer.head_dim", "attention.indexer.top_k",
        "attention.query_lora_rank",
    ),
    "deepseek-v4-flash": (
        "attention.indexer.num_heads", "attention.indexer.top_k", "attention.output_lora_rank", "residual_streams",
        "attention.window", "experts.ffn_hidden",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "size"), [(name, size) for name, sizes in SIZES.items() for size in sizes])
def test_no_size_is_without_cost(name, size):
    """A size that is doubled makes a step longer."""
    *below, last = size.split(".")
    value = attrgetter(size)(catalog.model(name))
    changes: dict[str, Any] = {last: 2 * value}
    for key in reversed(below):
        changes = {key: changes}
    plan, run = Plan(data_shard=8, sharding=Sharding.PARAMETERS), {"base": name}
    once, doubled = (request_for(run_of(model, data={"sequence_length": 8192})) for model in (name, run | changes))
    seconds = [float(np.ravel(steps_of(r, plan).step_s)[0]) for r in (once, doubled)]
    assert seconds[0] < seconds[1]


def numbers(document: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a JSON document with where it stands."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield from numbers(value, f"{path}.{key}")
    elif isinstance(document, list | tuple):
        for value in document:
            yield from numbers(value, path)
    elif isinstance(document, float):
        yield path, document


def check(document: dict[str, Any]) -> None:
    assert [path for path, value in numbers(document) if not math.isfinite(value)] == []


def through_every_verb(model: dict[str, Any], **changes: Any) -> None:
    """Plan, pin, estimate, explain and scale: each gives numbers, or refuses by an error of its own."""
    run = run_of(model, **changes)
    try:
        plans = mw.plan(run, top=2, scored=5, front=True, why_not=[{"tensor": 2}, {"context": 2}])
    except (InfeasibleError, InputError):
        return
    pinned = plans.pinned()
    check(plans.to_dict())
    check(mw.estimate(pinned).to_dict())
    check(mw.explain(pinned).to_dict())
    check(mw.scale(pinned, devices=[8, 16]).to_dict())


@pytest.mark.when_touched  # test_every_part_is_finite_and_not_negative costs the same models
@given(model=models())
@settings(LOADED, max_examples=2)
def test_every_planning_verb_answers(model):
    through_every_verb(model, cluster="h100-2x1")


@pytest.mark.slow
@given(
    model=models(),
    precision=st.sampled_from(["bf16", "fp8"]),
    cluster=st.sampled_from(["h100-8x2", "mi300x-8x1", "b200-8x2"]),
    engine=st.sampled_from(["any", "megatron", "native", "torchtitan", "maxtext"]),
    optimizer=st.sampled_from(["adamw", "muon", "lion"]),
    targets=st.lists(st.sampled_from(["query", "value", "output", "up", "down"]), unique=True),
)
@settings(LOADED, max_examples=60)
def test_every_planning_verb_answers_with_every_choice(model, precision, cluster, engine, optimizer, targets):
    changes: dict[str, Any] = {"precision": precision, "cluster": cluster, "engine": engine}
    if targets:
        changes |= {"task": "lora", "lora": {"rank": 8, "targets": targets}}
    through_every_verb(model, optimizer={"name": optimizer}, **changes)
