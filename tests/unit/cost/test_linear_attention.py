"""Models with layers of linear attention: Gated DeltaNet (Qwen3-Next, Qwen3.5, OLMo Hybrid), Kimi Delta Attention."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from importlib.resources import files

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.calibration.memory import memory_constants
from meshwright.catalog import lookup as catalog
from meshwright.catalog.stacks import stack_for_engine
from meshwright.cost import linear_attention
from meshwright.cost.flops import count_parameters, model_flops_per_token
from meshwright.cost.memory.activations import layer_bytes
from meshwright.cost.tables import BatchTable, model_row, plan_row, precision_row
from meshwright.engines.base import check_export
from meshwright.errors import InputError
from meshwright.inference.memory import parameters as served_parameters
from meshwright.planner.estimate import estimate_plan
from meshwright.planner.legality import legality_context, violations
from meshwright.planner.request import PlanRequest
from meshwright.runfile import from_options
from meshwright.specs.model import LinearAttention, LinearKind, Lora, Model
from meshwright.specs.model_parts import contradictions
from meshwright.specs.plan import Plan
from meshwright.specs.precision import PRECISIONS

NEXT = catalog.model("qwen3-next-80b-a3b")
KIMI = catalog.model("kimi-linear-48b-a3b")
DENSE = catalog.model("qwen3.5-9b")
BIASES_OF_ROUTER = 26 * 256
"""Kimi Linear's e_score_correction_bias, which is no parameter of a gradient and not counted."""


def request(model: Model = DENSE, *, seq_len: int = 8192, engine: str = "any") -> PlanRequest:
    return PlanRequest(
        model=model, cluster=catalog.cluster("h100-8x4"), seq_len=seq_len, global_batch=256,
        precision=PRECISIONS["bf16"], stack=stack_for_engine(engine), engine=engine,
    )  # fmt: skip


def linear_part(model: Model, plan: Plan | None = None, *, seq_len: int = 8192) -> float:
    return estimate_plan(request(model, seq_len=seq_len), plan or Plan(data_shard=32)).step.components_s[
        "linear_attention"
    ]


# --- parameters and FLOPs ---


def test_parameters_of_two_models():
    """Totals as the names of both say; the indexes of their weights were not opened."""
    assert count_parameters(model_row(NEXT)).total == pytest.approx(81_324_862_720, rel=1e-12)
    assert count_parameters(model_row(KIMI)).total + BIASES_OF_ROUTER == pytest.approx(49_122_681_728, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "total"),
    [("qwen3.5-27b", 27e9), ("qwen3.5-9b", 9e9), ("qwen3.5-4b", 4.2e9), ("qwen3.5-35b-a3b", 35e9),
     ("qwen3.5-397b-a17b", 397e9), ("olmo-hybrid-7b", 7.4e9)],
)  # fmt: skip
def test_the_others_have_the_sizes_of_their_names(name, total):
    model = replace(catalog.model(name), num_mtp_layers=0)
    assert count_parameters(model_row(model)).total == pytest.approx(total, rel=0.02)


def test_flops_are_megatrons_count():
    """`gdn_layer_flops` of Megatron-Core's training.py for the shapes of Qwen3-Next, which are its defaults."""
    h, qk, v, heads = 2048, 128 * 16, 128 * 32, 32
    theirs = 2 * (h * (2 * qk + 2 * v + 2 * heads) + 4 * (2 * qk + v) + heads * 128**2 * 4 + h * v)
    table = model_row(NEXT)
    ours = 2 * linear_attention.matrices(table) + linear_attention.model_flops_per_token(table)
    assert ours == theirs


def test_flops_are_six_per_parameter_the_scores_and_the_rule():
    table = model_row(replace(NEXT, num_mtp_layers=0))
    core = 3 * 12 * 2 * 16 * 512 * 4096 / 2
    rule = 3 * 36 * linear_attention.model_flops_per_token(table)
    expected = 6 * count_parameters(table).active + core + rule
    assert float(model_flops_per_token(table, seq_len=4096)) == pytest.approx(expected)


def test_flops_grow_with_the_sequence_by_layers_of_full_attention_only():
    model = replace(NEXT, num_mtp_layers=0)
    short, long = (float(model_flops_per_token(model_row(model), seq_len=s)) for s in (8192, 16_384))
    assert long - short == pytest.approx(3 * 12 * 2 * 16 * 512 * (16_384 - 8192) / 2)


