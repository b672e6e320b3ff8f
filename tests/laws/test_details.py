"""The named parts of a step and of its memory add up: names to their part, parts to the total."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plan_requests import plan_request

from meshwright.cost.memory import memory_parts
from meshwright.planner.estimate import PlanEstimate, estimate_plan
from meshwright.planner.request import PlanRequest
from meshwright.specs.model import Lora
from meshwright.specs.plan import Plan, Recompute, Schedule, Sharding
from meshwright.specs.run import KernelChoices

MODELS = ("llama3.1-8b", "qwen2.5-0.5b", "mixtral-8x7b", "deepseek-v3", "gpt-oss-20b")
ENGINES = ("native", "megatron", "torchtitan", "maxtext")


@cache
def request_of(model: str, engine: str, precision: str, kernels: int, lora: bool) -> PlanRequest:
    stored = {"feed_forward": "e4m3", "norm": "e4m3"} if kernels & 1 else {}
    return plan_request(
        model,
        "h200-8x4",
        engine=engine,
        precision=precision,
        lora=Lora(rank=16, alpha=32.0, targets=("query", "value")) if lora else None,
        kernels=KernelChoices(stored_activations=stored, weight_cache="on" if kernels & 2 else "auto"),
    )


def check(found: PlanEstimate) -> None:
    step = found.step
    for component, names in step.details_s.items():
        assert min(names.values(), default=0.0) >= 0, component
        assert sum(names.values()) == pytest.approx(step.components_s[component], rel=1e-9, abs=1e-12)
    assert sum(step.components_s.values()) == pytest.approx(step.step.value)
    parts = memory_parts(step.memory)
    for part, names in step.memory.details_bytes.items():
        assert min(names.values(), default=0.0) >= -1e-6 * step.memory.reserved_bytes, (part, names)
        assert sum(names.values()) == pytest.approx(parts[part], rel=1e-9, abs=1.0), part
    assert sum(parts.values()) == pytest.approx(step.memory.reserved_bytes)


@settings(deadline=None, max_examples=25)
@given(
    model=st.sampled_from(MODELS),
    engine=st.sampled_from(ENGINES),
    precision=st.sampled_from(["bf16", "fp8"]),
    kernels=st.integers(0, 3),
    lora=st.booleans(),
    tensor=st.sampled_from([1, 2]),
    context=st.sampled_from([1, 2]),
    pipeline=st.sampled_from([1, 2, 4]),
    sharding=st.sampled_from(Sharding),
    recompute=st.sampled_from([Recompute.NONE, Recompute.FULL]),
    micro=st.sampled_from([1, 2]),
    chunk=st.sampled_from([None, "all", 512]),
)
def test_names_add_up(
    model, engine, precision, kernels, lora, tensor, context, pipeline, sharding, recompute, micro, chunk
):
    request = request_of(model, engine, precision, kernels, lora and model == "llama3.1-8b")
    plan = Plan(
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        data_shard=32 // (tensor * context * pipeline),
        sharding=sharding,
        recompute=recompute,
        micro_batch=micro,
        schedule=Schedule.ONE_F_ONE_B,
        loss_chunk=chunk if engine == "native" else None,
    )
    check(estimate_plan(request, plan))


def test_what_is_named():
    """Of one plan with all of them: the loss, its chunks, 8-bit activations, the cache and the kernels' traffic."""
    request = request_of("llama3.1-8b", "native", "fp8", 3, lora=False)
    plan = Plan(data_shard=32, sharding=Sharding.OPTIMIZER, loss_chunk=512)
    step = estimate_plan(request, plan).step
    sizes = {name: size for names in step.memory.details_bytes.values() for name, size in names.items()}
    assert sizes["loss: logits of a chunk"] == 512 * 128256 * 2
    assert sizes["loss: sum of that over chunks"] == 4 * 128256 * 4096
    assert sizes["cache of 8-bit weights"] > 2 * 6.9e9
    assert sizes["in 8 bits"] > 32 * 8192 * (4096 * 2 + 3 * 14336)
    times = {name: s for names in step.details_s.values() for name, s in names.items()}
    for name in ("loss: sum of the head's gradient over chunks", "stored activations", "weights", "activations"):
        assert times[name] > 0
    one = estimate_plan(request, Plan(data_shard=32, sharding=Sharding.OPTIMIZER, loss_chunk="all")).step
    assert "loss: sum of that over chunks" not in one.memory.details_bytes["workspace"]
    assert one.memory.details_bytes["workspace"]["loss: logits of a chunk"] == 8192 * 128256 * 2
    assert one.step.value < step.step.value
