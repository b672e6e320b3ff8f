"""Records are read back as they were written, and nothing else is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.records.device import (
    COLUMNS,
    SIDECAR_KEYS,
    DeviceRecorder,
    PointStatus,
    failed,
    in_windows,
    read,
    row_of,
)
from meshwright.records.measurement import Measurement
from meshwright.records.points import Point, PointFamily, gemm_points

SIDECAR = {key: None for key in SIDECAR_KEYS if key != "schema"} | {
    "device": {"name": "a device", "threads": 2},
    "driver": "1.2",
    "software": {"torch": "2.13.0"},
    "started": "2026-01-02T03:04:05+00:00",
}
POINTS = gemm_points(64, 128, 256, format="bf16")


def measurement(median: float = 2e-3) -> Measurement:
    return Measurement(
        seconds=tuple(median * f for f in (0.99, 1.0, 1.01, 1.0, 1.0, 1.0, 9.0)), calls=3, target_ratio=0.03
    )


def recorder(folder: Path, *, resume: bool = False, **changes: object) -> DeviceRecorder:
    return DeviceRecorder(folder, sidecar={**SIDECAR, **changes}, resume=resume)


@pytest.fixture
def written(tmp_path) -> Path:
    """A file with a measurement on line 2, one that failed on line 3, another measurement on line 4."""
    out = recorder(tmp_path)
    out.append(row_of(POINTS[0], measurement(), clock_hz=2.5e9, temperature_c=41.0))
    out.append(failed(POINTS[1], "out of\n memory, said the device"))
    message = Point(family=PointFamily.COLLECTIVES, kernel="all_reduce", num_processes=2, size_bytes=1024)
    out.append(row_of(message, measurement(1e-4)))
    return out.path


def test_what_is_written_is_read(written):
    first, second, third = read(written).rows
    assert first.point == POINTS[0]
    assert first.seconds_median == pytest.approx(2e-3)
    assert (first.samples, first.calls, first.outliers) == (7, 3, "7:0.018")
    assert (first.clock_hz, first.temperature_c) == (2.5e9, 41.0)
    assert first.status is PointStatus.WIDE
    assert second.status is PointStatus.FAILED
    assert second.reason == "out of memory, said the device"
    assert third.point.size_bytes == 1024
    assert [row.point for row in read(written.parent).measured] == [first.point, third.point]


def test_records_are_not_written_over(written):
    with pytest.raises(InputError, match="--resume"):
        recorder(written.parent)


def test_resuming_keeps_what_was_measured_and_tries_again_what_failed(written):
    more = recorder(written.parent, resume=True, started="later")
    assert POINTS[0] in more.done
    assert POINTS[1] not in more.done
    more.append(row_of(POINTS[1], measurement()))
    more.save(ended="2026-01-02T04:00:00+00:00")
    again = read(written)
    assert [row.point for row in again.rows][-1] == POINTS[1]
    assert len(again.rows) == 3
    assert again.sidecar["started"] == SIDECAR["started"]
    assert again.sidecar["ended"] == "2026-01-02T04:00:00+00:00"


def test_a_line_that_a_killed_process_left_is_dropped(written):
    with written.open("a") as stream:
        stream.write("gemm,forward,bf16,12")
    with pytest.raises(InputError, match=r"records.csv:5: cells of this line: got 4"):
        read(written)
    assert len(recorder(written.parent, resume=True).done) == 2
    assert len(read(written).rows) == 2


def test_another_device_is_not_mixed_in(written):
    with pytest.raises(InputError, match=r"another device: got .*threads: 2 then, 8 now") as caught:
        recorder(written.parent, resume=True, device={"name": "a device", "threads": 8})
    assert "--out" in caught.value.hint


@pytest.mark.parametrize(
    ("column", "cell", "message"),
    [
        ("family", "gem", r"records.csv:2: family: got 'gem', allowed: gemm, attention"),
        ("kernel", "sideways", r"records.csv:2: kernel: got 'sideways', allowed: forward"),
        ("m", "-4", r"records.csv:2: m is not a whole number: got '-4'"),
        ("seconds_median", "fast", r"records.csv:2: seconds_median is not a number"),
        ("seconds_median", "-0.1", r"records.csv:2: seconds_median is out of range"),
        ("seconds_low", "0", r"records.csv:2: seconds_low is out of range"),
        ("seconds_high", "nan", r"records.csv:2: seconds_high is out of range"),
        ("seconds_median", "1", r"records.csv:2: seconds_median is not between"),
        ("status", "good", r"records.csv:2: status: got 'good', allowed: ok, wide, failed"),
    ],
)
def test_an_altered_line_is_refused_with_its_number(written, column, cell, message):
    lines = written.read_text().splitlines()
    cells = lines[1].split(",")
    cells[COLUMNS.index(column)] = cell
    written.write_text("\n".join([lines[0], ",".join(cells), *lines[2:]]) + "\n")
    with pytest.raises(InputError, match=message):
        read(written)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"records.csv:1: not the header"),
        ("a,b\n1,2\n", r"records.csv:1: not the header of bench records: got 'a,b'"),
    ],
)
def test_a_foreign_file_is_refused(written, text, message):
    written.write_text(text)
    with pytest.raises(InputError, match=message):
        read(written)


def test_a_binary_file_is_refused(written):
    written.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not a text file"):
        read(written)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"records.json:1: not JSON"),
        ("[]", r"records.json: not the sidecar"),
        (json.dumps({"schema": "meshwright bench records 1"}), r"got 'meshwright bench records 1'"),
        (json.dumps({"schema": "meshwright bench records 2"}), r"device is missing"),
    ],
)
def test_a_foreign_sidecar_is_refused(written, text, message):
    written.with_suffix(".json").write_text(text)
    with pytest.raises(InputError, match=message):
        read(written)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"no such file: got .*nowhere"):
        read(tmp_path / "nowhere")


def test_a_point_of_several_windows_has_their_median_and_all_of_them_as_interval():
    point, other = (
        Point(family=PointFamily.TRAINING, kernel="isolated", format="fp32", m=m, micro_batches=1) for m in (64, 128)
    )
    windows = [row_of(point, Measurement(seconds=(s, s, s), calls=1, target_ratio=0.03)) for s in (0.2, 0.3, 0.22)]
    one = row_of(other, Measurement(seconds=(0.1,), calls=1, target_ratio=0.03))
    found = in_windows([windows[0], one, *windows[1:]])
    assert [row.point for row in found] == [point, other]
    assert (found[0].seconds_low, found[0].seconds_median, found[0].seconds_high) == (0.2, 0.22, 0.3)
    assert found[0].samples == 9
    assert found[1] == one
