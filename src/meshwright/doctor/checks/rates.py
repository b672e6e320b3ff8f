"""A quick GEMM, copy and all-reduce against the rates that the catalogue expects of these devices.

Each device is measured by a process of its own with a time limit, all at the same time; see `measure`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

from meshwright.doctor.checks import Check, Node
from meshwright.doctor.checks.devices import NO_DEVICE, where
from meshwright.doctor.devices import Device
from meshwright.doctor.expected import ALL_REDUCE_BYTES, COPY_BYTES, GEMM_SIZE, Expected, expected_of
from meshwright.doctor.host import Host, Unseen
from meshwright.doctor.verdict import CheckStatus, CheckVerdict, found, judge, limits, skipped
from meshwright.errors import MeshwrightError

GROUP = "rates"
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
    if find_spec("torch") is None:
        raise Unseen("PyTorch is not installed: pip install 'meshwright[torch]'")
    devices = node.devices.found
    if not devices:
        yield from _of_processors(node.host)
        return
    with ThreadPoolExecutor(max_workers=len(devices)) as pool:
        answers = list(pool.map(lambda device: _ask_device(node.host, device), devices))
    for device, answer in zip(devices, answers, strict=True):
        yield from _of_device(device, answer)
    if len(devices) > 1 and all(_was_measured(answer) for answer in answers):
        yield from _of_all(node)
    elif len(devices) > 1:
        yield skipped("rates.all-reduce", "not every device could be measured alone")


def _was_measured(answer: dict[str, Any] | str) -> bool:
    return not isinstance(answer, str) and answer["device"] != "cpu"


def _ask_device(host: Host, device: Device) -> dict[str, Any] | str:
    """Return the measured rates, or the reason that there are none."""
    sizes = ("--gemm-size", str(GEMM_SIZE), "--copy-bytes", str(COPY_BYTES))
    try:
        return _ask(host, "device", "--select", device.select, *sizes, timeout_s=DEVICE_TIMEOUT_S)
    except Unseen as unseen:
        return unseen.reason


def _ask(host: Host, *arguments: str, timeout_s: float) -> dict[str, Any]:
    text = host.ask(sys.executable, "-m", "meshwright.doctor.measure", *arguments, timeout_s=timeout_s)
    try:
        return json.loads(text.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise Unseen("the measurement printed no result") from None


def _of_device(device: Device, answer: dict[str, Any] | str) -> Iterator[CheckVerdict]:
    if isinstance(answer, str):
        yield found(
            "rates.gemm", CheckStatus.FAIL, f"could not be measured: {answer}", where=where(device),
            hint="the device does not answer: look at log.kernel and devices.processes",
        )  # fmt: skip
        return
    if answer["device"] == "cpu":
        yield skipped("rates.gemm", "PyTorch does not see it: not built for it, or not allowed to", where=where(device))
        return
    wrong = [symptom for symptom, key in _WRONG.items() if not answer[key]]
    yield found(
        "rates.result", CheckStatus.FAIL if wrong else CheckStatus.PASS, where=where(device),
        measured=" and ".join(wrong) or "right", expected="right",
        hint="the device computes wrongly: take it out of service",
    )  # fmt: skip
    expected = _expected(device, num_devices=1)
    gemm, copy = answer["gemm_flops_per_s"] / TERA, answer["copy_bytes_per_s"] / GIGA
    if isinstance(expected, str):
        yield _unjudged("rates.gemm", gemm, expected, where(device))
        yield _unjudged("rates.copy", copy, expected, where(device))
    else:
        yield judge("rates.gemm", gemm, expected=expected.gemm_flops_per_s / TERA, where=where(device))
        yield judge("rates.copy", copy, expected=expected.copy_bytes_per_s / GIGA, where=where(device))


def _of_all(node: Node) -> Iterator[CheckVerdict]:
    devices = node.devices.found
    sizes = ("--processes", str(len(devices)), "--bytes", str(ALL_REDUCE_BYTES))
    try:
        answer = _ask(node.host, "all-reduce", *sizes, timeout_s=ALL_REDUCE_TIMEOUT_S)
    except Unseen as unseen:
        hint = "one device or link holds up all: look at rates.gemm, links.scale-up and log.kernel"
        yield found("rates.all-reduce", CheckStatus.FAIL, f"could not be measured: {unseen.reason}", hint=hint)
        return
    rate = answer["all_reduce_bytes_per_s"] / GIGA
    if not answer["is_right"]:
        yield found("rates.all-reduce", CheckStatus.FAIL, "the sum is wrong", measured=rate, unit="GB/s")
        return
    expected = _expected(devices[0], num_devices=len(devices))
    if isinstance(expected, str) or expected.all_reduce_bytes_per_s is None:
        yield _unjudged("rates.all-reduce", rate, str(expected), "")
    else:
        yield judge("rates.all-reduce", rate, expected=expected.all_reduce_bytes_per_s / GIGA)


def _of_processors(host: Host) -> Iterator[CheckVerdict]:
    sizes = ("--gemm-size", str(CPU_GEMM_SIZE), "--copy-bytes", str(CPU_COPY_BYTES))
    answer = _ask(host, "device", *sizes, timeout_s=DEVICE_TIMEOUT_S)
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
