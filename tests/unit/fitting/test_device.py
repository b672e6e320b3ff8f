"""Calibrating finds the rates that a machine was made with; planning with them gives its step time."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshwright import runfile
from meshwright.calibration import device as device_calibration
from meshwright.calibration.device import DeviceCalibration, installed_path, load, to_document
from meshwright.errors import InputError
from meshwright.fitting.advice import advise
from meshwright.fitting.device import calibrate
from meshwright.fitting.device_fabric import modelled_all_reduce_s
from meshwright.fitting.device_kernels import coordinates, correction_name
from meshwright.planner.estimate import estimate_plan
from meshwright.planner.request import request_for
from meshwright.records.device import TIMES, DeviceRow, PointStatus, Records, read, row_of
from meshwright.records.measurement import Measurement
from meshwright.records.points import KERNELS, Point, PointFamily
from meshwright.specs.plan import Plan


@pytest.fixture(scope="module")
def records(recorded) -> Records:
    return read(recorded())


@pytest.fixture(scope="module")
def found(records) -> DeviceCalibration:
    return calibrate([records])


@pytest.fixture
def file(found, tmp_path) -> Path:
    path = tmp_path / "device.json"
    path.write_text(json.dumps(to_document(found)))
    return path


@pytest.fixture
def tiny(tiny_text, tmp_path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(tiny_text)
    return path


def test_rates_are_those_of_the_machine(found, machine):
    assert found.accelerator.memory_bytes_per_s == pytest.approx(machine.copy_bytes_per_s, rel=0.05)
    assert found.parameters["kernel_s"].value == pytest.approx(machine.launch_s, rel=0.02)
    assert found.parameters["optimizer_passes"].value == pytest.approx(machine.optimizer_passes, rel=0.1)
    assert found.parameters["elementwise_factor"].value == pytest.approx(machine.elementwise_factor, rel=0.15)
    assert 0.8e12 < found.accelerator.peak_flops_per_s["bf16"] < 1.02e12
    attention = found.parameters["attention_forward_ratio"].value * found.accelerator.peak_flops_per_s["bf16"]
    assert attention == pytest.approx(machine.attention_ratio * machine.flops_per_s, rel=0.05)


def test_unseen_shapes_are_predicted_better_than_by_the_formula(found):
    gemm = found.details["errors"]["gemm"]
    assert gemm["median"] < 0.06
    assert gemm["median"] < 0.5 * gemm["formula_median"]


def test_a_correction_gives_back_its_measured_points(found, records):
    gemm = [r for r in records.measured if r.point.family is PointFamily.GEMM and r.point.format == "bf16"]
    off = []
    for row in gemm:
        correction = found.corrections[correction_name(row.point)]
        x = np.array([coordinates(row.point)])
        at = np.flatnonzero((np.abs(correction.x - x) < 1e-9).all(axis=1))
        if len(at):
            off.append(abs(correction.predict(x).mean[0] - correction.y[at[0]]))
    assert len(off) > 50
    assert np.quantile(off, 0.9) < 0.03


def test_collectives_take_the_measured_time(found, records):
    rows = [r for r in records.measured if r.point.family is PointFamily.COLLECTIVES]
    assert set(found.collectives.curves) == {r.point.kernel for r in rows} == set(KERNELS[PointFamily.COLLECTIVES])
    for row in rows:
        point = row.point
        seconds = found.collectives.seconds(point.kernel, point.size_bytes, point.num_processes, math.inf)
        assert seconds == pytest.approx(row.seconds_median)


def test_an_unmeasured_size_lies_between_its_neighbours(found, machine):
    """On a line of the logarithms: a factor of two between two sizes hides little of latency + bytes over rate."""
    for size in (3_000, 100_000, 3_000_000):
        point = Point(family=PointFamily.COLLECTIVES, kernel="all_gather", size_bytes=size, num_processes=2)
        seconds = found.collectives.seconds("all_gather", size, 2, math.inf)
        assert seconds == pytest.approx(machine.seconds(point), rel=0.08)


def test_the_planner_s_all_reduce_is_the_measured_one(found, records):

    rows = [r for r in records.measured if r.point.kernel == "all_reduce"]
    for row in (min(rows, key=lambda r: r.point.size_bytes), max(rows, key=lambda r: r.point.size_bytes)):
        assert modelled_all_reduce_s(found.fabric, row) == pytest.approx(row.seconds_median, rel=0.05)


@pytest.mark.when_touched  # test_rates_are_those_of_the_machine has threads
def test_kernels_with_fewer_threads_are_kept_apart(records, found):
    """With half of the threads everything took twice as long; the whole machine's kernels are what they were."""
    half = tuple(
        replace(
            row, point=replace(row.point, threads=4),
            **{name: 2 * getattr(row, name) for name in TIMES},
        )
        for row in records.measured
        if row.point.family in (PointFamily.GEMM, PointFamily.MEMORY, PointFamily.ELEMENTWISE)
    )  # fmt: skip
    both = calibrate([replace(records, rows=records.rows + half)])
    assert both.parameters == found.parameters
    assert both.accelerator == found.accelerator
    assert set(both.by_threads) == {4}
    own = both.by_threads[4]
    assert own.memory_bytes_per_s == pytest.approx(found.accelerator.memory_bytes_per_s / 2)
    assert own.peak_flops_per_s["bf16"] == pytest.approx(found.accelerator.peak_flops_per_s["bf16"] / 2)
    assert own.corrections.keys() < found.corrections.keys()
    alike = own.parameters["elementwise_factor"].value
    assert alike == pytest.approx(found.parameters["elementwise_factor"].value, rel=0.05)


