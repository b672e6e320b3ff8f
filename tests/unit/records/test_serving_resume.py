"""Serving measurements that were interrupted and go on, and records of serving read back as results."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

pytest.importorskip("aiohttp")

import meshwright as mw
from meshwright.errors import InputError
from meshwright.records.serving import (
    Load,
    RequestRecord,
    RequestStatus,
    ServingPoint,
    ServingRecorder,
    read_requests,
    read_serving,
)

SIDECAR = {
    "command": ["meshwright"], "started": "2026-11-23", "endpoint": {"url": "http://a", "model": "m"},
    "server": None, "input_tokens": "64", "output_tokens": "32", "seed": 0, "num_requests": 4,
}  # fmt: skip
POINT = ServingPoint(
    load=Load(concurrency=1), repeat=1, started="now", wall_s=1.0, num_requests=1, num_ok=1, output_tokens=8,
    total_tokens_per_s=8.0, output_tokens_per_s=8.0,
)  # fmt: skip


def test_a_folder_that_a_killed_command_left_before_its_table_is_begun_anew(tmp_path, monkeypatch):
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("meshwright.records.files.RowTable.write", killed)
        with pytest.raises(KeyboardInterrupt):
            ServingRecorder(tmp_path, sidecar=SIDECAR)
    assert (tmp_path / "serving.json").exists()
    ServingRecorder(tmp_path, sidecar=SIDECAR).append(POINT)
    assert len(read_serving(tmp_path).points) == 1
    with pytest.raises(InputError, match="records already") as refused:
        ServingRecorder(tmp_path, sidecar=SIDECAR)
    assert "--resume" in str(refused.value.hint)


def request(index: int) -> RequestRecord:
    return RequestRecord(
        index=index, sent_s=0.0, due_s=0.0, end_s=1.0, status=RequestStatus.OK, chunk_s=(0.5, 0.75, 1.0),
        answer_s=0.75, output_tokens=6,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """One load measured to its end, and one that was interrupted."""
    recorder = ServingRecorder(tmp_path / "out", sidecar=SIDECAR)
    for point in (POINT, replace(POINT, load=Load(concurrency=4), interrupted=True)):
        recorder.append_requests(point.load, 1, [request(0)])
        recorder.append(point)
    return tmp_path / "out"


def test_a_resume_keeps_what_was_measured_to_its_end(folder):
    recorder = ServingRecorder(folder, sidecar=SIDECAR | {"started": "later"}, resume=True)
    assert recorder.measured(Load(concurrency=1), 1) == POINT
    assert recorder.measured(Load(concurrency=4), 1) is None
    assert [load for load, _, _ in read_requests(folder)] == ["1 in flight"]
    recorder.append(replace(POINT, load=Load(concurrency=4)))
    recorder.save(ended="now")
    found = read_serving(folder)
    assert [p.load.concurrency for p in found.points] == [1, 4]
    assert found.sidecar["resumed"] == ["later"]
    assert found.sidecar["started"] == "2026-11-23"


@pytest.mark.parametrize(
    "changed", [{"output_tokens": "64"}, {"seed": 1}, {"endpoint": {"url": "http://a", "model": "n"}}], ids=str
)
def test_another_measurement_is_not_resumed(folder, changed):
    with pytest.raises(InputError, match="another measurement"):
        ServingRecorder(folder, sidecar=SIDECAR | changed, resume=True)


def test_the_port_of_a_started_server_may_differ(folder):
    server = {"name": "mock", "options": {}, "model": None}
    document = json.loads((folder / "serving.json").read_text()) | {"server": server}
    (folder / "serving.json").write_text(json.dumps(document))
    moved = SIDECAR | {"server": server, "endpoint": {"url": "http://b", "model": "m"}}
    assert len(ServingRecorder(folder, sidecar=moved, resume=True).points) == 1


def test_reasoning_before_an_answer():
    one = request(0)
    assert one.num_reasoning == 2  # of six tokens in three chunks, one chunk before the answer
    assert one.first_answer_s == pytest.approx(0.75)
    assert replace(one, reasoning_tokens=5).num_reasoning == 5
    assert replace(one, answer_s=0.5).num_reasoning == 0
    assert replace(one, answer_s=0.5).first_answer_s is None
    assert replace(one, answer_s=None).num_reasoning == 6


def test_serving_and_offline_folders_are_records(folder, tmp_path):
    offline = {
        "schema": "meshwright bench offline 1", "model": "m", "num_replicas": 2, "started": "now",
        "pairs": [{"name": "8/4", "num_replicas": 2, "point": {
            "wall_s": 1.0, "num_ok": 4, "input_tokens": 32, "output_tokens": 16, "output_tokens_per_s": 16.0,
            "total_tokens_per_s": 48.0, "refusal": "",
        }}],
    }  # fmt: skip
    (tmp_path / "batch").mkdir()
    (tmp_path / "batch" / "offline.json").write_text(json.dumps(offline))
    found = mw.read_records(tmp_path)
    assert [type(r).__name__ for r in found] == ["OfflineMeasurements", "ServingMeasurements"]
    assert found.offline[0].to_rows()[0]["output_tokens_per_s"] == 16.0
    assert found.serving[0].to_rows()[0]["load"] == "1 in flight"
    assert len(found.to_dict()["serving"]) == len(found.to_dict()["offline"]) == 1
    assert all(r.summary() and r._repr_html_() for r in found)
    assert [row["model"] for row in found.to_rows()] == ["m", "m"]
    (tmp_path / "batch" / "offline.json").write_text("{}")
    assert "offline.json" in mw.read_records(tmp_path).unreadable[0][1]
