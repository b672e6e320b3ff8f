"""Calibrated parameters: priors, fitted offsets, and the uncertainty of each.

    value = inverse_transform(transform(prior) + offset_of_all + Σ_levels offset[level, key])

A level names a property that a parameter may depend on (architecture, framework, fabric, ...); a key is one
value of it. Priors are written by hand in data/parameters.toml. Offsets are fitted and written to
data/step.json, each with its standard deviation and the number of rows behind it. A key without rows has
offset 0 and the full prior standard deviation, so an unknown accelerator or stack widens the interval.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.calibration.communication import MeasuredCollectives
from meshwright.calibration.correction import EfficiencyCorrection
from meshwright.files import toml_table

Factors = Mapping[str, str]
"""Level name -> key, for one run: {"architecture": "hopper", "framework": "nemo", ...}."""

_DATA = Path(__file__).parent / "data"
STEP_CALIBRATION = _DATA / "step.json"
"""The shipped offsets."""

ALL = "all"
"""The level with one key that every run has."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One quantity that is measured, not derived, with its prior."""

    name: str
    meaning: str
    transform: str  # log or logit
    prior: float
    sd: float  # prior standard deviation of the offset of all runs, in transformed units
    levels: Mapping[str, float]  # level -> prior standard deviation of one of its offsets
    source: str
    measured: Mapping[str, Any] = field(default_factory=dict)  # {"level", "values": {key: prior}, "source"}

    def prior_of(self, factors: Factors) -> float:
        """The prior for one run: a measured value where there is one, else the general prior."""
        if not self.measured:
            return self.prior
        return self.measured["values"].get(factors[self.measured["level"]], self.prior)

    def forward(self, value: float) -> float:
        """Return `value` in transformed units."""
        return math.log(value) if self.transform == "log" else math.log(value / (1 - value))

    def inverse(self, eta: NDArray[np.float64]) -> NDArray[np.float64]:
        """Out of transformed units."""
        return np.exp(eta) if self.transform == "log" else 1 / (1 + np.exp(-eta))


