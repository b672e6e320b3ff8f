"""A language model as the shapes that decide its cost. No weights, no framework.

Symbols used throughout `cost`: h hidden, L layers, V vocabulary, f feed-forward hidden, n_q and n_kv query and
key/value heads, d head dimension, E routed experts, k experts per token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated

from meshwright.specs.limits import (
    PER_LAYER,
    BelowOne,
    Limits,
    Names,
    NoKey,
    NotNegative,
    Positive,
    Share,
    Size,
    SizeOrZero,
)
from meshwright.specs.sparse_attention import Compression, Indexer


class AttentionKind(StrEnum):
    """Projections of queries, keys and values."""

    GQA = "gqa"  # grouped query attention; multi-head when num_kv_heads == num_heads
    MLA = "mla"  # multi-head latent attention (DeepSeek-V2, section 2.1): low-rank query and key/value
    SHARED = "shared"  # DeepSeek-V4: low-rank query; one vector a token is the key and the value of all heads


class Router(StrEnum):
    """Function that turns router logits into expert scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"  # DeepSeek-V3: sigmoid scores with a bias that balances load
    SQRT_SOFTPLUS = "sqrt_softplus"  # DeepSeek-V4: as sigmoid, with the root of softplus


class RopeScaling(StrEnum):
    """RoPE scaling: change of the rotary frequencies for sequences longer than in pretraining."""

    NONE = "none"
    LLAMA3 = "llama3"  # Llama 3.1: long wavelengths are divided by `factor`, a smooth step between
    YARN = "yarn"  # Peng et al. 2023: a ramp over dimensions, and a temperature of the attention
    LINEAR = "linear"  # all positions are divided by the factor (Chen et al. 2023)
    LONGROPE = "longrope"  # Ding et al. 2024: every frequency has a divisor of its own, and a temperature
    OTHER = "other"  # one that Meshwright can plan but not train


class Activation(StrEnum):
    """The function between the matrices of a feed-forward block: f of f(gate) * up, or of an ungated block."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"  # the tanh approximation of GELU (Gemma)
    CLAMPED_SWIGLU = "clamped_swiglu"  # gpt-oss: g sigmoid(1.702 g) (u + 1), g at most 7, u from -7 to 7


class NormPlacement(StrEnum):
    """Norms around attention and feed-forward: x + after(block(before(x)))."""

    BEFORE = "before"
    AFTER = "after"  # OLMo 2
    BOTH = "both"  # Gemma 2 and 3


_Factors = Annotated[tuple[Positive, ...], PER_LAYER]
_Flags = Annotated[tuple[bool, ...], PER_LAYER]


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding. It decides numerics, not cost."""

    theta: Positive = 10_000.0  # base of the wavelengths
    scaling: RopeScaling = RopeScaling.NONE
    factor: Positive = 1.0  # how many times longer than in pretraining
    original_context: SizeOrZero = 0  # tokens of a pretraining sequence; needed when scaled
    low_frequency: Positive = 1.0  # LLAMA3: wavelengths above original_context / this are divided by the factor ...
    high_frequency: Positive = 4.0  # ... and those below original_context / this stay
    beta_fast: Positive = 32.0  # YARN: dimensions that turn more often than this in the context stay ...
    beta_slow: Positive = 1.0  # ... and those that turn less often are divided by the factor
    mscale: NotNegative = 0.0  # YARN: temperature of the rotated queries and keys; 0: the paper's
    mscale_all_dims: NotNegative = 0.0  # YARN: temperature of the whole attention score (DeepSeek); 0: none
    truncate: bool = True  # YARN: the ramp begins and ends at whole dimensions
    rotated_share: Share = 1.0  # of the dimensions of a head, the first ones (Phi-4-mini: 0.75)
    attention_factor: NotNegative = 0.0  # YARN, LONGROPE: factor of cosine and sine; 0: the paper's
    short_factors: _Factors = ()  # LONGROPE: divisors of the frequencies, up to the original context ...
    long_factors: _Factors = ()  # ... and for longer sequences

    def rotary_width(self, head_dim: int) -> int:
        """Dimensions of a head that are rotated."""
        return int(head_dim * self.rotated_share)


