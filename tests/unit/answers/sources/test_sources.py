"""The report on the source documents: every claim answered, slips computed, the committed example is of this shape."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from meshwright.answers.sources.facts import memory_rows, slip_facts
from meshwright.answers.sources.minutes import predicted_minutes
from meshwright.answers.sources.study import AnswerClass, _own_measurements, _row, _slips, source_report
from meshwright.catalog.entries import DATA
from meshwright.catalog.lookup import all_claims, claim

EXAMPLE = Path(__file__).parents[4] / "docs" / "reference" / "source-documents.md"


def test_the_committed_example_has_a_row_with_a_class_for_every_claim():
    """`meshwright report sources --markdown docs/reference/source-documents.md` makes it again."""
    text = EXAMPLE.read_text()
    classes = {c.value for c in AnswerClass}
    for row in csv.DictReader((DATA / "claims.csv").read_text(encoding="utf-8").splitlines()):
        cells = next(line for line in text.splitlines() if line.startswith(f"| {row['claim_id']} |")).split(" | ")
        assert classes & set(cells), row["claim_id"]
        has_answer = bool(cells[3].strip() or cells[5].strip() or cells[7].strip())
        assert has_answer or cells[10].strip(), row["claim_id"]


def test_every_slip_touches_claims_that_exist_and_holds_no_open_field():
    slips = _slips(slip_facts)
    known = {c.claim_id for c in all_claims()}
    assert len(slips) >= 15
    for slip in slips:
        assert set(slip.claims) <= known
        assert not re.search(r"[{}]", slip.found + slip.why)
    text = {s.key: s.found for s in slips}
    assert text["b200-bandwidth"].startswith("8 TB/s")
    assert "356 GB of MXFP4 weights against 309 GB" in text["deepseek-tp1"]
    assert text["ten-percent"].startswith("12.5% faster")
    assert text["replicas-not-whole"].startswith("170.67 replicas")
    assert text["uplift-cut-off"] == "2.94x"


def test_prices_and_counts_are_arithmetic_and_rates_are_modelled():
    classes = {
        n: _row(claim(n), slips=[], own=[], runs=[]).answer_class for n in ("s65_11", "s65_15", "s65_20", "s65_24")
    }
    assert classes == {
        "s65_11": AnswerClass.MODELLED, "s65_15": AnswerClass.ARITHMETIC, "s65_20": AnswerClass.ARITHMETIC,
        "s65_24": AnswerClass.ARITHMETIC,
    }  # fmt: skip


def test_what_was_measured_names_its_device_and_command():
    known = {c.claim_id for c in all_claims()}
    for found in _own_measurements():
        assert set(found.claims) <= known
        assert found.command.startswith("meshwright ")
        assert all((found.device, found.date, found.value, found.text))


def test_predicted_minutes_are_samples_over_the_rate():
    """MI355X: 3,220 samples of 8,192 tokens (olympic mean with scaling) in about ten minutes on 8 devices."""
    found = predicted_minutes(claim("mlperf51_01"))
    assert found is not None
    assert found.value.low < 10.18 < found.value.high
    assert found.value.unit == "min"
    ratio = predicted_minutes(claim("mlperf51_07"))
    assert ratio is not None
    assert ratio.value.low < 2.8 < ratio.value.high
    assert predicted_minutes(claim("s65_01")) is None


def test_memory_cases_by_hand():
    cases = {c.name: c.parts_gib for c in memory_rows()}
    # 401.65 G linear parameters at 17/32 bytes and 4.2 G of embeddings in 16 bits: 221.8 GB.
    assert cases["405B, FP4, one session of 8 K"]["weights"] == pytest.approx(221.8e9 / 2**30, rel=0.005)
    # 327,680 bytes a token in 16 bits.
    assert cases["70B, 16 bits, two of 128 K"]["cache"] == pytest.approx(2 * 131_072 * 327_680 / 2**30, rel=0.02)
    assert cases["570 B parameters, FP4"]["weights"] == pytest.approx(570e9 * 17 / 32 / 2**30)
    assert sum(cases["70B, FP8, training adapters"].values()) < 288


@pytest.mark.slow
def test_the_whole_report(tmp_path):
    from meshwright.report.sources.figures import source_figures
    from meshwright.report.sources.page import markdown, source_page

    found = source_report()
    assert len(found.rows) == len(all_claims())
    for row in found.rows:
        answered = row.predicted is not None or row.logs is not None or row.measured is not None
        assert answered or row.reason, row.claim.claim_id
    by_name = {r.claim.claim_id: r for r in found.rows}
    assert by_name["mlperf51_02"].answer_class is AnswerClass.LOGS
    assert by_name["dive_04"].logs == 1024
    assert by_name["s65_17"].answer_class is AnswerClass.MODELLED
    assert by_name["hw_03"].answer_class is AnswerClass.ARITHMETIC
    page = source_page(found)
    assert page.count('class="for-wide"') == len(source_figures(found)) == 11
    assert all(c.claim_id in page for c in all_claims())
    # The committed page has the same claims and slips; predictions may be those of an older calibration.
    headings = [line for line in markdown(found).splitlines() if line.startswith("## ")]
    assert headings == [line for line in EXAMPLE.read_text().splitlines() if line.startswith("## ")]
