"""Published runs as tables: each row keeps its own conditions."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.accuracy.predict import predict_steps
from meshwright.accuracy.tables import cluster_of, memory_of, tables_of
from meshwright.calibration.parameters import prior
from meshwright.cost.plan_rows import plan_from_row
from meshwright.cost.rates import system_facts
from meshwright.cost.tables import model_row
from meshwright.specs.precision import PRECISIONS


def conditions(runs):
    assert all(run.conditions is not None for run in runs), [run.reason for run in runs]
    return [run.conditions for run in runs]


def test_rows_are_the_runs_in_order(read_many):
    rows = conditions(read_many({}, {"tp": 2, "dp": 2}, {"precision": "bf16", "seq_len": 4096}))
    tables = tables_of(rows)
    assert [plan_from_row(tables.plan.take(i)) for i in range(3)] == [c.plan for c in rows]
    assert tables.batch.seq_len.tolist() == [8192, 8192, 4096]
    assert tables.precision.linear_input_bytes.tolist() == [1.0, 1.0, 2.0]
    assert [f["recipe"] for f in tables.factors] == ["Hopper/fp8", "Hopper/fp8", "Hopper/bf16"]
    assert {f["recipe"] for f in tables.bf16_factors} == {"Hopper/bf16"}


def test_taking_rows(read_many):
    tables = tables_of(conditions(read_many({}, {"seq_len": 4096}, {"gbs": 256})))
    taken = tables.take(np.array([2, 0]))
    assert taken.batch.global_batch.tolist() == [256, 128]
    assert taken.factors == [tables.factors[2], tables.factors[0]]


def test_the_cluster_is_on_the_fabric_that_the_source_names(read_one):
    usual = cluster_of(read_one().conditions)
    named = cluster_of(read_one(interconnect="AWS EFA", num_gpus=16, dp=8).conditions)
    assert usual.fabric.name == "nvswitch-4-ndr"
    assert named.fabric.name == "aws-efa-p5"
    assert (named.devices_per_node, named.num_nodes, named.name) == (8, 2, "h100-8x2")


def test_what_a_row_says_of_its_kernels_goes_before_the_stack(read_one):
    stack = read_one(framework="Megatron-DeepSpeed", precision="bf16").conditions
    fused = read_one(framework="Megatron-DeepSpeed", precision="bf16", notes="FlashAttention-2").conditions
    facts = system_facts(cluster_of(stack), PRECISIONS["bf16"], stack.stack)
    assert facts.unfused_attention == 1
    assert tables_of([stack]).facts.unfused_attention.tolist() == [1]
    assert tables_of([fused]).facts.unfused_attention.tolist() == [0]


def test_the_model_is_that_of_the_row(read_one):
    c = read_one().conditions
    assert tables_of([c]).model.take(0) == model_row(c.model)


def test_memory_of_each_row_is_independent_of_the_others(read_many):
    rows = conditions(read_many({}, {"recompute": "full"}, {"framework": "torchtitan", "dp_type": "FSDP"}))
    together = memory_of(rows, tables_of(rows)).reserved_bytes
    alone = [float(memory_of([c], tables_of([c])).reserved_bytes[0]) for c in rows]
    assert together.tolist() == alone
    assert len(set(alone)) == 3


def test_arithmetic_follows_the_gemm_rate_that_was_measured_on_the_system(read_many):
    """GEMMs in 8 bits on H100 reach 0.64 of 1,979 TFLOP/s elsewhere (`gemm_ratio` of parameters.toml)."""
    usual = 0.64 * 1979
    facts = tables_of(conditions(read_many({}, {"gemm_tflops": usual}, {"gemm_tflops": usual / 2}))).facts
    for peaks in (facts.matmul_flops_per_s, facts.bf16_flops_per_s):
        assert peaks / peaks[0] == pytest.approx([1, 1, 0.5], rel=1e-3)
    assert len(set(facts.memory_bytes_per_s.tolist())) == 1


def test_a_step_on_a_slower_clock_is_longer_by_no_more_than_the_clock(read_many):
    clocks = (1266.0, 1000.0, 700.0, 400.0)
    rows = conditions(read_many(*({"gemm_tflops": tflops} for tflops in clocks)))
    seconds = np.exp(predict_steps(tables_of(rows), prior())[0])
    assert all(np.diff(seconds) > 0)
    assert all(seconds <= seconds[0] * clocks[0] / np.array(clocks) * (1 + 1e-9))
