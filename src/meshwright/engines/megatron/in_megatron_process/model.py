"""From a run and its settings to what a process trains: GPTModel, or its stages, and Megatron's optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch.nn import functional

from meshwright.engines.megatron.in_megatron_process.initial_weights import (
    Read,
    fill,
    first_weights,
    weights_in,
)
from meshwright.engines.megatron.in_megatron_process.layers import layers_of
from meshwright.engines.megatron.megatron_core.constructors import Settings
from meshwright.specs.run import Run
from meshwright.training.weights import find_weights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """What a process trains."""

    config: TransformerConfig
    chunks: list[DistributedDataParallel]  # pipeline stages of this process, one without virtual stages
    plain: list[GPTModel]  # the same without their wrappers
    optimizer: MegatronOptimizer


def build(run: Run, settings: dict[str, Settings], *, device: torch.device) -> Parts:
    """The grid of processes, and this one's part of the model with its weights."""
    parallel_state.initialize_model_parallel(**settings["parallel"])
    tensor_parallel.model_parallel_cuda_manual_seed(
        run.train.seed
    )  # nothing is random, and Megatron asks for it
    config = config_of(settings["transformer"])
    read = _source(run, device=device)
    plain = [_stage(run, config, settings["gpt"], stage, read=read) for stage in _stages(config)]
    ddp = DistributedDataParallelConfig(**settings["ddp"])
    chunks = [
        DistributedDataParallel(
            config=config,
            ddp_config=ddp,
            module=Float16Module(config, module) if config.bf16 else module,
            disable_bucketing=index > 0,
        )
        for index, module in enumerate(plain)
    ]
    optimizer = get_megatron_optimizer(OptimizerConfig(**_optimizer(settings["optimizer"])), chunks)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = _by_chunk([chunk.no_sync for chunk in chunks])
    if ddp.overlap_grad_reduce:  # stages start their exchanges together, as Megatron-LM's do
        config.grad_sync_func = _by_chunk([chunk.start_grad_sync for chunk in chunks])
    return Parts(config=config, chunks=chunks, plain=plain, optimizer=optimizer)


def _by_chunk(functions: list[Callable[..., Any]]) -> Any:
    """As Megatron's schedules ask for them: a list where there are virtual stages."""
    return functions if len(functions) > 1 else functions[0]


def config_of(settings: Settings) -> TransformerConfig:
    """Megatron's configuration of the layers."""
    named = {
        "activation_func": getattr(functional, settings["activation_func"]),
        "params_dtype": DTYPES[settings["params_dtype"]],
        "pipeline_dtype": DTYPES[settings["pipeline_dtype"]],
    }
    return TransformerConfig(**settings | named)


def _optimizer(settings: Settings) -> Settings:
    clip = settings["clip_grad"]
    return settings | {
        "params_dtype": DTYPES[settings["params_dtype"]],
        "clip_grad": float("inf") if clip is None else clip,  # 0 would leave the norm out
    }


def _stages(config: TransformerConfig) -> list[int | None]:
    virtual = config.virtual_pipeline_model_parallel_size
    return [None] if virtual is None else list(range(virtual))


def _source(run: Run, *, device: torch.device) -> Read:
    if run.weights is None:
        return first_weights(run.model, seed=run.train.seed, device=device)
    return weights_in(find_weights(run.weights).folder, run.model)


def _stage(
    run: Run, config: TransformerConfig, settings: Settings, vp_stage: int | None, *, read: Read
) -> GPTModel:
    ends: dict[str, Any] = {
        "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
    }
    layers = layers_of(config, vp_stage=vp_stage)
    module = GPTModel(
        config=config, transformer_layer_spec=layers, vp_stage=vp_stage, **ends, **settings
    ).cuda()
    fill(module, run.model, read=read)
    return module
