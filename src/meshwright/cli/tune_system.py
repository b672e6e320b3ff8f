"""`meshwright tune system`: show, change or restore kernel settings."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshwright.cli.output import emit_json, exit_unless, print_line, print_table
from meshwright.doctor.host import host_at
from meshwright.doctor.settings import (
    ABSENT,
    KernelSetting,
    SettingAction,
    SettingValue,
    SystemNote,
    choose,
    notes,
    survey,
)
from meshwright.doctor.tuning import TuningOutcome, apply, default_state, restore
from meshwright.errors import InputError

Document = dict[str, Any]


def run(
    *,
    is_apply: bool,
    is_restore: bool,
    only: str | None,
    skip: str | None,
    why: bool,
    state: Path | None,
    root: Path,
    as_json: bool,
) -> None:
    """Show the settings; change or restore them if asked to."""
    if is_apply and is_restore:
        raise InputError("--apply and --restore are opposites", allowed="one of them")
    if is_restore and (only or skip):
        raise InputError("--restore restores everything that was saved", got="--only or --skip")
    host = host_at(root)
    state = state or default_state(host)
    if is_restore:
        outcome = restore(host, state=state)
        document = {"mode": "restore", "state": state, **_outcome(outcome)}
    else:
        values = survey(host, choose(only=_names(only), skip=_names(skip)))
        seen = notes(host)
        outcome = None
        document = {"mode": "dry run", "state": state, "settings": _rows(values), "notes": seen}
        if is_apply:
            if not as_json:
                _show(values, seen, why=why)
            outcome = apply(host, values, state=state)
            document |= {"mode": "apply", **_outcome(outcome)}
        elif not as_json:
            _show(values, seen, why=why)
            _show_dry_run(values)
    if as_json:
        emit_json(document)
    elif outcome is not None:
        _show_outcome(outcome, state, is_restore=is_restore)
    exit_unless((outcome is None or outcome.is_done) and not (is_apply and _nothing_was_possible(document)))


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


# --- the document ---


def _rows(values: list[SettingValue]) -> list[Document]:
    """One row per setting, with its files."""
    rows = []
    for setting, own in _by_setting(values):
        about = asdict(setting) | {"comparison": setting.comparison.value}
        kept = [
            {"path": v.path, "current": v.current, "target": v.target, "action": v.action, "reason": v.reason}
            for v in own
        ]
        rows.append({**about, "values": kept})
    return rows


def _by_setting(values: list[SettingValue]) -> list[tuple[KernelSetting, list[SettingValue]]]:
    names = dict.fromkeys(v.setting.name for v in values)
    grouped = [[v for v in values if v.setting.name == name] for name in names]
    return [(own[0].setting, own) for own in grouped]


def _outcome(outcome: TuningOutcome) -> Document:
    return {
        "done": outcome.is_done,
        "changed": [c.path for c in outcome.changed],
        "put_back": [s.path for s in outcome.put_back],
        "failure": outcome.failure,
        "stuck": outcome.stuck,
    }


def _nothing_was_possible(document: Document) -> bool:
    """True if a setting differs from its target and none could be written."""
    unwanted = [v for row in document["settings"] for v in row["values"] if v["current"] not in (None, v["target"])]
    return bool(unwanted) and not document["changed"] and document["done"]


# --- tables ---


def _show(values: list[SettingValue], seen: list[SystemNote], *, why: bool) -> None:
    rows = [_cells(setting, own) for setting, own in _by_setting(values)]
    print_table({"setting": "left", "files": "right", "now": "left", "wanted": "left", "": "left"}, rows)
    if seen:
        print_line()
        states = {True: "well", False: "look at it", None: "not seen"}
        print_table(
            {"only noted": "left", "now": "left", "wanted": "left", "": "left"},
            [(n.name, n.current, n.wanted, states[n.is_well] + (f": {n.reason}" if n.reason else "")) for n in seen],
        )
        for n in seen:
            if n.is_well is False:
                print_line(f"{n.name}: {n.why}; {n.how}.")
    if why:
        for setting, _ in _by_setting(values):
            print_line()
            print_line(setting.name, style="bold")
            print_line(f"Benefit: {setting.why}. Risk: {setting.risk}.")
            print_line(f"{setting.path} ({setting.source})")


def _cells(setting: KernelSetting, own: list[SettingValue]) -> tuple[object, ...]:
    held = [v.current for v in own if v.current is not None]
    now = ", ".join(dict.fromkeys(held)) or None
    targets = ", ".join(dict.fromkeys(v.target for v in own))
    parts = []
    for action in SettingAction:
        counted = [v for v in own if v.action is action]
        if counted:
            reasons = ", ".join(dict.fromkeys(v.reason for v in counted if v.reason))
            number = f" {len(counted)}" if len(counted) < len(own) else ""
            parts.append(f"{action.value}{number}" + (f": {reasons}" if reasons else ""))
    is_there = any(v.reason != ABSENT for v in own)
    return setting.name, len(own) if is_there else 0, now, targets, "; ".join(parts)


def _show_dry_run(values: list[SettingValue]) -> None:
    changes = [v for v in values if v.action is SettingAction.CHANGE]
    skipped = len({v.setting.name for v in values if v.action is SettingAction.SKIP})
    print_line()
    files = "1 file" if len(changes) == 1 else f"{len(changes)} files"
    print_line(f"--apply would write {files}; {skipped} settings are skipped.", style="bold")


def _show_outcome(outcome: TuningOutcome, state: Path, *, is_restore: bool) -> None:
    if not is_restore:
        print_line()
    if outcome.failure is not None:
        f = outcome.failure
        print_line(f"{f.setting} could not be changed ({f.path}: {f.reason}).", style="bold red")
        print_line(f"Restored: {len(outcome.put_back)} files. Nothing is changed." if not outcome.stuck else "")
    elif is_restore:
        print_line(f"Restored: {len(outcome.changed)} files.", style="bold")
    elif outcome.changed:
        print_line(f"Changed: {len(outcome.changed)} files. Their old values are in {state}.", style="bold")
        print_line("`meshwright tune system --restore` restores them.")
    else:
        print_line("Nothing was changed.", style="bold")
    for f in outcome.stuck:
        print_line(f"Not restored: {f.path}: {f.reason}; its value is still in {state}.", style="bold red")
