"""Where the optimizer's states lie in a checkpoint, so that another plan finds its own among them.

Megatron's cheap form of a shared optimizer's states is one of this plan's buckets. A piece says whose they are: a run
of one part of a parameter, laid out flat, and the chunk of the files that holds each of its states. Every process
writes those that it knows beside Megatron's files, and a process of another plan reads the runs that its own parts
overlap.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from meshwright.engines.megatron.in_megatron_process.initial_weights import METADATA
from meshwright.engines.megatron.in_megatron_process.model import Parts
from meshwright.engines.megatron.megatron_core.tensor_names import OUTSIDE_LAYERS
from meshwright.errors import InputError

NAME = "pieces-{rank}.json"
STATES = ("exp_avg", "exp_avg_sq", "param")  # `param`: the fp32 weights, where they are kept apart
STORED = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(exp_avg|exp_avg_sq|fp32_param)\.(.+)")
PADDED = (
    OUTSIDE_LAYERS["embedding.weight"],
    OUTSIDE_LAYERS["head.weight"],
)  # rows come and go with tensor ranks


@dataclass(frozen=True, kw_only=True)
class Part:
    """A box of one of Megatron's tensors."""

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """What the files hold in one place."""

    name: str
    offset: tuple[int, ...]
    skip: int = 0  # numbers of it before those of the piece


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Numbers `start` to `stop` of `part`, laid out flat."""

    part: Part
    start: int
    stop: int
    chunks: dict[str, Chunk]  # by state


def pieces_text(parts: Parts, state: dict[str, Any]) -> str:
    """Those of a sharded state, as a file. Its optimizer's states are of the buckets' form, or not shared out."""
    boxes, optimizers = _boxes(parts), parts.optimizer.chained_optimizers
    states = (
        [state["optimizer"]]
        if len(optimizers) == 1
        else [state["optimizer"][i] for i in range(len(optimizers))]
    )
    found = [
        piece
        for optimizer, held in zip(optimizers, states, strict=True)
        for piece in (
            _of_buckets(optimizer, held, boxes)
            if isinstance(optimizer, DistributedOptimizer)
            else _of_tensors(held)
        )
    ]
    return json.dumps([asdict(piece) for piece in found])


def has_pieces(folder: Path) -> bool:
    """Whether another plan can go on from the checkpoint there."""
    return any(folder.glob(NAME.format(rank="*")))


@torch.no_grad()
def read_states(parts: Parts, folder: Path) -> None:
    """Fill the optimizers' states of this process, which exist, from a checkpoint of any plan.

    Raises InputError where it does not hold all of them.
    """
    by_key: dict[str, dict[Part, list[Piece]]] = {}
    for piece in _pieces(folder):
        by_key.setdefault(piece.part.key, {}).setdefault(piece.part, []).append(piece)
    boxes = _boxes(parts)
    parts.optimizer.reload_model_params()  # of a checkpoint whose fp32 weights are the model's
    for name in STATES:
        needed = {
            saved: pieces
            for mine in boxes.values()
            for part, _ in mine
            for saved, pieces in by_key.get(part.key, {}).items()
            if _overlap(part, saved) is not None and name in pieces[0].chunks
        }
        if not needed and name == "param":
            continue
        held = _read(folder, name, needed)
        for optimizer in parts.optimizer.chained_optimizers:
            for parameter, main, start, stop in _layout(optimizer):
                whole = torch.zeros(parameter.numel())
                for part, first in boxes[parameter]:
                    box = whole[first : first + math.prod(part.shape)].view(part.shape)
                    _fill(box, part, held, name=name, folder=folder)
                target = main if name == "param" else optimizer.optimizer.state[main][name]
                target.copy_(whole[start:stop].view(target.shape))


def _boxes(parts: Parts) -> dict[nn.Parameter, list[tuple[Part, int]]]:
    """The parts that every parameter of this process holds, with their place in it laid out flat."""
    found: dict[nn.Parameter, list[tuple[Part, int]]] = {}
    for module in parts.plain:
        for value in module.sharded_state_dict(metadata=dict(METADATA)).values():
            if not isinstance(value, ShardedTensor | ShardedTensorFactory) or not isinstance(
                value.data, nn.Parameter
            ):
                continue
            built = value.build() if isinstance(value, ShardedTensorFactory) else value
            first, held = 0, []
            for shard in built if isinstance(built, list) else [built]:
                held.append((_part(shard, key=shard.key), first))
                first += math.prod(shard.local_shape)
            found[value.data] = held
    return found


def _part(shard: ShardedTensor, *, key: str) -> Part:
    return Part(key=key, offset=tuple(shard.global_offset), shape=tuple(shard.local_shape))


def _layout(optimizer: Any) -> Iterator[tuple[nn.Parameter, Tensor, int, int]]:
    """A parameter, the fp32 tensor that the optimizer moves for it, and which numbers of it that one is."""
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


def _of_buckets(
    optimizer: DistributedOptimizer, state: dict[str, Any], boxes: dict[nn.Parameter, list[tuple[Part, int]]]
) -> Iterator[Piece]:
    entries = [
        entry
        for index in range(len(optimizer.gbuf_ranges))
        for buckets in state["param_state"][index].values()
        for bucket in buckets
        for entry in bucket
        if not entry["padding"].unwrap()
    ]
    for entry, (parameter, _, start, stop) in zip(entries, _layout(optimizer), strict=True):
        for part, first in boxes[parameter]:
            low, high = max(first, start), min(first + math.prod(part.shape), stop)
            if low < high:
                chunks = {
                    name: Chunk(
                        name=entry[name].key, offset=tuple(entry[name].global_offset), skip=low - start
                    )
                    for name in STATES
                }
                yield Piece(part=part, start=low - first, stop=high - first, chunks=chunks)


def _of_tensors(state: dict[str, Any]) -> Iterator[Piece]:
    """States shaped as their parameters are."""
    chunks: dict[Part, dict[str, Chunk]] = {}
    for value in nested_values(state):
        built = value.build() if isinstance(value, ShardedTensorFactory) else value
        for shard in built if isinstance(built, list) else [built]:
            if isinstance(shard, ShardedTensor) and (said := STORED.fullmatch(shard.key)):
                name = said[1].removeprefix("fp32_")
                chunk = Chunk(name=shard.key, offset=tuple(shard.global_offset))
                chunks.setdefault(_part(shard, key=said[2]), {})[name] = chunk
    for part, held in chunks.items():
        yield Piece(part=part, start=0, stop=math.prod(part.shape), chunks=held)


def _pieces(folder: Path) -> Iterator[Piece]:
    """All, each once: ranks that have the same tensors know the same pieces of them."""
    known = set()
    for path in sorted(folder.glob(NAME.format(rank="*"))):
        for said in json.loads(path.read_text(encoding="utf-8")):
            box = said["part"]
            part = Part(key=box["key"], offset=tuple(box["offset"]), shape=tuple(box["shape"]))
            if (part, said["start"], said["stop"]) not in known:
                known.add((part, said["start"], said["stop"]))
                chunks = {
                    name: Chunk(name=chunk["name"], offset=tuple(chunk["offset"]), skip=chunk["skip"])
                    for name, chunk in said["chunks"].items()
                }
                yield Piece(part=part, start=said["start"], stop=said["stop"], chunks=chunks)


def _overlap(mine: Part, saved: Part) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where both are the same numbers, in either; None: nowhere."""
    here, there = [], []
    for a, m, b, n in zip(mine.offset, mine.shape, saved.offset, saved.shape, strict=True):
        low, high = max(a, b), min(a + m, b + n)
        if low >= high:
            return None
        here.append(slice(low - a, high - a))
        there.append(slice(low - b, high - b))
    return tuple(here), tuple(there)


