"""Rates that the cost model uses, from datasheet and calibration: `SystemRates`, one table for everything."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.arrays import Array, FloatArray, Table
from meshwright.calibration.correction import EfficiencyCorrection
from meshwright.calibration.parameters import Calibration, Factors, fitted
from meshwright.catalog.precisions import multiplied_on, refuse_precision
from meshwright.catalog.stacks import StackFacts, features_of, stack_facts
from meshwright.cost.attention import (
    ATTENTION_TILE,
    EXPONENTIAL_SHARES,
    FUSED_BACKWARD_GEMMS,
    SPLIT_BACKWARD_GEMMS,
    UNKNOWN_EXPONENTIAL_SHARE,
)
from meshwright.cost.collectives import Network, constants_for, network_row
from meshwright.cost.compute import DeviceFacts, DeviceRates, KernelCorrections
from meshwright.cost.elementwise import FusedKernels
from meshwright.cost.state_space import scan_pace
from meshwright.cost.unit_ports import unit_pace
from meshwright.kernels.architectures import architectures, expected_routes
from meshwright.kernels.operations import TRITON
from meshwright.specs.features import FUSED_IN, WIRE_BYTES, AttentionKernel, CudaGraphs, Dispatcher, Features
from meshwright.specs.hardware import Accelerator, Cluster, Stack
from meshwright.specs.precision import Precision

HOST_SHARE = {
    CudaGraphs.NONE: 1.0, CudaGraphs.STATE_SPACE: 1.0, CudaGraphs.PARTIAL: 0.3, CudaGraphs.FULL: 0.02,
}  # fmt: skip
"""Share of a layer's launches that the host still makes. Partial graphs hold attention, norms and projections; the
rest is assumed."""
HOST_STATE_SPACE_SHARE = {
    CudaGraphs.NONE: 1.0, CudaGraphs.STATE_SPACE: 0.1, CudaGraphs.PARTIAL: 0.1, CudaGraphs.FULL: 0.02,
}  # fmt: skip
"""Launch share of state-space blocks, which a graph holds whole: its replay and copies of its inputs remain.
Assumed."""
HOST_MOE_SHARE = {
    CudaGraphs.NONE: 1.0, CudaGraphs.STATE_SPACE: 1.0, CudaGraphs.PARTIAL: 0.6, CudaGraphs.FULL: 0.02,
}  # fmt: skip
"""Launch share of routing, dispatch and experts: partial graphs hold router and preprocessing."""
HOST_EXPERT_SHARE = {
    CudaGraphs.NONE: 1.0, CudaGraphs.STATE_SPACE: 1.0, CudaGraphs.PARTIAL: 1.0, CudaGraphs.FULL: 0.02,
}  # fmt: skip
"""Launch share of the experts' GEMMs, which partial graphs hold only where a capacity makes their shapes static."""
STATIC_SHAPES_SHARE = 0.5
"""Share of the host's time for a mixture's layer if experts have a capacity: the host waits for no counts. Assumed."""
ATTENTION_TILES = {AttentionKernel.SPLASH: 1024}
"""Tile sizes of other attention kernels. Splash: `sa_block_q` and `sa_block_kv` of MaxText's recipes for TPUs
are 1024 and 2048 (AI-Hypercomputer/tpu-recipes, training/ironwood/gpt-oss-120b at 604f8070)."""


