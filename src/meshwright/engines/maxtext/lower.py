"""A run as a configuration file of MaxText. Pure: MaxText need not be installed.

MaxText's own trainer reads the file, followed by machine-dependent settings as arguments:

    python -m maxtext.trainers.pre_train.train maxtext.yml hardware=gpu ...

Steps are counted from 1, for the reason in `in_maxtext_environment/meshwright_weights.py`. `steps` is therefore one
more than the number of steps, and the learning rates of its schedules are those of the native engine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.catalog.stacks import switches_of
from meshwright.engines.base import Launch, pinned_plan, refuse
from meshwright.engines.maxtext import VERSION
from meshwright.engines.maxtext.check import check, num_accumulated
from meshwright.engines.maxtext.config.models import NOT_DECAYED, ROUTED_AS_V3, is_gpt_oss, is_routed_as_v3, model_keys
from meshwright.engines.maxtext.kept_tensors import INPUT, KEPT
from meshwright.engines.maxtext.parameters import leaves
from meshwright.engines.software_line import software_line
from meshwright.json_values import dump_yaml
from meshwright.specs.features import AttentionKernel, CudaGraphs, Features, WireFormat, runs_on
from meshwright.specs.hardware import Accelerator
from meshwright.specs.plan import Plan, Recompute, Sharding
from meshwright.specs.run import LearningRateSchedule, Optimizer, Run

CONFIGURATION, RUN_FILE, PARAMETERS = "maxtext.yml", "meshwright_run.yaml", "parameters.json"
OUTPUT = "maxtext"  # folder of the measurements, in the folder of the results
NAME = "maxtext"  # MaxText's checkpoints are in FOLDER/NAME/checkpoints
DATA, TOKENS, INDEX = "data", "tokens", "index"
NEVER = 10**9  # checkpoint interval of a run that saves none
EMPTY_MODEL = {
    f"models/{ROUTED_AS_V3}.yml": "# MaxText reads this in place of its own model of the name: shapes are in "
    f"{CONFIGURATION}.\n{{}}\n"
}
"""MaxText reads the keys of a `model_name` first from the configuration's folder; they override the configuration."""

REMATERIALISATION = {
    frozenset(("norm", "activation")): "minimal_with_context",
    frozenset(("core_attention", "norm", "activation")): "minimal",
    frozenset(("norm", "activation", "mlp")): "save_dot_with_context_except_mlp",
    frozenset(("norm", "activation", "moe")): "save_dot_with_context_except_mlp",
    frozenset(("core_attention", "norm", "activation", "mlp")): "save_dot_except_mlp",
    frozenset(("core_attention", "norm", "activation", "moe")): "save_dot_except_mlp",
}
"""MaxText's rematerialisation policies by the recomputed modules."""


ATTENTION: Mapping[AttentionKernel | None, str] = {
    AttentionKernel.UNFUSED: "dot_product",
    AttentionKernel.CUDNN: "cudnn_flash_jax",
    AttentionKernel.CK: "cudnn_flash_te",  # Transformer Engine's, which on ROCm is Composable Kernel's
    AttentionKernel.SPLASH: "flash",
}
"""MaxText's kernels of attention by those of `stack.attention`."""


def xla_flags(run: Run) -> str:
    """Flags of XLA that the run's switches ask for. Its list of the kinds of kernels that it captures may be empty."""
    return "--xla_gpu_enable_command_buffer=" if run.stack.features.cuda_graphs is CudaGraphs.NONE else ""


def lower(run: Run, *, folder: Path) -> Launch:
    """Return the configuration, the run file, the table of parameters and the command of every process."""
    from meshwright.runfile import pinned_text

    refuse("maxtext", check(run))
    plan = pinned_plan(run)
    files = {
        CONFIGURATION: configuration_text(run, plan, folder=folder),
        RUN_FILE: pinned_text(run, plan),
        PARAMETERS: parameters_text(run, plan),
    }
    return Launch(
        argv=("python", "-m", "meshwright.engines.maxtext.worker", str(folder)),
        files=files | (EMPTY_MODEL if is_routed_as_v3(run.model) else {}),
        num_processes=1 if run.cluster is not None and run.cluster.accelerator.name == "cpu" else plan.num_devices,
    )