@dataclass(frozen=True, kw_only=True)
class Offset:
    """A fitted departure from the prior. `sd` is its conditional posterior standard deviation."""

    value: float
    sd: float
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class MeasuredParameter:
    """A parameter measured on the device and software for which it is used."""

    value: float
    sd: float  # of its logarithm


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Parameters and offsets. Without offsets it is the prior alone."""

    parameters: Mapping[str, Parameter]
    offsets: Mapping[tuple[str, str, str], Offset] = field(default_factory=dict)  # (parameter, level, key)
    residual_sd: Mapping[str, float] = field(default_factory=dict)  # of log step time: "dense", "moe", ...
    stranger_sd: Mapping[str, float] = field(default_factory=dict)
    """Of log step time, by kind of model (`cost.uncertainty.kinds_of`): what new sources err by besides."""
    memory_sd: float = 0.0
    """Of the logarithm of true over estimated memory; 0 of the prior, which has none measured."""
    made: str = "prior"
    corrections: Mapping[str, EfficiencyCorrection] = field(default_factory=dict)
    """Corrections of a measured device, by kernel and format: "gemm/forward/bf16"."""
    collectives: MeasuredCollectives = field(default_factory=MeasuredCollectives)  # of a measured machine

    def etas(self, factors: Sequence[Factors]) -> dict[str, NDArray[np.float64]]:
        """Transformed values, one array of len(factors) per parameter."""
        result = {}
        for p in self.parameters.values():
            shared = self._offset(p.name, ALL, ALL)
            result[p.name] = np.array(
                [
                    p.forward(p.prior_of(f)) + shared + sum(self._offset(p.name, lv, f[lv]) for lv in p.levels)
                    for f in factors
                ]
            )
        return result

    def values(self, etas: Mapping[str, NDArray[np.float64]]) -> dict[str, NDArray[np.float64]]:
        """Parameter values from transformed values."""
        return {name: self.parameters[name].inverse(eta) for name, eta in etas.items()}

    def sds(self, factors: Factors) -> dict[str, float]:
        """Standard deviation of each parameter for one run, in transformed units."""
        result = {}
        for p in self.parameters.values():
            variance = self._sd(p.name, ALL, ALL, p.sd) ** 2
            variance += sum(self._sd(p.name, level, factors[level], sd) ** 2 for level, sd in p.levels.items())
            result[p.name] = math.sqrt(variance)
        return result

    def with_intervals_of(self, other: Calibration) -> Calibration:
        """Return the calibration with `other`'s errors of strangers and of memory."""
        return replace(self, stranger_sd=other.stranger_sd, memory_sd=other.memory_sd)

    def with_measured(self, measured: Mapping[str, MeasuredParameter], *, made: str) -> Calibration:
        """Return the calibration with `measured` values. Fitted offsets of these parameters no longer count."""
        parameters = dict(self.parameters)
        for name, m in measured.items():
            p = parameters[name]
            sd = m.sd if p.transform == "log" else m.sd / (1 - m.value)
            parameters[name] = replace(p, prior=m.value, sd=sd, levels={}, measured={}, source=made)
        kept = {key: offset for key, offset in self.offsets.items() if key[0] not in measured}
        return replace(self, parameters=parameters, offsets=kept, made=made)

    def num_rows(self, level: str, key: str) -> int:
        """Rows behind the best known offset of `key`: 0 means nothing was measured there."""
        return max((o.num_rows for (_, lv, k), o in self.offsets.items() if (lv, k) == (level, key)), default=0)

    def _offset(self, parameter: str, level: str, key: str) -> float:
        offset = self.offsets.get((parameter, level, key))
        return 0.0 if offset is None else offset.value

    def _sd(self, parameter: str, level: str, key: str, prior_sd: float) -> float:
        offset = self.offsets.get((parameter, level, key))
        return prior_sd if offset is None else offset.sd


@cache
def prior() -> Calibration:
    """The parameters before any measurement."""
    entries = toml_table(_DATA / "parameters.toml")
    return Calibration(parameters={name: Parameter(name=name, **entry) for name, entry in entries.items()})


@cache
def fitted() -> Calibration:
    """The shipped calibration: prior and fitted offsets."""
    if not STEP_CALIBRATION.is_file():
        return prior()
    return from_document(json.loads(STEP_CALIBRATION.read_text(encoding="utf-8")))


def from_document(document: Mapping[str, object]) -> Calibration:
    """Read a document of `to_document`."""
    offsets = {
        (o["parameter"], o["level"], o["key"]): Offset(value=o["value"], sd=o["sd"], num_rows=o["num_rows"])
        for o in document["offsets"]  # pyright: ignore[reportGeneralTypeIssues]
    }
    return Calibration(
        parameters=prior().parameters,
        offsets=offsets,
        residual_sd=document["residual_sd"],  # pyright: ignore[reportArgumentType]
        stranger_sd=document["stranger_sd"],  # pyright: ignore[reportArgumentType]
        memory_sd=document["memory_sd"],  # pyright: ignore[reportArgumentType]
        made=str(document["made"]),
    )


def to_document(calibration: Calibration) -> dict[str, object]:
    """A JSON document with one line per offset."""
    return {
        "made": calibration.made,
        "residual_sd": dict(calibration.residual_sd),
        "memory_sd": round(calibration.memory_sd, 4),
        "stranger_sd": {kind: round(sd, 4) for kind, sd in sorted(calibration.stranger_sd.items())},
        "offsets": [
            {
                "parameter": parameter,
                "level": level,
                "key": key,
                "value": round(o.value, 5),
                "sd": round(o.sd, 5),
                "num_rows": o.num_rows,
            }
            for (parameter, level, key), o in sorted(calibration.offsets.items())
        ],
    }
