"""A run as arguments of Megatron's constructors. Pure: Megatron need not be installed.

    parallel     parallel_state.initialize_model_parallel
    transformer  TransformerConfig
    gpt          GPTModel
    ddp          DistributedDataParallelConfig
    optimizer    OptimizerConfig
    loop         further settings of Megatron's own training loops, for `megatron_lm` and `megatron_bridge`

Names are Megatron's. Number formats and the activation function are strings that `in_megatron_process.model` resolves.
Fusions are off: they need Transformer Engine or Apex. So do latent attention, fp8, fp4 and 16-bit optimizer states,
which only `megatron_lm` and `megatron_bridge` write (`check_export`), as well as the fusions (`fused_kernels`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.cost.stages import layers_per_stage
from meshwright.engines.megatron.switches import capacity, reduces_in_fp32
from meshwright.specs.model import AttentionKind, Model, RopeScaling, Router
from meshwright.specs.model_parts import parts_of
from meshwright.specs.plan import AxisOrder, Offload, Plan, Recompute, Sharding
from meshwright.specs.run import DecayShape, LearningRateSchedule, Run, StateFormat

Settings = dict[str, Any]

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
MODULES: dict[str, str] = _TABLES["modules"]
LOW_PRECISION: dict[str, Settings] = _TABLES["low_precision"]
PARTS: dict[str, str] = _TABLES["parts"]
UNFUSED: tuple[str, ...] = tuple(_TABLES["unfused"])
OF_ENGINE = ("attention.sinks", "attention.window_pattern", *PARTS)
"""Parts that need Transformer Engine, or Megatron's own attention, which training here does not use."""


def settings_of(run: Run, plan: Plan) -> dict[str, Settings]:
    """Return all arguments by constructor."""
    order = {"order": "tp-cp-ep-pp-dp"} if plan.axis_order is AxisOrder.DATA_OUTERMOST else {}
    return {
        "parallel": parallel(plan) | order,
        "transformer": transformer(run, plan),
        "gpt": gpt(run, plan),
        "ddp": data_parallel(run, plan),
        "optimizer": optimizer(run, plan),
    }


def parallel(plan: Plan) -> Settings:
    """Sizes of the process groups."""
    return {
        "tensor_model_parallel_size": plan.tensor,
        "pipeline_model_parallel_size": plan.pipeline,
        "virtual_pipeline_model_parallel_size": plan.virtual_pipeline if plan.virtual_pipeline > 1 else None,
        "context_parallel_size": plan.context,
        "expert_model_parallel_size": plan.expert,
        "expert_tensor_parallel_size": plan.expert_tensor,
    }


def transformer(run: Run, plan: Plan) -> Settings:
    """The model's shapes, its number formats and its split over processes."""
    model = run.model
    shapes = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.ffn_hidden or (model.experts.ffn_hidden if model.experts is not None else 0),
        "num_attention_heads": model.attention.num_heads,
        **_attention(model),
        "normalization": "LayerNorm" if model.norm_bias else "RMSNorm",
        "layernorm_epsilon": model.norm_epsilon,
        "gated_linear_unit": model.gated_ffn,
        "activation_func": "silu" if model.gated_ffn else "gelu",
        "add_bias_linear": biases(model) == ALL,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    # Megatron's weight of multi-token prediction is of the mean over modules too.
    predictions = {"mtp_num_layers": model.num_mtp_layers, "mtp_loss_scaling_factor": run.train.mtp_loss_weight}
    return {
        **shapes,
        **(predictions if model.num_mtp_layers else {}),
        **(_experts(run) if model.experts is not None else {}),
        **_numerics(run),
        **parallel(plan),
        "sequence_parallel": plan.sequence_parallel and plan.tensor > 1,
        **_pipeline(run, plan),
        **_recompute(model, plan),
    }


ALL, OF_INPUTS = "all", "of queries, keys and values alone"


