"""Published runs as tables: one row per run, every field an array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from meshwright.accuracy.conditions import RunConditions
from meshwright.calibration.parameters import Factors, prior
from meshwright.catalog import lookup as catalog
from meshwright.catalog.clusters import placed_fabric
from meshwright.catalog.interconnects import fabric_named_by, fabric_without_bridge, says_no_bridge
from meshwright.catalog.stacks import features_of
from meshwright.cost.memory import MemoryConstants, MemoryTable, estimate_memory, memory_constants
from meshwright.cost.rates import SystemFacts, bf16_factors, factors_of, host_expert_share, system_facts
from meshwright.cost.tables import BatchTable, ModelTable, PlanTable, PrecisionTable, model_row, plan_row, precision_row
from meshwright.runfile.hardware import with_hardware
from meshwright.specs.hardware import Accelerator, Cluster
from meshwright.specs.precision import Precision


@dataclass(frozen=True, kw_only=True)
class RunTables:
    """Everything the cost model needs about n runs."""

    model: ModelTable
    batch: BatchTable
    plan: PlanTable
    precision: PrecisionTable
    facts: SystemFacts
    factors: list[Factors]
    bf16_factors: list[Factors]

    def take(self, index: NDArray[np.intp]) -> RunTables:
        """The runs at `index`."""
        return RunTables(
            model=self.model.take(index),
            batch=self.batch.take(index),
            plan=self.plan.take(index),
            precision=self.precision.take(index),
            facts=self.facts.take(index),
            factors=[self.factors[i] for i in index],
            bf16_factors=[self.bf16_factors[i] for i in index],
        )


def fabric_name(accelerator: Accelerator, hint: str, *, devices_per_node: int) -> str:
    """The fabric that a row's text on links and network names, else the accelerator's usual one.

    Not one of smaller nodes than the row's: the text describes another node then.
    """
    named = fabric_named_by(hint, accelerator.name)
    if named and devices_per_node <= catalog.fabric(named).scale_up_domain:
        return named
    usual = catalog.default_fabric_name(accelerator.name)
    return fabric_without_bridge(usual) if says_no_bridge(hint) else usual


def cluster_of(conditions: RunConditions) -> Cluster:
    """The cluster of a published run, on the fabric and the network that its row states, else on the usual ones."""
    accelerator = conditions.accelerator
    fabric = placed_fabric(
        fabric_name(accelerator, conditions.fabric_hint, devices_per_node=conditions.devices_per_node),
        devices_per_node=conditions.devices_per_node,
        num_nodes=conditions.num_nodes,
    )
    cluster = Cluster(
        name=f"{accelerator.name}-{conditions.devices_per_node}x{conditions.num_nodes}",
        accelerator=accelerator,
        fabric=fabric,
        devices_per_node=conditions.devices_per_node,
        num_nodes=conditions.num_nodes,
    )
    return with_hardware(cluster, network=conditions.network or None, power_w=conditions.power_w)


def tables_of(conditions: Sequence[RunConditions]) -> RunTables:
    """One table row per run, in order."""
    clusters = [cluster_of(c) for c in conditions]
    precisions = [c.number_formats for c in conditions]
    factors = [
        _factors(cluster, precision, c) for cluster, precision, c in zip(clusters, precisions, conditions, strict=True)
    ]
    facts = []
    for cluster, precision, c, keys in zip(clusters, precisions, conditions, factors, strict=True):
        row = system_facts(cluster, precision, c.stack)
        if c.fused_norm:
            row = replace(row, unfused_norm=0)
        if c.tf32:
            row = replace(row, matmul_flops_per_s=c.matmul_flops_per_s)
        if c.overlaps_data is not None:
            row = replace(row, overlaps_data=int(c.overlaps_data))
        if c.narrow_gemms:
            is_experts = float(c.narrow_gemms == "experts")
            row = replace(row, wide_dense=is_experts, wide_experts=1 - is_experts)
        if c.loops_experts:
            features = features_of(c.stack, c.accelerator, precision=c.precision)
            row = replace(row, loops_experts=1.0, fused_experts=0, host_expert_share=host_expert_share(features))
        if c.gemm_flops_per_s is not None:
            # All arithmetic follows the clock: peaks change by the measured rate over what GEMMs reach on the device
            # elsewhere (the prior of `gemm_ratio`). Memory and network do not.
            usual = prior().parameters["gemm_ratio"].prior_of(keys) * row.matmul_flops_per_s
            clock = c.gemm_flops_per_s / usual
            row = replace(
                row, matmul_flops_per_s=row.matmul_flops_per_s * clock, bf16_flops_per_s=row.bf16_flops_per_s * clock
            )
        facts.append(row)
    return RunTables(
        model=ModelTable.stack([_cached_model_row(c.model, c.lora) for c in conditions]),
        batch=BatchTable(
            seq_len=np.array([c.seq_len for c in conditions]),
            global_batch=np.array([c.global_batch for c in conditions]),
        ),
        plan=PlanTable.stack([plan_row(c.plan) for c in conditions]),
        precision=PrecisionTable.stack([precision_row(p) for p in precisions]),
        facts=SystemFacts.stack(facts),
        factors=factors,
        bf16_factors=[bf16_factors(f) for f in factors],
    )


def _factors(cluster: Cluster, precision: Precision, conditions: RunConditions) -> Factors:
    """Keys of a run's calibrated rates; TF32 is multiplied by the units of bf16 and reaches their share of its peak."""
    factors = factors_of(cluster, precision, conditions.stack)
    return bf16_factors(factors) if conditions.tf32 else factors


def memory_of(conditions: Sequence[RunConditions], tables: RunTables) -> MemoryTable:
    """Memory per device of every run, with the constants of its stack."""
    unfused = np.broadcast_to(tables.facts.unfused_attention, len(conditions))
    constants = [
        memory_constants(c.stack, unfused_attention=bool(u), fused_norm=c.fused_norm, precision=c.precision)
        for c, u in zip(conditions, unfused, strict=True)
    ]
    return estimate_memory(
        model=tables.model,
        batch=tables.batch,
        plan=tables.plan,
        precision=tables.precision,
        constants=MemoryConstants.stack(constants),
    )


_cached_model_row = cache(lambda model, lora: model_row(model, lora=lora))
