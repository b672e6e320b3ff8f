"""Hybrids of state-space, attention and feed-forward layers (Nemotron-H)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.catalog import lookup as catalog
from meshwright.catalog.huggingface import model_from_config
from meshwright.catalog.stacks import stack_for_engine
from meshwright.cost.flops import count_parameters, model_flops_per_token
from meshwright.cost.state_space import (
    kept_bytes_per_token,
    scan_backward_flops_per_token,
    scan_elements_per_token,
    scan_flops_per_token,
    scan_pace,
)
from meshwright.cost.tables import model_row
from meshwright.engines.base import check_export
from meshwright.errors import InputError
from meshwright.inference.memory import parameters as served_parameters
from meshwright.planner.estimate import estimate_plan
from meshwright.planner.legality import legality_context, violations
from meshwright.planner.request import PlanRequest
from meshwright.runfile import from_options
from meshwright.specs.features import CudaGraphs, Features
from meshwright.specs.model import BlockKind, Model
from meshwright.specs.model_parts import contradictions
from meshwright.specs.plan import Plan, Sharding
from meshwright.specs.precision import PRECISIONS

SMALL = catalog.model("nemotron-h-8b")
NANO = catalog.model("nemotron3-nano")
LARGE = catalog.model("nemotron-h-56b")
SUPER = catalog.model("nemotron3-super")
CONFIG = {
    "architectures": ["NemotronHForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 52,
    "hybrid_override_pattern": SMALL.layer_pattern,
    "vocab_size": 131_072,
    "intermediate_size": 21_504,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attention_head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "chunk_size": 128,
}


def request(model: Model = SMALL, *, seq_len: int = 8192, engine: str = "any") -> PlanRequest:
    return PlanRequest(
        model=model, cluster=catalog.cluster("h100-8x4"), seq_len=seq_len, global_batch=256,
        precision=PRECISIONS["bf16"], stack=stack_for_engine(engine), engine=engine,
    )  # fmt: skip


def test_parameters_are_those_of_transformers():
    """`NemotronHForCausalLM` of transformers 5.23 with this config has 8,100,852,736."""
    assert round(float(count_parameters(model_row(SMALL)).total)) == 8_100_852_736


def test_the_large_one_has_the_published_size():
    """arXiv 2504.03624 calls it 56B."""
    assert count_parameters(model_row(LARGE)).total == pytest.approx(56e9, rel=0.01)


def test_every_layer_holds_one_block():
    assert [SMALL.layer_pattern.count(kind) for kind in BlockKind] == [24, 4, 24, 0]
    assert sum(SMALL.share_of(kind) for kind in BlockKind) == pytest.approx(1)
    plain = catalog.model("llama3.1-8b")
    assert [plain.share_of(kind) for kind in BlockKind] == [0, 1, 1, 1]


def test_flops_grow_with_the_sequence_by_four_layers_only():
    short, long = (float(model_flops_per_token(model_row(SMALL), seq_len=s)) for s in (8192, 16_384))
    four_layers = 3 * 4 * 2 * 32 * 256 * (16_384 - 8192) / 2
    assert long - short == pytest.approx(four_layers)


def test_flops_are_six_per_parameter_and_the_scan():
    p = count_parameters(model_row(SMALL))
    scan = 3 * 24 * 7 * 8192 * 128
    core = 3 * 4 * 2 * 32 * 256 * 4096
    expected = 6 * p.active + core + scan
    assert float(model_flops_per_token(model_row(SMALL), seq_len=8192)) == pytest.approx(expected)


def test_parameters_of_a_hybrid_with_mixtures_are_those_of_transformers_and_the_report():
    """transformers 5.23 has 31,577,937,344 of them; arXiv 2512.20848 calls it 31.6B with 3.2B active."""
    p = count_parameters(model_row(NANO))
    assert round(float(p.total)) == 31_577_937_344
    assert float(p.active) == pytest.approx(3.2e9, rel=0.02)
    assert float(p.active + p.embedding) == pytest.approx(3.6e9, rel=0.01)


def test_parameters_of_latent_mixtures_and_prediction_modules():
    """transformers 5.23 has 120,668,687,360 of Super without its module; Megatron-Bridge's card of Lightning counts
    32,913,266,240, with the biases of 24 routers of 128 experts, which are no parameters there."""
    without = count_parameters(model_row(replace(SUPER, num_mtp_layers=0)))
    assert round(float(without.total)) == 120_668_687_360
    assert float(without.active) == pytest.approx(12.1e9, rel=0.02)
    lightning = count_parameters(model_row(catalog.model("nemotron3.5-lightning")))
    assert round(float(lightning.total)) == 32_913_266_240 - 24 * 128
    # The BF16 checkpoint of Ultra has 1,121 GB.
    ultra = count_parameters(model_row(catalog.model("nemotron3-ultra")))
    assert 2 * float(ultra.total) == pytest.approx(1121e9, rel=1e-3)


def test_shared_prediction_modules_compute_twice_and_are_held_once():
    shared, own = SUPER, replace(SUPER, mtp_shared=False)
    counts = [count_parameters(model_row(model)) for model in (shared, own)]
    assert counts[0].active == counts[1].active
    assert counts[0].total < counts[1].total
    plan = Plan(data_shard=32, expert=32, sharding=Sharding.OPTIMIZER)
    one, other = (estimate_plan(request(model), plan) for model in (shared, own))
    assert float(np.ravel(one.memory.weights_bytes)[0]) < float(np.ravel(other.memory.weights_bytes)[0])
    assert float(np.ravel(one.memory.activations_bytes)[0]) == float(np.ravel(other.memory.activations_bytes)[0])


@settings(max_examples=10, deadline=None)
@given(latent=st.sampled_from([256, 512, 1024, 2048]))
def test_a_narrower_latent_sends_and_computes_less(latent):
    """All-to-all nearly in proportion to the latent's width; starts of collectives remain."""
    plan = Plan(data_shard=32, expert=32, sharding=Sharding.OPTIMIZER)

    def parts(width: int) -> dict[str, float]:
        experts = replace(SUPER.experts, latent=width)
        return estimate_plan(request(replace(SUPER, experts=experts)), plan).step.components_s

    narrow, wide = parts(latent), parts(2 * latent)
    assert 0.49 < narrow["expert_parallel"] / wide["expert_parallel"] < 0.6
    assert narrow["experts"] < wide["experts"]
    assert narrow["state_space"] == pytest.approx(wide["state_space"], rel=0.02)


