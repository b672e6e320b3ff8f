"""Positions of the optimizer's states in a checkpoint, with which another plan can load them.

Megatron's inexpensive format of a sharded optimizer stores the buckets of the saving plan. A `StateRange` describes a
range of a parameter's box, flattened, and the chunks of the files that contain its states. Every process writes its
ranges to a file of its own. A process with another plan reads the ranges that overlap its own boxes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from meshwright.engines.megatron.in_megatron_process.initial_weights import METADATA, shards_of
from meshwright.engines.megatron.in_megatron_process.model import ModelAndOptimizer
from meshwright.engines.megatron.megatron_core.tensor_names import OUTSIDE_LAYERS
from meshwright.errors import InputError
from meshwright.training.checkpoints.metadata import CheckpointReader

FILE_NAME = "pieces-{rank}.json"
STATES = ("exp_avg", "exp_avg_sq", "param")  # `param`: the fp32 weights, where they are separate
STORED = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(exp_avg|exp_avg_sq|fp32_param)\.(.+)")
PADDED = (OUTSIDE_LAYERS["embedding.weight"], OUTSIDE_LAYERS["head.weight"])
"""Tensors whose number of rows depends on the number of tensor ranks."""


@dataclass(frozen=True, kw_only=True)
class TensorBox:
    """A box of one of Megatron's tensors."""

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StoredChunk:
    """A chunk of a stored tensor."""

    name: str
    offset: tuple[int, ...]
    skip: int = 0  # elements of the chunk before those of the range


@dataclass(frozen=True, kw_only=True)
class StateRange:
    """Elements `start` to `stop` of the flattened box `part`."""

    part: TensorBox
    start: int
    stop: int
    chunks: dict[str, StoredChunk]  # by state


FILE = TypeAdapter(list[StateRange])


def ranges_text(parts: ModelAndOptimizer, state: dict[str, Any]) -> str:
    """Return the file of a sharded state's ranges. The optimizer's states are in buckets, or not sharded."""
    boxes, optimizers = _boxes(parts), parts.optimizer.chained_optimizers
    states = [state["optimizer"]] if len(optimizers) == 1 else [state["optimizer"][i] for i in range(len(optimizers))]
    found = [
        one
        for optimizer, held in zip(optimizers, states, strict=True)
        for one in (
            _bucket_ranges(optimizer, held, boxes)
            if isinstance(optimizer, DistributedOptimizer)
            else _tensor_ranges(held)
        )
    ]
    return FILE.dump_json(found).decode()


def has_ranges(folder: Path) -> bool:
    """Return True if another plan can resume from the checkpoint in `folder`."""
    return any(folder.glob(FILE_NAME.format(rank="*")))


@torch.no_grad()
def read_states(parts: ModelAndOptimizer, folder: Path) -> None:
    """Fill the existing optimizer states of this process from a checkpoint of any plan.

    Raises InputError if it does not contain all of them.
    """
    by_key: dict[str, dict[TensorBox, list[StateRange]]] = {}
    for one in _read_ranges(folder):
        by_key.setdefault(one.part.key, {}).setdefault(one.part, []).append(one)
    boxes = _boxes(parts)
    parts.optimizer.reload_model_params()  # for a checkpoint whose fp32 weights are the model's
    for name in STATES:
        needed = {
            saved: ranges
            for own in boxes.values()
            for box, _ in own
            for saved, ranges in by_key.get(box.key, {}).items()
            if _overlap(box, saved) is not None and name in ranges[0].chunks
        }
        if not needed and name == "param":
            continue
        held = _read(folder, name, needed)
        for optimizer in parts.optimizer.chained_optimizers:
            for parameter, main, start, stop in _layout(optimizer):
                whole = torch.zeros(parameter.numel())
                for box, first in boxes[parameter]:
                    target = whole[first : first + math.prod(box.shape)].view(box.shape)
                    _fill(target, box, held, name=name, folder=folder)
                target = main if name == "param" else optimizer.optimizer.state[main][name]
                target.copy_(whole[start:stop].view(target.shape))


def _boxes(parts: ModelAndOptimizer) -> dict[nn.Parameter, list[tuple[TensorBox, int]]]:
    """Return the boxes of every parameter of this process, with their offsets in the flattened parameter."""
    found: dict[nn.Parameter, list[tuple[TensorBox, int]]] = {}
    for module in parts.unwrapped:
        for value in module.sharded_state_dict(metadata=dict(METADATA)).values():
            if not isinstance(value, ShardedTensor | ShardedTensorFactory) or not isinstance(value.data, nn.Parameter):
                continue
            first, held = 0, []
            for shard in shards_of(value):
                held.append((_box_of(shard, key=shard.key), first))
                first += math.prod(shard.local_shape)
            found[value.data] = held
    return found


def _box_of(shard: ShardedTensor, *, key: str) -> TensorBox:
    return TensorBox(key=key, offset=tuple(shard.global_offset), shape=tuple(shard.local_shape))


