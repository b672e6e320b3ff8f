"""One measured device: the file that `meshwright calibrate` writes and the planner reads.

It holds the rates of a device that is not in the catalogue, parameters of the cost model with their standard
deviations, efficiency corrections of its kernels, and measured collectives. A plan for `cluster: here` needs only this
file, not torch.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.calibration import communication, correction
from meshwright.calibration.communication import MeasuredCollectives
from meshwright.calibration.correction import EfficiencyCorrection
from meshwright.calibration.parameters import Calibration, MeasuredParameter, fitted, prior
from meshwright.errors import InputError
from meshwright.files import document_of, refused_with
from meshwright.json_values import load_json
from meshwright.specs.hardware import HERE, Accelerator, Cluster, Fabric

SCHEMA = "meshwright device calibration 4"

PROCESSOR_SECONDS = {"kernel_s", "data_layer_s", "step_s"}
"""Parameters that are seconds of a CPU core. They grow with the oversubscription if processes outnumber cores."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Rates, parameters and corrections of a process that has some threads of the CPU."""

    peak_flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    parameters: Mapping[str, MeasuredParameter]
    corrections: Mapping[str, EfficiencyCorrection]


@dataclass(frozen=True, kw_only=True)
class Check:
    """A step that was timed when the device was measured. Timing it again shows if the machine is as fast."""

    run: str  # run file of one process
    num_processes: int  # that ran such steps at the same time
    seconds: float
    spread: float  # longest over shortest of its measuring windows


