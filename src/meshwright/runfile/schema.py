"""The run file's keys: types, defaults and what one value alone must satisfy.

One class a section: a dataclass of `specs`, or one of these where the file has other keys. `resolve` looks names up and
checks what several values must satisfy together. docs/reference/run-file.md explains every key for users.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, is_dataclass
from functools import cache, reduce
from operator import or_
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import create_model
from pydantic.fields import FieldInfo

from meshwright.catalog.engines import planning_names
from meshwright.runfile.fields import RunFileSection, Text, checked, keys_of, section_of
from meshwright.specs import run as specs
from meshwright.specs.features import Features, Preset
from meshwright.specs.limits import Count, CountOrZero, Limits, Names, Size, SizeOrZero, Spelled, Tokens
from meshwright.specs.model import Attention, Lora, Model
from meshwright.specs.optimizers import OPTIMIZERS
from meshwright.specs.plan import RECOMPUTE_MODULES, AxisOrder, Offload, Schedule

_FOLLOW = ("num_kv_heads", "head_dim", "family")
"""Keys of a named model that null takes away, so that they follow from its other shapes."""


@dataclass(frozen=True, kw_only=True)
class InlineAttention(Attention):
    """Attention of an inline model. 0: it follows from the other keys."""

    num_kv_heads: Size = 0
    head_dim: Size = 0


@dataclass(frozen=True, kw_only=True)
class InlineModel(Model):
    """A model whose shapes stand in the run file."""

    name: str = "inline"
    attention: InlineAttention
    ffn_hidden: SizeOrZero = 0


def _changes(kind: type) -> Any:
    """The keys of `kind` and of the dataclasses below it, all optional, for `create_model`."""
    follow = _FOLLOW if issubclass(kind, InlineAttention | InlineModel) else ()
    keys = {name: _optional(hint) for name, hint in keys_of(kind).items()}
    return {name: (key | None, 0) if name in follow else (key, None) for name, key in keys.items()}


def _optional(hint: Any) -> Any:
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if isinstance(kind, type) and is_dataclass(kind):
        return create_model(f"{kind.__name__}Changes", __base__=RunFileSection, **_changes(kind))
    if NoneType in get_args(hint):
        return reduce(or_, (_optional(part) for part in get_args(hint)))
    return checked(hint)


_MtpLayers = checked(Annotated[int, Limits(ge=0, le=16)])
_ModelChanges = create_model(
    "_ModelChanges", __base__=RunFileSection, **_changes(InlineModel) | {"num_mtp_layers": (_MtpLayers, None)}
)


class ModelVariant(_ModelChanges):
    """A named model with other shapes: any keys of `InlineModel` in addition to its own."""

    base: Text


@dataclass(frozen=True, kw_only=True)
class DataSection(specs.Data):
    """Source of the tokens, and the length of a sequence."""

    sequence_length: Count


@dataclass(frozen=True, kw_only=True)
class BatchSection:
    """Size of an optimizer step and of a micro-batch."""

    global_tokens: Tokens | None = None
    global_sequences: Count | None = None
    label_tokens: Count | None = None
    micro: Literal["auto"] | Count | None = None


def _quantity(value: object) -> object:
    """A number as text, so that what reads it asks for its unit."""
    return f"{value}" if isinstance(value, int | float) and not isinstance(value, bool) else value


@dataclass(frozen=True, kw_only=True)
class StatedHardware:
    """Hardware that a run states in place of the catalogue's."""

    fabric: str | None = None
    network: Annotated[str | None, Spelled(_quantity)] = None
    oversubscription: Annotated[float, Limits(ge=1, le=1000)] | None = None
    device_memory: Annotated[str | None, Spelled(_quantity)] = None
    host_memory: Annotated[str | None, Spelled(_quantity)] = None
    power_w: Annotated[float, Limits(gt=0, le=1e6)] | None = None


@dataclass(frozen=True, kw_only=True)
class NamedCluster(StatedHardware):
    """A cluster by its name, with other hardware than the usual."""

    name: str
    accelerator: str | None = None


@dataclass(frozen=True, kw_only=True)
class InlineCluster(StatedHardware):
    """A cluster that has no name."""

    accelerator: str
    devices_per_node: Count
    num_nodes: Count


