"""Faults and healthy states that public bug reports show, in the words of the kernel, of drivers and of their tools."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from tests.every_member import check_every

from meshwright.doctor.checks import kernel_log
from meshwright.doctor.verdict import CheckStatus

RECORDED = Path(__file__).parent / "recorded"


def test_lines_of_the_kernel_log_that_were_reported():
    """Each row: its class and status ("-" for a line of a healthy node), the report, and the line."""

    def check(row):
        found = [n for n, kind in kernel_log.classes().items() if kind.pattern.search(row["line"])]
        assert found[:1] == ([] if row["class"] == "-" else [row["class"]])
        assert not found or kernel_log.classes()[found[0]].status == row["status"]

    with (RECORDED / "reported-lines.tsv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    assert len(rows) > 60
    check_every(rows, check, name=lambda row: row["line"])


@pytest.mark.parametrize(("count", "status"), [(99, CheckStatus.PASS), (100, CheckStatus.WARN)])
def test_corrected_errors_of_a_pci_link_count_when_they_are_many(look, healthy, count, status):
    line = "pcieport 0000:00:1c.5: AER: Corrected error received: 0000:05:00.0"
    healthy.commands["dmesg"] = "".join(f"[{90_000 + i}.000001] {line}\n" for i in range(count))
    (verdict,) = look(healthy, chosen=("log",))["log.kernel"]
    assert (verdict.status, verdict.measured) == (status, 0 if status is CheckStatus.PASS else count)
