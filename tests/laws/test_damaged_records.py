"""Damaged records of every kind: read, or refused with the file and the field. Never anything else."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.record_folders import write_every_kind

from meshwright.answers.comparison.study import compare_items
from meshwright.answers.overview.collect import collect
from meshwright.answers.record_files import read_results
from meshwright.errors import InputError
from meshwright.report.overview.page import report_sections

VALUES: list[Any] = [
    None, True, -1, 0, 0.0, -0.5, 10**40, 10**400, 1e308, float("nan"), float("inf"), "", "many",
    "\u202e\x00\U0001f600", [], {}, [[]], {"": None}, ["x"] * 3,
]  # fmt: skip
CELLS = ["", "-1", "nan", "inf", "1e999", "9" * 400, "x", "\u0663", "1_0", "true", " ", '"', "\x00", "2026-13-45"]
KINDS = ("training", "sweep", "device", "kernels", "serving", "offline", "ingest")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    where = tmp_path_factory.mktemp("whole")
    write_every_kind(where)
    return where


def test_the_undamaged_records_are_read(whole):
    assert sorted(p.name for p in whole.iterdir()) == sorted(KINDS)
    found = collect([str(whole)])
    assert found.unreadable == ()
    assert len(found.entries) == len(KINDS)


def damage_json(text: str, draw: Any) -> str:
    """Another value at one place, or none."""
    document = json.loads(text)
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    walk(document)
    for _ in range(draw(st.integers(1, 3))):
        node, key = draw(st.sampled_from(places))
        if draw(st.booleans()) and isinstance(node, dict):
            node.pop(key, None)
        elif isinstance(node, list) or key in node:
            node[key] = draw(st.sampled_from(VALUES))
    return json.dumps(document)


def damage_csv(text: str, draw: Any) -> str:
    rows = list(csv.reader(io.StringIO(text)))
    for _ in range(draw(st.integers(1, 3))):
        row = draw(st.sampled_from(rows))
        if draw(st.integers(0, 9)) == 0:
            row.append("more")
        elif row:
            row[draw(st.integers(0, len(row) - 1))] = draw(st.sampled_from(CELLS))
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def damage_bytes(content: bytes, draw: Any) -> bytes:
    cut = draw(st.integers(0, len(content)))
    return content[:cut] + draw(st.sampled_from([b"", b"\xff\xfe", b"\x00", b"{", b"\n\n", "\u2028".encode()]))


def damage(folder: Path, draw: Any) -> None:
    """One file of a record is changed, cut, emptied, or is another thing than a file."""
    path = draw(st.sampled_from(sorted(p for p in folder.rglob("*") if p.is_file())))
    way = draw(st.sampled_from(["text", "text", "text", "bytes", "gone", "folder", "link"]))
    content = path.read_bytes()
    if way == "text" and path.suffix == ".csv":
        path.write_text(damage_csv(content.decode(), draw), encoding="utf-8")
    elif way == "text" and path.suffix == ".json":
        path.write_text(damage_json(content.decode(), draw), encoding="utf-8")
    elif way == "text" and path.suffix == ".jsonl" and content:
        lines = content.decode().splitlines()
        lines[0] = damage_json(lines[0], draw)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    else:
        path.unlink()
        if way == "folder":
            path.mkdir()
        elif way == "link":
            path.symlink_to(folder / "nowhere")
        elif way != "gone":
            path.write_bytes(damage_bytes(content, draw))


def check(whole: Path, where: Path, kind: str, draw: Any) -> None:
    shutil.rmtree(where, ignore_errors=True)
    shutil.copytree(whole / kind, where / kind)
    damage(where / kind, draw)
    refused = []
    try:
        found = collect([str(where / kind)])
        assert all(section.title for section in report_sections(found))
        json.dumps(found.to_dict(), allow_nan=False)
    except InputError as error:
        refused.append(error.message)
    assert all(str(where) in message for message in refused)  # the file, or the folder
    with contextlib.suppress(InputError):
        compare_items([str(whole / kind), str(where / kind)]).to_dict()
    for record in read_results(where / kind):
        assert record.summary()
        record.to_dict()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_damaged_record_is_read_or_refused(whole, tmp_path_factory, kind, data):
    check(whole, tmp_path_factory.getbasetemp() / f"damaged-{kind}", kind, data.draw)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_many_damaged_records_are_read_or_refused(whole, tmp_path_factory, kind, data):
    check(whole, tmp_path_factory.getbasetemp() / f"many-{kind}", kind, data.draw)


def test_all_faults_of_a_file_are_named_at_once(whole, tmp_path):
    shutil.copytree(whole / "training", tmp_path / "training")
    path = tmp_path / "training" / "record.json"
    record = json.loads(path.read_text())
    record["statistics"] |= {"steps": "many", "peak_memory_bytes": -1}
    del record["device"]["name"]
    path.write_text(json.dumps(record))
    with pytest.raises(InputError) as refused:
        collect([str(tmp_path / "training")])
    assert str(path) in refused.value.message
    for field in ("device.name is missing", "statistics.steps must be", "statistics.peak_memory_bytes must be"):
        assert field in refused.value.message
