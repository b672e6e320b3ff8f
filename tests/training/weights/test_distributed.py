"""Sharded models: the same first weights, and the same weights from and to files, as in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

import torch.distributed as dist
from tests.warm import start_warm_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from meshwright.specs.model import Attention, Experts, Model
from meshwright.training.models import build_model, init_weights, materialize
from meshwright.training.weights import load_weights, save_weights

DENSE = Model(
    name="tiny",
    hidden=32,
    num_layers=2,
    vocab=61,  # no multiple of the ranks: shards of different size
    ffn_hidden=48,
    attention=Attention(num_heads=4, num_kv_heads=2, head_dim=8),
)
MIXTURE = replace(DENSE, ffn_hidden=0, experts=Experts(num_experts=4, top_k=2, ffn_hidden=24))


def shard_fully(built, mesh):
    for layer in built.layers.values():
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(built, mesh=mesh["data"])


def shard_tensors(built, mesh):
    columns = ("attention.query", "attention.key", "attention.value", "ffn.gate", "ffn.up")
    plan = dict.fromkeys(columns, ColwiseParallel()) | dict.fromkeys(
        ("attention.output", "ffn.down"), RowwiseParallel()
    )
    for layer in built.layers.values():
        parallelize_module(layer, mesh["tensor"], plan)


def shard_experts(built, mesh):
    for layer in built.layers.values():
        experts = layer.ffn.experts
        for name, stack in list(experts.named_parameters()):
            sharded = distribute_tensor(stack, mesh["tensor"], [Shard(0)], src_data_rank=None)
            setattr(experts, name, torch.nn.Parameter(sharded))


def shard_widths(built, mesh):
    """As FSDP does within `parallel.expert`: what a rank holds stays one slice of a stack."""
    for layer in built.layers.values():
        fully_shard(layer.ffn.experts, mesh=mesh["data"], shard_placement_fn=lambda _: Shard(1))
    shard_fully(built, mesh)


LAYOUTS = {
    "fully sharded": (DENSE, [shard_fully]),
    "tensors divided": (DENSE, [shard_tensors]),
    "tensors divided, then fully sharded": (DENSE, [shard_tensors, shard_fully]),
    "experts divided": (MIXTURE, [shard_experts]),
    "experts divided, then fully sharded": (MIXTURE, [shard_experts, shard_fully]),
    "experts divided, their widths sharded": (MIXTURE, [shard_experts, shard_widths]),
    "experts fully sharded": (MIXTURE, [shard_fully]),
}


def whole(model):
    built = build_model(model, device="cpu")
    init_weights(built, seed=7)
    return built.state_dict()


def gathered(built):
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in built.state_dict().items()}


def check_layouts(rank: int, folder: str, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "tensor"))
    for number, (name, (model, steps)) in enumerate(LAYOUTS.items()):
        built = build_model(model)
        for step in steps:
            step(built, mesh)
        materialize(built, device="cpu")
        init_weights(built, seed=7)
        expected = whole(model)
        assert same(gathered(built), expected), f"{name}: first weights"
        save_weights(built, f"{folder}/{number}", dtype=torch.float32)
        dist.barrier()
        init_weights(built, seed=8)
        assert not same(gathered(built), expected)
        load_weights(built, f"{folder}/{number}")
        assert same(gathered(built), expected), f"{name}: loaded weights"
    dist.destroy_process_group()


def same(left, right) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


@pytest.mark.distributed
@pytest.mark.when_touched  # test_resume.py saves and loads shards
def test_sharded_models_begin_load_and_save_as_one_process(tmp_path: Path):
    start_warm_ranks(check_layouts, args=(str(tmp_path), 4), nprocs=4)
