"""The run file's keys: types, defaults and what one value alone must satisfy.

One class a section; `resolve` looks names up and checks what several values must satisfy together.
docs/reference/run-file.md explains every key for users.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag
from pydantic.fields import FieldInfo
from pydantic_core import PydanticKnownError

from meshwright.catalog.engines import planning_names
from meshwright.kernels.operations import STORED_FORMATS
from meshwright.runfile.fields import (
    BelowOne,
    Count,
    CountOrZero,
    Lax,
    NotNegative,
    Positive,
    Ratio,
    RunFileSection,
    Size,
    SizeOrZero,
    Text,
    Tokens,
    whole,
)
from meshwright.runfile.model_schema import InlineModel, ModelVariant
from meshwright.specs.features import AttentionKernel, CudaGraphs, Dispatcher, Preset, WireFormat
from meshwright.specs.model import QKV, BaseFormat
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


def _cluster_kind(value: object) -> str:
    return "(variant)" if isinstance(value, dict) and "name" in value else _kind(value)


def _number_or_word(value: object) -> str:
    return "(word)" if isinstance(value, str) else "(number)"


_Word, _Mapping, _Number, _Variant = Tag("(word)"), Tag("(mapping)"), Tag("(number)"), Tag("(variant)")
UNION_TAGS = {"(word)", "(mapping)", "(number)", "(variant)"}
"""Stand in the location of an error where a value may be of two kinds; no key is called so."""

_SOURCE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def _stored_activations(value: object) -> object:
    """A list of modules as the mapping that gives each the default format."""
    if isinstance(value, list) and all(isinstance(module, str) for module in value):
        return dict.fromkeys(value, STORED_FORMATS[0])
    if not isinstance(value, dict):
        raise ValueError("must be a list of modules, or a mapping of modules to formats")
    return value


def _spelled(value: object) -> object:
    """A number as text, so that what reads it asks for its unit."""
    return f"{value}" if isinstance(value, int | float) and not isinstance(value, bool) else value


Quantity = Annotated[Text, BeforeValidator(_spelled)]
Workers = Annotated[int, BeforeValidator(whole), Field(ge=0, le=MAX_WORKERS)]
SourceName = Annotated[str, AfterValidator(_source_name)]
EngineName = Annotated[str, BeforeValidator(_engine)]
OptimizerName = Annotated[str, BeforeValidator(_optimizer)]
RecomputeModule = Annotated[str, AfterValidator(_recompute_module)]
LoraTarget = Literal["query", "key", "value", "qkv", "output", "gate", "up", "down"]


class InlineLora(RunFileSection):
    """`specs.model.Lora`."""

    rank: Size = 16
    alpha: Positive = 32.0
    dropout: BelowOne = 0.0
    targets: Annotated[tuple[LoraTarget, ...], Lax, Field(min_length=1), AfterValidator(_lora_targets)] = (
        "query",
        "key",
        "value",
        "output",
    )
    base_format: Annotated[BaseFormat, Lax] = BaseFormat.FULL


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
            Annotated[Text, _Word] | Annotated[dict[SourceName, Text], Field(min_length=1, max_length=64), _Mapping],
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
        Annotated[Annotated[Literal["auto"], _Word] | Annotated[Count, _Number], Discriminator(_number_or_word)] | None
    ) = None


class OptimizerSection(RunFileSection):
    """Optimizer and learning-rate schedule. Keys from `betas` on belong to some optimizers."""

    name: OptimizerName = "adamw"
    learning_rate: Positive = 3e-4
    betas: Annotated[tuple[BelowOne, BelowOne], Lax] = (0.9, 0.95)
    epsilon: Positive = 1e-8
    weight_decay: NotNegative = 0.1
    gradient_clip: Positive | None = 1.0
    schedule: Annotated[LearningRateSchedule, Lax] = LearningRateSchedule.COSINE
    warmup_steps: CountOrZero = 0
    final_ratio: Ratio = 0.1
    decay_ratio: Ratio = 0.1
    states: Annotated[StateFormat, Lax] = StateFormat.FP32
    momentum: BelowOne = 0.95
    nesterov: bool = True
    newton_schulz_steps: Annotated[int, BeforeValidator(whole), Field(gt=0, lt=100)] = 5
    adjust_learning_rate: Annotated[LearningRateAdjustment, Lax] = LearningRateAdjustment.MATCH_RMS_ADAMW
    adamw_learning_rate: Positive | None = None


class StatedHardware(RunFileSection):
    """Hardware that a run states in place of the catalogue's."""

    fabric: Text | None = None
    network: Quantity | None = None
    oversubscription: Annotated[float, Field(ge=1, le=1000)] | None = None
    device_memory: Quantity | None = None


class NamedCluster(StatedHardware):
    """A cluster by its name, with other hardware than the usual."""

    name: Text
    accelerator: Text | None = None


