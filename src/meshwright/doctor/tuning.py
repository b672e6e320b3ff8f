"""Change a node's settings, all or none, and restore them.

The old values are written to the state file first, atomically, so that a kill at any later moment leaves enough to
restore. The first values win: applying twice, or applying more, never overwrites values saved since the node booted.
After a reboot the kernel has its own values again, and values saved before it are set aside.

    {"version": 1, "boot_id": "...", "saved": [{"setting": "swappiness", "path": "/proc/...", "value": "60"}, ...]}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from meshwright.doctor.host import Host, Unseen
from meshwright.doctor.settings import SettingAction, SettingComparison, SettingValue, held, settings
from meshwright.errors import InputError
from meshwright.files import write_atomically
from meshwright.json_values import load_json

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class SavedValue:
    """Value of one file before the first change."""

    setting: str
    path: str
    value: str


@dataclass(frozen=True, kw_only=True)
class WriteFailure:
    """One file that could not be written, with the reason."""

    setting: str
    path: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class TuningOutcome:
    """Result of `apply` or `restore`. After a failure `changed` is empty and `put_back` lists the undone changes.

    `stuck` are files that could be neither changed nor restored: the state file still holds their values.
    """

    changed: tuple[SettingValue | SavedValue, ...] = ()
    put_back: tuple[SavedValue, ...] = ()
    failure: WriteFailure | None = None
    stuck: tuple[WriteFailure, ...] = ()

    @property
    def is_done(self) -> bool:
        return self.failure is None and not self.stuck


def default_state(host: Host) -> Path:
    """Return the state file: below XDG_STATE_HOME, or the home folder's .local/state."""
    base = host.environment.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "meshwright" / "tune-system.json"


def apply(host: Host, values: Sequence[SettingValue], *, state: Path) -> TuningOutcome:
    """Write the values that differ. After a failure or an interruption all changes are undone.

    Raises InputError, before any change, when the state file cannot be read or written.
    """
    todo = [v for v in values if v.action is SettingAction.CHANGE]
    actions = [v for v in todo if v.setting.comparison is SettingComparison.ONCE]
    changes = [v for v in todo if v.setting.comparison is not SettingComparison.ONCE]
    before = state.read_text(encoding="utf-8") if state.exists() else None
    earlier = _saved(host, state)
    known = {s.path for s in earlier}
    own = [SavedValue(setting=v.setting.name, path=v.path, value=v.current or "") for v in changes]
    if changes:
        _write_state(host, state, [*earlier, *(s for s in own if s.path not in known)])
    # An action cannot be undone, so it comes first: when it fails, nothing else has changed.
    done: list[SavedValue] = []
    saved_of = {s.path: s for s in own}
    try:
        for value in [*actions, *changes]:
            if value.path in saved_of:
                done.append(saved_of[value.path])  # before the write: a write that fails may still have changed it
            failure = _write(host, value.setting.name, value.path, value.target)
            if failure is not None:
                return _undo(host, done, state, before, failure=failure)
    except BaseException:  # Ctrl-C between two writes
        _undo(host, done, state, before, failure=None)
        raise
    return TuningOutcome(changed=tuple(todo))


def restore(host: Host, *, state: Path) -> TuningOutcome:
    """Restore the saved values, last changed first, and remove the restored values from the state file.

    Raises InputError when no value is saved, when the file is damaged, or when it names a file that is no setting.
    """
    if not state.exists():
        raise InputError("nothing is saved to restore", got=str(state), hint="`--state FILE` names another file")
    saved, _ = _read_state(state)
    back, stuck = _put_back(host, saved)
    left = [s for s in saved if s not in back]
    if left:
        _write_state(host, state, left)
    else:
        state.unlink()
    return TuningOutcome(changed=back, stuck=stuck)


