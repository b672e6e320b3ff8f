"""Facts about torchtitan 0.3.0 for the planner."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.arrays import Mask
from meshwright.cost.tables import RECOMPUTES, PlanTable
from meshwright.engines.torchtitan import VERSION
from meshwright.planner.engines import EngineFacts, LegalityContext, Rule, Scope
from meshwright.planner.rules import fills_stages, has_experts, has_schedule, loss_chunk, num_micro_batches
from meshwright.specs.features import AttentionKernel, CudaGraphs, Dispatcher, Features, Preset, WireFormat
from meshwright.specs.hardware import Accelerator
from meshwright.specs.model import Model
from meshwright.specs.plan import Recompute, Schedule, Sharding


def _rounds(s: LegalityContext, plan: PlanTable) -> Mask:
    """torch.distributed.pipelining runs interleaved micro-batches in max(1, m // p) rounds of equal size."""
    m = num_micro_batches(s, plan)
    rounds = np.maximum(m // np.maximum(plan.pipeline, 1), 1)
    return ~has_schedule(plan, Schedule.INTERLEAVED) | (plan.pipeline == 1) | (m % rounds == 0)


def _equal_chunks(s: LegalityContext, plan: PlanTable) -> Mask:
    """`ChunkedLossWrapper` splits the sequences of a context rank into chunks of equal length."""
    chunk, length = loss_chunk(s, plan), s.batch.seq_len // plan.context
    tokens = plan.micro_batch * length
    chunks = np.maximum(tokens // np.maximum(chunk, 1), 1)
    return (chunk <= 0) | ((tokens % np.maximum(chunk, 1) == 0) & (length % chunks == 0))


RULES = (
    Rule(
        name="expert tensor width",
        scope=Scope.SHAPE,
        holds=lambda s, p: p.expert_tensor == 1,
        says=lambda s, p: f"expert_tensor {p.expert_tensor}: torchtitan {VERSION} does not split single experts",
        after="expert folding",
    ),
    Rule(
        name="micro-batch rounds",
        scope=Scope.BATCH,
        holds=_rounds,
        says=lambda s, p: (
            f"{int(num_micro_batches(s, p))} micro-batches do not split evenly into the "
            f"{max(1, int(num_micro_batches(s, p)) // int(p.pipeline))} rounds of torch's interleaving"
        ),
        after="micro-batches",
    ),
    Rule(
        name="recomputation under zero bubble",
        holds=lambda _, p: ~has_schedule(p, Schedule.ZBV) | (p.recompute == RECOMPUTES.index(Recompute.NONE)),
        says=lambda _, p: f"torchtitan {VERSION} runs its zero-bubble schedules only without recomputation",
    ),
    Rule(
        name="filled stages",
        scope=Scope.SHAPE,
        holds=fills_stages,
        says=lambda s, p: (
            f"every stage needs a layer, and {s.model.num_layers} layers do not fill "
            f"{p.pipeline * p.virtual_pipeline} stages"
        ),
        key="parallel.pipeline",
        hint="set parallel.layers_per_stage",
        after="layers",
    ),
    Rule(
        name="tied embeddings",
        scope=Scope.SHAPE,
        holds=lambda s, p: (s.model.tied == 0) | (np.asarray(p.pipeline) == 1),
        says="tied embeddings need the whole model: must be 1",
        key="parallel.pipeline",
    ),
    Rule(
        name="sharding over context ranks",
        # `ParallelDims.fsdp_enabled`: parameters are sharded over the ranks of context parallelism, too.
        holds=lambda _, p: (p.sharding != Sharding.NONE) | (p.context == 1),
        says=f"torchtitan {VERSION} shards over context ranks: must be gradients or parameters",
        key="parallel.sharding",
    ),
    Rule(
        name="equal chunks of the loss",
        scope=Scope.BATCH,
        holds=_equal_chunks,
        says=lambda s, p: (
            f"torchtitan splits a micro-batch of {p.micro_batch} x {s.batch.seq_len // p.context} tokens into equal "
            f"chunks along its sequences, and not into chunks of {int(loss_chunk(s, p))} tokens"
        ),
        key="kernels.loss_chunk",
    ),
    Rule(
        name="sequences of experts",
        scope=Scope.BATCH,
        holds=lambda s, p: (not has_experts(s)) | (p.tensor == 1) | (p.sequence_parallel == 0) | (p.micro_batch > 1),
        says="experts get wrong gradients from micro-batches of one sequence: must be false",
        key="parallel.sequence_parallel",
        hint="or batch.micro: 2",
    ),
)


def _preset(_: Model, preset: Preset, device: Accelerator | None) -> Features:
    """Defaults of its configuration classes, and FlexAttention: it has no other kernel for devices of all kinds.

    On AMD FlexAttention is compiled to Triton, whose kernels were measured there.
    """
    is_flex = device is not None and device.vendor == "NVIDIA"
    switches = Features(attention=AttentionKernel.FLEX if is_flex else None)
    if preset is Preset.RECIPE:
        return switches
    return replace(
        switches, gradient_format=WireFormat.FP32, dispatcher=Dispatcher.ALL_TO_ALL, cuda_graphs=CudaGraphs.NONE
    )


FACTS = EngineFacts(
    title=f"torchtitan {VERSION}",
    stack="torchtitan",
    vendors=("NVIDIA", "AMD", "generic"),
    vendors_source="torchtitan 0.3.0: tools/utils.py, get_device_info: a device of PyTorch 2.13's torch._utils, "
    "which has neither Gaudi (hpu) nor TPUs (xla)",
    precisions=("fp32", "bf16", "fp8_rowwise"),
    # Its zero-bubble schedules are interleaved or V-shaped, its DualPipe is V-shaped.
    schedules=(Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED, Schedule.ZBV),
    shardings=(Sharding.NONE, Sharding.GRADIENTS, Sharding.PARAMETERS),
    recomputes=tuple(Recompute),
    selective=(("alternate_matmuls",),),  # its policy by operation saves every second matmul
    dense_activation=True,
    uneven_layers=True,
    any_vocabulary=True,  # split unevenly
    whole_sequences=True,
    updates_16_bits=True,
    splits_no_experts=True,
    short_interleaving=True,
    context_block=128,
    loss="logits of all tokens of a micro-batch at once, in fp32 (CrossEntropyLoss)",
    loss_chunks=True,  # `ChunkedLossWrapper`, where the run asks for it
    switches=(
        ("dispatcher", ("all-to-all", "deepep", "hybridep")),
        ("gradient_format", ("fp32",)),
        ("cuda_graphs", ("none",)),
        ("compiles", (True, False)),
        ("attention", ("flex",)),
    ),
    preset=_preset,
    compiles_on_request=True,
    rules=RULES,
    configurations=(".toml", ".py", ":"),
    source="torchtitan 0.3.0: config/configs.py, distributed/*.py",
)
