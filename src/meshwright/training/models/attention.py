"""Attention: grouped queries (Ainslie et al. 2023) and latent keys and values (DeepSeek-V2, section 2.1).

B sequences, T tokens, S keys, D hidden, H query heads, G key/value heads, K query/key width of a head, V
value width, R rotary part of K. Under tensor parallelism H and G are the heads of this rank: widths of heads
are constants, numbers of heads are read off the tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.kernels.attention.key_ranges import KeyRanges
from meshwright.kernels.attention.operation import attention
from meshwright.kernels.linear import Linear
from meshwright.kernels.rotary import rotate
from meshwright.specs.model import Model
from meshwright.training.models.norm import Norm, make_norm
from meshwright.training.models.rope import score_scale
from meshwright.training.models.token_layout import LayerLayout


class CoreAttention(nn.Module):
    """softmax(cap(q k scale)) v, the part without weights. Context parallelism puts its own in this place.

    `cap` limits the scores (`specs.model.Attention.score_cap`), 0: not. `window` is in tokens, 0: all; ranges have it.
    """

    def __init__(self, *, scale: float, cap: float = 0.0, window: int = 0) -> None:
        super().__init__()
        self.scale, self.cap, self.window = scale, cap, window
        self.dropout = nn.Dropout(0.0)  # its rate, of the probabilities; the kernel drops them

    def forward(
        self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, layout: LayerLayout, sinks_H: Tensor | None = None
    ) -> Tensor:
        """[B, T, H, V]."""
        return self.attend(q_BTHK, k_BTGK, v_BTGV, ranges=layout.ranges, sinks_H=sinks_H)

    def attend(
        self, q_BTHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor, *, ranges: KeyRanges | None, sinks_H: Tensor | None = None
    ) -> Tensor:
        """[B, T, H, V], by the route that `kernels` chooses; see `kernels.attention.operation.attention`."""
        dropout = self.dropout.p if self.training else 0.0
        return attention(
            q_BTHK, k_BSGK, v_BSGV, scale=self.scale, cap=self.cap, ranges=ranges, sinks_H=sinks_H, dropout=dropout
        )


class GroupedAttention(nn.Module):
    """Each key/value head serves H / G query heads."""

    sinks: nn.Parameter | None
    qkv: nn.Module | None

    def __init__(self, model: Model, *, windowed: bool) -> None:
        super().__init__()
        a = model.attention
        self.head_dim, self.value_dim, self.norms_all_heads = a.head_dim, a.v_dim, a.qk_norm_across_heads
        self.query = Linear(model.hidden, a.num_heads * a.head_dim, bias=a.bias)
        self.key = Linear(model.hidden, a.num_kv_heads * a.head_dim, bias=a.bias)
        self.value = Linear(model.hidden, a.num_kv_heads * a.v_dim, bias=a.bias)
        self.query_norm = self._head_norm(model, num_heads=a.num_heads)
        self.key_norm = self._head_norm(model, num_heads=a.num_kv_heads)
        self.sinks = nn.Parameter(torch.empty(a.num_heads)) if a.sinks else None
        self.core = CoreAttention(
            scale=(a.score_divisor or a.head_dim) ** -0.5, cap=a.score_cap, window=a.window if windowed else 0
        )
        self.output = Linear(a.num_heads * a.v_dim, model.hidden, bias=a.has_output_bias)
        self.register_module("qkv", None)  # an adapter of query, key and value as one matrix (`lora.QkvAdapter`)

    def forward(self, x_BTD: Tensor, layout: LayerLayout) -> Tensor:
        """[B, T, D]."""
        q_BTX, k_BTX, v_BTX = self.query(x_BTD), self.key(x_BTD), self.value(x_BTD)
        if self.qkv is not None and not self.qkv.is_off:
            q_BTX, k_BTX, v_BTX = map(torch.add, (q_BTX, k_BTX, v_BTX), self.qkv(x_BTD))
        q_BTHK = self._normalised(self.query_norm, q_BTX)
        k_BTGK = self._normalised(self.key_norm, k_BTX)
        v_BTGV = v_BTX.unflatten(-1, (-1, self.value_dim))
        q_BTHK, k_BTGK = rotate(q_BTHK, k_BTGK, layout.cos_BT1J, layout.sin_BT1J)
        out_BTHV = self.core(q_BTHK, k_BTGK, v_BTGV, layout, self.own_sinks())
        return self.output(out_BTHV.flatten(-2))

    def own_sinks(self) -> Tensor | None:
        """The sinks of this rank's heads. Tensor parallelism puts its own in this place."""
        return self.sinks

    def _head_norm(self, model: Model, *, num_heads: int) -> nn.Module:
        if not model.attention.qk_norm:
            return nn.Identity()
        return make_norm(model, width=self.head_dim * (num_heads if self.norms_all_heads else 1))

    def _normalised(self, norm: nn.Module, x_BTX: Tensor) -> Tensor:
        """Queries or keys, [B, T, H, K]."""
        heads = (-1, self.head_dim)
        return norm(x_BTX).unflatten(-1, heads) if self.norms_all_heads else norm(x_BTX.unflatten(-1, heads))


