"""Predictions of published runs are those of the cost model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.accuracy.predict import predict, predict_steps
from meshwright.accuracy.tables import cluster_of, tables_of
from meshwright.calibration.parameters import fitted, prior
from meshwright.cost.uncertainty import Z80
from meshwright.planner.estimate import estimate_plan
from meshwright.planner.request import PlanRequest
from meshwright.specs.precision import PRECISIONS


def test_a_prediction_is_the_estimate_of_the_same_plan(read_many):
    """Without a pipeline both are the closed form; the row and the planner must not disagree."""
    runs = read_many({}, {"cp": 1, "dp": 8, "precision": "bf16"})
    predictions = predict(runs)
    for i, run in enumerate(runs):
        c = run.conditions
        request = PlanRequest(
            model=c.model, cluster=cluster_of(c), seq_len=c.seq_len, global_batch=c.global_batch,
            precision=PRECISIONS[c.precision], stack=c.stack,
        )  # fmt: skip
        estimate = estimate_plan(request, c.plan).step
        rate = estimate.tokens_per_s_per_device
        row = predictions.take(np.array([i]))
        assert row.tokens_per_s_per_device == pytest.approx(rate.value)
        assert (row.low[0], row.high[0]) == pytest.approx((rate.low, rate.high))
        assert row.memory_allocated_bytes == pytest.approx(estimate.memory.allocated_bytes)
        assert bool(row.fits[0]) is estimate.memory.fits


def test_rows_do_not_know_of_each_other(read_many):
    runs = read_many({}, {"precision": "bf16"}, {"seq_len": 4096})
    together = predict(runs)
    for i, run in enumerate(runs):
        alone = predict([run])
        assert together.tokens_per_s_per_device[i] == pytest.approx(alone.tokens_per_s_per_device[0], rel=1e-12)
        assert together.low[i] == pytest.approx(alone.low[0], rel=1e-9)


def test_the_measurement_is_not_looked_at(read_many):
    """Whatever the row measured, the prediction stands."""
    truth, lie = read_many({}, {"tok_s_gpu_best": 1})
    rates = predict([truth, lie]).tokens_per_s_per_device
    assert rates[0] == rates[1]


def test_intervals_hold_the_value_and_widen_for_strangers(read_many):
    runs = read_many({}, {"precision": "bf16"})
    strange = {kind: 2 * sd for kind, sd in fitted().stranger_sd.items()}
    usual, wide = predict(runs), predict(runs, calibration=replace(fitted(), stranger_sd=strange))
    assert (usual.low < usual.tokens_per_s_per_device).all()
    assert (usual.tokens_per_s_per_device < usual.high).all()
    added = (np.log(wide.high / wide.low) / 2 / Z80) ** 2 - (np.log(usual.high / usual.low) / 2 / Z80) ** 2
    assert added == pytest.approx([3 * fitted().stranger_sd["dense"] ** 2] * 2)


def test_the_fit_narrows_the_prior(read_many):
    tables = tables_of([r.conditions for r in read_many({})])
    parts = [predict_steps(tables, c)[1] for c in (prior(), replace(fitted(), residual_sd={}, stranger_sd={}))]
    before, after = (sum(p[name][0] for name in p) for p in parts)
    assert after < before / 2


def test_a_device_that_is_too_small(read_many):
    small, large = predict(read_many({"gpu": "H100-SXM-80GB", "mbs": 128, "cp": 1, "dp": 8, "gbs": 1024}, {})).fits
    assert not small
    assert large
