"""A user's own accelerator: a TOML file with the keys of the catalogue's own entries.

    vendor = "Example"
    architecture = "Example 1"
    ...

`meshwright catalog template accelerator` prints one with comments. The file's name is the accelerator's name, so that
`my.toml` describes the accelerator of the cluster `my-8x4`. An architecture that nobody measured has the rates of
`rates_of`, or the prior of all architectures with its wide interval.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from meshwright.catalog import lookup as catalog
from meshwright.catalog.entries import DATA, CatalogEntry, CatalogKind, entry_of_text, normal_name
from meshwright.errors import InputError, RunFileError, nearest
from meshwright.runfile.document import read_text
from meshwright.runfile.problems import RunFileProblem, as_error
from meshwright.runfile.validate import validated
from meshwright.specs.hardware import HERE
from meshwright.specs.limits import Count, CountOrZero, Limits, NotNegative, Share

ENDING = ".toml"
TEMPLATE = DATA / "accelerator_template.toml"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")

NumberFormat = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "int8", "fp4"]
PeakRate = Annotated[float, Limits(ge=1e9, le=1e20)]
ByteRate = Annotated[float, Limits(ge=1e6, le=1e17)]
Bytes = Annotated[int, Limits(ge=10**8, le=10**15)]
Texts = tuple[str, ...]
Notes = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class AcceleratorFile:
    """Keys of an accelerator's file: `specs.hardware.Accelerator`, its usual system, its names, and the notes."""

    vendor: str
    architecture: str
    peak_flops_per_s: Annotated[Mapping[NumberFormat, PeakRate], Limits(min_length=1)]
    memory_bytes: Bytes
    memory_bytes_per_s: ByteRate
    num_compute_units: Count
    default_fabric: str
    devices_per_node: Count | None = None
    host_memory_bytes: Bytes | None = None
    die: str | None = None
    rates_of: str | None = None
    matrix_share: Share | None = None
    output_tiles: bool | None = None
    cpu_oversubscription: Annotated[float, Limits(ge=1, le=1000)] | None = None
    matrix_unit_width: CountOrZero | None = None
    jax_devices: Count | None = None
    tdp_w: Annotated[float, Limits(gt=0, le=1e6)] | None = None
    host_bytes_per_s: ByteRate | None = None
    scale_up_domain: Count | None = None
    scale_up_bytes_per_s: ByteRate | None = None
    scale_up_peer_bytes_per_s: ByteRate | None = None
    scale_out_bytes_per_s: ByteRate | None = None
    aliases: Texts = ()
    driver_names: Texts = ()
    pci_ids: Notes = field(default_factory=dict)
    announced: str | None = None
    marketed_memory: str | None = None
    sources: Notes = field(default_factory=dict)
    conflicts: Notes = field(default_factory=dict)
    assumptions: Notes = field(default_factory=dict)
    unknown: Notes = field(default_factory=dict)
    published: Mapping[str, NotNegative] = field(default_factory=dict)


def is_accelerator_file(text: str) -> bool:
    """Return whether the accelerator of a run file is a file rather than a name of the catalogue.

    >>> is_accelerator_file("./my.toml"), is_accelerator_file("h100")
    (True, False)
    """
    return text.endswith(ENDING) or os.sep in text


def accelerator_name(path: str | os.PathLike[str]) -> str:
    """Return the name of the accelerator that a file describes: the file's name, as look-ups compare it.

    >>> accelerator_name("hardware/My_GPU.toml")
    'my-gpu'
    """
    return normal_name(Path(path).name.removesuffix(ENDING))


def read_accelerator(path: str | os.PathLike[str]) -> CatalogEntry:
    """Return the entry that a user's file describes. Raises RunFileError with all that is wrong in it."""
    file, name = os.fspath(path), accelerator_name(path)
    text = read_text(path, kind="accelerator's file")
    try:
        found = entry_of_text(text, kind=CatalogKind.ACCELERATOR, name=name)
        content = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise RunFileError(f"is not TOML: {error}", file=file) from None
    problems = [*_problems_of_name(name, content), *_problems(content)]
    if problems:
        raise as_error(problems, file=file, places={}, most=len(problems))
    source = found.sources.get("all", f"as {Path(path).name} describes it, which names no source")
    return replace(found, sources={**found.sources, "all": source})


def _problems(content: Mapping[str, Any]) -> Iterator[RunFileProblem]:
    """Problems of each value by itself, and contradictions between two of them."""
    given = validated(AcceleratorFile, content)
    if isinstance(given, list):
        yield from given
    fabric = content.get("default_fabric")
    if isinstance(fabric, str) and fabric not in catalog.fabric_names():
        yield _unknown_name("default_fabric", fabric, catalog.fabric_names(), "`meshwright catalog clusters`")
    rates = content.get("rates_of")
    if isinstance(rates, str) and rates not in measured_architectures():
        yield _unknown_name("rates_of", rates, measured_architectures(), "leave it out for a prior")
    if isinstance(given, AcceleratorFile):
        yield from _contradictions(given)


