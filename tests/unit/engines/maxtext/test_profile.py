"""Settings of MaxText's profiler, which steps it slows, and what happens to the files that it writes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from meshwright.engines.maxtext.results import smoothed
from meshwright.engines.maxtext.worker import HLO, StepProfile
from meshwright.training.profiling.steps import ProfileSteps


def profile(first: int, last: int, *, done: int = 0, folder: Path = Path()) -> StepProfile:
    output = folder / "maxtext"
    return StepProfile(steps=ProfileSteps(first=first, last=last), done=done, output=output, base=output)


@pytest.mark.parametrize(
    ("first", "last", "done", "skipped", "traced"),
    [(6, 8, 0, 4, 4), (1, 3, 0, 0, 3), (2, 3, 0, 0, 3), (26, 28, 20, 4, 4), (21, 22, 20, 0, 2)],
)
def test_maxtext_counts_from_the_first_step_that_it_takes(first, last, done, skipped, traced):
    settings = dict(text.split("=") for text in profile(first, last, done=done).settings)
    assert settings["profiler"] == "xplane"
    assert int(settings["skip_first_n_steps_for_profiler"]) == skipped
    assert int(settings["profiler_steps"]) == traced
    assert settings["jax_cache_dir"] == ""  # a cached program has no text


def test_the_step_after_the_last_is_slow_too():
    assert [step for step in range(1, 13) if profile(6, 8).slows(step)] == [5, 6, 7, 8, 9]


def test_times_of_profiled_steps_are_averaged_apart():
    entries = [
        {"step": i, "ended_s": float(i)} | ({"step_s": 9.0, "profiled": True} if 5 <= i <= 8 else {"step_s": 1.0})
        for i in range(1, 12)
    ]  # fmt: skip
    assert [entry["step_s"] for entry in smoothed(entries)] == [entry["step_s"] for entry in entries]


def test_files_that_name_the_host_are_removed(tmp_path):
    text = "ENTRY %main (p: f32[8]) -> f32[8] {\n  ROOT %dot.1 = f32[8]{0} dot(%p, %p)\n}\n"
    found = profile(2, 2, folder=tmp_path)
    (found.output / HLO).mkdir(parents=True)
    (found.output / HLO / "module_0001.jit_train_step.cpu_after_optimizations.txt").write_text(text)
    traces = found.output / "maxtext/tensorboard/plugins/profile/2026_01_01"
    traces.mkdir(parents=True)
    about = {"hlo_module": "jit_train_step", "device_ordinal": "0", "hlo_op": "dot.1"}
    events = [
        {"ph": "X", "name": "dot.1", "pid": 1, "tid": 1, "ts": start, "dur": 5, "args": about | {"run_id": str(start)}}
        for start in (0, 10)
    ]
    with gzip.open(traces / "myhost.trace.json.gz", "wt") as stream:
        json.dump({"traceEvents": events}, stream)
    found.write()
    summary = json.loads((tmp_path / "profile" / "summary.json").read_text())
    assert summary["shares"]["GEMM"] == pytest.approx(0.5)
    assert json.loads(gzip.decompress((tmp_path / "profile" / "trace-rank0.json.gz").read_bytes()))
    assert not [path for path in tmp_path.rglob("*") if "myhost" in path.name or path.name == HLO]


def test_without_a_trace_there_is_a_reason(tmp_path):
    with pytest.raises(ValueError, match="XLA wrote no text of the step"):
        profile(2, 2, folder=tmp_path).write()
