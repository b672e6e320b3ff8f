"""Records of every kind, read back from their folders."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.records import trainings
from meshwright.records.files import csv_line


def write_sweep(folder: Path) -> Path:
    """A sweep of one configuration with three runs, as `bench train` leaves it."""
    folder.mkdir(parents=True)
    row = dict.fromkeys(trainings.TABLE.header, "")
    row |= {
        "configuration": "run.yaml", "engine": "native", "status": "ok", "started": "2026-01-02T03:04:05+00:00",
        "wall_s": "9", "model": "tiny", "precision": "bf16", "plan": "DP1", "num_devices": "1", "threads": "1",
        "sequence_length": "16", "global_batch": "4", "micro_batch": "2", "steps": "4", "step_s_low": "0.9",
        "step_s_high": "1.2", "tokens_per_s_per_device": "64", "mfu": "0.1", "mfu_convention": "dense",
        "peak_memory_bytes": "1000", "first_loss": "4", "last_loss": "3",
    }  # fmt: skip
    lines = [csv_line(trainings.TABLE.header)]
    for run, step_s in enumerate(("1", "1.1", "1.05"), start=1):
        lines.append(csv_line([{**row, "run": str(run), "step_s_median": step_s}[c] for c in trainings.TABLE.header]))
    sidecar = dict.fromkeys(trainings.SIDECAR_KEYS) | {
        "schema": trainings.SCHEMA, "device": {"name": "a device", "memory_bytes": 2**34}, "software": {},
        "command": [], "started": "2026-01-02T03:04:05+00:00", "steps": 4, "warmup": 1, "configurations": {},
    }  # fmt: skip
    (folder / trainings.CSV_NAME).write_text("".join(lines))
    (folder / trainings.SIDECAR_NAME).write_text(json.dumps(sidecar))
    return folder


def test_a_training(tmp_path, write_training):
    done = mw.read_record(write_training(tmp_path / "night"))
    assert isinstance(done, mw.TrainingRun)
    assert done.to_dict() == json.loads((tmp_path / "night" / "record.json").read_text())
    assert list(done.to_frame()["loss"]) == [10.5, 9.5, 8.5, 7.5]
    said = "4 steps, loss 11.500 to 6.250, 7.000 s a step, 9,362 tokens/s/device"
    assert str(done) == f"llama3.1-8b, DP8 fsdp mbs1: {said}"
    html = done._repr_html_()
    assert "<svg" in html
    assert "6.800 s" in html  # predicted
    step = done.measured_quantities()[0]
    assert (step.name, step.measured, step.is_inside) == ("step time", 7.0, True)


def test_measurements_of_a_device(recorded):
    found = mw.read_record(recorded())
    assert isinstance(found, mw.DeviceMeasurements)
    frame = found.to_frame()
    assert len(frame) == len(found.records.rows)
    assert set(frame["family"]) >= {"gemm", "attention"}
    assert (frame["seconds_low"] <= frame["seconds_high"]).all()
    assert found.to_dict()["device"]["name"] == "a device"
    assert len(found.to_dict()["measurements"]) == len(frame)
    assert "a device" in str(found)
    assert "<table>" in found._repr_html_()


def test_a_sweep_of_trainings(tmp_path):
    found = mw.read_record(write_sweep(tmp_path / "sweep"))
    assert isinstance(found, mw.TrainingSweep)
    assert len(found.to_frame()) == 3
    assert found.summaries[0].step_s.value == 1.05
    assert found.to_dict()["configurations"][0]["num_runs"] == 3
    assert str(found) == "a device: 1 of 1 configurations measured; fastest run.yaml: 60.95 tokens/s/device"
    assert "<svg" in found._repr_html_()


def test_every_record_below_a_folder(tmp_path, write_training, recorded):
    write_training(tmp_path / "a" / "night")
    write_training(tmp_path / "b")
    write_sweep(tmp_path / "c" / "sweep")
    (tmp_path / "d").symlink_to(recorded(), target_is_directory=True)
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "record.json").write_text("{")
    found = mw.read_records(tmp_path)
    assert [type(r).__name__ for r in found] == ["TrainingRun", "TrainingRun", "TrainingSweep"]
    assert len(found.trainings) == 2
    assert len(found.sweeps) == 1
    assert [path.parent.name for path, reason in found.unreadable] == ["e"]
    assert "2 TrainingRun, 1 TrainingSweep" in str(found)
    frame = found.to_frame()
    assert list(frame["kind"]) == ["TrainingRun", "TrainingRun", "TrainingSweep"]
    assert found[0].folder == tmp_path / "a" / "night"
    assert found.to_dict()["unreadable"][0]["path"].endswith("record.json")
    assert "Not readable" in found._repr_html_()


def test_a_folder_without_records_is_empty(tmp_path):
    assert len(mw.read_records(tmp_path)) == 0
    assert "no record" in str(mw.read_records(tmp_path))
    assert mw.read_records(tmp_path).to_rows() == []


@pytest.mark.when_touched  # tests/test_project.py plans without it
def test_reading_loads_no_tensor_framework(tmp_path, write_training):
    write_training(tmp_path)
    read = f"mw.read_records({str(tmp_path)!r})[0].to_dict()"
    code = f"import sys, meshwright as mw; {read}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("name", ["steps.jsonl", "run.yaml"])
def test_a_training_that_lacks_a_file_is_an_error(tmp_path, write_training, name):
    (write_training(tmp_path) / name).unlink()
    with pytest.raises(mw.InputError, match="no whole training"):
        mw.read_record(tmp_path)


WRONG = (None, [], "x", {}, -1)


def _displays(found):
    for result in (found, *found):
        result.to_rows(), result.to_dict(), result.summary(), result._repr_html_()


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
@pytest.mark.parametrize("key", ["run", "device", "statistics", "ending", "started", "predicted"])
def test_a_record_with_a_wrong_value_is_refused_or_shown(tmp_path, write_training, key, wrong):
    write_training(tmp_path / "run")
    path = tmp_path / "run" / "record.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: wrong}))
    found = mw.read_records(tmp_path)
    assert len(found) + len(found.unreadable) == 1
    assert bool(found.unreadable) == (not isinstance(wrong, str) if key in ("ending", "started") else True) or (
        key == "predicted" and wrong in (None, {})
    )
    assert all(key in reason for _, reason in found.unreadable)
    _displays(found)


@pytest.mark.parametrize("text", ["null", "3", "[]", '"x"', "", "[" * 100_000], ids=lambda text: text[:4])
def test_a_record_that_is_no_mapping_is_refused(tmp_path, write_training, text):
    write_training(tmp_path / "run")
    (tmp_path / "run" / "record.json").write_text(text)
    found = mw.read_records(tmp_path)
    assert len(found.unreadable) == 1
    _displays(found)


@pytest.mark.parametrize("line", ["null", "3", "[]", '"x"', "{}", '{"step": "x"}'])
def test_a_line_that_is_no_step_is_refused_with_its_number(tmp_path, write_training, line):
    write_training(tmp_path / "run")
    path = tmp_path / "run" / "steps.jsonl"
    path.write_text(path.read_text() + line + "\n")
    number = len(path.read_text().splitlines())
    with pytest.raises(mw.InputError, match=rf"steps\.jsonl:{number}: (it|step) "):
        mw.read_record(tmp_path / "run")


@pytest.mark.parametrize("wrong", ["x", 3, []], ids=repr)
def test_a_device_that_is_no_mapping_is_refused(tmp_path, wrong):
    path = write_sweep(tmp_path / "sweep") / trainings.SIDECAR_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | {"device": wrong}))
    ((where, reason),) = mw.read_records(tmp_path).unreadable
    assert where.name == trainings.CSV_NAME
    assert "device" in reason