def test_short_steps_that_processes_took_apart_are_kept_for_trainings_to_take_again(records):
    def step(kernel: str, seconds: float, **changes) -> DeviceRow:
        point = Point(
            family=PointFamily.TRAINING, kernel=kernel, format="fp32", m=64, n=128, heads=2, kv_heads=2, head_dim=32,
            layers=1, vocab=512, seq_len=64, sequences=1, micro_batches=1,
        )  # fmt: skip
        return row_of(replace(point, **changes), Measurement(seconds=(seconds,) * 7, calls=1, target_ratio=0.03))

    beside = {"num_processes": 2, "format": "bf16"}
    steps = [
        step("isolated", 0.01), step("isolated", 0.02, m=128), step("isolated", 0.9, m=256),
        step("concurrent", 0.03, **beside), step("ddp", 0.04, num_processes=2),
    ]  # fmt: skip
    found = calibrate([replace(records, rows=(*records.rows, *steps))])
    kept = {(check.num_processes, check.seconds) for check in found.checks}
    assert kept == {(1, 0.02), (2, 0.03)}
    assert [runfile.loads(check.run).precision.name for check in found.checks] == ["fp32", "bf16"]


def test_records_of_two_devices_are_not_mixed(records):
    other = replace(records, sidecar={**records.sidecar, "device": {"name": "another"}})
    with pytest.raises(InputError, match="another device: got 'another', allowed: a device"):
        calibrate([records, other])


@pytest.mark.parametrize(("key", "value"), [("type", 1), ("threads", 0), ("memory_bytes", "1")])
def test_a_damaged_device_of_the_records_is_refused(records, key, value):
    device = records.sidecar["device"]
    with pytest.raises(InputError, match=f"{key} must be"):
        calibrate([replace(records, sidecar={**records.sidecar, "device": device | {key: value}})])
    without = {name: value for name, value in device.items() if name != key}
    with pytest.raises(InputError, match=f"{key} is missing"):
        calibrate([replace(records, sidecar={**records.sidecar, "device": without})])


@pytest.mark.parametrize("family", [PointFamily.GEMM, PointFamily.MEMORY])
def test_what_a_calibration_cannot_do_without_is_said(records, family):
    rows = tuple(r for r in records.rows if r.point.family is not family)
    with pytest.raises(InputError, match=f"hold no {family} measurement") as caught:
        calibrate([replace(records, rows=rows)])
    assert f"--families {family}" in caught.value.hint


def test_failed_measurements_do_not_count(records, found):
    failed = tuple(
        replace(r, status=PointStatus.FAILED, seconds_median=0.0)
        for r in records.rows
        if r.point.family is PointFamily.ATTENTION
    )
    others = tuple(r for r in records.rows if r.point.family is not PointFamily.ATTENTION)
    without = calibrate([replace(records, rows=failed + others)])
    assert "attention_forward_ratio" not in without.parameters
    assert without.accelerator == found.accelerator


# --- the planner's side ---


def test_a_document_reads_back(found, file):
    again = load(file)
    assert again.accelerator == found.accelerator
    assert again.parameters == found.parameters
    assert set(again.corrections) == set(found.corrections)
    assert to_document(again) == to_document(found)


def test_here_becomes_a_cluster_the_planner_knows(tiny, file, found):
    run = runfile.load(tiny, overrides=[f"calibration={file}"])
    assert run.cluster is not None
    assert run.cluster.accelerator == found.accelerator
    estimate = estimate_plan(request_for(run), Plan(micro_batch=2))
    assert estimate.step.step.low < estimate.step.step.value < estimate.step.step.high
    assert estimate.step.step.tier.name == "INTERPOLATED"


