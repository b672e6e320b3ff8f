"""Other software for the best plan of a request."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plan_requests import plan_request

from meshwright.cost.tables import plan_row
from meshwright.planner.engines import engine_facts
from meshwright.planner.explain import explain_infeasible
from meshwright.planner.objective import Goal, goal_for
from meshwright.planner.screen import cost_model
from meshwright.planner.search import search
from meshwright.planner.switches import (
    HELD,
    LEAST_GAIN,
    gradient_gain,
    notes_on_idle_switches,
    open_values,
    switch_gains,
)
from meshwright.specs.features import AttentionKernel, CudaGraphs, Dispatcher, Features, Preset, WireFormat
from meshwright.specs.hardware import Stack
from meshwright.specs.plan import Plan
from meshwright.specs.run import Objective
from meshwright.units import gib

MIXTURE = {"model": "qwen3-30b-a3b", "cluster": "h100-8x4", "seq_len": 4096, "global_batch": 512}
PLAIN = Features(
    cuda_graphs=CudaGraphs.NONE, dispatcher=Dispatcher.ALL_TO_ALL, overlaps_experts=False, overlaps_tensor=False
)


def gains_of(request):
    best = search(request, top=1).best
    assert best is not None
    return best, switch_gains(request, best)


def keys(gain):
    return {key for key, _ in gain.changes}


@pytest.mark.when_touched  # test_the_best_values_together_are_last has the gains of one request
@settings(max_examples=8, deadline=None)
@given(
    engine=st.sampled_from(["megatron", "torchtitan", "any"]),
    cluster=st.sampled_from(["h100-8x4", "mi300x-8x4", "gb200-4x8"]),
    model=st.sampled_from(["qwen3-30b-a3b", "llama3.1-8b"]),
)
def test_what_is_named_is_faster_in_the_same_degrees_and_what_the_run_file_asks_for(engine, cluster, model):
    request = plan_request(model=model, cluster=cluster, engine=engine, seq_len=4096, global_batch=512)
    best, gains = gains_of(request)
    for gain in gains:
        assert gain.gain >= LEAST_GAIN
        assert gain.plan.num_devices == best.plan.num_devices
        assert (gain.plan.tensor, gain.plan.expert) == (best.plan.tensor, best.plan.expert)
        stack = replace(request.stack, features=replace(request.stack.features, **dict(gain.changes)))
        again = search(replace(request, stack=stack).fixing(tensor=best.plan.tensor), top=1).best
        assert again is not None
        assert again.step_s <= gain.step_s * (1 + 1e-9), "a search with fewer fields held finds it or a faster one"


@pytest.mark.when_touched  # test_an_engine_is_not_offered_what_it_cannot_set walks the switches
def test_the_best_values_together_are_last():
    request = replace(plan_request(**MIXTURE, engine="any"), stack=Stack(framework="megatron-lm", features=PLAIN))
    _, (*alone, together) = gains_of(request)
    assert len(alone) > 1
    assert keys(together) == set().union(*map(keys, alone))
    assert [g.gain for g in alone] == sorted((g.gain for g in alone), reverse=True)
    assert together.gain > alone[0].gain


def test_gains_follow_the_objective():
    request = plan_request(**MIXTURE, engine="megatron")
    goal = goal_for(Objective.ENERGY, cluster=request.cluster)
    best = search(request, top=1, goal=goal).best
    assert best is not None
    gains = switch_gains(request, best, goal=goal)
    assert gains
    held = request.fixing(**{name: getattr(best.plan, name) for name in HELD})
    for gain in gains:
        features = replace(request.stack.features, **dict(gain.changes))
        found = search(replace(held, stack=replace(request.stack, features=features)), top=1, goal=goal).best
        assert found is not None
        assert gain.gain == best.value / found.value >= LEAST_GAIN
        assert f"{gain.gain - 1:+.0%} tokens/J" in str(gain)


def engine_request(engine, features=PLAIN, **asked):
    """A request with the switches that `engine` sets by itself, for a run that states `features`."""
    request = plan_request(**asked, engine=engine)
    own = engine_facts(engine).preset(request.model, Preset.ENGINE, request.cluster.accelerator)
    return replace(request, stack=replace(request.stack, preset=own, features=features))


def rounded(request):
    stack = request.stack
    return replace(request, stack=replace(stack, features=replace(stack.features, gradient_format=WireFormat.BF16)))


def line_of(request, best=None):
    best = best or search(request, top=1).best
    assert best is not None
    return gradient_gain(request, best, goal=Goal(num_devices=request.num_devices))


def test_what_rounded_gradients_would_gain_is_said():
    request = engine_request("megatron", **MIXTURE)
    best = search(request, top=1).best
    assert best is not None
    other = search(rounded(request).fixing(**{name: getattr(best.plan, name) for name in HELD}), top=1).best
    assert other is not None
    sizes = [cost_model(r).memory(plan_row(best.plan)).reserved_bytes for r in (request, rounded(request))]
    line = str(line_of(request, best))
    assert line.startswith("--set stack.gradient_format=bf16 rounds gradients: ")
    assert line.endswith(f"{gib(float(sizes[0] - sizes[1])):.1f} GiB less for the same plan")
    gain = best.value / other.value
    assert (f"{gain - 1:+.0%} tokens/s ({other.plan.describe()})" in line) == (gain >= LEAST_GAIN)
    other_device = replace(request.cluster, accelerator=replace(request.cluster.accelerator, name="another"))
    parts = replace(request, cluster=replace(request.cluster, parts=(request.cluster, other_device)))
    assert line_of(parts, best) is None  # software would change on each apart
    assert "gradient_format" not in open_values(replace(request, stack=replace(request.stack, is_open=True)))


def test_rounded_gradients_are_named_where_a_plan_fits_with_them_alone():
    asked = {"model": "llama3.1-70b", "cluster": "h100-8x2", "seq_len": 4096, "global_batch": 16}
    request = engine_request("megatron", **asked)
    hints = explain_infeasible(search(request, top=1)).suggestions
    plan = search(rounded(request), top=1).best.plan.describe()
    assert f"fits with --set stack.gradient_format=bf16, which rounds gradients: {plan}" in hints
    stated = explain_infeasible(search(engine_request("megatron", **asked, features=FP32_GRADIENTS), top=1)).suggestions
    assert not any("rounds" in hint for hint in stated)


FP32_GRADIENTS = Features(gradient_format=WireFormat.FP32)


@pytest.mark.parametrize(
    ("engine", "changed"),
    [
        ("torchtitan", {}),  # reduces in fp32 alone
        ("any", {}),
        ("megatron", {"features": FP32_GRADIENTS}),
        ("megatron", {"features": Features(gradient_format=WireFormat.BF16)}),
        ("megatron", {"precision": "fp32"}),
        ("megatron", {"cluster": "h100-1x1"}),
    ],
)
def test_rounded_gradients_are_not_offered(engine, changed):
    """The engine has no choice, the run has made it, or no gradient is reduced."""
    asked = {"model": "qwen3-0.6b", "cluster": "h100-8x1", "seq_len": 2048, "global_batch": 64}
    assert line_of(engine_request("megatron", **asked)) is not None
    assert line_of(engine_request(engine, **(asked | changed))) is None


def test_no_run_in_fp32_is_offered_rounded_gradients():
    asked = {"model": "llama3.1-8b", "cluster": "h100-8x8", "seq_len": 1024, "global_batch": 64}
    assert "gradient_format" in set().union(*map(keys, gains_of(engine_request("megatron", **asked))[1]))
    _, gains = gains_of(engine_request("megatron", **asked, precision="fp32"))
    assert "gradient_format" not in set().union(*map(keys, gains))


@pytest.mark.parametrize("engine", ["native", "torchtitan", "megatron", "maxtext"])
def test_an_engine_is_not_offered_what_it_cannot_set(engine):
    facts = engine_facts(engine)
    _, gains = gains_of(plan_request(**MIXTURE, engine=engine))
    settable = {name for name, _ in (*facts.switches, *facts.exported_switches)}
    assert set().union(*map(keys, gains)) <= settable


@pytest.mark.when_touched  # test_an_engine_is_not_offered_what_it_cannot_set walks the same switches
def test_no_kernel_is_offered_where_it_does_not_run():
    """HybridEP is NVIDIA's, FlashAttention 3 Hopper's; CUDA graphs mean nothing to a TPU."""
    values = {}
    for cluster in ("h100-8x4", "b200-8x4", "mi300x-8x4", "tpu-v5p-4x8"):
        request = plan_request(**(MIXTURE | {"cluster": cluster}), engine="any")
        values[cluster] = {value for gain in gains_of(request)[1] for _, value in gain.changes}
    assert "hybridep" not in values["mi300x-8x4"]
    assert "fa3" not in values["b200-8x4"] | values["mi300x-8x4"] | values["tpu-v5p-4x8"]
    assert not {"partial", "full", "deepep"} & values["tpu-v5p-4x8"]
    assert values["h100-8x4"]


@pytest.mark.parametrize(
    ("model", "switch", "is_idle"),
    [
        ("llama3.1-8b", {"expert_imbalance": 1.4}, True),
        ("llama3.1-8b", {"dispatcher": Dispatcher.DEEPEP}, True),
        ("llama3.1-8b", {"compiles": True}, False),
        ("llama3.1-8b", {"fuses_attention_backward": True}, False),  # as the release has it
        ("llama3.1-8b", {"attention": AttentionKernel.UNFUSED, "fuses_attention_backward": False}, True),
        ("qwen3-30b-a3b", {"expert_imbalance": 1.4}, False),
        ("qwen3-30b-a3b", {"capacity_factor": 1.5, "expert_imbalance": 1.4}, True),
        ("qwen3-30b-a3b", {"fuses_experts": True}, True),  # they are for mxfp8
    ],
)
def test_a_stated_switch_that_changes_nothing_is_named(model, switch, is_idle):
    stack = Stack(framework="megatron-bridge", features=Features(**switch))
    request = replace(plan_request(model=model, cluster="h100-8x4", engine="megatron"), stack=stack)
    expert = 8 if request.model.experts else 1
    notes = notes_on_idle_switches(request, Plan(data_shard=32, expert=expert))
    assert [note.split("=")[0] for note in notes] == [f"stack.{list(switch)[-1]}"] * is_idle
