"""Measured shapes of kernels for published runs: each row by its own accelerator's, as the planner has them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.accuracy.corrections import RowCorrections
from meshwright.accuracy.predict import predict
from meshwright.accuracy.tables import cluster_of
from meshwright.calibration.correction import EfficiencyCorrection
from meshwright.calibration.parameters import fitted, prior
from meshwright.fitting.leave_one_source_out import predict_leave_one_source_out
from meshwright.fitting.published_runs import Fitted, make_problem, solve, without
from meshwright.planner.estimate import estimate_plan
from meshwright.planner.request import PlanRequest
from meshwright.specs.precision import PRECISIONS

ROWS = (
    {"source_key": "one", "precision": "bf16"},
    {"source_key": "two", "precision": "bf16", "seq_len": 4096},
    {"source_key": "two", "precision": "fp8"},
    {"source_key": "one", "precision": "bf16", "gpu": "H200-SXM-141GB"},
)


def slower(factor: float) -> EfficiencyCorrection:
    """Every product takes `factor` times what the model says, deep ones twice that."""
    x = np.array([[8.0, 8, 8], [14, 8, 8], [8, 14, 8], [8, 8, 14], [14, 14, 14]])
    y = np.log(factor) + np.log(2) * (x[:, 2] > 10)
    return EfficiencyCorrection(
        axes=("m", "n", "k"), x=x, y=y, noise=np.full(5, 0.02), mean=float(np.median(y)), length=4.0, sd=0.5
    )


H100 = {f"gemm/{kernel}/bf16": slower(1.5) for kernel in ("forward", "input_gradient", "weight_gradient")}


@pytest.fixture
def runs(read_many):
    return read_many(*ROWS)


def test_a_row_has_the_correction_of_its_accelerator_and_format():
    rows = RowCorrections(
        by_device={"h100": H100, "b200": {"gemm/forward/fp8": slower(3.0)}},
        devices=np.array(["h100", "b200", "h100", "a100"]),
        formats=np.array(["bf16", "fp8", "fp8", "bf16"]),
    )
    shape = (np.array([512.0, 1024, 2048, 4096]), 4096.0, 2048.0)
    one, two = H100["gemm/forward/bf16"], slower(3.0)
    expected = [one.factor(512, 4096, 2048), two.factor(1024, 4096, 2048), 1, 1]
    assert rows.factor("gemm/forward", *shape) == pytest.approx(expected)
    assert rows.factor("gemm/forward", *shape) == pytest.approx(expected), "a second time"
    halves = [one.factor(512, 4096, 2048), 1, one.factor(2048, 4096, 2048), 1]
    assert rows.factor("gemm/forward", *shape, bf16=True) == pytest.approx(halves)
    taken = rows.take(np.array([2, 0]))
    assert taken.factor("gemm/forward", 512.0, 4096.0, 2048.0) == pytest.approx([1, expected[0]])


def test_rows_are_predicted_as_the_planner_would(runs):
    plain, shaped = predict(runs), predict(runs, corrections={"h100": H100})
    c = runs[0].conditions
    request = PlanRequest(
        model=c.model, cluster=cluster_of(c), seq_len=c.seq_len, global_batch=c.global_batch,
        precision=PRECISIONS[c.precision], stack=c.stack, calibration=replace(fitted(), corrections=H100),
    )  # fmt: skip
    planner = estimate_plan(request, c.plan).step.tokens_per_s_per_device.value
    rates = shaped.tokens_per_s_per_device / plain.tokens_per_s_per_device
    assert shaped.tokens_per_s_per_device[0] == pytest.approx(planner)
    assert rates[0] < 0.8
    assert rates[3] == 1, "H200 has no surface here"


@pytest.mark.when_touched  # test_rows_are_predicted_as_the_planner_would applies the same corrections
def test_leave_one_source_out_applies_the_corrections(runs):
    by_device = {"h100": H100}
    problem = make_problem(runs, prior(), corrections=by_device)
    solution = solve(problem, prior(), use=np.full(len(runs), True))
    sources = tuple(r.source_key for r in runs)
    whole = Fitted(problem=problem, solution=solution, sources=sources, calibration=prior())
    left_out = predict_leave_one_source_out(runs, whole, intervals=prior())
    without_one = predict(runs[:1], calibration=without(whole, "one"), corrections=by_device)
    assert left_out.tokens_per_s_per_device[0] == pytest.approx(without_one.tokens_per_s_per_device[0])
