"""Names of our tensors in the files of each family.

Our name of a tensor is its path in the model (`layers.3.attention.query.weight`). The tables give the part after the
number of the layer. A stack of experts [E, ...] is E tensors in a file: `{expert}` stands for their number.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FusedTensor:
    """A tensor of a file that holds several of ours, or one in another memory layout. Experts are stacked as ours."""

    parts: tuple[str, ...]  # ours, which follow one another along their outputs
    alternates: bool = False  # their outputs alternate instead: first of each part, second of each ...
    is_transposed: bool = False  # [inputs, outputs]


OUTSIDE_LAYERS = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
SCORES = "score.weight"
"""The head of a reward model."""
MODULES_TO_SAVE = {"embed_tokens": "embedding", "lm_head": "head"}
"""Modules that PEFT trains whole beside adapters -> names in a run file."""

PREDICTIONS = {
    "embedding_norm.weight": "enorm.weight",
    "hidden_norm.weight": "hnorm.weight",
    "projection.weight": "eh_proj.weight",
    "norm.weight": "shared_head.norm.weight",
}
"""Tensors of a multi-token prediction module besides its block, within its layer."""

PREDICTION_COPIES = {"embed_tokens.weight": "embedding.weight", "shared_head.head.weight": "head.weight"}
"""Copies of the model's own tensors that files have in every prediction module, with our names."""

NORMS = {"attention_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight"}

GROUPED_ATTENTION = {
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.query.bias": "self_attn.q_proj.bias",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.key.bias": "self_attn.k_proj.bias",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.value.bias": "self_attn.v_proj.bias",
    "attention.query_norm.weight": "self_attn.q_norm.weight",
    "attention.key_norm.weight": "self_attn.k_norm.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "attention.output.bias": "self_attn.o_proj.bias",
}

LATENT_ATTENTION = {
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.query_down.weight": "self_attn.q_a_proj.weight",
    "attention.query_down.bias": "self_attn.q_a_proj.bias",
    "attention.query_norm.weight": "self_attn.q_a_layernorm.weight",
    "attention.query_up.weight": "self_attn.q_b_proj.weight",
    "attention.kv_down.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.kv_down.bias": "self_attn.kv_a_proj_with_mqa.bias",
    "attention.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attention.kv_up.weight": "self_attn.kv_b_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "attention.output.bias": "self_attn.o_proj.bias",
}

DENSE = {
    "ffn.gate.weight": "mlp.gate_proj.weight",
    "ffn.up.weight": "mlp.up_proj.weight",
    "ffn.down.weight": "mlp.down_proj.weight",
}

MIXTRAL_EXPERTS = {
    "ffn.router.weight": "block_sparse_moe.gate.weight",
    "ffn.experts.gate": "block_sparse_moe.experts.{expert}.w1.weight",
    "ffn.experts.up": "block_sparse_moe.experts.{expert}.w3.weight",
    "ffn.experts.down": "block_sparse_moe.experts.{expert}.w2.weight",
}

MINIMAX_EXPERTS = MIXTRAL_EXPERTS | {"ffn.router.bias_E": "block_sparse_moe.e_score_correction_bias"}

EXPERTS = {
    "ffn.router.weight": "mlp.gate.weight",
    "ffn.router.bias_E": "mlp.gate.e_score_correction_bias",
    "ffn.experts.gate": "mlp.experts.{expert}.gate_proj.weight",
    "ffn.experts.up": "mlp.experts.{expert}.up_proj.weight",
    "ffn.experts.down": "mlp.experts.{expert}.down_proj.weight",
    "ffn.shared.gate.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared.up.weight": "mlp.shared_experts.up_proj.weight",
    "ffn.shared.down.weight": "mlp.shared_experts.down_proj.weight",
}

OUTPUT_NORMS = {
    "attention_output_norm.weight": "post_attention_layernorm.weight",
    "ffn_output_norm.weight": "post_feedforward_layernorm.weight",
}

NORMS_AROUND = OUTPUT_NORMS | {
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
}

FUSED_ATTENTION = {
    "attention.query.weight": "self_attn.qkv_proj.weight",
    "attention.key.weight": "self_attn.qkv_proj.weight",
    "attention.value.weight": "self_attn.qkv_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
}

FUSED_DENSE = {
    "ffn.gate.weight": "mlp.gate_up_proj.weight",
    "ffn.up.weight": "mlp.gate_up_proj.weight",
    "ffn.down.weight": "mlp.down_proj.weight",
}

FUSED = {
    "self_attn.qkv_proj.weight": FusedTensor(
        parts=("attention.query.weight", "attention.key.weight", "attention.value.weight")
    ),
    "mlp.gate_up_proj.weight": FusedTensor(parts=("ffn.gate.weight", "ffn.up.weight")),
}

SINKS = {"attention.sinks": "self_attn.sinks"}

STACKED_EXPERTS = {
    "ffn.router.weight": "mlp.router.weight",
    "ffn.router.bias": "mlp.router.bias",
    "ffn.experts.gate": "mlp.experts.gate_up_proj",
    "ffn.experts.up": "mlp.experts.gate_up_proj",
    "ffn.experts.down": "mlp.experts.down_proj",
    "ffn.experts.gate_bias": "mlp.experts.gate_up_proj_bias",
    "ffn.experts.up_bias": "mlp.experts.gate_up_proj_bias",
    "ffn.experts.down_bias": "mlp.experts.down_proj_bias",
}

STACKED = {
    "mlp.experts.gate_up_proj": FusedTensor(
        parts=("ffn.experts.gate", "ffn.experts.up"), alternates=True, is_transposed=True
    ),
    "mlp.experts.gate_up_proj_bias": FusedTensor(
        parts=("ffn.experts.gate_bias", "ffn.experts.up_bias"), alternates=True
    ),
    "mlp.experts.down_proj": FusedTensor(parts=("ffn.experts.down",), is_transposed=True),
    "mlp.experts.down_proj_bias": FusedTensor(parts=("ffn.experts.down_bias",)),
}
