"""`meshwright doctor`: one node's health; with --compare many nodes'."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshwright.cli.options import json_option, root_option, verb
from meshwright.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    from meshwright.doctor.compare import Comparison
    from meshwright.doctor.examine import Examination
    from meshwright.doctor.verdict import Verdict

STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red", "skipped": "dim"}


@verb(
    "doctor",
    examples=[
        "meshwright doctor",
        "meshwright doctor --json > $(hostname).json",
        "meshwright doctor --expect-devices 8 --no-rates",
        "meshwright doctor --only devices,network",
        "meshwright doctor --compare node*.json --exclude-file exclude.txt",
    ],
)
@click.argument(
    "reports", nargs=-1, metavar="[REPORT.json]...", type=click.Path(dir_okay=False, path_type=Path)
)
@click.option("--compare", "is_comparison", is_flag=True, help="Compare the reports of many nodes.")
@click.option(
    "--exclude-file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="With --compare: write the hosts to leave out, one a line, for `srun --exclude ./FILE`.",
)  # fmt: skip
@click.option(
    "--expect-devices", type=click.IntRange(min=0), metavar="N",
    help="Devices that the node should have.  [default: what its usual node has; fewer is a warning]",
)  # fmt: skip
@click.option(
    "--rates/--no-rates", default=None,
    help="Measure GEMM, copy and all-reduce.  [default: where there are devices, and PyTorch]",
)  # fmt: skip
@click.option(
    "--log-hours", type=click.FloatRange(min=0), default=24.0, show_default=True, metavar="HOURS",
    help="How far back the kernel's log is read.",
)  # fmt: skip
@click.option("--only", metavar="GROUPS", help="Of host, limits, log, network, devices, rates; with commas.")
@click.option("--skip", metavar="GROUPS", help="All groups but these.")
@root_option
@json_option
def command(
    reports: tuple[Path, ...],
    is_comparison: bool,
    exclude_file: Path | None,
    expect_devices: int | None,
    rates: bool | None,
    log_hours: float,
    only: str | None,
    skip: str | None,
    root: Path,
    as_json: bool,
) -> None:
    """Is this node healthy, and as fast as it should be.

    Looks at the host, the limits of this process, the kernel's log, network cards and devices, and measures the devices
    against what the catalogue expects of that very device. Needs no root, no GPU and no PyTorch: what it cannot see is
    skipped, with the reason. Exits with 1 when a check fails.

    With --compare it reads the reports of many nodes instead (`meshwright doctor --json` on each) and names those that
    differ from the majority; it exits with 1 when hosts should be left out.
    """
    if is_comparison:
        _compare(reports, exclude_file, as_json=as_json)
        return
    if reports or exclude_file is not None:
        got = str(reports[0]) if reports else "--exclude-file"
        raise InputError(
            "reports are for --compare", got=got, hint="meshwright doctor --compare REPORT.json..."
        )
    chosen = _chosen(only, skip)

    from meshwright.cli.output import emit_json, progress
    from meshwright.doctor.checks import Node
    from meshwright.doctor.devices import find_devices
    from meshwright.doctor.examine import examine
    from meshwright.doctor.host import host_at

    host = host_at(root)
    with progress("examining this node"):
        node = Node(
            host=host, devices=find_devices(host), num_expected_devices=expect_devices, log_hours=log_hours,
            rates=rates,
        )  # fmt: skip
        found = examine(node, chosen=chosen)
    if as_json:
        emit_json(found.document())
    else:
        _show(found)
    if found.status.value == "fail":
        raise click.exceptions.Exit(1)


def _chosen(only: str | None, skip: str | None) -> tuple[str, ...]:
    from meshwright.doctor.checks import GROUP_NAMES

    wanted, unwanted = (tuple(n.strip() for n in (t or "").split(",") if n.strip()) for t in (only, skip))
    for name in (*wanted, *unwanted):
        if name not in GROUP_NAMES:
            raise UnknownNameError("group of checks", name, known=GROUP_NAMES)
    return tuple(n for n in GROUP_NAMES if (not wanted or n in wanted) and n not in unwanted)


def _show(found: Examination) -> None:
    from rich.text import Text

    from meshwright.cli.output import print_line, print_table

    print_line(found.host, style="bold")
    for name, value in found.facts.items():
        print_line(f"{name}: {value}")
    print_line()
    rows = []
    for group in _together([v for v in found.verdicts if v.status.value != "skipped"]):
        status = Text(group[0].status.value, style=STYLES[group[0].status.value])
        measured = f"{_range(group, 'measured')} {group[0].unit}".strip()
        rows.append((group[0].check, status, _where(group), measured, _expected(group)))
    columns = {"check": "left", "verdict": "left", "where": "left", "measured": "right", "expected": "right"}
    if rows:
        print_table(columns, rows)  # pyright: ignore[reportArgumentType]
        print_line()
    for v in found.verdicts:
        if v.message and v.status.value in ("warn", "fail"):
            place = f"{v.check} {v.where}".strip()
            print_line(f"{v.status.value}: {place}: {v.message}", style=STYLES[v.status.value])
    _show_skipped(found.verdicts)
    for hint in dict.fromkeys(f"{v.check}: {v.hint}" for v in found.verdicts if v.hint):
        print_line(f"hint: {hint}")
    counts = ", ".join(f"{count} {name}" for name, count in found.counts.items())
    print_line(f"Verdict: {found.status.value} ({counts}).", style=STYLES[found.status.value])


def _show_skipped(verdicts: Sequence[Verdict]) -> None:
    """What was not looked at, by reason; measured all the same where nothing can be expected."""
    from meshwright.cli.output import print_line

    reasons: dict[str, list[Verdict]] = {}
    for v in verdicts:
        if v.status.value == "skipped":
            reasons.setdefault(v.message, []).append(v)
    for reason, own in reasons.items():
        words = []
        for check in dict.fromkeys(v.check for v in own):
            values = _range([v for v in own if v.check == check], "measured")
            unit = next(v.unit for v in own if v.check == check)
            words.append(f"{check} {values} {unit}".strip() if values else check)
        print_line(f"skipped: {', '.join(words)}: {reason}", style=STYLES["skipped"])


def _together(verdicts: Sequence[Verdict]) -> list[list[Verdict]]:
    """Things of which one check says good share a row; what is wrong has a row of its own."""
    rows: dict[tuple[str, ...], list[Verdict]] = {}
    for i, v in enumerate(verdicts):
        rows.setdefault((v.check,) if v.status.value == "pass" else (str(i),), []).append(v)
    return list(rows.values())


def _where(group: list[Verdict]) -> str:
    return group[0].where if len(group) == 1 else f"{len(group)} alike"


def _expected(group: list[Verdict]) -> str:
    """What was expected, or the bound with its side."""
    from meshwright.doctor.verdict import limits

    limit = limits().get(group[0].check)
    words = _range(group, "expected")
    return f"{limit.sign} {words}" if words and limit is not None and not limit.of_expected else words


def _range(group: list[Verdict], field: str) -> str:
    values = [value for v in group if (value := getattr(v, field)) is not None]
    numbers = [v for v in values if isinstance(v, int | float)]
    if len(numbers) < len(values):
        return ", ".join(dict.fromkeys(str(v) for v in values))
    shown = list(dict.fromkeys(map(_number, (min(numbers), max(numbers))))) if numbers else []
    return " to ".join(shown)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


# --- many nodes ---


def _compare(paths: tuple[Path, ...], exclude_file: Path | None, *, as_json: bool) -> None:
    from meshwright.cli.output import emit_json
    from meshwright.doctor.compare import compare, read_report
    from meshwright.files import write_atomically

    found = compare([read_report(path) for path in paths])
    if exclude_file is not None:
        try:
            write_atomically(exclude_file, "".join(f"{host}\n" for host in found.exclude))
        except OSError as error:
            raise InputError(f"the list cannot be written: {error.strerror}", got=str(exclude_file)) from None
    if as_json:
        emit_json({
            "hosts": found.hosts, "failed": found.failed, "outliers": found.outliers, "undecided": found.undecided,
            "majority": found.majority, "exclude": found.exclude,
        })  # fmt: skip
    else:
        _show_comparison(found)
    if found.exclude:
        raise click.exceptions.Exit(1)


def _show_comparison(found: Comparison) -> None:
    from meshwright.cli.output import print_line, print_table

    print_line(f"{len(found.hosts)} nodes", style="bold")
    rows: list[tuple[str, ...]] = [
        (host, "own checks", ", ".join(checks), "", "exclude") for host, checks in found.failed.items()
    ]
    rows += [(o.host, o.what, _value(o.value), _value(o.majority), o.follows) for o in found.outliers]
    if rows:
        print_table(["host", "what", "has", "most have", "follows"], rows)
    else:
        print_line("No node differs from the others.")
    for name, counts in found.undecided.items():
        words = ", ".join(f"{value} ({count})" for value, count in counts.items())
        print_line(f"No majority for {name}: {words}.")
    print_line()
    if found.exclude:
        print_line("To leave out:", style="bold red")
        for host in found.exclude:
            print_line(host)
    else:
        print_line("None to leave out.", style="bold")


def _value(value: Any) -> str:
    return _number(value) if isinstance(value, int | float) else str(value)
