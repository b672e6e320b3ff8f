"""Minutes of GEMMs on every device at once, with the counters of errors before and after (data/stress.toml).

A node that is well while it idles may fail when it is hot: results that change, errors that are corrected, clocks that
fall. Without a device the processors are stressed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.doctor.checks import Check, Node
from meshwright.doctor.checks.devices import where
from meshwright.doctor.checks.rates import CPU_GEMM_SIZE, DEVICE_TIMEOUT_S, GEMM_SIZE, TERA, ask_each, require_torch
from meshwright.doctor.devices import Device, find_devices, text_or_none
from meshwright.doctor.host import Host, Unseen
from meshwright.doctor.verdict import DATA, CheckStatus, CheckVerdict, found, judge, skipped
from meshwright.files import toml_table

GROUP = "stress"


def _stressed(node: Node) -> Iterator[CheckVerdict]:
    if node.stress_s is None:
        return
    require_torch()
    before = counters(node.host)
    devices: tuple[Device | None, ...] = node.devices.found or (None,)
    size = GEMM_SIZE if node.devices.found else CPU_GEMM_SIZE
    options = ("--gemm-size", str(size), "--seconds", f"{node.stress_s:g}")
    answers = ask_each(node.host, devices, "stress", *options, timeout_s=node.stress_s + DEVICE_TIMEOUT_S)
    for device, answer in zip(devices, answers, strict=True):
        yield from _of_device("processors" if device is None else where(device), answer, is_device=device is not None)
    yield from _grown(before, counters(node.host))


def _of_device(place: str, answer: dict[str, Any] | str, *, is_device: bool) -> Iterator[CheckVerdict]:
    if isinstance(answer, str):
        hint = "it did not survive the load: look at log.kernel"
        yield found("stress.result", False, f"no result: {answer}", where=place, hint=hint)
        return
    if is_device and answer["device"] == "cpu":
        yield skipped("stress.result", "PyTorch does not see it: not built for it, or not allowed to", where=place)
        return
    yield found(
        "stress.result", not answer["wrong"], where=place, measured=answer["wrong"], expected=0,
        unit=f"wrong of {answer['windows']} results", hint="it computes wrongly under load: take it out of service",
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
        status, hint = CheckStatus(table[name]["status"]), table[name]["hint"]
        yield found("stress.errors", status, name, where=place, measured=by, expected=0, unit="more", hint=hint)
    if lost := before.keys() - after.keys():
        name, place = min(lost)
        yield found(
            "stress.errors", False, f"{name}: reported before the stress and not after it", where=place,
            hint="the device or its driver went away: look at log.kernel",
        )  # fmt: skip
    if not grown and not lost:
        yield found("stress.errors", True, measured=0, expected=0, unit=f"more of {len(before)} counters")


CHECKS: dict[str, Check] = {"stress.device": _stressed}
