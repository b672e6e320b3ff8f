"""The record that is composed from the files of another program's processes: profiled steps, and wall time by phase."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from meshwright.catalog import lookup as catalog
from meshwright.engines import external_record
from meshwright.engines.base import find_engine
from meshwright.engines.external_record import FACTS, START, STEPS, OutputLayout, compose, read
from meshwright.engines.local import write_files
from meshwright.files import append
from meshwright.records.training import RECORD
from meshwright.training.profiling.steps import FOLDER, SUMMARY

LAYOUT = OutputLayout(output="megatron", run_file="meshwright_run.yaml", checkpoints=lambda folder: [])
STEP_S, GAP_S, TRACE_S = 1.0, 0.25, 2.0
"""A step, what follows each one, and the writing of the trace after the last profiled one."""


@pytest.fixture
def composed(small_run, tmp_path):
    """`composed(10, profiled=range(5, 9))`: the record of 10 steps, of which some ran under the profiler."""

    def write(num_steps: int, *, profiled: range):
        run = small_run("megatron", "plan: data_shard: 1", f"train.steps={num_steps}", "model.family=LlamaForCausalLM")
        write_files(find_engine("megatron").lower(run, folder=tmp_path), tmp_path)
        output = tmp_path / LAYOUT.output
        output.mkdir()
        lines, now_s = [], 100.0
        for step in range(1, num_steps + 1):
            is_profiled = step in profiled
            now_s += STEP_S * (3 if is_profiled else 1)
            lines.append({
                "step": step, "loss": 2.0, "gradient_norm": 1.0, "learning_rate": 1e-3, "memory_bytes": 1 << 20,
                "step_s": STEP_S * (3 if is_profiled else 1), "ended_s": now_s,
            } | ({"profiled": True} if is_profiled else {}))  # fmt: skip
            now_s += TRACE_S if step == profiled[-1] else GAP_S
        (output / STEPS).write_text("".join(json.dumps(line) + "\n" for line in lines))
        start = {
            "command": [], "started_s": 90.0, "accelerator": asdict(catalog.accelerator("h100")), "predicted": None,
            "notes": [], "git_commit": None,
        }  # fmt: skip
        (output / START).write_text(json.dumps(start))
        (output / FACTS).write_text(json.dumps({"device": {"name": "x"}, "software": {}}))
        usual = [line["step_s"] for line in lines if not line.get("profiled")]
        (output / "rank-0.json").write_text(json.dumps({"step_s": usual, "peak_memory_bytes": 1 << 20}))
        (tmp_path / "resolved.json").write_text("{}")
        (tmp_path / FOLDER).mkdir()
        (tmp_path / FOLDER / SUMMARY).write_text(json.dumps({"steps": list(profiled)[1:]}))
        return compose(tmp_path, LAYOUT)

    return write


def test_profiled_steps_are_not_in_the_statistics(composed, tmp_path):
    record = composed(10, profiled=range(5, 9))
    assert record.profile == {"steps": [6, 7, 8]}
    assert record.statistics["step_s"]["high"] == STEP_S
    assert record.statistics["step_s"]["n"] == 6
    assert record.ranks["step_s"] == [STEP_S]
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("profiled")] == [5, 6, 7, 8]


def test_every_second_is_in_one_phase(composed, monkeypatch):
    monkeypatch.setattr(external_record.time, "time", lambda: 150.0)
    times = composed(10, profiled=range(5, 9)).time_s
    assert times == pytest.approx({
        "start_up": 10.0,
        "warm_up": 3 * STEP_S + 2 * GAP_S,
        "training": 3 * STEP_S,  # steps 4, 9 and 10
        "profiling": 4 * 3 * STEP_S + 3 * GAP_S + TRACE_S,
        "between_steps": 3 * GAP_S,  # before steps 4, 5 and 10
        "closing": 150.0 - (100 + 6 * STEP_S + 12 * STEP_S + 8 * GAP_S + TRACE_S),
        "total": 60.0,
    })  # fmt: skip


def test_a_run_whose_steps_were_all_profiled_has_no_rate(composed):
    record = composed(3, profiled=range(1, 4))
    assert record.statistics["step_s"] == {"n": 0}
    assert record.statistics["tokens_per_s_per_device"] is None


def test_half_a_line_that_a_power_cut_left_is_no_step(composed, tmp_path):
    composed(4, profiled=range(3, 4))
    log = tmp_path / LAYOUT.output / STEPS
    whole = log.read_bytes()
    for torn in (whole[:-20], whole[:-20] + bytes(20)):
        log.write_bytes(torn)
        (tmp_path / RECORD).unlink()
        assert read(tmp_path, LAYOUT).statistics["steps"] == 3
        append(log, whole.splitlines(keepends=True)[-1].decode())  # the resumed training takes the step again
        assert log.read_bytes() == whole
