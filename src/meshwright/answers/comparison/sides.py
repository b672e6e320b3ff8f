"""Sides of a comparison: a side has values, each of one workload under stated conditions.

Side        one argument of `meshwright compare`: a record, several, an estimate, claims, published results
SideValue   one number of it, with samples or an interval, conditions and evidence
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from meshwright.catalog import lookup as catalog
from meshwright.errors import UnknownNameError
from meshwright.specs.hardware import Accelerator


class Evidence(StrEnum):
    """Origin of a value."""

    MEASURED = "measured here"
    PUBLISHED = "published"
    MLPERF = "MLPerf, published by MLCommons"
    MLPERF_UNVERIFIED = "MLPerf rules, unverified"
    EXTRAPOLATED = "extrapolated"
    MODELLED = "modelled"


class Better(StrEnum):
    """Direction of a metric."""

    HIGHER = "higher"
    LOWER = "lower"


class Statistic(StrEnum):
    """Function of the samples that gives the value; the bootstrap repeats it."""

    MEDIAN = "median"
    MEAN = "mean"
    OLYMPIC_MEAN = "mean without the fastest and the slowest"
    MAXIMUM = "maximum"
    NONE = "one value"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A quantity that can be compared. Values of two metrics never meet in one ratio."""

    name: str
    unit: str
    better: Better
    definition: str = ""


@dataclass(frozen=True, kw_only=True)
class SideValue:
    """One number of one workload. `conditions` has keys of `CONDITIONS`; an absent condition is not stated."""

    workload: str
    metric: Metric
    value: float
    samples: tuple[float, ...] = ()  # in the unit of the value
    low: float | None = None  # an interval without samples: that of a prediction
    high: float | None = None
    statistic: Statistic = Statistic.NONE
    sampled: str = ""  # what a sample is: step, run, repeat, submitter
    evidence: Evidence
    conditions: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Time of one device per token, in seconds, by cause. The parts add up to the inverse of tokens/s/device."""

    kernel_s: float
    communication_s: float  # exposed: no kernel runs at the same time
    bubble_s: float
    host_s: float  # waiting for the host, and everything else that waits
    note: str = ""

    @property
    def total_s(self) -> float:
        """Sum of the parts: the inverse of tokens/s/device."""
        return self.kernel_s + self.communication_s + self.bubble_s + self.host_s


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of a comparison. `breakdowns` are by workload; `facts` are for its endnote."""

    name: str
    kind: str
    values: tuple[SideValue, ...]
    facts: Mapping[str, str]
    breakdowns: Mapping[str, Breakdown] = field(default_factory=dict)
    not_split: str = ""  # reason that a training has no breakdown
    unreadable: tuple[str, ...] = ()  # records of a folder that could not be read
    cautions: tuple[str, ...] = ()

    def conditions(self, name: str) -> tuple[str, ...]:
        """The different values of one condition, in order."""
        return tuple(dict.fromkeys(v.conditions[name] for v in self.values if v.conditions.get(name)))


def stated(conditions: Mapping[str, str], evidence: Evidence) -> dict[str, str]:
    """Conditions of a value without those that are not stated, and its evidence."""
    return {k: v for k, v in conditions.items() if v} | {"evidence": evidence.value}


def shortened(texts: Sequence[str], *, most: int, separator: str = "; ") -> str:
    """The first `most` texts in one, and the number of the others."""
    more = f"{separator.strip(', ')} and {len(texts) - most} more" if len(texts) > most else ""
    return separator.join(texts[:most]) + more


def accelerator_named(device: Mapping[str, Any] | None) -> str:
    """The accelerator of a record's device, or the name of a device that the catalogue lacks."""
    return (device or {}).get("accelerator") or (device or {}).get("name") or ""


def known_accelerator(name: str) -> Accelerator | None:
    """The accelerator of a condition; None where it names none of the catalogue."""
    try:
        return catalog.accelerator(name.lower()) if name else None
    except UnknownNameError:
        return None


def software_text(software: Mapping[str, Any] | None, engine: str) -> str:
    """The packages of a record that decide its rates, with their versions."""
    shown = [n for n in (engine, "torch", "jax", "triton", "meshwright") if n in (software or {})]
    return ", ".join(f"{n} {(software or {})[n]}" for n in shown)


def sidecar_facts(side: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Facts of the endnote of a record with a sidecar."""
    return {
        "hardware": str((side.get("device") or {}).get("name") or "not in the record"),
        "software": _versions(side.get("software") or {}), "date": str(side["started"])[:10],
        "command": " ".join(side.get("command") or ()), "file": str(path),
    }  # fmt: skip


def _versions(software: Mapping[str, Any]) -> str:
    """Packages with their versions; a sweep has those of each engine."""
    return ", ".join(f"{n} ({_versions(v)})" if isinstance(v, Mapping) else f"{n} {v}" for n, v in software.items())


CONDITIONS = (
    "accelerator", "devices", "nodes", "model", "tokens of a sequence", "sequences of a step", "tokens of a request",
    "load", "precision", "parallelism", "engine", "software", "software date", "power", "client", "metric definition",
    "FLOP rule", "evidence",
)  # fmt: skip
"""Everything that may differ between two sides, in the order of the table."""

THROUGHPUT = Metric(name="throughput", unit="tokens/s/device", better=Better.HIGHER)
INGEST_RATE = Metric(name="ingestion rate", unit="chunks/s", better=Better.HIGHER)
SEARCHABLE = Metric(name="time to searchable", unit="s", better=Better.LOWER, definition="until the last chunk")
RECALL = Metric(name="recall", unit="ratio", better=Better.HIGHER, definition="against the exact index")
SEARCH_LATENCY = Metric(name="search latency", unit="s", better=Better.LOWER, definition="median over calls")
MFU = Metric(name="MFU", unit="ratio", better=Better.HIGHER)
MEMORY = Metric(name="memory", unit="bytes/device", better=Better.LOWER)
TIME_TO_TRAIN = Metric(name="time to train", unit="min", better=Better.LOWER)
KERNEL_TIME = Metric(name="kernel time", unit="s", better=Better.LOWER)
ROOFLINE = Metric(
    name="share of the roofline", unit="ratio", better=Better.HIGHER, definition="of the device's measured rates"
)
OUTPUT_RATE = Metric(name="output rate", unit="tokens/s", better=Better.HIGHER)
TOTAL_RATE = Metric(name="input and output rate", unit="tokens/s", better=Better.HIGHER)
TTFT = Metric(
    name="time to first token", unit="s", better=Better.LOWER,
    definition="median over requests, from sending to the first token",
)  # fmt: skip
CHUNK_GAP = Metric(
    name="gap between chunks", unit="s", better=Better.LOWER, definition="median, pooled over all requests"
)
TPOT = Metric(
    name="time per output token", unit="s", better=Better.LOWER,
    definition="(end - first token) / (output tokens - 1) of each request, median over requests",
)  # fmt: skip
E2E = Metric(name="request latency", unit="s", better=Better.LOWER, definition="median over requests")