def configuration_text(run: Run, plan: Plan, *, folder: Path) -> str:
    """Return the YAML file."""
    of_splash = ("attention_tile", "fuses_attention_backward")
    lacks = () if switches_of(run).attention is AttentionKernel.SPLASH else of_splash
    software = software_line(run, lacks=("cuda_graphs", *lacks))  # graphs are a flag of XLA
    return (
        f"# {run.name}: {run.model.name} on {plan.num_devices} devices ({plan.describe()}), for MaxText {VERSION}.\n"
        "# Written by Meshwright from the run file in the same folder. "
        "Absent keys have the values of MaxText's base.yml.\n"
        f"{software}{dump_yaml(configuration(run, plan, folder=folder))}"
    )


def parameters_text(run: Run, plan: Plan) -> str:
    """Return the table of parameters for the script that converts weights, one line per leaf."""
    lines = ",\n".join(json.dumps(leaf) for leaf in leaves.as_json(leaves.all_leaves(run, plan)))
    head = json.dumps({"seed": run.train.seed, "is_drawn": run.weights is None})
    return f'{head[:-1]}, "leaves": [\n{lines}\n]}}\n'


def configuration(run: Run, plan: Plan, *, folder: Path) -> dict[str, Any]:
    """Return all keys of the configuration."""
    # With a pipeline, all micro-batches are one batch; without one, they are gradient accumulation.
    accumulated = num_accumulated(run, plan)
    return {
        "base_config": "base.yml",
        "run_name": NAME,
        **model_keys(run.model, sequence_length=run.sequence_length),
        **_numbers(run, plan),
        **_adapters(run),
        **_parallelism(plan, run),
        "max_target_length": run.sequence_length,
        "per_device_batch_size": run.global_batch / accumulated / plan.num_devices / jax_devices(run),
        "gradient_accumulation_steps": accumulated,
        **_loss(run, plan),
        **_recompute(run, plan),
        **_optimizer(run),
        **_data(run, folder),
        **_checkpoint(run, folder),
        **_evaluation(run, plan),
        "metrics_file": str(folder / OUTPUT / "metrics.jsonl"),
        "enable_tensorboard": False,
        "enable_goodput_recording": False,
        "monitor_goodput": False,
        "log_config": False,
    }


def _numbers(run: Run, plan: Plan) -> dict[str, Any]:
    is_fp32, features = run.precision.name == "fp32", switches_of(run)
    is_narrow = run.lora is not None or not run.optimizer.master_weights  # bf16 suffices for frozen weights
    return {
        "dtype": "float32" if is_fp32 else "bfloat16",
        "weight_dtype": "bfloat16" if is_narrow and not is_fp32 else "float32",
        "grad_dtype": "bfloat16" if features.gradient_format is WireFormat.BF16 else "float32",
        "matmul_precision": "highest" if is_fp32 else "default",
        "attention": kernel_name(run, plan),
        **_splash(features if features.attention is AttentionKernel.SPLASH else run.stack.features),
        "sparse_matmul": True,
        "megablox": run.cluster is not None and has_megablox(run.cluster.accelerator),
        **({"routed_bias_update_rate": run.train.balance_bias_rate} if is_routed_as_v3(run.model) else {}),
    }


def kernel_name(run: Run, plan: Plan) -> str:
    """Return MaxText's name of the kernel that is estimated: on GPUs it selects another one by itself (Pallas's `mha`).

    Where the accelerator is not known, or has none of MaxText's kernels that the release names, MaxText selects.
    """
    kernel, device = switches_of(run).attention, run.cluster.accelerator if run.cluster else None
    is_stated = run.stack.features.attention is not None or kernel is AttentionKernel.UNFUSED
    if not is_stated and (device is None or kernel is None or not runs_on(kernel, device)):
        return "autoselected"
    if kernel is AttentionKernel.CUDNN and plan.context > 1:
        return UNDER_CONTEXT
    return ATTENTION.get(kernel, "autoselected")


