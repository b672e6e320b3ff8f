"""Datasheet and calibration become rates."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest

from meshwright.calibration.memory import memory_constants
from meshwright.calibration.parameters import Calibration, Offset, prior
from meshwright.catalog import lookup as catalog
from meshwright.catalog.precisions import multiplies
from meshwright.catalog.stacks import stack_facts
from meshwright.cost.rates import SystemRates, bf16_factors, factors_of, system_facts, system_rates, vintage_of
from meshwright.cost.step import estimate_steps
from meshwright.cost.tables import BatchTable, model_row, plan_row, precision_row
from meshwright.errors import InputError, UnknownNameError
from meshwright.specs.features import RELEASE_DEFAULTS, CudaGraphs, Dispatcher, Features
from meshwright.specs.hardware import Cluster, Stack
from meshwright.specs.plan import Plan, Sharding
from meshwright.specs.precision import PRECISIONS, Precision

CLUSTER = catalog.cluster("h100-8x4")
STACK = Stack(framework="megatron-bridge")


def rates(precision: str = "bf16", *, calibration: Calibration | None = None, stack: Stack = STACK) -> SystemRates:
    return system_rates(CLUSTER, PRECISIONS[precision], stack, calibration=calibration or prior())


def with_offset(parameter: str, level: str, key: str, value: float) -> Calibration:
    return replace(prior(), offsets={(parameter, level, key): Offset(value=value, sd=0.1, num_rows=1)})


def test_the_datasheet_comes_through():
    device, h100 = rates("fp8").device, CLUSTER.accelerator
    assert device.matmul_flops_per_s == h100.peak_flops_per_s["fp8"]
    assert device.bf16_flops_per_s == h100.peak_flops_per_s["bf16"]
    assert device.memory_bytes_per_s == h100.memory_bytes_per_s
    assert device.num_units == h100.num_compute_units


def test_every_calibrated_parameter_is_used():
    """A parameter that reached no rate would be fitted to nothing."""
    used = {f.name for f in fields(SystemRates)} | {f.name for f in fields(rates().device)}
    in_network = {"scale_up_ratio", "scale_out_ratio", "scale_out_latency_factor"}
    assert set(prior().parameters) - used == in_network


@pytest.mark.parametrize(
    ("parameter", "field", "level", "key"),
    [
        ("scale_up_ratio", "up_bytes_per_s", "architecture", "Hopper"),
        ("scale_up_ratio", "up_peer_bytes_per_s", "architecture", "Hopper"),
        ("scale_out_ratio", "out_bytes_per_s", "fabric", CLUSTER.fabric.name),
        ("scale_out_latency_factor", "out_step_s", "fabric", CLUSTER.fabric.name),
    ],
)
def test_links_are_scaled(parameter, field, level, key):
    doubled = rates(calibration=with_offset(parameter, level, key, math.log(2)))
    assert getattr(doubled.network, field) == pytest.approx(2 * getattr(rates().network, field))


def test_16_bit_products_keep_their_own_ratio_beside_fp8():
    """Attention and the head stay in 16 bits, so an fp8 run knows both ratios."""
    assert rates("bf16").device.gemm_ratio == rates("bf16").device.bf16_gemm_ratio
    eight = rates("fp8").device
    assert eight.bf16_gemm_ratio == rates("bf16").device.gemm_ratio != eight.gemm_ratio
    moved = rates("fp8", calibration=with_offset("gemm_ratio", "device_format", "h100/fp8", 0.5)).device
    assert moved.gemm_ratio > eight.gemm_ratio
    assert moved.bf16_gemm_ratio == eight.bf16_gemm_ratio


def test_half_factors_change_format_and_recipe_only():
    factors = factors_of(CLUSTER, PRECISIONS["mxfp8"], STACK)
    bf16 = bf16_factors(factors)
    assert {k for k in factors if factors[k] != bf16[k]} == {"device_format", "die_format", "recipe"}
    assert bf16["device_format"] == "h100/bf16"


def test_an_architecture_may_have_the_rates_of_another():
    """Blackwell Ultra has Blackwell's, its software's and its kernels', but for attention's exponentials."""
    b200, b300 = (factors_of(catalog.cluster(name), PRECISIONS["mxfp8"], STACK) for name in ("b200-8x2", "b300-8x2"))
    differing = {k for k in b200 if b200[k] != b300[k]} - {"fabric"}
    assert differing == {"device", "device_format", "device_bf16", "attention"}
    native = Stack(framework="native")
    own = [system_facts(catalog.cluster(f"{name}-8x2"), PRECISIONS["bf16"], native) for name in ("b200", "b300")]
    assert own[0].fused == own[1].fused
    assert own[0].fused.norm == 1


@pytest.mark.parametrize(
    ("lesser", "greater", "precision", "ratio"),
    [
        ("gb200", "gb300", "bf16", 1.20),
        ("gb200", "gb300", "fp8", 1.17),
        ("gb200", "gb300", "nvfp4", 1.18),
        ("b200", "b300", "bf16", 1.02),
        ("b200", "b300", "fp8", 1.07),
        ("b200", "b300", "nvfp4", 1.22),
    ],
)
def test_large_gemms_of_blackwell_ultra_are_as_much_faster_as_measured(lesser, greater, precision, ratio):
    """Medians over GEMMs above 1 TFLOP: aiconfigurator-core 0.12, TensorRT-LLM."""
    slow, fast = (
        system_rates(catalog.cluster(f"{name}-8x2"), PRECISIONS[precision], STACK, calibration=prior()).device
        for name in (lesser, greater)
    )
    rates = [float(d.matmul_flops_per_s * d.gemm_ratio) for d in (slow, fast)]
    assert rates[1] / rates[0] == pytest.approx(ratio, rel=0.05)


def test_attention_of_blackwell_ultra_is_as_much_faster_as_measured():
    """Forward, heads of 128, 8,192 tokens and more: B300 over B200 and GB300 over GB200 in three serving stacks."""
    slow, fast = (
        system_rates(catalog.cluster(f"{name}-8x2"), PRECISIONS["bf16"], STACK, calibration=prior()).device
        for name in ("b200", "b300")
    )
    measured = [1.226, 1.253, 1.257, 1.168, 1.221, 1.219]
    ratio = float(fast.attention_forward_ratio / slow.attention_forward_ratio)
    assert ratio == pytest.approx(sum(measured) / len(measured), rel=0.02)


def test_every_level_of_every_parameter_is_a_factor():
    factors = factors_of(CLUSTER, PRECISIONS["bf16"], STACK)
    levels = {level for p in prior().parameters.values() for level in p.levels}
    measured = {p.measured["level"] for p in prior().parameters.values() if p.measured}
    assert (levels | measured) - set(factors) == set()


def test_a_missing_format_says_which_there_are():
    a100 = catalog.cluster("a100-8x1")
    with pytest.raises(InputError, match="a100 does not multiply fp8: got 'fp8', allowed: bf16, fp16, fp32"):
        system_facts(a100, PRECISIONS["fp8"], STACK)


def test_an_unknown_stack_names_the_nearest():
    with pytest.raises(UnknownNameError, match="megatron-bridge"):
        factors_of(CLUSTER, PRECISIONS["bf16"], Stack(framework="megatron-brigde"))


def test_a_stack_without_a_date_is_the_newest_known():
    facts = stack_facts("torchtitan")
    assert vintage_of(Stack(framework="torchtitan"), facts) == facts.newest
    assert vintage_of(Stack(framework="torchtitan", vintage=2024.5), facts) == 2024.5
    assert rates(stack=Stack(framework="torchtitan", vintage=2026.0)).years == 1.0


def test_traits_of_the_stack_come_through():
    assert rates(stack=Stack(framework="megatron-deepspeed")).device.unfused_attention == 1
    assert rates().device.unfused_attention == 0


def test_torchtitan_runs_whole_layers_again_since_august_2025_unless_a_compiler_prunes_them():
    def stops(vintage: float, compiles: bool) -> int:
        return rates(
            stack=Stack(framework="torchtitan", vintage=vintage, features=Features(compiles=compiles))
        ).stops_recompute

    assert [stops(*at) for at in ((2025.5, False), (2025.7, False), (2025.7, True))] == [1, 0, 1]


def test_kempnerforge_pads_experts_to_the_busiest_unless_they_have_a_capacity():
    stacks = [Stack(framework="kempnerforge", features=Features(drops_tokens=drops)) for drops in (False, True)]
    assert [rates(stack=stack).pads_experts for stack in stacks] == [2, 1]
    assert memory_constants(stacks[0]).pads_experts == 2
    assert (rates(stack=Stack(framework="fsdp2")).pads_experts, rates().pads_experts) == (0, 0)


def test_torchtitan_copies_routed_rows_as_its_code_of_the_time_does():
    def accesses(vintage: float, **switches: object) -> float:
        stack = Stack(framework="torchtitan", vintage=vintage, features=Features(**switches))
        return rates(stack=stack).device.routed_accesses

    found = [accesses(vintage, compiles=compiles) for vintage in (2026.2, 2026.6) for compiles in (False, True)]
    assert found == [8, 8, 10, 2]
    assert accesses(2026.2, dispatcher=Dispatcher.DEEPEP) == 0
    assert rates().device.routed_accesses == 0


@pytest.mark.parametrize("dispatcher", Dispatcher)
def test_all_but_a_plain_all_to_all_send_a_row_once_to_a_node(dispatcher: Dispatcher):
    stack = replace(STACK, features=Features(dispatcher=dispatcher))
    assert rates(stack=stack).deduplicates == (dispatcher is not Dispatcher.ALL_TO_ALL)


def test_fitted_rates_are_within_the_datasheet():
    for name in ("h100-8x2", "b200-8x2", "gb200-4x18", "mi355x-8x2", "a100-8x2"):
        r = system_rates(catalog.cluster(name), PRECISIONS["bf16"], STACK)
        for ratio in ("gemm_ratio", "sustained_ratio", "memory_ratio", "attention_forward_ratio"):
            assert 0 < getattr(r.device, ratio) < 1, (name, ratio)


class TestExperts:
    def facts(self, framework: str, *, cluster: str = "h100-8x4", features: Features = RELEASE_DEFAULTS):
        stack = Stack(framework=framework, features=features)
        return system_facts(catalog.cluster(cluster), PRECISIONS["bf16"], stack)

    def test_one_grouped_kernel_is_started_once(self):
        assert self.facts("torchtitan").host_expert_share == 0
        assert self.facts("megatron-lm").host_expert_share == 1

    def test_partial_graphs_hold_experts_of_static_shapes_alone(self):
        partial = Features(cuda_graphs=CudaGraphs.PARTIAL)
        static = replace(partial, drops_tokens=True)
        assert self.facts("megatron-lm", features=partial).host_expert_share == 1
        assert self.facts("megatron-lm", features=static).host_expert_share < 1

    def test_experts_share_tiles_on_tpus(self):
        tile = stack_facts("maxtext").ragged_tile_rows
        device = catalog.accelerator("tpu7x")
        cluster = replace(CLUSTER, accelerator=device)
        facts = system_facts(cluster, PRECISIONS["bf16"], Stack(framework="maxtext"))
        assert facts.ragged_rows == tile * device.jax_devices > 0
        assert self.facts("maxtext").ragged_rows == 0


@pytest.mark.parametrize("framework", ["megatron-bridge", "torchtitan", "maxtext"])
@pytest.mark.parametrize(
    ("lesser", "greater"),
    [
        ("b200", "b300"),
        ("gb200", "gb300"),
        ("h100", "h200"),
        ("h20", "h100"),
        ("h100-nvl", "h100"),
        ("mi300x", "mi325x"),
        ("mi350x", "mi355x"),
        ("a100-pcie", "a100"),
    ],
)
def test_a_board_with_more_of_everything_is_not_slower(lesser, greater, framework):
    """As calibrated, in every format that both have: no less power, memory bandwidth or FLOP/s, the same network."""
    fabric = catalog.cluster("h100-8x4").fabric.name
    clusters = [catalog.cluster(f"{name}-8x4", fabric_name=fabric) for name in (lesser, greater)]

    def step_s(cluster: Cluster, precision: Precision, model: str, expert: int) -> float:
        plan = Plan(data_shard=32, micro_batch=2, expert=expert, sharding=Sharding.PARAMETERS)
        steps = estimate_steps(
            model=model_row(catalog.model(model)),
            batch=BatchTable(seq_len=4096, global_batch=512),
            plan=plan_row(plan),
            precision=precision_row(precision),
            rates=system_rates(cluster, precision, Stack(framework=framework)),
        )
        return float(steps.step_s)

    for name in ("bf16", "fp8", "mxfp8", "nvfp4"):
        precision = PRECISIONS[name]
        if not all(multiplies(c.accelerator, precision) for c in clusters):
            continue
        for model, expert in (("llama3.1-8b", 1), ("qwen3-30b-a3b", 8)):
            slow, fast = (step_s(c, precision, model, expert) for c in clusters)
            assert fast <= 1.01 * slow, (name, model)
