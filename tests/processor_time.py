"""Processor seconds of each test, in its own process and in every process below it.

Registered by the conftest.py of the repository. Wall time on a shared machine says little about what a test costs.

    --processor-seconds FILE    write a CSV of the tests: processor seconds of setup, call and teardown, then the id
    --processor-durations N     print the N most expensive tests and the N most expensive files
"""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
PROPERTY = "processor_s"
"""The name under which a report carries the seconds from a worker of pytest-xdist to the process that prints."""
SPENT = pytest.StashKey[Counter[str]]()
STARTED = pytest.StashKey[float]()


def tree_processor_s() -> float:
    """Processor seconds so far of this process, its descendants, and those descendants that have ended.

    Linux counts the time of an ended child to its parent when the parent waits for it. A living child has its own
    count in `/proc`. Elsewhere only ended children are counted.
    """
    own = os.times()
    total_s = own.user + own.system + own.children_user + own.children_system
    return total_s + sum(_living_s(pid) for pid in _descendants(os.getpid()))


def _descendants(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    children = [int(child) for child in text.split()]
    return children + [below for child in children for below in _descendants(child)]


def _living_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended meanwhile
        return 0.0
    return sum(int(ticks) for ticks in fields[11:15]) / TICKS_PER_S  # utime, stime, cutime, cstime


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("processor time")
    group.addoption("--processor-seconds", metavar="FILE", help="write processor seconds by test to a CSV file")
    group.addoption("--processor-durations", type=int, metavar="N", help="print the N most expensive tests and files")


def _is_wanted(config: pytest.Config) -> bool:
    return bool(config.getoption("--processor-seconds") or config.getoption("--processor-durations"))


def pytest_configure(config: pytest.Config) -> None:
    """Begin to count."""
    config.stash[SPENT] = Counter()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool | None, bool | None]:
    """Remember the seconds before a test; its teardown reports the difference."""
    if _is_wanted(item.config):
        item.stash[STARTED] = tree_processor_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the seconds to the report of a test's last phase."""
    report = yield
    if call.when == "teardown" and STARTED in item.stash:
        report.user_properties.append((PROPERTY, max(0.0, tree_processor_s() - item.stash[STARTED])))
    return report


def pytest_sessionstart(session: pytest.Session) -> None:
    """Collect the seconds in the process that prints."""
    if _is_wanted(session.config) and not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(_Collector(session.config.stash[SPENT]))


class _Collector:
    def __init__(self, spent_s: Counter[str]) -> None:
        self.spent_s = spent_s

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.spent_s[report.nodeid] += dict(report.user_properties).get(PROPERTY, 0.0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write and print what was asked for."""
    spent_s = terminalreporter.config.stash[SPENT]
    if path := terminalreporter.config.getoption("--processor-seconds"):
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(("processor_s", "test"))
            writer.writerows((f"{seconds:.2f}", test) for test, seconds in spent_s.most_common())
    if count := terminalreporter.config.getoption("--processor-durations"):
        of_files = Counter[str]()
        for test, seconds in spent_s.items():
            of_files[test.partition("::")[0]] += seconds
        terminalreporter.section(f"processor seconds: {sum(spent_s.values()):.0f} in all")
        for table in (spent_s, of_files):
            for name, seconds in table.most_common(count):
                terminalreporter.line(f"{seconds:8.2f} {name}")
