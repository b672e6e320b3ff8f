"""A device as it was measured: the document that `meshwright calibrate` writes and the planner reads.

It holds the rates of the device where no catalogue has them, parameters of the cost model with their spread, surfaces
of its kernels, and what collectives took. Without torch: a plan for `cluster: here` needs only this file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from meshwright.catalog import surface as surfaces
from meshwright.catalog.calibration import Calibration, Measured, fitted, prior
from meshwright.catalog.surface import Surface
from meshwright.errors import InputError
from meshwright.specs.hardware import Accelerator, Cluster, Fabric

SCHEMA = "meshwright device calibration 1"
HERE = "here"


@dataclass(frozen=True, kw_only=True)
class DeviceCalibration:
    """What is known of one device from its records."""

    accelerator: Accelerator
    fabric: Fabric
    num_devices: int  # of the machine that was measured
    shares_host: bool  # its devices are processes that share the cores and the memory of one CPU
    parameters: Mapping[str, Measured]
    surfaces: Mapping[str, Surface]  # "gemm/forward/bf16" -> ...
    made: str  # one line: of what, when, with which software
    details: Mapping[str, Any] = field(default_factory=dict)  # errors, collectives, records: for readers

    def calibration(self, base: Calibration | None = None) -> Calibration:
        """The shipped calibration with what was measured in its place."""
        measured = (base or fitted()).with_measured(self.parameters, made=self.made)
        return replace(measured, surfaces=self.surfaces)

    def cluster(self, num_devices: int | None = None) -> Cluster:
        """This machine, with so many of its devices. Processes of one CPU divide its rates and its memory."""
        count = num_devices or self.num_devices
        if not self.shares_host and count > self.num_devices:
            raise InputError(
                "the machine that was measured has fewer devices", got=count, allowed=f"<= {self.num_devices}"
            )
        accelerator = _divided(self.accelerator, count) if self.shares_host else self.accelerator
        fabric = replace(self.fabric, scale_up_domain=max(count, self.fabric.scale_up_domain))
        return Cluster(name=HERE, accelerator=accelerator, fabric=fabric, devices_per_node=count, num_nodes=1)


def _divided(accelerator: Accelerator, count: int) -> Accelerator:
    return replace(
        accelerator,
        peak_flops_per_s={name: rate / count for name, rate in accelerator.peak_flops_per_s.items()},
        memory_bytes_per_s=accelerator.memory_bytes_per_s / count,
        memory_bytes=accelerator.memory_bytes // count,
    )


def to_document(found: DeviceCalibration) -> dict[str, Any]:
    """As JSON has it."""
    return {
        "schema": SCHEMA,
        "made": found.made,
        "accelerator": asdict(found.accelerator),
        "fabric": asdict(found.fabric),
        "num_devices": found.num_devices,
        "shares_host": found.shares_host,
        "parameters": {name: asdict(m) for name, m in found.parameters.items()},
        **found.details,
        "surfaces": {name: surfaces.to_document(s) for name, s in found.surfaces.items()},
    }


def load(path: str | os.PathLike[str]) -> DeviceCalibration:
    """The calibration in the file at `path`. Raises InputError with what is wrong with it."""
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
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        where = f"{path}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else path
        raise InputError(f"{where}: not a JSON document") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        got = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise InputError(f"{path}: not a calibration of a device", got=got, allowed=SCHEMA)
    try:
        return _from_document(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise InputError(f"{path}: not a calibration of a device: {what}") from None


def _from_document(document: Mapping[str, Any]) -> DeviceCalibration:
    known = {
        "schema", "made", "accelerator", "fabric", "num_devices", "shares_host", "parameters", "surfaces"
    }  # fmt: skip
    parameters = {name: Measured(**value) for name, value in document["parameters"].items()}
    for name, measured in parameters.items():
        parameter = prior().parameters.get(name)
        if parameter is None:
            raise ValueError(f"the cost model has no parameter {name!r}")
        most = 1.0 if parameter.transform == "logit" else float("inf")
        if not (0 < measured.value < most and measured.sd >= 0):
            raise ValueError(f"parameter {name!r} is out of range")
    accelerator = Accelerator(**{**document["accelerator"], "aliases": ()})
    rates = [accelerator.memory_bytes_per_s, *accelerator.peak_flops_per_s.values()]
    if not all(rate > 0 for rate in rates):
        raise ValueError("rates of the accelerator are above 0")
    return DeviceCalibration(
        accelerator=accelerator,
        fabric=Fabric(**{f.name: document["fabric"][f.name] for f in fields(Fabric)}),
        num_devices=int(document["num_devices"]),
        shares_host=bool(document["shares_host"]),
        parameters=parameters,
        surfaces={name: surfaces.from_document(s) for name, s in document["surfaces"].items()},
        made=str(document["made"]),
        details={key: value for key, value in document.items() if key not in known},
    )


def installed_path() -> Path:
    """Where this user's calibration of this machine lies: XDG_DATA_HOME, or ~/.local/share."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "meshwright" / "here.json"