UNDER_CONTEXT = "cudnn_flash_te"
"""Transformer Engine's, the only one of MaxText for GPUs with context parallelism."""

SPLASH_BLOCKS = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
"""Tiles of splash attention: for its forward pass, for gradients of keys and values, and for gradients of queries."""


def _splash(features: Features) -> dict[str, Any]:
    """Settings of attention on TPUs that the run states."""
    tile, fused = features.attention_tile, features.fuses_attention_backward
    settings: dict[str, Any] = {} if tile is None else {f"sa_block_{name}": tile for name in SPLASH_BLOCKS}
    return settings if fused is None else settings | {"sa_use_fused_bwd_kernel": fused}


def has_megablox(accelerator: Accelerator) -> bool:
    """Return True where experts' grouped GEMMs are Megablox's, False where they are JAX's own (`ragged_dot`).

    Megablox is a kernel for TPUs: elsewhere MaxText interprets it (layers/moe.py, `interpret`).
    """
    return accelerator.vendor == "Google"


def _adapters(run: Run) -> dict[str, Any]:
    if run.lora is None:
        return {}
    modules = "|".join(leaves.MODULES[target] for target in run.lora.targets)
    settings = {
        "enable_lora": True,
        "lora_rank": run.lora.rank,
        "lora_alpha": float(run.lora.alpha),
        "lora_module_path": f"decoder/layers/({modules})",
    }
    return {"lora": settings}


def _parallelism(plan: Plan, run: Run) -> dict[str, Any]:
    """Axes of the mesh. The expert axis is a part of the data-parallel axis."""
    is_sharded = plan.sharding is Sharding.PARAMETERS
    shown = jax_devices(run)  # the devices that JAX shows for one of the plan are in its data axis
    tensor = "tensor_sequence" if plan.sequence_parallel and plan.tensor > 1 else "tensor"
    keys: dict[str, Any] = {
        "num_slices": 1,
        "ici_data_parallelism": plan.data_replicate if is_sharded else plan.data // plan.expert * shown,
        "ici_fsdp_parallelism": plan.data_shard // plan.expert * shown if is_sharded else 1,
        "ici_expert_parallelism": plan.expert,
        f"ici_{tensor}_parallelism": plan.tensor,
        "ici_context_parallelism": plan.context,
        "ici_pipeline_parallelism": plan.pipeline,
        "shard_optimizer_over_data": plan.sharding is Sharding.OPTIMIZER and plan.data > 1,
    }
    if plan.pipeline > 1:
        keys |= {
            "num_layers_per_pipeline_stage": run.model.num_layers // (plan.pipeline * plan.virtual_pipeline),
            "num_pipeline_repeats": plan.virtual_pipeline,
            "num_pipeline_microbatches": plan.num_micro_batches(run.global_batch),
        }
    return keys


def jax_devices(run: Run) -> int:
    """Return the devices that JAX shows for one device of the run's cluster."""
    return 1 if run.cluster is None else run.cluster.accelerator.jax_devices


