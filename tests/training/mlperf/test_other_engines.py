"""Runs of a benchmark on Megatron-Core and torchtitan, on this CPU through their test-only shims."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("mlperf_logging")

from tests.smoke_benchmark import write_smoke

from meshwright.errors import InputError
from meshwright.mlperf.benchmarks import load_benchmark
from meshwright.mlperf.check import log_findings
from meshwright.mlperf.log import RunLog, read_log
from meshwright.mlperf.running import RunChoices, prepare_set
from meshwright.mlperf.worker import LOG, TRAINING
from meshwright.records.training import Ending, read_record

SHIMS = Path(__file__).parents[2] / "engines"
PROGRAMS = {"megatron": "megatron.core", "torchtitan": "torchtitan"}
PIPELINE = ("parallel={pipeline: 2, data_shard: 1, sharding: none}", "batch.micro=8")
OVERRIDES = ("batch.global_sequences=16", "optimizer.learning_rate=4e-3", "train.evaluate.skip_first=1")


def run_on(engine: str, folder: Path, *overrides: str) -> RunLog:
    """The log of one run of the smoke benchmark with seed 5."""
    path = [*([str(SHIMS / engine / "shim")] if engine in PROGRAMS else []), *filter(None, sys.path)]
    sets = [f"--set={line}" for line in (f"engine={engine}", *OVERRIDES, *overrides)]
    line = ("mlperf", "run", str(folder / "smoke_xs.toml"), "--out", str(folder / engine), "--division", "open")
    environment = {"PYTHONPATH": os.pathsep.join(path), "MESHWRIGHT_CACHE": str(folder / "cache"),
                   "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", *line, "--runs=1", "--seeds=5", "--json", *sets],
        env=os.environ | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert any("takes no warm-up steps" in note for note in document["notes"]) is (engine in PROGRAMS)
    return read_log(folder / engine / "runs" / "0" / LOG)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the smoke benchmark, whose data the runs share."""
    folder = tmp_path_factory.mktemp("others")
    write_smoke(folder / "smoke_xs.toml")
    return folder


@pytest.fixture(scope="module")
def native(folder: Path) -> RunLog:
    """The log of the native engine."""
    return run_on("native", folder)


@pytest.mark.when_touched
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("engine", "sections", "near"),
    # Both draw the native engine's weights where Megatron does; torchtitan draws others from the same distribution.
    [("megatron", PIPELINE, 2e-6), ("torchtitan", PIPELINE, 0.02)],
)
def test_the_log_is_that_of_the_native_engine(folder, native, engine, sections, near):
    if find_spec(PROGRAMS[engine].partition(".")[0]) is None:
        pytest.skip(f"{engine} is not installed")
    log = run_on(engine, folder, *sections)
    assert not log.faults
    of_plan = ("pipeline_parallelism", "number_of_ranks", "micro_batch_size", "gradient_accumulation_steps")
    assert [r.key for r in log.records] == [r.key for r in native.records]
    assert [r.samples for r in log.records] == [r.samples for r in native.records]
    for ours, theirs in zip(log.records, native.records, strict=True):
        if ours.key == "eval_accuracy":
            assert ours.value == pytest.approx(theirs.value, rel=near)
        elif ours.key not in (*of_plan, "cache_clear", "clock_jump"):
            assert ours.value == theirs.value, ours.key
    times = [record.time_ms for record in log.records]
    assert times == sorted(times)
    assert log.last("run_stop").metadata["status"] == "success"
    assert read_record(folder / engine / "runs" / "0" / TRAINING).ending is Ending.REACHED
    benchmark = load_benchmark(str(folder / "smoke_xs.toml"))
    assert [f.rule for f in log_findings(log, benchmark)] == [f.rule for f in log_findings(native, benchmark)]


@pytest.mark.parametrize(
    ("overrides", "choices", "said"),
    [
        (
            ("engine=maxtext",),
            {},
            "a benchmark cannot be run with the engine maxtext: it does not report when it opens",
        ),
        (("engine=megatron",), {"warm_up_steps": 2, "launcher": ("sh",)}, "megatron takes no warm-up steps"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_before_the_runs(folder, tmp_path, monkeypatch, overrides, choices, said):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(folder / "cache"))
    benchmark = load_benchmark(str(folder / "smoke_xs.toml"))
    with pytest.raises(InputError, match=said):
        prepare_set(
            benchmark, folder=tmp_path / "set", overrides=(*OVERRIDES[:2], *overrides), choices=RunChoices(**choices)
        )