class LatentAttention(nn.Module):
    """Queries, keys and values grow out of narrow latents; one rotary key serves all heads.

    The first K - R values of a query or key carry no position, the last R are rotated.
    """

    def __init__(self, model: Model, *, windowed: bool) -> None:
        super().__init__()
        a = model.attention
        self.head_dim, self.value_dim = a.head_dim, a.v_dim
        self.rotary_dim, self.plain_dim = a.rope_head_dim, a.head_dim - a.rope_head_dim
        self.latent_dim = a.kv_lora_rank
        width = a.num_heads * a.head_dim
        if a.query_lora_rank:
            self.query_down = Linear(model.hidden, a.query_lora_rank, bias=a.bias)
            self.query_norm = Norm(a.query_lora_rank, eps=1e-6)  # not the model's: DeepSeek's own code
            self.query_up = Linear(a.query_lora_rank, width, bias=False)
        else:
            self.query = Linear(model.hidden, width, bias=False)
        self.kv_down = Linear(model.hidden, a.kv_lora_rank + a.rope_head_dim, bias=a.bias)
        self.kv_norm = Norm(a.kv_lora_rank, eps=1e-6)
        self.rotary_key = nn.Identity()  # tensor parallelism hands every rank the one key here
        self.kv_up = Linear(a.kv_lora_rank, a.num_heads * (self.plain_dim + a.v_dim), bias=False)
        scale = a.head_dim**-0.5 * score_scale(model.rope)
        self.core = CoreAttention(scale=scale, window=a.window if windowed else 0)
        self.output = Linear(a.num_heads * a.v_dim, model.hidden, bias=a.has_output_bias)

    def forward(self, x_BTD: Tensor, layout: LayerLayout) -> Tensor:
        """[B, T, D]."""
        q_source_BTX = self.query_down(x_BTD) if hasattr(self, "query_down") else x_BTD
        latent_BTL, k_rotary_BTR = self.kv_down(x_BTD).split([self.latent_dim, self.rotary_dim], dim=-1)
        q_BTHK, k_BTHK, v_BTHV = self.expand(q_source_BTX, latent_BTL, k_rotary_BTR, layout.cos_BT1J, layout.sin_BT1J)
        return self.output(self.core(q_BTHK, k_BTHK, v_BTHV, layout).flatten(-2))

    def expand(
        self, q_source_BTX: Tensor, latent_BTL: Tensor, k_rotary_BTR: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of all heads: X is the queries' latent, or D where they have none."""
        if hasattr(self, "query_up"):
            q_BTHK = self.query_up(self.query_norm(q_source_BTX)).unflatten(-1, (-1, self.head_dim))
        else:
            q_BTHK = self.query(q_source_BTX).unflatten(-1, (-1, self.head_dim))
        q_plain, q_rotary = q_BTHK.split([self.plain_dim, self.rotary_dim], dim=-1)
        k_rotary_BT1R = self.rotary_key(k_rotary_BTR).unsqueeze(2)
        q_rotary, k_rotary_BT1R = rotate(q_rotary, k_rotary_BT1R, cos, sin, is_interleaved=True)
        q_BTHK = torch.cat([q_plain, q_rotary], dim=-1)

        kv_BTHX = self.kv_up(self.kv_norm(latent_BTL)).unflatten(-1, (-1, self.plain_dim + self.value_dim))
        k_plain, v_BTHV = kv_BTHX.split([self.plain_dim, self.value_dim], dim=-1)
        k_BTHK = torch.cat([k_plain, k_rotary_BT1R.expand(-1, -1, k_plain.shape[2], -1)], dim=-1)
        return q_BTHK, k_BTHK, v_BTHV