def biases(model: Model) -> str | None:
    """Return which matrices of layers have biases, "" for none; None: a choice that Megatron does not have."""
    a, x = model.attention, model.experts
    others = {a.has_output_bias, *((model.ffn_bias,) if model.num_dense_layers else ()), *((x.bias,) if x else ())}
    if others == {a.bias} and (x is None or not a.bias):
        return ALL if a.bias else ""
    return OF_INPUTS if a.bias and not any(others) else None


def _parts(model: Model) -> Settings:
    """Settings of parts that few models have."""
    a, has = model.attention, parts_of(model)
    found: Settings = {setting: has[path] for path, setting in PARTS.items() if path in has}
    if a.sinks:
        found["softmax_type"] = "learnable"
    if model.num_windowed_layers:  # Megatron does not count the token itself
        found |= {
            "window_size": [a.window - 1, 0],
            "window_attn_skip_freq": [int(one) for one in model.windowed_layers],
        }
    return found


def _attention(model: Model) -> Settings:
    a, rope = model.attention, model.rope
    if a.kind is not AttentionKind.MLA:
        grouped = {"num_query_groups": a.num_kv_heads, "kv_channels": a.head_dim, "qk_layernorm": a.qk_norm}
        return grouped | _parts(model) | ({"add_qkv_bias": True} if biases(model) == OF_INPUTS else {})
    is_yarn = rope.scaling is RopeScaling.YARN
    latent = {
        "multi_latent_attention": True,
        "q_lora_rank": a.query_lora_rank or None,
        "kv_lora_rank": a.kv_lora_rank,
        "qk_head_dim": a.head_dim - a.rope_head_dim,
        "qk_pos_emb_head_dim": a.rope_head_dim,
        "v_head_dim": a.v_dim,
        "qk_layernorm": True,  # of the latents
        # It has no effect on them, but Megatron-LM refuses a width that the heads do not divide without it.
        **({"kv_channels": a.head_dim} if model.hidden % a.num_heads else {}),
        "rope_type": "yarn" if is_yarn else "rope",
        **_parts(model),
    }
    if not is_yarn:
        return latent
    return latent | {
        "rotary_scaling_factor": rope.factor,
        "mscale": rope.mscale or 1.0,  # 1: the paper's temperature
        "mscale_all_dim": rope.mscale_all_dims,
    }


def _numerics(run: Run) -> Settings:
    dtype = "fp32" if run.precision.name == "fp32" else "bf16"
    return {
        "bf16": dtype == "bf16",
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "attention_softmax_in_fp32": True,
        "calculate_per_token_loss": True,  # one mean over the labels of the global batch
        **LOW_PRECISION.get(run.precision.name, {}),
        **dict.fromkeys(UNFUSED, False),
    }


def fused_kernels(run: Run) -> Settings:
    """Return the fusions that an estimate stands for, on wherever Megatron has them for the model.

    `TransformerConfig` refuses fused GELU without biases, and fused rotations of latent attention without YARN. The
    fused loss rounds the gradient of logits to bf16 (fusions/fused_cross_entropy.py), which fp32 does not want.
    """
    is_latent = run.model.attention.kind is AttentionKind.MLA
    return {
        **dict.fromkeys(UNFUSED, True),
        "bias_activation_fusion": run.model.gated_ffn or biases(run.model) == ALL,
        "apply_rope_fusion": not is_latent or run.model.rope.scaling is RopeScaling.YARN,
        "cross_entropy_loss_fusion": run.precision.name != "fp32",
        **(dict.fromkeys(_TABLES["expert_kernels"], True) if run.model.experts is not None else {}),
    }


