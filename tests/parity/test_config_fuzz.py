"""Random configs of every trained family: the logits of transformers, or refused with the key. Never neither.

A case changes some keys of a tiny `config.json`: to values that are usual, unusual or nonsense, to absence and to null.
transformers builds the model from that very file and saves it with the same config; so does Meshwright.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.reference_weights import draw_weights

from meshwright.catalog.families import FAMILIES
from meshwright.catalog.huggingface import model_from_path
from meshwright.errors import InputError
from meshwright.training.models import build_model
from meshwright.training.weights import load_weights

ABSENT = object()
OLDER = {
    "gemma3_text": ("rope_local_base_freq", "rope_theta", "rope_scaling", "sliding_window_pattern"),
    "glm4_moe": ("partial_rotary_factor", "rope_theta", "rope_scaling"),
    "gpt_oss": ("rope_theta", "rope_scaling"),
    "minimax_m2": ("rotary_dim", "rope_theta", "rope_scaling"),
    "phi3": ("partial_rotary_factor", "rope_theta", "rope_scaling"),
}
"""Keys of published config.json files that transformers reads and no longer writes."""
TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
LATENT = TINY | MIXTURE | {
    "num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2,
    "topk_group": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip
GEMMA = TINY | {"head_dim": 8, "query_pre_attn_scalar": 20, "sliding_window": 7}
BASES = {
    "llama": TINY,
    "mistral": TINY | {"sliding_window": 7, "head_dim": 8},
    "mixtral": TINY | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3": TINY | {"head_dim": 16},
    "qwen3_moe": TINY | MIXTURE | {"head_dim": 16, "num_experts": 4},
    "deepseek_v2": LATENT | {"norm_topk_prob": False, "topk_method": "group_limited_greedy"},
    "deepseek_v3": LATENT | {"num_nextn_predict_layers": 0},
    "qwen2": TINY,
    "olmo2": TINY | {"pad_token_id": 1},
    "phi3": TINY | {"pad_token_id": None, "original_max_position_embeddings": 16},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA | {"sliding_window_pattern": 2},
    "gpt_oss": TINY | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 7},
    "glm4_moe": TINY | MIXTURE | {"n_routed_experts": 8, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
    "minimax_m2": TINY | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
}
SCALINGS = (
    None,
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.7},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 0.9},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8, "truncate": False},
    {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
    {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.4], "long_factor": [1.0, 1.5, 2.0, 3.0]},
    {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.4], "long_factor": [1.0, 1.5, 2.0, 3.0], "factor": 2.5,
     "original_max_position_embeddings": 24},
    {"type": "su", "short_factor": [1.0, 1.2], "long_factor": [1.5, 2.0], "partial_rotary_factor": 0.5,
     "attention_factor": 1.3},
    {"rope_type": "longrope", "short_factor": [1.0, 1.1], "long_factor": [1.0, 1.5, 2.0, 3.0]},
    {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0},
     "sliding_attention": {"rope_type": "default", "rope_theta": 700.0}},
    {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "linear", "factor": 3.0}},
    {"sliding_attention": {"rope_type": "default"}},
)  # fmt: skip
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "llama": ({}, {"rope_scaling": SCALINGS[4]}),
    "phi3": (
        {},
        {"partial_rotary_factor": 0.75},
        {"rope_scaling": SCALINGS[10]},
        {"rope_scaling": SCALINGS[10], "original_max_position_embeddings": 64},
        {"partial_rotary_factor": 0.5, "rope_scaling": SCALINGS[12]},
    ),
    "gemma2": ({}, {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0}),
    "gemma3_text": (
        {},
        {"rope_parameters": SCALINGS[14]},
        {"rope_scaling": SCALINGS[2], "rope_local_base_freq": 300.0},
    ),
    "gpt_oss": ({}, {"rope_scaling": SCALINGS[8]}),
}
"""Changes of a base, one of which a case begins with: keys that mean something only together."""
TYPES = ("full_attention", "sliding_attention")
VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish", "gelu", "relu", "gelu_pytorch_tanh"),
    "hidden_activation": ("gelu_pytorch_tanh", "gelu", "silu", "relu", None, ABSENT),
    "query_pre_attn_scalar": (8, 16, 144, ABSENT),
    "attn_logit_softcapping": (1.0, 5.0, 50.0, None, ABSENT),
    "final_logit_softcapping": (1.0, 3.0, 30.0, None, ABSENT),
    "use_bidirectional_attention": (True, False, None),
    "sliding_window_pattern": (1, 2, 3, 6, ABSENT),
    "_sliding_window_pattern": (2, 6),
    "rope_local_base_freq": (10_000.0, 300.0, ABSENT),
    "original_max_position_embeddings": (16, 64, ABSENT),
    "resid_pdrop": (0.0, 0.1),
    "embd_pdrop": (0.0, 0.1),
    "swiglu_limit": (7.0, 3.0),
    "swiglu_alpha": (1.702, 1.0),
    "experts_per_token": (2, 3),
    "initial_context_length": (16, 4096),
    "lm_head_bias": (False, True),
    "interpolate_factor": (1, 2),
    "cache_implementation": ("hybrid",),
    "rope_scaling": SCALINGS,
    "rope_parameters": tuple(s and s | {"rope_theta": 5000.0} for s in SCALINGS),
    "rope_theta": (10_000.0, 500.0, 1e6),
    "rotary_dim": (2, 4, 8, ABSENT),
    "use_qk_norm": (True, False),
    "rope_interleave": (True, False),
    "head_dim": (8, 16, None, ABSENT),
    "num_key_value_heads": (1, 2, 4, None, ABSENT),
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
    "attention_dropout": (0.0, 0.1),
    "tie_word_embeddings": (True, False),
    "rms_norm_eps": (1e-6, 1e-2, ABSENT),
    "sliding_window": (None, 5, 200, ABSENT),
    "use_sliding_window": (True, False),
    "max_window_layers": (0, 1, 2, 3, 5),
    "layer_types": tuple([a, b, c] for a in TYPES for b in TYPES for c in TYPES),
    "norm_topk_prob": (True, False, ABSENT),
    "num_experts_per_tok": (1, 2, 3),
    "scoring_func": ("softmax", "sigmoid"),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc", ABSENT),
    "n_group": (1, 2, 4),
    "topk_group": (1, 2),
    "routed_scaling_factor": (1.0, 0.5, 16.0, ABSENT),
    "first_k_dense_replace": (0, 1, 3, ABSENT),
    "n_shared_experts": (1, 2),
    "q_lora_rank": (None, 20),
    "mlp_only_layers": ([], [0], [1]),
    "decoder_sparse_step": (1, 2),
    "router_jitter_noise": (0.0, 0.1),
    "partial_rotary_factor": (1.0, 0.5, 0.75, 0.0),
    "max_position_embeddings": (16, 64, 4096, ABSENT),
    "initializer_range": (0.02, 1.0),
    "pretraining_tp": (1, 2),
    "use_cache": (True, False),
    "bos_token_id": (0, 5, None),
    "moe_layer_freq": (1, 2),
    "residual_multiplier": (0.5,),  # of another family
}


def case(seed: int) -> tuple[str, dict[str, Any]]:
    """A model type and the keys of its config."""
    draw = random.Random(seed)
    model_type = draw.choice(sorted(BASES))
    config = BASES[model_type] | draw.choice(VARIANTS.get(model_type, ({},)))
    plain = transformers.AutoConfig.for_model(model_type, **BASES[model_type]).to_dict()
    known = {*plain, *OLDER.get(model_type, ())}
    own = known & set(VALUES)
    for key in draw.sample(sorted(own), k=draw.choice((1, 1, 2, 3))):
        config[key] = draw.choice(VALUES[key])
    if draw.random() < 0.3:
        key = draw.choice(sorted(VALUES))
        config[key] = draw.choice(VALUES[key])
    config = {key: value for key, value in config.items() if value is not ABSENT}
    architecture = next(f.architecture for f in FAMILIES.values() if f.model_type == model_type)
    return model_type, config | {"architectures": [architecture], "model_type": model_type}


def reference(folder: Path, seed: int) -> tuple[Any, Any]:
    """Logits of transformers' model of the config in `folder`, its weights saved beside it, and the model.

    Nothing where it builds none.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        torch.manual_seed(seed)
        draw_weights(model)
        logits = model(TOKENS).logits
    except Exception:  # nonsense for transformers too
        return None, None
    text = (folder / "config.json").read_text()
    model.save_pretrained(folder)
    (folder / "config.json").write_text(text)  # the user's file, not what transformers makes of it
    return logits.detach(), model


