"""A quick GEMM, copies and an all-reduce against the rates that the catalogue expects of these devices.

Each device is measured by a process of its own with a time limit, all at the same time; see `measure`. Expected are

GEMM        n x n x n in bf16: the cost model's time at the calibrated share of the peak
copy        bytes read and written: the memory rate times the calibrated share that streaming reaches
all-reduce  the cost model's time on the fabric of the device's usual node
to-device   from pinned host memory to the device, and back: what lanes and generation of the PCIe link carry
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

from meshwright.doctor.checks import Check, Node
from meshwright.doctor.checks.devices import NO_DEVICE, where
from meshwright.doctor.devices import Device
from meshwright.doctor.host import Host, Unseen
from meshwright.doctor.verdict import CheckStatus, CheckVerdict, found, judge, limits, skipped
from meshwright.errors import MeshwrightError
from meshwright.json_values import parse_json
from meshwright.programs import install_command

GEMM_SIZE = 8192
COPY_BYTES = 2**30
ALL_REDUCE_BYTES = 2**28

COPY_RATIO = 0.85
"""Share of the memory's bandwidth that a copy reaches, read and written: 85 to 92 % on A100 and H100."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Rates of one device, and of all devices of a node together."""

    gemm_flops_per_s: float
    copy_bytes_per_s: float
    all_reduce_bytes_per_s: float | None  # size of the buffer over the time; None for one device


@cache
def expected_of(accelerator: str, *, num_devices: int) -> Expected:
    """Return the expected rates of `num_devices` of this accelerator in one node.

    >>> expected_of("h200", num_devices=8).copy_bytes_per_s < 4.8e12  # the peak of its memory
    True
    """
    from meshwright.catalog.lookup import cluster
    from meshwright.catalog.stacks import stack_for_engine
    from meshwright.cost.collectives import all_reduce_s, group
    from meshwright.cost.compute import gemm_s
    from meshwright.cost.rates import system_rates
    from meshwright.specs.precision import PRECISIONS

    node = cluster(f"{accelerator}-{num_devices}x1")
    rates = system_rates(node, PRECISIONS["bf16"], stack_for_engine("native"))
    device, n = rates.device, GEMM_SIZE
    gemm_seconds = gemm_s(
        n, n, n,
        flops_per_s=device.bf16_flops_per_s * device.bf16_gemm_ratio,
        bytes_per_s=device.streaming_bytes_per_s,
        num_units=device.num_units, kernel_s=device.kernel_s, output_tiles=device.output_tiles,
    )  # fmt: skip
    all_reduce = None
    if num_devices > 1:
        members = group(size=num_devices, stride=1, net=rates.network)
        all_reduce = ALL_REDUCE_BYTES / float(all_reduce_s(ALL_REDUCE_BYTES, members))
    return Expected(
        gemm_flops_per_s=2.0 * n**3 / float(gemm_seconds),
        copy_bytes_per_s=float(device.memory_bytes_per_s * COPY_RATIO),
        all_reduce_bytes_per_s=all_reduce,
    )


