"""A device is measured within its time, goes on where it stopped, and faults cost no more than their point."""

from __future__ import annotations

import csv
import os
import re
import signal
import time
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.warm import WarmProcess

import meshwright as mw
from meshwright.bench import device as campaign
from meshwright.bench.device import DeviceBenchRequest, DeviceLostError, measure_device, sidecar_of
from meshwright.bench.kernels import KernelTask, task_of
from meshwright.cli import main
from meshwright.errors import InputError
from meshwright.records.device import COLUMNS, SIDECAR_KEYS, DeviceRecorder, PointStatus, read
from meshwright.records.points import Point, PointFamily, points_of

CPU = torch.device("cpu")
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "bench-records.md"
SECONDS = 0.3


def ask(*families: PointFamily, budget_s: float = SECONDS, threads: tuple[int, ...] = ()) -> DeviceBenchRequest:
    """Of one process."""
    return DeviceBenchRequest(
        families=families, budget_s=budget_s, num_processes=(1,), threads=threads, command=("a", "test")
    )


def recorder(folder: Path, request: DeviceBenchRequest, *, resume: bool = False) -> DeviceRecorder:
    return DeviceRecorder(folder, sidecar=sidecar_of(CPU, request), resume=resume)


def run(folder: Path, *families: PointFamily, resume: bool = False, **changes: Any):
    request = ask(*families, **changes)
    out = recorder(folder, request, resume=resume)
    return measure_device(request, device=CPU, recorder=out), read(folder)


def test_a_budget_that_others_spent_leaves_no_family_without_a_point(tmp_path):
    _, records = run(tmp_path, PointFamily.GEMM, PointFamily.MEMORY, budget_s=0.0)
    assert {row.point.family for row in records.measured} == {PointFamily.GEMM, PointFamily.MEMORY}


def test_a_busy_machine_is_said_where_it_is_measured_and_where_its_records_are_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(campaign, "busy_now", lambda: "other programs used 60 % of its processors' time")
    outcome, _ = run(tmp_path, PointFamily.GEMM, budget_s=0.0)
    assert "this machine was busy: other programs used 60 %" in outcome.notes[-1]
    assert main.run(["calibrate", str(tmp_path), "--out", str(tmp_path / "here.json")]) == 2  # one GEMM alone
    assert "records.csv: this machine was busy: other programs used 60 %" in capsys.readouterr().err
    monkeypatch.setattr(campaign, "busy_now", lambda: None)
    outcome, _ = run(tmp_path, PointFamily.GEMM, budget_s=0.0, resume=True)
    assert not any("busy" in note for note in outcome.notes)


APART = (PointFamily.TRAINING, PointFamily.COLLECTIVES)  # in processes of their own


@pytest.mark.when_touched  # test_steps.py takes every point in this process
@pytest.mark.distributed
def test_whole_steps_are_measured_in_a_process_of_its_own(tmp_path, monkeypatch, warm_ranks):
    """One point, and a budget that no start under load uses up."""
    monkeypatch.setattr(campaign, "points_of", lambda *a, **k: islice(points_of(*a, **k), 1))
    outcome, records = run(tmp_path, PointFamily.TRAINING, budget_s=90.0)
    assert outcome.counts[PointFamily.TRAINING][PointStatus.FAILED] == 0
    assert {row.point.kernel for row in records.measured} == {"isolated"}


@pytest.mark.parametrize("family", [f for f in PointFamily if f not in (PointFamily.TRANSFER, *APART)])
def test_every_family_is_measured(family, tmp_path):
    outcome, records = run(tmp_path, family)
    assert outcome.counts[family][PointStatus.FAILED] == 0
    assert {row.point.family for row in records.measured} == {family}
    assert all(0 < r.seconds_low <= r.seconds_median <= r.seconds_high < 5 for r in records.measured)
    assert records.sidecar["device"]["threads"] == torch.get_num_threads()


@pytest.mark.parametrize("family", [PointFamily.TRANSFER, PointFamily.COLLECTIVES])
def test_what_one_cpu_process_has_not_got_is_said(family, tmp_path):
    outcome, records = run(tmp_path, family)
    assert records.rows == ()
    assert any(note.startswith(family) for note in outcome.notes)


def test_kernels_are_measured_with_fewer_threads_too(tmp_path, monkeypatch):
    """Each point with all threads and with those asked for; afterwards the processor has all of them again."""
    had, before = [], torch.get_num_threads()

    def task(point: Point, device: torch.device) -> KernelTask:
        had.append((point.threads, torch.get_num_threads()))
        return task_of(point, device)

    monkeypatch.setattr(campaign, "task_of", task)
    monkeypatch.setattr(campaign, "points_of", lambda *args, **kw: islice(points_of(*args, **kw), 1))
    _, records = run(tmp_path, PointFamily.OPTIMIZER, threads=(before + 1,), budget_s=90.0)  # no load uses it up
    points = [row.point for row in records.measured]
    assert len(points) == 2
    assert {p.threads for p in points} == {0, before + 1}
    assert points[1] == replace(points[0], threads=before + 1)
    assert set(had) == {(0, before), (before + 1, before + 1)}
    assert torch.get_num_threads() == before


def test_gemms_of_the_three_layouts_are_those_of_a_linear_layer():
    shapes = {}
    for point in list(points_of(PointFamily.GEMM, device_type="cpu", formats=["fp32"]))[3:6]:
        shapes[point.kernel] = tuple(task_of(point, CPU).run().shape)
        assert shapes[point.kernel] == (point.m, point.n)
    rows, outputs = shapes["forward"]
    assert shapes["weight_gradient"][0] == outputs
    assert shapes["input_gradient"][0] == rows


