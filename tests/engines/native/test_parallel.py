"""Each way of dividing a step gives the losses, gradients and weights of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from tests.tiny_runs import SHARED_EXPERT, tiny_run

from meshwright.engines.native.check import check_plan
from meshwright.engines.native.parallel.mesh import state_axes
from meshwright.specs.plan import Plan, Recompute, Sharding

PLANS = {
    "ddp": Plan(data_shard=2, sharding=Sharding.NONE, micro_batch=2),
    "zero1": Plan(data_shard=2, sharding=Sharding.OPTIMIZER, micro_batch=2),
    "zero2": Plan(data_shard=2, sharding=Sharding.GRADIENTS, micro_batch=2),
    "fsdp": Plan(data_shard=2, sharding=Sharding.PARAMETERS, micro_batch=2),
    "hsdp": Plan(data_shard=2, data_replicate=2, sharding=Sharding.PARAMETERS),
    "fsdp, full recomputation": Plan(
        data_shard=2, sharding=Sharding.PARAMETERS, recompute=Recompute.FULL, micro_batch=4
    ),
    "tensor": Plan(tensor=2, micro_batch=4),
    "tensor without sequence": Plan(tensor=2, sequence_parallel=False, micro_batch=4),
    "tensor, fsdp": Plan(tensor=2, data_shard=2, sharding=Sharding.PARAMETERS, micro_batch=4),
    "1f1b": Plan(pipeline=2, micro_batch=2),
    "pipeline, fsdp": Plan(pipeline=2, data_shard=2, sharding=Sharding.PARAMETERS, micro_batch=2),
    "pipeline, tensor": Plan(pipeline=2, tensor=2, micro_batch=2),
}
IN_SHORT = (("zero1", "fsdp", "tensor", "1f1b"), ("pipeline, fsdp",))  # in the same processes


@pytest.fixture(scope="module")
def run():
    return tiny_run("train.z_loss=1.0e-2", "train.label_smoothing=0.2")


@pytest.mark.distributed
def test_noise_on_embeddings_is_the_same_on_tensor_ranks_and_stages(equals_one_process):
    noisy = tiny_run("train.neftune_alpha=30")
    equals_one_process([(noisy, PLANS[name]) for name in ("tensor", "tensor without sequence", "1f1b")])


@pytest.mark.distributed
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(IN_SHORT[0], id="two processes"),
        pytest.param(IN_SHORT[1], id="four processes", marks=pytest.mark.when_touched),  # each axis has two elsewhere
    ],
)
def test_plans_equal_one_process(run, names, equals_one_process):
    equals_one_process([(run, PLANS[name]) for name in names])


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [2, 4])
def test_more_plans_equal_one_process(run, num_processes, equals_one_process):
    shorter = {name for names in IN_SHORT for name in names}
    others = [(run, plan) for name, plan in PLANS.items() if name not in shorter and plan.num_devices == num_processes]
    assert others
    equals_one_process(others)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("names", [("fsdp", "zero1", "1f1b"), ("hsdp",)], ids=["two processes", "four processes"])
def test_a_mixture_of_experts_equals_one_process(names, equals_one_process):
    mixture = tiny_run("train.z_loss=1.0e-2", SHARED_EXPERT)
    equals_one_process([(mixture, PLANS[name]) for name in names])


@pytest.mark.parametrize(
    ("plan", "axes"),
    [
        (Plan(data_shard=4, data_replicate=2, sharding=Sharding.NONE), (8, 1)),
        (Plan(data_shard=4, data_replicate=2, sharding=Sharding.OPTIMIZER), (2, 4)),
        (Plan(data_shard=4, context=2, sharding=Sharding.NONE), (8, 1)),
        (Plan(data_shard=2, data_replicate=2, context=4, sharding=Sharding.PARAMETERS), (2, 8)),
    ],
)
def test_states_are_divided_over_data_and_context(plan, axes):
    assert state_axes(plan) == axes


@pytest.mark.parametrize(
    ("changes", "key"), [({"expert": 2, "data_shard": 2}, "parallel.expert"), ({"tensor": 8}, "parallel.tensor")]
)
def test_what_is_not_done_is_refused(run, changes, key):
    assert key in {problem.key for problem in check_plan(replace(Plan(), **changes), run=run)}
