"""Hybrids of state-space, attention and feed-forward layers (Nemotron-H)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright import catalog
from meshwright.catalog.huggingface import model_from_config
from meshwright.catalog.stacks import stack_for_engine
from meshwright.cost.flops import count_parameters, model_flops_per_token
from meshwright.cost.tables import model_row
from meshwright.engines.base import check_export
from meshwright.errors import InputError
from meshwright.inference.memory import parameters as served_parameters
from meshwright.planner.estimate import estimate_plan
from meshwright.planner.legality import legality_context, violations
from meshwright.planner.request import PlanRequest
from meshwright.runfile import from_options
from meshwright.specs.model import BlockKind, Model
from meshwright.specs.model_parts import contradictions
from meshwright.specs.plan import Plan, Sharding
from meshwright.specs.precision import PRECISIONS

SMALL = catalog.model("nemotron-h-8b")
NANO = catalog.model("nemotron3-nano")
LARGE = replace(
    SMALL, name="nemotron-h-56b", hidden=8192, num_layers=118, ffn_hidden=32_768,
    layer_pattern="M" * 54 + "*" * 10 + "-" * 54,  # counts of table 1; the order does not count
    attention=replace(SMALL.attention, num_heads=64),
    state_space=replace(SMALL.state_space, state_size=256, num_heads=256),
)  # fmt: skip
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
    assert count_parameters(model_row(SMALL)).total == 8_100_852_736


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
        ({"num_mtp_layers": 1}, "has no predictions"),
        ({"ffn_hidden": 0}, "need ffn_hidden"),
        (
            {"layer_pattern": "E" + SMALL.layer_pattern[1:]},
            "layers E of layer_pattern and experts need each other",
        ),
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


@settings(max_examples=15, deadline=None)
@given(attention=st.integers(0, 11))
def test_long_sequences_favour_state_space(attention):
    """A layer of attention in place of one of state space makes a step at a long sequence longer."""

    def step_s(num: int) -> float:
        model = replace(SMALL, num_layers=24, layer_pattern="*" * num + "M" * (12 - num) + "-" * 12)
        return float(
            np.ravel(estimate_plan(request(model, seq_len=131_072), Plan(data_shard=32)).steps.step_s)[0]
        )

    assert step_s(attention) < step_s(attention + 1) if attention + 1 < 12 else True


def test_heads_and_groups_are_split_over_tensor_ranks():
    context = legality_context(request())
    assert not [v for v in violations(Plan(tensor=8, data_shard=4), context=context) if "state" in v.rule]
    found = violations(Plan(context=2, data_shard=16), context=context)
    assert "state-space context" in [v.rule for v in found]


@pytest.mark.parametrize("engine", ["native", "torchtitan", "megatron", "maxtext"])
def test_no_engine_trains_it_and_each_says_what_does(engine):
    run = from_options(
        model="nemotron-h-8b", cluster="h100-8x4", global_batch=256, sequence_length=8192, engine=engine
    )
    (problem,) = [p for p in check_export(run) if p.key == "model.layer_pattern"]
    assert "pretrain_mamba.py" in (problem.hint or "")


def test_serving_is_refused():
    with pytest.raises(InputError, match="serving models with state-space layers"):
        served_parameters(SMALL)
