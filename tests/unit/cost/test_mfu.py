"""MFU against values worked out by hand, and the same value from a prediction, a training and a benchmark."""

from __future__ import annotations

import pytest
from tests.tiny_models import SMALL

from meshwright import runfile
from meshwright.catalog import lookup as catalog
from meshwright.cost.flops import AttentionCount, model_flops_per_token
from meshwright.cost.mfu import mfu
from meshwright.cost.tables import model_row
from meshwright.specs.plan import Plan

ACTIVE = 3 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16) + 100 * 8  # projections, feed-forward, head
SCORES = 3 * 2 * 4 * (2 + 2)  # FLOPs per key: layers x 2 x heads x (query-key + value width)


@pytest.mark.parametrize(
    ("count", "keys"), [(AttentionCount.CAUSAL, 32 / 2), (AttentionCount.FULL, 32)], ids=["causal", "full"]
)
def test_a_small_model_by_hand(count, keys):
    flops = 6 * ACTIVE + 3 * SCORES * keys  # backward is twice forward; no recomputation
    found = model_flops_per_token(model_row(SMALL), seq_len=32, count=count)
    assert float(found) == flops
    # 1000 tokens in 0.5 s on 4 devices of 1 MFLOP/s
    rate = 1000 / 0.5 / 4
    assert mfu(
        tokens_per_s_per_device=rate, flops_per_token=found, peak_flops_per_s=1e8
    ) == pytest.approx(500 * flops / 1e8)  # fmt: skip


def test_llama3_8b_on_h100_by_hand():
    """7,504,658,432 active parameters (head included, embedding not), 32 layers of 32 heads of 128, 8192 tokens."""
    flops = 6 * 7_504_658_432 + 3 * 32 * 2 * 32 * (128 + 128) * 4096
    table = model_row(catalog.model("llama3-8b"))
    assert float(model_flops_per_token(table, seq_len=8192)) == flops
    at_10_000 = mfu(tokens_per_s_per_device=10_000, flops_per_token=flops, peak_flops_per_s=989e12)
    assert at_10_000 == pytest.approx(0.5204, abs=1e-4)


def test_prediction_and_training_agree():
    from meshwright.planner.estimate import estimate_plan
    from meshwright.planner.request import request_for
    from meshwright.training.metrics import yardstick

    run = runfile.from_options(
        model="llama3-8b", cluster="h100-8x4", global_batch=128, sequence_length=8192, engine="megatron"
    )
    plan = Plan(data_shard=32)
    step = estimate_plan(request_for(run), plan).step
    trained = yardstick(run, accelerator=run.cluster.accelerator, plan=plan)
    assert trained.mfu(step.step.value) == pytest.approx(step.mfu.value)
    assert "causal attention, no recomputation" in trained.convention