class InlineCluster(StatedHardware):
    """A cluster that has no name."""

    accelerator: Text
    devices_per_node: Count
    num_nodes: Count


class RecomputeSection(RunFileSection):
    """Either the modules or the number of layers whose activations are computed again."""

    modules: Annotated[tuple[RecomputeModule, ...], Lax, Field(min_length=1)] | None = None
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
    layers_per_stage: Annotated[tuple[SizeOrZero, ...], Lax, Field(min_length=1)] | None = None
    schedule: Annotated[Schedule, Lax] | None = None
    expert: Count = 1
    expert_tensor: Count = 1
    sharding: Literal["none", "optimizer", "gradients", "parameters"] = "optimizer"
    recompute: Annotated[
        Annotated[Literal["none", "selective", "full"], _Word] | Annotated[RecomputeSection, _Mapping],
        Discriminator(_kind),
    ] = "none"
    offload: Annotated[Offload, Lax] = Offload.NONE
    axis_order: Annotated[AxisOrder, Lax] = AxisOrder.PIPELINE_OUTERMOST


class StackSection(RunFileSection):
    """The software that runs the step."""

    framework: Text | None = None
    preset: Annotated[Preset, Lax] | None = None
    vintage: Annotated[float, Field(ge=2015, lt=2100)] | None = None
    cuda_graphs: Annotated[CudaGraphs, Lax] | None = None
    dispatcher: Annotated[Dispatcher, Lax] | None = None
    overlaps_experts: bool | None = None
    drops_tokens: bool | None = None
    capacity_factor: Annotated[float, Field(gt=0, le=64)] | None = None
    attention: Annotated[AttentionKernel, Lax] | None = None
    attention_tile: Annotated[int, Field(ge=16, le=65536)] | None = None
    fuses_attention_backward: bool | None = None
    fp8_attention: bool | None = None
    compiles: bool | None = None
    overlaps_tensor: bool | None = None
    fuses_experts: bool | None = None
    gradient_format: Annotated[WireFormat, Lax] | None = None
    parameter_format: Annotated[WireFormat, Lax] | None = None
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
    spike_window: Annotated[int, BeforeValidator(whole), Field(ge=8, le=10**4)] = 128
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
    trackers: Annotated[tuple[Annotated[Tracker, Lax], ...], Lax] = ()
    faults: FaultsSection = FaultsSection()


class KernelsSection(RunFileSection):
    """Routes of training kernels by operation, a tuned table, activations in 8 bits, the cache of 8-bit weights, and
    tokens whose logits are in memory at once."""

    routes: dict[Text, Text] = {}  # noqa: RUF012  pydantic copies it for each section
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
    task: Annotated[Task, Lax] = Task.PRETRAIN
    lora: InlineLora | None = None
    data: DataSection
    batch: BatchSection
    optimizer: OptimizerSection = OptimizerSection()
    precision: Text = "bf16"
    cluster: Annotated[
        Annotated[Text, _Word] | Annotated[NamedCluster, _Variant] | Annotated[InlineCluster, _Mapping],
        Discriminator(_cluster_kind),
    ]
    calibration: Text | None = None
    gemm_tuning: Text | None = None
    kernels: KernelsSection = KernelsSection()
    parallel: Annotated[
        Annotated[Literal["auto"], _Word] | Annotated[ParallelSection, _Mapping], Discriminator(_kind)
    ] = "auto"
    engine: EngineName = NATIVE
    stack: StackSection | None = None
    objective: Annotated[Objective, Lax] = Objective.THROUGHPUT
    costs: CostsSection = CostsSection()
    train: TrainSection = TrainSection()


@cache
def all_fields(root: type[RunFileSection] = RunFile) -> dict[str, FieldInfo]:
    """Every key of the schema with its path: `model`, `model.hidden`, ... in the order of the classes."""
    return dict(_fields(root, ""))


def known_keys(path: tuple[str | int, ...], root: type[RunFileSection] = RunFile) -> list[str]:
    """The keys that a mapping at `path` may have."""
    prefix = "".join(f"{part}." for part in path)
    below = [key.removeprefix(prefix) for key in all_fields(root) if key.startswith(prefix)]
    return [key for key in below if "." not in key]


def _fields(section: type[RunFileSection], above: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        yield above + name, field
        for below, path in _sections(field.annotation, f"{above}{name}."):
            yield from _fields(below, path)


def _sections(annotation: Any, above: str) -> Iterator[tuple[type[RunFileSection], str]]:
    """The sections of a key, and their places; sections of a mapping stand below a `NAME` of the user's."""
    if isinstance(annotation, type) and issubclass(annotation, RunFileSection):
        yield annotation, above
    is_mapping = get_origin(annotation) is dict
    for part in get_args(annotation):
        yield from _sections(part, f"{above}NAME." if is_mapping else above)
