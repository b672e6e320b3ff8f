"""The first training on a device times the routes of its kernels, keeps the fastest, and says what it chose."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
from tests.processors import without_amx
from tests.tiny_runs import tiny_run

from meshwright.engines.base import Measuring, TrainOptions
from meshwright.engines.native import engine, route_timing
from meshwright.engines.native.route_timing import measured_routes
from meshwright.kernels import architectures
from meshwright.kernels.attention import operation
from meshwright.kernels.dispatch import KernelRouting
from meshwright.specs.plan import Plan

CPU = torch.device("cpu")
SMALL = ("model.num_layers=1", "batch={global_sequences: 4, micro: 2}", "train.steps=2")
SLOW_S = 0.2


def choose(*changes, measuring=Measuring.ONCE):
    run = tiny_run("kernels.measure='on'", *SMALL, *changes)
    return measured_routes(run, plan=Plan(micro_batch=2), device=CPU, measuring=measuring, routing=KernelRouting())


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    without_amx(monkeypatch)  # for attention's own blocks
    monkeypatch.setattr(route_timing, "BUDGET_S", 60.0)


@pytest.fixture
def attention(monkeypatch):
    """Replace a route of attention: `attention(name, change)`."""

    def change(name, function):
        own = operation.ROUTES["attention"][name]
        monkeypatch.setitem(
            operation.ROUTES["attention"], name, replace(own, function=lambda *a, **k: function(own.function(*a, **k)))
        )

    return change


def slow(out):
    time.sleep(SLOW_S)
    return out


@pytest.mark.parametrize(("slower", "fastest"), [("blockwise", "sdpa"), ("sdpa", "blockwise")])
def test_the_faster_route_is_chosen(slower, fastest, attention, own_cache):
    attention(slower, slow)
    found = choose()
    assert found.routes["attention"] == fastest
    assert f"attention {fastest} (times over blockwise's: sdpa " in found.notes[0]
    assert "kernels: measured on this device at 20" in found.notes[0]


def test_what_was_measured_is_kept_for_the_device_and_the_shapes(attention, own_cache, monkeypatch):
    attention("blockwise", slow)
    first = choose()
    (path,) = (own_cache / route_timing.FOLDER).iterdir()
    of = json.loads(path.read_text())["of"]
    assert {"device", "software", "model", "micro_batch"} <= of.keys()
    monkeypatch.setattr(route_timing, "_measure", lambda *_, **__: pytest.fail("measured twice"))
    assert choose() == first
    assert choose("train.steps=9", measuring=Measuring.NEVER) == first
    with pytest.raises(pytest.fail.Exception):
        choose("model.hidden=64")
    with pytest.raises(pytest.fail.Exception):
        choose(measuring=Measuring.AGAIN)
    path.write_text("{")
    with pytest.raises(pytest.fail.Exception):
        choose()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda out: out * 3.0, "loss and gradient norm"),
        (lambda out: out * torch.nan, "where the default has"),
        (lambda out: out.no_such_attribute, "AttributeError"),
    ],
    ids=["wrong", "NaN", "fails"],
)
def test_a_route_that_is_fast_and_wrong_is_not_chosen(change, words, attention, own_cache):
    attention("blockwise", slow)
    attention("sdpa", change)
    found = choose()
    assert found.routes.get("attention", "blockwise") == "blockwise"
    assert "kernels: not measured: attention sdpa: " in found.notes[-1]
    assert words in found.notes[-1]


def test_without_time_the_default_stays_and_nothing_is_kept(own_cache, monkeypatch):
    monkeypatch.setattr(route_timing, "BUDGET_S", 0.0)
    found = choose()
    assert found.routes == {}
    assert "attention: no time was left" in found.notes[-1]
    assert not (own_cache / route_timing.FOLDER).exists()


@pytest.mark.parametrize(
    "changes",
    [("kernels.measure='off'",), ("kernels.measure=auto",), ("kernels.tuned=t.json",), ("precision=fp8",),
     ("kernels.routes={attention: blockwise, adamw: fused, linear_cross_entropy: cached}",)],
    ids=["off", "measured defaults", "tuned", "emulated", "named"],
)  # fmt: skip
def test_nothing_is_measured_where_nothing_is_open(changes, own_cache):
    assert choose(*changes).routes == {}
    assert choose(*changes).notes == ()


def test_compiled_layers_and_no_measure_say_why_nothing_was_measured(own_cache):
    assert choose("train.compile=true").notes == ("kernels: not measured, as layers are compiled",)
    (note,) = choose(measuring=Measuring.NEVER).notes
    assert "--no-measure" in note


def test_on_an_architecture_that_was_not_measured_a_training_measures_by_itself(own_cache, monkeypatch):
    table = architectures._defaults()["cpu"] | {"basis": "predicted", "attention": ["blockwise", "sdpa"]}
    monkeypatch.setattr(architectures, "_defaults", lambda: {"cpu": table})
    assert "attention" in choose("kernels.measure=auto").routes


@pytest.mark.usefixtures("without_measuring")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_training_takes_the_measured_routes_and_its_record_says_so(processes, tmp_path, own_cache):
    run = tiny_run("kernels.measure='on'", *SMALL, f"parallel={{data_shard: {processes}}}")
    records = [engine.train(run, options=TrainOptions(folder=tmp_path / name, quiet=True)) for name in ("one", "two")]
    for record in records:
        rows = {row["op"]: row for row in record.kernels}
        assert rows["attention"]["why"] == "measured"
        assert rows["rms_norm"]["why"] == "default"
        assert any(note.startswith("kernels: measured on this device") for note in record.notes)
    first, second = ({row["op"]: row["route"] for row in record.kernels} for record in records)
    assert first == second
