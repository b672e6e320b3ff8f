"""`meshwright tune system`: what would change, `--apply`, and `--restore`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshwright.cli.options import json_option, root_option, verb
from meshwright.errors import InputError

if TYPE_CHECKING:
    from meshwright.doctor.settings import Note, Setting, Value
    from meshwright.doctor.tuning import Outcome

Document = dict[str, Any]


@verb(
    "system",
    examples=[
        "meshwright tune system",
        "meshwright tune system --why --only cpu-governor,numa-balancing",
        "sudo meshwright tune system --apply --skip address-randomization",
        "meshwright tune system --restore",
        "meshwright tune system --root /host --json",
    ],
)
@click.option("--apply", "is_apply", is_flag=True, help="Change the settings; what they held is saved first.")
@click.option("--restore", "is_restore", is_flag=True, help="Put back what was saved.")
@click.option("--only", metavar="NAMES", help="These settings alone, separated by commas.")
@click.option("--skip", metavar="NAMES", help="All but these.")
@click.option(
    "--why", is_flag=True, help="Say of every setting what it is good for, its risk and its source."
)
@click.option(
    "--state", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Where values are saved.  [default: meshwright/tune-system.json below the XDG state folder]",
)  # fmt: skip
@root_option
@json_option
def command(
    is_apply: bool,
    is_restore: bool,
    only: str | None,
    skip: str | None,
    why: bool,
    state: Path | None,
    root: Path,
    as_json: bool,
) -> None:
    """Show or change the kernel settings that training feels.

    A dry run unless --apply: it prints what would change. --apply first saves what every setting held, then changes all
    or none: if one cannot be changed, the others are put back and the exit code is 1. --restore puts back what was
    saved. Settings that this process cannot read or write are skipped, with the reason; changing any needs root. They
    last until the node restarts.
    """
    from meshwright.cli.output import emit_json
    from meshwright.doctor.host import host_at
    from meshwright.doctor.settings import choose, notes, survey
    from meshwright.doctor.tuning import apply, default_state, restore

    if is_apply and is_restore:
        raise InputError("--apply and --restore are opposites", allowed="one of them")
    if is_restore and (only or skip):
        raise InputError("--restore puts back everything that was saved", got="--only or --skip")
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
            _say_what_would(values)
    if as_json:
        emit_json(document)
    elif outcome is not None:
        _say_what_was_done(outcome, state, is_restore=is_restore)
    if (outcome is not None and not outcome.is_done) or (is_apply and _nothing_was_possible(document)):
        raise click.exceptions.Exit(1)


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


# --- the document ---


def _rows(values: list[Value]) -> list[Document]:
    """One row a setting, with its files inside."""
    rows = []
    for setting, own in _by_setting(values):
        about = asdict(setting) | {"comparison": setting.comparison.value}
        kept = [
            {"path": v.path, "current": v.current, "target": v.target, "action": v.action, "reason": v.reason}
            for v in own
        ]
        rows.append({**about, "values": kept})
    return rows


def _by_setting(values: list[Value]) -> list[tuple[Setting, list[Value]]]:
    names = dict.fromkeys(v.setting.name for v in values)
    grouped = [[v for v in values if v.setting.name == name] for name in names]
    return [(own[0].setting, own) for own in grouped]


def _outcome(outcome: Outcome) -> Document:
    return {
        "done": outcome.is_done,
        "changed": [c.path for c in outcome.changed],
        "put_back": [s.path for s in outcome.put_back],
        "failure": outcome.failure,
        "stuck": outcome.stuck,
    }


def _nothing_was_possible(document: Document) -> bool:
    """Something differs from what is wanted, and nothing of it may be written."""
    unwanted = [
        v for row in document["settings"] for v in row["values"] if v["current"] not in (None, v["target"])
    ]
    return bool(unwanted) and not document["changed"] and document["done"]


# --- words ---


def _show(values: list[Value], seen: list[Note], *, why: bool) -> None:
    from meshwright.cli.output import print_line, print_table

    rows = [_cells(setting, own) for setting, own in _by_setting(values)]
    print_table({"setting": "left", "files": "right", "now": "left", "wanted": "left", "": "left"}, rows)
    if seen:
        print_line()
        states = {True: "well", False: "look at it", None: "not seen"}
        print_table(
            {"only noted": "left", "now": "left", "wanted": "left", "": "left"},
            [
                (n.name, n.current, n.wanted, states[n.is_well] + (f": {n.reason}" if n.reason else ""))
                for n in seen
            ],
        )
        for n in seen:
            if n.is_well is False:
                print_line(f"{n.name}: {n.why}; {n.how}.")
    if why:
        for setting, _ in _by_setting(values):
            print_line()
            print_line(setting.name, style="bold")
            print_line(f"Good for: {setting.why}. Risk: {setting.risk}.")
            print_line(f"{setting.path} ({setting.source})")


def _cells(setting: Setting, own: list[Value]) -> tuple[object, ...]:
    from meshwright.doctor.settings import ABSENT, Action

    held = [v.current for v in own if v.current is not None]
    now = ", ".join(dict.fromkeys(held)) or None
    targets = ", ".join(dict.fromkeys(v.target for v in own))
    parts = []
    for action in Action:
        counted = [v for v in own if v.action is action]
        if counted:
            reasons = ", ".join(dict.fromkeys(v.reason for v in counted if v.reason))
            number = f" {len(counted)}" if len(counted) < len(own) else ""
            parts.append(f"{action.value}{number}" + (f": {reasons}" if reasons else ""))
    is_there = any(v.reason != ABSENT for v in own)
    return setting.name, len(own) if is_there else 0, now, targets, "; ".join(parts)


def _say_what_would(values: list[Value]) -> None:
    from meshwright.cli.output import print_line
    from meshwright.doctor.settings import Action

    changes = [v for v in values if v.action is Action.CHANGE]
    skipped = len({v.setting.name for v in values if v.action is Action.SKIP})
    print_line()
    files = "1 file" if len(changes) == 1 else f"{len(changes)} files"
    print_line(f"--apply would write {files}; {skipped} settings are skipped.", style="bold")


def _say_what_was_done(outcome: Outcome, state: Path, *, is_restore: bool) -> None:
    from meshwright.cli.output import print_line

    if not is_restore:
        print_line()
    if outcome.failure is not None:
        f = outcome.failure
        print_line(f"{f.setting} could not be changed ({f.path}: {f.reason}).", style="bold red")
        print_line(
            f"Put back: {len(outcome.put_back)} files. Nothing is changed." if not outcome.stuck else ""
        )
    elif is_restore:
        print_line(f"Put back: {len(outcome.changed)} files.", style="bold")
    elif outcome.changed:
        print_line(f"Changed: {len(outcome.changed)} files. What they held is in {state}.", style="bold")
        print_line("`meshwright tune system --restore` puts it back.")
    else:
        print_line("Nothing was changed.", style="bold")
    for f in outcome.stuck:
        print_line(f"Not put back: {f.path}: {f.reason}; its value is still in {state}.", style="bold red")
