"""Damaged logs end in findings or input errors, never in a traceback."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.mlperf.conftest import SyntheticLog

from meshwright.errors import InputError
from meshwright.mlperf.benchmarks import load_benchmark
from meshwright.mlperf.check import check_path, log_findings
from meshwright.mlperf.log import TOKEN, parse_log
from meshwright.mlperf.results import score_document
from meshwright.mlperf.score import score_folder, score_logs

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
ROWS = {name: SyntheticLog(benchmark=name, batch=16).rows for name in ("llama2_70b_lora", "llama31_8b")}
FIELDS = ["value", "time_ms", "metadata", "key", "samples", "status"]
KEYS = sorted({row["key"] for rows in ROWS.values() for row in rows})


def examined(lines: Sequence[str], name: str, round_: str) -> None:
    """Check and score lines."""
    rules = load_benchmark(name, round_)
    log = parse_log(lines, path=Path("result_0.txt"))
    for finding in log_findings(log, rules):
        assert finding.why
        assert len(finding.message) < 1000
    score = score_logs([log] * rules.runs, rules, folder=Path("set"))
    json.dumps(score_document(score), default=str)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    name=st.sampled_from(sorted(ROWS)),
    changes=st.lists(
        st.tuples(st.integers(0, 60), st.sampled_from(FIELDS), JSON_VALUES),
        max_size=6,
    ),
    extra=st.lists(st.tuples(st.sampled_from(KEYS), JSON_VALUES), max_size=4),
    order=st.randoms(use_true_random=False),
    shuffled=st.booleans(),
)  # fmt: skip
def test_values_of_any_type(name: str, changes: Any, extra: Any, order: random.Random, shuffled: bool) -> None:
    rows = json.loads(json.dumps(ROWS[name]))
    for place, field, value in changes:
        row = rows[place % len(rows)]
        if field == "samples" and isinstance(row["metadata"], dict):
            row["metadata"]["samples_count"] = value
        elif field == "status" and isinstance(row["metadata"], dict):
            row["metadata"]["status"] = value
        else:
            row[field] = value
    rows += [{**ROWS[name][0], "key": key, "value": value} for key, value in extra]
    if shuffled:
        order.shuffle(rows)
    examined([TOKEN + json.dumps(row) for row in rows], name, "6.1")


@pytest.mark.parametrize("num_damages", [60, pytest.param(3000, marks=pytest.mark.slow)])
def test_bytes_of_published_logs(published: Path, tmp_path: Path, num_damages: int) -> None:
    """Bytes changed, cut, doubled and joined."""
    rng = random.Random(14)
    files = sorted(published.rglob("result_*.txt"))
    folder = tmp_path / "llama2_70b_lora"
    folder.mkdir()
    for _ in range(num_damages):
        path = rng.choice(files)
        data = bytearray(path.read_bytes())
        for _ in range(rng.randint(1, 8)):
            at = rng.randrange(len(data))
            kind = rng.randrange(5)
            if kind == 0:
                data[at] = rng.randrange(256)
            elif kind == 1:
                del data[at : at + rng.randint(1, 400)]
            elif kind == 2:
                data[at:at] = data[at : at + rng.randint(1, 400)]
            elif kind == 3:
                data[at:at] = rng.choice(
                    [b"\n", b"\r", b"\x00", b":::MLLOG ", b"1e999", b"-", b"[[", b'"', b"\xe2\x80\xa8"]
                )
            else:
                data = data[:at] or data
        (folder / "result_0.txt").write_bytes(data)
        for action in (check_path, score_folder):
            with suppress(InputError):
                action(folder)
