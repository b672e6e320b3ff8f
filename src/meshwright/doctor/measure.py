"""Quick measurements in a process of their own, so that a hanging device can be abandoned.

    python -m meshwright.doctor.measure device --select CUDA_VISIBLE_DEVICES=GPU-... --gemm-size 8192 --copy-bytes N
    python -m meshwright.doctor.measure all-reduce --processes 8 --bytes N
    python -m meshwright.doctor.measure stress --select CUDA_VISIBLE_DEVICES=GPU-... --gemm-size 8192 --seconds 300

Prints one JSON object on the last line of stdout. PyTorch is imported by name, because this package works without it.
A rate is the best of several repetitions: other programs can only lower it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.training.rendezvous import free_port

REPETITIONS = 10
WARM_UP_S = 0.5
"""An idle device takes this long to reach its clock."""
HOST_COPY_BYTES = 2**28
"""Pinned memory of each device's process: all devices are measured at the same time."""
WINDOW_S = 0.5
"""GEMMs of a stress between two looks at their result."""


def main(arguments: list[str]) -> None:
    """Run the measurement of the command line and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["device", "all-reduce", "stress"])
    parser.add_argument("--select", default="", metavar="NAME=VALUE")
    parser.add_argument("--gemm-size", type=int, default=1024)
    parser.add_argument("--copy-bytes", type=int, default=2**26)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--bytes", type=int, default=2**20)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args(arguments)
    if options.select:
        name, _, value = options.select.partition("=")
        os.environ[name] = value  # before torch is imported, which looks once
    if options.what == "device":
        measured = measure_device(gemm_size=options.gemm_size, copy_bytes=options.copy_bytes)
    elif options.what == "stress":
        measured = stress_device(gemm_size=options.gemm_size, seconds=options.seconds)
    else:
        measured = measure_all_reduce(num_processes=options.processes, size_bytes=options.bytes)
    print(json.dumps(measured))


def measure_device(*, gemm_size: int, copy_bytes: int) -> dict[str, Any]:
    """Measure a square GEMM, a copy, and copies to and from the host, on the first device, or on the CPU without one.

    The result must be finite and bitwise equal in two runs: a device that computes wrongly is worse than a slow one.
    """
    torch: Any = importlib.import_module("torch")
    device, a, b = _factors(torch, gemm_size)
    out, again = torch.empty_like(a), torch.empty_like(a)
    source = torch.empty(copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    on_host = torch.empty(min(copy_bytes, HOST_COPY_BYTES), dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty_like(on_host, device=device)
    gemm_s = best_s(torch, lambda: torch.mm(a, b, out=out))
    copy_s = best_s(torch, lambda: target.copy_(source))
    to_device_s = best_s(torch, lambda: there.copy_(on_host, non_blocking=True))
    from_device_s = best_s(torch, lambda: on_host.copy_(there, non_blocking=True))
    torch.mm(a, b, out=again)
    return {
        "gemm_flops_per_s": 2.0 * gemm_size**3 / gemm_s,
        "copy_bytes_per_s": 2.0 * copy_bytes / copy_s,
        "to_device_bytes_per_s": on_host.numel() / to_device_s,
        "from_device_bytes_per_s": on_host.numel() / from_device_s,
        "is_finite": bool(torch.isfinite(out).all()),
        "is_repeatable": bool(torch.equal(out, again)),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(0) if device.type == "cuda" else "cpu",
    }


def _factors(torch: Any, size: int) -> tuple[Any, Any, Any]:
    """The device, and two square matrices on it, the same each time."""
    device, dtype = device_here(torch)
    generator = torch.Generator(device=device).manual_seed(1)
    a, b = (torch.randn(size, size, generator=generator, device=device, dtype=dtype) for _ in "ab")
    return device, a, b


def stress_device(*, gemm_size: int, seconds: float) -> dict[str, Any]:
    """Multiply the same matrices for `seconds`, and compare the last result of every window with the first one.

    The sustained rate is the median of the last quarter of the windows: a device that heats up gets slower.
    """
    torch: Any = importlib.import_module("torch")
    device, a, b = _factors(torch, gemm_size)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    first, out = torch.mm(a, b), torch.empty_like(a)
    in_window = max(1, round(WINDOW_S / best_s(torch, lambda: torch.mm(a, b, out=out))))
    rates: list[float] = []
    num_wrong, end_s = 0, time.perf_counter() + seconds
    while not rates or time.perf_counter() < end_s:
        before_s = time.perf_counter()
        for _ in range(in_window):
            torch.mm(a, b, out=out)
        wait()
        rates.append(2.0 * in_window * gemm_size**3 / (time.perf_counter() - before_s))
        num_wrong += not torch.equal(out, first)
    return {
        "windows": len(rates), "wrong": num_wrong, "best_flops_per_s": max(rates),
        "sustained_flops_per_s": statistics.median(rates[-max(1, len(rates) // 4) :]),
        "device": torch.cuda.get_device_name(0) if device.type == "cuda" else "cpu",
    }  # fmt: skip


def measure_all_reduce(*, num_processes: int, size_bytes: int) -> dict[str, Any]:
    """Measure an all-reduce over all devices of the node, one process each."""
    torch_mp: Any = importlib.import_module("torch.multiprocessing")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        given = (num_processes, size_bytes, free_port(), str(result))
        torch_mp.spawn(_member, args=given, nprocs=num_processes)
        return json.loads(result.read_text())


def _member(rank: int, num_processes: int, size_bytes: int, port: int, result: str) -> None:
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    is_gpu = torch.cuda.is_available()
    if is_gpu:
        torch.cuda.set_device(rank)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl" if is_gpu else "gloo", init_method=address, rank=rank, world_size=num_processes)
    device, _ = device_here(torch, rank)
    tensor = torch.ones(size_bytes // 4, device=device, dtype=torch.float32)
    dist.all_reduce(tensor)
    is_right = bool((tensor == num_processes).all())
    seconds = best_s(torch, lambda: dist.all_reduce(tensor), warm_up_s=0.0)
    slowest = torch.tensor(seconds, device=device, dtype=torch.float32)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    right = torch.tensor(float(is_right), device=device)
    dist.all_reduce(right, op=dist.ReduceOp.MIN)
    if rank == 0:
        measured = {"all_reduce_bytes_per_s": size_bytes / float(slowest), "is_right": bool(right > 0)}
        Path(result).write_text(json.dumps(measured))
    dist.destroy_process_group()


def device_here(torch: Any, index: int = 0) -> tuple[Any, Any]:
    """Return the device of a local rank, or the CPU, and the number format to multiply in."""
    if torch.cuda.is_available():
        return torch.device("cuda", index), torch.bfloat16
    return torch.device("cpu"), torch.float32


def best_s(torch: Any, run: Callable[[], object], *, warm_up_s: float = WARM_UP_S) -> float:
    """Seconds of the fastest repetition, the same number of them in every process."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    start_s = time.perf_counter()
    run()
    wait()
    while time.perf_counter() - start_s < warm_up_s:
        run()
        wait()
    times = []
    for _ in range(REPETITIONS):
        before_s = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - before_s)
    return min(times)


if __name__ == "__main__":
    main(sys.argv[1:])