def _layout(optimizer: Any) -> Iterator[tuple[nn.Parameter, Tensor, int, int]]:
    """Yield each parameter, the fp32 tensor that the optimizer updates for it, and its range in the parameter."""
    if isinstance(optimizer, DistributedOptimizer):
        for ranges in optimizer.gbuf_ranges:
            for bucket in (bucket for buckets in ranges.values() for bucket in buckets):
                for parameter, where in bucket["param_map"].items():
                    group, order = optimizer.model_param_group_index_map[parameter]
                    main = optimizer.optimizer.param_groups[group]["params"][order]
                    yield parameter, main, where["param"].start, where["param"].end
        return
    groups = [group["params"] for group in optimizer.optimizer.param_groups]
    pairs = [(group, group) for group in groups]
    if isinstance(optimizer, Float16OptimizerWithFloat16Params):
        pairs = [
            *zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True),
            *((group, group) for group in optimizer.fp32_from_fp32_groups),
        ]
    for parameters, mains in pairs:
        for parameter, main in zip(parameters, mains, strict=True):
            yield parameter, main, 0, parameter.numel()


def _bucket_ranges(
    optimizer: DistributedOptimizer, state: dict[str, Any], boxes: dict[nn.Parameter, list[tuple[TensorBox, int]]]
) -> Iterator[StateRange]:
    entries = [
        entry
        for index in range(len(optimizer.gbuf_ranges))
        for buckets in state["param_state"][index].values()
        for bucket in buckets
        for entry in bucket
        if not entry["padding"].unwrap()
    ]
    for entry, (parameter, _, start, stop) in zip(entries, _layout(optimizer), strict=True):
        for box, first in boxes[parameter]:
            low, high = max(first, start), min(first + math.prod(box.shape), stop)
            if low < high:
                chunks = {
                    name: StoredChunk(name=entry[name].key, offset=tuple(entry[name].global_offset), skip=low - start)
                    for name in STATES
                }
                yield StateRange(part=box, start=low - first, stop=high - first, chunks=chunks)


def _tensor_ranges(state: dict[str, Any]) -> Iterator[StateRange]:
    """Yield the ranges of states with the shapes of their parameters."""
    chunks: dict[TensorBox, dict[str, StoredChunk]] = {}
    for value in nested_values(state):
        for shard in shards_of(value):
            if found := STORED.fullmatch(shard.key):
                name = found[1].removeprefix("fp32_")
                chunk = StoredChunk(name=shard.key, offset=tuple(shard.global_offset))
                chunks.setdefault(_box_of(shard, key=found[2]), {})[name] = chunk
    for box, held in chunks.items():
        yield StateRange(part=box, start=0, stop=math.prod(box.shape), chunks=held)


def _read_ranges(folder: Path) -> Iterator[StateRange]:
    """Yield all ranges once: ranks with the same tensors write the same ranges."""
    known = set()
    for path in sorted(folder.glob(FILE_NAME.format(rank="*"))):
        for one in FILE.validate_json(path.read_bytes()):
            if (one.part, one.start, one.stop) not in known:
                known.add((one.part, one.start, one.stop))
                yield one


def _overlap(own: TensorBox, saved: TensorBox) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the intersection of two boxes as slices of either; None: they are disjoint."""
    here, there = [], []
    for a, m, b, n in zip(own.offset, own.shape, saved.offset, saved.shape, strict=True):
        low, high = max(a, b), min(a + m, b + n)
        if low >= high:
            return None
        here.append(slice(low - a, high - a))
        there.append(slice(low - b, high - b))
    return tuple(here), tuple(there)


def _fill(target: Tensor, box: TensorBox, held: dict[TensorBox, Tensor], *, name: str, folder: Path) -> None:
    """Copy the overlapping parts of stored boxes to `target`, whose position is `box`."""
    is_filled = torch.zeros(box.shape, dtype=torch.bool)
    for saved, values in held.items():
        slices = _overlap(box, saved) if saved.key == box.key else None
        if slices is not None:
            target[slices[0]] = values[slices[1]]
            is_filled[slices[0]] = True
    if not is_filled.all() and box.key not in PADDED:
        raise InputError(f"checkpoint {folder} does not hold all of {name} of {box.key}", hint="it is of another model")


def _read(folder: Path, name: str, needed: dict[TensorBox, list[StateRange]]) -> dict[TensorBox, Tensor]:
    """Read one state of the given boxes."""
    held = {box: torch.zeros(math.prod(box.shape)) for box in needed}
    reads = []
    for box, ranges in needed.items():
        for one in ranges:
            chunk, target = one.chunks[name], held[box][one.start : one.stop]
            is_flat = len(chunk.offset) == 1
            reads.append((chunk, target if is_flat else target.view(box.shape)))
    load({}, storage_reader=CheckpointReader(folder), planner=_ChunkReader(reads), no_dist=True)
    return {box: values.view(box.shape) for box, values in held.items()}


class _ChunkReader(DefaultLoadPlanner):
    """Reads parts of chunks into tensors."""

    def __init__(self, reads: list[tuple[StoredChunk, Tensor]]) -> None:
        super().__init__()
        self.reads = reads

    def create_local_plan(self) -> LoadPlan:
        """Return a plan with one item per read."""
        return LoadPlan(
            [
                ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=MetadataIndex(str(index)),
                    dest_offsets=torch.Size([0] * target.dim()),
                    storage_index=MetadataIndex(chunk.name, torch.Size(chunk.offset)),
                    storage_offsets=torch.Size([chunk.skip, *[0] * (target.dim() - 1)]),
                    lengths=target.shape,
                )
                for index, (chunk, target) in enumerate(self.reads)
            ]
        )

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the target of a read."""
        return self.reads[int(index.fqn)][1]
