"""This machine: its device, its memory, and how fast it multiplies and copies, measured in a second or two.

The quick measurement stands in where no datasheet does (`cluster: here`). A rate is the best of several repetitions:
other programs only ever make it lower.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.catalog import lookup as catalog
from meshwright.catalog.accelerators import has_driver_name
from meshwright.errors import MissingDependencyError
from meshwright.kernels.linear import matmul_nt
from meshwright.records.environment import device_limits
from meshwright.specs.hardware import HERE, THIS_MACHINE, Accelerator, Cluster, Fabric
from meshwright.training.machine import processor_name

GEMM_SIZES = {"cpu": (256, 512, 1024), "cuda": (4096, 8192)}
COPY_BYTES = {"cpu": 64 * 2**20, "cuda": 2**30}
REPETITIONS = 5
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h of glibc
NVIDIA_FP8 = (8, 9)  # compute capability
AMD_FP8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}  # CDNA 3 has formats of its own
FP8_DEVICES = f"NVIDIA of compute capability 8.9 and newer, AMD {' and '.join(AMD_FP8)}"


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Measured rates of one device of this machine."""

    matmul_flops_per_s: dict[str, float]  # by number format
    copy_bytes_per_s: float  # bytes read plus bytes written


def find_device(*, local_rank: int = 0) -> torch.device:
    """The accelerator of this process, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return torch.device("cpu")


def num_devices(device: torch.device) -> int:
    """Devices of this machine as a plan counts them. All cores together are one."""
    return torch.cuda.device_count() if device.type == "cuda" else 1


def device_name(device: torch.device) -> str:
    """The name of the device by its driver, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor_name()


def limits(device: torch.device) -> dict[str, float | None]:
    """Power limit and highest clock by the device's driver; None for a CPU, and where it reports none."""
    if device.type != "cuda":
        return {"power_limit_w": None, "highest_clock_mhz": None}
    properties: Any = torch.cuda.get_device_properties(device)
    if torch.version.hip is None:
        return device_limits(is_amd=False, identifier=f"GPU-{properties.uuid}")
    bus = (getattr(properties, f"pci_{name}_id", 0) for name in ("domain", "bus", "device"))
    return device_limits(is_amd=True, identifier="{:04x}:{:02x}:{:02x}.0".format(*bus))


def memory_bytes(device: torch.device) -> int:
    """Memory of the device, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_memory_bytes(device: torch.device) -> int:
    """The most that was in use since the process began: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:  # on Linux `getrusage` begins at the peak of the parent process
        found = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text("ascii"), re.MULTILINE)
    except OSError:
        found = None
    if found is not None:
        return int(found[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def release_memory(device: torch.device) -> None:
    """Return cached memory to the device and reset the peak, on a GPU; return free memory of the heap, on a CPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    elif platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """Resident memory of this process now; its peak where the system does not report it."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return peak_memory_bytes(torch.device("cpu"))


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def disable_malloc_trim(device: torch.device) -> None:
    """Make the C library keep freed memory for the next step, as PyTorch does on GPUs.

    By default glibc returns large tensors to the system at once, which then clears every page again: a sixth of the
    processor time of a small model's step.
    """
    if device.type == "cpu" and platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_TRIM_THRESHOLD, -1)
        mallopt(M_MMAP_MAX, 0)


def measure_rates(device: torch.device, *, deadline_s: float = float("inf")) -> Rates:
    """Measure the GEMM rate of each format at its best size, and the copy rate; each the best of `REPETITIONS`.

    After `deadline_s`, a time of `time.perf_counter`, nothing is repeated.
    """
    sizes = GEMM_SIZES[device.type]

    def best_s(function: Callable[[], object]) -> float:
        function()  # the first call picks kernels and touches pages
        best = float("inf")
        for repetition in range(REPETITIONS):
            if repetition and time.perf_counter() > deadline_s:
                break
            synchronize(device)
            start_s = time.perf_counter()
            function()
            synchronize(device)
            best = min(best, time.perf_counter() - start_s)
        return best

    rates = {
        name: max(2 * size**3 / best_s(_gemm(size, dtype, device)) for size in sizes) for name, dtype in FORMATS.items()
    }
    if multiplies_fp8(device):
        rates["fp8"] = max(2 * size**3 / best_s(_fp8_gemm(size, device)) for size in sizes)
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = best_s(lambda: target.copy_(source))
    return Rates(matmul_flops_per_s=rates, copy_bytes_per_s=2 * source.numel() / copy_s)


def multiplies_fp8(device: torch.device) -> bool:
    """Return True if `device` has fp8 matrix units that PyTorch uses."""
    if device.type != "cuda":
        return False
    if torch.version.hip:
        return _amd_architecture(device) in AMD_FP8
    return torch.cuda.get_device_capability(device) >= NVIDIA_FP8


def has_mx(device: torch.device) -> bool:
    """Return True if the 8-bit formats of `device` are MX formats; CDNA 3 has formats of its own."""
    return not torch.version.hip or AMD_FP8.get(_amd_architecture(device)) is not torch.float8_e4m3fnuz


def _amd_architecture(device: torch.device) -> str:
    return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]