@dataclass(frozen=True, kw_only=True)
class FullLayers:
    """Attention of the layers without a window, where its shape differs from the other layers' (Gemma 4)."""

    head_dim: Size
    num_kv_heads: Size
    shares_values: bool = False  # one projection makes keys and values


@dataclass(frozen=True, kw_only=True)
class Attention:
    """One attention block.

    For MLA `head_dim` is the query/key width per head *with* its rotary part (DeepSeek-V3: 128 + 64 = 192).
    """

    kind: AttentionKind = AttentionKind.GQA
    num_heads: Size
    num_kv_heads: Size
    head_dim: Size
    value_head_dim: Size | None = None  # None: as head_dim
    query_lora_rank: SizeOrZero = 0  # MLA, SHARED; 0: queries are projected directly (DeepSeek-V2-Lite)
    kv_lora_rank: SizeOrZero = 0  # MLA
    rope_head_dim: SizeOrZero = 0  # MLA, SHARED
    window: SizeOrZero = 0  # tokens seen by a sliding-window layer; 0: no such layers
    num_windowed_layers: SizeOrZero = 0  # the last layers, where no pattern says which
    window_pattern: _Flags = ()  # True: windowed; repeated over the layers (Gemma 3: 5 x true, false)
    full_layers: FullLayers | None = None  # None: as the layers with a window
    bias: bool = False  # of all projections
    output_bias: bool | None = None  # of the output projection; None: as `bias` (Qwen2: false)
    qk_norm: bool = False  # queries and keys are normalised per head (Qwen3)
    qk_norm_across_heads: bool = False  # ... or all heads together (OLMo 2)
    score_divisor: SizeOrZero = 0  # scores are divided by its root; 0: head_dim (Gemma: query_pre_attn_scalar)
    score_cap: NotNegative = 0.0  # scores s become c tanh(s / c) (Gemma 2); 0: not capped
    sinks: bool = False  # each head has a learned logit that joins the softmax and has no value (gpt-oss)
    output_lora_rank: SizeOrZero = 0  # SHARED: of each of the groups of heads that the output projection has
    output_groups: SizeOrZero = 0
    indexer: Indexer | None = None  # queries attend to selected keys (DeepSeek-V3.2, GLM-5, DeepSeek-V4)
    compression: Compression | None = None  # SHARED: keys that stand for several tokens
    output_gate: bool = False  # the output is multiplied by a sigmoid of one more projection (Qwen3-Next)

    @property
    def v_dim(self) -> int:
        """Value width per head."""
        return self.head_dim if self.value_head_dim is None else self.value_head_dim

    @property
    def has_output_bias(self) -> bool:
        """True if the output projection has a bias."""
        return self.bias if self.output_bias is None else self.output_bias


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture-of-experts feed-forward block."""

    num_experts: Size
    top_k: Size
    ffn_hidden: Size  # f_e of one routed expert
    num_shared: SizeOrZero = 0
    shared_ffn_hidden: SizeOrZero | None = None  # of all shared experts together; None: num_shared * ffn_hidden
    num_dense_layers: SizeOrZero = 0  # layers that keep a dense feed-forward (DeepSeek-V3: the first 3)
    router: Router = Router.SOFTMAX
    num_groups: SizeOrZero = 0  # group-limited routing: groups of experts ...
    groups_per_token: SizeOrZero = 0  # ... and how many of them one token may use; 0: not limited
    normalize_top_k: bool = True  # weights of a token's experts sum to `routed_scale`
    routed_scale: Positive = 1.0  # the routed experts' output is multiplied by this (DeepSeek-V3: 2.5)
    bias: bool = False  # of the router and of all matrices of routed experts (gpt-oss)
    latent: SizeOrZero = 0  # width of routed experts, projected to and back from (Nemotron 3 Super); 0: none
    shared_gate: bool = False  # a gate of one number multiplies the shared experts' output (Qwen2's mixtures)
    own_norms: bool = False  # routed and shared experts have norms of their own, the router scales (Gemma 4)
    num_hashed_layers: SizeOrZero = 0  # first layers whose experts are looked up by token (DeepSeek-V4)

    @property
    def shared_hidden(self) -> int:
        """f of all shared experts together."""
        if self.shared_ffn_hidden is not None:
            return self.shared_ffn_hidden
        return self.num_shared * self.ffn_hidden


class BlockKind(StrEnum):
    """The block that one layer of a hybrid holds, in the letters of Nemotron-H's `hybrid_override_pattern`."""

    STATE_SPACE = "M"
    ATTENTION = "*"
    FEED_FORWARD = "-"
    MIXTURE = "E"


