"""`bench train` with trainings that end at once: order, statistics, faults, interruptions, going on."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from operator import itemgetter
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.every_member import check_every

import meshwright as mw
from meshwright.bench.training import TrainingBenchRequest, rounds
from meshwright.errors import InputError
from meshwright.records.sweep import configurations, parse_sweep
from meshwright.records.trainings import SIDECAR_KEYS, TABLE, TrainingStatus, read
from meshwright.training import cpu_libraries

FAKE = Path(__file__).with_name("fake_train.py")
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "bench-trainings.md"
LAUNCHER = shlex.join([sys.executable, str(FAKE)])
SWEEP = ("tiny.yaml", "--sweep", "batch.micro=1,2", "--launcher", LAUNCHER)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, tiny_text):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cpu_libraries, "find_spec", lambda name: True)
    (tmp_path / "tiny.yaml").write_text(tiny_text)
    return tmp_path


@pytest.fixture
def bench(meshwright):
    """`bench("--runs", 3)`: two configurations; what it printed and the records."""

    def run(*arguments, **behaviour):
        told = {key.replace("_", "="): what for key, what in behaviour.items()}
        Path("behaviour.json").write_text(json.dumps(told))
        outcome = meshwright("bench", "train", *SWEEP, *arguments)
        return outcome, read(Path("bench-train")).rows if Path("bench-train/trainings.csv").exists() else ()

    return run


def test_runs_take_turns_and_each_round_begins_with_another_configuration():
    found = configurations(["tiny.yaml"], sweeps=[parse_sweep("batch.micro=1,2,4")], steps=1)
    order = [
        (c.name[-1], run)
        for c, run in rounds(
            TrainingBenchRequest(configurations=found, num_runs=2, warmup=0, launcher=("python",), timeout_s=1.0)
        )
    ]
    assert order == [("1", 1), ("2", 1), ("4", 1), ("2", 2), ("4", 2), ("1", 2)]


def test_the_median_of_the_runs_is_compared_with_the_prediction(bench):
    outcome, rows = bench("--runs", 3, "--steps", 4, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    one, two = outcome.json["configurations"]
    assert one["configuration"] == "tiny micro=1"
    assert one["step_s"] == {"value": 0.102, "low": 0.101, "high": 0.103}
    rate = one["tokens_per_s_per_device"]
    assert rate["value"] == pytest.approx(64 / 0.102)
    assert rate["low"] < rate["value"] < rate["high"]
    assert one["error"] == pytest.approx(0.1 / 0.102 - 1)
    assert (one["is_inside"], one["runs_inside"], one["interval"]) == (True, 3, "range of the runs")
    assert one["mfu"] == pytest.approx(64 / 0.102 * 1e6 / 1e9)
    assert two["tokens_per_s_per_device"]["value"] == pytest.approx(2 * rate["value"])
    assert outcome.json["verdict"]["num_inside"] == 2
    assert outcome.json["verdict"]["median_error"] == pytest.approx(1 - 0.1 / 0.102)
    assert [row.steps for row in rows] == [4] * 6  # the warm-up does not count
    assert len({row.folder for row in rows}) == 6


def test_six_runs_have_an_interval_of_95_percent_and_outliers_are_named(bench):
    outcome, _ = bench("--runs", 6, "--json", **{"micro_1@6": "slow"})
    one, two = outcome.json["configurations"]
    assert one["interval"] == "95 % of the median"
    assert [o["run"] for o in one["outliers"]] == [6]
    assert two["outliers"] == []
    outcome, _ = bench("--runs", 6, "--resume")
    assert "run 6 is an outlier" in outcome.stderr


@pytest.mark.when_touched  # test_the_median_of_the_runs_is_compared_with_the_prediction has the numbers
def test_tables_and_page_say_it_to_people(bench, folder):
    outcome, _ = bench("--runs", 2, "--html", "page.html")
    assert outcome.exit_code == 0, outcome.stderr
    for words in ("631 (627–634)", "640 (533–711)", "-1.5 %", "DP1 ddp mbs2", "2 of 2 configurations measured"):
        assert words in outcome.stdout
    assert re.search(r"tiny micro=2  run 2  [\d,]+ tokens/s/device, predicted 1,280", outcome.stderr)
    page = (folder / "page.html").read_text()
    assert "Measured and predicted" in page
    assert page.count('class="for-wide"') == 1


def test_without_a_prediction_there_is_no_verdict(bench):
    outcome, _ = bench("--runs", 1, tiny="unpredicted")
    assert outcome.exit_code == 0, outcome.stderr
    assert "none was predicted" in outcome.stdout


@pytest.mark.parametrize(
    ("what", "status", "reason", "num_rows"),
    [
        ("out of memory", TrainingStatus.OUT_OF_MEMORY, "CUDA out of memory", 1),
        ("refuse", TrainingStatus.REFUSED, "no fp8 here", 1),
        ("kill", TrainingStatus.KILLED, "killed by SIGKILL", 2),
        ("diverge", TrainingStatus.FAILED, "the loss is not a number", 2),
        ("leave nothing", TrainingStatus.FAILED, "left no record", 2),
    ],
)
def test_what_goes_wrong_is_a_line_and_costs_no_other(bench, what, status, reason, num_rows):
    """A configuration's own failure is not repeated in the same sweep."""
    outcome, rows = bench("--runs", 2, micro_1=what)
    assert outcome.exit_code == 0, outcome.stderr
    wrong = [row for row in rows if row.configuration == "tiny micro=1"]
    assert [row.status for row in wrong] == [status] * num_rows
    assert all(reason in row.reason for row in wrong)
    assert [row.status for row in rows if row not in wrong] == [TrainingStatus.OK] * 2
    assert "Not measured" in outcome.stdout
    assert "1 of 2 configurations measured" in outcome.stdout


