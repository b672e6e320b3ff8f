"""Run-file sections of a model: its shapes, and changes to a named one. Each repeats a dataclass of `specs`."""

from __future__ import annotations

from functools import reduce
from operator import or_
from types import NoneType
from typing import Annotated, Any, get_args, get_type_hints

from pydantic import BeforeValidator, Field, create_model

from meshwright.runfile.fields import Lax, NotNegative, Positive, RunFileSection, Size, SizeOrZero, Text, whole
from meshwright.specs.model import Activation, AttentionKind, LinearKind, NormPlacement, RopeScaling, Router

MAX_MTP_LAYERS = 16


class InlineIndexer(RunFileSection):
    """`specs.sparse_attention.Indexer`."""

    num_heads: Size
    head_dim: Size
    top_k: Size
    num_layers: SizeOrZero | None = None
    is_trained: bool = True


class InlineCompression(RunFileSection):
    """`specs.sparse_attention.Compression`."""

    strides: Annotated[tuple[SizeOrZero, ...], Lax, Field(max_length=10_000)]
    indexed_stride: Size = 4


class InlineFullLayers(RunFileSection):
    """`specs.model.FullLayers`."""

    head_dim: Size
    num_kv_heads: Size
    shares_values: bool = False


class InlineAttention(RunFileSection):
    """`specs.model.Attention`, with usual values where a key is omitted."""

    kind: Annotated[AttentionKind, Lax] = AttentionKind.GQA
    num_heads: Size
    num_kv_heads: Size | None = None
    head_dim: Size | None = None
    value_head_dim: Size | None = None
    query_lora_rank: SizeOrZero = 0
    kv_lora_rank: SizeOrZero = 0
    rope_head_dim: SizeOrZero = 0
    window: SizeOrZero = 0
    num_windowed_layers: SizeOrZero = 0
    window_pattern: Annotated[tuple[bool, ...], Lax, Field(max_length=10_000)] = ()
    full_layers: InlineFullLayers | None = None
    bias: bool = False
    output_bias: bool | None = None
    qk_norm: bool = False
    qk_norm_across_heads: bool = False
    score_divisor: SizeOrZero = 0
    score_cap: NotNegative = 0.0
    sinks: bool = False
    output_lora_rank: SizeOrZero = 0
    output_groups: SizeOrZero = 0
    indexer: InlineIndexer | None = None
    compression: InlineCompression | None = None
    output_gate: bool = False


class InlineExperts(RunFileSection):
    """`specs.model.Experts`."""

    num_experts: Size
    top_k: Size
    ffn_hidden: Size
    num_shared: SizeOrZero = 0
    shared_ffn_hidden: SizeOrZero | None = None
    num_dense_layers: SizeOrZero = 0
    router: Annotated[Router, Lax] = Router.SOFTMAX
    num_groups: SizeOrZero = 0
    groups_per_token: SizeOrZero = 0
    normalize_top_k: bool = True
    routed_scale: Positive = 1.0
    bias: bool = False
    latent: SizeOrZero = 0
    shared_gate: bool = False
    own_norms: bool = False
    num_hashed_layers: SizeOrZero = 0


class InlineRope(RunFileSection):
    """`specs.model.Rope`."""

    theta: Positive = 10_000.0
    scaling: Annotated[RopeScaling, Lax] = RopeScaling.NONE
    factor: Positive = 1.0
    original_context: SizeOrZero = 0
    low_frequency: Positive = 1.0
    high_frequency: Positive = 4.0
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    mscale: NotNegative = 0.0
    mscale_all_dims: NotNegative = 0.0
    truncate: bool = True
    rotated_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    attention_factor: NotNegative = 0.0
    short_factors: Annotated[tuple[Positive, ...], Lax, Field(max_length=10_000)] = ()
    long_factors: Annotated[tuple[Positive, ...], Lax, Field(max_length=10_000)] = ()


class InlineStateSpace(RunFileSection):
    """`specs.model.StateSpace`."""

    state_size: Size
    num_heads: Size
    head_dim: Size
    num_groups: Size = 8
    conv_kernel: Size = 4
    chunk_size: Size = 128
    bias: bool = False


class InlineLinearAttention(RunFileSection):
    """`specs.model.LinearAttention`."""

    kind: Annotated[LinearKind, Lax] = LinearKind.GDN
    num_key_heads: Size
    num_value_heads: Size
    key_head_dim: Size
    value_head_dim: Size
    conv_kernel: Size = 4
    chunk_size: Size = 64
    pattern: Annotated[tuple[bool, ...], Lax, Field(min_length=1, max_length=10_000)] = (True, True, True, False)


class InlineModel(RunFileSection):
    """`specs.model.Model`."""

    name: Text = "inline"
    hidden: Size
    num_layers: Size
    vocab: Size
    attention: InlineAttention
    ffn_hidden: SizeOrZero = 0
    gated_ffn: bool = True
    ffn_bias: bool = False
    activation: Annotated[Activation, Lax] = Activation.SILU
    experts: InlineExperts | None = None
    state_space: InlineStateSpace | None = None
    linear_attention: InlineLinearAttention | None = None
    layer_pattern: Annotated[str, Field(max_length=10_000)] = ""
    tied_embeddings: bool = False
    num_mtp_layers: SizeOrZero = 0
    mtp_pattern: Annotated[str, Field(max_length=100)] = ""
    mtp_shared: bool = False
    residual_streams: Size = 1
    learned_positions: SizeOrZero = 0
    norm_bias: bool = False
    norm_epsilon: Positive = 1e-5
    norm_placement: Annotated[NormPlacement, Lax] = NormPlacement.BEFORE
    zero_centered_norms: bool = False
    scaled_embeddings: bool = False
    logit_cap: NotNegative = 0.0
    rope: InlineRope = InlineRope()
    windowed_rope: InlineRope | None = None
    family: Text | None = None


def _changes(section: type[RunFileSection]) -> Any:
    """The keys of `section` and of those below it, all optional, for `create_model`."""
    hints = get_type_hints(section, include_extras=True)
    return {name: (_optional(hints[name]), None) for name in section.model_fields}


def _optional(hint: Any) -> Any:
    if isinstance(hint, type) and issubclass(hint, RunFileSection):
        return create_model(f"{hint.__name__}Changes", __base__=RunFileSection, **_changes(hint))
    if NoneType in get_args(hint) and any(isinstance(part, type) for part in get_args(hint)):
        return reduce(or_, (_optional(part) for part in get_args(hint)))
    return hint


_MtpLayers = Annotated[int, BeforeValidator(whole), Field(ge=0, le=MAX_MTP_LAYERS)]
_ModelChanges = create_model(
    "_ModelChanges", __base__=RunFileSection, **_changes(InlineModel) | {"num_mtp_layers": (_MtpLayers, None)}
)


class ModelVariant(_ModelChanges):
    """A named model with other shapes: any keys of `InlineModel` in addition to its own."""

    base: Text
