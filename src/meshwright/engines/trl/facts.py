"""Facts about TRL's `SFTTrainer` for the planner: copies of the model (DDP), or FSDP2 by the layers of transformers."""

from __future__ import annotations

import numpy as np

from meshwright.cost.tables import RECOMPUTES
from meshwright.engines.trl import VERSION
from meshwright.planner.engines import EngineFacts, Rule, Scope
from meshwright.specs.features import AttentionKernel, Features, Preset
from meshwright.specs.hardware import Accelerator
from meshwright.specs.model import Model
from meshwright.specs.plan import Recompute, Schedule, Sharding


def _preset(_: Model, preset: Preset, device: Accelerator | None) -> Features:
    """FlashAttention 2, one of the two kernels with which documents of a packed batch do not see each other."""
    is_ck = device is not None and device.vendor == "AMD"  # its flash-attn is Composable Kernel's
    return Features(attention=AttentionKernel.CK if is_ck else AttentionKernel.FA2)


FACTS = EngineFacts(
    title=f"TRL {VERSION}",
    stack="transformers-fp32",
    vendors=("NVIDIA", "AMD"),
    vendors_source="trl 1.16.0: trainer/sft_trainer.py: packed batches need FlashAttention 2 or 3",
    precisions=("bf16",),
    schedules=(Schedule.ONE_F_ONE_B,),
    shardings=(Sharding.NONE, Sharding.GRADIENTS, Sharding.PARAMETERS),
    recomputes=(Recompute.NONE, Recompute.FULL),
    any_vocabulary=True,
    switches=(
        ("attention", ("fa2", "fa3", "ck")),
        ("compiles", (True, False)),
        ("reduces_once", (True, False)),
        ("offloaded_activations", (0.0, 1.0)),
    ),
    preset=_preset,
    compiles_on_request=True,
    rules=(
        Rule(
            name="data parallelism alone",
            scope=Scope.SHAPE,
            holds=lambda _, p: p.tensor * p.context * p.pipeline * p.expert * p.expert_tensor == 1,
            says="TRL splits neither layers nor sequences: tensor, context, pipeline and expert must be 1",
        ),
        Rule(
            name="one group of shards",
            # Replicas of shards need accelerate's `parallelism_config`, which no argument of the trainer sets.
            holds=lambda _, p: (p.sharding == Sharding.NONE) | (p.data_replicate == 1),
            says=lambda _, p: f"the arguments of the trainer shard over all devices, not {p.data_replicate} times",
            key="parallel.data_replicate",
        ),
        Rule(
            name="reduction of shards",
            holds=lambda s, p: (s.software.gradient_format is None) | (np.asarray(p.sharding) == Sharding.NONE),
            says=lambda s, p: f"FSDP2 under accelerate reduces gradients in bf16, not {s.software.gradient_format}",
            key="stack.gradient_format",
            hint="leave it out",
        ),
        Rule(
            name="quantised base of shards",
            holds=lambda s, p: (s.model.quantised_bytes == 0) | (np.asarray(p.sharding) == Sharding.NONE),
            says="a quantised base is not sharded: must be none",
            key="parallel.sharding",
        ),
        Rule(
            name="offloaded activations",
            # `OffloadActivations` leaves on the device what several operations save; recomputed layers save once.
            holds=lambda s, p: (
                (not s.software.offloaded_activations)
                | ((p.recompute == RECOMPUTES.index(Recompute.FULL)) & (not s.software.compiles))
            ),
            says="TRL offloads the inputs of recomputed layers, which are not compiled, and keeps other activations",
            key="stack.offloaded_activations",
            hint="parallel.recompute: full, train.compile: false",
        ),
    ),
    source="trl 1.16.0: trainer/sft_config.py; transformers 5.24.0: training_args.py, _process_fsdp_args",
)