def _recompute_module(name: str) -> str:
    if name not in RECOMPUTE_MODULES:
        raise ValueError(f"unknown module; known: {', '.join(RECOMPUTE_MODULES)}")
    return name


_RecomputeModule = Annotated[str, _recompute_module]


@dataclass(frozen=True, kw_only=True)
class RecomputeSection:
    """Either the modules or the number of layers whose activations are computed again."""

    modules: Annotated[tuple[_RecomputeModule, ...], Limits(min_length=1)] | None = None
    layers: CountOrZero | None = None


@dataclass(frozen=True, kw_only=True)
class ParallelSection:
    """A pinned plan: `specs.plan.Plan` without its micro-batch."""

    data_shard: Count | None = None
    data_replicate: Count = 1
    tensor: Count = 1
    sequence_parallel: bool = True
    context: Count = 1
    pipeline: Count = 1
    virtual_pipeline: Count = 1
    layers_per_stage: Annotated[tuple[SizeOrZero, ...], Limits(min_length=1)] | None = None
    schedule: Schedule | None = None
    expert: Count = 1
    expert_tensor: Count = 1
    sharding: Literal["none", "optimizer", "gradients", "parameters"] = "optimizer"
    recompute: Literal["none", "selective", "full"] | RecomputeSection = "none"
    offload: Offload = Offload.NONE
    axis_order: AxisOrder = AxisOrder.PIPELINE_OUTERMOST


@dataclass(frozen=True, kw_only=True)
class StackRelease:
    """A release of the software, and whose switches it has."""

    framework: str | None = None
    preset: Preset | None = None
    vintage: Annotated[float, Limits(ge=2015, lt=2100)] | None = None


@dataclass(frozen=True, kw_only=True)
class StackSection(Features, StackRelease):
    """The software that runs the step: the keys of the release come first."""


def _with_own_defaults(value: object) -> object:
    """The `optimizer` section with the defaults that its optimizer has in place of AdamW's."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or name not in OPTIMIZERS:
        return value
    return value | {key: one for key, one in OPTIMIZERS[name].defaults.items() if value.get(key) is None}


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """The whole file."""

    name: str | None = None
    model: str | ModelVariant | InlineModel
    weights: str | None = None
    task: specs.Task = specs.Task.PRETRAIN
    lora: Lora | None = None
    data: DataSection
    batch: BatchSection
    optimizer: Annotated[specs.Optimizer, Spelled(_with_own_defaults)] = field(default_factory=specs.Optimizer)
    precision: str = "bf16"
    cluster: str | NamedCluster | InlineCluster
    calibration: str | None = None
    gemm_tuning: str | None = None
    kernels: specs.KernelChoices = field(default_factory=specs.KernelChoices)
    parallel: Literal["auto"] | ParallelSection = "auto"
    engine: Annotated[str, Names(planning_names)] = specs.NATIVE
    stack: StackSection | None = None
    objective: specs.Objective = specs.Objective.THROUGHPUT
    costs: specs.Costs = field(default_factory=specs.Costs)
    train: specs.Train = field(default_factory=specs.Train)


@cache
def all_fields(root: type = RunFile) -> dict[str, FieldInfo]:
    """Every key of the schema with its path: `model`, `model.hidden`, ... in the order of the classes."""
    return dict(_fields(section_of(root), ""))


def known_keys(path: tuple[str | int, ...], root: type = RunFile) -> list[str]:
    """The keys that a mapping at `path` may have."""
    prefix = "".join(f"{part}." for part in path)
    below = [key.removeprefix(prefix) for key in all_fields(root) if key.startswith(prefix)]
    return [key for key in below if "." not in key]


def _fields(section: type[RunFileSection], above: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, key in section.model_fields.items():
        yield above + name, key
        for below, path in _sections(key.annotation, f"{above}{name}."):
            yield from _fields(below, path)


def _sections(annotation: Any, above: str) -> Iterator[tuple[type[RunFileSection], str]]:
    """The sections of a key, and their places; sections of a mapping stand below a `NAME` of the user's."""
    if isinstance(annotation, type) and issubclass(annotation, RunFileSection):
        yield annotation, above
    is_mapping = get_origin(annotation) is dict
    for part in get_args(annotation):
        yield from _sections(part, f"{above}NAME." if is_mapping else above)
