"""Fitted constants of serving: a value for all systems, and deviations by device, number format and engine.

    log(value) = log(prior) + x + Σ_factors x_factor        x ~ N(0, sd²), x_factor ~ N(0, sd_factor²)

Few rows cannot move a deviation far from zero (hierarchical shrinkage): a device or engine that no row names has the
common value, and the deviations' priors are part of its interval. `data/constants.json` has the fitted x, their
covariance, and the rows that they were fitted on; `python -m meshwright.inference.fit` writes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import numpy as np

from meshwright.arrays import FloatArray
from meshwright.cost.rates import system_rates
from meshwright.files import toml_table
from meshwright.inference.formats import DATA, computed_in
from meshwright.inference.rates import ServingRates
from meshwright.inference.serving import EngineTraits
from meshwright.inference.work import Placed, Served
from meshwright.specs.hardware import Stack
from meshwright.specs.precision import PRECISIONS


@dataclass(frozen=True, kw_only=True)
class ConstantPrior:
    """Prior of one constant: median, standard deviation of its logarithm, and of its deviations by factor."""

    name: str
    median: float
    sd: float
    by: Mapping[str, float]
    reason: str


PRIORS = tuple(ConstantPrior(name=name, **row) for name, row in toml_table(DATA / "priors.toml").items())
"""Constants and what was believed of them before any row was read."""

Factors = Mapping[str, str]
"""Values of the factors of one system: architecture, recipe, engine."""


SERVER = "server"
"""Factor of a server that was measured itself: all of its constants may differ (`inference.server_fit`)."""

SERVER_SD, UNPUBLISHED_SD = 0.3, 2.0
"""Standard deviation of a server's logarithm from the published systems of its architecture; and where no point of
that architecture was published, so that its datasheet and the constants of other devices say little."""


def factors_of(served: Served, engine: EngineTraits) -> Factors:
    """Factors by which constants may differ."""
    device = served.cluster.accelerator
    found = {
        "architecture": device.architecture,
        "recipe": f"{device.architecture}/{computed_in(served.weights, device)}",
        "vendor": device.vendor,
        "engine": engine.name,
    }
    return found | ({SERVER: engine.server} if engine.server else {})


def is_published(architecture: str) -> bool:
    """Return True if the shipped constants were fitted to points of this architecture."""
    return f"memory_ratio/architecture={architecture}" in shipped_constants().keys


@dataclass(frozen=True, kw_only=True)
class Unknown:
    """One number of a fit: a constant's common value, or its deviation for one value of one factor."""

    name: str
    factor: str = ""
    level: str = ""
    sd: float

    @property
    def key(self) -> str:
        """Name in the file of constants, as in `name/factor=level`."""
        return f"{self.name}/{self.factor}={self.level}" if self.factor else self.name


def unknowns(systems: Sequence[Factors]) -> list[Unknown]:
    """All unknowns of these systems, common values first."""
    common = [Unknown(name=p.name, sd=p.sd) for p in PRIORS]
    deviations = [
        Unknown(name=p.name, factor=factor, level=level, sd=sd)
        for p in PRIORS
        for factor, sd in p.by.items()
        for level in sorted({system[factor] for system in systems})
    ]
    servers = {system[SERVER]: is_published(system["architecture"]) for system in systems if SERVER in system}
    own = [
        Unknown(name=p.name, factor=SERVER, level=level, sd=SERVER_SD if known else UNPUBLISHED_SD)
        for p in PRIORS
        for level, known in sorted(servers.items())
    ]
    return common + deviations + own


def design(systems: Sequence[Factors], columns: Sequence[Unknown]) -> dict[str, FloatArray]:
    """For each constant a matrix of systems by unknowns: log(value / median) = matrix @ x."""
    matrices = {}
    for prior in PRIORS:
        rows = [
            [
                float(u.name == prior.name and (not u.factor or system.get(u.factor) == u.level))
                for u in columns
            ]
            for system in systems
        ]  # fmt: skip
        matrices[prior.name] = np.array(rows, dtype=float).reshape(len(systems), len(columns))
    return matrices


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Datasheet peaks of systems, one element each."""

    gemm: FloatArray
    gemm_ratio: FloatArray  # that large GEMMs reach in training
    bf16: FloatArray
    memory: FloatArray


def peaks_of(systems: Sequence[Served]) -> Peaks:
    """Dense peaks of the format that the GEMMs run in, of 16 bits, and of memory."""
    devices = [s.cluster.accelerator for s in systems]
    peaks = [d.limited_flops_per_s for d in devices]
    gemm = [p[computed_in(s.weights, d)] for p, s, d in zip(peaks, systems, devices, strict=True)]
    return Peaks(
        gemm=np.array(gemm),
        gemm_ratio=np.array([trained_gemm_ratio(s) for s in systems]),
        bf16=np.array([p.get("bf16", max(p.values())) for p in peaks]),
        memory=np.array([d.memory_bytes_per_s for d in devices]),
    )


TRAINED_WITH = "nemo"
"""Training software whose calibration stands for a device's GEMMs: the ratio depends on the device and its format."""

