"""A measurement of this machine is short, kept, reused for the same shapes only, and not kept from a busy machine."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace

import pytest

torch = pytest.importorskip("torch")

from tests.every_member import check_every
from tests.tiny_runs import tiny_run

from meshwright.engines.base import Measuring, measuring_of
from meshwright.engines.native import layer_timing, machine_measurement
from meshwright.engines.native.expectation import measure_expectation
from meshwright.engines.native.machine_measurement import measure_machine
from meshwright.fitting.kernel_times import KernelTimes
from meshwright.specs.plan import Plan
from meshwright.training.device import FORMATS, Rates
from meshwright.training.host_load import HostLoad
from meshwright.units import format_seconds

CPU = torch.device("cpu")
IDLE = HostLoad(others_ratio=0.01, stolen_ratio=0.0)
BUSY = HostLoad(others_ratio=0.6, stolen_ratio=0.0)


@pytest.fixture
def load(monkeypatch):
    """The load that is found while something is measured: the machine of the tests may be busy."""
    found = [IDLE]
    monkeypatch.setattr(machine_measurement, "load_between", lambda *_, **__: found[-1])
    monkeypatch.setattr(machine_measurement, "BUDGET_S", 60.0)
    monkeypatch.setattr(machine_measurement, "LONG_BUDGET_S", 60.0)
    monkeypatch.setattr(machine_measurement, "WATCH_S", 0.0)
    monkeypatch.setattr(machine_measurement, "DISTURBED", 1e9)
    monkeypatch.setattr(layer_timing, "REPETITIONS", 1)
    rates = Rates(matmul_flops_per_s=dict.fromkeys(FORMATS, 1e11), copy_bytes_per_s=1e10)
    monkeypatch.setattr("meshwright.training.device.measure_rates", lambda *_, **__: rates)
    return found


@pytest.fixture
def measured(monkeypatch, load, own_cache):
    """Runs whose layer was timed: each in other times than the one before, which no layer was built for."""
    runs = []

    def measure(run, *, micro_batch, **options) -> KernelTimes:
        runs.append(run)
        return KernelTimes(
            micro_batch=micro_batch, linear_s=1e-3, attention_forward_s=2e-4, attention_backward_s=3e-4,
            experts_s=None, layer_s=2e-3 + 1e-4 * len(runs), rest_s=1e-3, update_s=5e-4, update_layers=1, sd=0.02,
            on_host=True,
        )  # fmt: skip

    monkeypatch.setattr(machine_measurement, "measure_kernels", measure)
    return runs


def expect(run, measuring=Measuring.ONCE, *, micro=2):
    return measure_expectation(run, plan=Plan(micro_batch=micro), device=CPU, measuring=measuring)


def measure(run, *, micro=2):
    """Measure alone, without fitting a calibration to the times, which costs more than all the rest."""
    return measure_machine(
        run, plan=Plan(micro_batch=micro), device=CPU, measuring=Measuring.ONCE, needs_collective=False
    )


def test_the_second_training_reuses_what_the_first_measured(measured):
    first, second = expect(tiny_run()), expect(tiny_run("train.steps=7", "optimizer.learning_rate=1.0"))
    assert len(measured) == 1
    assert second.predicted["components_s"] == first.predicted["components_s"]
    assert second.notes == first.notes
    assert "was timed on this machine at 20" in second.notes[-1]


def test_other_shapes_are_measured_anew(measured):
    measure(tiny_run())

    def check(change):
        before = len(measured)
        measure(tiny_run())
        assert len(measured) == before
        measure(tiny_run(change))
        assert len(measured) == before + 1

    changes = "model.hidden=64", "data.sequence_length=32", "precision=bf16", "optimizer.states=bf16"
    check_every([*changes, "model.vocab=65"], check)


def test_depth_needs_no_new_measurement_and_a_micro_batch_does(measured):
    measure(tiny_run())
    deep = expect(tiny_run("model.num_layers=8"))
    assert len(measured) == 1
    assert deep.predicted is not None
    measure(tiny_run(), micro=4)
    assert len(measured) == 2


def test_measuring_again_replaces_what_is_kept(measured):
    expect(tiny_run())
    again = expect(tiny_run(), Measuring.AGAIN)
    assert len(measured) == 2
    assert expect(tiny_run()).predicted["step"] == again.predicted["step"]


def test_nothing_is_measured_when_that_is_asked_for(measured):
    found = expect(tiny_run(), Measuring.NEVER)
    assert found.predicted is None
    assert not measured
    assert found.yardstick.mfu(1.0) is None
    assert found.notes == ("this machine was not measured (--no-measure)", "nothing was predicted")
    assert found.lines() == ["MFU: unknown: this device's peak was not measured"]


def test_what_is_kept_serves_where_nothing_may_be_measured(measured):
    first = expect(tiny_run())
    assert expect(tiny_run(), Measuring.NEVER).predicted["step"] == first.predicted["step"]
    assert len(measured) == 1


def test_a_busy_machine_is_named_and_not_kept(measured, load, own_cache):
    load.append(BUSY)
    found = expect(tiny_run())
    assert any("this machine is busy" in note and "60 %" in note for note in found.notes)
    assert not list(own_cache.rglob("*.json"))
    load.append(IDLE)
    assert not any("busy" in note for note in expect(tiny_run()).notes)
    assert len(measured) == 2


def test_under_a_load_the_prediction_is_of_what_was_measured_with_a_wider_interval(measured, load, monkeypatch):
    """Others use 60 % of the processor of one thread: idle, a step would take 40 % of the time."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    idle = expect(tiny_run(), Measuring.AGAIN).predicted["step"]
    load.append(BUSY)
    found = expect(tiny_run(), Measuring.AGAIN)
    step = found.predicted["step"]
    assert step["value"] == pytest.approx(idle["value"], rel=0.1)  # the times that were given
    assert idle["high"] / idle["low"] < step["high"] / step["low"] < 3
    (caution,) = found.cautions
    assert f"idle, a step would take about {format_seconds(step['value'] / 2.5)}" in caution
    assert f"note: {caution}" in found.lines()
    assert "may exceed 100 %" in caution