def mixture(num_layers: int, **changes: object) -> Model:
    """Nano's attention and experts, without state space."""
    return replace(NANO, state_space=None, num_layers=num_layers, layer_pattern="", **changes)


@settings(max_examples=15, deadline=None)
@given(
    blocks=st.permutations("*" * 8 + "E" * 8),
    shared=st.sampled_from([0, 3712]),
    plan=st.sampled_from(
        [
            Plan(data_shard=32, expert=8),
            Plan(data_shard=8, tensor=2, sequence_parallel=True, pipeline=2, expert=4),
            Plan(data_shard=16, context=2, expert=8, sharding=Sharding.GRADIENTS),
        ]
    ),
)
def test_attention_and_mixtures_in_layers_of_their_own_cost_as_in_layers_of_both(blocks, shared, plan):
    """Layers cut in half have the same parameters, FLOPs, step and memory but for what is counted per layer."""
    experts = replace(NANO.experts, shared_ffn_hidden=shared, num_shared=int(shared > 0))
    whole = mixture(8, experts=experts)
    halves = replace(mixture(16, experts=experts), layer_pattern="".join(blocks))
    counts = [count_parameters(model_row(model)) for model in (whole, halves)]
    assert float(counts[0].total) == pytest.approx(float(counts[1].total))
    assert float(counts[0].active) == pytest.approx(float(counts[1].active))
    one, other = (estimate_plan(request(model, seq_len=4096), plan) for model in (whole, halves))
    parts = [found.step.components_s for found in (one, other)]
    for name in set(parts[0]) - {"hooks", "data_parallel", "stragglers", "bubble", "host"}:
        assert parts[0].get(name, 0.0) == pytest.approx(parts[1].get(name, 0.0), rel=1e-6), name
    memory = [float(np.ravel(found.memory.activations_bytes)[0]) for found in (one, other)]
    assert memory[0] == pytest.approx(memory[1], rel=1e-6)


def test_the_config_of_a_latent_mixture_is_read_whole():
    x, m, a = SUPER.experts, SUPER.state_space, SUPER.attention
    config = {
        "architectures": ["NemotronHForCausalLM"],
        "hidden_size": SUPER.hidden,
        "layers_block_type": [{"M": "mamba", "*": "attention", "E": "moe"}[k] for k in SUPER.layer_pattern],
        "vocab_size": SUPER.vocab,
        "intermediate_size": 2688,
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_kv_heads,
        "head_dim": a.head_dim,
        "mamba_num_heads": m.num_heads,
        "n_routed_experts": x.num_experts,
        "num_experts_per_tok": x.top_k,
        "moe_intermediate_size": x.ffn_hidden,
        "moe_shared_expert_intermediate_size": x.shared_ffn_hidden,
        "moe_latent_size": x.latent,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 5.0,
        "num_nextn_predict_layers": 1,
        "mtp_layers_block_type": ["attention", "moe"],
    }
    read = model_from_config(config, name=SUPER.name)
    assert read.unsupported == ()
    # The file counts the module's weights, not how often it predicts.
    expected = replace(SUPER, num_mtp_layers=1, mtp_shared=False, ffn_hidden=2688)
    assert read == expected
    assert model_row(read) == model_row(replace(expected, ffn_hidden=0))


