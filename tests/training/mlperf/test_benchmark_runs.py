"""Runs of a benchmark: their logs, their clock, and sets that are killed and continued."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("mlperf_logging")

from tests.smoke_benchmark import write_smoke

from meshwright import runfile
from meshwright.api.run_benchmark import plan_benchmark
from meshwright.errors import InputError, MeshwrightError
from meshwright.mlperf import worker
from meshwright.mlperf.benchmarks import load_benchmark
from meshwright.mlperf.check import log_findings
from meshwright.mlperf.log import RunLog, read_log
from meshwright.mlperf.run_log import EarlyDataError, RunLogger
from meshwright.mlperf.run_set import RunFailedError, RunResult, RunState
from meshwright.mlperf.running import RunChoices, SetProgress, named_benchmark, prepare_set, take_runs
from meshwright.mlperf.worker import LOG, TRAINING, RunTask, read_task, run_once
from meshwright.records.training import Ending, read_record
from meshwright.training.data import token_range
from meshwright.training.data.corpus import open_data


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory):
    """A benchmark file with an easy target, and a cache of its own."""
    folder = tmp_path_factory.mktemp("smoke")
    path = folder / "smoke_xs.toml"
    write_smoke(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHWRIGHT_CACHE", str(folder / "cache"))
        yield path


OVERRIDES = ("batch.global_sequences=16", "optimizer.learning_rate=4e-3")


def prepared(smoke: Path, folder: Path, *overrides: str, **choices):
    benchmark = load_benchmark(str(smoke))
    return prepare_set(benchmark, folder=folder, overrides=(*OVERRIDES, *overrides), choices=RunChoices(**choices))


def one_task(smoke: Path, folder: Path, **changes) -> RunTask:
    """The task of one run, in `folder`."""
    ready = prepared(smoke, folder / "set", num_runs=1)
    place = folder / "0"
    place.mkdir()
    values = {
        "folder": str(place), "run_file": str(folder / "set" / "run.yaml"), "overrides": (), "seed": 5,
        "benchmark": "smoke_xs", "train_samples": 12835,
        "submission": {"org": "o", "platform": "p", "division": "closed"}, "cache_clear": {"value": True},
        "data_paths": tuple(str(path) for path in ready.inputs.files), "warm_up_steps": 1,
    }  # fmt: skip
    return RunTask(**(values | changes))


def keys(log: RunLog) -> list[str]:
    return [record.key for record in log.records]


def test_the_log_of_a_run(smoke, tmp_path, without_measuring):
    task = one_task(smoke, tmp_path)
    assert read_task(task.write()) == task
    run_once(task)
    log = read_log(tmp_path / "0" / LOG)
    assert not log.faults
    found = keys(log)
    assert found[:2] == ["cache_clear", "init_start"]
    order = ["init_start", "seed", "init_stop", "run_start", "block_start", "eval_start", "eval_accuracy", "run_stop"]
    assert [found.index(key) for key in order] == sorted(found.index(key) for key in order)
    assert found[-1] == "run_stop"
    assert log.value("seed") == 5
    times = [record.time_ms for record in log.records]
    assert times == sorted(times)
    evaluations = log.all("eval_accuracy")
    assert [record.samples for record in evaluations] == [32 * (n + 1) for n in range(len(evaluations))]
    assert all(record.value > 4.5 for record in evaluations[:-1])
    assert evaluations[-1].value <= 4.5
    assert log.last("run_stop").metadata["status"] == "success"
    assert log.last("run_stop").samples == evaluations[-1].samples
    for kind in ("block", "eval"):
        assert len(log.all(f"{kind}_start")) == len(log.all(f"{kind}_stop")) == len(evaluations)
    assert all(not record.metadata["file"].startswith("/") for record in log.records)
    record = read_record(tmp_path / "0" / TRAINING)
    assert record.ending is Ending.REACHED
    assert record.statistics["tokens"] == evaluations[-1].samples * 128
    benchmark = load_benchmark(str(smoke))
    assert {key for key, rule in benchmark.hyperparameters.items() if rule.required} <= set(found)
    for key in (*benchmark.rules.precision_keys, *benchmark.rules.degree_keys, *benchmark.rules.once):
        assert found.count(key) == 1, key


def test_a_run_that_misses_its_target_is_aborted(smoke, tmp_path, without_measuring):
    task = one_task(smoke, tmp_path, overrides=("train.evaluate.target_loss=0.1", "train.steps=16"))
    run_once(task)
    log = read_log(tmp_path / "0" / LOG)
    assert log.last("run_stop").metadata["status"] == "aborted"
    assert log.last("run_stop").samples == 256


def test_data_that_is_opened_before_the_clock_starts_ends_the_run(tmp_path):
    data = tmp_path / "train.bin"
    data.write_bytes(b"x")
    logger = RunLogger(path=tmp_path / "log", data_paths=(str(data),))
    logger.initializing(rank=1)
    (tmp_path / "other").write_text("is not data")
    with pytest.raises(EarlyDataError, match=r"train\.bin"):
        data.read_bytes()
    logger.opening_data()
    assert data.read_bytes() == b"x"
    assert not (tmp_path / "log").exists()  # rank 0 alone writes


def log_that_ends(path: Path, ending: Ending) -> RunLog:
    logger = RunLogger(path=path, data_paths=())
    logger.initializing(rank=0)
    logger.opening_data()
    logger.training(num_samples=0)
    logger.ended(num_samples=16, ending=ending)
    return read_log(path)


def test_a_training_that_is_stopped_has_no_end_in_its_log(tmp_path):
    log = log_that_ends(tmp_path / "log", Ending.STOPPED)
    assert keys(log) == ["init_stop", "run_start", "block_start"]


def test_a_training_that_diverges_is_aborted(tmp_path):
    log = log_that_ends(tmp_path / "log", Ending.DIVERGED)
    assert keys(log)[-2:] == ["block_stop", "run_stop"]
    assert log.last("run_stop").metadata["status"] == "aborted"


@pytest.fixture
def large_from_one_byte(monkeypatch):
    """Every token file is one whose range of tokens is remembered."""
    monkeypatch.setattr("meshwright.training.data.token_range.REMEMBERED_BYTES", 1)


@pytest.mark.usefixtures("large_from_one_byte")
def test_the_data_set_is_read_through_before_the_first_run_and_not_by_a_run(smoke, tmp_path, monkeypatch):
    ready, read = prepared(smoke, tmp_path / "set", num_runs=1), []
    monkeypatch.setattr("meshwright.mlperf.running.run_set", lambda *given, **more: read.append("run") or [])
    measure = token_range._measure
    monkeypatch.setattr(token_range, "_measure", lambda tokens_N: read.append("all") or measure(tokens_N))
    take_runs(ready, report=lambda done, active: None)
    assert read == ["all", "all", "run"]  # training and validation
    open_data(ready.run)  # what a run does on its clock
    take_runs(ready, report=lambda done, active: None)
    assert read == ["all", "all", "run", "run"]


@pytest.mark.usefixtures("large_from_one_byte")
def test_data_that_cannot_be_trained_on_start_no_run(smoke, tmp_path, monkeypatch):
    ready = prepared(smoke, tmp_path / "set", "model.vocab=100", num_runs=1, division="open")
    with pytest.raises(InputError, match="not in the model's vocabulary"):
        take_runs(ready, report=lambda done, active: None)
    ready = prepared(smoke, tmp_path / "other", num_runs=1)
    monkeypatch.setenv("MESHWRIGHT_CACHE", "/proc/nowhere")
    with pytest.raises(InputError, match="cannot be remembered"):
        take_runs(ready, report=lambda done, active: None)
    assert not (tmp_path / "set" / "runs").exists()


def test_an_engine_that_reports_no_evaluations_is_refused_with_all_reasons(smoke, tmp_path):
    with pytest.raises(InputError, match="engine maxtext: it does not report") as error:
        prepared(smoke, tmp_path / "set", "engine=maxtext")
    for key in ("data.joined_documents", "train.evaluate.num_sequences"):
        assert key in error.value.message
    assert not (tmp_path / "set").exists()


def test_what_this_machine_cannot_run_opens_no_set(smoke, tmp_path):
    with pytest.raises(MeshwrightError, match="no accelerator"):
        prepared(smoke, tmp_path / "set", "cluster=h100-8x1", "parallel={data_shard: 8}", "batch.micro=2")
    for launcher, num_concurrent, message in ((("no-such-program",), 1, "no such program"), (("sh",), 2, "one after")):
        with pytest.raises(InputError, match=message):
            prepared(smoke, tmp_path / "set", launcher=launcher, num_concurrent=num_concurrent)
    assert not (tmp_path / "set").exists()


def test_a_set_inside_a_launcher_is_refused(smoke, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="is no process of a launcher") as error:
        prepared(smoke, tmp_path / "set")
    assert "--launcher" in error.value.hint


@pytest.mark.slow  # starts torchrun twice; the processes of one run are tested in tests/engines/native
@pytest.mark.distributed
def test_a_launcher_starts_the_processes_of_a_run(smoke, tmp_path):
    torchrun = (sys.executable, "-m", "torch.distributed.run")
    launcher = (*torchrun, "--standalone", "--nproc-per-node", "2", "--no-python")
    overrides = ("parallel={data_shard: 2}", "batch.micro=8")
    ready = prepared(smoke, tmp_path / "set", *overrides, num_runs=2, division="open", launcher=launcher)
    done = take_runs(ready, report=lambda done, active: None)
    assert done.num_converged == 2
    for result in done.results:
        log = read_log(result.log)
        assert log.value("number_of_ranks") == 2
        assert [len(log.all(key)) for key in ("cache_clear", "init_start", "seed", "run_start", "run_stop")] == [1] * 5
        assert not [f for f in log_findings(log, ready.benchmark) if f.severity == "error"]
    again = prepared(smoke, tmp_path / "set", *overrides, num_runs=2, division="open", launcher=launcher)
    assert again.held == ready.held


def test_given_seeds_are_different_and_one_a_run(smoke, tmp_path):
    assert prepared(smoke, tmp_path / "a", seeds=(3, 4)).held.seeds == (3, 4)
    for seeds, num_runs in (((3, 3), None), ((3, 4), 3)):
        with pytest.raises(InputError, match="--seeds"):
            prepared(smoke, tmp_path / "b", seeds=seeds, num_runs=num_runs)


def test_a_plan_writes_nothing(smoke, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    document = plan_benchmark(name=str(smoke), overrides=list(OVERRIDES), num_runs=2)
    assert (document["num_runs"], document["benchmark"]) == (2, "smoke_xs")
    assert runfile.loads(document["run_file"]).global_batch == 16
    assert list(tmp_path.iterdir()) == []


@pytest.mark.when_touched  # test_a_run_that_misses_its_target_is_aborted keeps the others too
def test_a_run_that_fails_names_its_output_and_the_others_are_kept(smoke, tmp_path, monkeypatch):
    ready = prepared(smoke, tmp_path / "set", num_runs=2, num_concurrent=1)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # where `meshwright` is another package
    (tmp_path / "meshwright").mkdir()
    (tmp_path / "meshwright" / "__init__.py").write_text("raise SystemExit('no such thing')")
    with pytest.raises(RunFailedError, match=r"run 0 ended without a result.*no such thing"):
        take_runs(ready, report=lambda done, active: None)
    assert not list((tmp_path / "set").glob("result_*"))


def test_progress_names_runs_that_end_and_the_time_that_is_left(smoke, tmp_path):
    ready, lines = prepared(smoke, tmp_path / "set", num_runs=3, num_concurrent=1), []
    progress = SetProgress(ready.benchmark, ready.held, global_batch=16, say=lines.append, every_s=0.0)
    ended = RunResult(index=0, seed=1, status="success", seconds=10, samples=64, loss=4.4, log=tmp_path)
    progress.report({}, [RunState(index=0, samples=0, loss=None, seconds=0)])
    progress.report({0: ended}, [RunState(index=1, samples=32, loss=5.0, seconds=4)])
    assert "run 0 starts" in lines[0]
    assert "run 0 (1 of 3): reached 4.5 with 4.4000 after 64 samples in 10 s" in lines[1]
    assert "run 1 32 samples, loss 5.0000; target 4.5; about 16 s left" in lines[2]


def test_progress_says_how_likely_the_set_passes(smoke, tmp_path):
    ready, lines = prepared(smoke, tmp_path / "set"), []
    benchmark = load_benchmark("proxy_pretrain_xs")
    progress = SetProgress(benchmark, ready.held, global_batch=16, say=lines.append, every_s=0.0)
    progress.report({}, [])
    likely, early = (
        RunResult(index=i, seed=i, status="success", seconds=1, samples=samples, loss=1.5, log=tmp_path)
        for i, samples in enumerate((1536, 640))
    )
    progress.report({0: likely}, [])
    before = int(lines[-1].split()[-2])
    progress.report({0: likely, 1: early}, [])
    assert before > 80 > int(lines[-1].split()[-2])


@pytest.mark.slow  # starts five cold processes; the log of one run is tested above
def test_a_set_that_is_killed_continues_and_keeps_the_attempt(smoke, tmp_path):
    command = [
        sys.executable, "-m", "meshwright", "mlperf", "run", str(smoke), "--runs", "3", "--concurrent", "1",
        "--out", "set", "--json", *(part for line in OVERRIDES for part in ("--set", line)),
    ]  # fmt: skip
    folder = tmp_path / "set"
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    started = folder / "runs" / "1" / LOG
    deadline = time.monotonic() + 240
    while not (started.is_file() and "init_start" in started.read_text()):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.communicate()
    seeds = json.loads((folder / "set.json").read_text())["seeds"]
    first = (folder / "result_0.txt").read_bytes()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [run["seed"] for run in document["runs"]] == seeds
    assert document["num_converged"] == 3
    assert (folder / "result_0.txt").read_bytes() == first
    assert (folder / "runs" / "1.1" / LOG).is_file()
    assert "1 of 3 runs had ended before" in done.stderr
    assert [read_log(folder / f"result_{i}.txt").value("seed") for i in range(3)] == seeds


def test_a_run_file_of_no_benchmark_is_refused(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "name: mine\nmodel: llama3-8b\ncluster: here\ndata: {sequence_length: 8}\nbatch: {global_sequences: 1}\n"
    )
    with pytest.raises(InputError, match="mine"):
        named_benchmark(str(path), round_name=None)


def test_a_signal_that_kills_a_worker_leaves_no_result(smoke, tmp_path, monkeypatch):
    """The worker is a process that kills itself."""
    ready = prepared(smoke, tmp_path / "set", num_runs=1)
    (tmp_path / "meshwright").mkdir()
    kill = f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"
    (tmp_path / "meshwright" / "__init__.py").write_text(kill)
    monkeypatch.setenv("PYTHONPATH", os.fspath(tmp_path))
    with pytest.raises(RunFailedError, match="exit code -9"):
        take_runs(ready, report=lambda done, active: None)


@pytest.mark.parametrize(("path", "code"), [("full/record.json", 2), (None, None)])
def test_a_full_disk_in_a_run_is_named_without_a_traceback(tmp_path, monkeypatch, capsys, path, code):
    """An error that names no file is a bug, and keeps its traceback."""

    def fail(task: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", *([] if path is None else [path]))

    monkeypatch.setattr(worker, "read_task", lambda path: None)
    monkeypatch.setattr(worker, "run_once", fail)
    for name in ("signal_at_end_of_parent", "end_with_parent"):
        monkeypatch.setattr(worker, name, lambda *_, **__: None)
    monkeypatch.setattr("sys.argv", ["worker", "task.json"])
    with pytest.raises(OSError, match="No space") if code is None else nullcontext():
        assert worker.main() == code
        assert capsys.readouterr().err == f"{path}: No space left on device\n"
