"""Decoders as plain modules: Llama, Mistral, Mixtral, Qwen3, Qwen3-MoE, DeepSeek-V2 and DeepSeek-V3.

Read `transformer` first, then `attention`, `feed_forward` and `experts`; the other modules are their parts.

>>> import torch
>>> from meshwright.catalog.lookup import model
>>> llama = build_model(model("llama3.1-8b"), dtype=torch.bfloat16)  # on the meta device: no memory
>>> sum(p.numel() for p in llama.parameters())
8030261248
"""

from __future__ import annotations

from meshwright.training.models.build import build_model, materialize
from meshwright.training.models.expert_load import (
    collect_expert_load,
    configure_router_losses,
    expert_load_ratio,
    update_routing_bias,
)
from meshwright.training.models.families import FAMILIES, check_model
from meshwright.training.models.initialize import (
    init_adapters,
    init_from_base,
    init_scores,
    init_weights,
    named_seed,
    reset_buffers,
)
from meshwright.training.models.lora import (
    LoraLinear,
    QkvAdapter,
    adapted,
    adapter_matrices,
    adapters_of,
    add_adapters,
    dequantise,
    init_magnitudes,
    merge_adapters,
    saved_modules,
)
from meshwright.training.models.multi_token import collect_prediction_losses
from meshwright.training.models.preference import as_reference, collect_reward_sums, rewards_from
from meshwright.training.models.transformer import Block, Transformer, TransformerOptions
