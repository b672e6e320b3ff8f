"""Minutes of GEMMs on every device at once, with the counters of errors before and after (data/stress.toml).

A node that is well while it idles may fail when it is hot: results that change, errors that are corrected, clocks that
fall. Without a device the processors are stressed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

from meshwright.doctor.checks import Check, Node
from meshwright.doctor.checks.devices import where
from meshwright.doctor.checks.rates import CPU_GEMM_SIZE, DEVICE_TIMEOUT_S, GEMM_SIZE, TERA, ask
from meshwright.doctor.devices import Device, find_devices, text_or_none
from meshwright.doctor.host import Host, Unseen
from meshwright.doctor.verdict import DATA, CheckStatus, CheckVerdict, found, judge, skipped
from meshwright.files import toml_table
from meshwright.programs import install_command

GROUP = "stress"


def _stressed(node: Node) -> Iterator[CheckVerdict]:
    if node.stress_s is None:
        return
    if find_spec("torch") is None:
        raise Unseen(f"PyTorch is not installed: {install_command('torch')}")
    before = counters(node.host)
    devices: tuple[Device | None, ...] = node.devices.found or (None,)
    with ThreadPoolExecutor(max_workers=len(devices)) as pool:
        answers = list(pool.map(lambda device: _stress(node.host, device, node.stress_s or 0.0), devices))
    for device, answer in zip(devices, answers, strict=True):
        yield from _of_device("processors" if device is None else where(device), answer, is_device=device is not None)
    yield from _grown(before, counters(node.host))


def _stress(host: Host, device: Device | None, seconds: float) -> dict[str, Any] | str:
    size = CPU_GEMM_SIZE if device is None else GEMM_SIZE
    select = () if device is None else ("--select", device.select)
    options = (*select, "--gemm-size", str(size), "--seconds", f"{seconds:g}")
    try:
        return ask(host, "stress", *options, timeout_s=seconds + DEVICE_TIMEOUT_S)
    except Unseen as unseen:
        return unseen.reason


def _of_device(place: str, answer: dict[str, Any] | str, *, is_device: bool) -> Iterator[CheckVerdict]:
    if isinstance(answer, str):
        hint = "it did not survive the load: look at log.kernel"
        yield found("stress.result", CheckStatus.FAIL, f"no result: {answer}", where=place, hint=hint)
        return
    if is_device and answer["device"] == "cpu":
        yield skipped("stress.result", "PyTorch does not see it: not built for it, or not allowed to", where=place)
        return
    yield found(
        "stress.result", CheckStatus.FAIL if answer["wrong"] else CheckStatus.PASS, where=place,
        measured=answer["wrong"], expected=0, unit=f"wrong of {answer['windows']} results",
        hint="it computes wrongly under load: take it out of service",
    )  # fmt: skip
    sustained, best = (answer[f"{name}_flops_per_s"] / TERA for name in ("sustained", "best"))
    yield judge("stress.rate", sustained, expected=best, where=place)


def counters(host: Host) -> dict[tuple[str, str], int]:
    """Return every counter of data/stress.toml by its name and the device or file; those that cannot be read are left
    out."""
    devices, held = find_devices(host).found, {}
    for name, entry in toml_table(DATA / "stress.toml").items():
        if "device" in entry:
            held |= {(name, where(d)): getattr(d, entry["device"]) for d in devices}
            continue
        for path in host.glob(entry["files"]):
            match = re.search(entry.get("number", r"^(\d+)$"), text_or_none(host, path) or "", re.MULTILINE)
            held[name, path] = int(match[1]) if match else None
    return {key: value for key, value in held.items() if value is not None}


def _grown(before: Mapping[tuple[str, str], int], after: Mapping[tuple[str, str], int]) -> Iterator[CheckVerdict]:
    if not before:
        raise Unseen("no counter of errors can be read")
    table = toml_table(DATA / "stress.toml")
    grown = {key: after[key] - count for key, count in before.items() if after.get(key, count) > count}
    for (name, place), by in grown.items():
        entry = table[name]
        yield found(
            "stress.errors", CheckStatus(entry["status"]), name, where=place, measured=by, expected=0, unit="more",
            hint=entry["hint"],
        )  # fmt: skip
    if lost := before.keys() - after.keys():
        name, place = min(lost)
        yield found(
            "stress.errors", CheckStatus.FAIL, f"{name}: reported before the stress and not after it", where=place,
            hint="the device or its driver went away: look at log.kernel",
        )  # fmt: skip
    if not grown and not lost:
        yield found("stress.errors", CheckStatus.PASS, measured=0, expected=0, unit=f"more of {len(before)} counters")


CHECKS: dict[str, Check] = {"stress.device": _stressed}
