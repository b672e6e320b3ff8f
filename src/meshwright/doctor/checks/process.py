"""Limits of this process: inherited limits, and limits of its container or control group."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from meshwright.doctor.checks import Check, Node
from meshwright.doctor.checks.host import KIB, meminfo, num_listed, num_processors
from meshwright.doctor.checks.network import ports
from meshwright.doctor.host import Host, Unseen
from meshwright.doctor.verdict import DATA, CheckStatus, CheckVerdict, found, judge
from meshwright.files import toml_table
from meshwright.units import GIB

GROUP = "limits"
CONTAINER_FILES = {"/.dockerenv": "docker", "/run/.containerenv": "podman"}
CONTAINER_NAMES = ("docker", "kubepods", "containerd", "lxc", "podman", "enroot", "apptainer", "singularity")


def container(host: Host) -> str | None:
    """Return the kind of container, or None if there is no sign of one."""
    for file, kind in CONTAINER_FILES.items():
        if host.exists(file):
            return kind
    if "KUBERNETES_SERVICE_HOST" in host.environment:
        return "kubernetes"
    if "APPTAINER_CONTAINER" in host.environment or "SINGULARITY_CONTAINER" in host.environment:
        return "apptainer"
    try:
        groups = host.read("/proc/1/cgroup")
    except Unseen:
        return None
    return next((name for name in CONTAINER_NAMES if name in groups), None)


def _limit(host: Host, name: str) -> float:
    """Return the soft limit of /proc/self/limits; infinity if there is none."""
    match = re.search(rf"^{name}\s+(\S+)", host.read("/proc/self/limits"), re.MULTILINE)
    if match is None:
        raise Unseen(f"/proc/self/limits has no line {name!r}")
    return float("inf") if match[1] == "unlimited" else float(match[1])


def _shared_memory(node: Node) -> Iterator[CheckVerdict]:
    lines = node.host.ask("df", "-P", "-k", str(node.host.path("/dev/shm"))).splitlines()
    try:
        size_kib = int(lines[-1].split()[1])
    except (IndexError, ValueError):
        raise Unseen("df printed no sizes") from None
    yield judge("limits.shared-memory", size_kib * KIB / GIB)


def _locked_memory(node: Node) -> Iterator[CheckVerdict]:
    verdict = _unless_unlimited("limits.locked-memory", _limit(node.host, "Max locked memory") / GIB)
    if verdict.status is CheckStatus.FAIL and not ports(node.host):
        verdict = replace(verdict, status=CheckStatus.WARN, message="matters with RDMA, and there is no card here")
    yield verdict


def _open_files(node: Node) -> Iterator[CheckVerdict]:
    yield _unless_unlimited("limits.open-files", _limit(node.host, "Max open files"))


def _tasks(node: Node) -> Iterator[CheckVerdict]:
    """Threads count as processes: NCCL, OpenMP and data loaders start hundreds for each device."""
    held = [_int(node.host, f"{folder}/pids.max") for name in ("", "pids") for folder in _folders(node.host, name)]
    limits = [_limit(node.host, "Max processes"), *(float(value) for value in held if value is not None)]
    yield _unless_unlimited("limits.tasks", min(limits))


def _environment(node: Node) -> Iterator[CheckVerdict]:
    """Variables that somebody set to find a fault, and that make every training slow."""
    for name, entry in toml_table(DATA / "environment.toml").items():
        value = node.host.environment.get(name, "")
        if re.fullmatch(entry["slow"], value) and _matters(node, entry.get("only_with", "")):
            yield found("limits.environment", False, entry["why"], where=name, measured=value)


def _matters(node: Node, only_with: str) -> bool:
    if only_with == "links":
        return any(d.expected_scale_up_links for d in node.devices.found)
    return not only_with or node.host.exists(only_with)


def _unless_unlimited(check: str, value: float) -> CheckVerdict:
    if value == float("inf"):
        return found(check, CheckStatus.PASS, measured="unlimited")
    return judge(check, value)


def _memory(node: Node) -> Iterator[CheckVerdict]:
    total = meminfo(node.host)["MemTotal"]
    held = memory_limit_bytes(node.host)
    if held is None or held >= total:
        yield found(
            "limits.memory", CheckStatus.PASS, "no limit below the node's memory", measured=total / GIB, unit="GiB"
        )
        return
    yield judge("limits.memory", held / GIB, expected=total / GIB)


def _processors(node: Node) -> Iterator[CheckVerdict]:
    num_devices = len(node.devices.found)
    if not num_devices:
        raise Unseen("no device was found")
    share = processor_limit(node.host)
    allowed = num_processors(node.host) if share is None else min(share, num_processors(node.host))
    yield judge("limits.processors-per-device", allowed / num_devices)


def memory_limit_bytes(host: Host) -> int | None:
    """Return the smallest limit of this process's control groups; None if there is none."""
    found = [_int(host, f"{folder}/memory.max") for folder in _folders(host, "")]
    found += [_int(host, f"{folder}/memory.limit_in_bytes") for folder in _folders(host, "memory")]
    return min((value for value in found if value is not None), default=None)


def processor_limit(host: Host) -> float | None:
    """Return the processors that control groups or the affinity mask allow; None if they allow all."""
    found = []
    for folder in _folders(host, ""):
        quota, _, period = _line(host, f"{folder}/cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            found.append(int(quota) / int(period))
    for folder in _folders(host, "cpu"):
        quota, period = _int(host, f"{folder}/cpu.cfs_quota_us"), _int(host, f"{folder}/cpu.cfs_period_us")
        if quota and period and quota > 0:
            found.append(quota / period)
    mask = re.search(r"^Cpus_allowed_list:\s*(\S+)", _line(host, "/proc/self/status"), re.MULTILINE)
    if mask:
        found.append(float(num_listed(mask[1])))
    return min(found, default=None)


def _folders(host: Host, controller: str) -> list[str]:
    """Return the folders of a control group and its parents: version 2 for "", else a controller of version 1."""
    base = f"/sys/fs/cgroup/{controller}".rstrip("/")
    own = "/"
    for line in _line(host, "/proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controller in controllers.split(","):
            own = path
    parts = [part for part in own.split("/") if part and part != ".."]
    return [base + "".join(f"/{p}" for p in parts[:depth]) for depth in range(len(parts) + 1)]


def _line(host: Host, name: str) -> str:
    try:
        return host.read(name)
    except Unseen:
        return ""


def _int(host: Host, name: str) -> int | None:
    text = _line(host, name)
    return int(text) if text.lstrip("-").isdigit() else None


CHECKS: dict[str, Check] = {
    "limits.shared-memory": _shared_memory, "limits.locked-memory": _locked_memory, "limits.open-files": _open_files,
    "limits.tasks": _tasks, "limits.environment": _environment, "limits.memory": _memory,
    "limits.processors-per-device": _processors,
}  # fmt: skip
