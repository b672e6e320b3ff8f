"""Data parallelism: states and gradients sharded over processes with FSDP2 (`fully_shard`).

Context ranks shard the states like data ranks: "data ranks" here are both.

    sharding     mesh                               kept between forward and backward
    none         all data ranks replicate           whole parameters (DDP)
    optimizer    replicate x shard                  whole parameters; gradients stay whole until the last
                                                    micro-batch (ZeRO-1)
    gradients    replicate x shard                  whole parameters; gradients are shards (ZeRO-2)
    parameters   replicate x shard                  shards: each layer is gathered twice (ZeRO-3; HSDP when
                                                    replicate > 1)

A dense model is not wrapped where one process holds all states of its part: FSDP's hooks would cost time for
nothing.

Experts have their own mesh where they are sharded differently from dense layers (`expert`): ranks with the same
experts shard their states, in FSDP groups within those of the layers.

Gradients are summed, never averaged: the loss of a micro-batch is already divided by the tokens of the global batch,
which differ between ranks when answers are masked. Gloo also has sums only.

Source: Rajbhandari et al. 2020 (ZeRO), section 5; Zhao et al. 2023 (FSDP).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from meshwright.engines.native.parallel.expert import ExpertMesh, experts_of
from meshwright.engines.native.parallel.mesh import REPLICATE, SHARD, MeshCoordinates, state_axes
from meshwright.specs.plan import Plan, Sharding
from meshwright.training.distributed_tensors import is_fsdp


def needs_fsdp(plan: Plan) -> bool:
    """Return True if several processes hold the same parameters of layers, or shards of them.

    >>> [needs_fsdp(plan) for plan in (Plan(tensor=2, pipeline=2), Plan(tensor=2, context=2))]
    [False, True]
    """
    return math.prod(state_axes(plan)) > 1


def apply_fsdp(
    module: nn.Module,
    *,
    layers: Iterable[nn.Module],
    coordinates: MeshCoordinates,
    compute: torch.dtype,
    experts: ExpertMesh | None = None,
) -> nn.Module:
    """Shard `module` in place, layer by layer, so that the collectives of one layer overlap the compute of another.

    The shards are fp32 (the optimizer's masters), layers compute in `compute`, gradients are reduced in fp32.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    replicas, _ = state_axes(coordinates.plan)
    mesh = coordinates.axes(REPLICATE, SHARD) if replicas > 1 else coordinates.axes(SHARD)
    options = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32),
        # A pipeline runs a layer many times a step; gathering it each time would cost more than it frees.
        "reshard_after_forward": coordinates.plan.sharding is Sharding.PARAMETERS and coordinates.plan.pipeline == 1,
    }
    for layer in layers:
        if experts is not None:
            own = {"mesh": experts.state_mesh(), "shard_placement_fn": experts.shard_dim}
            for stacks in experts_of(layer):
                fully_shard(stacks, **own, **options)
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(module, mesh=mesh, **options)
    for part in module.modules():
        if is_fsdp(part):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    return module


def set_gradient_sync(module: nn.Module, *, is_last: bool, sharding: Sharding) -> None:
    """Set if the next micro-batch reduces gradients over processes. Up to ZeRO-1 only the last one does."""
    if is_fsdp(module):
        module.set_requires_gradient_sync(is_last or sharding > Sharding.OPTIMIZER)