def _fill(box: Tensor, part: Part, held: dict[Part, Tensor], *, name: str, folder: Path) -> None:
    is_there = torch.zeros(part.shape, dtype=torch.bool)
    for saved, numbers in held.items():
        where = _overlap(part, saved) if saved.key == part.key else None
        if where is not None:
            box[where[0]] = numbers[where[1]]
            is_there[where[0]] = True
    if not is_there.all() and part.key not in PADDED:
        raise InputError(
            f"checkpoint {folder} does not hold all of {name} of {part.key}", hint="it is of another model"
        )


def _read(folder: Path, name: str, needed: dict[Part, list[Piece]]) -> dict[Part, Tensor]:
    """One state of these parts, whole."""
    held = {part: torch.zeros(math.prod(part.shape)) for part in needed}
    runs = []
    for part, pieces in needed.items():
        for piece in pieces:
            chunk, run = piece.chunks[name], held[part][piece.start : piece.stop]
            is_flat = len(chunk.offset) == 1
            runs.append((chunk, run if is_flat else run.view(part.shape)))
    load({}, storage_reader=FileSystemReader(folder), planner=_Runs(runs), no_dist=True)
    return {part: numbers.view(part.shape) for part, numbers in held.items()}


class _Runs(LoadPlanner):
    """Reads parts of chunks into tensors."""

    def __init__(self, runs: list[tuple[Chunk, Tensor]]) -> None:
        self.runs = runs

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Nothing: the runs are known."""

    def create_local_plan(self) -> LoadPlan:
        """An item a run."""
        return LoadPlan(
            [
                ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=MetadataIndex(str(index)),
                    dest_offsets=torch.Size([0] * run.dim()),
                    storage_index=MetadataIndex(chunk.name, torch.Size(chunk.offset)),
                    storage_offsets=torch.Size([chunk.skip, *[0] * (run.dim() - 1)]),
                    lengths=run.shape,
                )
                for index, (chunk, run) in enumerate(self.runs)
            ]
        )

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Every process reads by itself."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """As it was."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """There are none."""

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where the run goes."""
        return self.runs[int(read_item.dest_index.fqn)][1]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """It is there."""
