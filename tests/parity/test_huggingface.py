"""Logits and gradients equal those of Hugging Face transformers, for every family, in fp32 on the CPU.

The weights go through files in both directions, so names, layouts and config.json are tested by the same comparison.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.reference_weights import draw_weights
from tests.rounding import assert_equals

from meshwright.catalog.families import trained_families
from meshwright.catalog.huggingface import model_from_config, model_from_path
from meshwright.training.models import build_model, init_weights
from meshwright.training.weights import config_of, load_weights, save_weights

torch.set_num_threads(1)

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 97,
}
TERMS = 97
"""The longest sum of these models: over the vocabulary. The next is over 80 tokens."""
LLAMA3_SCALING = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 32,
    "rope_type": "llama3",
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "rope_type": "yarn"}
LATENT = TINY | {
    "first_k_dense_replace": 1,
    "kv_lora_rank": 12,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "rope_scaling": YARN | {"mscale": 0.8, "mscale_all_dim": 0.6},
    "routed_scaling_factor": 2.5,
    "topk_group": 1,
    "v_head_dim": 6,
}
LONGROPE = {"long_factor": [1.0, 1.5, 3.0], "short_factor": [1.0, 1.1, 1.3], "type": "longrope"}
GEMMA = TINY | {"head_dim": 16, "num_hidden_layers": 4, "query_pre_attn_scalar": 24, "sliding_window": 6}
GEMMA |= {"pad_token_id": None}  # transformers does not train the embedding of padding
QWEN3_MOE = TINY | {"head_dim": 16, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}
GLM4_MOE = TINY | {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "num_nextn_predict_layers": 0,
    "routed_scaling_factor": 2.5,
}
CASES = {
    "llama2": ("llama", TINY),
    "llama3": ("llama", TINY | {"rope_theta": 500_000.0, "tie_word_embeddings": True}),
    "llama3.1": ("llama", TINY | {"rope_theta": 500_000.0, "rope_scaling": LLAMA3_SCALING}),
    "llama-bias": ("llama", TINY | {"attention_bias": True, "rope_scaling": YARN}),
    "mistral": ("mistral", TINY | {"sliding_window": 5}),
    "mixtral": ("mixtral", TINY | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3": ("qwen3", TINY | {"head_dim": 16, "rope_theta": 1e6, "tie_word_embeddings": True}),
    "qwen3-windowed": (
        "qwen3",
        TINY | {"head_dim": 16, "max_window_layers": 1, "sliding_window": 6, "use_sliding_window": True},
    ),
    "qwen3-moe": ("qwen3_moe", QWEN3_MOE | {"norm_topk_prob": True}),
    "qwen3-moe-windowed": ("qwen3_moe", QWEN3_MOE | {"sliding_window": 6, "use_sliding_window": True}),
    "qwen3-moe-as-scored": ("qwen3_moe", QWEN3_MOE | {"norm_topk_prob": False}),
    "deepseek-v2-lite": ("deepseek_v2", LATENT | {"q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek-v2": ("deepseek_v2", LATENT | {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"}),
    "deepseek-v3": (
        "deepseek_v3",
        LATENT
        | {
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "num_nextn_predict_layers": 0,
            "scoring_func": "sigmoid",
        },
    ),
    "llama3.2": ("llama", TINY | {"rope_scaling": LLAMA3_SCALING | {"factor": 32.0}, "tie_word_embeddings": True}),
    "llama-gelu": ("llama", TINY | {"hidden_act": "gelu", "rope_scaling": {"factor": 2.0, "rope_type": "linear"}}),
    "qwen2.5": ("qwen2", TINY | {"rope_theta": 1e6, "tie_word_embeddings": True}),
    "qwen2-windowed": ("qwen2", TINY | {"max_window_layers": 1, "sliding_window": 6, "use_sliding_window": True}),
    "qwen3-pattern": (
        "qwen3",
        TINY
        | {"head_dim": 16, "sliding_window": 6, "use_sliding_window": True}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "olmo2": ("olmo2", TINY | {"pad_token_id": None, "rope_theta": 500_000.0}),
    "phi3": ("phi3", TINY | {"sliding_window": 7, "pad_token_id": None}),
    "phi4-mini-short": (
        "phi3",
        TINY
        | {"original_max_position_embeddings": 64, "partial_rotary_factor": 0.75, "rope_scaling": LONGROPE}
        | {"pad_token_id": None, "tie_word_embeddings": True},
    ),
    "phi4-mini-long": (
        "phi3",
        TINY
        | {"original_max_position_embeddings": 32, "partial_rotary_factor": 0.75, "rope_scaling": LONGROPE}
        | {"pad_token_id": None},
    ),
    "gemma2": ("gemma2", GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}),
    "gemma3": (
        "gemma3_text",
        GEMMA | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window_pattern": 3},
    ),
    "gpt-oss": (
        "gpt_oss",
        TINY
        | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}
        | {"num_hidden_layers": 4, "rope_scaling": YARN | {"truncate": False}},
    ),
    "glm4-moe": ("glm4_moe", GLM4_MOE | {"head_dim": 16, "use_qk_norm": True}),
    "glm4-moe-groups": (
        "glm4_moe",
        GLM4_MOE | {"attention_bias": True, "n_group": 4, "topk_group": 2, "partial_rotary_factor": 0.75},
    ),
    "minimax-m2": (
        "minimax_m2",
        TINY | {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 8},
    ),
}


ALWAYS = ("llama3.1", "mixtral", "qwen3-moe-windowed", "deepseek-v3", "phi4-mini-long", "gemma3", "gpt-oss")
"""Their parts make up all others, whose logits `test_config_fuzz.py` compares in every lane."""
MOST = [case if case in ALWAYS else pytest.param(case, marks=pytest.mark.when_touched) for case in CASES]


def architecture(model_type: str) -> str:
    return next(family.architecture for family in trained_families() if family.model_type == model_type)


def reference_model(case: str) -> torch.nn.Module:
    model_type, keys = CASES[case]
    config = transformers.AutoConfig.for_model(model_type, **keys, attn_implementation="eager")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    draw_weights(model)
    return model.eval()


def tokens(*, batch=2, length=40):
    return torch.randint(TINY["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(1))


def gradients_in_files(model) -> dict[str, torch.Tensor]:
    """Gradients under the names that files use: saved as if they were weights, which the model has again afterwards."""
    from safetensors.torch import load_file

    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
        for name, buffer in model.named_buffers():
            if "bias" in name:
                buffer.zero_()
    with TemporaryDirectory() as folder:
        if isinstance(model, transformers.PreTrainedModel):
            model.save_pretrained(folder)
        else:
            save_weights(model, Path(folder), dtype=torch.float32)
        model.load_state_dict(weights)
        return load_file(Path(folder, "model.safetensors"))


@pytest.mark.parametrize("case", MOST)
def test_logits_and_gradients_equal_transformers(case, tmp_path):
    reference = reference_model(case)
    reference.save_pretrained(tmp_path / "reference")
    model = model_from_path(tmp_path / "reference")
    ours = build_model(model, device="cpu")
    load_weights(ours, tmp_path / "reference")

    tokens_BT = tokens()
    labels_BT = tokens_BT.roll(-1, dims=1)
    expected_BTV = reference(tokens_BT).logits
    torch.nn.functional.cross_entropy(expected_BTV.flatten(0, 1), labels_BT.flatten()).backward()
    expected = gradients_in_files(reference)

    def trained():
        ours.zero_grad()
        got_BTV = ours(tokens_BT)
        (ours(tokens_BT, labels_BT=labels_BT) / labels_BT.numel()).backward()
        return gradients_in_files(ours) | {"logits": got_BTV}

    expected["logits"] = expected_BTV
    assert_equals(trained, expected, weights=ours.parameters(), terms=TERMS)


def test_packed_documents_have_the_rotations_of_their_own_length(tmp_path):
    reference = reference_model("phi4-mini-long")  # another set of divisors beyond 32 tokens
    reference.save_pretrained(tmp_path)
    ours = build_model(model_from_path(tmp_path), device="cpu")
    load_weights(ours, tmp_path)
    short, long = tokens(batch=1, length=20), tokens(batch=1, length=40)

    def packed():
        out_BTV = ours(
            torch.cat([short, long, torch.zeros(1, 4, dtype=torch.long)], dim=1),
            positions_BT=torch.cat([torch.arange(20), torch.arange(40), torch.zeros(4, dtype=torch.long)])[None],
            documents_BT=torch.tensor([[0] * 20 + [1] * 40 + [-1] * 4]),
        )
        return {"short": out_BTV[:, :20], "long": out_BTV[:, 20:60]}

    expected = {"short": reference(short).logits, "long": reference(long).logits}
    assert_equals(packed, expected, weights=ours.parameters(), terms=TERMS)


@pytest.mark.parametrize("case", MOST)
def test_transformers_loads_what_we_write(case, tmp_path):
    model_type, keys = CASES[case]
    config = transformers.AutoConfig.for_model(model_type, **keys).to_dict()
    config["architectures"] = [architecture(model_type)]
    model = model_from_config(config, name=case)
    ours = build_model(model, device="cpu")
    init_weights(ours, seed=3, std=0.3)
    save_weights(ours, tmp_path / "saved", dtype=torch.float32, file_bytes=20_000)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", attn_implementation="eager", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens_BT = tokens()
    expected = {"logits": loaded(tokens_BT).logits}
    assert_equals(lambda: {"logits": ours(tokens_BT)}, expected, weights=ours.parameters(), terms=TERMS)

    again = build_model(model_from_path(tmp_path / "saved"), device="cpu")
    load_weights(again, tmp_path / "saved")
    assert torch.equal(again(tokens_BT), ours(tokens_BT))


@pytest.mark.parametrize("case", CASES)
def test_our_config_describes_the_same_model(case, tmp_path):
    reference_model(case).config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    model_type, _ = CASES[case]
    config["architectures"] = [architecture(model_type)]
    model = model_from_config(config, name=case)
    assert model_from_config(config_of(model, dtype="float32"), name=case) == model
