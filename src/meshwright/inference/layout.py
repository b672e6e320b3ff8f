"""Split of a model over the devices of one replica, and the number of replicas.

    attention   `tensor` devices share the heads of a layer; `attention_data` such groups hold different sessions
    experts     `expert` x `expert_tensor` = `tensor` x `attention_data` devices share the experts of a layer
    layers      `pipeline` stages

A dense feed-forward block is split over all tensor x attention_data devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from meshwright.errors import InputError
from meshwright.specs.hardware import Cluster
from meshwright.specs.model import Model


@dataclass(frozen=True, kw_only=True)
class ServingLayout:
    """Degrees of parallelism of serving."""

    tensor: int = 1
    attention_data: int = 1
    expert: int = 1
    pipeline: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor", "attention_data", "expert", "pipeline", "replicas"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InputError(f"{name} is no degree of parallelism", got=value, allowed=">= 1")
        if self.group_size % self.expert:
            raise InputError(
                "expert does not divide the devices of a stage", got=self.expert,
                allowed=f"a divisor of tensor x attention_data = {self.group_size}",
            )  # fmt: skip

    @property
    def group_size(self) -> int:
        """Devices of one pipeline stage."""
        return self.tensor * self.attention_data

    @property
    def expert_tensor(self) -> int:
        """Devices that share one expert."""
        return self.group_size // self.expert

    @property
    def replica_devices(self) -> int:
        """Devices of one replica."""
        return self.group_size * self.pipeline

    @property
    def num_devices(self) -> int:
        """Devices of all replicas."""
        return self.replica_devices * self.replicas

    def describe(self) -> str:
        """Return the degrees above 1.

        >>> ServingLayout(tensor=2, replicas=4).describe(), ServingLayout().describe()
        ('4 x TP2', 'TP1')
        """
        parts = [f"TP{self.tensor}"]
        if self.attention_data > 1:
            parts.append(f"ADP{self.attention_data}")
        if self.expert > 1:
            parts.append(f"EP{self.expert}")
        if self.pipeline > 1:
            parts.append(f"PP{self.pipeline}")
        text = " ".join(parts)
        return f"{self.replicas} x {text}" if self.replicas > 1 else text

    def as_json(self) -> dict[str, object]:
        return {
            "tensor": self.tensor, "attention_data": self.attention_data, "expert": self.expert,
            "pipeline": self.pipeline, "replicas": self.replicas, "text": self.describe(),
        }  # fmt: skip


def layout_of(degrees: Mapping[str, int], num_devices: int) -> ServingLayout:
    """The layout of the given degrees, with as many replicas as `num_devices` have room for.

    >>> layout_of({"tensor": 2}, 8).describe()
    '4 x TP2'
    """
    one = ServingLayout(**{**degrees, "replicas": 1})
    return replace(one, replicas=degrees.get("replicas") or max(1, num_devices // one.replica_devices))


def check_layout(layout: ServingLayout, model: Model, cluster: Cluster) -> None:
    """Raise InputError where the model or the cluster cannot be split so."""
    for message, got, allowed in problems(layout, model, cluster):
        raise InputError(message, got=got, allowed=allowed)


def problems(layout: ServingLayout, model: Model, cluster: Cluster) -> Iterator[tuple[str, object, str]]:
    """Problems of a layout, as (what, got, allowed)."""
    a, tensor = model.attention, layout.tensor
    if layout.num_devices > cluster.num_devices:
        yield (
            "the layout needs more devices than the cluster has", layout.num_devices,
            f"1 to {cluster.num_devices}",
        )  # fmt: skip
    if a.num_heads % tensor:
        yield "tensor does not divide the query heads", tensor, f"a divisor of {a.num_heads}"
    elif max(tensor, a.num_kv_heads) % min(tensor, a.num_kv_heads):
        yield (
            "tensor neither divides the key/value heads nor is a multiple of them", tensor,
            f"a divisor or a multiple of {a.num_kv_heads}",
        )  # fmt: skip
    if layout.pipeline > model.num_layers:
        yield "more pipeline stages than layers", layout.pipeline, f"1 to {model.num_layers}"
    if layout.expert > 1 and model.experts is None:
        yield "expert parallelism of a model without experts", layout.expert, "1"
    elif model.experts is not None and model.experts.num_experts % layout.expert:
        yield "expert does not divide the experts", layout.expert, f"a divisor of {model.experts.num_experts}"


def divisors(number: int) -> list[int]:
    """Divisors in ascending order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def legal_layouts(model: Model, cluster: Cluster) -> Iterator[ServingLayout]:
    """Layouts whose stages lie inside one scale-up domain and that use the whole cluster.

    Attention with sessions of its own on each device is for mixtures of experts: dense models take replicas. Pipeline
    stages are whole domains.
    """
    domain = min(cluster.fabric.scale_up_domain, cluster.num_devices)
    has_experts = model.experts is not None
    for group in divisors(domain):
        most = cluster.num_devices // group
        for pipeline in divisors(most) if group == domain else (1,):
            for tensor in divisors(group) if has_experts else (group,):
                for expert in sorted({1, group}) if has_experts else (1,):
                    layout = ServingLayout(
                        tensor=tensor, attention_data=group // tensor, expert=expert, pipeline=pipeline,
                        replicas=most // pipeline,
                    )  # fmt: skip
                    if next(problems(layout, model, cluster), None) is None:
                        yield layout
