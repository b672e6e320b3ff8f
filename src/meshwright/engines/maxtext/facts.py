"""Facts about MaxText 0.2.5 for the planner."""

from __future__ import annotations

import numpy as np

from meshwright.arrays import Mask
from meshwright.cost.tables import RECOMPUTES, PlanTable
from meshwright.engines.maxtext import VERSION
from meshwright.engines.maxtext.config.models import is_gpt_oss
from meshwright.planner.engines import CHEAP, AnyValue, EngineFacts, LegalityContext, Rule, Scope
from meshwright.planner.rules import has_experts, is_divisor, loss_chunk, num_micro_batches
from meshwright.specs.features import AttentionKernel, Features, Preset, WireFormat
from meshwright.specs.hardware import Accelerator
from meshwright.specs.model import Model
from meshwright.specs.plan import Recompute, Schedule, Sharding


def _equal_tiles(s: LegalityContext, plan: PlanTable) -> Mask:
    """Each device has whole tokens of each of `num_vocab_tiling` tiles; its head has neither stages nor adapters."""
    chunk, tokens = loss_chunk(s, plan), plan.micro_batch * s.batch.seq_len // plan.context
    tiles = np.maximum(tokens // np.maximum(chunk, 1), 1)
    splits = (tokens % np.maximum(chunk, 1) == 0) & (tokens % (plan.tensor * tiles) == 0)
    return (chunk <= 0) | (splits & (np.asarray(plan.pipeline) == 1) & (s.model.lora_rank == 0))


RULES = (
    Rule(
        name="expert axis",
        scope=Scope.SHAPE,
        holds=lambda s, p: is_divisor(p.expert, p.data) & ((p.expert_tensor == p.tensor) | (not has_experts(s))),
        says=lambda s, p: (
            f"MaxText's expert axis is a part of its batch axes and experts are split like other layers: expert "
            f"{p.expert} must divide data {p.data}, expert_tensor {p.expert_tensor} must be tensor {p.tensor}"
        ),
        after="expert folding",
    ),
    Rule(
        name="micro-batch rounds",
        scope=Scope.BATCH,
        holds=lambda s, p: is_divisor(p.pipeline, num_micro_batches(s, p)),
        says=lambda s, p: (
            f"{int(num_micro_batches(s, p))} micro-batches are not a multiple of MaxText's {p.pipeline} stages"
        ),
        after="micro-batches",
    ),
    Rule(
        name="shards of one rank",
        holds=lambda _, p: (p.sharding == Sharding.NONE) | (p.data_shard * p.context > 1),
        says="MaxText shards nothing over one data and context rank: must be none",
        key="parallel.sharding",
        hint="parallel.sharding: none",
        after="replicas",
    ),
    Rule(
        name="fully sharded experts",
        holds=lambda s, p: (p.sharding != Sharding.PARAMETERS) | is_divisor(p.expert, p.data_shard),
        says=lambda _, p: (
            f"experts and shards of parameters share MaxText's axes: expert {p.expert} must divide data_shard "
            f"{p.data_shard}"
        ),
        key="parallel.expert",
        after="replicas",
    ),
    Rule(
        name="fully sharded width",
        holds=lambda s, p: (p.sharding != Sharding.PARAMETERS) | is_divisor(p.data_shard * p.context, s.model.hidden),
        says=lambda s, p: (
            f"data_shard {p.data_shard} x context {p.context} does not divide the hidden width {s.model.hidden}"
        ),
        after="replicas",
    ),
    Rule(
        name="latent stages",
        scope=Scope.SHAPE,
        holds=lambda s, p: (s.model.is_mla == 0) | (np.asarray(p.pipeline) == 1),
        says=lambda s, p: (
            f"under latent attention MaxText runs dense layers outside its pipeline, on all stages: pipeline "
            f"{p.pipeline} must be 1"
        ),
    ),
    Rule(
        name="stages of windows",
        scope=Scope.SHAPE,
        holds=lambda s, p: (s.model.num_windowed_layers == 0) | (np.asarray(p.pipeline) == 1),
        says=lambda s, p: (
            f"MaxText's blocks of layers with windows do not support pipelines: pipeline {p.pipeline} must be 1"
        ),
    ),
    Rule(
        name="latent recomputation",
        holds=lambda s, p: (s.model.is_mla == 0) | np.equal(p.recompute, RECOMPUTES.index(Recompute.FULL)),
        says="under latent attention MaxText's policies recompute latents too, which no set of modules expresses: "
        "recompute must be full",
    ),
    Rule(
        name="stages of adapters",
        scope=Scope.SHAPE,
        holds=lambda s, p: (s.model.lora_rank == 0) | (np.asarray(p.pipeline) == 1),
        says="MaxText finds the modules with adapters by a forward pass of one token, which its pipeline cannot split "
        "into micro-batches: must be 1",
        key="parallel.pipeline",
    ),
    Rule(
        name="axes that shard weights",
        holds=lambda _, p: (p.sharding == Sharding.PARAMETERS) | (p.context * p.expert == 1),
        says="MaxText shards weights over its context and expert axes too",
        key="parallel.sharding",
        hint="--set parallel.sharding=parameters",
    ),
    Rule(
        name="offloaded activations",
        holds=lambda s, p: (not s.software.offloaded_activations) | (np.asarray(p.pipeline) == 1),
        says="a pipeline of MaxText keeps tensors by policies of its own: pipeline must be 1",
        key="stack.offloaded_activations",
    ),
    Rule(
        name="equal chunks of the loss",
        scope=Scope.BATCH,
        holds=_equal_tiles,
        says=lambda s, p: (
            f"MaxText splits a micro-batch of {p.micro_batch} x {s.batch.seq_len // p.context} tokens into equal tiles "
            f"without pipelines and adapters, and not into chunks of {int(loss_chunk(s, p))} tokens"
        ),
        key="kernels.loss_chunk",
    ),
    Rule(
        name="sequences of experts",
        scope=Scope.SHAPE,
        holds=lambda s, p: (not has_experts(s)) | (p.tensor == 1) | (p.sequence_parallel == 0),
        says="with experts MaxText's `tensor_sequence` axis gives other losses than one device: must be false",
        key="parallel.sequence_parallel",
        hint="--set parallel.sequence_parallel=false",
    ),
    Rule(
        name="accumulated gradients",
        holds=lambda s, p: (
            (p.sharding != Sharding.OPTIMIZER)
            | (p.pipeline > 1)
            | (num_micro_batches(s, p) <= 1)
            | (s.precision != "fp32")
            | (s.model.lora_rank > 0)
        ),
        says="MaxText rounds weights to bf16 when it accumulates gradients under a sharded optimizer",
        key="parallel.sharding",
        hint="--set parallel.sharding=parameters, or batch.micro as large as the batch of a device",
    ),
    Rule(
        name="devices of JAX",
        scope=Scope.BATCH,
        holds=lambda s, p: is_divisor(s.jax_devices, p.micro_batch),
        says=lambda s, _: (
            f"JAX shows {s.jax_devices} devices for each device of the cluster, which take equal parts of a micro-batch"
        ),
        key="batch.micro",
        hint=lambda s, p: f"--set batch.micro={p.micro_batch * s.jax_devices}",
    ),
)


def _preset(model: Model, preset: Preset, _: Accelerator | None) -> Features:
    """Gradients in fp32, and for GPT-OSS the one kernel with sinks that every environment has, under both presets."""
    attention = AttentionKernel.UNFUSED if is_gpt_oss(model) else None
    return Features(attention=attention, gradient_format=WireFormat.FP32 if preset is Preset.ENGINE else None)


FACTS = EngineFacts(
    title=f"maxtext {VERSION}",
    stack="maxtext",
    vendors=("Google", "NVIDIA", "AMD", "generic"),
    vendors_source="MaxText 0.2.5: configs/base.yml (hardware: tpu, gpu, gpu_multiprocess or cpu)",
    precisions=("fp32", "bf16"),
    schedules=(Schedule.GPIPE, Schedule.INTERLEAVED),  # scan over iterations; "circular" when repeated
    shardings=(Sharding.NONE, Sharding.OPTIMIZER, Sharding.PARAMETERS),
    recomputes=(Recompute.SELECTIVE, Recompute.FULL),
    selective=tuple(
        (*attention, *CHEAP, *block) for attention in ((), ("core_attention",)) for block in ((), ("mlp",), ("moe",))
    ),
    dense_activation=True,
    whole_sequences=True,
    updates_16_bits=True,
    splits_no_experts=True,
    short_interleaving=True,
    loss="logits of all tokens of a micro-batch at once (num_vocab_tiling: 1)",
    loss_chunks=True,  # `num_vocab_tiling`, where the run asks for it
    switches=(
        ("attention", ("unfused", "cudnn", "ck", "splash")),
        ("attention_tile", AnyValue()),
        ("fuses_attention_backward", (True, False)),
        ("gradient_format", ("fp32", "bf16")),
        ("cuda_graphs", ("none",)),
        ("offloaded_activations", (1.0,)),
    ),
    preset=_preset,
    rules=RULES,
    configurations=(".yml",),
    source="MaxText 0.2.5: configs/types.py (RematPolicy, pipeline checks)",
)