def rounding(model: Any, expected: Any) -> float:
    """Distance by which transformers differs from itself when its weights change in their last bit."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1 + 2.0**-23 * torch.randn(parameter.shape).sign()
        return difference(model(TOKENS).logits, expected)


def difference(got: Any, expected: Any) -> float:
    """The largest one, over the largest logit."""
    return ((got - expected).abs().max() / expected.abs().max()).item()


TOKENS = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(1))


def outcome(seed: int, folder: Path) -> str:
    """`equal`, `refused`, `no model` (of transformers), or the error in words."""
    _, config = case(seed)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    expected, theirs = reference(folder, seed)
    try:
        model = model_from_path(folder)
        ours = build_model(model, device="cpu")
        if expected is None:
            return "no model"
        load_weights(ours, folder)
    except InputError:
        return "refused"
    with torch.no_grad():
        error = difference(ours(TOKENS), expected)
    if error < 1e-4 or error < 3 * (noise := rounding(theirs, expected)):
        return "equal"
    return f"seed {seed}: {config}: logits off by {error:.2g}, which rounding changes by {noise:.2g}"


def run(seeds: range, folder: Path) -> dict[str, int]:
    found = [outcome(seed, folder / str(seed)) for seed in seeds]
    wrong = [text for text in found if text.startswith("seed")]
    assert wrong == []
    return {kind: found.count(kind) for kind in ("equal", "refused", "no model")}


def test_random_configs_are_equal_or_refused(tmp_path):
    counts = run(range(60), tmp_path)
    assert counts["equal"] > 30
    assert counts["refused"] > 10


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 2000, 250))
def test_many_random_configs_are_equal_or_refused(first, tmp_path):
    run(range(first, first + 250), tmp_path)
