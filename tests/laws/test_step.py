"""Laws of the step model over random models, clusters, plans and recipes, with the shipped calibration."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cost_case import Case

from meshwright.catalog import lookup as catalog
from meshwright.catalog.precisions import multiplies
from meshwright.cost.compute import gemm_s
from meshwright.cost.flops import model_flops_per_token
from meshwright.cost.layers import general_factor
from meshwright.cost.overlap import exposed_s
from meshwright.cost.rates import system_rates
from meshwright.cost.tables import BatchTable, model_row, plan_row, precision_row
from meshwright.specs.features import Features
from meshwright.specs.hardware import Stack
from meshwright.specs.plan import RECOMPUTE_MODULES, Plan, Recompute, Schedule, Sharding
from meshwright.specs.precision import PRECISIONS

MODELS = ("llama3-8b", "gpt3-175b", "mixtral-8x7b", "gpt-oss-20b", "deepseek-v2-lite", "qwen3-30b-a3b")
CLUSTERS = ("h100-8x8", "b200-8x8", "a100-8x8", "mi300x-8x8", "gb200-4x16", "h200-8x8")
FRAMEWORKS = ("megatron-bridge", "nemo", "torchtitan", "primus-megatron", "megatron-deepspeed")
NEVER_TOGETHER = "alternate_matmuls"  # counts products that mlp and moe name too


@st.composite
def plans(draw, *, experts: int) -> Plan:
    """On 64 devices."""
    tensor = draw(st.sampled_from([1, 2, 4, 8]))
    context = draw(st.sampled_from([1, 1, 2]))
    pipeline = draw(st.sampled_from([1, 1, 2, 4]))
    data = 64 // (tensor * context * pipeline)
    schedule = draw(st.sampled_from([Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE]))
    replicate = draw(st.sampled_from([1, 2])) if data > 1 else 1
    return Plan(
        tensor=tensor,
        sequence_parallel=draw(st.booleans()),
        context=context,
        pipeline=pipeline,
        schedule=schedule,
        virtual_pipeline=2 if schedule is Schedule.INTERLEAVED and pipeline > 1 else 1,
        expert=draw(st.sampled_from([e for e in (1, 2, 4, 8) if experts % e == 0 and data * context % e == 0]))
        if experts
        else 1,
        data_shard=data // replicate,
        data_replicate=replicate,
        sharding=draw(st.sampled_from(list(Sharding))),
        micro_batch=draw(st.sampled_from([1, 2])),
    )


@st.composite
def cases(draw, *, names: tuple[str, ...] = MODELS) -> Case:
    model = catalog.model(draw(st.sampled_from(names)))
    cluster = catalog.cluster(draw(st.sampled_from(CLUSTERS)))
    formats = [p for p in ("bf16", "fp8", "mxfp8") if multiplies(cluster.accelerator, PRECISIONS[p])]
    precision = PRECISIONS[draw(st.sampled_from(formats))]
    plan = draw(plans(experts=model.experts.num_experts if model.experts else 0))
    return Case(
        model=model_row(model),
        batch=BatchTable(seq_len=draw(st.sampled_from([2048, 4096, 8192])), global_batch=512),
        plan=plan_row(plan),
        precision=precision_row(precision),
        rates=system_rates(cluster, precision, Stack(framework=draw(st.sampled_from(FRAMEWORKS)))),
    )


def without_window(case: Case) -> Case:
    """The same with gradients reduced in the open where there is a pipeline. What they hide behind is a middle rank's
    work: when another rank sets the pace, slower middle ranks hide more and cost nothing."""
    overlaps = np.where(case.plan.pipeline > 1, 0, case.rates.overlaps_data)
    return replace(case, rates=replace(case.rates, overlaps_data=overlaps))


def not_longer(first: float, second: float) -> bool:
    return first <= second * (1 + 1e-9)


@given(cases(), st.floats(1.0, 2.0))
def test_components_are_never_negative_and_add_up(case, load_factor):
    steps = case.steps(load_factor=load_factor)
    assert min(float(np.min(x)) for x in steps.components_s.values()) >= 0
    assert sum(float(x) for x in steps.components_s.values()) == pytest.approx(float(steps.step_s), rel=1e-9)


DEVICE = ("matmul_flops_per_s", "bf16_flops_per_s", "memory_bytes_per_s", "attention_forward_ratio")
LINKS = ("up_bytes_per_s", "up_peer_bytes_per_s", "up_switch_bytes_per_s", "out_bytes_per_s")


@given(cases(), st.sampled_from(DEVICE), st.floats(1.0, 4.0))
def test_a_faster_device_is_never_slower(case, what, factor):
    case = without_window(case)
    device = case.rates.device
    faster = replace(device, **{what: getattr(device, what) * factor})
    assert not_longer(replace(case, rates=replace(case.rates, device=faster)).step_s, case.step_s)


@pytest.mark.when_touched  # test_a_faster_device_is_never_slower costs the same steps
@given(cases(), st.sampled_from(LINKS), st.floats(1.0, 10.0))
def test_a_faster_link_is_never_slower(case, what, factor):
    network = case.rates.network
    faster = replace(network, **{what: getattr(network, what) * factor})
    assert not_longer(replace(case, rates=replace(case.rates, network=faster)).step_s, case.step_s)


@given(cases(), st.floats(0.7, 1.3))
def test_no_step_beats_the_sustained_rate_of_its_die(case, factor):
    """Layers run at the sustained share of the peak at most, whatever multiplies everything; the head at a GEMM's."""
    moved = replace(case, rates=replace(case.rates, general_factor=factor))
    rate, device = float(moved.steps().tokens_per_s_per_device), case.rates.device
    of_head = device.gemm_ratio / min(float(general_factor(moved.context)), 1.0)
    flops = float(model_flops_per_token(case.model, seq_len=case.batch.seq_len))
    assert rate * flops <= device.matmul_flops_per_s * max(device.sustained_ratio, of_head) * (1 + 1e-9)