@dataclass(frozen=True, kw_only=True)
class StackTraits(Table):
    """Traits of a software stack on a system, and rates of its hosts."""

    host_bytes_per_s: Array
    overlaps_data: Array
    stops_recompute: Array  # 1: recomputation ends before the last GEMM of a layer
    ring_attention: Array  # 1: attention of context ranks is a kernel for each part of the keys
    deduplicates: Array  # 1: expert dispatch sends one copy for each node
    dispatches_tensors: Array  # 1: the host runs DTensor's dispatch for each operation of tensor ranks
    regathers: Array  # 1: a layer for its backward pass in a pipeline
    copies_shards: Array  # 1: of layers from and to the buffers of their collectives
    copies_rows: Array  # 1: to each rank that holds a part of an expert
    tensor_gather_bytes: Array  # of an activation that tensor ranks gather; 0: as between layers
    host_share: Array  # of a layer's launches that the host still makes, the rest being replayed graphs
    host_state_space_share: Array  # the same of state-space blocks
    host_moe_share: Array  # the same of routing, dispatch and experts
    host_expert_share: Array  # the same of kernels that experts start one by one
    wire_gradient_bytes: Array  # of a gradient between ranks; 0: as the precision recipe says
    wire_shard_bytes: Array  # of a gradient between ranks that shard gradients; 0: as of others
    wire_parameter_bytes: Array
    offloaded_activations: Array  # share kept in host memory
    updates_on_host: Array  # 1: offloaded optimizer states are updated by a thread of each process
    keeps_masters: Array  # 1: the masters that FSDP shards stay on the device
    expert_imbalance: Array  # tokens of the busiest expert rank over the mean, or the capacity of all
    pads_experts: Array  # `StackFacts.pads_experts`
    cpu_oversubscription: Array  # processes for each part of a processor; 1: each has a device of its own
    years: Array  # vintage of the stack against 2025.0


@dataclass(frozen=True, kw_only=True)
class SystemFacts(DeviceFacts, StackTraits):
    """Facts that do not depend on calibration: datasheet numbers and traits of the stack."""

    matmul_format: str | NDArray[np.str_]
    network: Network


@dataclass(frozen=True, kw_only=True)
class SystemRates(StackTraits):
    """Everything about device, fabric and stack that the step model asks for."""

    device: DeviceRates
    network: Network
    tensor_exposed_ratio: Array
    tensor_collective_s: Array
    tensor_collective_factor: Array
    data_layer_s: Array
    data_collective_s: Array
    data_collective_factor: Array
    pipeline_transfer_s: Array
    accumulation_passes: Array
    context_loss_ratio: Array
    expert_exposed_ratio: Array
    data_hidden_ratio: Array
    gather_hidden_ratio: Array
    overlap_slowdown_ratio: Array
    pipeline_exposed_ratio: Array
    slowdown_per_doubling: Array
    step_s: Array
    optimizer_passes: Array
    general_factor: Array
    moe_factor: Array
    dispatch_s: Array
    dispatch_with_sequence_s: Array
    host_gain_per_year: Array
    dense_gain_per_year: Array
    moe_gain_per_year: Array


def vintage_of(stack: Stack, facts: StackFacts) -> float:
    """The stack's date as a decimal year; the newest with data when the stack names none."""
    return facts.newest if stack.vintage is None else stack.vintage


def factors_of(cluster: Cluster, precision: Precision, stack: Stack) -> Factors:
    """The keys by which calibration may tell this system from others.

    Kernels of attention are told by the architecture itself; other rates by the one whose rates it has.
    """
    facts, accelerator = stack_facts(stack.framework), cluster.accelerator
    features = features_of(stack, accelerator, precision=precision.name)
    die, family = accelerator.die or accelerator.name, accelerator.rates_of or accelerator.architecture
    measured = stack_facts(facts.rates_of) if facts.rates_of else facts
    return {
        "architecture": family,
        "device": accelerator.name,
        "die": die,
        "die_format": f"{die}/{precision.matmul}",
        "die_bf16": f"{die}/bf16",
        "device_format": f"{accelerator.name}/{precision.matmul}",
        "device_bf16": f"{accelerator.name}/bf16",
        "recipe": f"{family}/{precision.fitted_as or precision.name}",
        "recipe_bf16": f"{family}/bf16",
        "framework": measured.name,
        "lineage": facts.lineage,
        "architecture_lineage": f"{family}/{facts.lineage}",
        "fabric": cluster.fabric.network_of or cluster.fabric.name,
        "attention": f"{accelerator.architecture}/{features.attention}",
        "dispatcher": str(features.dispatcher),
        "expert_overlap": "overlapped" if features.overlaps_experts else "in turn",
        "tensor_overlap": "overlapped" if features.overlaps_tensor else "in turn",
        "fusion": "compiled" if features.compiles else ("eager" if facts.eager else "fused"),
        "expert_kernels": "fused" if _fuses_experts(features, precision) else "separate",
        "release": f"{measured.name}/{measured.release_name(vintage_of(stack, facts))}",
    }


