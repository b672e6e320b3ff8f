"""Parameters and FLOPs against counts by hand. Published figures: tests/published/test_flops.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.tiny_models import SMALL

from meshwright.catalog import lookup as catalog
from meshwright.cost.flops import (
    AttentionCount,
    attention_core_flops_per_token,
    attention_parameters,
    count_parameters,
    keys_seen,
    model_flops_per_token,
)
from meshwright.cost.tables import ModelTable, model_row
from meshwright.specs.model import Attention, AttentionKind, Experts, Lora, Model


def test_every_matrix_of_a_dense_model_counts_once():
    p = count_parameters(model_row(SMALL))
    attention = 8 * 8 + 2 * (8 * 4) + 8 * 8  # query, key and value, output
    layer = attention + 3 * 8 * 16 + 2 * 8  # gate, up and down; two norms
    assert p.attention_layer == attention
    assert p.total == 3 * layer + 8 + 2 * 100 * 8
    assert p.active == 3 * (attention + 3 * 8 * 16) + 100 * 8


def test_a_tied_head_is_stored_once_and_computed():
    tied = count_parameters(model_row(replace(SMALL, tied_embeddings=True)))
    untied = count_parameters(model_row(SMALL))
    assert untied.total - tied.total == 100 * 8
    assert tied.active == untied.active


def test_a_layer_without_a_gate_has_two_matrices():
    gated = count_parameters(model_row(SMALL)).dense_ffn_layer
    assert count_parameters(model_row(replace(SMALL, gated_ffn=False))).dense_ffn_layer == gated * 2 / 3


def test_latent_attention():
    """DeepSeek-V2, arXiv 2405.04434, section 2.1: down and up for queries, down and up for keys and values."""
    latent = Attention(
        kind=AttentionKind.MLA, num_heads=4, num_kv_heads=4, head_dim=6, value_head_dim=3,
        query_lora_rank=5, kv_lora_rank=7, rope_head_dim=2,
    )  # fmt: skip
    expected = 8 * 5 + 5 * 4 * 6 + 8 * (7 + 2) + 7 * 4 * (4 + 3) + 4 * 3 * 8
    assert attention_parameters(model_row(replace(SMALL, attention=latent))) == expected
    direct = replace(latent, query_lora_rank=0)
    without = attention_parameters(model_row(replace(SMALL, attention=direct)))
    assert without == expected - 8 * 5 - 5 * 4 * 6 + 8 * 4 * 6


def test_a_token_uses_its_experts_only():
    experts = Experts(num_experts=10, top_k=2, ffn_hidden=4, num_shared=1, num_dense_layers=1)
    p = count_parameters(model_row(replace(SMALL, experts=experts)))
    expert, router = 3 * 8 * 4, 8 * 10
    assert p.total - p.active == 2 * 8 * expert + 3 * 2 * 8 + 8 + 100 * 8  # idle experts, norms, embedding
    assert (p.expert, p.experts_layer, p.shared_layer, p.router_layer) == (expert, 960, expert, router)


@pytest.mark.parametrize("model", [SMALL, replace(SMALL, num_layers=5, vocab=77)], ids=["3", "5"])
def test_six_flops_per_active_parameter_and_the_scores(model: Model):
    table = model_row(model)
    core = model.num_layers * 2 * (64 / 2) * 4 * (2 + 2)
    assert attention_core_flops_per_token(table, seq_len=64) == core
    assert model_flops_per_token(table, seq_len=64) == 6 * count_parameters(table).active + 3 * core


def test_full_counting_doubles_the_scores():
    table = model_row(SMALL)
    causal = attention_core_flops_per_token(table, seq_len=64)
    assert attention_core_flops_per_token(table, seq_len=64, count=AttentionCount.FULL) == 2 * causal


def test_windowed_layers_see_their_window():
    windowed = replace(SMALL, attention=replace(SMALL.attention, window=16, num_windowed_layers=2))
    per_key = 2 * 4 * (2 + 2)
    expected = per_key * (64 / 2 + 2 * (16 - 16 * 16 / 128))
    assert attention_core_flops_per_token(model_row(windowed), seq_len=64) == expected


@pytest.mark.parametrize(("seq_len", "window"), [(1000, 0), (1000, 1), (1000, 128), (1000, 1000), (100, 128)])
def test_keys_seen_is_the_mean_over_positions(seq_len: int, window: int):
    """Counting half of the diagonal, as s/2 does."""
    positions = np.arange(seq_len) + 0.5
    expected = np.minimum(positions, window or seq_len).mean()
    assert keys_seen(seq_len, window=window) == pytest.approx(expected, abs=0.01)


def test_a_prediction_module_is_a_layer_a_projection_and_a_head():
    table = model_row(SMALL)
    more = count_parameters(model_row(replace(SMALL, num_mtp_layers=1)))
    layer = 64 + 64 + 64 + 3 * 8 * 16
    assert more.active - count_parameters(table).active == layer + 2 * 8 * 8 + 100 * 8
    assert more.total - count_parameters(table).total == layer + 2 * 8 + 2 * 8 * 8 + 3 * 8  # norms; its head is shared


def test_adapters_train_and_the_base_only_passes_gradients_on():
    lora = Lora(rank=4, targets=("query", "down"))
    table = model_row(SMALL, lora=lora)
    adapters = 3 * 4 * ((8 + 8) + (16 + 8))
    core = attention_core_flops_per_token(table, seq_len=64)
    base = count_parameters(table).active
    assert model_flops_per_token(table, seq_len=64) == 4 * base + 6 * adapters + 3 * core


def test_arrays_give_what_rows_give():
    names = ["llama3-8b", "deepseek-v3", "gpt-oss-120b", "gpt3-175b", "mixtral-8x7b"]
    rows = [model_row(catalog.model(n)) for n in names]
    together = model_flops_per_token(ModelTable.stack(rows), seq_len=4096)
    assert together == pytest.approx([model_flops_per_token(r, seq_len=4096) for r in rows], rel=1e-12)
