"""`meshwright doctor`: the health of one node, and the comparison of many."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from meshwright.cli.options import PathType, count_option, file_option, names_in, root_option
from meshwright.cli.output import emitted_json, exit_unless, print_line, print_table, progress, styled
from meshwright.cli.verbs import verb
from meshwright.doctor.checks import GROUP_NAMES, Node
from meshwright.doctor.compare import NodeComparison, compare, read_report
from meshwright.doctor.devices import find_devices
from meshwright.doctor.examine import Examination, examine
from meshwright.doctor.host import host_at
from meshwright.doctor.pairs import PairRates, measure_pairs
from meshwright.doctor.verdict import CheckVerdict, limits
from meshwright.errors import InputError, UnknownNameError
from meshwright.files import write_atomically
from meshwright.json_values import picked
from meshwright.units import parse_memory

PAIR_TIMEOUT_S = 120.0
"""After this a partner has no answer; the first transfer over NCCL also makes its connections."""

MOST_STRESS_S = 86400.0
STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red", "skipped": "dim"}


@verb("doctor")
@click.argument("reports", nargs=-1, metavar="[REPORT.json]...", type=PathType(dir_okay=False))
@click.option("--compare", "is_comparison", is_flag=True, help="Compare the reports of many nodes.")
@click.option("--pairs", "is_of_pairs", is_flag=True, help="Measure the rate between every two nodes of a torchrun.")
@click.option(
    "--pair-bytes", "pair_bytes", metavar="SIZE", default="64MiB", show_default=True,
    help="With --pairs: size of a message to the partner.",
)  # fmt: skip
@file_option(
    "--exclude-file",
    help="With --compare or --pairs: write the hosts to exclude, one per line, for `srun --exclude ./FILE`.",
)  # fmt: skip
@count_option(
    "--expect-devices", "num_expected_devices", low=0,
    help="Number of devices that the node should have.  [default: as in its usual node; fewer is a warning]",
)  # fmt: skip
@click.option(
    "--rates/--no-rates", default=None,
    help="Measure GEMM, copy and all-reduce rates.  [default: if there are devices and PyTorch]",
)  # fmt: skip
@click.option(
    "--stress", "stress_s", type=click.FloatRange(min=1, max=MOST_STRESS_S), metavar="SECONDS",
    help="Multiply on all devices for so long; compare results, rates and counters of errors before and after.",
)  # fmt: skip
@click.option(
    "--log-hours", type=click.FloatRange(min=0), default=24.0, show_default=True, metavar="HOURS",
    help="Hours of the kernel log to read.",
)  # fmt: skip
@click.option(
    "--only", metavar="GROUPS",
    help="Run these groups of checks, of host, limits, log, network, devices, rates and stress, separated by commas.",
)  # fmt: skip
@click.option("--skip", metavar="GROUPS", help="Run all groups of checks but these.")
@root_option
def command(
    *,
    reports: tuple[Path, ...],
    is_comparison: bool,
    is_of_pairs: bool,
    pair_bytes: str,
    exclude_file: Path | None,
    only: str | None,
    skip: str | None,
    root: Path,
    **of_node: Any,
) -> None:
    """Check the health and the rates of a node; compare many nodes.

    Checks the host, the limits of this process, the kernel log, the network cards and the devices, and measures the
    devices against the catalogue's values for the same device. Needs no root, no GPU and no PyTorch: checks that
    need more are skipped, with the reason. Exits with 1 when a check fails.

    With --compare it reads the reports of many nodes (from `meshwright doctor --json` on each) and names the nodes
    that differ from the majority. It then exits with 1 when hosts should be excluded.

    With --pairs, in the processes that torchrun starts on all nodes, every two nodes send data to each other while no
    other pair shares them. It names nodes and links that are slower than the others, and clocks that differ from the
    others', and exits with 1 if any node or link is slow or a clock is half a minute off.
    """
    if is_comparison and is_of_pairs:
        raise InputError("--compare and --pairs are both given", allowed="one of them")
    if is_comparison:
        _compare(reports, exclude_file)
        return
    if is_of_pairs and not reports:
        try:
            size_bytes = parse_memory(pair_bytes)
        except ValueError:
            raise InputError("--pair-bytes", got=pair_bytes, allowed="a size such as 64MiB") from None
        _measure_pairs(size_bytes, exclude_file)
        return
    if reports or exclude_file is not None:
        got = str(reports[0]) if reports else "--exclude-file"
        raise InputError("reports are for --compare", got=got, hint="meshwright doctor --compare REPORT.json...")
    chosen = _chosen(only, skip)
    is_stressed = of_node["stress_s"] is not None
    if is_stressed != ("stress" in chosen) and (only or is_stressed):
        raise InputError(
            "a stress and its length belong together", got=f"--only {only}" if only else f"--skip {skip}",
            hint="--stress SECONDS",
        )  # fmt: skip
    host = host_at(root)
    with progress("examining this node"):
        found = examine(Node(host=host, devices=find_devices(host), **of_node), chosen=chosen)
    if not emitted_json(found.document()):
        _show(found)
    exit_unless(found.status.value != "fail")


def _chosen(only: str | None, skip: str | None) -> tuple[str, ...]:
    wanted, unwanted = names_in(only), names_in(skip)
    for name in (*wanted, *unwanted):
        if name not in GROUP_NAMES:
            raise UnknownNameError("group of checks", name, known=GROUP_NAMES)
    return tuple(n for n in GROUP_NAMES if (not wanted or n in wanted) and n not in unwanted)


def _show(found: Examination) -> None:
    print_line(found.host, style="bold")
    for name, value in found.facts.items():
        print_line(f"{name}: {value}")
    print_line()
    rows = []
    for group in _grouped([v for v in found.verdicts if v.status.value != "skipped"]):
        status = styled(group[0].status.value, STYLES[group[0].status.value])
        measured = f"{_range(group, 'measured')} {group[0].unit}".strip()
        rows.append((group[0].check, status, _where(group), measured, _expected(group)))
    if rows:
        print_table(
            {"check": "left", "verdict": "left", "where": "left", "measured": "right", "expected": "right"}, rows
        )
        print_line()
    for v in found.verdicts:
        if v.message and v.status.value in ("warn", "fail"):
            what = f"{v.check} {v.where}".strip()
            print_line(f"{v.status.value}: {what}: {v.message}", style=STYLES[v.status.value])
    _show_skipped(found.verdicts)
    for hint in dict.fromkeys(f"{v.check}: {v.hint}" for v in found.verdicts if v.hint):
        print_line(f"hint: {hint}")
    counts = ", ".join(f"{count} {name}" for name, count in found.counts.items())
    print_line(f"Verdict: {found.status.value} ({counts}).", style=STYLES[found.status.value])


def _show_skipped(verdicts: Sequence[CheckVerdict]) -> None:
    """Print the skipped checks by reason, and measurements without an expected value."""
    reasons: dict[str, list[CheckVerdict]] = {}
    for v in verdicts:
        if v.status.value == "skipped":
            reasons.setdefault(v.message, []).append(v)
    for reason, own in reasons.items():
        checks = []
        for check in dict.fromkeys(v.check for v in own):
            values = _range([v for v in own if v.check == check], "measured")
            unit = next(v.unit for v in own if v.check == check)
            checks.append(f"{check} {values} {unit}".strip() if values else check)
        print_line(f"skipped: {', '.join(checks)}: {reason}", style=STYLES["skipped"])


def _grouped(verdicts: Sequence[CheckVerdict]) -> list[list[CheckVerdict]]:
    """Verdicts by row: all passes of one check share a row, and everything else has its own."""
    rows: dict[tuple[str, ...], list[CheckVerdict]] = {}
    for i, v in enumerate(verdicts):
        rows.setdefault((v.check,) if v.status.value == "pass" else (str(i),), []).append(v)
    return list(rows.values())


def _where(group: list[CheckVerdict]) -> str:
    return group[0].where if len(group) == 1 else f"{len(group)} alike"


def _expected(group: list[CheckVerdict]) -> str:
    """The expected value, or the limit with its sign."""
    limit = limits().get(group[0].check)
    expected = _range(group, "expected")
    if not expected or limit is None or limit.of_expected:
        return expected
    return f"{limit.sign} {expected}"


def _range(group: list[CheckVerdict], field: str) -> str:
    values = [value for v in group if (value := getattr(v, field)) is not None]
    numbers = [v for v in values if isinstance(v, int | float)]
    if len(numbers) < len(values):
        return ", ".join(dict.fromkeys(str(v) for v in values))
    shown = list(dict.fromkeys(map(_number, (min(numbers), max(numbers))))) if numbers else []
    return " to ".join(shown)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{4 if abs(value) >= 0.1 else 2}g}"


# --- many nodes ---


def _compare(paths: tuple[Path, ...], exclude_file: Path | None) -> None:
    found = compare([read_report(path) for path in paths])
    _write_excluded(found.exclude, exclude_file)
    if not emitted_json(picked(found, "hosts", "failed", "outliers", "undecided", "majority", "exclude")):
        _show_comparison(found)
    exit_unless(not found.exclude)


def _write_excluded(hosts: Sequence[str], exclude_file: Path | None) -> None:
    if exclude_file is None:
        return
    try:
        write_atomically(exclude_file, "".join(f"{host}\n" for host in hosts))
    except OSError as error:
        raise InputError(f"the list cannot be written: {error.strerror}", got=str(exclude_file)) from None


def _measure_pairs(size_bytes: int, exclude_file: Path | None) -> None:
    """Measure pairs of nodes; the first process prints and exits with the verdict, and the others with 0."""
    found = measure_pairs(size_bytes=size_bytes, timeout_s=PAIR_TIMEOUT_S)
    if found is None:
        return
    slow = [found.hosts[node] for node in found.excluded]
    _write_excluded(slow, exclude_file)
    if not emitted_json(found.document()):
        _show_pairs(found)
    exit_unless(not (slow or found.slow_pairs or found.wrong))


def _show_pairs(found: PairRates) -> None:
    hosts, median = found.hosts, found.median_bytes_per_s
    print_line(f"{len(hosts)} nodes, {len(found.bytes_per_s)} pairs", style="bold")
    rows = []
    for node, host in enumerate(hosts):
        rates = found.rates_of(node)
        verdict = "slow" if node in found.slow_nodes else "pass"
        middle, lowest = (_gbytes(value) for value in (statistics.median(rates), min(rates)))
        rows.append((host, styled(verdict, STYLES["fail" if verdict == "slow" else "pass"]), middle, lowest))
    print_table({"node": "left", "verdict": "left", "median GB/s": "right", "slowest pair": "right"}, rows)
    print_line()
    for text, pairs in (("slow", found.slow_pairs), ("wrong data", found.wrong)):
        for a, b in pairs:
            rate = f"{_gbytes(found.bytes_per_s[a, b])} GB/s, median {_gbytes(median)}"
            print_line(f"fail: {hosts[a]} and {hosts[b]}: {text}: {rate}", style=STYLES["fail"])
    for node, verdict in enumerate(found.clocks):
        if verdict.status.value in ("warn", "fail"):
            off = f"its clock is {found.clock_offsets_s[node]:+.3g} s from the others'"
            print_line(
                f"{verdict.status.value}: {hosts[node]}: {off}; {verdict.hint}", style=STYLES[verdict.status.value]
            )
    if len(found.bytes_per_s) < 3:
        print_line("Fewer than three pairs: none can be told to be slower than the others.")
    print_line(
        f"All nodes: all-reduce {_gbytes(found.all_reduce_bytes_per_s)} GB/s, "
        f"all-to-all {_gbytes(found.all_to_all_bytes_per_s)} GB/s of each process."
    )


def _gbytes(bytes_per_s: float) -> str:
    return _number(bytes_per_s / 1e9)


def _show_comparison(found: NodeComparison) -> None:
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
        held = ", ".join(f"{value} ({count})" for value, count in counts.items())
        print_line(f"No majority for {name}: {held}.")
    print_line()
    if found.exclude:
        print_line("To exclude:", style="bold red")
        for host in found.exclude:
            print_line(host)
    else:
        print_line("None to exclude.", style="bold")


def _value(value: Any) -> str:
    return _number(value) if isinstance(value, int | float) else str(value)
