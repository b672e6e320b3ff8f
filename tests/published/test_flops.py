"""FLOPs per token that others published for models of the catalogue."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.catalog import lookup as catalog
from meshwright.cost.flops import attention_core_flops_per_token, model_flops_per_token
from meshwright.cost.tables import model_row
from meshwright.specs.model import Lora

# NVIDIA Megatron-Bridge performance summary: TFLOP/s per GPU over tokens/s per GPU of the same row. Attention counts
# its causal half. DeepSeek-V3 is printed without and with its multi-token prediction module.
MEGATRON_BRIDGE = [
    ("llama3.1-405b", 8192, 0, 2521e9),
    ("llama3.1-8b", 8192, 0, 51.48e9),
    ("llama3.1-70b", 8192, 0, 448.8e9),
    ("qwen3-235b-a22b", 4096, 0, 147.9e9),
    ("qwen3-30b-a3b", 4096, 0, 23.02e9),
    ("deepseek-v3", 4096, 0, 249.7e9),
    ("deepseek-v3", 4096, 1, 260.2e9),
    ("kimi-k2", 4096, 0, 204.6e9),
]


@pytest.mark.parametrize(("name", "seq_len", "num_mtp_layers", "published"), MEGATRON_BRIDGE)
def test_flops_per_token_within_half_a_percent(name, seq_len, num_mtp_layers, published):
    model = replace(catalog.model(name), num_mtp_layers=num_mtp_layers)
    flops = model_flops_per_token(model_row(model), seq_len=seq_len)
    assert flops == pytest.approx(published, rel=0.005)


def test_adapters_on_70b_are_four_per_parameter():
    """Megatron-Bridge 26.06, Llama 3 70B LoRA at 4096 tokens: 279.1 GFLOP per token, which leaves out the scores."""
    table = model_row(catalog.model("llama3-70b"), lora=Lora(rank=16))
    scores = 3 * attention_core_flops_per_token(table, seq_len=4096)
    assert model_flops_per_token(table, seq_len=4096) - scores == pytest.approx(279.1e9, rel=0.005)
