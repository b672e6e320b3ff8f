from dataclasses import replace

import pytest

from meshwright.catalog import lookup as catalog
from meshwright.cost.flops import count_parameters
from meshwright.cost.tables import model_row
from meshwright.errors import InputError
from meshwright.planner.request import request_for
from meshwright.runfile import from_options
from meshwright.specs.adapters import absent_targets, adapted_matrices, quantised_base
from meshwright.specs.model import BaseFormat, Lora

EVERYTHING = ("query", "key", "value", "output", "gate", "up", "down")


def adapters(name: str, *targets: str, rank: int = 8) -> int:
    """Parameters of all adapters."""
    model = catalog.model(name)
    layer = count_parameters(model_row(model, lora=Lora(rank=rank, targets=targets))).lora_layer
    return round(float(layer) * model.num_layers)


def test_a_hybrid_has_adapters_where_its_layers_have_the_matrices():
    """Nemotron-H 8B: of 52 layers 4 have attention and 24 a feed-forward block of two matrices."""
    model = catalog.model("nemotron-h-8b")
    assert (model.layer_pattern.count("*"), model.layer_pattern.count("-")) == (4, 24)
    heads, h, f = model.attention.num_heads * model.attention.head_dim, model.hidden, model.ffn_hidden
    assert adapters("nemotron-h-8b", "query") == 4 * 8 * (h + heads)
    assert adapters("nemotron-h-8b", "up", "down") == 24 * 8 * 2 * (h + f)
    assert absent_targets(model, ("gate", "up")) == ("gate",)


def test_full_attention_beside_linear_attention_has_adapters_of_its_gate_too():
    model = catalog.model("qwen3.5-9b")
    a, num = model.attention, model.num_layers - sum(model.linear_layers)
    assert adapters("qwen3.5-9b", "query") == num * 8 * (model.hidden + 2 * a.num_heads * a.head_dim)


def test_dense_layers_of_a_mixture_have_adapters_and_its_experts_none():
    model = catalog.model("deepseek-v3")
    assert adapters("deepseek-v3", "up") == 3 * 8 * (model.hidden + model.ffn_hidden)
    assert absent_targets(catalog.model("qwen3-30b-a3b"), EVERYTHING) == ("gate", "up", "down")


def test_keys_and_values_of_latent_attention_share_their_matrices():
    model = catalog.model("deepseek-v3")
    both, keys = (adapted_matrices(model, t) for t in (("value", "key"), ("key",)))
    assert both == keys
    assert [(m.inputs, m.outputs) for m in keys] == [(7168, 576), (512, 128 * 256)]
    assert [m.target for m in adapted_matrices(model, ("value",))] == ["value", "value"]


@pytest.mark.parametrize(
    ("name", "target"),
    [("nemotron-h-8b", "gate"), ("qwen3-30b-a3b", "up"), ("deepseek-v4-flash", "query"), ("kimi-k2", "qkv")],
)
def test_a_plan_with_adapters_of_no_matrix_is_refused(name, target):
    run = from_options(model="llama3.1-8b", cluster="h100-8x1", global_batch=8, sequence_length=4096)
    run = replace(run, model=catalog.model(name), lora=Lora(targets=("output", target)))
    with pytest.raises(InputError, match="has such a matrix"):
        request_for(run)


@pytest.mark.parametrize(
    ("base_format", "bits"),
    [("nf4", 4 + 32 / 64), ("nf4_double", 4 + 8 / 64 + 32 / (64 * 256))],  # QLoRA, section 3: 0.5 and 0.127 a weight
)
def test_a_base_of_4_bits_has_its_scales(base_format, bits):
    base = quantised_base(catalog.model("llama3.1-8b"), BaseFormat(base_format))
    assert base.bytes_per_weight == pytest.approx(bits / 8)
    assert (base.largest_matrix, base.num_matrices) == (4096 * 14_336, 7)


def test_a_base_of_8_bits_has_a_scale_for_each_output():
    h, kv, f = 4096, 1024, 14_336
    rows, weights = h + 2 * kv + h + 2 * f + h, 2 * h * (h + kv) + 3 * h * f
    base = quantised_base(catalog.model("llama3.1-8b"), BaseFormat.INT8)
    assert base.bytes_per_weight == pytest.approx(1 + 4 * rows / weights)


def test_experts_are_quantised_too():
    model = catalog.model("qwen3-30b-a3b")
    dense = quantised_base(replace(model, experts=None, ffn_hidden=768), BaseFormat.INT8)
    sparse = quantised_base(model, BaseFormat.INT8)
    assert sparse.largest_matrix == 2048 * 4096  # the query's
    assert sparse.num_matrices == dense.num_matrices - 3
    assert sparse.bytes_per_weight == pytest.approx(1 + 4 * (1 / 2048 * 2 + 1 / 768) / 3, rel=1e-3)


def test_a_base_in_full_has_nothing_of_it():
    row = model_row(catalog.model("llama3.1-8b"), lora=Lora())
    assert (row.quantised_bytes, row.quantised_matrix, row.num_quantised) == (0, 0, 0)