SLOWER = (
    "tensor_exposed_ratio", "expert_exposed_ratio", "pipeline_exposed_ratio", "overlap_slowdown_ratio",
    "slowdown_per_doubling", "step_s", "optimizer_passes", "general_factor",
)  # fmt: skip


@pytest.mark.when_touched  # test_a_faster_device_is_never_slower costs the same steps
@given(cases(), st.sampled_from(SLOWER), st.floats(1.0, 3.0))
def test_more_of_what_slows_down_is_never_faster(case, what, factor):
    worse = replace(case.rates, **{what: getattr(case.rates, what) * factor})
    assert not_longer(case.step_s, replace(case, rates=worse).step_s)


@pytest.mark.when_touched  # test_a_faster_device_is_never_slower costs the same steps
@given(cases(), st.floats(0.0, 1.0))
def test_hiding_more_is_never_slower(case, more):
    rates = case.rates
    hidden = {
        n: getattr(rates, n) + (1 - getattr(rates, n)) * more for n in ("data_hidden_ratio", "gather_hidden_ratio")
    }
    assert not_longer(replace(case, rates=replace(rates, **hidden)).step_s, case.step_s)


@pytest.mark.when_touched  # test_layer_families.py costs models and plans of all kinds
@given(cases(names=("llama3-8b", "gpt3-175b")))
def test_twice_the_layers_take_longer(case):
    deeper = replace(case.model, num_layers=2 * case.model.num_layers, num_dense_layers=2 * case.model.num_layers)
    assert case.step_s < replace(case, model=deeper).step_s


@pytest.mark.when_touched  # test_a_faster_device_is_never_slower costs the same steps
@given(cases())
def test_longer_sequences_of_the_same_tokens_take_longer(case):
    """Micro-batches keep their tokens, so only attention changes."""
    short = replace(case, plan=replace(case.plan, micro_batch=2))
    long = replace(
        case,
        plan=replace(case.plan, micro_batch=1),
        batch=BatchTable(seq_len=2 * case.batch.seq_len, global_batch=case.batch.global_batch / 2),
    )
    assert not_longer(short.step_s, long.step_s)


