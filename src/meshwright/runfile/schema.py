"""The run file's keys: types, defaults and what one value alone must satisfy.

One class a section; `resolve` looks names up and checks what several values must satisfy together.
docs/reference/run-file.md explains every key for users.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache, reduce
from operator import or_
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    create_model,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticKnownError

from meshwright.catalog.engines import planning_names
from meshwright.kernels.operations import STORED_FORMATS
from meshwright.specs.features import AttentionKernel, CudaGraphs, Dispatcher, WireFormat
from meshwright.specs.model import (
    QKV,
    Activation,
    AttentionKind,
    BaseFormat,
    LinearKind,
    NormPlacement,
    RopeScaling,
    Router,
)
from meshwright.specs.optimizers import OPTIMIZERS
from meshwright.specs.plan import RECOMPUTE_MODULES, AxisOrder, Offload, Schedule
from meshwright.specs.run import (
    BIAS_RATE,
    MAX_WORKERS,
    MEAN,
    MTP_LOSS_WEIGHT,
    NATIVE,
    SYNTHETIC,
    LearningRateAdjustment,
    LearningRateSchedule,
    Objective,
    StateFormat,
    Task,
    Tracker,
)


def _whole(value: object) -> object:
    """`15e12` is a float to YAML and a count to everybody else."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _readable(text: str) -> str:
    if not text.isprintable() or not text.strip():
        raise ValueError("must be printable text")
    return text


def _engine(value: object) -> object:
    known = planning_names()
    if known and value not in known:  # where none is known what looks one up says why
        raise PydanticKnownError("enum", {"expected": ", ".join(map(repr, known))})
    return value


def _optimizer(value: object) -> object:
    if not isinstance(value, str) or value not in OPTIMIZERS:
        raise PydanticKnownError("enum", {"expected": ", ".join(map(repr, OPTIMIZERS))})
    return value


def _recompute_module(name: str) -> str:
    if name not in RECOMPUTE_MODULES:
        raise ValueError(f"unknown module; known: {', '.join(RECOMPUTE_MODULES)}")
    return name


def _lora_targets(targets: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(targets)) < len(targets):
        raise ValueError("every target stands once")
    if QKV in targets and (both := [target for target in targets if target in ("query", "key", "value")]):
        raise ValueError(f"{QKV} is one adapter of query, key and value: name it or {both[0]}")
    return targets


def _source_name(name: str) -> str:
    if _SOURCE_NAME.fullmatch(name) is None or name == MEAN:
        raise ValueError(f"a source's name has letters, digits, _ and -, and is not {MEAN}")
    return name


def _source(value: object) -> object:
    return {"path": value} if isinstance(value, str) else value


def _kind(value: object) -> str:
    return "(mapping)" if isinstance(value, dict) else "(word)"


def _model_kind(value: object) -> str:
    return "(variant)" if isinstance(value, dict) and "base" in value else _kind(value)


def _number_or_word(value: object) -> str:
    return "(word)" if isinstance(value, str) else "(number)"


_Word, _Mapping, _Number, _Variant = Tag("(word)"), Tag("(mapping)"), Tag("(number)"), Tag("(variant)")
UNION_TAGS = {"(word)", "(mapping)", "(number)", "(variant)"}
"""Stand in the location of an error where a value may be of two kinds; no key is called so."""

MAX_MTP_LAYERS = 16
_SOURCE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def _stored_activations(value: object) -> object:
    """A list of modules as the mapping that gives each the default format."""
    if isinstance(value, list) and all(isinstance(module, str) for module in value):
        return dict.fromkeys(value, STORED_FORMATS[0])
    if not isinstance(value, dict):
        raise ValueError("must be a list of modules, or a mapping of modules to formats")
    return value


_Lax = Field(strict=False)  # an enum from its value, a tuple from a list; what is inside stays strict

Text = Annotated[str, Field(max_length=4096), AfterValidator(_readable)]
Count = Annotated[int, BeforeValidator(_whole), Field(gt=0, le=10**9)]
CountOrZero = Annotated[int, BeforeValidator(_whole), Field(ge=0, le=10**9)]
Size = Annotated[int, BeforeValidator(_whole), Field(gt=0, le=10**7)]
SizeOrZero = Annotated[int, BeforeValidator(_whole), Field(ge=0, le=10**7)]
Workers = Annotated[int, BeforeValidator(_whole), Field(ge=0, le=MAX_WORKERS)]
Tokens = Annotated[int, BeforeValidator(_whole), Field(gt=0, le=10**17)]
Positive = Annotated[float, Field(gt=0, le=1e12)]
NotNegative = Annotated[float, Field(ge=0, le=1e12)]
Ratio = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
SourceName = Annotated[str, AfterValidator(_source_name)]
EngineName = Annotated[str, BeforeValidator(_engine)]
OptimizerName = Annotated[str, BeforeValidator(_optimizer)]
RecomputeModule = Annotated[str, AfterValidator(_recompute_module)]
LoraTarget = Literal["query", "key", "value", "qkv", "output", "gate", "up", "down"]