def test_processes_have_equal_parts_of_a_cpu(tiny, file, found):
    keys = ("data_shard=2", "tensor=2")
    pinned = [f"parallel={{{', '.join(k.replace('=', ': ') for k in keys)}}}", f"calibration={file}"]
    cluster = runfile.load(tiny, overrides=["batch.micro=1", *pinned]).cluster
    assert cluster is not None
    assert cluster.num_devices == 4
    assert cluster.accelerator.memory_bytes == found.accelerator.memory_bytes // 4
    assert cluster.accelerator.peak_flops_per_s["bf16"] == found.accelerator.peak_flops_per_s["bf16"] / 4


def test_gpus_that_are_not_there_are_not_planned_for(found):
    gpu = replace(found, shares_host=False, num_devices=2)
    assert gpu.cluster(2).accelerator == found.accelerator
    with pytest.raises(InputError, match="fewer devices: got 4, allowed: <= 2"):
        gpu.cluster(4)


def test_a_calibration_is_for_its_own_device(tiny, file):
    with pytest.raises(InputError, match="calibration: is of another device: got 'a device', allowed: h100"):
        runfile.load(tiny, overrides=[f"calibration={file}", "cluster=h100-8x1"])


@pytest.mark.parametrize(
    "slowdown", [0.5, pytest.param(3.0, marks=pytest.mark.when_touched)]
)  # the other factor does the same
def test_a_slower_machine_has_a_longer_step(slowdown, machine, found, tmp_path, tiny, file):
    """Every rate and latency of the machine changed alike: so does what its kernels take of the step."""
    slow = replace(
        machine,
        flops_per_s=machine.flops_per_s / slowdown, copy_bytes_per_s=machine.copy_bytes_per_s / slowdown,
        launch_s=machine.launch_s * slowdown, message_s=machine.message_s * slowdown,
        message_bytes_per_s=machine.message_bytes_per_s / slowdown,
    )  # fmt: skip
    other = calibrate([read(slow.record(tmp_path / "slow"))])
    request = request_for(runfile.load(tiny, overrides=[f"calibration={file}"]))
    plan = Plan(micro_batch=2)
    steps = []
    for calibration in (found, other):
        asked = replace(request, cluster=calibration.cluster(), calibration=calibration.calibration())
        parts = estimate_plan(asked, plan).step.components_s
        steps.append(sum(parts.values()) - parts["fixed"])
    assert steps[1] / steps[0] == pytest.approx(slowdown, rel=0.15)


def test_the_next_measurement_is_one_that_the_step_needs_and_that_is_missing(tiny, file, found, tmp_path):
    run = runfile.load(tiny, overrides=[f"calibration={file}"])
    before = advise(run)
    gains = [c.gain for c in before.candidates]
    assert gains == sorted(gains, reverse=True)
    assert sum(c.step_share for c in before.candidates) < 1.05
    best = before.candidates[0]
    correction = found.corrections[best.kernel]
    x = np.log2([tuple(best.shape.values())])
    more = replace(
        correction,
        x=np.concatenate([correction.x, x]),
        y=np.append(correction.y, correction.predict(x).mean),
        noise=np.append(correction.noise, 0.02),
    )
    file.write_text(json.dumps(to_document(replace(found, corrections={**found.corrections, best.kernel: more}))))
    device_calibration._read.cache_clear()
    after = advise(run)
    same = next(c for c in after.candidates if (c.kernel, c.shape) == (best.kernel, best.shape))
    assert same.gain < 0.5 * best.gain


def test_without_corrections_the_calibration_is_written_and_no_measurement_ranked(
    tiny, recorded, tmp_path, monkeypatch, meshwright
):
    few = replace(calibrate([read(recorded())]), corrections={})
    monkeypatch.setattr("meshwright.cli.calibrate.calibrate", lambda files: few)
    out = tmp_path / "few.json"
    done = meshwright("calibrate", str(recorded()), "--out", str(out), "--for", str(tiny))
    assert done.exit_code == 0
    assert "none is ranked" in done.stderr
    assert load(out).corrections == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"device.json:1: not a JSON document"),
        ("[1]", r"not a calibration of a device: got 'list'"),
        ('{"schema": "meshwright device calibration 1"}', r"got 'meshwright device calibration 1'"),
        ('{"schema": "meshwright device calibration 4"}', r"'parameters' is missing"),
    ],
)
def test_a_foreign_calibration_is_refused(file, text, message):
    file.write_text(text)
    with pytest.raises(InputError, match=message):
        load(file)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("parameters", {"gemm_ratio": {"value": 1.5, "sd": 0.1}}, "'gemm_ratio' is out of range"),
        ("parameters", {"speed": {"value": 1.5, "sd": 0.1}}, "has no parameter 'speed'"),
        ("fabric", {}, "'name' is missing"),
    ],
)
def test_an_altered_calibration_is_refused(file, key, value, message):
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(InputError, match=message):
        load(file)