def _fuses_experts(features: Features, precision: Precision) -> bool:
    """True if experts run in fused kernels, which exist for the block format MXFP8."""
    return bool(features.fuses_experts) and precision.name == FUSED_IN


def host_expert_share(features: Features) -> float:
    """Return the share of the kernels that experts start one by one which the host still starts."""
    shares = HOST_SHARE if features.pads_experts else HOST_EXPERT_SHARE
    return shares[features.cuda_graphs or CudaGraphs.NONE]


def _stops_recompute(accelerator: Accelerator, facts: StackFacts, features: Features, vintage: float) -> int:
    """1 where recomputation ends before the last GEMM; oneDNN's on a CPU saves its inputs after it has run."""
    stops = facts.stops_recompute and (bool(features.compiles) or vintage < facts.stops_until)
    return int(stops and accelerator.name != "cpu" and accelerator.output_tiles)


def _routed_accesses(facts: StackFacts, features: Features, vintage: float) -> float:
    """Reads and writes of a routed row around an all-to-all that a stack does besides permutations, as of `vintage`."""
    if features.dispatcher is not Dispatcher.ALL_TO_ALL:
        return 0.0
    known = [
        eager if not features.compiles else compiled
        for since, eager, compiled in facts.routed_copies
        if since <= vintage
    ]
    return known[-1] if known else 0.0


def _copies_shards(accelerator: Accelerator, facts: StackFacts) -> int:
    """1 where collectives have buffers of their own; what a CPU does around each is measured with it."""
    return int(facts.copies_shards and accelerator.name != "cpu")


def _attention_tile(features: Features) -> int:
    of_kernel = ATTENTION_TILES.get(features.attention, ATTENTION_TILE) if features.attention else ATTENTION_TILE
    return features.attention_tile or of_kernel


def _ragged_rows(facts: StackFacts, accelerator: Accelerator) -> int:
    """Rows of an expert that lies anywhere fill, in the mean, as many tiles as they need and one more.

    Each device that JAX shows has rows of every expert of its own.
    """
    return facts.ragged_tile_rows * accelerator.jax_devices if accelerator.architecture == "TPU" else 0