class RunFileSection(BaseModel):
    """A mapping of the run file: its keys are known, its values are what they look like."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())


class InlineIndexer(RunFileSection):
    """`specs.sparse_attention.Indexer`."""

    num_heads: Size
    head_dim: Size
    top_k: Size
    num_layers: SizeOrZero | None = None
    is_trained: bool = True


class InlineCompression(RunFileSection):
    """`specs.sparse_attention.Compression`."""

    strides: Annotated[tuple[SizeOrZero, ...], _Lax, Field(max_length=10_000)]
    indexed_stride: Size = 4


class InlineAttention(RunFileSection):
    """`specs.model.Attention`, with usual values where a key is omitted."""

    kind: Annotated[AttentionKind, _Lax] = AttentionKind.GQA
    num_heads: Size
    num_kv_heads: Size | None = None
    head_dim: Size | None = None
    value_head_dim: Size | None = None
    query_lora_rank: SizeOrZero = 0
    kv_lora_rank: SizeOrZero = 0
    rope_head_dim: SizeOrZero = 0
    window: SizeOrZero = 0
    num_windowed_layers: SizeOrZero = 0
    window_pattern: Annotated[tuple[bool, ...], _Lax, Field(max_length=10_000)] = ()
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
    router: Annotated[Router, _Lax] = Router.SOFTMAX
    num_groups: SizeOrZero = 0
    groups_per_token: SizeOrZero = 0
    normalize_top_k: bool = True
    routed_scale: Positive = 1.0
    bias: bool = False
    latent: SizeOrZero = 0
    shared_gate: bool = False
    num_hashed_layers: SizeOrZero = 0


class InlineRope(RunFileSection):
    """`specs.model.Rope`."""

    theta: Positive = 10_000.0
    scaling: Annotated[RopeScaling, _Lax] = RopeScaling.NONE
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
    short_factors: Annotated[tuple[Positive, ...], _Lax, Field(max_length=10_000)] = ()
    long_factors: Annotated[tuple[Positive, ...], _Lax, Field(max_length=10_000)] = ()


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

    kind: Annotated[LinearKind, _Lax] = LinearKind.GDN
    num_key_heads: Size
    num_value_heads: Size
    key_head_dim: Size
    value_head_dim: Size
    conv_kernel: Size = 4
    chunk_size: Size = 64
    pattern: Annotated[tuple[bool, ...], _Lax, Field(min_length=1, max_length=10_000)] = (
        True,
        True,
        True,
        False,
    )


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
    activation: Annotated[Activation, _Lax] = Activation.SILU
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
    norm_placement: Annotated[NormPlacement, _Lax] = NormPlacement.BEFORE
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


_MtpLayers = Annotated[int, BeforeValidator(_whole), Field(ge=0, le=MAX_MTP_LAYERS)]
_ModelChanges = create_model(
    "_ModelChanges",
    __base__=RunFileSection,
    **_changes(InlineModel) | {"num_mtp_layers": (_MtpLayers, None)},
)


class ModelVariant(_ModelChanges):
    """A named model with other shapes: any keys of `InlineModel` in addition to its own."""

    base: Text


class InlineLora(RunFileSection):
    """`specs.model.Lora`."""

    rank: Size = 16
    alpha: Positive = 32.0
    dropout: BelowOne = 0.0
    targets: Annotated[tuple[LoraTarget, ...], _Lax, Field(min_length=1), AfterValidator(_lora_targets)] = (
        "query",
        "key",
        "value",
        "output",
    )
    base_format: Annotated[BaseFormat, _Lax] = BaseFormat.FULL


class SourceSection(RunFileSection):
    """A training source of a mixture."""

    path: Text
    weight: Positive = 1.0


class DataSection(RunFileSection):
    """Source of the tokens, and the length of a sequence."""

    source: Annotated[
        Annotated[Text, _Word]
        | Annotated[
            dict[SourceName, Annotated[SourceSection, BeforeValidator(_source)]],
            Field(min_length=1, max_length=64),
            _Mapping,
        ],
        Discriminator(_kind),
    ] = SYNTHETIC
    tokenizer: Text | None = None
    validation: (
        Annotated[
            Annotated[Text, _Word]
            | Annotated[dict[SourceName, Text], Field(min_length=1, max_length=64), _Mapping],
            Discriminator(_kind),
        ]
        | None
    ) = None
    workers: Workers | None = None
    joined_documents: bool = False
    sequence_length: Count


class BatchSection(RunFileSection):
    """Size of an optimizer step and of a micro-batch."""

    global_tokens: Tokens | None = None
    global_sequences: Count | None = None
    label_tokens: Count | None = None
    micro: (
        Annotated[
            Annotated[Literal["auto"], _Word] | Annotated[Count, _Number], Discriminator(_number_or_word)
        ]
        | None
    ) = None


class OptimizerSection(RunFileSection):
    """Optimizer and learning-rate schedule. Keys from `betas` on are those of some optimizers."""

    name: OptimizerName = "adamw"
    learning_rate: Positive = 3e-4
    betas: Annotated[tuple[BelowOne, BelowOne], _Lax] = (0.9, 0.95)
    epsilon: Positive = 1e-8
    weight_decay: NotNegative = 0.1
    gradient_clip: Positive | None = 1.0
    schedule: Annotated[LearningRateSchedule, _Lax] = LearningRateSchedule.COSINE
    warmup_steps: CountOrZero = 0
    final_ratio: Ratio = 0.1
    decay_ratio: Ratio = 0.1
    states: Annotated[StateFormat, _Lax] = StateFormat.FP32
    momentum: BelowOne = 0.95
    nesterov: bool = True
    newton_schulz_steps: Annotated[int, BeforeValidator(_whole), Field(gt=0, lt=100)] = 5
    adjust_learning_rate: Annotated[LearningRateAdjustment, _Lax] = LearningRateAdjustment.MATCH_RMS_ADAMW
    adamw_learning_rate: Positive | None = None


class InlineCluster(RunFileSection):
    """A cluster that has no name."""

    accelerator: Text
    devices_per_node: Count
    num_nodes: Count
    fabric: Text | None = None


class RecomputeSection(RunFileSection):
    """Either the modules or the number of layers whose activations are computed again."""

    modules: Annotated[tuple[RecomputeModule, ...], _Lax, Field(min_length=1)] | None = None
    layers: CountOrZero | None = None


class ParallelSection(RunFileSection):
    """A pinned plan: `specs.plan.Plan` without its micro-batch."""

    data_shard: Count | None = None
    data_replicate: Count = 1
    tensor: Count = 1
    sequence_parallel: bool = True
    context: Count = 1
    pipeline: Count = 1
    virtual_pipeline: Count = 1
    layers_per_stage: Annotated[tuple[SizeOrZero, ...], _Lax, Field(min_length=1)] | None = None
    schedule: Annotated[Schedule, _Lax] | None = None
    expert: Count = 1
    expert_tensor: Count = 1
    sharding: Literal["none", "optimizer", "gradients", "parameters"] = "optimizer"
    recompute: Annotated[
        Annotated[Literal["none", "selective", "full"], _Word] | Annotated[RecomputeSection, _Mapping],
        Discriminator(_kind),
    ] = "none"
    offload: Annotated[Offload, _Lax] = Offload.NONE
    axis_order: Annotated[AxisOrder, _Lax] = AxisOrder.PIPELINE_OUTERMOST


class StackSection(RunFileSection):
    """The software that runs the step."""

    framework: Text | None = None
    vintage: Annotated[float, Field(ge=2015, lt=2100)] | None = None
    cuda_graphs: Annotated[CudaGraphs, _Lax] | None = None
    dispatcher: Annotated[Dispatcher, _Lax] | None = None
    overlaps_experts: bool | None = None
    drops_tokens: bool | None = None
    capacity_factor: Annotated[float, Field(gt=0, le=64)] | None = None
    attention: Annotated[AttentionKernel, _Lax] | None = None
    fp8_attention: bool | None = None
    compiles: bool | None = None
    overlaps_tensor: bool | None = None
    fuses_experts: bool | None = None
    gradient_format: Annotated[WireFormat, _Lax] | None = None
    parameter_format: Annotated[WireFormat, _Lax] | None = None
    offloaded_activations: Annotated[float, Field(ge=0, le=1)] | None = None
    expert_imbalance: Annotated[float, Field(ge=1, le=64)] | None = None


class CostsSection(RunFileSection):
    """Prices that replace the catalogue's."""

    usd_per_device_hour: NotNegative | None = None
    usd_per_kwh: NotNegative | None = None