# --- the command ---


@pytest.fixture
def at_home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    return installed_path()


def test_from_records_to_a_plan(meshwright, recorded, tiny, tmp_path, at_home):
    refused = meshwright("plan", tiny)
    assert refused.exit_code == 2
    assert "meshwright calibrate" in refused.stderr
    out = tmp_path / "device.json"
    answer = meshwright("calibrate", recorded(), "--out", out, "--for", tiny, "--json").json
    assert answer["errors"]["gemm"]["num_points"] > 50
    assert answer["advice"]["candidates"][0]["kernel"].startswith(("gemm", "attention"))
    for verb in ("plan", "estimate", "explain"):
        assert meshwright(verb, tiny, "--calibration", out, "--json").exit_code == 0, verb
    assert not at_home.exists()


def test_a_calibration_needs_records(meshwright):
    outcome = meshwright("calibrate")
    assert outcome.exit_code == 2
    assert "nothing to calibrate from" in outcome.stderr


def test_a_calibration_of_a_catalogued_device_is_not_installed(meshwright, recorded, tmp_path, at_home, monkeypatch):
    found = calibrate([read(recorded())])
    device = {**found.details["device"], "accelerator": "h100"}
    catalogued = replace(found, details={**found.details, "device": device})
    monkeypatch.setattr("meshwright.cli.calibrate.calibrate", lambda files: catalogued)
    outcome = meshwright("calibrate", recorded(), "--out", tmp_path / "c.json", "--install")
    assert outcome.exit_code == 2
    assert "the catalogue lacks" in outcome.stderr
    assert not at_home.exists()


def test_an_installed_calibration_is_found(meshwright, recorded, tiny, tmp_path, at_home):
    shown = meshwright("calibrate", recorded(), "--out", tmp_path / "c.json", "--install")
    assert shown.exit_code == 0, shown.stderr
    assert "leave-one-out error" in shown.stdout
    assert at_home.exists()
    step = meshwright("estimate", tiny, "--json").json
    assert step["sources"]["calibration"].count("measured")
    assert "a device" in step["sources"]["calibration"]


@pytest.mark.when_touched  # test_from_records_to_a_plan fits the records
def test_a_plan_is_pinned_with_its_calibration(meshwright, recorded, tiny, tmp_path, at_home):
    meshwright("calibrate", recorded(), "--out", tmp_path / "c.json")
    pinned = tmp_path / "pinned.yaml"
    done = meshwright("plan", tiny, "--calibration", tmp_path / "c.json", "--write", pinned, "--json")
    assert done.exit_code == 0, done.stderr
    assert meshwright("estimate", pinned, "--json").exit_code == 0


@pytest.mark.when_touched  # tests/test_project.py plans without it
def test_planning_from_records_imports_no_torch(recorded, tiny, tmp_path):
    code = (
        "import sys; from meshwright.cli.main import run;"
        "a = run(['calibrate', sys.argv[1], '--out', 'c.json', '--json']);"
        "b = run(['estimate', sys.argv[2], '--calibration', 'c.json', '--json']);"
        "sys.exit(a or b or 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(recorded()), str(tiny)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_training_is_held_against_the_calibration_that_it_names(meshwright, tiny, file):
    pytest.importorskip("torch")
    expected = meshwright("estimate", tiny, "--calibration", file, "--set", "parallel={data_shard: 1}", "--json")
    shown = meshwright("train", tiny, "--calibration", file, "--dry-run", "--json")
    assert shown.exit_code == 0, shown.stderr
    step = shown.json["predicted"]["step"]
    assert step["value"] == pytest.approx(expected.json["estimate"]["step"]["value"], rel=0.01)


def test_one_machine_does_not_scale(meshwright, tiny, file):
    one = meshwright("scale", tiny, "--calibration", file, "--devices", "1", "--json")
    assert one.exit_code == 0, one.stderr
    outcome = meshwright("scale", tiny, "--calibration", file, "--devices", "2")
    assert outcome.exit_code == 2
    assert "one machine was measured" in outcome.stderr


def test_points_lie_where_the_cost_model_asks():
    shape = {"sequences": 2, "heads": 4, "kv_heads": 2, "seq_len": 256, "head_dim": 64}
    point = Point(family=PointFamily.ATTENTION, kernel="forward", format="bf16", **shape)
    assert coordinates(point) == (3, 8, 6)
    assert correction_name(point) == "attention/forward/bf16"
