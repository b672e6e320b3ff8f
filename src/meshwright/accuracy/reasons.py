"""Reasons why a published row cannot be predicted: a closed list, so that reports can count them."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Reasons, most basic first. The value is the text of the report."""

    NO_RATE = "no rate given"
    FLOPS_ONLY = "only FLOP/s or utilisation given, no rate"
    OTHER_TASK = "not a step of pretraining or fine-tuning"
    END_TO_END = "end-to-end figure, not a steady state"
    NOT_MEMORY = "failed for another reason than memory"
    VARIED_LENGTHS = "padded sequences of different lengths"
    ABOVE_PEAK = "more FLOP/s than the device's peak"
    NO_ACCELERATOR = "accelerator not stated"
    UNKNOWN_ACCELERATOR = "accelerator not in the catalogue"
    NO_DEVICES = "number of devices not stated"
    UNKNOWN_ARCHITECTURE = "unknown architecture"
    NO_DIMENSIONS = "model dimensions not stated"
    NO_SEQUENCE_LENGTH = "no sequence length"
    NO_BATCH = "no batch size"
    NO_PARALLELISM = "parallelism not stated"
    UNKNOWN_PRECISION = "number format not modelled on this accelerator"
    INCONSISTENT = "conditions contradict each other"


class CannotPredictError(Exception):
    """Raised while one row is read; caught inside this package."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail
