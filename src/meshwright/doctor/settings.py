"""Kernel settings that affect training (data/settings.toml), their values on this node, and the changes.

setting   one entry of the data: a file or a pattern of files, its target, the reason, the risk and the source
value     one file of a setting on this node: its current value and the action
note      something that is read and never written: limits of processes, firmware, services
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

from meshwright.doctor.host import Host, Unseen
from meshwright.doctor.verdict import DATA
from meshwright.errors import UnknownNameError
from meshwright.files import record_of, toml_table

ABSENT = "not on this node"


class SettingComparison(StrEnum):
    """Comparison of a file's value with the target."""

    EQUAL = "equal"
    AT_LEAST = "at least"
    AT_LEAST_EACH = "at least each"
    CHOICE = "choice"
    ONCE = "once"


class SettingAction(StrEnum):
    """Action on one file."""

    NONE = "as wanted"
    CHANGE = "change"
    SKIP = "skipped"


@dataclass(frozen=True, kw_only=True)
class KernelSetting:
    """One entry of settings.toml."""

    name: str
    path: str
    wanted: str
    comparison: SettingComparison
    why: str
    risk: str
    source: str
    neighbor: str | None = None  # a file in the same folder ...
    neighbor_at_least: int = 0  # ... and the smallest value in it for which the setting applies


@dataclass(frozen=True, kw_only=True)
class SettingValue:
    """One file of a setting. `current` is None if it cannot be read or has no meaning."""

    setting: KernelSetting
    path: str
    current: str | None
    target: str  # what would be written
    action: SettingAction
    reason: str | None = None  # of SKIP


@dataclass(frozen=True, kw_only=True)
class SystemNote:
    """State of something that is never written. `is_well` is None if it is unknown."""

    name: str
    current: str | None
    wanted: str | None
    is_well: bool | None
    why: str
    how: str
    source: str
    reason: str | None = None


@cache
def settings() -> tuple[KernelSetting, ...]:
    """Return all entries of settings.toml in the order of application."""
    return tuple(record_of(KernelSetting, e, name=name) for name, e in toml_table(DATA / "settings.toml").items())


def choose(*, only: tuple[str, ...] = (), skip: tuple[str, ...] = ()) -> tuple[KernelSetting, ...]:
    """Return the settings named in `only` (empty: all) but not in `skip`. Raises UnknownNameError."""
    known = [s.name for s in settings()]
    for name in (*only, *skip):
        if name not in known:
            raise UnknownNameError("setting", name, known=known)
    return tuple(s for s in settings() if (not only or s.name in only) and s.name not in skip)


def survey(host: Host, chosen: tuple[KernelSetting, ...]) -> list[SettingValue]:
    """Return every file of the chosen settings on this node. A missing setting is one skipped value."""
    found: list[SettingValue] = []
    for setting in chosen:
        paths = [p for p in host.glob(setting.path) if _is_meant(host, setting, p)]
        found += [_look(host, setting, path) for path in paths] or [_absent(setting)]
    return found


def held(comparison: SettingComparison, text: str) -> str:
    """Return the value in the text of a file: `always [madvise] never` is madvise.

    >>> held(SettingComparison.CHOICE, "always [madvise] never")
    'madvise'
    """
    if comparison is SettingComparison.CHOICE:
        chosen = re.search(r"\[(\S+)\]", text)
        if chosen is None:
            raise Unseen(f"no choice is marked in {text[:60]!r}")
        return chosen[1]
    return " ".join(text.split())


def target_of(setting: KernelSetting, current: str) -> str:
    """Return the target of a file, given its current value. Raises Unseen when the two cannot be compared.

    >>> buffers = next(s for s in settings() if s.name == "tcp-read-buffer")
    >>> target_of(buffers, "4096 131072 6291456")
    '4096 131072 33554432'
    """
    if setting.comparison not in (SettingComparison.AT_LEAST, SettingComparison.AT_LEAST_EACH):
        return setting.wanted
    try:
        pairs = list(zip(map(int, current.split()), map(int, setting.wanted.split()), strict=True))
    except ValueError:
        raise Unseen(f"holds {current[:40]!r}, not numbers like {setting.wanted!r}") from None
    return " ".join(str(max(pair)) for pair in pairs)


def notes(host: Host) -> list[SystemNote]:
    """Return the state of settings that a running kernel cannot change."""
    entries = toml_table(DATA / "notes.toml").items()
    return [_note(host, n, e) for n, e in entries if "only_with" not in e or host.exists(e["only_with"])]


def _is_meant(host: Host, setting: KernelSetting, path: str) -> bool:
    if setting.neighbor is None:
        return True
    try:
        return host.read_int(f"{path.rpartition('/')[0]}/{setting.neighbor}") >= setting.neighbor_at_least
    except Unseen:
        return False


def _absent(setting: KernelSetting) -> SettingValue:
    return SettingValue(
        setting=setting, path=setting.path, current=None, target=setting.wanted, action=SettingAction.SKIP,
        reason=ABSENT,
    )  # fmt: skip


def _look(host: Host, setting: KernelSetting, path: str) -> SettingValue:
    current, target, reason = None, setting.wanted, None
    try:
        if setting.comparison is not SettingComparison.ONCE:
            current = held(setting.comparison, host.read(path))
            target = target_of(setting, current)
    except Unseen as unseen:
        reason = unseen.reason
    if reason is None and current == target:
        action = SettingAction.NONE
    else:
        reason = reason or host.why_not_writable(path)
        action = SettingAction.CHANGE if reason is None else SettingAction.SKIP
    return SettingValue(setting=setting, path=path, current=current, target=target, action=action, reason=reason)


def _note(host: Host, name: str, entry: dict[str, Any]) -> SystemNote:
    current, is_well, reason = None, None, None
    try:
        if "pattern" not in entry:
            raise Unseen("cannot be read")
        text = host.read(entry["file"]) if "file" in entry else _printed(host, entry["command"])
        match = re.search(entry["pattern"], text, re.MULTILINE)
        current = match[1] if match else "none"
        is_well = _is_well(entry, current)
    except Unseen as unseen:
        reason = unseen.reason
    wanted = entry.get("wanted", "").replace("|", " or ") or None
    if "at_least" in entry:
        wanted = f"at least {entry['at_least']:,}"
    return SystemNote(
        name=name, current=current, wanted=wanted, is_well=is_well, why=entry["why"], how=entry["how"],
        source=entry["source"], reason=reason,
    )  # fmt: skip


def _printed(host: Host, command: list[str]) -> str:
    """Return the output of a command, even if it fails: `systemctl is-active` prints "inactive" and exits with 3."""
    output = host.run(*command)
    if output.code and not output.stdout.strip():
        raise Unseen(f"{command[0]}: {output.problem}")
    return output.stdout


def _is_well(entry: dict[str, Any], current: str) -> bool:
    if "at_least" in entry:
        return current == "unlimited" or (current.isdigit() and int(current) >= entry["at_least"])
    return re.fullmatch(entry["wanted"], current) is not None
