"""The traffic of the native engine's kernels moves its own predictions and those of no other stack.

The fit, and with it every leave-one-source-out prediction, sees a row through its step time as a function of the
calibrated parameters. Where that function stays the same bit for bit, so do all of its fits.
"""

from contextlib import contextmanager
from functools import cache
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plan_requests import plan_request
from tests.shipped_rows import shipped_runs

from meshwright.accuracy.predict import log_step_of
from meshwright.accuracy.tables import memory_of, tables_of
from meshwright.calibration.parameters import fitted
from meshwright.catalog.stacks import stack_facts
from meshwright.cost import compute, elementwise
from meshwright.cost.tables import plan_row
from meshwright.kernels import traffic
from meshwright.kernels.traffic import Passes
from meshwright.planner.screen import cost_model
from meshwright.specs.plan import Plan

PASSES = ("ADD_RMS_NORM", "ADDITION", "GATED_ACTIVATION", "RMS_NORM", "ROTARY", "USED_TWICE")
OF_LOSS = ("HIDDEN_GRADIENT_COPY", "LOSS_OF_LOGITS", "LOSS_OF_SHARDED_LOGITS")
EVERY = 17
"""Rows of the shipped runs: each of this number, so that all large sources have some."""

counts = st.integers(min_value=1, max_value=40)


@contextmanager
def changed(forward: int, backward: int, loss: int, chunk: int):
    """Other numbers of passes of every operation, and another chunk of the loss."""
    passes = Passes(forward=forward, backward=backward)
    with (
        mock.patch.multiple(elementwise, **dict.fromkeys(PASSES, passes)),
        mock.patch.multiple(compute, **dict.fromkeys(OF_LOSS, loss)),
        mock.patch.object(elementwise, "cast_bytes", return_value=float(forward)),
        mock.patch.object(compute, "weight_sum_bytes", lambda chunks, **_: 7.0 * loss * chunks),
        mock.patch.object(traffic, "CHUNK_LOGITS", chunk),
    ):
        yield


@cache
def published():
    """(conditions, tables) of shipped runs."""
    runs = [run.conditions for run in shipped_runs() if run.conditions is not None]
    conditions = runs[::EVERY]
    return conditions, tables_of(conditions)


def log_steps(move: float) -> np.ndarray:
    """Log step time of every row with all parameters moved by `move` of their transformed units."""
    _, tables = published()
    calibration = fitted()
    etas, bf16 = (
        {name: value + move for name, value in calibration.etas(factors).items()}
        for factors in (tables.factors, tables.bf16_factors)
    )
    return log_step_of(tables, calibration)(etas, bf16)


@pytest.mark.when_touched  # test_a_plan_moves_if_its_engine_is_native has other engines
def test_published_rows_are_of_other_stacks():
    conditions, tables = published()
    assert len(conditions) > 100
    assert not any(stack_facts(c.stack.framework).own_kernels for c in conditions)
    for field in ("norm", "activation", "rotary", "loss"):
        assert not np.any(getattr(tables.facts.fused, field))


@pytest.mark.when_touched  # test_a_plan_moves_if_its_engine_is_native has other engines
@settings(deadline=None, max_examples=8)
@given(forward=counts, backward=counts, loss=counts, chunk=st.integers(2**10, 2**30), move=st.floats(-0.3, 0.3))
def test_other_stacks_do_not_move(forward, backward, loss, chunk, move):
    conditions, tables = published()
    before, memory = log_steps(move), memory_of(conditions, tables)
    with changed(forward, backward, loss, chunk):
        np.testing.assert_array_equal(log_steps(move), before)
        np.testing.assert_array_equal(memory_of(conditions, tables).reserved_bytes, memory.reserved_bytes)


@pytest.mark.parametrize("engine", ["native", "megatron", "torchtitan", "maxtext"])
def test_a_plan_moves_if_its_engine_is_native(engine):
    """The same changes seen from a plan, so that the law above is known to change something."""
    request = plan_request(engine=engine, seq_len=16384, global_batch=8)
    cost, row = cost_model(request), plan_row(Plan(data_shard=8))
    before = float(np.ravel(cost.steps(row).step_s)[0])
    with changed(20, 20, 20, 2**24):
        after = float(np.ravel(cost.steps(row).step_s)[0])
    assert (after == before) == (engine != "native")


def test_every_part_of_the_traffic_moves_the_native_engine():
    """None of the patches is without effect: a renamed constant would make the law empty."""
    cost = cost_model(plan_request(seq_len=16384, global_batch=8))

    def step_s(plan: Plan) -> float:
        return float(np.ravel(cost.steps(plan_row(plan)).step_s)[0])

    sharded = Plan(tensor=2, data_shard=4)
    before = step_s(sharded), step_s(Plan(data_shard=8))
    for module, name, value in (
        *((elementwise, name, Passes(forward=30, backward=30)) for name in PASSES),
        *((compute, name, 30) for name in OF_LOSS),
        (traffic, "CHUNK_LOGITS", 2**20),
    ):
        with mock.patch.object(module, name, value):
            assert (step_s(sharded), step_s(Plan(data_shard=8))) != before, name