GROUP = "rates"
PCIE_LANE_GB_PER_S = {3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""GB/s of a lane in one direction by generation: 8, 16 and 32 GT/s at 128/130, 64 GT/s in FLITs of 236/256 bytes."""
DEVICE_TIMEOUT_S = 120.0
"""Most of it is for importing PyTorch from a cold file system; the measurements take two seconds."""
ALL_REDUCE_TIMEOUT_S = 180.0
CPU_GEMM_SIZE, CPU_COPY_BYTES = 1024, 2**26
TERA, GIGA = 1e12, 1e9
_WRONG = {"not finite": "is_finite", "not the same twice": "is_repeatable"}


def _measured(node: Node) -> Iterator[CheckVerdict]:
    if node.rates is False:
        raise Unseen("switched off with --no-rates")
    if not node.devices.found and not node.rates:
        raise Unseen(f"{NO_DEVICE}; --rates measures the processors, without an expected rate")
    require_torch()
    devices = node.devices.found
    if not devices:
        yield from _of_processors(node.host)
        return
    sizes = ("--gemm-size", str(GEMM_SIZE), "--copy-bytes", str(COPY_BYTES))
    answers = ask_each(node.host, devices, "device", *sizes, timeout_s=DEVICE_TIMEOUT_S)
    for device, answer in zip(devices, answers, strict=True):
        yield from _of_device(device, answer)
    if len(devices) > 1 and all(not isinstance(a, str) and a["device"] != "cpu" for a in answers):
        yield from _of_all(node)
    elif len(devices) > 1:
        yield skipped("rates.all-reduce", "not every device could be measured alone")


def require_torch() -> None:
    """Raise Unseen where PyTorch is not installed."""
    if find_spec("torch") is None:
        raise Unseen(f"PyTorch is not installed: {install_command('torch')}")


def ask_each(
    host: Host, devices: Sequence[Device | None], what: str, *options: str, timeout_s: float
) -> list[dict[str, Any] | str]:
    """Return what `measure` measured on each device, all at once, or the reason that there is nothing.

    None: the processors.
    """

    def answer(device: Device | None) -> dict[str, Any] | str:
        select = () if device is None else ("--select", device.select)
        try:
            return ask(host, what, *select, *options, timeout_s=timeout_s)
        except Unseen as unseen:
            return unseen.reason

    with ThreadPoolExecutor(max_workers=len(devices)) as pool:
        return list(pool.map(answer, devices))


def ask(host: Host, *arguments: str, timeout_s: float) -> dict[str, Any]:
    """Return what `measure` measured in a process of its own. Raises Unseen."""
    text = host.ask(sys.executable, "-m", "meshwright.doctor.measure", *arguments, timeout_s=timeout_s)
    try:
        return parse_json(text.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise Unseen("the measurement printed no result") from None


def _of_device(device: Device, answer: dict[str, Any] | str) -> Iterator[CheckVerdict]:
    if isinstance(answer, str):
        yield found("rates.gemm", False, f"could not be measured: {answer}", where=where(device))
        return
    if answer["device"] == "cpu":
        yield skipped("rates.gemm", "PyTorch does not see it: not built for it, or not allowed to", where=where(device))
        return
    wrong = [symptom for symptom, key in _WRONG.items() if not answer[key]]
    yield found("rates.result", not wrong, where=where(device), measured=" and ".join(wrong) or "right")
    expected = _expected(device, num_devices=1)
    gemm, copy = answer["gemm_flops_per_s"] / TERA, answer["copy_bytes_per_s"] / GIGA
    if isinstance(expected, str):
        yield _unjudged("rates.gemm", gemm, expected, where(device))
        yield _unjudged("rates.copy", copy, expected, where(device))
    else:
        yield judge("rates.gemm", gemm, expected=expected.gemm_flops_per_s / TERA, where=where(device))
        yield judge("rates.copy", copy, expected=expected.copy_bytes_per_s / GIGA, where=where(device))
    for check, key in (("rates.to-device", "to_device"), ("rates.from-device", "from_device")):
        rate, lane = answer[f"{key}_bytes_per_s"] / GIGA, PCIE_LANE_GB_PER_S.get(device.pcie_generation or 0)
        if lane is None or not device.pcie_width:
            yield _unjudged(check, rate, "generation or lanes of the PCIe link are not reported", where(device))
        else:
            yield judge(check, rate, expected=lane * device.pcie_width, where=where(device))


def _of_all(node: Node) -> Iterator[CheckVerdict]:
    devices = node.devices.found
    sizes = ("--processes", str(len(devices)), "--bytes", str(ALL_REDUCE_BYTES))
    try:
        answer = ask(node.host, "all-reduce", *sizes, timeout_s=ALL_REDUCE_TIMEOUT_S)
    except Unseen as unseen:
        hint = "one device or link holds up all: look at rates.gemm, links.scale-up and log.kernel"
        yield found("rates.all-reduce", False, f"could not be measured: {unseen.reason}", hint=hint)
        return
    rate = answer["all_reduce_bytes_per_s"] / GIGA
    if not answer["is_right"]:
        yield found("rates.all-reduce", False, "the sum is wrong", measured=rate, unit="GB/s")
        return
    expected = _expected(devices[0], num_devices=len(devices))
    if isinstance(expected, str) or expected.all_reduce_bytes_per_s is None:
        yield _unjudged("rates.all-reduce", rate, str(expected), "")
    else:
        yield judge("rates.all-reduce", rate, expected=expected.all_reduce_bytes_per_s / GIGA)


def _of_processors(host: Host) -> Iterator[CheckVerdict]:
    sizes = ("--gemm-size", str(CPU_GEMM_SIZE), "--copy-bytes", str(CPU_COPY_BYTES))
    answer = ask(host, "device", *sizes, timeout_s=DEVICE_TIMEOUT_S)
    reason = "processors have no expected rate"
    yield _unjudged("rates.gemm", answer["gemm_flops_per_s"] / TERA, reason, "processors")
    yield _unjudged("rates.copy", answer["copy_bytes_per_s"] / GIGA, reason, "processors")


def _expected(device: Device, *, num_devices: int) -> Expected | str:
    """Return the expected rates, or the reason that there are none."""
    if device.accelerator is None:
        return "the catalogue does not list this device: no expected rate"
    try:
        return expected_of(device.accelerator, num_devices=num_devices)
    except MeshwrightError as error:  # more devices than its usual node has, or no bf16
        return error.message


def _unjudged(check: str, measured: float, reason: str, place: str) -> CheckVerdict:
    return CheckVerdict(
        check=check, status=CheckStatus.SKIPPED, where=place, measured=measured, unit=limits()[check].unit,
        message=reason,
    )  # fmt: skip


CHECKS: dict[str, Check] = {"rates.device": _measured}