def _loss(run: Run, plan: Plan) -> dict[str, Any]:
    """Tiles of the loss, where the run's `kernels.loss_chunk` says how many tokens of a device each has."""
    chunk = run.kernels.loss_chunk
    if isinstance(chunk, str):
        return {}
    return {"num_vocab_tiling": plan.micro_batch * run.sequence_length // plan.context // chunk}


def _recompute(run: Run, plan: Plan) -> dict[str, Any]:
    """The policy of what a layer keeps, or with activations in host memory the place of each tensor that it keeps."""
    is_full = plan.recompute is Recompute.FULL
    policy = "full" if is_full else REMATERIALISATION[frozenset(plan.recompute_modules)]
    if not switches_of(run).offloaded_activations:
        return {"remat_policy": policy}
    return {"remat_policy": "custom", **dict.fromkeys((INPUT, *KEPT[policy]), "offload")}


def _optimizer(run: Run) -> dict[str, Any]:
    """AdamW. Vectors and biases of experts have no weight decay, as in the native engine; most have only norms."""
    o = run.optimizer
    assert run.num_steps is not None
    return {
        "opt_type": "adamw",
        "learning_rate": o.learning_rate,
        "adam_b1": o.betas[0],
        "adam_b2": o.betas[1],
        "adam_eps": o.epsilon,
        "adam_weight_decay": o.weight_decay,
        "adamw_mask": NOT_DECAYED if is_gpt_oss(run.model) else ["scale"],
        "gradient_clipping_threshold": 0.0 if o.gradient_clip is None else o.gradient_clip,
        "steps": run.num_steps + 1,
        "learning_rate_schedule_steps": run.num_steps + 1,
        **schedule_keys(o, num_steps=run.num_steps),
    }


def schedule_keys(o: Optimizer, *, num_steps: int) -> dict[str, Any]:
    """Return MaxText's schedule with the rates of `training.optimizer.learning_rate`; its count is one ahead."""
    whole, warm = num_steps + 1, min(o.warmup_steps, num_steps)
    keys: dict[str, Any] = {
        "warmup_steps_fraction": fraction_for(whole, warm),
        "learning_rate_final_fraction": o.final_ratio,
    }
    if o.schedule is LearningRateSchedule.COSINE:
        return {"lr_schedule_type": "cosine", **keys}
    start = warm
    if o.schedule is LearningRateSchedule.WSD:
        start = max(warm, num_steps - (max(1, round(o.decay_ratio * num_steps)) if o.decay_ratio else 0))
    decay = 0 if o.schedule is LearningRateSchedule.CONSTANT else whole - start
    return {
        "lr_schedule_type": "wsd",
        **keys,
        "wsd_decay_style": o.decay_shape.value if o.schedule is LearningRateSchedule.WSD else "linear",
        "wsd_decay_steps_fraction": fraction_for(whole, decay),
    }


def fraction_for(whole: int, part: int) -> float:
    """Return a fraction with `int(whole * fraction) == part`, as MaxText computes it."""
    fraction = part / whole
    while int(whole * fraction) < part:
        fraction = math.nextafter(fraction, 1.0)
    return fraction


def _data(run: Run, folder: Path) -> dict[str, Any]:
    """Token files that `worker_inputs.batch_files` writes: one document per sample, in the order of the run."""
    tokens = folder / OUTPUT / DATA / TOKENS
    return {
        "dataset_type": "grain",
        "grain_file_type": "mmap_npy",
        "grain_train_files": f"{tokens.with_name(INDEX)}|{tokens}",
        "train_data_columns": ["text"],
        "tokenize_train_data": False,
        "enable_data_shuffling": False,
        "data_shuffle_seed": run.train.seed,
        "packing": True,
        "reset_attention_mask": True,
        "eod_mask_loss": True,
        "grain_worker_count": 0,
        "init_weights_seed": run.train.seed,
    }


def _checkpoint(run: Run, folder: Path) -> dict[str, Any]:
    """Initial weights and saved checkpoints. The newest checkpoint of the folder takes precedence.

    MaxText reads an initial state only if checkpoints are enabled.
    """
    saves = run.train.checkpoint
    keys: dict[str, Any] = {
        "base_output_directory": saves.folder if saves else str(folder / OUTPUT),
        "source_checkpoint_layout": "safetensors",
        "checkpoint_conversion_fn": "meshwright_weights.convert",
        "enable_checkpointing": True,
        "async_checkpointing": saves is not None and saves.asynchronous,
        "checkpoint_period": saves.every_steps if saves else NEVER,
        "save_checkpoint_on_start": False,
        "save_checkpoint_on_completion": saves is not None,
    }
    return keys | ({"max_num_checkpoints_to_keep": saves.keep} if saves and saves.keep else {})


def _evaluation(run: Run, plan: Plan) -> dict[str, Any]:
    """Evaluation, counted in micro-batches."""
    evaluate = run.train.evaluate
    if evaluate is None:
        return {"eval_interval": -1}
    return {
        "eval_interval": evaluate.every_steps,
        "eval_steps": evaluate.num_batches * num_accumulated(run, plan),
        "target_eval_loss": evaluate.target_loss or 0.0,
    }
