"""Accelerators that Meshwright knows by name, the system each is usually sold in, and the names drivers give them.

A driver's name (`driver_names` of an entry) is exact: a device whose name no entry lists is unknown. A GB200 is not a
B200, and an H200 NVL is not an H200. Capitals, runs of spaces and the prefix "NVIDIA" do not matter; older drivers
leave the prefix out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from meshwright.catalog.entries import DATA, CatalogEntry, CatalogKind, by_name, entry, names
from meshwright.files import record_of, toml_table
from meshwright.specs.hardware import Accelerator

OTHER_KEYS = (
    "default_fabric", "devices_per_node", "host_memory_bytes", "announced", "marketed_memory", "pci_ids",
)  # fmt: skip
"""Keys of an entry that are no fields of `Accelerator`: its usual system, its marketing, its names."""


def accelerator_names() -> tuple[str, ...]:
    """Names of all accelerators in the catalogue."""
    return names(CatalogKind.ACCELERATOR)


@by_name
@cache
def accelerator(name: str) -> Accelerator:
    """The accelerator `name`; names under which published runs list it work too.

    Raises UnknownNameError with the nearest known name: an unknown device is never a silent A100.

    >>> accelerator("H100-SXM-80GB").name
    'h100'
    >>> accelerator("mi355x").peak_flops_per_s["bf16"] / 1e12
    2500.0
    """
    return accelerator_of(entry(CatalogKind.ACCELERATOR, name))


def accelerator_of(found: CatalogEntry) -> Accelerator:
    """Return the accelerator that an entry describes, of the catalogue or of a user's file."""
    values = {key: value for key, value in found.values.items() if key not in OTHER_KEYS}
    values["peak_flops_per_s"] = {f: float(peak) for f, peak in values["peak_flops_per_s"].items()}
    values["memory_bytes"] = int(values["memory_bytes"])
    values["driver_names"] = tuple(map(_normal_driver_name, values.get("driver_names", ())))
    return Accelerator(name=found.name, aliases=found.aliases, sources=found.sources, **values)


@by_name
def default_fabric_name(accelerator_name: str) -> str:
    """Name of the fabric of the system that this accelerator usually comes in."""
    return entry(CatalogKind.ACCELERATOR, accelerator_name).values["default_fabric"]


@by_name
def usual_devices_per_node(accelerator_name: str) -> int:
    """Devices in one node of the system that this accelerator usually comes in."""
    return entry(CatalogKind.ACCELERATOR, accelerator_name).values["devices_per_node"]


def host_memory_of(found: CatalogEntry, devices_per_node: int) -> float | None:
    """Bytes of a host: the usual system's share for as many devices; None where the entry does not know it."""
    size = found.values.get("host_memory_bytes")
    return size and size * devices_per_node / found.values.get("devices_per_node", devices_per_node)


@by_name
def status_of(accelerator_name: str) -> str:
    """A sentence on a device with announced figures and without measured rates; empty for others.

    >>> status_of("h200")
    ''
    """
    return entry(CatalogKind.ACCELERATOR, accelerator_name).assumptions.get("all", "")


@by_name
def accelerator_with_driver_name(name: str) -> str | None:
    """Catalogue name of the device that its driver calls `name`, or None when no entry lists that name.

    `name` is what `torch.cuda.get_device_name`, nvidia-smi, amd-smi or rocm-smi print.

    >>> accelerator_with_driver_name("NVIDIA H100 80GB HBM3"), accelerator_with_driver_name("NVIDIA H200 NVL")
    ('h100', None)
    """
    return _driver_names().get(_normal_driver_name(name))


def has_driver_name(accelerator: Accelerator, name: str) -> bool:
    """Return True if the driver calls devices of this accelerator, of the catalogue or of a user's file, `name`."""
    return _normal_driver_name(name) in accelerator.driver_names


@by_name
def driver_name_of_pci_id(pci_id: str) -> str | None:
    """Driver name of the device with this `VENDOR:DEVICE` on the PCI bus, or None when no entry lists it.

    >>> driver_name_of_pci_id("1002:75a3")
    'AMD Instinct MI355X'
    """
    return _pci_ids().get(pci_id.lower())


@cache
def _driver_names() -> dict[str, str]:
    return {
        _normal_driver_name(driver_name): name
        for name in accelerator_names()
        for driver_name in entry(CatalogKind.ACCELERATOR, name).values.get("driver_names", ())
    }


@cache
def _pci_ids() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in accelerator_names():
        found |= entry(CatalogKind.ACCELERATOR, name).values.get("pci_ids", {})
    return found


def _normal_driver_name(name: str) -> str:
    return " ".join(name.lower().split()).removeprefix("nvidia ")


@dataclass(frozen=True, kw_only=True)
class ProductLine:
    """Accelerators that succeed one another, oldest generation first."""

    vendor: str
    name: str
    generations: tuple[tuple[str, ...], ...]
    source: str

    def index(self, accelerator: str) -> int | None:
        """Number of the generation of an accelerator, from 0; None: it is not of this line."""
        return next((i for i, names in enumerate(self.generations) if accelerator in names), None)


@cache
def product_lines() -> tuple[ProductLine, ...]:
    """All known lines."""
    return tuple(record_of(ProductLine, row) for row in toml_table(DATA / "generations.toml")["line"])


def line_of_succession(older: str, newer: str) -> ProductLine | None:
    """The line in which `newer` is of a later generation than `older`; None: there is none.

    >>> line_of_succession("tpu-v4", "tpu-v5p").name
    'TPUs with 3D tori'
    >>> line_of_succession("tpu-v5e", "tpu-v5p") is None, line_of_succession("h200", "a100") is None
    (True, True)
    """
    for line in product_lines():
        first, second = line.index(older), line.index(newer)
        if first is not None and second is not None and first < second:
            return line
    return None