def test_going_on_repeats_nothing(tmp_path):
    _, first = run(tmp_path, PointFamily.GEMM)
    assert first.measured
    _, second = run(tmp_path, PointFamily.GEMM, resume=True)
    points = Counter(row.point for row in second.rows)
    assert len(second.measured) > len(first.measured)
    assert set(points.values()) == {1}
    assert second.rows[: len(first.rows)] == first.rows


def broken(error: Exception, *, at: int):
    """`task_of` whose task number `at` raises."""
    num_made = 0

    def make(point: Point, device: torch.device) -> KernelTask:
        nonlocal num_made
        num_made += 1
        if num_made != at:
            return task_of(point, device)

        def run() -> None:
            raise error

        return KernelTask(run=run)

    return make


def test_a_point_that_fails_costs_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(campaign, "task_of", broken(RuntimeError("no such kernel\nand more"), at=2))
    monkeypatch.setattr(campaign, "points_of", lambda *args, **kw: islice(points_of(*args, **kw), 4))
    outcome, records = run(tmp_path, PointFamily.GEMM, budget_s=90.0)  # no load uses it up
    assert outcome.counts[PointFamily.GEMM][PointStatus.FAILED] == 1
    assert [(i, r.reason) for i, r in enumerate(records.rows) if r.reason] == [(1, "no such kernel")]
    assert len(records.measured) == 3


def test_a_lost_device_ends_it_and_keeps_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(campaign, "task_of", broken(RuntimeError("unspecified launch failure"), at=3))
    monkeypatch.setattr(campaign, "_answers", lambda device: False)
    with pytest.raises(DeviceLostError, match="unspecified launch failure") as caught:
        run(tmp_path, PointFamily.GEMM, PointFamily.LAUNCH)
    assert caught.value.exit_code == 1
    records = read(tmp_path)
    assert [row.status is PointStatus.FAILED for row in records.rows] == [False, False, True]
    assert records.sidecar["ended"] is not None


def test_an_absurd_clock_is_a_failed_point(tmp_path, monkeypatch):
    real = campaign.measure
    monkeypatch.setattr(campaign, "measure", lambda *a, **k: real(*a, **k, clock=lambda: 7.0))
    outcome, records = run(tmp_path, PointFamily.LAUNCH)
    assert outcome.counts[PointFamily.LAUNCH][PointStatus.FAILED] == 1
    assert "the clock stood still" in records.rows[0].reason


def test_an_interruption_keeps_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(campaign, "task_of", broken(KeyboardInterrupt(), at=3))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, PointFamily.GEMM)
    records = read(tmp_path)
    assert [row.status is PointStatus.FAILED for row in records.rows] == [False, False]
    _, more = run(tmp_path, PointFamily.GEMM, resume=True)
    assert more.rows[:2] == records.rows


@pytest.mark.when_touched  # test_an_interruption_keeps_what_was_measured is the interruption of one process
@pytest.mark.distributed
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_collectives_between_two_processes_and_a_signal(tmp_path, signum):
    """As a user starts it: every collective is measured, then Ctrl-C or SIGTERM ends it and keeps the records."""
    words = ["bench", "device", "--families", "collectives", "--budget", "1h", "--processes", "2", "--out", "out"]
    process = WarmProcess(words, folder=tmp_path, environment=os.environ | {"OMP_NUM_THREADS": "1"})
    path, deadline_s = tmp_path / "out" / "records.csv", time.monotonic() + 120
    while time.monotonic() < deadline_s and (not path.exists() or path.read_text().count("\n") < 7):
        time.sleep(0.1)
    os.killpg(process.pid, signum)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 128 + signum, stderr
    assert re.search(r"out/records.csv has \d+ of the measurements; continue with --resume", stderr)
    assert len({row.point.kernel for row in read(path).measured}) == 5


def test_the_page_explains_every_column_and_key(tmp_path):
    _, records = run(tmp_path, PointFamily.LAUNCH)
    with records.path.open() as stream:
        assert tuple(next(csv.reader(stream))) == COLUMNS
    text = PAGE.read_text(encoding="utf-8")
    columns, keys = text.split("## records.csv\n")[1].split("## records.json\n")

    def explained(section: str) -> set[str]:
        cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
        return {name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)}

    assert explained(columns) == set(COLUMNS)
    found = set(records.sidecar) | {f"device.{key}" for key in records.sidecar["device"]}
    assert set(SIDECAR_KEYS) <= found
    assert explained(keys) == found


def test_windows_are_spread_between_the_families():
    def row(name: str, count: int) -> list[campaign._Part]:
        return [campaign._Part(share=1.0, measure=lambda: name)] * count

    found = campaign._spread(row("kernels", 4), row("isolated", 3), row("pair", 2))
    assert " ".join(part.measure() for part in found) == (
        "kernels isolated pair kernels isolated kernels pair isolated kernels"
    )


def test_the_python_function_returns_the_measurements(tmp_path):
    done = mw.bench_device(families=["launch"], budget=SECONDS, out=tmp_path / "out")
    assert {row["family"] for row in done.to_rows()} == {"launch"}
    assert done.records.sidecar["command"] == ["meshwright.bench_device"]
    refused: list[tuple[dict[str, Any], str]] = [
        ({"budget": "soon"}, "is not a time"),
        ({"families": ["gem"]}, "unknown family"),
        ({"overrides": {"precision": "fp8"}}, "none is given"),
        ({"run": "tiny-llama-cpu", "model": "llama3.1-8b"}, "both given"),
        ({"num_processes": [0]}, "num_processes"),
    ]
    for wrong, words in refused:
        with pytest.raises(InputError, match=words):
            mw.bench_device(**wrong, out=tmp_path / "other")