@pytest.mark.when_touched  # test_a_faster_device_is_never_slower costs the same steps
@given(cases())
def test_a_larger_batch_takes_longer_and_is_more_efficient(case):
    large = replace(case, batch=replace(case.batch, global_batch=4 * case.batch.global_batch))
    assert not_longer(case.step_s, large.step_s)
    assert not_longer(large.step_s, 4 * case.step_s)


@pytest.mark.when_touched  # test_components_are_never_negative_and_add_up has such plans
@given(cases(), st.sets(st.sampled_from([m for m in RECOMPUTE_MODULES if m != NEVER_TOGETHER])))
def test_recomputing_more_takes_longer(case, modules):
    def step_s(kind: Recompute, chosen: set[str]) -> float:
        mask = sum(1 << RECOMPUTE_MODULES.index(m) for m in chosen)
        index = list(Recompute).index(kind)
        return replace(case, plan=replace(case.plan, recompute=index, recompute_mask=mask)).step_s

    none, full = step_s(Recompute.NONE, set()), step_s(Recompute.FULL, set())
    core = step_s(Recompute.SELECTIVE, {"core_attention"})
    some = step_s(Recompute.SELECTIVE, modules | {"core_attention"})
    assert none < core
    assert not_longer(core, some)
    assert not_longer(some, full)


@pytest.mark.when_touched  # test_components_are_never_negative_and_add_up has every load
@given(cases(names=("mixtral-8x7b", "gpt-oss-20b", "deepseek-v2-lite")), st.floats(1, 3), st.floats(0, 1))
def test_less_balance_is_never_faster(case, load_factor, more):
    case = without_window(case)
    assert not_longer(
        float(case.steps(load_factor=load_factor).step_s), float(case.steps(load_factor=load_factor + more).step_s)
    )


@pytest.mark.parametrize(("cluster", "gains"), [("h100-8x8", True), ("tpu-v5p-4x16", False), ("a100-8x8", False)])
def test_attention_in_8_bits_gains_only_where_they_are_multiplied_faster(cluster, gains):
    def step_s(fp8: bool) -> float:
        stack = Stack(framework="maxtext", features=Features(fp8_attention=fp8))
        rates = system_rates(catalog.cluster(cluster), PRECISIONS["bf16"], stack)
        plan = plan_row(Plan(data_shard=64, sharding=Sharding.PARAMETERS))
        batch = BatchTable(seq_len=8192, global_batch=512)
        llama, precision = model_row(catalog.model("llama3-8b")), precision_row(PRECISIONS["bf16"])
        return float(Case(model=llama, batch=batch, plan=plan, precision=precision, rates=rates).steps().step_s)

    assert (step_s(True) < step_s(False)) == gains


@pytest.mark.when_touched  # test_components_are_never_negative_and_add_up has every load
@given(cases(names=("mixtral-8x7b", "gpt-oss-20b")), st.floats(1, 64))
def test_no_expert_rank_receives_more_than_all_tokens(case, imbalance):
    """A rank with all experts is always balanced; one of several has at most `expert` times the mean."""
    width = float(case.plan.expert)
    bound = case.steps(load_factor=min(imbalance, width))
    assert float(case.steps(load_factor=imbalance).step_s) == float(bound.step_s)
    if width == 1:
        assert float(bound.step_s) == float(case.steps().step_s)


@pytest.mark.when_touched  # test_components_are_never_negative_and_add_up has every load
@given(cases(names=("mixtral-8x7b", "gpt-oss-20b")), st.floats(1.1, 4))
def test_padded_experts_compute_their_capacity_whatever_routers_decide(case, imbalance):
    padded = replace(case, rates=replace(case.rates, pads_experts=1, expert_imbalance=1.5))
    assert float(padded.steps(load_factor=imbalance).step_s) == float(padded.steps().step_s)
    assert float(padded.steps().step_s) >= float(case.steps().step_s)