def system_facts(
    cluster: Cluster, precision: Precision, stack: Stack, *, routes: Mapping[str, str] | None = None
) -> SystemFacts:
    """Datasheet numbers of one system. `routes`: kernels by operation, as in a run file.

    InputError when a device lacks the number format.
    """
    refuse_precision(precision, cluster)
    accelerator, facts = cluster.accelerator, stack_facts(stack.framework)
    precision = multiplied_on(accelerator, precision)
    features = features_of(stack, accelerator, precision=precision.name)
    peaks = accelerator.limited_flops_per_s
    return SystemFacts(
        matmul_format=precision.matmul,
        matmul_flops_per_s=peaks[precision.matmul],
        bf16_flops_per_s=peaks.get("bf16", peaks[precision.matmul]),
        clock_width=accelerator.clock_width,
        memory_bytes_per_s=accelerator.memory_bytes_per_s,
        memory_bytes=accelerator.memory_bytes,
        num_units=accelerator.num_compute_units,
        output_tiles=int(accelerator.output_tiles),
        matrix_unit_width=accelerator.matrix_unit_width,
        matrix_share=accelerator.matrix_share,
        exponential_share=EXPONENTIAL_SHARES.get(accelerator.architecture, UNKNOWN_EXPONENTIAL_SHARE),
        host_bytes_per_s=accelerator.host_bytes_per_s,
        unfused_attention=int(features.attention is AttentionKernel.UNFUSED),
        unfused_norm=int(facts.unfused_norm),
        overlaps_data=int(facts.overlaps_data),
        stops_recompute=_stops_recompute(accelerator, facts, features, vintage_of(stack, facts)),
        remakes_logits=int(facts.remakes_logits),
        ring_attention=int(not facts.gathers_keys),
        deduplicates=int(features.dispatcher is not Dispatcher.ALL_TO_ALL),
        dispatches_tensors=int(_copies_shards(accelerator, facts) and facts.eager and not features.compiles),
        regathers=int(facts.regathers),
        copies_shards=_copies_shards(accelerator, facts),
        copies_rows=int(facts.copies_rows),
        tensor_gather_bytes=precision.linear_input_bytes if precision.name in facts.narrow_gathers else 0.0,
        host_share=HOST_SHARE[features.cuda_graphs or CudaGraphs.NONE],
        host_state_space_share=HOST_STATE_SPACE_SHARE[features.cuda_graphs or CudaGraphs.NONE],
        host_moe_share=HOST_MOE_SHARE[features.cuda_graphs or CudaGraphs.NONE]
        * (STATIC_SHAPES_SHARE if features.pads_experts else 1.0),
        host_expert_share=0.0 if facts.one_grouped_kernel else host_expert_share(features),
        # Where 8 bits are multiplied no faster than 16, a kernel gains nothing by them.
        fp8_attention=int(bool(features.fp8_attention) and peaks.get("fp8", 0.0) > peaks.get("bf16", 0.0)),
        fused_experts=int(_fuses_experts(features, precision)),
        attention_tile=_attention_tile(features),
        routed_accesses=_routed_accesses(facts, features, vintage_of(stack, facts)),
        attention_backward_gemms=FUSED_BACKWARD_GEMMS if features.fuses_attention_backward else SPLIT_BACKWARD_GEMMS,
        ragged_rows=_ragged_rows(facts, accelerator),
        unit_pace=unit_pace(accelerator),
        scan_pace=scan_pace(accelerator),
        wire_gradient_bytes=WIRE_BYTES[g] if (g := features.gradient_format) else 0.0,
        wire_shard_bytes=facts.shard_bytes(features, precision.name),
        wire_parameter_bytes=WIRE_BYTES[p] if (p := features.parameter_format) else 0.0,
        offloaded_activations=features.offloaded_activations or 0.0,
        updates_on_host=int(facts.updates_on_host),
        keeps_masters=int(facts.keeps_masters),
        expert_imbalance=features.busiest_expert_ratio,
        pads_experts=facts.pads_experts(features),
        cpu_oversubscription=accelerator.cpu_oversubscription,
        years=vintage_of(stack, facts) - 2025.0,
        network=network_row(cluster.fabric, constants_for(cluster.fabric), devices_per_node=cluster.devices_per_node),
        fused=fused_kernels(accelerator, routes=routes or {}) if facts.own_kernels else FusedKernels(),
    )


FUSED = frozenset({TRITON, "liger"})
"""Routes of norms, gated activations and rotary embeddings that read and write each of their tensors once."""


def fused_kernels(accelerator: Accelerator, *, routes: Mapping[str, str]) -> FusedKernels:
    """Return the native engine's kernels on `accelerator`: by `routes`, else those expected to be the fastest."""
    known = [
        a.name for a in architectures().values() if a.generation == (accelerator.rates_of or accelerator.architecture)
    ]

    def is_one_of(op: str, names: Collection[str]) -> int:
        if not known:
            return 0
        return int(routes.get(op, expected_routes(op, architecture=known[0])[0]) in names)

    return FusedKernels(
        norm=is_one_of("rms_norm", FUSED),
        activation=is_one_of("swiglu", FUSED),
        rotary=is_one_of("rotary", FUSED),
        loss=is_one_of("linear_cross_entropy", {TRITON}),
    )


