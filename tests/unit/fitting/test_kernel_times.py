"""The cost model gives back the seconds that it was told were measured."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.calibration.parameters import MeasuredParameter, fitted
from meshwright.catalog.lookup import cluster, model
from meshwright.fitting import kernel_times
from meshwright.fitting.kernel_times import AROUND, CollectiveTime, KernelTimes, calibration_here
from meshwright.planner.estimate import estimate_plan
from meshwright.planner.request import PlanRequest
from meshwright.specs.hardware import Stack
from meshwright.specs.plan import Plan
from meshwright.specs.precision import PRECISIONS

LAYER_S, REST_S, UPDATE_S = 0.05, 0.03, 0.004


def request(name: str = "llama3.1-8b", *, batch: int = 4) -> PlanRequest:
    return PlanRequest(
        model=replace(model(name), num_mtp_layers=0),
        cluster=cluster("h100-1x1"),
        seq_len=2048,
        global_batch=batch,
        precision=PRECISIONS["bf16"],
        stack=Stack(framework="torchtitan"),
    )


def times(*, experts_s: float | None = None, scale: float = 1.0, sd: float = 0.02) -> KernelTimes:
    return KernelTimes(
        micro_batch=1,
        linear_s=0.03 * scale if experts_s is None else 0.0012 * scale,
        attention_forward_s=0.002 * scale,
        attention_backward_s=0.006 * scale,
        experts_s=experts_s,
        layer_s=LAYER_S * scale,
        rest_s=REST_S * scale,
        update_s=UPDATE_S * scale,
        update_layers=2,
        sd=sd,
        on_host=True,
    )


def step_s(asked: PlanRequest, measured: KernelTimes, plan: Plan) -> tuple[float, dict[str, float]]:
    calibration = calibration_here(asked, measured, made="a test")
    assert calibration.stranger_sd == {}
    estimate = estimate_plan(replace(asked, calibration=calibration), plan)
    return estimate.step.step.value, estimate.step.components_s


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: math.exp(x) - 2, math.log(2)),
        (lambda x: 2 - math.exp(x), math.log(2)),
        (lambda x: max(-1.0, x - 7), 7),  # flat up to 6
        (lambda x: math.tanh(x - 3), 3),
        (lambda x: math.inf if x > 11 else x - 5, 5),
        (lambda x: x - 20, 12),
        (lambda x: x + 20, -12),
        (lambda x: -20 - x, -12),
    ],
)
def test_a_crossing_is_found_in_few_evaluations(function, expected):
    asked = []
    found = kernel_times._crossing(lambda x: asked.append(x) or function(x), -12.0, 12.0)
    assert found == pytest.approx(expected, abs=1e-5)
    assert len(asked) < 32  # halving the range takes as many


@settings(max_examples=3)
@given(st.floats(0.5, 20.0))
def test_a_deeper_model_takes_its_layers_and_the_rest(scale):
    asked = request()
    seconds, parts = step_s(asked, times(scale=scale), Plan(micro_batch=1))
    work_s = seconds - parts["optimizer"] - parts["fixed"]
    assert work_s == pytest.approx(4 * scale * (asked.model.num_layers * LAYER_S + REST_S), rel=1e-3)


def test_the_update_grows_with_the_parameters():
    asked = request()
    _, parts = step_s(asked, times(), Plan(micro_batch=1))
    assert UPDATE_S < parts["optimizer"] < UPDATE_S * asked.model.num_layers


def test_experts_are_distinguished_from_plain_gemms():
    seconds, parts = step_s(request("mixtral-8x7b"), times(experts_s=0.03), Plan(micro_batch=1))
    assert parts["experts"] + parts["router"] == pytest.approx(4 * 32 * 0.03, rel=0.1)
    assert seconds > 4 * 32 * LAYER_S


def test_a_noisier_measurement_widens_the_interval():
    asked, widths = request(), []
    for sd in (0.02, 0.2):
        calibration = calibration_here(asked, times(sd=sd), made="a test")
        step = estimate_plan(replace(asked, calibration=calibration), Plan(micro_batch=1)).step.step
        widths.append(step.high / step.low)
    assert widths[1] > 1.2 * widths[0]


def test_a_slow_all_reduce_slows_data_parallel_steps():
    asked = replace(request(), cluster=cluster("h100-2x1"))
    found = []
    for seconds in (1e-3, 1e-1):
        collective = CollectiveTime(size_bytes=2**24, num_devices=2, seconds=seconds, sd=0.02)
        calibration = calibration_here(asked, times(), collective=collective, made="a test")
        plan = Plan(data_shard=2)
        found.append(estimate_plan(replace(asked, calibration=calibration), plan).step.step.value)
    assert found[1] > 2 * found[0]


def test_measured_parameters_leave_nothing_of_the_fit():
    known = fitted().with_measured({"gemm_ratio": MeasuredParameter(value=0.5, sd=0.1)}, made="a test")
    factors = dict.fromkeys(("architecture", "device_format", "recipe", "framework"), "unheard of")
    factors |= dict.fromkeys(known.parameters["kernel_s"].levels, "unheard of")
    assert known.parameters["gemm_ratio"].prior_of(factors) == 0.5
    assert not any(name == "gemm_ratio" for name, _, _ in known.offsets)
    assert known.num_rows("architecture", "Hopper") > 0  # what was not measured stands


def test_processes_on_one_cpu_spend_an_assumed_time_around_collectives():
    asked = replace(request(), cluster=cluster("h100-2x1"))
    collective = CollectiveTime(size_bytes=2**24, num_devices=2, seconds=1e-3, sd=0.02)
    found = {}
    for on_host in (False, True):
        measured = replace(times(), on_host=on_host)
        calibration = calibration_here(asked, measured, collective=collective, made="a test")
        plan = Plan(tensor=2)
        found[on_host] = estimate_plan(replace(asked, calibration=calibration), plan).step.step
    around_s = 4 * 2 * 4 * asked.model.num_layers * AROUND["tensor_collective_s"]  # collectives forward and backward
    assert found[True].value > around_s
    assert found[True].high / found[True].low > found[False].high / found[False].low
