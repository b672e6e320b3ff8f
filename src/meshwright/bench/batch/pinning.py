"""Devices or processor cores of each replica, and the environment that keeps a process on them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from meshwright.bench.serving.servers.supervise import CORES_VARIABLE
from meshwright.errors import InputError

AMD_DRIVER = Path("/sys/module/amdgpu")


def parse_numbers(text: str, *, option: str) -> tuple[int, ...]:
    """Read `0,1,4-7`. Raises InputError.

    >>> parse_numbers("0,4-6", option="--devices")
    (0, 4, 5, 6)
    """
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise InputError(f"{option} must read 0,1,4-7", got=text)
        found += range(int(first), int(last if dash else first) + 1)
        if len(found) > 4096:
            raise InputError(f"{option} names too many", got=text)
    if len(set(found)) < len(found):
        raise InputError(f"{option} names a number twice", got=text)
    return tuple(found)


def shares(numbers: Sequence[int], replicas: int, *, option: str) -> list[tuple[int, ...]]:
    """Equal parts of `numbers` in order, one for each replica. Raises InputError where they are not equal.

    >>> shares([0, 1, 2, 3], 2, option="--devices")
    [(0, 1), (2, 3)]
    """
    if len(numbers) % replicas:
        raise InputError(
            f"{option} cannot be given to {replicas} replicas in equal parts", got=len(numbers),
            allowed=f"a multiple of {replicas}",
        )  # fmt: skip
    each = len(numbers) // replicas
    return [tuple(numbers[i * each : (i + 1) * each]) for i in range(replicas)]


def device_environment(devices: Sequence[int]) -> dict[str, str]:
    """Variables that show a process these devices only: CUDA's, and HIP's too where the driver is AMD's."""
    text = ",".join(map(str, devices))
    found = {"CUDA_VISIBLE_DEVICES": text}
    return found | {"HIP_VISIBLE_DEVICES": text} if AMD_DRIVER.exists() else found


def core_environment(cores: Sequence[int]) -> dict[str, str]:
    """Variables that keep a process on these cores: `supervise.stay_on_cores` reads the first. Raises InputError.

    Thread pools of OpenMP and MKL have a thread for each core.
    """
    available = os.sched_getaffinity(0)
    if not set(cores) <= available:
        raise InputError(
            "--cores names cores that this process may not use", got=",".join(map(str, cores)),
            allowed=",".join(map(str, sorted(available))),
        )  # fmt: skip
    threads = str(len(cores))
    return {
        CORES_VARIABLE: ",".join(map(str, cores)), "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads,
    }  # fmt: skip


def environments(*, devices: str | None, cores: str | None, replicas: int) -> list[dict[str, str]]:
    """Environment of each replica from the texts of --devices and --cores; empty ones without either."""
    found: list[dict[str, str]] = [{} for _ in range(replicas)]
    for text, option, made in ((devices, "--devices", device_environment), (cores, "--cores", core_environment)):
        if text is not None:
            parts = shares(parse_numbers(text, option=option), replicas, option=option)
            found = [one | made(part) for one, part in zip(found, parts, strict=True)]
    return found