def _unknown_name(key: str, got: str, known: tuple[str, ...], otherwise: str) -> RunFileProblem:
    close = nearest(got, known)
    return RunFileProblem(
        path=(key,), message="is not in the catalogue", got=got, allowed=", ".join(known),
        hint=f"did you mean {close!r}?" if close else otherwise,
    )  # fmt: skip


def _contradictions(given: AcceleratorFile) -> Iterator[RunFileProblem]:
    up, peer = given.scale_up_bytes_per_s, given.scale_up_peer_bytes_per_s
    if up is not None and peer is not None and peer > up:
        message = "is more than scale_up_bytes_per_s, the rate of all links"
        yield RunFileProblem(path=("scale_up_peer_bytes_per_s",), message=message, got=peer, allowed=f"<= {up:g}")
    peaks = [(f, given.peak_flops_per_s[f]) for f in ("fp32", "bf16", "fp8", "fp4") if f in given.peak_flops_per_s]
    for (wide, slow), (narrow, fast) in pairwise(peaks):
        if fast < slow:
            yield RunFileProblem(
                path=("peak_flops_per_s", narrow), message=f"is less than {wide}, which has more bits", got=fast,
                allowed=f">= {slow:g}", hint="leave out a format that the device does not multiply",
            )  # fmt: skip


def _problems_of_name(name: str, content: Mapping[str, Any]) -> Iterator[RunFileProblem]:
    """A name that no cluster can have, and names that belong to another device."""
    if not _NAME.fullmatch(name) or name == HERE:
        yield RunFileProblem(
            message=f"the file is named after the accelerator: got {name!r}, allowed: small letters, digits, . _ -",
            hint="rename the file",
        )  # fmt: skip
    aliases = content.get("aliases")
    listed = aliases if isinstance(aliases, list) else []
    for path, one in ((), name), *((("aliases",), alias) for alias in listed if isinstance(alias, str)):
        try:
            known = catalog.accelerator(one).name
        except InputError:
            continue
        yield RunFileProblem(
            path=path, message=f"{one!r} is a device of the catalogue ({known}), whose measurements are not yours",
            hint="give it another name" if path else f"rename the file, to my-{name}{ENDING} for example",
        )  # fmt: skip


@cache
def measured_architectures() -> tuple[str, ...]:
    """Return the architectures whose rates the shipped calibration has, in alphabetical order."""
    devices = map(catalog.accelerator, catalog.accelerator_names())
    return tuple(sorted({device.rates_of or device.architecture for device in devices}))


def assumptions_of(found: CatalogEntry) -> dict[str, str]:
    """Return the assumptions, by key, about a user's accelerator whose file leaves them out."""
    values, usual = found.values, catalog.fabric(found.values["default_fabric"])
    links = f"as on fabric {usual.name}"
    assumed = {
        "devices_per_node": f"{usual.scale_up_domain}, {links}",
        "scale_up_domain": f"{usual.scale_up_domain} devices, {links}",
        "scale_up_bytes_per_s": f"{usual.scale_up_bytes_per_s / 1e9:g} GB/s, {links}",
        "scale_up_peer_bytes_per_s": f"the share of all links that it has on fabric {usual.name}",
        "scale_out_bytes_per_s": f"{usual.scale_out_bytes_per_s / 1e9:g} GB/s, {links}",
        "host_bytes_per_s": "32 GB/s, PCIe 4 x16: offload is planned with it",
        "host_memory_bytes": "unknown: what a plan keeps in host memory is not checked against it",
        "tdp_w": "no power: energy is not estimated",
    }
    missing = {key: text for key, text in assumed.items() if key not in values}
    missing["latency, efficiency of links"] = f"as on fabric {usual.name}"
    return {**_assumed_rates(values), **missing}


def _assumed_rates(values: Mapping[str, Any]) -> dict[str, str]:
    """Whose efficiency the matrix units, kernels and memory have."""
    rates, architecture = values.get("rates_of"), values["architecture"]
    if rates:
        return {"efficiency": f"as {rates} has it, which rates_of names"}
    if architecture in measured_architectures():
        return {"efficiency": f"as on {architecture}, of which the catalogue has devices"}
    return {
        "efficiency": f"usual, with a wide interval: nothing is known of {architecture!r}; rates_of "
        f"names one that is like it: {', '.join(measured_architectures())}"
    }
