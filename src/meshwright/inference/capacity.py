"""Sessions and tokens that fit into the memory of a cluster. Plain arithmetic: nothing here was fitted.

    budget     = memory x ratio - weights - activations - workspaces - communicators        per device
    tokens     = budget / bytes of a cached token per device, x attention_data x replicas
    sessions   = floor(budget / bytes of a session of N tokens per device) x attention_data x replicas

The engine may use `ratio` of the memory. Activations are those of the widest layer for the tokens of one step.
A session never leaves its devices, so sessions are counted per group of devices and then summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from meshwright.errors import InfeasibleError, InputError
from meshwright.files import toml_table
from meshwright.inference.formats import DATA, StorageFormat
from meshwright.inference.layout import ServingLayout, check_layout, legal_layouts
from meshwright.inference.memory import cache_split, session_bytes, session_bytes_on_device, weight_bytes
from meshwright.specs.estimate import Shortfall
from meshwright.specs.hardware import Cluster
from meshwright.specs.memory_budget import MemoryBudget
from meshwright.specs.model import Model

MAX_CONTEXT = 10**9
"""Tokens of the longest session that can be asked for."""


@dataclass(frozen=True, kw_only=True)
class Reserve:
    """Memory besides weights and cache, per device (`data/reserve.toml`)."""

    memory_ratio: float
    other_bytes: float
    communicator_bytes: float
    batch_tokens: int
    sampled_sequences: int
    sources: dict[str, str]


@cache
def shipped_reserve() -> Reserve:
    """The reserve that applies where none is given."""
    return Reserve(**toml_table(DATA / "reserve.toml"))


@dataclass(frozen=True, kw_only=True)
class CapacityQuestion:
    """Model, cluster, formats and the length of a session in tokens."""

    model: Model
    cluster: Cluster
    weights: StorageFormat
    cache: StorageFormat
    context: int
    reserve: Reserve

    def __post_init__(self) -> None:
        if not 1 <= self.context <= MAX_CONTEXT:
            raise InputError("context is no length of a session", got=self.context, allowed=f"1 to {MAX_CONTEXT:,}")
        positions = self.model.learned_positions
        if positions and self.context > positions:
            raise InputError(
                f"{self.model.name} has a learned table of positions", got=self.context, allowed=f"1 to {positions:,}"
            )


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Memory of the fullest device of a layout, in bytes."""

    total: float
    usable: float
    weights: float
    activations: float
    workspace: float
    communicators: float

    @property
    def cache(self) -> float:
        """Bytes that are left for the KV cache; below 0 where the weights do not fit."""
        return self.usable - self.weights - self.activations - self.workspace - self.communicators

    def as_json(self) -> dict[str, float]:
        names = ("total", "usable", "weights", "activations", "workspace", "communicators", "cache")
        return {f"{name}_bytes": getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Sessions and tokens of one layout on the whole cluster."""

    layout: ServingLayout
    device: DeviceMemory
    max_sessions: int
    max_tokens: int
    cache_copies: float  # times that a cached value is stored in a replica
    shortfall: Shortfall | None

    @property
    def fits(self) -> bool:
        """Return True if at least one session of the asked length fits."""
        return self.max_sessions > 0

    @property
    def binds(self) -> str:
        """Limit of the sessions: weights that do not fit, or the KV cache."""
        return "weights" if self.device.cache <= 0 else "kv_cache"

    def as_json(self) -> dict[str, Any]:
        return {
            "layout": self.layout, "device": self.device.as_json(), "max_sessions": self.max_sessions,
            "max_tokens": self.max_tokens, "kv_copies": self.cache_copies, "fits": self.fits, "binds": self.binds,
        }  # fmt: skip


def capacity(question: CapacityQuestion, layout: ServingLayout) -> Capacity:
    """Sessions and tokens that `layout` holds. Raises InputError for a layout that the model or cluster refuses."""
    check_layout(layout, question.model, question.cluster)
    return _capacity(question, layout)


def capacities(question: CapacityQuestion) -> Sequence[Capacity]:
    """Every layout of the whole cluster, most tokens first; ties go to the one with fewer devices per replica."""
    found = [_capacity(question, layout) for layout in legal_layouts(question.model, question.cluster)]
    if not found:
        heads = question.model.attention.num_heads
        raise InfeasibleError(
            f"{question.model.name} has {heads} query heads, which no layout of {question.cluster.name} can split"
        )
    return sorted(found, key=lambda c: (-c.max_tokens, -c.max_sessions, -c.device.cache, c.layout.replica_devices))


def _capacity(question: CapacityQuestion, layout: ServingLayout) -> Capacity:
    device = device_memory(question, layout)
    left = max(device.cache, 0.0)
    groups = layout.attention_data * layout.replicas
    one = session_bytes_on_device(question.model, question.cache, question.context, layout)
    sessions = int(left // one) * groups
    tokens = int(left / (one / question.context)) * groups
    return Capacity(
        layout=layout,
        device=device,
        max_sessions=sessions,
        max_tokens=tokens,
        cache_copies=layout.tensor / cache_split(question.model, layout),
        shortfall=None if sessions else _shortfall(device, one, question),
    )


def device_memory(question: CapacityQuestion, layout: ServingLayout) -> DeviceMemory:
    """Memory of the fullest device, all but the KV cache."""
    reserve, total = question.reserve, question.cluster.accelerator.memory_bytes
    several = layout.replica_devices > 1
    return DeviceMemory(
        total=total,
        usable=MemoryBudget(capacity_bytes=total, ratio=reserve.memory_ratio).usable_bytes,
        weights=weight_bytes(question.model, question.weights).on_device(layout),
        activations=activation_bytes(question.model, layout, reserve),
        workspace=reserve.other_bytes,
        communicators=reserve.communicator_bytes if several else 0.0,
    )


def activation_bytes(model: Model, layout: ServingLayout, reserve: Reserve) -> float:
    """16-bit activations of the widest layer for the tokens of one step, and the logits of the sampled sequences."""
    a, x = model.attention, model.experts
    heads = (a.num_heads * (a.head_dim + a.v_dim) + 2 * a.num_kv_heads * a.head_dim) / layout.tensor
    dense = 3 * model.ffn_hidden / layout.group_size
    routed = 0.0
    if x is not None:
        routed = x.top_k * (model.hidden + 3 * x.ffn_hidden / layout.expert_tensor) / layout.expert
        routed += 3 * x.shared_hidden / layout.group_size
    per_token = 2 * (3 * model.hidden + max(heads, dense, routed))
    logits = reserve.sampled_sequences * model.vocab * 4 / layout.group_size
    return reserve.batch_tokens / layout.attention_data * per_token + logits


def _shortfall(device: DeviceMemory, one: float, question: CapacityQuestion) -> Shortfall:
    if device.cache <= 0:
        return Shortfall(
            what=f"{question.weights.name} weights of {question.model.name} and the engine's own memory, per device",
            needed=(device.usable - device.cache) / 1e9, available=device.usable / 1e9, unit="GB",
        )  # fmt: skip
    return Shortfall(
        what=f"KV cache of one session of {question.context:,} tokens, per device",
        needed=one / 1e9, available=device.cache / 1e9, unit="GB",
    )  # fmt: skip


def max_parameters(question: CapacityQuestion) -> float:
    """Parameters of the largest model that one device holds in the question's format, without any KV cache."""
    usable = question.cluster.accelerator.memory_bytes * question.reserve.memory_ratio
    return (usable - question.reserve.other_bytes) / question.weights.bytes_per_value


def kv_bytes_per_token(question: CapacityQuestion) -> float:
    """Mean bytes of a cached token of a session: less than a short session's where layers have windows."""
    return session_bytes(question.model, question.cache, question.context) / question.context
