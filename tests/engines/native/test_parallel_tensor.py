"""Latent attention and tied embeddings divided over tensor ranks give what one process gives."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from tests.tiny_runs import LATENT, tiny_run

from meshwright.engines.native.check import check_plan
from meshwright.engines.native.rehearsal import rehearse_each
from meshwright.specs.plan import Plan, Schedule, Sharding
from meshwright.specs.precision import PRECISIONS

pytestmark = pytest.mark.usefixtures("warm_ranks", "without_measuring")

PAIR = Plan(tensor=2, micro_batch=2)


@pytest.fixture(scope="module")
def run():
    return tiny_run("batch.global_sequences=4", "model.num_layers=2", "model.tied_embeddings=true", LATENT)


def with_attention(run, **changes):
    return replace(run, model=replace(run.model, attention=replace(run.model.attention, **changes)))


@pytest.mark.distributed
def test_two_ranks_equal_one(run, equals_one_process):
    untied = replace(run, model=replace(run.model, tied_embeddings=False))
    equals_one_process(
        [(run, PAIR), (run, replace(PAIR, sequence_parallel=False)), (with_attention(untied, query_lora_rank=0), PAIR)]
    )


@pytest.mark.distributed
@pytest.mark.when_touched  # test_two_ranks_equal_one divides the same layers in fp32
def test_bf16_without_shared_states_follows_one_process(run):
    """Divided matrices and stages that nobody else holds: masters in fp32 beside the parameters, no FSDP."""
    narrow = replace(run, precision=PRECISIONS["bf16"])
    stages = Plan(pipeline=2, micro_batch=2)
    plans = [PAIR, stages, replace(stages, schedule=Schedule.ZERO_BUBBLE, micro_batch=1)]
    for found in rehearse_each([(narrow, plan) for plan in plans]):
        assert found.loss_error < 1e-3, found.plan
        assert found.gradient_error < 0.05, (found.plan, found.gradient_errors)
        assert found.losses[-1] != found.losses[0]


@pytest.mark.distributed
@pytest.mark.slow
def test_four_ranks_equal_one(run, equals_one_process):
    equals_one_process(
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