def test_a_prediction_module_has_full_attention():
    one, none = (count_parameters(model_row(replace(NEXT, num_mtp_layers=n))).total for n in (1, 0))
    full = replace(NEXT, linear_attention=None, num_mtp_layers=0)
    layer = (
        count_parameters(model_row(replace(full, num_layers=2))).total
        - count_parameters(model_row(replace(full, num_layers=1))).total
    )
    assert one - none == pytest.approx(layer + 2 * 2048**2 + 3 * 2048)


def test_the_gate_is_one_more_projection_of_the_queries():
    gated, plain = (
        count_parameters(model_row(replace(DENSE, attention=replace(DENSE.attention, output_gate=gate)))).total
        for gate in (True, False)
    )
    assert gated - plain == pytest.approx(8 * 4096 * 16 * 256)


@settings(max_examples=25, deadline=None)
@given(
    heads=st.integers(1, 64),
    repeat=st.integers(1, 4),
    key=st.sampled_from((32, 64, 96, 128, 256)),
    value=st.sampled_from((32, 64, 128, 192)),
    kind=st.sampled_from(LinearKind),
    pattern=st.lists(st.booleans(), min_size=1, max_size=8),
)
def test_parameters_of_any_shape_are_those_of_its_tensors(heads, repeat, key, value, kind, pattern):
    """The tensors of `GatedDeltaNet` and `KimiDeltaAttention`, one by one."""
    n, h = heads * repeat, 640
    K, V = heads * key, n * value
    linear = LinearAttention(
        kind=kind, num_key_heads=heads, num_value_heads=n, key_head_dim=key, value_head_dim=value,
        pattern=tuple(pattern),
    )  # fmt: skip
    tensors = [h * K, h * K, h * V, h * n, V * h, 4 * K, 4 * K, 4 * V, n, value]
    if kind is LinearKind.GDN:
        tensors += [h * V, h * n, n]
    else:
        tensors += [h * value, value * V, h * value, value * K, K]
    model = replace(DENSE, hidden=h, num_layers=len(pattern), linear_attention=linear)
    none = replace(model, linear_attention=None)
    a = model.attention
    full = h * a.head_dim * (2 * a.num_heads + 2 * a.num_kv_heads) + a.num_heads * a.head_dim * h + 2 * a.head_dim
    found = count_parameters(model_row(model)).total - count_parameters(model_row(none)).total
    assert found == pytest.approx(sum(pattern) * (sum(tensors) - full), rel=1e-9, abs=1)


# --- time ---


MEASURED = tomllib.loads((files("meshwright.calibration") / "data" / "delta_rule.toml").read_text(encoding="utf-8"))[
    "measured"
]
UNITS_AND_RATES = {"h200": (132, 989e12, 4.8e12), "gb200": (148, 2500e12, 8e12)}


@pytest.mark.parametrize(
    "row", MEASURED, ids=lambda r: f"{r['device']}-{r['rule']}-{r['pass']}-{r['heads']}-{r['tokens']}x{r['sequences']}"
)
def test_published_kernel_times(row):
    """Within a quarter of what flash-linear-attention's kernels take."""
    units, peak, bandwidth = UNITS_AND_RATES[row["device"]]
    linear = LinearAttention(
        kind=LinearKind(row["rule"]), num_key_heads=row["heads"], num_value_heads=row["heads"], key_head_dim=128,
        value_head_dim=128, pattern=(True,),
    )  # fmt: skip
    passes = linear_attention.rule_passes(
        model_row(replace(DENSE, linear_attention=linear)), tokens=row["tokens"],
        seq_len=row["tokens"] / row["sequences"], tensor=1, flops_per_s=0.6 * peak, bytes_per_s=0.85 * bandwidth,
        num_units=units,
    )  # fmt: skip
    found = passes.forward_s if row["pass"] == "forward" else passes.input_s
    assert found == pytest.approx(row["seconds"], rel=0.25)


def test_a_plan_is_costed():
    parts = estimate_plan(request(), Plan(data_shard=32)).step.components_s
    assert parts["linear_attention"] > parts["attention_core"] > 0


