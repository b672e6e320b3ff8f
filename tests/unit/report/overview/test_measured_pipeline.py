"""Measured passes of a pipeline in a report, and damaged files of them."""

from __future__ import annotations

import json

import pytest
from tests.record_folders import write_training

from meshwright.answers.overview.collect import collect
from meshwright.answers.overview.measured_passes import measured_passes
from meshwright.errors import InputError
from meshwright.report.overview.kernels import idle_ratios, stages_table
from meshwright.report.overview.page import markdown, record_page
from meshwright.training.profiling.categories import WAIT
from meshwright.training.profiling.shares import STEP, passes


def event(name, start_s, length_s, cat="user_annotation"):
    return {"ph": "X", "name": name, "ts": 1e9 + 1e6 * start_s, "dur": 1e6 * length_s, "cat": cat}


TRACE = {
    "traceEvents": [
        event(f"{STEP}6", 0, 10), event("PP:0F0", 1, 1), event(f"{STEP}7", 20, 10), event("PP:0F0", 21, 1),
        event("PP:0RECV_B0", 22, 1), event("PP:0B0", 24, 2), event(WAIT, 24, 0.5), event("aten::mm", 24.5, 1, "cpu_op"),
    ]
}  # fmt: skip


def write_passes(folder, rank, found):
    (folder / "profile").mkdir(exist_ok=True)
    path = folder / "profile" / f"passes-{rank}.json"
    path.write_text(json.dumps({"pipeline_rank": rank, "passes": found}), encoding="utf-8")
    return path


def test_passes_are_those_of_the_last_profiled_step():
    assert passes(TRACE) == [
        {"stage": 0, "kind": "F", "micro_batch": 0, "start_s": 1.0, "end_s": 2.0, "wait_s": 0},
        {"stage": 0, "kind": "B", "micro_batch": 0, "start_s": 4.0, "end_s": 6.0, "wait_s": 0.5},
    ]
    assert passes({"traceEvents": []}) == []


def test_on_a_gpu_a_pass_lasts_on_the_device():
    trace = {"traceEvents": [*TRACE["traceEvents"], event("PP:0F0", 21.5, 3, "gpu_user_annotation")]}
    assert [(p["start_s"], p["end_s"], p["wait_s"]) for p in passes(trace)] == [(1.5, 4.5, 0)]


def test_a_report_draws_them(tmp_path):
    folder = write_training(tmp_path / "piped")
    write_passes(folder, 0, passes(TRACE))
    write_passes(folder, 1, [{"stage": 1, "kind": "F", "micro_batch": 0, "start_s": 2.0, "end_s": 6.0}])
    found = collect([str(folder)])
    assert idle_ratios(found.entries[0].passes) == pytest.approx({0: 0.5, 1: 0.2})
    rows = stages_table(found.entries[0].passes, name="piped").rows
    assert [(*row[:5], row[6]) for row in rows] == [
        (0, 0, "backward", 1, "1.500 s", "500.0 ms"), (0, 0, "forward", 1, "1.000 s", "0"),
        (1, 1, "forward", 1, "4.000 s", "not separated"),
    ]  # fmt: skip
    page = record_page(found)
    assert "piped, measured: 2 ranks, 35.0% not computing" in page
    assert "waiting for another rank" in page
    assert page.count('<svg class="timeline for-wide"') == page.count('<svg class="timeline for-narrow"') == 1
    assert "Measured pipeline of piped: data" in markdown(found)


def test_a_training_without_them_draws_none(tmp_path):
    assert measured_passes(write_training(tmp_path / "flat")) == ()


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "X"},
        {"start_s": -1},
        {"end_s": float("nan")},
        {"end_s": "late"},
        {"stage": "<b>"},
        {"micro_batch": True},
        {"wait_s": -1},
        {"wait_s": 4.5},
        {"wait_s": float("nan")},
    ],
    ids=["kind", "negative", "nan", "text", "markup", "bool", "negative-wait", "long-wait", "nan-wait"],
)
def test_damaged_passes_are_named(tmp_path, change):
    folder = write_training(tmp_path / "piped")
    good = {"stage": 0, "kind": "F", "micro_batch": 0, "start_s": 2.0, "end_s": 6.0}
    path = write_passes(folder, 0, [good, {**good, **change}])
    with pytest.raises(InputError) as refused:
        measured_passes(folder)
    assert str(path) in refused.value.message
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(InputError):
        measured_passes(folder)