def test_the_config_is_read_whole():
    read = model_from_config(CONFIG, name="nemotron-h-8b")
    assert replace(read, family=SMALL.family) == SMALL
    words = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
    named = {k: v for k, v in CONFIG.items() if k != "hybrid_override_pattern"}
    named["layers_block_type"] = [words[letter] for letter in SMALL.layer_pattern]
    assert model_from_config(named, name="nemotron-h-8b") == read


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_override_pattern": "MX*" * 20}, "M .Mamba-2., "),
        ({"hybrid_override_pattern": "M-*"}, "has 3 layers, num_layers says 52"),
        ({"layers_block_type": ["conv"] * 52, "hybrid_override_pattern": None}, "layers of Nemotron-H"),
        ({"architectures": ["Zamba2ForCausalLM"]}, "several layers share"),
        ({"architectures": ["FalconH1ForCausalLM"]}, "side by side"),
        ({"architectures": ["BambaForCausalLM"]}, "not read"),
        ({"architectures": ["GraniteMoeHybridForCausalLM"]}, "not read"),
        ({"architectures": ["Mamba2ForCausalLM"]}, "not read"),
    ],
)
def test_what_is_not_read_whole_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        model_from_config(CONFIG | changes, name="other")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_pattern": ""}, "needs layer_pattern"),
        ({"state_space": None}, "need each other"),
        ({"layer_pattern": "M" * 51 + "x"}, "names 'x'"),
        ({"num_mtp_layers": 1}, "needs mtp_pattern"),
        ({"num_mtp_layers": 1, "mtp_pattern": "*E"}, "mtp_pattern names 'E', which layer_pattern does not have"),
        ({"ffn_hidden": 0}, "need ffn_hidden"),
        ({"layer_pattern": "E" + SMALL.layer_pattern[1:]}, "layers E of layer_pattern and experts need each other"),
        ({"experts": NANO.experts}, "layers E of layer_pattern and experts need each other"),
    ],
)
def test_contradictions(changes, message):
    assert message in "; ".join(contradictions(replace(SMALL, **changes)))


def test_a_plan_is_costed():
    found = estimate_plan(request(), Plan(data_shard=32))
    parts = found.step.components_s
    assert parts["state_space"] > 5 * parts["attention_core"] > 0
    assert 0.2 < found.step.mfu.value < 0.7


@settings(max_examples=15, deadline=None)
@given(blocks=st.permutations("M" * 6 + "*" * 2 + "-" * 4))
def test_the_order_of_layers_does_not_count(blocks):
    one = replace(SMALL, num_layers=12, layer_pattern="M" * 6 + "*" * 2 + "-" * 4)
    other = replace(one, layer_pattern="".join(blocks))
    assert model_row(one) == model_row(other)


def device_and_host(model: Model, graphs: CudaGraphs) -> tuple[float, float]:
    """Seconds of the scan, and of waiting for the host, of a step in small micro-batches."""
    stack = replace(stack_for_engine("any"), features=Features(cuda_graphs=graphs))
    found = estimate_plan(
        replace(request(model, seq_len=2048), stack=stack), Plan(data_shard=32, sharding=Sharding.GRADIENTS)
    )
    parts = found.step.components_s
    return parts["state_space"], parts.get("host", 0.0)


def test_graphs_of_state_space_blocks_take_their_launches_off_the_host():
    """A block starts twenty Triton kernels backward: without graphs it waits for the host longer than a transformer."""
    waits = {graphs: device_and_host(SMALL, graphs) for graphs in CudaGraphs}
    assert waits[CudaGraphs.NONE][1] > 1.5 * waits[CudaGraphs.STATE_SPACE][1]
    assert waits[CudaGraphs.STATE_SPACE][1] >= waits[CudaGraphs.PARTIAL][1] >= waits[CudaGraphs.FULL][1]
    assert waits[CudaGraphs.NONE][0] == pytest.approx(waits[CudaGraphs.FULL][0], rel=0.05)
    plain = mixture(8, experts=None, ffn_hidden=8192)
    rows = [device_and_host(plain, graphs)[1] for graphs in (CudaGraphs.NONE, CudaGraphs.STATE_SPACE)]
    assert rows[0] == rows[1]