@pytest.mark.when_touched  # an interruption ends the same processes above
def test_what_takes_too_long_is_ended(bench):
    _, rows = bench("--runs", 2, "--timeout", 4, micro_1="hang")
    ended = [row for row in rows if row.configuration == "tiny micro=1"]
    assert [row.status for row in ended] == [TrainingStatus.TIMED_OUT]
    assert ended[0].reason == "it took more than 4 s"
    assert ended[0].wall_s > 4
    if Path("pids").exists():  # it may have been ended before it could write them
        assert_gone()


def test_when_nothing_could_be_trained_the_answer_is_no(bench):
    outcome, _ = bench("--runs", 1, tiny="refuse")
    assert outcome.exit_code == 1
    assert "no configuration could be trained" in outcome.stderr


def test_records_are_not_overwritten_and_going_on_takes_what_is_missing(bench, folder):
    bench("--runs", 2, **{"micro_1@1": "kill"})
    before = (folder / "bench-train" / "trainings.csv").read_text()
    outcome, _ = bench("--runs", 3)
    assert outcome.exit_code == 2
    assert "continue with --resume" in outcome.stderr
    assert (folder / "bench-train" / "trainings.csv").read_text() == before
    outcome, rows = bench("--runs", 3, "--resume")
    assert outcome.exit_code == 0, outcome.stderr
    assert "3 of 6 runs were measured before" in outcome.stderr
    assert sorted((r.configuration, r.run) for r in rows) == [
        (f"tiny micro={micro}", run) for micro in (1, 2) for run in (1, 2, 3)
    ]
    assert len({row.folder for row in rows}) == 6  # the folder of the killed one stays


def test_a_line_cut_short_is_taken_again(bench, folder):
    bench("--runs", 1)
    path = folder / "bench-train" / "trainings.csv"
    path.write_text(path.read_text()[:-40])
    _, rows = bench("--runs", 1, "--resume")
    assert [row.status for row in rows] == [TrainingStatus.OK] * 2


def test_other_conditions_do_not_mix(bench):
    bench("--runs", 1)

    def check(arguments):
        outcome, _ = bench("--runs", 1, "--resume", *arguments)
        assert outcome.exit_code == 2
        assert "write to another folder with --out" in outcome.stderr

    check_every((["--steps", "7"], ["--warmup", "1"], ["--set", "train.seed=7"]), check)


def test_another_device_does_not_mix(bench):
    bench("--runs", 1)
    outcome, rows = bench("--runs", 2, "--resume", tiny="elsewhere")
    assert outcome.exit_code == 2
    assert "another device: got \"name: 'a device' then, 'another device' now\"" in outcome.stderr
    assert len(rows) == 2


def test_engines_are_compared_and_one_that_refuses_is_a_line(meshwright, folder):
    (folder / "behaviour.json").write_text(json.dumps({"engine=torchtitan": "slow", "engine=megatron": "refuse"}))
    words = ("tiny.yaml", "--launcher", LAUNCHER, "--engines", "native,torchtitan,megatron", "--runs", 2)
    outcome = meshwright("bench", "train", *words, "--json", "--html", "page.html")
    assert outcome.exit_code == 0, outcome.stderr
    (contest,) = outcome.json["engines"]
    assert contest["configuration"] == "tiny"
    assert contest["over_the_first"] == {"native": 1.0, "torchtitan": pytest.approx(1 / 3)}
    refused = outcome.json["configurations"][2]["failures"][0]
    assert refused["status"] == "refused"
    assert "no fp8 here" in refused["reason"]
    assert "over the first" in Path("page.html").read_text()
    told = meshwright("bench", "train", *words, "--resume")
    assert re.search(r"^tiny +torchtitan +\S+ +0.33", told.stdout, flags=re.MULTILINE), told.stdout
    assert "no fp8 here" in told.stdout
    alone = meshwright("bench", "train", "tiny.yaml", "--launcher", LAUNCHER, "--runs", 1, "--out", "alone")
    assert "over the first" not in alone.stdout


def test_several_engines_without_torch_are_lines(meshwright, monkeypatch):
    monkeypatch.setattr(cpu_libraries, "find_spec", lambda name: None)
    words = ("tiny.yaml", "--launcher", LAUNCHER, "--engines", "native,maxtext", "--runs", 1)
    assert meshwright("bench", "train", *words).exit_code == 0


