"""Results of the cost model: a value, its interval, and the tier of its worst input."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from meshwright.specs.memory_budget import FitVerdict, MemoryBudget


class Tier(IntEnum):
    """Origin of a number, best first. An estimate has the tier of its worst input."""

    MEASURED = 0  # on this very device, software and shape
    INTERPOLATED = 1  # between measurements of this device or stack
    DATASHEET = 2  # vendor's figure with a calibrated efficiency of a similar device
    GUESSED = 3  # an assumption, stated


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A value with an 80 % interval and the tier of its worst input. `unit` is as in `units`."""

    value: float
    low: float
    high: float
    unit: str
    tier: Tier

    def as_json(self) -> dict[str, object]:
        return {
            "value": self.value, "low": self.low, "high": self.high,
            "unit": self.unit, "tier": self.tier.name.lower(),
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Shortfall:
    """Reason that something is infeasible: the amount needed and the amount available."""

    what: str
    needed: float
    available: float
    unit: str

    def __str__(self) -> str:
        return f"{self.what}: needs {self.needed:g} {self.unit}, there is {self.available:g} {self.unit}"


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes per device on the fullest pipeline stage.

    `allocated` is the peak of the allocator. `reserved` is what the device must have: it adds fragmentation,
    communication buffers and the driver context.
    """

    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    workspace_bytes: float
    allocated_bytes: float
    reserved_bytes: float
    budget: MemoryBudget
    stage: int = 0
    details_bytes: dict[str, dict[str, float]] = field(default_factory=dict)  # by part and name; empty: not asked

    @property
    def capacity_bytes(self) -> float:
        """Memory of the device."""
        return self.budget.capacity_bytes

    @property
    def usable_bytes(self) -> float:
        """Memory that a plan may reserve."""
        return self.budget.usable_bytes

    @property
    def fits(self) -> bool:
        """True if the plan reserves no more than it may."""
        return bool(self.budget.fits(self.reserved_bytes))

    @property
    def fit_probability(self) -> float:
        """Probability that the plan's true memory is no more than it may reserve."""
        return self.budget.probability(self.reserved_bytes)

    @property
    def verdict(self) -> FitVerdict:
        """Verdict on the plan's memory: it fits, may fit or does not."""
        return self.budget.verdict(self.reserved_bytes)


@dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """One training step of one plan.

    The sum of `components_s` is `step` (seconds): compute by kernel family, exposed communication by axis, bubble,
    optimizer, host overhead, stragglers.
    """

    step: Estimate  # s
    tokens_per_s_per_device: Estimate
    mfu: Estimate  # ratio; model FLOPs, causal attention, dense peak of the matmul format
    model_flops_per_token: float
    components_s: dict[str, float]
    memory: MemoryEstimate
    details_s: dict[str, dict[str, float]] = field(default_factory=dict)  # of some components, by name
    notes: tuple[str, ...] = field(default=())