def _experts(run: Run) -> Settings:
    model, x = run.model, run.model.experts
    assert x is not None
    sigmoid = x.router is Router.SIGMOID
    dense = model.num_dense_layers
    settings = {
        "num_moe_experts": x.num_experts,
        "moe_router_topk": x.top_k,
        "moe_ffn_hidden_size": x.ffn_hidden,
        "moe_layer_freq": [0] * dense + [1] * (model.num_layers - dense) if dense else 1,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "seq_aux_loss" if run.train.balance_loss else "none",
        "moe_aux_loss_coeff": run.train.balance_loss,
        "moe_router_score_function": x.router.value,
        # False: softmax over the chosen experts only. True: softmax over all experts, not normalised afterwards.
        "moe_router_pre_softmax": not sigmoid and not x.normalize_top_k,
        "moe_router_topk_scaling_factor": x.routed_scale if x.routed_scale != 1 else None,
        "moe_router_enable_expert_bias": sigmoid,
    }
    if sigmoid:
        settings["moe_router_bias_update_rate"] = run.train.balance_bias_rate
    if run.train.router_z_loss:
        settings["moe_z_loss_coeff"] = run.train.router_z_loss
    if x.shared_hidden:
        settings["moe_shared_expert_intermediate_size"] = x.shared_hidden
    settings |= capacity(run)
    if x.num_groups:
        settings |= {"moe_router_num_groups": x.num_groups, "moe_router_group_topk": x.groups_per_token}
    return settings


def _pipeline(run: Run, plan: Plan) -> Settings:
    """Assignment of layers to stages as in the planner's cost model."""
    if plan.pipeline == 1:
        return {}
    settings: Settings = {"pipeline_model_parallel_layout": layout(run.model, plan)}
    if plan.virtual_pipeline > 1:
        # With two stages, both neighbours are one process: point-to-point operations must keep their order.
        settings |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    return settings


def layout(model: Model, plan: Plan) -> list[list[str]]:
    """Parts of every stage, in the order of the model."""
    stages = [["decoder"] * count for count in _layer_counts(model, plan)]
    stages[0].insert(0, "embedding")
    stages[-1] += [*["mtp"] * model.num_mtp_layers, "loss"]
    return stages


def _layer_counts(model: Model, plan: Plan) -> Sequence[int]:
    """Layers of every stage, in the order of the model."""
    num_stages = plan.pipeline * plan.virtual_pipeline
    return plan.layers_per_stage or layers_per_stage(model.num_layers, num_stages)


def recomputed_per_rank(per_chunk: int, counts: Sequence[int], *, pipeline: int) -> list[int]:
    """Layers that each rank recomputes if Megatron recomputes the first `per_chunk` of every stage.

    `counts` are the layers of every stage; stage s is on rank s mod `pipeline`. Megatron counts
    `recompute_num_layers` per `TransformerBlock`, of which a rank has one for each virtual stage.
    """
    return [sum(min(per_chunk, count) for count in counts[rank::pipeline]) for rank in range(pipeline)]


def recomputed_per_chunk(model: Model, plan: Plan) -> int | None:
    """Megatron's number for `plan.recompute_layers` of each rank; None: it has none that gives the same."""
    counts, wanted = _layer_counts(model, plan), plan.recompute_layers or 0
    expected = [min(wanted, sum(counts[rank :: plan.pipeline])) for rank in range(plan.pipeline)]
    return next(
        (n for n in range(max(counts) + 1) if recomputed_per_rank(n, counts, pipeline=plan.pipeline) == expected), None
    )


def _recompute(model: Model, plan: Plan) -> Settings:
    if plan.recompute is Recompute.SELECTIVE:
        modules = [MODULES[name] for name in plan.recompute_modules]
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    if plan.recompute is Recompute.NONE:
        return {}
    kind = "uniform" if plan.recompute_layers is None else "block"
    count = 1 if plan.recompute_layers is None else recomputed_per_chunk(model, plan)
    return {"recompute_granularity": "full", "recompute_method": kind, "recompute_num_layers": count}