def _put_back(host: Host, saved: Sequence[SavedValue]) -> tuple[tuple[SavedValue, ...], tuple[WriteFailure, ...]]:
    """Write saved values, the last one first: those that hold now, and the failures."""
    written = [
        (item, None if _holds(host, item) else _write(host, item.setting, item.path, item.value))
        for item in reversed(saved)
    ]
    return tuple(item for item, failure in written if failure is None), tuple(f for _, f in written if f is not None)


def _write(host: Host, setting: str, path: str, value: str) -> WriteFailure | None:
    """Write one file and read it again: some settings accept a write and keep their value."""
    try:
        host.write(path, value)
        comparison = next(s.comparison for s in settings() if s.name == setting)
        if comparison is SettingComparison.ONCE:
            return None
        now = held(comparison, host.read(path))
    except OSError as error:
        return WriteFailure(setting=setting, path=path, reason=error.strerror or str(error))
    except Unseen as unseen:
        return WriteFailure(setting=setting, path=path, reason=unseen.reason)
    if now == value:
        return None
    return WriteFailure(setting=setting, path=path, reason=f"holds {now!r} after {value!r} was written")


def _undo(
    host: Host, done: Sequence[SavedValue], state: Path, before: str | None, *, failure: WriteFailure | None
) -> TuningOutcome:
    """Restore what this call changed. The state file is as before, unless a value could not be restored."""
    put_back, stuck = _put_back(host, done)
    if not stuck:
        if before is None:
            state.unlink(missing_ok=True)
        else:
            _guarded(state, lambda: write_atomically(state, before))
    return TuningOutcome(put_back=put_back, failure=failure, stuck=stuck)


def _holds(host: Host, item: SavedValue) -> bool:
    """Return True if a file still holds the saved value: a file that rejected a value needs no second write."""
    comparison = next(s.comparison for s in settings() if s.name == item.setting)
    try:
        return held(comparison, host.read(item.path)) == item.value
    except Unseen:
        return False


# --- the state file ---


def _saved(host: Host, state: Path) -> list[SavedValue]:
    """Return the values that earlier calls saved since the node booted."""
    saved, boot_id = _read_state(state) if state.exists() else ([], None)
    return saved if boot_id == host.boot_id else []


def _read_state(state: Path) -> tuple[list[SavedValue], str | None]:
    """Return the saved values, and the boot in which they were saved."""
    try:
        document: Any = load_json(state)
        if document["version"] != VERSION:
            raise ValueError
        saved = [SavedValue(setting=s["setting"], path=s["path"], value=s["value"]) for s in document["saved"]]
        boot_id = document["boot_id"]
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(
            "this is not a file of saved settings", got=str(state), hint="`--state FILE` names another file"
        ) from None
    for item in saved:
        _require_setting(item, state)
    return saved, boot_id


def _require_setting(item: SavedValue, state: Path) -> None:
    """A state file is read by root: it may name files of its settings and no others."""
    patterns = [s.path for s in settings() if s.name == item.setting]
    depth = item.path.count("/")
    if ".." in item.path.split("/") or not any(fnmatchcase(item.path, p) and p.count("/") == depth for p in patterns):
        raise InputError(f"{state} names a file that is none of the setting {item.setting!r}", got=item.path)


def _write_state(host: Host, state: Path, saved: Sequence[SavedValue]) -> None:
    document = {
        "version": VERSION,
        "host": host.name,
        "boot_id": host.boot_id,
        "saved_at": datetime.now(tz=UTC).isoformat(timespec="seconds"),
        "saved": [{"setting": s.setting, "path": s.path, "value": s.value} for s in saved],
    }
    _guarded(state, lambda: write_atomically(state, json.dumps(document, indent=1) + "\n"))


def _guarded(state: Path, write: Callable[[], None]) -> None:
    try:
        state.parent.mkdir(parents=True, exist_ok=True)
        write()
    except OSError as error:
        raise InputError(
            f"the values cannot be saved, so nothing is changed: {error.strerror}", got=str(state),
            hint="`--state FILE` names another file",
        ) from None  # fmt: skip
