"""The keys of a MaxText configuration, each taken once, and the model that they describe."""

from __future__ import annotations

from typing import Any

from meshwright.engines.maxtext.models import LLAMA_31
from meshwright.errors import InputError

BLOCKS = {
    "llama2": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""Blocks that run files can describe, by the names of Hugging Face."""

WITHOUT_NORMS = {"qwen3": "LlamaForCausalLM", "qwen3_moe": "MixtralForCausalLM"}
"""What the blocks of Qwen3 are where queries and keys are not normalised."""

MEANS_NOTHING_HERE = (
    "adamw_mask", "attention", "attn_logits_soft_cap", "base_config", "data_shuffle_seed", "debug_sharding",
    "enable_data_shuffling", "enable_dropout", "enable_goodput_recording", "enable_tensorboard", "eod_mask_loss",
    "float32_logits", "gcs_metrics", "grad_dtype", "grain_file_type", "grain_worker_count",
    "hardware", "log_config", "log_period", "logits_dot_in_fp32", "matmul_precision", "max_segments_per_seq",
    "megablox", "metrics_file", "mmap_eod_id", "model_name", "monitor_goodput", "normalize_embedding_logits",
    "num_slices", "override_model_config", "packing", "profiler", "profiler_steps", "reset_attention_mask",
    "reuse_example_batch", "run_name", "sa_block_kv", "sa_block_kv_compute", "sa_block_kv_dkv",
    "sa_block_kv_dkv_compute", "sa_block_kv_dq", "sa_block_q", "sa_block_q_dkv", "sa_block_q_dq",
    "save_checkpoint_on_completion", "save_checkpoint_on_start", "save_config_to_gcs", "scan_layers",
    "skip_first_n_steps_for_profiler", "skip_jax_distributed_system", "source_checkpoint_layout", "sparse_matmul",
    "tokenize_train_data", "tokenizer_type", "train_data_columns", "use_chat_template", "use_iota_embed",
    "vertex_tensorboard_project",
)  # fmt: skip
"""Keys about kernels, files and logs, not about what is trained."""


class Settings:
    """Keys of a configuration; what nobody takes becomes notes."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values, self.said = dict(values), []

    def take(self, key: str, default: Any) -> Any:
        """The value of `key`, which is not left any more."""
        return self.values.pop(key, default)

    def peek(self, key: str, default: Any) -> Any:
        """The value of `key`, which stays."""
        return self.values.get(key, default)

    def note(self, words: str) -> None:
        """Say something about what is not carried."""
        self.said.append(words)

    def notes(self) -> list[str]:
        """What was said, and the keys that are left."""
        left = {k: v for k, v in self.values.items() if k not in MEANS_NOTHING_HERE and k not in MODEL_KEYS}
        return [*self.said, *(f"{key} = {value!r} is not carried over" for key, value in left.items())]


MODEL_KEYS = frozenset(("base_num_decoder_layers", "num_experts"))  # others look at them too


def model_section(settings: Settings, *, name: str) -> dict[str, Any]:
    """The model by its shapes. Raises InputError for a block that run files cannot describe."""
    take = settings.take
    block, qk_norm = take("decoder_block", "llama2"), take("use_qk_norm", False)
    if block not in BLOCKS:
        raise InputError("a decoder block that is not read", got=block, allowed=", ".join(BLOCKS))
    num_experts = settings.peek("num_experts", 1)
    hidden, width = take("base_emb_dim", 2048), take("base_mlp_dim", 7168)
    expert_width = take("base_moe_mlp_dim", -1)
    heads = take("base_num_query_heads", 16)
    model: dict[str, Any] = {
        "name": name,
        "family": BLOCKS[block] if qk_norm else WITHOUT_NORMS.get(block, BLOCKS[block]),
        "hidden": hidden,
        "num_layers": settings.peek("base_num_decoder_layers", 16),
        "vocab": take("vocab_size", 32_000),
        "attention": {
            "num_heads": heads,
            "num_kv_heads": take("base_num_kv_heads", 16),
            "head_dim": take("head_dim", 128),
            "qk_norm": qk_norm,
            "bias": take("attention_bias", False),
        },
        "tied_embeddings": take("logits_via_embedding", False),
        "norm_epsilon": float(take("normalization_layer_epsilon", 1e-5)),
        "rope": _rope(settings, name=name),
    }
    _refuse_others(settings)
    if num_experts > 1:
        normalised = take("norm_topk_prob", False)
        model["experts"] = {
            "num_experts": num_experts,
            "top_k": take("num_experts_per_tok", 1),
            "ffn_hidden": width if expert_width == -1 else expert_width,
        }
        if not normalised and block == "qwen3_moe":
            settings.note("norm_topk_prob = False is not carried over: MaxText's scores add up to 1 anyway")
    else:
        model["ffn_hidden"] = width
    return model


def _rope(settings: Settings, *, name: str) -> dict[str, Any]:
    kind, theta = settings.take("rope_type", "default"), float(settings.take("rope_max_timescale", 10_000))
    is_llama_31 = kind.startswith("llama3.1") or name.startswith("llama3.1")  # MaxText asks for either
    scaled = settings.take("rope_use_scale", True)
    if is_llama_31 and scaled:
        return {"theta": theta, "scaling": "llama3", **LLAMA_31}
    if kind not in ("default", "llama3.1"):
        raise InputError("rotary frequencies that are not read", got=f"rope_type = {kind!r}")
    return {"theta": theta}


def _refuse_others(settings: Settings) -> None:
    """Shapes beyond those that a run file has."""
    usual = {
        "attention_type": ("global", "full"),
        "mlp_activations": (["silu", "linear"],),
        "sliding_window_size": (0,),
        "global_parameter_scale": (1,),
        "shared_experts": (0,),
        "first_num_dense_layers": (0,),
        "routed_bias": (False,),
        "mtp_num_layers": (0,),
        "mlp_bias": (False,),
        "use_multimodal": (False,),
    }
    for key, allowed in usual.items():
        if (value := settings.take(key, allowed[0])) not in allowed:
            raise InputError(f"a model that is not read: {key}", got=value, allowed=allowed[0])