def gpt(run: Run, plan: Plan) -> Settings:
    """The model around the layers."""
    model, rope = run.model, run.model.rope
    settings = {
        "vocab_size": -(-model.vocab // plan.tensor) * plan.tensor,  # rows of embedding and head, padded
        "max_sequence_length": run.sequence_length,
        "share_embeddings_and_output_weights": model.tied_embeddings,
        "position_embedding_type": "learned_absolute" if model.learned_positions else "rope",
    }
    if model.learned_positions:
        return settings
    settings["rotary_base"] = rope.theta
    if rope.rotated_share != 1:
        settings["rotary_percent"] = rope.rotated_share
    if rope.scaling is RopeScaling.LLAMA3:
        settings |= {"rope_scaling": True, "rope_scaling_factor": rope.factor}
    return settings


def data_parallel(run: Run, plan: Plan) -> Settings:
    """Gradients are reduced during the backward pass, in fp32 unless the run says otherwise, parameters gathered during
    the next forward pass."""
    is_sharded = plan.sharding is Sharding.OPTIMIZER
    return {
        "use_distributed_optimizer": is_sharded,
        "grad_reduce_in_fp32": reduces_in_fp32(run),
        "overlap_grad_reduce": plan.data_shard > 1,
        "overlap_param_gather": plan.data_shard > 1 and is_sharded,
    }


def optimizer(run: Run, plan: Plan) -> Settings:
    """AdamW. Vectors have no weight decay, which is Megatron's rule too; learning rates are set step by step."""
    o = run.optimizer
    dtype = "fp32" if run.precision.name == "fp32" else "bf16"
    narrow = {"use_precision_aware_optimizer": True} | dict.fromkeys(
        ("exp_avg_dtype", "exp_avg_sq_dtype"), o.states.value
    )
    return {
        "optimizer": "adam",
        "decoupled_weight_decay": True,
        "lr": o.learning_rate,
        "adam_beta1": o.betas[0],
        "adam_beta2": o.betas[1],
        "adam_eps": o.epsilon,
        "weight_decay": o.weight_decay,
        "clip_grad": o.gradient_clip,
        "bf16": dtype == "bf16",
        "params_dtype": dtype,
        "use_distributed_optimizer": plan.sharding is Sharding.OPTIMIZER,
        **(narrow if o.states is not StateFormat.FP32 else {}),
        **(_TABLES["offloaded"] if plan.offload is Offload.OPTIMIZER else {}),
    }


LR_DECAY_STYLES = {
    LearningRateSchedule.CONSTANT: "constant",
    LearningRateSchedule.LINEAR: "linear",
    LearningRateSchedule.COSINE: "cosine",
    LearningRateSchedule.INVERSE_SQRT: "inverse-square-root",
    LearningRateSchedule.WSD: "WSD",
}
"""Names of schedules in Megatron-Core's `OptimizerParamScheduler`."""


def loop(run: Run, plan: Plan) -> Settings:
    """Batches, steps, checkpoints, evaluation and learning rates. None is not written."""
    train, o = run.train, run.optimizer
    saves, evaluate = train.checkpoint, train.evaluate
    is_wsd = o.schedule is LearningRateSchedule.WSD
    settings: Settings = {
        "micro_batch_size": plan.micro_batch,
        "global_batch_size": run.global_batch,
        "train_iters": run.num_steps,
        "seed": train.seed or 1234,
        "save": saves.folder if saves is not None else None,
        "load": saves.folder if saves is not None else None,
        "save_interval": saves.every_steps if saves is not None else None,
        "async_save": (saves is not None and saves.asynchronous) or None,
        "eval_interval": evaluate.every_steps if evaluate is not None else None,
        "eval_iters": evaluate.num_batches if evaluate is not None else 0,
        "lr": o.learning_rate,
        "min_lr": o.learning_rate * o.final_ratio,
        "lr_decay_style": LR_DECAY_STYLES[o.schedule],
        "lr_decay_iters": run.num_steps,
        "lr_warmup_iters": o.warmup_steps,
        "clip_grad": 0.0 if o.gradient_clip is None else None,  # the default is 1.0
        "use_tp_pp_dp_mapping": plan.axis_order is AxisOrder.DATA_OUTERMOST or None,
    }
    if is_wsd:
        assert run.num_steps is not None
        falling = max(1, round(o.decay_ratio * run.num_steps))
        style = "minus_sqrt" if o.decay_shape is DecayShape.SQRT else o.decay_shape.value
        settings |= {"lr_wsd_decay_style": style, "lr_wsd_decay_iters": falling}
    return settings
