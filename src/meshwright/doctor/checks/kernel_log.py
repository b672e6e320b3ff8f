"""Recent lines of the kernel's log that report trouble (data/kernel_log.toml)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from meshwright.doctor.checks import Check, Node
from meshwright.doctor.host import Host, Unseen
from meshwright.doctor.verdict import DATA, CheckStatus, CheckVerdict, found
from meshwright.files import toml_table
from meshwright.units import HOUR_S

GROUP = "log"
STAMP = re.compile(r"^\[\s*(?P<seconds>\d+\.\d+)\]\s*")


@dataclass(frozen=True, kw_only=True)
class LineClass:
    """One class of lines: its pattern, and the verdict of `at_least` of them."""

    pattern: re.Pattern[str]
    status: CheckStatus
    hint: str
    at_least: int


def lines(host: Host) -> list[str]:
    """Return the kernel's log since boot, each line with its time in seconds. Raises Unseen with a remedy."""
    try:
        return host.ask("dmesg").splitlines()
    except Unseen as unseen:
        reason = unseen.reason
    try:  # systemd keeps the same lines, and shows them to members of its groups
        return host.ask("journalctl", "-k", "-b", "--no-pager", "-o", "short-monotonic", "-q").splitlines()
    except Unseen:
        raise Unseen(f"{reason} (run it as root, or with kernel.dmesg_restrict=0)") from None


def recent(host: Host, all_lines: list[str], *, hours: float) -> list[str]:
    """Return the lines of the last `hours`, and lines without a time."""
    try:
        uptime_s = float(host.read("/proc/uptime").split()[0])
    except (Unseen, ValueError, IndexError):
        return all_lines
    oldest_s = uptime_s - hours * HOUR_S
    return [s for s in all_lines if (m := STAMP.match(s)) is None or float(m["seconds"]) >= oldest_s]


def _log(node: Node) -> Iterator[CheckVerdict]:
    kept = recent(node.host, lines(node.host), hours=node.log_hours)
    counts: Counter[str] = Counter()
    last: dict[str, str] = {}
    for line in kept:
        name = next((n for n, kind in classes().items() if kind.pattern.search(line)), None)
        if name is not None:
            counts[name] += 1
            last[name] = STAMP.sub("", line).strip()
    counts = Counter({name: count for name, count in counts.items() if count >= classes()[name].at_least})
    if not counts:
        message = f"nothing in {len(kept):,} lines of {node.log_hours:g} hours"
        yield found("log.kernel", CheckStatus.PASS, message, measured=0, unit="lines")
    for name, count in counts.items():
        status, hint = classes()[name].status, classes()[name].hint
        yield found("log.kernel", status, last[name][:200], where=name, measured=count, unit="lines", hint=hint)


@cache
def classes() -> dict[str, LineClass]:
    """Return the classes of lines by name; the first that matches a line counts."""
    data = toml_table(DATA / "kernel_log.toml")
    return {
        name: LineClass(
            pattern=re.compile(e["pattern"]), status=CheckStatus(e["status"]), hint=e["hint"],
            at_least=e.get("at_least", 1),
        )
        for name, e in data.items()
    }  # fmt: skip


CHECKS: dict[str, Check] = {"log.kernel": _log}
