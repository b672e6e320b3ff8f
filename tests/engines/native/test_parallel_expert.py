"""Experts divided over ranks give the losses, gradients and weights of one process; checkpoints fit any division."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.tiny_runs import EXPERTS, LATENT, tiny_run
from torch.distributed.tensor import DTensor

from meshwright.engines.base import TrainOptions
from meshwright.engines.native import engine
from meshwright.engines.native.assembly import assemble
from meshwright.engines.native.batch_loader import open_batch_loader
from meshwright.engines.native.check import check, check_plan
from meshwright.engines.native.parallel.expert import expert_axes
from meshwright.engines.native.parallel.mesh import MeshCoordinates, mesh_coordinates
from meshwright.engines.native.rehearsal import rehearse_each
from meshwright.specs.model import Lora, Router
from meshwright.specs.plan import Plan, Recompute, Schedule, Sharding
from meshwright.specs.precision import PRECISIONS
from meshwright.specs.run import Checkpoint, Task
from meshwright.training import checkpoints as checkpoint
from meshwright.training.processes import run_ranks

pytestmark = pytest.mark.usefixtures("warm_ranks", "without_measuring")

FULL = Sharding.PARAMETERS
MIXTRAL = (
    EXPERTS, "model.ffn_hidden=0", "optimizer.gradient_clip=0.1", "train.balance_loss=0.1", "train.router_z_loss=0.05",
)  # fmt: skip


def as_mixtral():
    return tiny_run(*MIXTRAL)


def as_qwen3():
    run = as_mixtral()
    return replace(run, model=replace(run.model, attention=replace(run.model.attention, qk_norm=True, head_dim=16)))


def as_deepseek():
    """Latent attention, sigmoid router with biases and groups, a shared expert, a dense first layer."""
    run = as_mixtral()
    experts = replace(
        run.model.experts,
        router=Router.SIGMOID,
        routed_scale=2.5,
        num_shared=1,
        num_dense_layers=1,
        num_groups=2,
        groups_per_token=1,
    )
    model = replace(run.model, ffn_hidden=64, experts=experts, attention=tiny_run(LATENT).model.attention)
    return replace(run, model=model, train=replace(run.train, balance_bias_rate=0.02))


def as_lora():
    return replace(as_mixtral(), task=Task.LORA, lora=Lora(rank=4))


def shallow(run):
    """Two layers, of which a model of DeepSeek has one dense: more show nothing where no stages hold them."""
    return replace(run, model=replace(run.model, num_layers=2))


@pytest.mark.distributed
def test_two_ranks_equal_one(equals_one_process):
    over_data = Plan(data_shard=2, expert=2, micro_batch=2)
    over_tensor = Plan(tensor=2, micro_batch=4)
    equals_one_process(
        [
            (shallow(as_mixtral()), replace(over_data, sharding=FULL)),
            (shallow(as_deepseek()), replace(over_tensor, expert=2)),
            (shallow(as_qwen3()), replace(over_tensor, expert_tensor=2)),
        ]
    )


@pytest.mark.when_touched  # test_two_ranks_equal_one divides experts over data, experts and tensor ranks
@pytest.mark.distributed
def test_other_plans_of_two_ranks_equal_one(equals_one_process):
    over_data = Plan(data_shard=2, expert=2, micro_batch=2)
    over_tensor = Plan(tensor=2, micro_batch=4)
    equals_one_process(
        [
            (shallow(as_qwen3()), replace(over_data, sharding=Sharding.NONE)),
            (shallow(as_deepseek()), replace(over_data, recompute=Recompute.FULL)),
            (
                shallow(as_deepseek()),
                replace(over_tensor, micro_batch=1, expert=2),
            ),  # parts of one sequence are gathered otherwise
            (shallow(as_deepseek()), Plan(context=2, expert=2, micro_batch=4)),
            (shallow(as_lora()), replace(over_data, sharding=FULL)),  # experts stay frozen where they are divided
            (shallow(as_lora()), replace(over_tensor, expert=2)),
        ]
    )


@pytest.fixture
def padded(tmp_path):
    """`padded(run)`: the run on short answers, whose samples are a third padding."""
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps({"prompt": "ab"[: i % 3], "completion": "c" * (1 + 5 * i % 7)}) + "\n"
                            for i in range(400)))  # fmt: skip

    def on_answers(run):
        data = replace(run.data, source=str(path), tokenizer="bytes")
        return replace(run, model=replace(run.model, vocab=260), data=data)

    return on_answers


@pytest.mark.when_touched  # test_two_ranks_equal_one divides experts on every axis
@pytest.mark.distributed
def test_padding_is_no_load_on_two_ranks(equals_one_process, padded):
    runs = padded(as_mixtral()), padded(as_deepseek())
    equals_one_process(
        [
            (shallow(runs[0]), Plan(data_shard=2, expert=2, micro_batch=2, sharding=FULL)),
            (shallow(runs[1]), Plan(tensor=2, expert=2, micro_batch=4)),
            (shallow(runs[1]), Plan(context=2, expert=2, micro_batch=4)),
            (runs[1], Plan(pipeline=2, micro_batch=4, recompute=Recompute.FULL)),
        ]
    )


@pytest.mark.when_touched  # test_two_ranks_equal_one divides experts on every axis
@pytest.mark.distributed
def test_four_ranks_equal_one(equals_one_process):
    equals_one_process(
        [
            (shallow(as_deepseek()), Plan(tensor=2, data_shard=2, expert=2, sharding=FULL, micro_batch=4)),
            (as_deepseek(), Plan(pipeline=2, data_shard=2, expert=2, micro_batch=1, schedule=Schedule.ZERO_BUBBLE)),
            (shallow(as_qwen3()), Plan(data_shard=4, expert=2, expert_tensor=2, sharding=FULL, micro_batch=2)),
        ]
    )


@pytest.mark.distributed
@pytest.mark.slow
def test_more_combinations_equal_one(equals_one_process):
    two, wide = Plan(data_shard=2, expert=2, micro_batch=2), Plan(data_shard=4, expert=2, micro_batch=2)
    equals_one_process(
        [
            (as_mixtral(), replace(wide, expert=4)),
            (shallow(as_deepseek()), replace(wide, sharding=FULL)),
            (as_deepseek(), replace(two, pipeline=2)),
            (as_mixtral(), replace(wide, sharding=Sharding.NONE)),
            (as_deepseek(), replace(wide, sharding=Sharding.GRADIENTS, micro_batch=1)),
            (as_deepseek(), replace(two, data_replicate=2, sharding=FULL)),
            (as_deepseek(), replace(two, data_replicate=2, sharding=FULL, expert=4)),  # across replicas
            (as_deepseek(), Plan(tensor=2, data_shard=2, expert=4, micro_batch=4)),
            (as_deepseek(), Plan(tensor=2, context=2, expert=4, micro_batch=4)),
            (as_mixtral(), Plan(tensor=2, data_shard=2, expert=2, expert_tensor=2, sharding=FULL)),
            (as_deepseek(), Plan(tensor=2, pipeline=2, expert=2, sharding=FULL, micro_batch=2)),
            (as_mixtral(), Plan(context=2, tensor=2, expert=2, expert_tensor=2, micro_batch=4)),
            (as_deepseek(), Plan(context=2, data_shard=2, expert=4, sharding=FULL, micro_batch=2)),
            (as_deepseek(), replace(two, pipeline=2, recompute=Recompute.FULL)),
            (as_deepseek(), replace(two, pipeline=2, virtual_pipeline=2, schedule=Schedule.INTERLEAVED)),
        ]
    )


@pytest.mark.distributed
@pytest.mark.slow  # the same on two ranks, without experts over them
def test_tensor_parallel_routers_equal_one(equals_one_process):
    equals_one_process(
        [(shallow(as_deepseek()), Plan(tensor=2, micro_batch=4)), (shallow(as_qwen3()), Plan(tensor=2, micro_batch=1))]
    )


@pytest.mark.distributed
@pytest.mark.slow
def test_bf16_follows_one_process():
    run = replace(as_deepseek(), precision=PRECISIONS["bf16"])
    plans = [Plan(data_shard=2, expert=2, sharding=FULL, micro_batch=2), Plan(tensor=2, expert=2)]
    for found in rehearse_each([(run, plan) for plan in plans]):
        assert found.loss_error < 1e-3, found.plan
        assert found.losses[-1] != found.losses[0]


def wholes(parts):
    state = parts.state()
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}


def is_same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def save_then_load_elsewhere(rank: int, num_ranks: int, folder: Path) -> None:
    run, cpu = shallow(as_deepseek()), torch.device("cpu")
    plan = Plan(data_shard=4, expert=2, sharding=FULL)
    coordinates = mesh_coordinates(plan=plan, device=cpu, rank=rank, num_ranks=num_ranks)
    parts = assemble(run, coordinates=coordinates)
    batch = open_batch_loader(run, coordinates=coordinates).batch(0)
    parts.stepper.forward_backward(batch.tensors, scale=0.01)
    parts.optimizer.step(learning_rate=0.01)
    saver = checkpoint.CheckpointSaver(Checkpoint(folder=str(folder)), num_ranks=num_ranks)
    saver.save(parts.state(), step=1, about={})
    saver.wait()
    saved = wholes(parts)
    assert all(saved[f"{kind}.layers.1.ffn.experts.down"].any() for kind in ("weights", "exp_avg", "exp_avg_sq"))
    for other in (replace(plan, expert=4), replace(plan, expert_tensor=2), Plan(tensor=2, data_shard=2)):
        coordinates = mesh_coordinates(plan=other, device=cpu, rank=rank, num_ranks=num_ranks)
        parts = assemble(replace(run, train=replace(run.train, seed=9)), coordinates=coordinates)
        assert not is_same(wholes(parts), saved)
        checkpoint.load(checkpoint.newest(folder), into=parts.state())
        assert is_same(wholes(parts), saved), other.describe()
    if rank == 0:
        torch.save(saved, folder / "saved.pt")


@pytest.mark.when_touched  # test_resume.py goes from plan to plan
@pytest.mark.distributed
def test_a_checkpoint_loads_under_any_division_and_alone(tmp_path):
    run_ranks(save_then_load_elsewhere, tmp_path, num_ranks=4, device_type="cpu")
    saved = torch.load(tmp_path / "saved.pt")
    run = shallow(as_deepseek())
    run = replace(run, train=replace(run.train, seed=9))
    parts = assemble(run, coordinates=MeshCoordinates(plan=Plan(), device=torch.device("cpu")))
    checkpoint.load(checkpoint.newest(tmp_path), into=parts.state())
    assert is_same(parts.state(), saved)


@pytest.mark.parametrize(
    ("plan", "axes"),
    [
        (Plan(data_shard=8, expert=4), (1, 2)),
        (Plan(data_shard=4, data_replicate=2, tensor=2, expert=4), (2, 2)),
        (Plan(data_shard=2, data_replicate=4, expert=4), (1, 2)),  # a group spans two replicas
        (Plan(data_shard=8, expert=4, sharding=Sharding.NONE), (2, 1)),
        (Plan(context=2, data_shard=2, expert=2, expert_tensor=2, pipeline=3), (1, 1)),
    ],
)
def test_states_of_experts_are_shared_by_the_ranks_that_hold_the_same_ones(plan, axes):
    assert expert_axes(plan) == axes
    assert axes[0] * axes[1] == plan.expert_data


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"data_shard": 3, "expert": 3}, "parallel.expert", "3 does not divide the 4 experts"),
        ({"data_shard": 2, "expert": 4}, "parallel.expert", "4 does not divide the 2 ranks"),
        ({"data_shard": 3, "expert_tensor": 3}, "parallel.expert_tensor", "the 32 columns of an expert"),
        ({"tensor": 2, "sequence_parallel": False}, "parallel.sequence_parallel", "different tokens"),
    ],
)
def test_what_cannot_be_divided_is_refused(changes, key, words):
    problems = check_plan(replace(Plan(), **changes), run=as_mixtral())
    assert any(problem.key == key and words in problem.reason for problem in problems)


def test_a_dense_model_has_no_experts_to_divide_or_balance():
    run = as_mixtral()
    dense = replace(run, model=replace(run.model, experts=None, ffn_hidden=64))
    assert [p.key for p in check(dense) if "no experts" in p.reason] == [
        "train.balance_loss", "train.router_z_loss",
    ]  # fmt: skip
    assert [p.key for p in check_plan(Plan(data_shard=2, expert=2), run=dense)] == ["parallel.expert"]
    biased = replace(run, train=replace(run.train, balance_bias_rate=0.01))
    assert [p.key for p in check(biased)] == ["train.balance_bias_rate"]
    assert check(as_deepseek()) == ()


def test_steps_say_how_unbalanced_the_experts_are(tmp_path):
    run = tiny_run(*MIXTRAL, "parallel={data_shard: 1}")
    engine.train(run, options=TrainOptions(folder=tmp_path, quiet=True))
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    ratios = [json.loads(line)["expert_load_ratio"] for line in lines]
    assert len(ratios) == 3
    assert all(1 < ratio <= 4 for ratio in ratios)  # 4 experts: all tokens to one would be 4
