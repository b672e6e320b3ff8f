"""A language model as the shapes that decide its cost. No weights, no framework.

Symbols used throughout `cost`: h hidden, L layers, V vocabulary, f feed-forward hidden, n_q and n_kv query and
key/value heads, d head dimension, E routed experts, k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class AttentionKind(StrEnum):
    """Projections of queries, keys and values."""

    GQA = "gqa"  # grouped query attention; multi-head when num_kv_heads == num_heads
    MLA = "mla"  # multi-head latent attention (DeepSeek-V2, section 2.1): low-rank query and key/value


class Router(StrEnum):
    """Function that turns router logits into expert scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"  # DeepSeek-V3: sigmoid scores with a bias that balances load


class RopeScaling(StrEnum):
    """RoPE scaling: change of the rotary frequencies for sequences longer than those of pretraining."""

    NONE = "none"
    LLAMA3 = "llama3"  # Llama 3.1: long wavelengths are divided by `factor`, a smooth step between
    YARN = "yarn"  # Peng et al. 2023: a ramp over dimensions, and a temperature of the attention
    OTHER = "other"  # one that Meshwright can plan but not train


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding. It decides numerics, not cost."""

    theta: float = 10_000.0  # base of the wavelengths
    scaling: RopeScaling = RopeScaling.NONE
    factor: float = 1.0  # how many times longer than in pretraining
    original_context: int = 0  # tokens of a pretraining sequence; needed when scaled
    low_frequency: float = (
        1.0  # LLAMA3: wavelengths above original_context / this are divided by the factor ...
    )
    high_frequency: float = 4.0  # ... and those below original_context / this stay
    beta_fast: float = 32.0  # YARN: dimensions that turn more often than this in the context stay ...
    beta_slow: float = 1.0  # ... and those that turn less often are divided by the factor
    mscale: float = 0.0  # YARN: temperature of the rotated queries and keys; 0: the paper's
    mscale_all_dims: float = 0.0  # YARN: temperature of the whole attention score (DeepSeek); 0: none
    truncate: bool = True  # YARN: the ramp begins and ends at whole dimensions


@dataclass(frozen=True, kw_only=True)
class Attention:
    """One attention block.

    For MLA `head_dim` is the query/key width per head *with* its rotary part (DeepSeek-V3: 128 + 64 = 192).
    """

    kind: AttentionKind = AttentionKind.GQA
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int | None = None  # None: as head_dim
    query_lora_rank: int = 0  # MLA; 0: queries are projected directly (DeepSeek-V2-Lite)
    kv_lora_rank: int = 0  # MLA
    rope_head_dim: int = 0  # MLA
    window: int = 0  # tokens seen by a sliding-window layer; 0: no such layers
    num_windowed_layers: int = 0
    bias: bool = False
    qk_norm: bool = False  # queries and keys are normalised per head (Qwen3)

    @property
    def v_dim(self) -> int:
        """Value width per head."""
        return self.head_dim if self.value_head_dim is None else self.value_head_dim


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture-of-experts feed-forward block."""

    num_experts: int
    top_k: int
    ffn_hidden: int  # f_e of one routed expert
    num_shared: int = 0
    shared_ffn_hidden: int | None = None  # of all shared experts together; None: num_shared * ffn_hidden
    num_dense_layers: int = 0  # layers that keep a dense feed-forward (DeepSeek-V3: the first 3)
    router: Router = Router.SOFTMAX
    num_groups: int = 0  # group-limited routing: groups of experts ...
    groups_per_token: int = 0  # ... and how many of them one token may use; 0: not limited
    normalize_top_k: bool = True  # weights of a token's experts sum to `routed_scale`
    routed_scale: float = 1.0  # the routed experts' output is multiplied by this (DeepSeek-V3: 2.5)

    @property
    def shared_hidden(self) -> int:
        """f of all shared experts together."""
        if self.shared_ffn_hidden is not None:
            return self.shared_ffn_hidden
        return self.num_shared * self.ffn_hidden


class BaseFormat(StrEnum):
    """Format of the frozen matrices of the layers while adapters are trained."""

    FULL = "full"  # as the run's precision has it: 16 or 32 bits
    INT8 = "int8"  # a scale per row
    NF4 = "nf4"  # 4-bit normal float, a scale per 64 elements (QLoRA, Dettmers et al. 2023)


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters on a frozen base (task: lora)."""

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ("query", "key", "value", "output")  # of: query key value output gate up down
    base_format: BaseFormat = BaseFormat.FULL


@dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder-only transformer."""

    name: str
    hidden: int
    num_layers: int
    vocab: int
    attention: Attention
    ffn_hidden: int  # of dense layers; 0 when every layer is a mixture of experts
    gated_ffn: bool = True  # SwiGLU: three matrices; GELU: two
    experts: Experts | None = None
    tied_embeddings: bool = False
    num_mtp_layers: int = 0  # multi-token prediction modules (DeepSeek-V3, section 2.2)
    learned_positions: int = 0  # rows of a learned position table (GPT-3: 2048)
    norm_bias: bool = False  # LayerNorm has a bias, RMSNorm has not
    norm_epsilon: float = 1e-5
    rope: Rope = Rope()
    family: str = ""  # name of the architecture in Hugging Face transformers, where there is one
    unsupported: tuple[
        str, ...
    ] = ()  # keys of its config that no engine here computes: planned, never trained

    @property
    def num_moe_layers(self) -> int:
        """Layers whose feed-forward is a mixture of experts."""
        return 0 if self.experts is None else self.num_layers - self.experts.num_dense_layers

    @property
    def num_dense_layers(self) -> int:
        """Layers whose feed-forward is dense."""
        return self.num_layers - self.num_moe_layers
