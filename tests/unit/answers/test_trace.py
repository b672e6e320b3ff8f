"""The trace file: what Perfetto needs, one span per operation, equal bytes for equal input."""

from __future__ import annotations

import itertools
import json

import pytest

from meshwright.answers.trace import Track, TrackSpan, write_trace
from meshwright.cost.pipeline.schedules import PipelineShape
from meshwright.cost.pipeline.simulate import StageTimes, Timeline, simulate
from meshwright.errors import InputError
from meshwright.specs.plan import Schedule


def timeline(schedule: str = "interleaved", p: int = 2, v: int = 2, m: int = 4) -> Timeline:
    shape = PipelineShape(schedule=Schedule(schedule), num_ranks=p, num_chunks=v, num_micro_batches=m)
    return simulate(shape, StageTimes(forward_s=1e-3, backward_input_s=1 / 700, backward_weight_s=1e-3))


def written(tmp_path, some: Timeline, **arguments) -> dict:
    write_trace(some, path=tmp_path / "trace.json", **arguments)
    return json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))


def spans(trace: dict, process: int = 1) -> list[dict]:
    return [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == process]


def test_every_operation_is_a_span_on_the_track_of_its_rank(tmp_path):
    some = timeline()
    events = spans(written(tmp_path, some))
    assert len(events) == some.graph.num_ops == 2 * 2 * 4 * 2
    last = next(e for e in events if e["name"] == "BW mb3 chunk0" and e["tid"] == 0)
    assert last["ts"] + last["dur"] == pytest.approx(some.step_s * 1e6, abs=1e-3)
    assert last["args"] == {"micro_batch": 3, "stage": 0, "chunk": 0}


@pytest.mark.parametrize(
    "some", [timeline(), timeline("zbv", 3, 2, 6), timeline("dualpipe", 4, 1, 8)], ids=["vpp", "zbv", "dual"]
)
def test_spans_of_a_track_do_not_overlap(tmp_path, some):
    by_track: dict[int, list[dict]] = {}
    for event in spans(written(tmp_path, some)):
        by_track.setdefault(event["tid"], []).append(event)
    assert len(by_track) == some.graph.shape.num_ranks
    for events in by_track.values():
        for before, after in itertools.pairwise(events):
            assert round(before["ts"] + before["dur"], 3) <= after["ts"]


def test_an_overlapped_pair_is_one_span(tmp_path):
    some = timeline("dualpipe", 4, 1, 8)
    events = spans(written(tmp_path, some))
    num_pairs = len(some.graph.pair_forward)
    assert len(events) == some.graph.num_ops - num_pairs
    assert sum(" & " in e["name"] for e in events) == num_pairs > 0


def test_tracks_are_named_and_ordered(tmp_path):
    trace = written(tmp_path, timeline("1f1b", 3, 1, 2))
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    assert spans(trace)[0]["name"] == "F mb0"  # one chunk has no name


def test_extra_tracks_lie_in_a_process_of_their_own(tmp_path):
    track = Track(name="optimizer", spans=(TrackSpan(name="Adam", start_s=0.5, end_s=0.75),))
    (event,) = spans(written(tmp_path, timeline(), tracks=[track]), process=2)
    assert (event["name"], event["ts"], event["dur"]) == ("Adam", 5e5, 2.5e5)


def test_details_are_kept_and_equal_input_gives_equal_bytes(tmp_path):
    trace = written(tmp_path, timeline(), details={"plan": "PP2 VPP2"})
    first = (tmp_path / "trace.json").read_bytes()
    assert trace["otherData"]["plan"] == "PP2 VPP2"
    assert trace["otherData"]["schedule"] == "interleaved"
    written(tmp_path, timeline(), details={"plan": "PP2 VPP2"})
    assert (tmp_path / "trace.json").read_bytes() == first
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]


def test_a_missing_folder_is_the_users_error(tmp_path):
    with pytest.raises(InputError, match="cannot be written"):
        write_trace(timeline(), path=tmp_path / "nowhere" / "trace.json")


def test_a_folder_is_not_overwritten(tmp_path):
    (tmp_path / "trace.json").mkdir()
    with pytest.raises(InputError, match="cannot be written"):
        write_trace(timeline(), path=tmp_path / "trace.json")
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]