def fp8_dtype(device: torch.device) -> torch.dtype:
    """The fp8 format of the matrix units of `device`."""
    return AMD_FP8[_amd_architecture(device)] if torch.version.hip else torch.float8_e4m3fn


def _fp8_gemm(size: int, device: torch.device) -> Callable[[], object]:
    dtype = fp8_dtype(device)
    a, b = (torch.ones(size, size, device=device).to(dtype) for _ in range(2))
    one = torch.ones((), device=device)
    multiply = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]  # the only fp8 GEMM that torch has
    return lambda: multiply(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def _gemm(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    return lambda: matmul_nt(a, b)


def catalog_name(device: torch.device) -> str | None:
    """Catalogue name of `device`, or None when the catalogue does not list its driver's name."""
    return None if device.type == "cpu" else catalog.accelerator_with_driver_name(device_name(device))


def notes_on_name(name: str, *, device_type: str, cluster: Cluster | None) -> tuple[str, ...]:
    """Notes for a record if the catalogue does not list the device, or lists it as another than the run's device.

    `name` is the driver's name of the device; `cluster` is the run's cluster, None for `cluster: here`.
    """
    if device_type == "cpu":
        return ()
    known = catalog.accelerator_with_driver_name(name)
    if cluster is None and known is None:
        return (f"the driver calls this device {name!r}, which the catalogue does not know: peak measured here",)
    if cluster is None or has_driver_name(cluster.accelerator, name) or cluster.accelerator.vendor == THIS_MACHINE:
        return ()
    asked = cluster.accelerator.name
    return (f"the run is for {asked}; the driver calls this device {name!r}: the MFU is a share of {asked}'s peak",)


def cluster_here(device: torch.device, *, num_devices: int, rates: Rates | None) -> Cluster:
    """`num_devices` devices of this machine as a cluster: the catalogue's if it lists the device, else with `rates`.

    Devices of a CPU are processes that share it, each with its part of the memory. Without `rates` the CPU
    has the rates of the catalogue's generic CPU, which suffice to choose a plan.
    """
    known = catalog_name(device)
    if known is not None:
        return catalog.cluster(f"{known}-{num_devices}x1")
    usual = catalog.accelerator("cpu")
    accelerator = Accelerator(
        name=device_name(device),
        vendor=THIS_MACHINE,
        architecture=platform.machine(),
        peak_flops_per_s=rates.matmul_flops_per_s if rates else usual.peak_flops_per_s,
        memory_bytes=memory_bytes(device) // num_devices,
        memory_bytes_per_s=rates.copy_bytes_per_s if rates else usual.memory_bytes_per_s,
        num_compute_units=0,  # the cores of a process work on one GEMM together
        output_tiles=False,
        sources={"all": f"measured here: best of {REPETITIONS} repetitions" if rates else "catalogue: cpu"},
    )
    # Processes communicate through memory: one copy in, one out.
    transfer_bytes_per_s = accelerator.memory_bytes_per_s / 2
    fabric = Fabric(
        name="memory of this machine",
        scale_up_domain=num_devices,
        scale_up_bytes_per_s=transfer_bytes_per_s,
        scale_up_peer_bytes_per_s=transfer_bytes_per_s,
        scale_up_latency_s=50e-6,  # gloo over the loopback device, an assumption
        scale_out_bytes_per_s=transfer_bytes_per_s,
        scale_out_latency_s=50e-6,
    )
    return Cluster(name=HERE, accelerator=accelerator, fabric=fabric, devices_per_node=num_devices, num_nodes=1)


def require(accelerator: str, *, device: torch.device) -> None:
    """Raise MissingDependencyError when a run names an accelerator and there is none at all on this machine."""
    if device.type == "cpu" and accelerator != "cpu":
        raise MissingDependencyError(
            f"the run is for {accelerator}, and this machine has no accelerator that PyTorch can use",
            hint="train on this machine's CPU with --set cluster=here --set parallel=auto",
        )
