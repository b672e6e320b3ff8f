"""Latent attention and tied embeddings divided over tensor ranks give what one process gives."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from meshwright import runfile
from meshwright.engines.native.check import check_plan
from meshwright.engines.native.rehearsal import compare_each
from meshwright.specs.plan import Plan, Sharding

TEXT = """
model:
  name: tiny
  hidden: 32
  num_layers: 4
  vocab: 64
  ffn_hidden: 64
  tied_embeddings: true
  attention:
    {kind: mla, num_heads: 4, head_dim: 16, query_lora_rank: 16, kv_lora_rank: 16, rope_head_dim: 8, value_head_dim: 8}
data: {source: synthetic, sequence_length: 16}
batch: {global_sequences: 4}
precision: fp32
cluster: here
optimizer: {learning_rate: 1.0e-2}
train: {steps: 3}
"""
PAIR = Plan(tensor=2, micro_batch=2)


@pytest.fixture(scope="module")
def run():
    return runfile.loads(TEXT)


def with_attention(run, **changes):
    return replace(run, model=replace(run.model, attention=replace(run.model.attention, **changes)))


def assert_equal(runs):
    for run, plan in runs:
        assert check_plan(plan, run=run) == []
    for found in compare_each(runs):
        assert found.loss_error < 1e-6, found.plan
        assert found.gradient_error < 1e-5, (found.plan, found.gradient_errors)
        assert found.weight_error < 1e-5, (found.plan, found.weight_errors)
        assert found.losses[-1] != found.losses[0]


@pytest.mark.distributed
def test_two_ranks_equal_one(run, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    untied = replace(run, model=replace(run.model, tied_embeddings=False))
    assert_equal(
        [
            (run, PAIR),
            (run, replace(PAIR, sequence_parallel=False)),
            (with_attention(untied, query_lora_rank=0), PAIR),
        ]
    )


@pytest.mark.distributed
@pytest.mark.slow
def test_four_ranks_equal_one(run, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert_equal(
        [
            (run, replace(PAIR, context=2)),
            (run, replace(PAIR, pipeline=2)),
            (run, replace(PAIR, data_shard=2, sharding=Sharding.PARAMETERS)),
            (run, replace(PAIR, data_shard=2, sharding=Sharding.NONE)),
        ]
    )


def test_heads_that_do_not_divide_are_refused(run):
    (problem,) = check_plan(Plan(tensor=2), run=with_attention(run, num_heads=3, num_kv_heads=4))
    assert problem.key == "parallel.tensor"
    assert "3 query heads" in problem.reason
