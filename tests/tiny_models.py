"""Models that several test files build: dense, a mixture of experts, latent attention; one to count by hand."""

from __future__ import annotations

from dataclasses import replace

from meshwright.specs.model import Attention, AttentionKind, Experts, Model, Router

DENSE = Model(
    name="tiny",
    hidden=32,
    num_layers=2,
    vocab=61,
    ffn_hidden=48,
    attention=Attention(num_heads=4, num_kv_heads=2, head_dim=8),
)
MIXTURE = replace(DENSE, ffn_hidden=0, experts=Experts(num_experts=4, top_k=2, ffn_hidden=24))
LATENT_ATTENTION = Attention(
    kind=AttentionKind.MLA,
    num_heads=4,
    num_kv_heads=4,
    head_dim=12,
    value_head_dim=8,
    query_lora_rank=16,
    kv_lora_rank=12,
    rope_head_dim=4,
)
LATENT = replace(
    DENSE,
    attention=LATENT_ATTENTION,
    experts=Experts(num_experts=4, top_k=2, ffn_hidden=24, num_shared=1, num_dense_layers=1, router=Router.SIGMOID),
)
SMALL = Model(
    name="small",
    hidden=8,
    num_layers=3,
    vocab=100,
    attention=Attention(num_heads=4, num_kv_heads=2, head_dim=2),
    ffn_hidden=16,
)
