"""Description of the system: the JSON of a submission, gathered from this machine.

A field that the machine does not tell is left empty and named, for the submitter to fill in with a file of their own.
No name of a host or a user is gathered.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.files import toml_table, write_atomically
from meshwright.json_values import load_json
from meshwright.mlperf.benchmarks import DATA
from meshwright.mlperf.check_system import SYSTEM_FIELDS
from meshwright.specs.hardware import HERE
from meshwright.specs.run import Run

NOTES = ("hw_notes", "sw_notes")
NONE = "N/A"
STACK = ("torch", "numpy", "mlperf-logging", "triton", "torchao")
FILE = "system.json"


@dataclass(frozen=True, kw_only=True)
class SystemDescription:
    """Fields by name, and those that neither the machine nor the submitter has given."""

    fields: Mapping[str, Any]
    missing: tuple[str, ...]


def describe_system(
    run: Run, *, submitter: str, division: str, status: str, given: Path | None = None, root: Path = Path("/")
) -> SystemDescription:
    """Describe this machine as a submission does; the fields of the JSON file `given` replace gathered ones."""
    nodes = 1 if run.cluster is None or run.cluster_name == HERE else run.cluster.num_nodes
    found: dict[str, Any] = dict.fromkeys(SYSTEM_FIELDS, "")
    found |= {"submitter": submitter, "division": division, "status": status, "number_of_nodes": str(nodes)}
    found |= _processor(root) | _memory(root) | _storage(root) | _network(root) | _accelerator() | _software(root)
    if not found["system_name"]:
        found["system_name"] = (
            f"{found['accelerators_per_node']}x{found['accelerator_model_name']}"
            if (found["accelerators_per_node"] != "0")
            else str(found["host_processor_model_name"])
        )
    if given is not None:
        try:
            content = load_json(given)
        except (OSError, ValueError) as error:
            raise InputError(f"{given}: the description of the system cannot be read: {error}") from error
        if not isinstance(content, dict):
            raise InputError(f"{given}: the description of a system is a JSON object", got=type(content).__name__)
        if wrong := [key for key, value in content.items() if not isinstance(value, str | int | float)]:
            raise InputError(f"{given}: fields are text or numbers", got=", ".join(wrong))
        found |= content
    missing = tuple(name for name in SYSTEM_FIELDS if name not in NOTES and found.get(name) in ("", None))
    return SystemDescription(fields=found, missing=missing)


def write_description(folder: Path, description: SystemDescription) -> Path:
    """Write the description into the folder of a set."""
    path = folder / FILE
    write_atomically(path, json.dumps(dict(description.fields), indent=2) + "\n")
    return path


def _text(root: Path, name: str) -> str:
    try:
        return (root / name).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _processor(root: Path) -> dict[str, str]:
    info = _text(root, "proc/cpuinfo")
    names = re.findall(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    sockets = set(re.findall(r"^physical id\s*:\s*(\d+)$", info, re.MULTILINE))
    cores = set(re.findall(r"^physical id\s*:\s*(\d+)$.*?^core id\s*:\s*(\d+)$", info, re.MULTILINE | re.DOTALL))
    num_threads = len(re.findall(r"^processor\s*:", info, re.MULTILINE)) or os.cpu_count() or 1
    khz = _text(root, "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
    mhz = re.findall(r"^cpu MHz\s*:\s*([\d.]+)$", info, re.MULTILINE)
    frequency = f"{int(khz) / 1000:.0f} MHz" if khz.isdigit() else f"{max(map(float, mhz)):.0f} MHz" if mhz else ""
    found = []
    for place in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (_text(place, name) for name in ("level", "type", "size"))
        if size:
            found.append(f"L{level} {kind.lower()} {size}")
    return {
        "host_processors_per_node": str(len(sockets) or 1),
        "host_processor_model_name": names[0] if names else platform.machine(),
        "host_processor_core_count": str(len(cores) // (len(sockets) or 1) or num_threads),
        "host_processor_vcpu_count": str(num_threads),
        "host_processor_frequency": frequency,
        "host_processor_caches": ", ".join(found),
        "host_processor_interconnect": NONE if len(sockets) <= 1 else "",
    }


def _memory(root: Path) -> dict[str, str]:
    kib = re.search(r"^MemTotal:\s*(\d+) kB", _text(root, "proc/meminfo"), re.MULTILINE)
    return {"host_memory_capacity": f"{int(kib[1]) / 2**20:.0f} GiB" if kib else ""}


def _storage(root: Path) -> dict[str, str]:
    kinds = set()
    for queue in (root / "sys/block").glob("*/queue/rotational"):
        name = queue.parent.parent.name
        if not name.startswith(("loop", "ram", "zram", "dm-")):
            kinds.add(
                "NVMe SSD" if name.startswith("nvme") else "HDD" if _text(queue.parent, "rotational") == "1" else "SSD"
            )
    try:
        capacity = f"{shutil.disk_usage(root).total / 1e12:.2f} TB"
    except OSError:
        capacity = ""
    return {"host_storage_type": ", ".join(sorted(kinds)), "host_storage_capacity": capacity}


def _network(root: Path) -> dict[str, str]:
    """Speeds of network cards that have a device behind them, and InfiniBand ports."""
    found = []
    for card in sorted((root / "sys/class/net").glob("*")):
        speed = _text(card, "speed")
        if (card / "device").exists() and speed.isdigit():
            found.append(f"{int(speed) / 1000:g} Gbit/s Ethernet")
    found += [_text(rate.parent, "rate") for rate in sorted((root / "sys/class/infiniband").glob("*/ports/*/rate"))]
    counted = {name: found.count(name) for name in found}
    return {"host_networking": ", ".join(f"{count}x {name}" for name, count in counted.items())}


def _accelerator() -> dict[str, str]:
    from meshwright.training import device as devices

    device = devices.find_device()
    if device.type == "cpu":
        absent = dict.fromkeys(toml_table(DATA / "system.toml")["accelerator"], NONE)
        return {"accelerators_per_node": "0", "accelerator_model_name": NONE, **absent}
    return {
        "accelerators_per_node": str(devices.num_devices(device)),
        "accelerator_model_name": devices.device_name(device),
        "accelerator_memory_capacity": f"{(devices.memory_bytes(device) or 0) / 2**30:.0f} GiB",
    }


def _software(root: Path) -> dict[str, str]:
    versions = {}
    for name in ("meshwright", *STACK):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    release = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', _text(root, "etc/os-release"), re.MULTILINE))
    from meshwright.version import __version__

    return {
        "framework": f"Meshwright {__version__}, PyTorch {versions.pop('torch', '')}",
        "other_software_stack": ", ".join(
            [f"Python {platform.python_version()}", *(f"{k} {v}" for k, v in versions.items() if k != "meshwright")]
        ),
        "operating_system": f"{release.get('PRETTY_NAME', platform.system())}, kernel {platform.release()}",
    }