@dataclass(frozen=True, kw_only=True)
class StateSpace:
    """A Mamba-2 block (Dao and Gu 2024, arXiv 2405.21060): projections, a short convolution, and a scan in chunks.

    Each head has a state of head_dim x state_size numbers; heads of a group share what they read and write.
    """

    state_size: Size
    num_heads: Size
    head_dim: Size
    num_groups: Size = 8
    conv_kernel: Size = 4
    chunk_size: Size = 128  # tokens whose scores are computed as a matrix
    bias: bool = False  # of both projections; the convolution has one

    @property
    def inner(self) -> int:
        """Width of all heads together."""
        return self.num_heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Channels of the convolution: the heads' inputs, and what groups write and read."""
        return self.inner + 2 * self.num_groups * self.state_size


class LinearKind(StrEnum):
    """Decay of the states of a layer of linear attention."""

    GDN = "gdn"  # Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024, arXiv 2412.06464): a number per head
    KDA = "kda"  # Kimi Delta Attention (Kimi Team 2025, arXiv 2510.26692): a number per channel of the keys


@dataclass(frozen=True, kw_only=True)
class LinearAttention:
    """Linear attention by the gated delta rule, in place of the attention of the layers that `pattern` names.

    Projections, a short convolution over queries, keys and values, the rule in chunks of tokens, and a gated norm.
    Each value head has a state of key_head_dim x value_head_dim numbers, however long the context is.
    """

    kind: LinearKind = LinearKind.GDN
    num_key_heads: Size  # and query heads; each serves as many value heads
    num_value_heads: Size
    key_head_dim: Size
    value_head_dim: Size
    conv_kernel: Size = 4
    chunk_size: Size = 64  # tokens whose scores are computed as a matrix (flash-linear-attention)
    # True: linear; repeated over the layers
    pattern: Annotated[_Flags, Limits(min_length=1)] = (True, True, True, False)

    @property
    def keys(self) -> int:
        """Width of all keys, and of all queries."""
        return self.num_key_heads * self.key_head_dim

    @property
    def values(self) -> int:
        """Width of all values."""
        return self.num_value_heads * self.value_head_dim


class BaseFormat(StrEnum):
    """Format of the frozen matrices of the layers while adapters are trained."""

    FULL = "full"  # as the run's precision has it: 16 or 32 bits
    INT8 = "int8"  # a scale per row
    NF4 = "nf4"  # 4-bit normal float, a scale per 64 elements (QLoRA, Dettmers et al. 2023)
    NF4_DOUBLE = "nf4_double"  # the same with double quantisation: scales in 8 bits, a scale of theirs per 256


NF4_BLOCK = 64
"""Weights with one scale in both formats of 4 bits (QLoRA, section 3)."""

SCALE_BLOCK = 256
"""Scales with one fp32 scale of their own under double quantisation (the same)."""


QKV = "qkv"
"""Target of one adapter with one A for query, key and value together."""
_LORA_TARGETS = ("query", "key", "value", QKV, "output", "gate", "up", "down")
_LoraTarget = Annotated[str, Names(_LORA_TARGETS)]


def _distinct(targets: tuple[str, ...]) -> tuple[str, ...]:
    """The targets of adapters. Raises ValueError where a matrix would have two."""
    if len(set(targets)) < len(targets):
        raise ValueError("every target stands once")
    if QKV in targets and (both := [target for target in targets if target in ("query", "key", "value")]):
        raise ValueError(f"{QKV} is one adapter of query, key and value: name it or {both[0]}")
    return targets


