"""Fields of `record.json` and `steps.jsonl` that results, reports and comparisons read.

docs/reference/record.md explains every key.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, TypeAdapter, model_validator

from meshwright.records.fields import Count, Fields, Loss, Number, Positive, Whole

Tiers = Literal["measured", "interpolated", "datasheet", "guessed"]


class Named(Fields):
    """Something with a name."""

    name: str


class PlanFields(Fields):
    """The degrees that a split of a step needs."""

    pipeline: Whole | None = None
    virtual_pipeline: Whole | None = None
    data_shard: Whole | None = None
    data_replicate: Whole | None = None


class RunFields(Fields):
    """The resolved run."""

    name: str
    plan_text: str = Field(alias="plan_in_words")
    model: Named
    task: str = ""
    sequence_length: Whole = 1  # absent: what needs it names it
    global_batch: Whole = 1
    micro_batch: Whole | None = None
    precision: Named = Named(name="")
    plan: PlanFields | None = None
    engine: str | None = None


class DeviceFields(Fields):
    """The device of a training."""

    name: str
    accelerator: str | None = None


class SpreadFields(Fields):
    """Number of steps, their median and range; None where there are none."""

    n: Count
    median: Positive | None = None
    low: Number | None = None
    high: Number | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> SpreadFields:
        if self.n and None in (self.median, self.low, self.high):
            raise ValueError("has no median, low or high")
        return self


class TargetFields(Fields):
    """Time to the target loss."""

    loss: Loss
    seconds: Number


class StatisticsFields(Fields):
    """Medians and totals over the steps."""

    steps: Count
    first_loss: Loss | None
    last_loss: Loss | None
    step_s: SpreadFields
    tokens_per_s_per_device: Number | None
    peak_memory_bytes: Number | None
    throughput: SpreadFields | None
    validation_loss: Loss | None = None
    mfu: Number | None
    mfu_convention: str | None = None
    num_devices: Whole | None = None
    tokens: Count | None = None
    target: TargetFields | None = None


class EstimateFields(Fields):
    """A predicted quantity with its interval."""

    value: Positive
    low: Positive
    high: Positive
    tier: Tiers

    @model_validator(mode="after")
    def _is_ordered(self) -> EstimateFields:
        if not self.low <= self.value <= self.high:
            raise ValueError("must have its value between low and high")
        return self


class PredictedFields(Fields):
    """Quantities predicted before the first step."""

    step: EstimateFields | Number | None = None
    tokens_per_s_per_device: EstimateFields | Number | None = None
    mfu: EstimateFields | Number | None = None
    memory_bytes: EstimateFields | Number | None = None


class ProfileFields(Fields):
    """Time by kind of kernel."""

    shares: dict[str, Number]


class RecordFields(Fields):
    """The content of `record.json`."""

    ending: str
    started: str
    run: RunFields
    device: DeviceFields
    statistics: StatisticsFields
    predicted: PredictedFields | None = None
    profile: ProfileFields | None = None
    software: dict[str, Any] | None = None
    command: list[str] | None = None
    notes: list[str] | None = None

    @model_validator(mode="after")
    def _has_rates(self) -> RecordFields:
        if self.statistics.step_s.n and not (self.statistics.throughput and self.statistics.throughput.n):
            raise ValueError("has step times and no statistics.throughput")
        return self


class StepFields(Fields):
    """One line of `steps.jsonl`."""

    step: Count
    loss: Loss | None = None
    validation_loss: Loss | None = None
    step_s: Number | None = None
    tokens_per_s_per_device: Number | None = None
    memory_bytes: Number | None = None
    profiled: bool | None = None


STEPS: TypeAdapter[list[StepFields]] = TypeAdapter(list[StepFields])
