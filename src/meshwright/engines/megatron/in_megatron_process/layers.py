"""Modules for Megatron's layer specifications, in place of those that need Transformer Engine.

SequenceParallelNorm      Megatron's norm without Transformer Engine refuses sequence parallelism
Fp32Router                Megatron's router GEMM calls Transformer Engine; its losses count too few tokens
FusedAttention            PyTorch's fused kernels; Megatron's own attention stores all scores

S tokens of a sequence, B sequences, H query heads, G key/value heads of this process, K and V widths of a head,
N tokens, D hidden, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional


class SequenceParallelNorm:
    """RMSNorm or LayerNorm whose gradients are summed over tensor ranks under sequence parallelism."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        kind, device = getattr(nn, config.normalization), torch.empty(0, device="cuda").device
        norm = kind(hidden_size, eps=eps, device=device, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class Fp32Router(TopKRouter):
    """Megatron's router with scores in fp32 by PyTorch and auxiliary losses per token of the global batch.

    Megatron divides all gradients by the number of labels in the global batch, and multiplies these losses by a number
    of tokens before. Until 0.18 the balance loss has the tokens of one sequence on one tensor rank, regardless of the
    number of sequences and ranks that contribute; the z-loss is divided by the tensor ranks although each adds its own
    tokens.
    """

    labels_per_token = 1.0  # ratio of trained labels to tokens in the global batch; set by `ForwardBackward`

    def gating(self, input: Tensor) -> Tensor:
        """Return the logits of all experts, fp32 [..., E]."""
        return functional.linear(input.float(), self.weight.float())

    def attach_and_log_load_balancing_loss(self, activation: Tensor, *args: Any, **others: Any) -> Tensor:
        """Return `activation` [N, E], whose backward pass also adds the gradient of the loss."""
        tokens = len(activation) * self.tp_cp_group.size()  # the loss is spread over the ranks of the group
        others["valid_token_count"] = tokens * self.labels_per_token
        return super().attach_and_log_load_balancing_loss(activation, *args, **others)

    def apply_z_loss(self, logits: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return `logits` [N, E], whose backward pass also adds the gradient of the z-loss."""
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None or not self.training or not torch.is_grad_enabled():
            return logits
        loss = coefficient * self.labels_per_token * logits.logsumexp(dim=-1).square().sum()
        return MoEAuxLossAutoScaler.apply(logits, loss)


class FusedAttention(nn.Module):
    """Attention, softmax(q k / sqrt(K)) v, by PyTorch's fused kernels."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self, query_SBHK: Tensor, key_SBGK: Tensor, value_SBGV: Tensor, attention_mask: Tensor | None, **_: Any
    ) -> Tensor:
        """Return [S, B, H V]. The mask [B, 1, S, S] is true for masked scores, as in Megatron; None: causal."""
        q_BHSK, k_BGSK, v_BGSV = (x.permute(1, 2, 0, 3) for x in (query_SBHK, key_SBGK, value_SBGV))
        repeats = q_BHSK.shape[1] // k_BGSK.shape[1]
        if repeats > 1:
            k_BGSK = k_BGSK.repeat_interleave(repeats, dim=1)
            v_BGSV = v_BGSV.repeat_interleave(repeats, dim=1)
        out_BHSV = functional.scaled_dot_product_attention(
            q_BHSK, k_BGSK, v_BGSV,
            attn_mask=None if attention_mask is None else ~attention_mask,
            is_causal=attention_mask is None,
            scale=self.scale,
        )  # fmt: skip
        return out_BHSV.permute(2, 0, 1, 3).flatten(2)


def layers_of(config: TransformerConfig, *, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Return the layer specifications of a stage: Megatron's own with the modules above."""
    block: Any = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    block.layer_norm = SequenceParallelNorm
    for layer in block.layer_specs:
        parts, attention = layer.submodules, layer.submodules.self_attention.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = SequenceParallelNorm
        for name in ("q_layernorm", "k_layernorm"):
            if getattr(attention, name) is not IdentityOp:
                setattr(attention, name, SequenceParallelNorm)
        attention.core_attention = FusedAttention
        if parts.mlp.module is MoELayer:
            parts.mlp.submodules.router = Fp32Router
    return block
