"""Construction of a process's part of a training: GPTModel, or its pipeline stages, and Megatron's optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch.nn import functional

from meshwright.engines.megatron.in_megatron_process.initial_weights import (
    ReadTensor,
    fill,
    seeded_weights,
    stored_weights,
)
from meshwright.engines.megatron.in_megatron_process.layers import layers_of
from meshwright.engines.megatron.megatron_core.constructors import Settings
from meshwright.specs.run import Run
from meshwright.training.weights import find_weights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelAndOptimizer:
    """The part of the model that a process trains, and its optimizer."""

    config: TransformerConfig
    chunks: list[DistributedDataParallel]  # pipeline stages of this process; one without virtual stages
    unwrapped: list[GPTModel]  # the same without data parallelism
    optimizer: ChainedOptimizer


def build(run: Run, settings: dict[str, Settings], *, device: torch.device) -> ModelAndOptimizer:
    """Create the process groups, and this process's part of the model with its weights."""
    parallel_state.initialize_model_parallel(**settings["parallel"])
    tensor_parallel.model_parallel_cuda_manual_seed(run.train.seed)  # required by Megatron, though nothing is random
    config = config_of(settings["transformer"])
    if run.weights is None:
        read = seeded_weights(run.model, seed=run.train.seed, device=device)
    else:
        read = stored_weights(find_weights(run.weights).folder, run.model)
    virtual = config.virtual_pipeline_model_parallel_size
    stages = [None] if virtual is None else range(virtual)
    unwrapped = [_stage(run, config, settings["gpt"], stage, read=read) for stage in stages]
    ddp = DistributedDataParallelConfig(**settings["ddp"])
    chunks = [
        DistributedDataParallel(
            config=config,
            ddp_config=ddp,
            module=Float16Module(config, module) if config.bf16 else module,
            disable_bucketing=index > 0,
        )
        for index, module in enumerate(unwrapped)
    ]
    named = settings["optimizer"]
    clip = float("inf") if named["clip_grad"] is None else named["clip_grad"]  # 0 would skip the norm
    named = named | {"params_dtype": DTYPES[named["params_dtype"]], "clip_grad": clip}
    optimizer = get_megatron_optimizer(OptimizerConfig(**named), [*chunks])
    assert isinstance(optimizer, ChainedOptimizer)  # always, in this release
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = _by_chunk([chunk.no_sync for chunk in chunks])
    if ddp.overlap_grad_reduce:  # stages start their gradient reductions together, as in Megatron-LM
        config.grad_sync_func = _by_chunk([chunk.start_grad_sync for chunk in chunks])
    return ModelAndOptimizer(config=config, chunks=chunks, unwrapped=unwrapped, optimizer=optimizer)


def _by_chunk(functions: list[Callable[..., Any]]) -> Any:
    """Return the functions in the form that Megatron's schedules expect: a list only for virtual stages."""
    return functions if len(functions) > 1 else functions[0]


def config_of(settings: Settings) -> TransformerConfig:
    """Return Megatron's configuration of the layers."""
    named = {
        "activation_func": getattr(functional, settings["activation_func"]),
        "params_dtype": DTYPES[settings["params_dtype"]],
        "pipeline_dtype": DTYPES[settings["pipeline_dtype"]],
    }
    return TransformerConfig(**settings | named)


def _stage(
    run: Run, config: TransformerConfig, settings: Settings, vp_stage: int | None, *, read: ReadTensor
) -> GPTModel:
    ends: dict[str, Any] = {
        "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
    }
    layers: Any = layers_of(config, vp_stage=vp_stage)
    module = GPTModel(config=config, transformer_layer_spec=layers, vp_stage=vp_stage, **ends, **settings).cuda()
    fill(module, run.model, read=read)
    return module