@settings(max_examples=25, deadline=None)
@given(chunk=st.sampled_from([64, 128, 256]), state=st.sampled_from([16, 64, 128, 256]), heads=st.integers(1, 16))
def test_the_scan_moves_more_backward_than_forward_and_grows_with_every_size(chunk, state, heads):
    def elements(**changes: int) -> tuple[float, float]:
        block = replace(SMALL.state_space, chunk_size=chunk, state_size=state, num_heads=8 * heads)
        row = model_row(replace(SMALL, state_space=replace(block, **changes)))
        return scan_elements_per_token(row)

    forward, backward = elements()
    # Passes over a tensor, backward / forward: states 15 / 6 (the least), heads 13 / 5, values 25 / 9, scores 12 / 4,
    # B and C 29 / 8 (the most). The sum lies between the extremes.
    assert 15 / 6 * forward < backward < 29 / 8 * forward
    for larger in ({"state_size": 2 * state}, {"num_heads": 16 * heads}, {"head_dim": 128}):
        assert all(a > b for a, b in zip(elements(**larger), (forward, backward), strict=True))
    # Larger chunks have fewer states to write and larger scores.
    row = model_row(replace(SMALL, state_space=replace(SMALL.state_space, state_size=state, chunk_size=chunk)))
    assert scan_backward_flops_per_token(row) > 2 * scan_flops_per_token(row)


def test_the_scan_keeps_what_its_backward_pass_reads():
    """The first projection's output, the scan's, the gated and the normed one: states are computed again."""
    m = SMALL.state_space
    expected = 2 * (m.inner + m.convolved + m.num_heads + 3 * m.inner)
    assert kept_bytes_per_token(model_row(SMALL)) == expected


@settings(max_examples=10, deadline=None)
@given(seq_len=st.sampled_from([2048, 4096, 8192, 16_384]))
def test_a_step_of_a_hybrid_is_linear_in_the_sequence_but_for_attention(seq_len):
    """Twice the tokens take twice the scan but for starts of kernels, and less than four times the step."""

    def found(length: int) -> tuple[float, float]:
        found = estimate_plan(request(NANO, seq_len=length), Plan(data_shard=32, expert=8))
        return found.step.components_s["state_space"], float(np.ravel(found.steps.step_s)[0])

    (scan, step), (longer_scan, longer_step) = found(seq_len), found(2 * seq_len)
    assert 1.8 * scan < longer_scan < 2.01 * scan
    assert step < longer_step < 4 * step


@settings(max_examples=15, deadline=None)
@given(attention=st.integers(0, 11))
def test_long_sequences_favour_state_space(attention):
    """A layer of attention in place of one of state space makes a step at a long sequence longer."""

    def step_s(num: int) -> float:
        model = replace(SMALL, num_layers=24, layer_pattern="*" * num + "M" * (12 - num) + "-" * 12)
        return float(np.ravel(estimate_plan(request(model, seq_len=131_072), Plan(data_shard=32)).steps.step_s)[0])

    assert step_s(attention) < step_s(attention + 1) if attention + 1 < 12 else True


def test_heads_and_groups_are_split_over_tensor_ranks():
    context = legality_context(request())
    assert not [v for v in violations(Plan(tensor=8, data_shard=4), context=context) if "state" in v.rule]
    assert not [v for v in violations(Plan(context=16, data_shard=2), context=context) if "state" in v.rule]
    found = violations(Plan(tensor=4, context=3), context=context)
    assert "state-space context" in [v.rule for v in found]


@pytest.mark.parametrize("engine", ["native", "torchtitan", "megatron", "maxtext"])
def test_no_engine_trains_it_and_each_says_what_does(engine):
    run = from_options(model="nemotron-h-8b", cluster="h100-8x4", global_batch=256, sequence_length=8192, engine=engine)
    (problem,) = [p for p in check_export(run) if p.key == "model.layer_pattern"]
    assert "pretrain_mamba.py" in (problem.hint or "")


def test_serving_is_refused():
    with pytest.raises(InputError, match="serving models with state-space layers"):
        served_parameters(SMALL)


def test_units_pace_the_scan_where_memory_is_faster():
    """Of GPUs alone: an H100 and slower memory are as fast as their bandwidth; a TPU has few units and another scan."""
    names = ("h100", "a100", "mi300x", "tpu7x", "h200")
    paces = [scan_pace(catalog.accelerator(name)) for name in names]
    assert paces == pytest.approx([1.0, 1.0, 1.0, 1.0, 1.33], rel=0.01)
    assert 1.7 < scan_pace(catalog.accelerator("gb200")) < 1.8


def test_the_pace_of_units_slows_the_scan_alone():
    plan = Plan(data_shard=32, sharding=Sharding.OPTIMIZER, expert=8)
    slow, fast = (
        estimate_plan(replace(request(NANO), cluster=catalog.cluster(name)), plan).step.components_s
        for name in ("h100-8x4", "h200-8x4")
    )
    assert fast["state_space"] > 0.9 * slow["state_space"]
    assert fast["elementwise"] < 0.8 * slow["elementwise"]
