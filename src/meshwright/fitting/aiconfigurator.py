"""Reader of the measured kernel tables of aiconfigurator-core (NVIDIA, Apache-2.0): paths and columns.

    systems/data/SYSTEM/gemm/FRAMEWORK/VERSION/gemm_perf.parquet                 m, n, k, gemm_dtype
    systems/data/SYSTEM/attention/FRAMEWORK/VERSION/context_attention_perf...    batch_size, isl, num_heads, head_dim
    systems/data/SYSTEM/comm/nccl/VERSION/nccl_perf.parquet                      op_name, num_gpus, message_size

`latency` is in milliseconds, `message_size` in elements, of 2 bytes where `nccl_dtype` is "half". GEMMs take 16-bit
inputs: in a narrow format their time includes the quantization. Attention is causal and forward only.
The package is found but never imported: its compiled part is not needed here.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError, MissingDependencyError
from meshwright.programs import install_command

PACKAGE, MODULE = "aiconfigurator-core", "aiconfigurator_core"

SYSTEMS = {
    "a100": "a100_sxm", "h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm", "b300": "b300_sxm",
    "gb200": "gb200", "gb300": "gb300", "l40s": "l40s",
}  # fmt: skip
"""Accelerators of the catalogue and their folders. Others of the package are not in the catalogue."""

GEMM_FORMATS = {"bf16": "bfloat16", "fp8": "fp8", "fp4": "nvfp4"}
"""Number format -> its name in the tables. Not fp8_block: in some versions its small shapes measure the host."""

COLLECTIVES = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Package:
    """An installed package of tables."""

    name: str
    version: str
    licence: str
    data: Path

    def systems(self) -> list[str]:
        """Accelerators of the catalogue that have GEMM tables."""
        return [name for name, folder in SYSTEMS.items() if (self.data / folder / "gemm").is_dir()]


@dataclass(frozen=True, kw_only=True)
class KernelTable:
    """One file, as columns of equal length."""

    columns: Mapping[str, NDArray[Any]]
    file: str  # inside the package's data
    sha256: str
    framework: str
    version: str  # of the framework

    def where(self, chosen: NDArray[np.bool_]) -> KernelTable:
        """The rows where `chosen` is true."""
        columns = {name: values[chosen] for name, values in self.columns.items()}
        return KernelTable(**{**vars(self), "columns": columns})

    def numbers(self, *names: str) -> NDArray[np.float64]:
        """Return the columns of `names`, rows x names."""
        return np.stack([self.columns[name].astype(float) for name in names], axis=1)

    @property
    def seconds(self) -> NDArray[np.float64]:
        return self.columns["latency"].astype(float) * 1e-3

    def __len__(self) -> int:
        return len(self.columns["latency"])


def installed() -> Package:
    """Raises MissingDependencyError without the package or without what reads its files."""
    spec = find_spec(MODULE)
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependencyError(
            f"the kernel tables of {PACKAGE} are not installed", hint=install_command("tables")
        )
    if find_spec("pyarrow") is None:
        raise MissingDependencyError(f"the kernel tables of {PACKAGE} need pyarrow", hint=install_command("tables"))
    about = metadata.metadata(PACKAGE)
    return Package(
        name=PACKAGE,
        version=about["Version"],
        licence=next((about[key] for key in ("License-Expression", "License") if key in about), "not stated"),
        data=Path(next(iter(spec.submodule_search_locations))) / "systems" / "data",
    )


def gemms(package: Package, device: str, framework: str) -> KernelTable:
    """All GEMMs of `device` measured in `framework`. Raises InputError when there is none."""
    if device not in package.systems():
        raise InputError(
            f"{package.name} {package.version} has no tables of this accelerator",
            got=device, allowed=", ".join(package.systems()),
        )  # fmt: skip
    name = "gemm_perf.parquet"
    table = _newest(
        package, f"{SYSTEMS[device]}/gemm/{framework}", name, needed=("gemm_dtype", "m", "n", "k", "latency")
    )
    if table is None:
        files = (package.data / SYSTEMS[device] / "gemm").glob(f"*/*/{name}")
        there = sorted({file.parent.parent.name for file in files})
        raise InputError(
            f"{package.name} has no GEMM tables of {device} with this framework",
            got=framework, allowed=", ".join(there),
        )  # fmt: skip
    return table


def attention(package: Package, device: str, framework: str) -> KernelTable | None:
    """16-bit causal attention without a window, forward; None where it was not measured."""
    table = _newest(
        package,
        f"{SYSTEMS[device]}/attention/{framework}",
        "context_attention_perf.parquet",
        needed=("batch_size", "isl", "num_heads", "head_dim", "attn_dtype", "kv_cache_dtype", "latency"),
        wanted=("window_size",),
    )
    if table is None:
        return None
    c = table.columns
    chosen = (c["attn_dtype"] == "bfloat16") & (c["kv_cache_dtype"] == "bfloat16")
    return table.where(chosen & (c["window_size"] == 0) if "window_size" in c else chosen)


def collectives(package: Package, device: str) -> KernelTable | None:
    """16-bit collectives between all devices of a node; None where they were not measured."""
    table = _newest(
        package,
        f"{SYSTEMS[device]}/comm/nccl",
        "nccl_perf.parquet",
        needed=("op_name", "nccl_dtype", "num_gpus", "message_size", "latency"),
    )
    if table is None:
        return None
    c = table.columns
    return table.where((c["nccl_dtype"] == "half") & (c["num_gpus"] == c["num_gpus"].max()))


def _newest(
    package: Package, folder: str, name: str, *, needed: Sequence[str], wanted: Sequence[str] = ()
) -> KernelTable | None:
    """The table `name` of the newest version in `folder`."""
    files = sorted((package.data / folder).glob(f"*/{name}"), key=lambda file: _version_key(file.parent.name))
    if not files:
        return None
    file = files[-1]
    return KernelTable(
        columns=_read(file, needed, wanted),
        file=file.relative_to(package.data).as_posix(),
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        framework=file.parent.parent.name,
        version=file.parent.name,
    )


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _read(file: Path, needed: Sequence[str], wanted: Sequence[str]) -> dict[str, NDArray[Any]]:
    import pyarrow.parquet as parquet

    try:
        present = parquet.read_schema(file).names
        missing = [name for name in needed if name not in present]
        if missing:
            raise InputError(
                f"{file}: not a table as {PACKAGE} 0.12 has it", got=", ".join(present),
                allowed=", ".join(needed), hint=install_command("tables"),
            )  # fmt: skip
        columns = [*needed, *(name for name in wanted if name in present)]
        table = parquet.read_table(file, columns=columns)
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise InputError(f"{file}: cannot be read as Parquet ({error})", hint=install_command("tables")) from None
    return {name: np.asarray(table[name].to_numpy()) for name in columns}