_RECIPES = {"fp4": {"AMD": "mxfp4"}, "tf32": {}}
_RECIPE_OF = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "fp4": "nvfp4"}


def trained_gemm_ratio(served: Served) -> float:
    """Share of the peak that large GEMMs reach on this device in this format, by the training calibration."""
    device = served.cluster.accelerator
    name = computed_in(served.weights, device)
    recipe = _RECIPES.get(name, {}).get(device.vendor, _RECIPE_OF.get(name, "bf16"))
    return _gemm_ratio(Placed(served.cluster), recipe)


@lru_cache(maxsize=256)
def _gemm_ratio(placed: Placed, recipe: str) -> float:
    rates = system_rates(placed.cluster, PRECISIONS[recipe], Stack(framework=TRAINED_WITH))
    return float(rates.device.gemm_ratio)


def rates_from(peaks: Peaks, matrices: Mapping[str, FloatArray], x: FloatArray) -> ServingRates:
    """Rates of all systems at the unknowns `x`."""
    values: dict[str, Any] = {p.name: p.median * np.exp(matrices[p.name] @ x) for p in PRIORS}
    values["gemm_ratio"] = np.minimum(values["gemm_ratio"] * peaks.gemm_ratio, 1.0)
    return ServingRates(gemm_peak=peaks.gemm, bf16_peak=peaks.bf16, memory_peak=peaks.memory, **values)


@dataclass(frozen=True, kw_only=True)
class ServingCalibration:
    """Fitted unknowns with their covariance, and the residual spread."""

    keys: tuple[str, ...]
    values: FloatArray
    covariance: FloatArray
    row_sd: float  # of the logarithm, between rows of one source
    source_sd: float  # between sources: what a system measured by somebody else is off
    interval_scale: float  # so that four of five rows of held-out sources lie in the interval
    num_rows: int
    sources: Mapping[str, int] = field(default_factory=dict)  # rows by source
    group_scales: Mapping[str, float] = field(default_factory=dict)  # `interval_scale` of a group of quantities

    def scale_of(self, group: str) -> float:
        """`interval_scale` of a group (`predict.interval_group`)."""
        return self.group_scales.get(group, self.interval_scale)

    def prior_and_values(self, columns: Sequence[Unknown]) -> tuple[FloatArray, FloatArray]:
        """Values and covariance of `columns`: those that were fitted, and the prior of the others."""
        place = {key: i for i, key in enumerate(self.keys)}
        found = [place.get(u.key, -1) for u in columns]
        values = np.array([self.values[i] if i >= 0 else 0.0 for i in found])
        covariance = np.diag([0.0 if i >= 0 else u.sd**2 for i, u in zip(found, columns, strict=True)])
        known = [k for k, i in enumerate(found) if i >= 0]
        rows = [found[k] for k in known]
        covariance[np.ix_(known, known)] = self.covariance[np.ix_(rows, rows)]
        return values, covariance


@cache
def shipped_constants() -> ServingCalibration:
    """The constants of `data/constants.json`."""
    import json

    return calibration_from(json.loads((DATA / "constants.json").read_text(encoding="utf-8")))


def calibration_from(document: Mapping[str, Any]) -> ServingCalibration:
    """The calibration of a document as `fit` writes it. Raises ValueError and others for a damaged one."""
    unknown = document["unknowns"]
    keys = tuple(unknown)
    sd = np.array([unknown[key]["sd"] for key in keys])
    correlation = np.zeros((len(keys), len(keys)))
    if len(document["correlation"]) != len(keys) * (len(keys) + 1) // 2:
        raise ValueError("correlation has another number of values")
    correlation[np.tril_indices(len(keys))] = document["correlation"]
    correlation = correlation + correlation.T - np.diag(np.diag(correlation))
    return ServingCalibration(
        keys=keys,
        values=np.array([unknown[key]["value"] for key in keys]),
        covariance=correlation * np.outer(sd, sd),
        row_sd=document["row_sd"],
        source_sd=document["source_sd"],
        interval_scale=document["interval_scale"],
        num_rows=document["num_rows"],
        sources=document["sources"],
        group_scales=document.get("group_scales", {}),
    )
