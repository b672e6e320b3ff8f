"""Parser of result files."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.mlperf.log import parse_log, read_log

GOOD = (
    ':::MLLOG {"namespace": "", "time_ms": 5, "event_type": "POINT_IN_TIME", "key": "seed", "value": 7, '
    '"metadata": {"file": "a.py", "lineno": 3}}'
)


def test_text_before_the_token_and_around(tmp_path: Path) -> None:
    path = tmp_path / "result_0.txt"
    path.write_bytes(b"\xff\xfe start\n" + b" 0: " + GOOD.encode() + b"\r\nepoch 1\n")
    log = read_log(path)
    assert (log.value("seed"), log.records[0].line, log.faults) == (7, 2, ())
    assert not log.finished


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (GOOD[:40], "not JSON"),
        (GOOD.replace(":::MLLOG ", ":::MLLOG"), "no space"),
        (GOOD + GOOD, "several records"),
        (":::MLLOG [1]", "no object"),
        (GOOD.replace('"value": 7, ', ""), "lacks value"),
        (GOOD.replace('"time_ms": 5', '"time_ms": NaN'), "time_ms"),
        (GOOD.replace('"time_ms": 5', f'"time_ms": {"9" * 400}'), "time_ms"),
        (GOOD.replace('"key": "seed"', '"key": 4'), "string"),
        (":::MLLOG " + "[" * 100_000, "not JSON"),
        (":::MLLOG " + "9" * 5000, "not JSON"),
    ],
    ids=["cut", "no-space", "two", "list", "no-value", "nan", "huge", "key", "deep", "digits"],
)
def test_faults_have_lines(line: str, problem: str) -> None:
    log = parse_log(["text", line])
    assert [(f.line, problem in f.problem) for f in log.faults] == [(2, True)]
    assert len(log.faults[0].text) <= 200


def test_samples_or_epochs() -> None:
    lines = [
        GOOD.replace('"lineno": 3', pair) for pair in ('"samples_count": 8', '"epoch_num": 16', '"samples_count": "8"')
    ]
    assert [r.samples for r in parse_log(lines).records] == [8, 16, None]


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_log(tmp_path)
    with pytest.raises(InputError, match="cannot be read"):
        read_log(tmp_path / "absent")