def test_long_contexts_cost_linear_layers_what_their_tokens_cost():
    """Full attention of eight layers grows with the square, linear attention of 24 with the tokens."""
    short, long = (estimate_plan(
        replace(request(seq_len=s), global_batch=256 * 8192 // s), Plan(data_shard=32)
    ).step.components_s for s in (8192, 65_536))  # fmt: skip
    assert long["linear_attention"] == pytest.approx(short["linear_attention"], rel=0.1)
    assert long["attention_core"] > 6 * short["attention_core"]


def test_kimis_decays_of_channels_cost_more():
    delta = replace(DENSE, linear_attention=replace(DENSE.linear_attention, num_key_heads=32))
    kimi = replace(delta, linear_attention=replace(delta.linear_attention, kind=LinearKind.KDA))
    assert linear_part(kimi) > 1.1 * linear_part(delta)


@settings(max_examples=10, deadline=None)
@given(num=st.integers(0, 6))
def test_time_is_linear_in_the_number_of_linear_layers(num):
    def time(linear: int) -> float:
        pattern = tuple(index < linear for index in range(8))
        model = replace(DENSE, linear_attention=replace(DENSE.linear_attention, pattern=pattern))
        return linear_part(model)

    assert time(num) + time(num + 2) == pytest.approx(2 * time(num + 1))


def test_tensor_parallelism_divides_the_rule_until_a_sequence_binds():
    one, two = (linear_part(DENSE, Plan(tensor=t, data_shard=32 // t)) for t in (1, 2))
    assert one < two * 2 < 3 * one


# --- memory ---


def test_kept_bytes_are_those_of_the_saved_tensors():
    """At d_k = d_v: the convolution's input, q, k, v, inverse, output, gate, product, and 12 bytes per head."""
    table = model_row(DENSE)
    K, V, n = 2048, 4096, 32
    expected = 2 * (2 * K + V + 2 * 4096 + V + n * 64 + 2 * V + V) + 12 * n
    found = linear_attention.kept_bytes_per_token(table, precision_row(PRECISIONS["bf16"]))
    assert found == pytest.approx(expected)


def test_memory_does_not_grow_with_the_context_per_token():
    constants, plan = memory_constants(stack_for_engine("any")), plan_row(Plan())

    def kept(seq_len: int) -> float:
        batch, precision = BatchTable(seq_len=seq_len, global_batch=8), precision_row(PRECISIONS["bf16"])
        return float(layer_bytes(model_row(DENSE), batch, plan, precision, constants, 1.0).dense)

    assert kept(1024) == pytest.approx(kept(1_048_576))


# --- what is refused ---


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(tensor=32), "does not divide the 16 key and 32 value heads"),
        (Plan(tensor=4, context=8), "tensor 4 x context 8 does not divide the 16 key and 32 value heads"),
    ],
)
def test_plans_that_do_not_hold(plan, message):
    found = violations(plan, context=legality_context(request()))
    assert message in " ".join(v.message for v in found)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (replace(DENSE, linear_attention=replace(DENSE.linear_attention, pattern=(False,))), "names no layer"),
        (replace(DENSE, linear_attention=replace(DENSE.linear_attention, num_key_heads=5)), "32 and 5"),
        (replace(DENSE, attention=replace(DENSE.attention, window=8, num_windowed_layers=1)), "no sliding windows"),
        (replace(KIMI, attention=replace(KIMI.attention, output_gate=True)), "no output_gate"),
    ],
)
def test_contradictions(model, message):
    assert message in "; ".join(contradictions(model))


@pytest.mark.parametrize("engine", ["native", "torchtitan", "megatron", "maxtext"])
def test_no_engine_trains_it(engine):
    run = from_options(model="qwen3.5-9b", cluster="h100-8x1", global_batch=256, sequence_length=8192, engine=engine)
    found = [u for u in check_export(run) if u.key == "model.linear_attention"]
    assert len(found) == 1
    assert "layers of linear attention (gdn), which no engine here builds" in found[0].reason


def test_serving_is_refused_with_a_reason():
    with pytest.raises(InputError, match="serving models with linear attention is not estimated"):
        served_parameters(NEXT)


def test_adapters_of_attention_are_in_its_layers_only():
    lora = Lora(rank=8, targets=("query", "up"))
    row = model_row(DENSE, lora=lora)
    none = model_row(replace(DENSE, linear_attention=None), lora=lora)
    assert none.lora_column_outputs - row.lora_column_outputs == pytest.approx(
        0.75 * 16 * 256 * 2
    )  # with the output's gate
    assert np.all(row.lora_column_inputs == 4096 * 1.25)
