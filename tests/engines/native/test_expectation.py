"""Rates that a run is compared with: measured here, or looked up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from meshwright import runfile
from meshwright.calibration.device import Check
from meshwright.engines.base import TrainOptions
from meshwright.engines.native import engine, expectation, machine_measurement
from meshwright.engines.native.expectation import Expectation, _at_speed, _speed_notes, measure_expectation
from meshwright.fitting.kernel_times import KernelTimes
from meshwright.specs.plan import Plan
from meshwright.training.device import Rates
from meshwright.training.metrics import Yardstick
from meshwright.training.processes import run_ranks

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("own_cache")
TEXT = """
model:
  {hidden: 64, num_layers: 4, vocab: 256, ffn_hidden: 128, attention: {num_heads: 4, num_kv_heads: 2}EXPERTS}
data: {sequence_length: 64}
batch: {global_sequences: 8, micro: 2}
cluster: here
precision: PRECISION
train: {steps: 2}
"""


def run(tmp_path: Path, *, experts: str = "", precision: str = "fp32"):
    path = tmp_path / "run.yaml"
    path.write_text(TEXT.replace("EXPERTS", experts).replace("PRECISION", precision))
    return runfile.load(path)


TIMES = KernelTimes(
    micro_batch=2, linear_s=1e-3, attention_forward_s=2e-4, attention_backward_s=3e-4, experts_s=None,
    layer_s=2e-3, rest_s=1e-3, update_s=5e-4, update_layers=1, sd=0.02, on_host=True,
)  # fmt: skip
RATES = Rates(matmul_flops_per_s={"fp32": 5e10, "bf16": 1e11}, copy_bytes_per_s=1e10)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_is_predicted_from_what_was_measured(tmp_path, monkeypatch, precision):
    """The measurement is given, as those of a busy machine need not agree with each other."""
    monkeypatch.setattr(machine_measurement, "measure_kernels", lambda *args, **options: TIMES)
    monkeypatch.setattr(machine_measurement.devices, "measure_rates", lambda *args, **options: RATES)
    found = measure_expectation(run(tmp_path, precision=precision), plan=Plan(micro_batch=2), device=CPU)
    assert found.predicted is not None
    components = found.predicted["components_s"]
    work_s = found.predicted["step"]["value"] - components["optimizer"] - components["fixed"]
    assert work_s == pytest.approx(4 * (4 * TIMES.layer_s + TIMES.rest_s), rel=0.01)
    assert found.predicted["step"]["low"] < found.predicted["step"]["value"] < found.predicted["step"]["high"]


@pytest.mark.when_touched  # the other tests measure layers of dense models
def test_experts_are_measured_too(tmp_path):
    experts = ", experts: {num_experts: 4, top_k: 2, ffn_hidden: 64}"
    found = measure_expectation(run(tmp_path, experts=experts), plan=Plan(micro_batch=2), device=CPU)
    assert found.predicted is not None
    assert found.predicted["components_s"]["experts"] > 0


def test_a_named_cluster_is_looked_up(tmp_path, monkeypatch):
    monkeypatch.setattr("meshwright.engines.native.expectation.measure_machine", None)
    text = TEXT.replace("EXPERTS", "").replace("PRECISION", "bf16").replace("here", "h100-1x1")
    (tmp_path / "run.yaml").write_text(text)
    found = measure_expectation(runfile.load(tmp_path / "run.yaml"), plan=Plan(micro_batch=2), device=CPU)
    assert found.predicted is not None
    assert "h100" in found.yardstick.convention


def test_measuring_does_not_move_the_random_numbers_of_the_run(tmp_path):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    measure_expectation(run(tmp_path), plan=Plan(micro_batch=2), device=CPU)
    assert torch.equal(torch.rand(3), expected)


def _expect_rank(rank: int, num_ranks: int, payload) -> None:
    found = measure_expectation(payload[0], plan=payload[1], device=CPU)
    payload[2].with_name(f"{rank}.json").write_text(json.dumps(found.predicted))


@pytest.mark.when_touched  # test_experts_are_measured_too measures in one process
@pytest.mark.distributed
def test_all_processes_come_to_the_same_expectation(tmp_path):
    plan = Plan(data_shard=2, micro_batch=2)
    run_ranks(_expect_rank, (run(tmp_path), plan, tmp_path / "x"), num_ranks=2, device_type="cpu")
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first["step"] == second["step"]
    assert first["components_s"]["data_parallel"] > 0


PREDICTED = {
    "step": {"low": 0.9, "value": 1.0, "high": 1.1},
    "tokens_per_s_per_device": {"low": 90.0, "value": 100.0, "high": 110.0},
    "mfu": {"low": 0.3, "value": 0.4, "high": 0.5},
    "components_s": {"ffn": 1.0},
}


def test_a_machine_that_is_slower_now_is_expected_to_be_and_the_interval_holds_both():
    found = _at_speed(PREDICTED, 1.25)
    assert found["step"] == {"low": 0.9, "value": 1.25, "high": pytest.approx(1.375)}
    assert found["tokens_per_s_per_device"] == {"low": 72.0, "value": 80.0, "high": 110.0}
    assert found["components_s"] == {"ffn": 1.25}
    assert found["slower_than_calibrated"] == 1.25
    faster = _at_speed(PREDICTED, 0.8)
    assert faster["step"] == {"low": pytest.approx(0.72), "value": 0.8, "high": 1.1}
    assert faster["mfu"]["high"] == pytest.approx(0.625)
    assert _speed_notes(1.05) == []
    assert "25% slower" in _speed_notes(1.25)[0]


def test_steps_of_a_calibration_are_timed_again(monkeypatch):
    monkeypatch.setattr(expectation, "CHECK_BUDGET_S", 0.05)
    text = TEXT.replace("EXPERTS", "").replace("PRECISION", "bf16")
    check = Check(run=text, num_processes=1, seconds=1.0, spread=1.0)
    one_s = expectation.measure_slowdown((check,), num_processes=1, device=CPU)
    assert one_s is not None
    assert 0 < one_s < 0.9  # a step of a tiny model does not take a second
    slower = expectation.measure_slowdown((replace(check, seconds=1e-6),), num_processes=1, device=CPU)
    assert slower is not None
    assert slower > 100
    assert expectation.measure_slowdown((check,), num_processes=2, device=CPU) is None


def test_an_open_plan_is_the_planners(tmp_path):
    free = run(tmp_path)
    prepared = engine.prepare(free, options=TrainOptions(folder=tmp_path))
    assert prepared.plan.num_devices == 1
    assert prepared.plan.micro_batch == 2  # the run file's
    assert free.plan is None


def test_a_launcher_says_how_many_devices_a_plan_may_use(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    plans = {engine.plan_here(replace(run(tmp_path), micro_batch=micro), device=CPU).num_devices for micro in (1, 2)}
    assert plans == {4}


def test_what_opening_the_data_leaves_is_expected_too():
    held = Yardstick(tokens_per_step=1, num_devices=1, flops_per_token=1.0, peak_flops_per_s=None, peak_source="")
    found = Expectation(yardstick=held, predicted={"memory_bytes": 100, "step": None})
    assert found.holding(7).predicted == {"memory_bytes": 107, "step": None}
    assert found.holding(-7) is found
    assert Expectation(yardstick=held, predicted=None).holding(7).predicted is None