def test_configurations_may_be_added(bench):
    bench("--runs", 1)
    outcome, rows = bench("--runs", 1, "--resume", "--sweep", "precision=bf16,fp32")
    assert outcome.exit_code == 0, outcome.stderr
    assert len(rows) == 6
    assert len(read(Path("bench-train")).sidecar["configurations"]) == 6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sweep", "batch.mikro=1"], "unknown key"),
        (["--sweep", "batch.micro"], "--sweep must read key=value,value"),
        (["--engines", "native,jax"], "jax"),
        (["--runs", "0"], "--runs"),
        (["--launcher", ""], "--launcher is empty"),
        (["--launcher", "'"], "--launcher is no command line"),
        (["--launcher", "no-such-program-here"], "--launcher cannot be started"),
    ],
)
def test_bad_input(meshwright, arguments, words):
    outcome = meshwright("bench", "train", "tiny.yaml", *arguments)
    assert outcome.exit_code == 2
    assert words in outcome.stderr


def test_under_a_launcher_it_names_the_option(bench, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    outcome, rows = bench("--runs", 1)
    assert outcome.exit_code == 2
    assert "hint: --launcher 'torchrun --nproc-per-node 2'" in outcome.stderr
    assert rows == ()


def test_without_torch_it_says_how_to_install_it(bench, monkeypatch):
    monkeypatch.setattr(cpu_libraries, "find_spec", lambda name: None)
    outcome, rows = bench("--runs", 1)
    assert outcome.exit_code == 3
    assert rows == ()


@pytest.mark.parametrize(
    ("signum", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.when_touched),  # SIGINT ends it by the same lines
    ],
)
def test_an_interruption_keeps_what_was_measured_and_leaves_no_process(bench, folder, signum, code):
    (folder / "behaviour.json").write_text(json.dumps({"micro=2": "hang"}))
    words = [sys.executable, "-m", "meshwright", "bench", "train", *SWEEP, "--runs", "1"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline_s = time.monotonic() + 120
    while not (folder / "pids").exists() or not (folder / "pids").read_text():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    process.send_signal(signum)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == code, stderr
    assert_gone()
    found = read(folder / "bench-train")
    assert [row.configuration for row in found.rows] == ["tiny micro=1"]
    assert found.sidecar["ended"] is not None
    _, rows = bench("--runs", 1, "--resume")
    assert [row.status for row in rows] == [TrainingStatus.OK] * 2


def assert_gone():
    """Neither the training nor what it started is there any more."""
    deadline_s = time.monotonic() + 60
    for pid in Path("pids").read_text().split():
        while is_alive(int(pid)):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


ALTERED = (
    (lambda lines: [lines[0].replace("engine", "motor"), *lines[1:]], "csv:1: not the header"),
    (lambda lines: [lines[0], lines[1].replace(",ok,", ",fine,")], "csv:2: status"),
    (lambda lines: [lines[0], lines[1] + ",1"], "csv:2: cells of this line"),
    (lambda lines: [lines[0], lines[1].replace(",tiny,", ",tiny,"), "x"], "csv:3: cells of this line"),
)


def test_an_altered_file_is_refused_with_its_line(bench, folder):
    bench("--runs", 1)
    path = folder / "bench-train" / "trainings.csv"
    lines = path.read_text().splitlines()

    def check(case):
        change, words = case
        path.write_text("\n".join(change(lines)) + "\n")
        with pytest.raises(InputError, match=words):
            read(path)

    check_every(ALTERED, check, name=itemgetter(1))


def test_the_page_explains_every_column_and_key(bench, folder):
    bench("--runs", 1)
    records = read(folder / "bench-train")
    with records.path.open() as stream:
        assert tuple(next(csv.reader(stream))) == TABLE.header
    columns, keys = PAGE.read_text(encoding="utf-8").split("## trainings.csv\n")[1].split("## trainings.json\n")

    def explained(section: str) -> set[str]:
        cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
        return {name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)}

    assert explained(columns) == set(TABLE.header)
    one = next(iter(records.sidecar["configurations"].values()))
    found = set(records.sidecar) | {f"device.{key}" for key in records.sidecar["device"]}
    assert set(SIDECAR_KEYS) <= found
    assert explained(keys) == found | {f"configurations.{key}" for key in one}


def test_the_python_function_returns_the_sweep_and_the_command_goes_on_with_it(bench):
    done = mw.bench_train("tiny.yaml", sweeps=["batch.micro=1,2"], launcher=LAUNCHER, num_runs=1, steps=4)
    assert [row["configuration"] for row in done.to_rows()] == ["tiny micro=1", "tiny micro=2"]
    assert done.trainings.sidecar["command"] == ["meshwright.bench_train"]
    outcome, rows = bench("--runs", 2, "--steps", 4, "--resume")
    assert outcome.exit_code == 0, outcome.stderr
    assert [row.wall_s for row in rows[:2]] == [row.wall_s for row in done.trainings.rows]
    with pytest.raises(InputError, match="paths are missing"):
        mw.bench_train()