def test_what_was_kept_of_an_idle_machine_is_not_used_on_a_busy_one(measured, load):
    first = expect(tiny_run())
    load.append(BUSY)
    assert expect(tiny_run()).cautions
    assert expect(tiny_run(), Measuring.NEVER).predicted["step"] == first.predicted["step"]
    load.append(IDLE)
    assert expect(tiny_run()).predicted["step"] == first.predicted["step"]
    assert len(measured) == 2


def test_where_nothing_was_timed_a_range_says_that_it_is_of_other_machines(measured, load, monkeypatch):
    """It begins at a step at the GEMM rate of this machine, and under a load ends later."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(machine_measurement, "measure_kernels", lambda *_, **__: None)
    idle = expect(tiny_run(), Measuring.AGAIN)
    assert "is not of this machine" in idle.lines()[1]
    assert idle.lines()[0].startswith("expected: between ")
    step = idle.predicted["step"]
    assert idle.yardstick.mfu(step["low"]) >= 1 - 1e-9
    load.append(BUSY)
    busy = expect(tiny_run(), Measuring.AGAIN)
    assert busy.predicted["step"] == step | {"high": pytest.approx(2.5 * step["high"])}
    assert any("2.5 times as long" in note for note in busy.cautions)


def test_rates_under_a_load_are_the_best_of_two_measurements(measured, load, monkeypatch):
    load.append(BUSY)
    rates = iter([(1e11, 9e9), (7e10, 1e10)])

    def measure(*_, **__):
        flops, copy = next(rates)
        return Rates(matmul_flops_per_s=dict.fromkeys(FORMATS, flops), copy_bytes_per_s=copy)

    monkeypatch.setattr("meshwright.training.device.measure_rates", measure)
    found = measure_machine(
        tiny_run(), plan=Plan(micro_batch=2), device=CPU, measuring=Measuring.ONCE, needs_collective=False
    )
    assert found.rates == Rates(matmul_flops_per_s=dict.fromkeys(FORMATS, 1e11), copy_bytes_per_s=1e10)


def test_a_damaged_file_is_measured_again(measured, own_cache):
    measure(tiny_run())
    (kept,) = own_cache.rglob("*.json")

    def check(text):
        before = len(measured)
        kept.write_text(text)
        measure(tiny_run())
        assert len(measured) == before + 1
        assert json.loads(kept.read_text())["of"]["sequence_length"] == 16

    check_every(["", "{", "[]", '{"measured": {"rates": {"x": 1}}}', '{"measured": 3}', "\x00"], check, name=repr)


def test_a_cache_that_cannot_be_written_costs_a_measurement_only(measured, own_cache):
    own_cache.write_text("a file")
    assert expect(tiny_run()).predicted is not None


def test_repetitions_that_differ_show_a_busy_machine_and_their_mean_counts(monkeypatch, load, own_cache):
    """Every other pass waits, as when another program has the processor."""
    monkeypatch.setattr(machine_measurement, "DISTURBED", 1.2)
    monkeypatch.setattr(layer_timing, "REPETITIONS", 5)
    calls = iter(range(1000))

    def disturbed(task):
        return lambda: (time.sleep(0.15 * (next(calls) % 4 == 0)), task())

    passes = layer_timing.passes_of
    monkeypatch.setattr(layer_timing, "passes_of", lambda *a: disturbed(passes(*a)))
    found = measure_machine(
        tiny_run(), plan=Plan(micro_batch=2), device=CPU, measuring=Measuring.ONCE, needs_collective=False
    )
    assert found.times is not None
    assert found.times.slowdown > 1.2
    assert f"took {found.times.slowdown:.1f} times as long as the fastest" in found.notes[0]
    assert not list(own_cache.rglob("*.json"))


def test_functions_that_take_long_end_the_measuring(monkeypatch, load, own_cache):
    """Each timed function takes as long as on a machine with a hundred other programs."""
    monkeypatch.setattr(machine_measurement, "BUDGET_S", 0.5)
    run = layer_timing.again

    def slow(function):
        task = run(function)
        return replace(task, before=lambda: time.sleep(0.2))

    monkeypatch.setattr(layer_timing, "again", slow)
    start_s = time.perf_counter()
    found = measure_machine(
        tiny_run(), plan=Plan(micro_batch=2), device=CPU, measuring=Measuring.ONCE, needs_collective=False
    )
    assert time.perf_counter() - start_s < 5.0
    assert found.times is None
    assert found.rates is not None
    assert "--measure takes longer" in found.notes[0]
    assert not list(own_cache.rglob("*.json"))


def test_a_layer_that_cannot_be_timed_in_time_is_not_built(monkeypatch, load, own_cache):
    monkeypatch.setattr(layer_timing, "shallow", None)
    big = tiny_run(
        "model.hidden=16384", "model.attention={num_heads: 128, num_kv_heads: 128}", "model.ffn_hidden=65536"
    )
    found = measure_expectation(big, plan=Plan(micro_batch=8), device=CPU)
    assert found.predicted is not None
    assert found.predicted["is_range"]


def test_options_of_the_command():
    assert [measuring_of(x) for x in (None, True, False)] == [Measuring.ONCE, Measuring.AGAIN, Measuring.NEVER]


def test_what_is_kept_is_what_was_measured(load, own_cache):
    """A layer is timed here."""
    found = measure_machine(
        tiny_run(), plan=Plan(micro_batch=2), device=CPU, measuring=Measuring.ONCE, needs_collective=False
    )
    assert found.times is not None
    assert found.times.layer_s > 0
    (kept,) = own_cache.rglob("*.json")
    assert json.loads(kept.read_text())["measured"]["times"] == asdict(found.times)
