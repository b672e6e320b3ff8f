"""Laws of parameter and FLOP counts over random models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshwright.cost.flops import (
    AttentionCount,
    attention_core_flops_per_token,
    count_parameters,
    keys_seen,
    model_flops_per_token,
)
from meshwright.cost.tables import ModelTable, model_row
from meshwright.specs.model import Attention, AttentionKind, Experts, Lora, Model

SEQUENCES = st.integers(1, 1 << 17)


@st.composite
def attentions(draw, num_layers: int) -> Attention:
    kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    window = draw(st.sampled_from([0, 128, 4096]))
    values = {
        "num_heads": kv_heads * draw(st.integers(1, 8)),
        "num_kv_heads": kv_heads,
        "head_dim": draw(st.sampled_from([64, 128, 192])),
        "window": window,
        "num_windowed_layers": draw(st.integers(0, num_layers)) if window else 0,
        "bias": draw(st.booleans()),
    }
    if draw(st.booleans()):
        values |= {
            "kind": AttentionKind.MLA,
            "query_lora_rank": draw(st.sampled_from([0, 768])),
            "kv_lora_rank": 512,
            "rope_head_dim": 32,
            "value_head_dim": 96,
        }
    return Attention(**values)


@st.composite
def models(draw) -> Model:
    num_layers = draw(st.integers(1, 100))
    experts = None
    if draw(st.booleans()):
        num_experts = draw(st.integers(1, 256))
        experts = Experts(
            num_experts=num_experts,
            top_k=draw(st.integers(1, num_experts)),
            ffn_hidden=draw(st.integers(64, 4096)),
            num_shared=draw(st.integers(0, 2)),
            num_dense_layers=draw(st.integers(0, num_layers)),
        )
    return Model(
        name="random",
        hidden=64 * draw(st.integers(1, 256)),
        num_layers=num_layers,
        vocab=draw(st.integers(1000, 300_000)),
        attention=draw(attentions(num_layers)),
        ffn_hidden=draw(st.integers(64, 60_000)),
        gated_ffn=draw(st.booleans()),
        experts=experts,
        tied_embeddings=draw(st.booleans()),
        num_mtp_layers=draw(st.integers(0, 2)),
    )


def flops(model: Model, seq_len: int, lora: Lora | None = None) -> float:
    return float(model_flops_per_token(model_row(model, lora=lora), seq_len=seq_len))


@given(models())
def test_counts_are_whole_and_a_token_uses_no_more_than_there_is(model):
    p = count_parameters(model_row(replace(model, tied_embeddings=False, num_mtp_layers=0)))
    assert int(p.total) == p.total
    assert 0 < p.active < p.total


@given(models(), SEQUENCES, st.sampled_from(["hidden", "num_layers", "vocab", "ffn_hidden", "num_mtp_layers"]))
def test_a_larger_model_costs_at_least_as_much(model, seq_len, what):
    larger = replace(model, **{what: 2 * getattr(model, what)})
    assert flops(larger, seq_len) >= flops(model, seq_len)


@given(models(), SEQUENCES, SEQUENCES)
def test_longer_sequences_cost_more_per_token(model, one, other):
    short, long = sorted((one, other))
    assert flops(model, short) <= flops(model, long) * (1 + 1e-12)


@given(models(), SEQUENCES)
def test_six_per_parameter_is_the_least(model, seq_len):
    assert flops(model, seq_len) >= 6 * float(count_parameters(model_row(model)).active)


@given(models(), SEQUENCES)
def test_full_counting_is_between_once_and_twice_causal_counting(model, seq_len):
    table = model_row(model)
    causal = attention_core_flops_per_token(table, seq_len=seq_len)
    full = attention_core_flops_per_token(table, seq_len=seq_len, count=AttentionCount.FULL)
    assert causal * (1 - 1e-12) <= full <= 2 * causal * (1 + 1e-12)


@given(st.integers(1, 3000), st.integers(1, 4000))
def test_a_query_sees_the_mean_of_what_positions_see(seq_len, window):
    seen = float(keys_seen(seq_len, window=window))
    brute = float(np.minimum(np.arange(seq_len) + 0.5, window).mean())
    assert seen <= min(window, seq_len) + 1e-9
    assert seen == pytest.approx(brute, abs=0.13 / seq_len + 1e-9)  # the diagonal's one half-key


@given(models(), st.integers(1, 64), SEQUENCES)
def test_adapters_cost_between_four_and_six_per_parameter(model, rank, seq_len):
    assume(model.num_mtp_layers == 0)
    lora = Lora(rank=rank, targets=("query", "value"))
    table = model_row(model, lora=lora)
    adapters = 6 * model.num_layers * rank * table.lora_width
    full = flops(model, seq_len)
    core = 3 * float(attention_core_flops_per_token(table, seq_len=seq_len))
    assert flops(model, seq_len, lora) == pytest.approx((full - core) * 4 / 6 + core + adapters)


@given(st.lists(models(), min_size=1, max_size=5), SEQUENCES)
def test_arrays_give_what_rows_give(several, seq_len):
    rows = [model_row(m) for m in several]
    together = np.broadcast_to(model_flops_per_token(ModelTable.stack(rows), seq_len=seq_len), len(rows))
    assert together == pytest.approx([float(model_flops_per_token(r, seq_len=seq_len)) for r in rows])