def join(facts: SystemFacts, values: Mapping[str, Array], bf16: Mapping[str, Array]) -> SystemRates:
    """Datasheet facts and calibrated `values`; `bf16` are the values for 16-bit GEMMs."""
    device = DeviceRates(
        bf16_gemm_ratio=bf16["gemm_ratio"], **_shared(DeviceFacts, facts), **_fields_of(DeviceRates, values)
    )
    network = facts.network
    network = replace(
        network,
        up_bytes_per_s=network.up_bytes_per_s * values["scale_up_ratio"],
        up_peer_bytes_per_s=network.up_peer_bytes_per_s * values["scale_up_ratio"],
        up_switch_bytes_per_s=network.up_switch_bytes_per_s * values["scale_up_ratio"],
        out_bytes_per_s=network.out_bytes_per_s * values["scale_out_ratio"],
        out_step_s=network.out_step_s * values["scale_out_latency_factor"],
    )
    return SystemRates(device=device, network=network, **_shared(StackTraits, facts), **_fields_of(SystemRates, values))


def _shared(kind: type[Table], facts: SystemFacts) -> dict[str, Any]:
    """Return the fields of `facts` that it has from its base `kind`."""
    return {f.name: getattr(facts, f.name) for f in fields(kind)}


def _fields_of(table: type[Table], values: Mapping[str, Array]) -> dict[str, Any]:
    """Return the `values` that `table` has a field for."""
    own = {f.name for f in fields(table)}
    return {name: value for name, value in values.items() if name in own}


def rates_from_etas(
    calibration: Calibration, facts: SystemFacts, etas: Mapping[str, FloatArray], bf16_etas: Mapping[str, FloatArray]
) -> SystemRates:
    """`join` for values still in transformed units. A rate that was measured by copying has the ports in it."""
    if not calibration.parameters["memory_ratio"].levels:
        facts = replace(facts, unit_pace=0.0)
    rates = join(facts, calibration.values(etas), calibration.values({"gemm_ratio": bf16_etas["gemm_ratio"]}))
    if not calibration.parameters["elementwise_factor"].levels:  # measured on the device itself
        fused = replace(rates.device.fused, factor=rates.device.elementwise_factor)
        rates = replace(rates, device=replace(rates.device, fused=fused))
    if calibration.collectives.curves:
        network = replace(rates.network, measured=calibration.collectives)
        rates = replace(rates, network=network)
    if not calibration.corrections:
        return rates
    corrections = KernelCorrections(
        linear=_of_format(calibration.corrections, str(facts.matmul_format)),
        bf16=_of_format(calibration.corrections, "bf16"),
    )
    return replace(rates, device=replace(rates.device, corrections=corrections))


def _of_format(corrections: Mapping[str, EfficiencyCorrection], name: str) -> dict[str, EfficiencyCorrection]:
    """Corrections in one number format, by kernel; an optimizer's format is its own."""
    own = {key.removesuffix(f"/{name}"): s for key, s in corrections.items() if key.endswith(f"/{name}")}
    return own | {key.rpartition("/")[0]: s for key, s in corrections.items() if key.startswith("optimizer/")}


def bf16_factors(factors: Factors) -> Factors:
    """Return the factors of the system with 16-bit GEMMs."""
    return {
        **factors,
        "device_format": factors["device_bf16"],
        "die_format": factors["die_bf16"],
        "recipe": factors["recipe_bf16"],
    }


def system_rates(
    cluster: Cluster,
    precision: Precision,
    stack: Stack,
    *,
    calibration: Calibration | None = None,
    routes: Mapping[str, str] | None = None,
) -> SystemRates:
    """The rates of one system, as numbers. `routes`: see `system_facts`."""
    calibration = calibration or fitted()
    factors = factors_of(cluster, precision, stack)
    etas = {name: value[0] for name, value in calibration.etas([factors]).items()}
    bf16 = {name: value[0] for name, value in calibration.etas([bf16_factors(factors)]).items()}
    return rates_from_etas(calibration, system_facts(cluster, precision, stack, routes=routes), etas, bf16)