class CheckpointSection(RunFileSection):
    """Saving of weights and optimizer states."""

    folder: Text
    every_steps: Count = 1000
    keep: Count | None = None
    keep_best: bool = False
    asynchronous: bool = True


class EvaluateSection(RunFileSection):
    """Evaluation on validation data."""

    every_steps: Count = 1000
    num_batches: Count = 16
    num_sequences: Count | None = None
    skip_first: CountOrZero = 0
    workers: Workers | None = None
    best_by: Text = MEAN
    target_loss: Positive | None = None
    patience: Count | None = None
    min_delta: NotNegative = 0.0


class FaultsSection(RunFileSection):
    """Actions on steps with a non-finite or spiking loss."""

    not_finite: Literal["stop", "skip", "roll_back"] = "stop"
    spike: Literal["ignore", "stop", "skip", "roll_back"] = "ignore"
    spike_deviations: Positive = 6.0
    spike_window: Annotated[int, BeforeValidator(_whole), Field(ge=8, le=10**4)] = 128
    max_events: CountOrZero = 10


class TrainSection(RunFileSection):
    """Length of the training, checkpoints, evaluation, trackers."""

    steps: Count | None = None
    tokens: Tokens | None = None
    seed: CountOrZero = 0
    balance_loss: NotNegative = 0.0
    router_z_loss: NotNegative = 0.0
    balance_bias_rate: NotNegative = BIAS_RATE
    z_loss: Ratio = 0.0
    mtp_loss_weight: Positive = MTP_LOSS_WEIGHT
    log_every: Count | None = None
    compile: bool = False
    checkpoint: CheckpointSection | None = None
    evaluate: EvaluateSection | None = None
    trackers: Annotated[tuple[Annotated[Tracker, _Lax], ...], _Lax] = ()
    faults: FaultsSection = FaultsSection()