@dataclass(frozen=True, kw_only=True)
class DeviceCalibration:
    """Everything that the records of one device give."""

    accelerator: Accelerator
    fabric: Fabric
    num_devices: int  # of the machine that was measured
    shares_host: bool  # devices are processes on one CPU, with common cores and memory
    num_cores: int = 1  # threads of that machine; more processes oversubscribe it
    parameters: Mapping[str, MeasuredParameter]
    corrections: Mapping[str, EfficiencyCorrection]  # "gemm/forward/bf16" -> ...
    by_threads: Mapping[int, Kernels] = field(default_factory=dict)  # of a process with fewer threads than cores
    collectives: MeasuredCollectives = field(default_factory=MeasuredCollectives)
    contention: Mapping[int, float] = field(default_factory=dict)
    """Processes -> time of a step over that on an equal part of the machine without contention; 1 process: 1."""
    by_processes: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """Parameter -> processes -> factor on its value: time around collectives grows with the processes that wait."""
    unexplained_sd: float | None = None
    """Standard deviation of the logarithm of whole steps in leave-one-out; None: no steps were measured."""
    checks: tuple[Check, ...] = ()
    made: str  # one line: of what, when, with which software
    details: Mapping[str, Any] = field(default_factory=dict)  # errors, records, sources; not used in estimates

    def calibration(self, base: Calibration | None = None, *, num_devices: int | None = None) -> Calibration:
        """The shipped calibration with the measured values in place, for `num_devices` devices of this machine."""
        count = num_devices or self.num_devices
        parameters, corrections = dict(self.parameters), self.corrections
        if self.shares_host:
            _, kernels = self._kernels(count)
            if kernels is not None:
                parameters, corrections = {**parameters, **kernels.parameters}, kernels.corrections
            for name in PROCESSOR_SECONDS & parameters.keys():
                parameters[name] = _times(parameters[name], self.cpu_oversubscription(count))
        for name, factors in {**self.by_processes, "general_factor": self.contention}.items():
            if factors and name in parameters:
                parameters[name] = _times(parameters[name], _between(factors, count))
        measured = (base or fitted()).with_measured(parameters, made=self.made)
        collectives = replace(self.collectives, processes_per_host=count if self.shares_host else 1)
        measured = replace(measured, corrections=corrections, collectives=collectives)
        if self.unexplained_sd is None:
            return measured
        return replace(measured, residual_sd=dict.fromkeys(("dense", "moe"), self.unexplained_sd), stranger_sd={})

    def cpu_oversubscription(self, count: int) -> float:
        """Processes for each core."""
        return max(1.0, count / self.num_cores)

    def _kernels(self, count: int) -> tuple[int, Kernels | None]:
        """(threads, measurements with them) of one of `count` processes; None: equal parts of the whole machine."""
        threads = max(1, self.num_cores // count)
        if not self.by_threads or threads == self.num_cores:
            return threads, None
        nearest = min(self.by_threads, key=lambda known: abs(math.log(known / threads)))
        return threads, _scaled(self.by_threads[nearest], threads / nearest)

    def cluster(self, num_devices: int | None = None) -> Cluster:
        """This machine with `num_devices` devices. Processes on one CPU get equal parts of its rates and memory."""
        count = num_devices or self.num_devices
        if not self.shares_host and count > self.num_devices:
            raise InputError(
                "the machine that was measured has fewer devices", got=count, allowed=f"<= {self.num_devices}"
            )
        accelerator = self.accelerator
        if self.shares_host:
            _, kernels = self._kernels(count)
            oversubscription = self.cpu_oversubscription(count)
            accelerator = (
                _equal_part(accelerator, count)
                if kernels is None
                else _oversubscribed(accelerator, kernels, count=count, factor=oversubscription)
            )
            accelerator = replace(accelerator, cpu_oversubscription=oversubscription)
        fabric = replace(self.fabric, scale_up_domain=max(count, self.fabric.scale_up_domain))
        return Cluster(name=HERE, accelerator=accelerator, fabric=fabric, devices_per_node=count, num_nodes=1)


def _between(factors: Mapping[int, float], count: int) -> float:
    """The factor at `count` processes, interpolated in logarithms; constant outside the known counts."""
    known = sorted(factors)
    logs = [math.log(factors[n]) for n in known]
    return math.exp(float(np.interp(math.log(count), [math.log(n) for n in known], logs)))


def _times(measured: MeasuredParameter, factor: float) -> MeasuredParameter:
    return replace(measured, value=measured.value * factor)


def _equal_part(accelerator: Accelerator, count: int) -> Accelerator:
    return replace(
        accelerator,
        peak_flops_per_s={name: rate / count for name, rate in accelerator.peak_flops_per_s.items()},
        memory_bytes_per_s=accelerator.memory_bytes_per_s / count,
        memory_bytes=accelerator.memory_bytes // count,
    )


def _scaled(kernels: Kernels, factor: float) -> Kernels:
    peaks = {name: rate * factor for name, rate in kernels.peak_flops_per_s.items()}
    return replace(kernels, peak_flops_per_s=peaks, memory_bytes_per_s=kernels.memory_bytes_per_s * factor)


def _oversubscribed(accelerator: Accelerator, kernels: Kernels, *, count: int, factor: float) -> Accelerator:
    """One of `count` processes, `factor` of which take turns on the same cores."""
    return replace(
        accelerator,
        peak_flops_per_s={name: rate / factor for name, rate in kernels.peak_flops_per_s.items()},
        memory_bytes_per_s=kernels.memory_bytes_per_s / factor,
        memory_bytes=accelerator.memory_bytes // count,
    )


FIRST = (
    "made", "accelerator", "fabric", "num_devices", "shares_host", "num_cores", "contention", "by_processes",
    "unexplained_sd", "parameters",
)  # fmt: skip
LAST = ("by_threads", "checks")
"""Fields of a calibration before and after its details, in the order of its document."""


def to_document(found: DeviceCalibration) -> dict[str, Any]:
    """JSON document."""
    first, last = ({name: _document(getattr(found, name)) for name in names} for names in (FIRST, LAST))
    measured = {"measured_collectives": found.collectives, "corrections": found.corrections}
    return {"schema": SCHEMA, **first, **found.details, **last, **_document(measured)}


def _document(value: Any) -> Any:
    if isinstance(value, EfficiencyCorrection):
        return correction.to_document(value)
    if isinstance(value, MeasuredCollectives):
        return communication.to_document(value)
    if isinstance(value, Mapping):
        return {str(key): _document(item) for key, item in value.items()}
    if is_dataclass(value):
        return {f.name: _document(getattr(value, f.name)) for f in fields(value)}
    return [_document(item) for item in value] if isinstance(value, tuple) else value


def load(path: str | os.PathLike[str]) -> DeviceCalibration:
    """The calibration in the file at `path`. Raises InputError with the file's fault."""
    file = Path(path)
    try:
        return _read(os.fspath(file.resolve()), file.stat().st_mtime_ns)
    except OSError as error:
        raise InputError(
            f"calibration {os.fspath(file)!r} cannot be read ({error.strerror})",
            hint="`meshwright calibrate RECORDS --out FILE` writes one",
        ) from None


@lru_cache(maxsize=4)
def _read(path: str, changed_ns: int) -> DeviceCalibration:
    try:
        document = load_json(Path(path))
    except ValueError as error:
        where = f"{path}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else path
        raise InputError(f"{where}: not a JSON document") from None
    refusal = f"{path}: not a calibration of a device"
    with refused_with(refusal):
        return _from_document(document_of(document, schema=SCHEMA, refusal=refusal))


STATED = ("network_of", "links_of")
"""Fields of a fabric about a run's own statements on it."""


def _from_document(document: Mapping[str, Any]) -> DeviceCalibration:
    known = {"schema", *FIRST, *LAST, "measured_collectives", "corrections"}
    parameters = _parameters(document["parameters"])
    accelerator = Accelerator(**{**document["accelerator"], "aliases": (), "driver_names": ()})
    rates = [accelerator.memory_bytes_per_s, *accelerator.peak_flops_per_s.values()]
    if not all(rate > 0 for rate in rates):
        raise ValueError("rates of the accelerator are above 0")
    unexplained = document["unexplained_sd"]
    return DeviceCalibration(
        accelerator=accelerator,
        fabric=Fabric(**{f.name: document["fabric"][f.name] for f in fields(Fabric) if f.name not in STATED}),
        num_devices=int(document["num_devices"]),
        shares_host=bool(document["shares_host"]),
        num_cores=max(1, int(document["num_cores"])),
        parameters=parameters,
        by_threads={int(count): _kernels_from(k) for count, k in document["by_threads"].items()},
        checks=tuple(_check(check) for check in document["checks"]),
        collectives=communication.from_document(document["measured_collectives"]),
        contention=_factors_from(document["contention"]),
        by_processes={name: _factors_from(f) for name, f in document["by_processes"].items()},
        unexplained_sd=None if unexplained is None else float(unexplained),
        corrections={name: correction.from_document(s) for name, s in document["corrections"].items()},
        made=str(document["made"]),
        details={key: value for key, value in document.items() if key not in known},
    )


def _check(document: Mapping[str, Any]) -> Check:
    check = Check(**document)
    if not (check.seconds > 0 and check.spread >= 1):
        raise ValueError("a timed step must have taken time")
    return check


def _factors_from(document: Mapping[str, Any]) -> dict[int, float]:
    factors = {int(count): float(factor) for count, factor in document.items()}
    if not all(count > 0 and factor > 0 for count, factor in factors.items()):
        raise ValueError("numbers of processes and their contention factors are above 0")
    return factors


def _parameters(document: Mapping[str, Any]) -> dict[str, MeasuredParameter]:
    parameters = {name: MeasuredParameter(**value) for name, value in document.items()}
    for name, measured in parameters.items():
        parameter = prior().parameters.get(name)
        if parameter is None:
            raise ValueError(f"the cost model has no parameter {name!r}")
        most = 1.0 if parameter.transform == "logit" else float("inf")
        if not (0 < measured.value < most and measured.sd >= 0):
            raise ValueError(f"parameter {name!r} is out of range")
    return parameters


def _kernels_from(document: Mapping[str, Any]) -> Kernels:
    kernels = Kernels(
        peak_flops_per_s={name: float(rate) for name, rate in document["peak_flops_per_s"].items()},
        memory_bytes_per_s=float(document["memory_bytes_per_s"]),
        parameters=_parameters(document["parameters"]),
        corrections={name: correction.from_document(s) for name, s in document["corrections"].items()},
    )
    if not all(rate > 0 for rate in (kernels.memory_bytes_per_s, *kernels.peak_flops_per_s.values())):
        raise ValueError("rates of a processor are above 0")
    return kernels


def installed_path() -> Path:
    """Path of this user's calibration of this machine, under XDG_DATA_HOME or ~/.local/share."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "meshwright" / "here.json"
