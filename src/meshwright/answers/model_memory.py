"""Memory of training one model on no particular device: what `meshwright estimate --memory` prints.

Every row is the cost model's memory (`cost.memory`) of the native engine on data-parallel devices alone. A step has
several micro-batches, so that gradients are whole beside the activations. Host memory is what the device would hold
without the offload.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from meshwright.calibration.memory import memory_constants
from meshwright.cost.flops import count_parameters
from meshwright.cost.memory import MemoryTable, estimate_memory, memory_parts
from meshwright.cost.tables import BatchTable, WeightCache, model_row, plan_row, precision_row
from meshwright.errors import InputError
from meshwright.files import write_csv
from meshwright.json_values import jsonable, picked
from meshwright.result import Result
from meshwright.runfile import named_model
from meshwright.specs.adapters import absent_targets
from meshwright.specs.hardware import Stack
from meshwright.specs.model import Lora, Model
from meshwright.specs.optimizers import OPTIMIZERS
from meshwright.specs.plan import Offload, Plan, Sharding
from meshwright.specs.precision import PRECISIONS
from meshwright.specs.run import NATIVE, Optimizer, precision_with
from meshwright.units import format_count, gib

ADAMW = "adamw"
"""The optimizer whose states the native engine keeps in host memory."""

NUM_MICRO_BATCHES = 2
"""Of a step. More take the same memory; of a single one, gradients take the place of activations."""


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """One way to train the model, and the bytes that it takes on each device and in the host memory beside it."""

    precision: str
    optimizer: str
    lora_rank: int  # 0: every parameter is trained
    sharding: Sharding
    sequence_length: int
    micro_batch: int
    parts_bytes: dict[str, float]  # of a device; their sum is what it must have
    host_bytes: float  # for each device

    @property
    def total_bytes(self) -> float:
        """Bytes that a device must have."""
        return sum(self.parts_bytes.values())


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ModelMemory(Result):
    """Memory of training one model, without a cluster.

    Attributes:
        model: the model.
        num_parameters: its parameters, adapters not counted.
        num_devices: data-parallel devices.
        rows: bytes of every combination that was asked for.
        notes: cautions for the reader.
    """

    model: Model
    num_parameters: int
    num_devices: int
    rows: tuple[MemoryRow, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        rows = [{**vars(row), "total_bytes": row.total_bytes} for row in self.rows]
        return jsonable(
            {
                "model": self.model.name,
                "num_parameters": self.num_parameters,
                "num_devices": self.num_devices,
                "engine": NATIVE,
                "rows": rows,
                "notes": self.notes,
            }
        )

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each combination, with a column for each part."""
        return [
            {
                **picked(row, "precision", "optimizer", "lora_rank"),
                "sharding": row.sharding.name.lower(),
                "num_devices": self.num_devices,
                **picked(row, "sequence_length", "micro_batch"),
                **{f"{part.replace(' ', '_')}_bytes": size for part, size in row.parts_bytes.items()},
                **picked(row, "total_bytes", "host_bytes"),
            }
            for row in self.rows
        ]

    def write_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the rows of `to_rows`. Raises InputError if `path` cannot be written."""
        write_csv(path, self.to_rows())

    def summary(self) -> str:
        """Return the model's parameters, and the least and the most that a device must have."""
        sizes = [gib(row.total_bytes) for row in self.rows]
        devices = "one device" if self.num_devices == 1 else f"each of {self.num_devices:,} devices"
        return (
            f"{self.model.name}, {format_count(self.num_parameters)} parameters: training takes "
            f"{min(sizes):,.2f} to {max(sizes):,.2f} GiB on {devices}"
        )


def model_memory(
    *,
    model: str,
    sequence_length: Sequence[int],
    micro_batch: Sequence[int],
    precision: Sequence[str],
    optimizer: Sequence[str],
    lora_rank: Sequence[int],
    sharding: Sequence[str],
    devices: int,
    offload_optimizer: bool,
) -> ModelMemory:
    """Return the memory of each combination.

    Unless they are named, all optimizers are compared on one device, all kinds of sharding with AdamW on several.

    Raises InputError for a model that is unknown or larger than can be planned.
    """
    found = named_model(model)
    has_adapters = not absent_targets(found, Lora().targets)
    ranks = [rank for rank in lora_rank if rank == 0 or has_adapters]
    several = devices > 1
    stages = [Sharding[name.upper()] for name in sharding] or list(Sharding if several else [Sharding.NONE])
    offload = Offload.OPTIMIZER if offload_optimizer else Offload.NONE
    plans = [
        Plan(data_shard=devices, sharding=stage, micro_batch=size, offload=offload)
        for stage, size in product(stages, micro_batch)
    ]
    optimizers = optimizer or list(OPTIMIZERS)[: 1 if several or offload_optimizer else None]
    # The native engine keeps the states of other optimizers on the device.
    staying = [name for name in optimizers if name != ADAMW]
    if offload is not Offload.NONE and staying:
        raise InputError("--offload-optimizer", got=", ".join(staying), allowed=f"--optimizer {ADAMW}")
    cases = [
        case
        for case in product(precision, ranks or [0], optimizers, plans, sequence_length)
        if not _is_block_rounded(case[2], case[3])
    ]
    notes = [] if len(ranks) == len(lora_rank) else [f"{found.name} has no adapters here: no rows of LoRA"]
    if any(_is_block_rounded(name, plan) for name in optimizers for plan in plans):
        notes.append("adamw8bit rounds in blocks of whole tensors, which no plan shards: no rows of it on shards")
    if not cases:
        raise InputError("no combination is left", got=notes[-1], hint="--sharding none, or --optimizer adamw")
    return ModelMemory(
        model=found,
        num_parameters=round(float(count_parameters(model_row(found)).total)),
        num_devices=devices,
        rows=tuple(_row(found, *case) for case in cases),
        notes=tuple(notes),
    )


def _is_block_rounded(optimizer: str, plan: Plan) -> bool:
    """True for states in blocks of whole tensors, of which a plan has parts."""
    return optimizer == "adamw8bit" and plan.sharding is not Sharding.NONE and plan.data > 1


def _row(model: Model, precision: str, rank: int, optimizer: str, plan: Plan, seq_len: int) -> MemoryRow:
    memory = _memory(model, precision, rank, optimizer, plan, seq_len)
    on_device = _memory(model, precision, rank, optimizer, replace(plan, offload=Offload.NONE), seq_len)
    return MemoryRow(
        precision=precision,
        optimizer=optimizer,
        lora_rank=rank,
        sharding=plan.sharding,
        sequence_length=seq_len,
        micro_batch=plan.micro_batch,
        parts_bytes=memory_parts(memory),
        host_bytes=float(np.ravel(on_device.optimizer_bytes - memory.optimizer_bytes)[0]),
    )


def _memory(model: Model, precision: str, rank: int, optimizer: str, plan: Plan, seq_len: int) -> MemoryTable:
    constants = memory_constants(Stack(framework=NATIVE), precision=precision)
    return estimate_memory(
        model=model_row(model, lora=Lora(rank=rank) if rank else None),
        batch=BatchTable(seq_len=seq_len, global_batch=plan.data * plan.micro_batch * NUM_MICRO_BATCHES),
        plan=plan_row(plan),
        precision=precision_row(
            precision_with(PRECISIONS[precision], Optimizer(name=optimizer)),
            weight_cache=WeightCache.AUTO,
            frozen_in_16_bits=constants.frozen_in_16_bits,
        ),
        constants=constants,
    )