@pytest.mark.when_touched  # test_components_are_never_negative_and_add_up has such plans
@given(cases(), st.sampled_from([2, 4, 8]))
def test_replicas_scale_no_better_than_linearly(case, factor):
    """Without sharding: with it more replicas also share out the optimizer's work."""
    alone = replace(case, plan=replace(case.plan, sharding=int(Sharding.NONE)))
    together = replace(
        alone,
        plan=replace(alone.plan, data_shard=factor * alone.plan.data_shard),
        batch=replace(alone.batch, global_batch=factor * alone.batch.global_batch),
    )
    assert not_longer(alone.step_s, together.step_s)


@given(st.lists(cases(), min_size=2, max_size=6))
def test_arrays_give_what_rows_give(several):
    together = Case(
        **{name: type(table).stack([getattr(c, name) for c in several]) for name, table in vars(several[0]).items()}
    )
    assert together.steps().step_s == pytest.approx([c.step_s for c in several], rel=1e-12)


@pytest.mark.when_touched  # test_arrays_give_what_rows_give stacks the same tables
@given(st.lists(cases(), min_size=2, max_size=6), st.data())
def test_taking_rows_is_costing_them_alone(several, data):
    index = np.array(data.draw(st.lists(st.integers(0, len(several) - 1), min_size=1, max_size=4)))
    tables = {name: type(table).stack([getattr(c, name) for c in several]) for name, table in vars(several[0]).items()}
    taken = Case(**{name: table.take(index) for name, table in tables.items()})
    assert taken.steps().step_s == pytest.approx([several[i].step_s for i in index], rel=1e-12)


SHAPE = st.integers(1, 1 << 15)


@given(
    SHAPE, SHAPE, SHAPE, st.integers(1, 64), st.sampled_from([0, 80, 132, 148, 256]), st.sampled_from([0.5, 1.0, 2.0])
)
def test_no_product_beats_the_peak_or_the_memory(m, n, k, groups, num_units, element_bytes):
    flops_per_s, bytes_per_s = 1e15, 3e12
    seconds = float(
        gemm_s(
            m, n, k, groups=groups, flops_per_s=flops_per_s, bytes_per_s=bytes_per_s, num_units=num_units,
            kernel_s=0.0, element_bytes=element_bytes,
        )
    )  # fmt: skip
    assert seconds >= 2 * m * n * k * groups / flops_per_s
    assert seconds >= groups * (element_bytes * (m * k + k * n) + 2 * m * n) / bytes_per_s * (1 - 1e-12)


@given(SHAPE, SHAPE, SHAPE, st.integers(1, 512), st.sampled_from([0, 132, 256]))
def test_a_larger_product_is_never_faster(m, n, k, more, num_units):
    def seconds(*shape: int) -> float:
        return float(gemm_s(*shape, flops_per_s=1e15, bytes_per_s=3e12, num_units=num_units, kernel_s=1e-6))

    for larger in ((m + more, n, k), (m, n + more, k), (m, n, k + more)):
        assert not_longer(seconds(m, n, k), seconds(*larger))


@given(st.floats(0, 10), st.floats(0, 10), st.floats(1, 3), st.floats(0, 1), st.floats(1, 3))
def test_exposed_communication_is_between_what_cannot_hide_and_all(comm, compute, slowdown, ratio, comm_slowdown):
    exposed = float(exposed_s(comm, compute, slowdown, ratio, comm_slowdown=comm_slowdown))
    assert comm * (1 - ratio) - 1e-9 <= exposed <= comm + 1e-9


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 5), st.floats(1, 3), st.floats(0, 1))
def test_more_to_send_or_less_to_hide_behind_is_never_less_exposed(comm, compute, more, slowdown, ratio):
    exposed = float(exposed_s(comm, compute, slowdown, ratio))
    assert exposed <= float(exposed_s(comm + more, compute, slowdown, ratio)) + 1e-9
    assert float(exposed_s(comm, compute + more, slowdown, ratio)) <= exposed + 1e-9
    # ... and the two together never get shorter.
    assert compute + exposed <= compute + more + float(exposed_s(comm, compute + more, slowdown, ratio)) + 1e-9
