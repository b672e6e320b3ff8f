"""What stands in Megatron's layer specifications where Megatron's own part needs Transformer Engine.

Norm        Megatron's plain one refuses sequence parallelism
Router      Megatron's product of router and tokens calls Transformer Engine; its balance loss counts too few tokens
Attention   PyTorch's fused kernels; Megatron's plain one writes out all scores

S tokens of a sequence, B sequences, H query heads, G key/value heads of this process, K and V widths of a head,
N tokens, D hidden, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional


class Norm(nn.RMSNorm):
    """Its gradient is summed over tensor ranks where each of them sees a part of the tokens."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        device = torch.empty(0, device="cuda").device
        super().__init__(hidden_size, eps=eps, device=device, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]


class Router(TopKRouter):
    """Megatron's, its scores made by PyTorch in fp32, and its balance loss a mean over the tokens of the global batch.

    Megatron divides all gradients by the labels of the global batch, and multiplies this loss by tokens before. Until
    0.18 by those of one sequence on one tensor rank, however many sequences and ranks have parts of it.
    """

    labels_per_token = 1.0  # labels that count over tokens, of the global batch; `Passes` sets it

    def gating(self, input: Tensor) -> Tensor:
        """Logits of all experts, fp32 [..., E]."""
        return functional.linear(input.float(), self.weight.float())

    def attach_and_log_load_balancing_loss(self, activation: Tensor, *args: Any, **others: Any) -> Tensor:
        """`activation` [N, E], whose backward pass also adds the gradient of the loss."""
        tokens = len(activation) * self.tp_cp_group.size()  # the ranks of the group have parts of one loss
        others["valid_token_count"] = tokens * self.labels_per_token
        return super().attach_and_log_load_balancing_loss(activation, *args, **others)


class Attention(nn.Module):
    """softmax(q k / sqrt(K)) v."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self,
        query_SBHK: Tensor,
        key_SBGK: Tensor,
        value_SBGV: Tensor,
        attention_mask: Tensor | None,
        **_: Any,
    ) -> Tensor:
        """[S, B, H V]. The mask [B, 1, S, S] is true where nothing is seen, as Megatron has it; None: causal."""
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
    """The layers of a stage, Megatron's own but for the parts above."""
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
    )
    block.layer_norm = Norm
    for layer in block.layer_specs:
        parts, attention = layer.submodules, layer.submodules.self_attention.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = Norm
        for name in ("q_layernorm", "k_layernorm"):
            if getattr(attention, name) is not IdentityOp:
                setattr(attention, name, Norm)
        attention.core_attention = Attention
        if parts.mlp.module is MoELayer:
            parts.mlp.submodules.router = Router
    return block