class KernelsSection(RunFileSection):
    """Routes of training kernels by operation, a tuned table, activations in 8 bits, the cache of 8-bit weights, and
    tokens whose logits are in memory at once."""

    routes: dict[Text, Text] = {}
    tuned: Text | None = None
    stored_activations: Annotated[dict[Text, Text] | None, BeforeValidator(_stored_activations)] = None
    weight_cache: Literal["auto", "on", "off"] = "auto"
    loss_chunk: Annotated[
        Annotated[Literal["auto", "all"], _Word] | Annotated[Count, _Number], Discriminator(_number_or_word)
    ] = "auto"


class RunFile(RunFileSection):
    """The whole file."""

    name: Text | None = None
    model: Annotated[
        Annotated[Text, _Word] | Annotated[ModelVariant, _Variant] | Annotated[InlineModel, _Mapping],
        Discriminator(_model_kind),
    ]
    weights: Text | None = None
    task: Annotated[Task, _Lax] = Task.PRETRAIN
    lora: InlineLora | None = None
    data: DataSection
    batch: BatchSection
    optimizer: OptimizerSection = OptimizerSection()
    precision: Text = "bf16"
    cluster: Annotated[Annotated[Text, _Word] | Annotated[InlineCluster, _Mapping], Discriminator(_kind)]
    calibration: Text | None = None
    gemm_tuning: Text | None = None
    kernels: KernelsSection = KernelsSection()
    parallel: Annotated[
        Annotated[Literal["auto"], _Word] | Annotated[ParallelSection, _Mapping], Discriminator(_kind)
    ] = "auto"
    engine: EngineName = NATIVE
    stack: StackSection | None = None
    objective: Annotated[Objective, _Lax] = Objective.THROUGHPUT
    costs: CostsSection = CostsSection()
    train: TrainSection = TrainSection()


@cache
def all_fields() -> dict[str, FieldInfo]:
    """Every key of the schema with its path: `model`, `model.hidden`, ... in the order of the classes."""
    return dict(_fields(RunFile, ""))


def known_keys(path: tuple[str | int, ...]) -> list[str]:
    """The keys that a mapping at `path` may have."""
    prefix = "".join(f"{part}." for part in path)
    below = [key.removeprefix(prefix) for key in all_fields() if key.startswith(prefix)]
    return [key for key in below if "." not in key]


def _fields(section: type[RunFileSection], above: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        yield above + name, field
        for below, path in _sections(field.annotation, f"{above}{name}."):
            yield from _fields(below, path)


def _sections(annotation: Any, above: str) -> Iterator[tuple[type[RunFileSection], str]]:
    """The sections of a key, and where they are; those of a mapping are below a `NAME` of the user's."""
    if isinstance(annotation, type) and issubclass(annotation, RunFileSection):
        yield annotation, above
    is_mapping = get_origin(annotation) is dict
    for part in get_args(annotation):
        yield from _sections(part, f"{above}NAME." if is_mapping else above)