def _lora_place(place: str) -> str:
    """A target, or a target in one layer. Raises ValueError for another text."""
    layer, _, target = place.rpartition(".")
    if target not in _LORA_TARGETS or not (place == target or layer.isdecimal()):
        raise ValueError(f"a target or LAYER.TARGET, as in down or 3.down; targets: {', '.join(_LORA_TARGETS)}")
    return place


_LoraPlace = Annotated[str, _lora_place]


def _lora_init(name: str) -> str:
    """The initial adapters. Raises ValueError for another text."""
    if name not in ("standard", "pissa", "olora") and not re.fullmatch(r"pissa_niter_\d{1,3}", name):
        raise ValueError("standard, pissa, pissa_niter_N, olora")
    return name


SAVED_MODULES = ("embedding", "head")
_SavedModule = Annotated[str, Names(SAVED_MODULES)]


def _each_once(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in SAVED_MODULES if name in names)


def _ascending(layers: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(set(layers)))


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters on a frozen base (task: lora)."""

    rank: Size = 16
    alpha: Positive = 32.0
    dropout: BelowOne = 0.0
    targets: Annotated[tuple[_LoraTarget, ...], Limits(min_length=1), _distinct] = ("query", "key", "value", "output")
    base_format: BaseFormat = BaseFormat.FULL
    # in place of `rank` and `alpha`, for a target or for a target in one layer, as in `down` and `3.down`
    ranks: Mapping[_LoraPlace, Size] = field(default_factory=dict, hash=False)
    alphas: Mapping[_LoraPlace, Positive] = field(default_factory=dict, hash=False)
    layers: Annotated[tuple[SizeOrZero, ...], Limits(min_length=1), _ascending] | None = None  # None: all
    use_dora: bool = False  # a trained length of each row of the matrices (DoRA, Liu et al. 2024)
    modules_to_save: Annotated[tuple[_SavedModule, ...], _each_once] = ()  # trained whole, beside the adapters
    # standard: A random, B zero; pissa: the largest singular values of the matrix, which the base loses (Meng et al.
    # 2024), pissa_niter_N: found by N iterations; olora: the first columns of its QR decomposition (Büyükakyüz 2024)
    init: Annotated[str, _lora_init] = "standard"

    @property
    def moves_base(self) -> bool:
        """True if the base loses what the adapters begin with."""
        return self.init != "standard"

    def at(self, matrix: str, *, layer: int) -> Lora | None:
        """These adapters with the one rank and alpha that `matrix` has in `layer`; None: the layer has none."""
        if self.layers is not None and layer not in self.layers:
            return None
        target = QKV if QKV in self.targets and matrix in ("query", "key", "value") else matrix
        rank, alpha = (
            of.get(f"{layer}.{target}", of.get(target, usual))
            for of, usual in ((self.ranks, self.rank), (self.alphas, self.alpha))
        )
        return replace(self, rank=int(rank), alpha=alpha, ranks={}, alphas={}, layers=None)

    @property
    def matrices(self) -> tuple[str, ...]:
        """Adapted matrices: the targets, with query, key and value in place of qkv."""
        return tuple(m for t in self.targets for m in (("query", "key", "value") if t == QKV else (t,)))


@dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder-only transformer, or a hybrid whose layers hold one block each (`layer_pattern`)."""

    name: str
    hidden: Size
    num_layers: Size
    vocab: Size
    attention: Attention
    ffn_hidden: SizeOrZero  # of dense layers; 0 when every layer is a mixture of experts
    gated_ffn: bool = True  # SwiGLU: three matrices; GELU: two
    ffn_bias: bool = False  # of all matrices of dense layers (GPT-2)
    activation: Activation = Activation.SILU  # of gated blocks; others have GELU
    experts: Experts | None = None
    state_space: StateSpace | None = None  # of a hybrid
    linear_attention: LinearAttention | None = None  # of some layers, which have it in place of attention
    layer_pattern: Annotated[str, PER_LAYER] = ""  # of a hybrid: a `BlockKind` for each layer, which holds that alone
    tied_embeddings: bool = False
    head_bias: bool = False  # of the output head, also beside tied embeddings (Phi-2, GPT-J)
    num_mtp_layers: SizeOrZero = 0  # multi-token prediction modules (DeepSeek-V3, section 2.2)
    mtp_pattern: Annotated[str, Limits(max_length=100)] = ""  # of a hybrid: one module's blocks, as in `layer_pattern`
    mtp_shared: bool = False  # one module predicts all tokens, one after the other: its weights are there once
    residual_streams: Size = 1  # of hyper-connections, which mix them before and after each block (DeepSeek-V4: 4)
    learned_positions: SizeOrZero = 0  # rows of a learned position table (GPT-3: 2048)
    norm_bias: bool = False  # LayerNorm has a bias, RMSNorm has not
    norm_epsilon: Positive = 1e-5
    norm_placement: NormPlacement = NormPlacement.BEFORE
    # of layers whose attention and feed-forward both read the layer's input: x + attention(norm(x)) + ffn(norm(x)), of
    # one norm (Command R, Falcon 7B) or of one each (GPT-NeoX, Falcon 40B); 0: the feed-forward follows attention
    parallel_norms: Annotated[int, Limits(ge=0, le=2)] = 0
    zero_centered_norms: bool = False  # norms multiply by 1 + weight (Gemma)
    scaled_embeddings: bool = False  # the embedding's output is multiplied by the root of `hidden` (Gemma)
    num_labels: Annotated[int, NoKey] = 0  # rows of a head that scores a text, in place of one for the vocabulary
    logit_cap: NotNegative = 0.0  # logits l become c tanh(l / c) (Gemma 2); 0: not capped
    rope: Rope = Rope()
    windowed_rope: Rope | None = None  # of layers with a sliding window (Gemma 3); None: as `rope`
    family: str = ""  # name of the architecture in Hugging Face transformers, where there is one
    # parts, or keys of its config, that no engine here computes: only planned (ALiBi)
    unsupported: Annotated[tuple[str, ...], PER_LAYER] = ()

    @property
    def head_rows(self) -> int:
        """Rows of the head's matrix."""
        return self.num_labels or self.vocab

    @property
    def num_moe_layers(self) -> int:
        """Layers whose feed-forward is a mixture of experts."""
        if self.layer_pattern:
            return self.layer_pattern.count(BlockKind.MIXTURE)
        return 0 if self.experts is None else self.num_layers - self.experts.num_dense_layers

    @property
    def num_dense_layers(self) -> int:
        """Layers that are no mixture of experts."""
        return self.num_layers - self.num_moe_layers

    def share_of(self, kind: BlockKind) -> float:
        """Share of the layers that hold this kind of block; state-space blocks are in hybrids only.

        Without a pattern a layer holds attention and, as `experts` says, a feed-forward block or a mixture.
        """
        if not self.layer_pattern:
            return 0 if kind is BlockKind.STATE_SPACE else 1
        return self.layer_pattern.count(kind) / len(self.layer_pattern)

    @property
    def linear_layers(self) -> tuple[bool, ...]:
        """For each layer True if it has linear attention."""
        pattern = self.linear_attention.pattern if self.linear_attention else (False,)
        return tuple(pattern[index % len(pattern)] for index in range(self.num_layers))

    @property
    def linear_share(self) -> float:
        """Share of the layers with linear attention."""
        return sum(self.linear_layers) / self.num_layers if self.linear_attention else 0

    @property
    def windowed_layers(self) -> tuple[bool, ...]:
        """For each layer True if it has a sliding window."""
        a, num = self.attention, self.num_layers
        if a.window_pattern:
            return tuple(a.window_pattern[index % len(a.window_pattern)] for index in range(num))
        return tuple(index >= num - a.num_windowed_layers for index in range(num))

    @property
    def num_windowed_layers(self) -> int:
        """Layers with a sliding window."""
        return sum(self.windowed_layers)


def reward_model(model: Model) -> Model:
    """`model` with a head of one row, which scores a text: it is not the embedding's matrix."""
    return replace(model, num_labels=1, tied_embeddings=False)
