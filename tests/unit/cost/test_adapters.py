"""Time of low-rank adapters: bytes and launches, as counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.catalog import lookup as catalog
from meshwright.cost.adapters import adapter_passes
from meshwright.cost.step import estimate_steps
from meshwright.cost.tables import model_row, plan_row
from meshwright.specs.model import Lora
from meshwright.specs.plan import Plan

LLAMA = catalog.model("llama2-70b")
MLPERF = Lora(rank=16, targets=("qkv", "output"))
BANDWIDTH, LAUNCH, TOKENS = 1e12, 1e-5, 8192


def passes(lora: Lora | None = MLPERF, plan: Plan | None = None, **changes: float):
    rates = {"bytes_per_s": BANDWIDTH, "kernel_s": 0.0} | changes
    return adapter_passes(model_row(LLAMA, lora=lora), plan_row(plan or Plan(data_shard=8)), TOKENS, **rates)


def test_the_bytes_of_an_mlperf_layer():
    # qkv: 8,192 inputs, 8,192 + 2 x 1,024 outputs; output: 8,192 of both. 2 bytes each, 8,192 tokens.
    inputs, outputs = 16_384, 18_432
    element_s = 2 * 8192 / BANDWIDTH
    assert passes().forward_s == pytest.approx(element_s * (inputs + 2 * outputs))
    assert passes().input_s == pytest.approx(element_s * (2 * inputs + outputs))
    assert passes().weight_s == pytest.approx(element_s * (inputs + outputs))


def test_one_matrix_for_query_key_and_value_reads_its_input_once():
    separate = passes(replace(MLPERF, targets=("query", "key", "value", "output")))
    assert separate.forward_s - passes().forward_s == pytest.approx(2 * 8192 * 2 * 8192 / BANDWIDTH)


def test_launches_count_where_there_is_nothing_to_move():
    found = passes(kernel_s=LAUNCH, bytes_per_s=1e30)
    assert found.total_s == pytest.approx(2 * 3 * 2 * LAUNCH)


def test_dropout_moves_its_input_twice_more():
    extra = passes(replace(MLPERF, dropout=0.1)).forward_s - passes().forward_s
    assert extra == pytest.approx(2 * 16_384 * 2 * 8192 / BANDWIDTH)


def test_tensor_ranks_split_one_side_of_each_matrix():
    found = passes(plan=Plan(tensor=8)).weight_s
    inputs, outputs = 8192 + 8192 / 8, 10_240 / 8 + 8192 / 8  # the residual stream is split too
    assert found == pytest.approx(2 * 8192 / BANDWIDTH * (inputs + outputs))


def test_without_adapters_there_is_nothing():
    assert passes(None, kernel_s=LAUNCH).total_s == 0


def steps_of(found) -> dict[str, float]:
    return estimate_steps(
        model=found.model, batch=found.batch, plan=found.plan, precision=found.precision, rates=found.rates
    ).components_s


def test_adapters_make_a_step_longer_and_are_named(case):
    lora = {"model": "llama2-70b", "lora": MLPERF, "plan": Plan(data_shard=32)}
    components = steps_of(case(**lora))
    whole = steps_of(case(**lora | {"lora": None}))
    assert 0.01 < components["adapters"] / sum(components.values()) < 0.2
    assert whole["adapters"] == 0
