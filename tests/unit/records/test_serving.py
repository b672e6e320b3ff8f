"""Records of serving are read back as they were written, and damage is named."""

from __future__ import annotations

import csv
from dataclasses import fields, replace

import pytest

from meshwright.errors import InputError
from meshwright.records.files import Cells
from meshwright.records.serving import (
    TABLE,
    Arrivals,
    Latency,
    Load,
    RequestRecord,
    RequestStatus,
    ServingPoint,
    ServingRecorder,
    TokenSource,
    read_requests,
    read_serving,
)

COLUMNS = TABLE.header
LATENCY = Latency(**{f.name: 3 if f.name == "n" else 0.25 for f in fields(Latency)})
POINT = ServingPoint(
    load=Load(arrivals=Arrivals.GAMMA, offered_per_s=2.5, shape=0.5), repeat=2, started="2026-01-01T00:00:00+00:00",
    wall_s=2.0, num_requests=5, num_ok=3, errors={"dropped": 2}, requests_per_s=1.5, ttft_s=LATENCY,
    token_source=TokenSource.MIXED, refusal="too fast, by far", interrupted=True, good_ratio=0.5,
    http_statuses={"429": 2, "500": 1}, num_retries=3, cached_tokens=0,
    server_running=1.5, server_waiting=0.0, server_cache_usage=0.25, server_hit_ratio=0.5, server_preemptions=2,
)  # fmt: skip


def cells_of(point: ServingPoint) -> dict[str, str]:
    return next(csv.DictReader([TABLE.line(point)], COLUMNS))


SIDECAR = {"endpoint": {}, "command": [], "started": "now"}


def test_columns_are_unique_and_a_point_survives():
    assert len(set(COLUMNS)) == len(COLUMNS)
    assert TABLE.row(Cells(cells_of(POINT), "x")) == POINT
    plain = replace(POINT, load=Load(concurrency=4), errors={}, ttft_s=None, good_ratio=None)
    assert TABLE.row(Cells(cells_of(plain), "x")) == plain


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("repeat", "x"),
        ("wall_s", "nan"),
        ("arrivals", "often"),
        ("interrupted", "maybe"),
        ("ttft_s_p99", "inf"),
        ("http_statuses", "429=x"),
    ],
)
def test_damaged_cells_are_named(column, value):
    cells = cells_of(POINT) | {column: value}
    with pytest.raises(InputError, match=f"serving.csv:3: {column}"):
        TABLE.row(Cells(cells, "serving.csv:3"))


def test_files(tmp_path, unsynced):
    recorder = ServingRecorder(tmp_path / "out", sidecar=SIDECAR)
    request = RequestRecord(
        index=0, sent_s=0.1, due_s=0.1, end_s=0.5, status=RequestStatus.OK, chunk_s=(0.2, 0.3), output_tokens=2
    )
    recorder.append_requests(POINT.load, 1, [request])
    recorder.append(POINT)
    assert unsynced(tmp_path / "out") == []  # a resumption counts what the table has, and needs its requests
    with (tmp_path / "out" / "serving.csv").open("a") as stream:
        stream.write(TABLE.line(POINT)[:40])  # killed while it wrote
    assert read_serving(tmp_path / "out").points == (POINT,)
    assert list(read_requests(tmp_path / "out")) == [(POINT.load.name, 1, request)]
    recorder.rewrite([POINT, POINT])
    recorder.save(ended="now")
    assert read_serving(tmp_path / "out").points == (POINT, POINT)
    with pytest.raises(InputError, match="records already"):
        ServingRecorder(tmp_path / "out", sidecar=SIDECAR)


@pytest.mark.parametrize("last", ["server_wait_ratio", "cached_tokens"])
def test_a_file_of_an_earlier_release_is_read(tmp_path, last):
    """It lacks the last columns, and its values are those of a release that did not count them."""
    ServingRecorder(tmp_path, sidecar=SIDECAR).append(POINT)
    with (tmp_path / "serving.csv").open(newline="") as stream:
        lines = [line[: COLUMNS.index(last) + 1] for line in csv.reader(stream)]
    assert len(lines[0]) >= len(COLUMNS) - TABLE.num_added
    with (tmp_path / "serving.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows(lines)
    (found,) = read_serving(tmp_path).points
    lacking = COLUMNS[COLUMNS.index(last) + 1 :]
    none = {f.name: f.default for f in fields(POINT) if f.name in lacking and f.name != "http_statuses"}
    assert found == replace(POINT, **none | ({"http_statuses": {}} if "http_statuses" in lacking else {}))


def test_a_damaged_request_is_named(tmp_path):
    (tmp_path / "requests.jsonl").write_text('{"load": "x", "repeat": 1}\n')
    with pytest.raises(InputError, match=r"requests\.jsonl:1"):
        list(read_requests(tmp_path))
