"""Models of data/models.json: shapes, counts, and the names under which the hub has them."""

import re
from collections import Counter

import pytest
from tests.every_member import check_every

from meshwright import runfile
from meshwright.catalog.entries import DATA, CatalogKind, entry, normal_name
from meshwright.catalog.huggingface import model_from_config
from meshwright.catalog.models import model, model_like, model_names, model_of_repository
from meshwright.cost.flops import count_parameters
from meshwright.cost.tables import model_row
from meshwright.json_values import load_json

LISTED = load_json(DATA / "models.json")
WITHOUT_A_SIZE = {"hunyuan-a13b", "command-r7b", "ernie4.5-300b-a47b"}
"""Names with the size of what one token meets, or a rounded one."""
SIZE = re.compile(r"(\d+(?:\.\d+)?)([mbt])(?=-|$)")


def counted(name: str) -> float:
    return float(count_parameters(model_row(model(name))).total)


def test_shapes_give_the_published_number_of_parameters() -> None:
    def check(name: str) -> None:
        published = entry(CatalogKind.MODEL, name).published
        assert counted(name) == pytest.approx(published["total_parameters"], rel=0.005)

    known = [name for name in LISTED if "published" in LISTED[name]]
    assert len(known) > 100
    check_every(known, check)


def test_models_without_a_published_count_have_the_size_of_their_name() -> None:
    def check(name: str) -> None:
        size, unit = SIZE.findall(name)[0]
        assert counted(name) == pytest.approx(float(size) * {"m": 1e6, "b": 1e9, "t": 1e12}[unit], rel=0.12)

    check_every([n for n in LISTED if "published" not in LISTED[n] and n not in WITHOUT_A_SIZE], check)


def test_every_entry_cites_a_source() -> None:
    assert all(len(one["sources"]["all"]) > 10 for one in LISTED.values())
    assert all(bool(one["sources"].get("published")) == ("published" in one) for one in LISTED.values())


def test_no_name_leads_to_two_models() -> None:
    names = Counter[str]()
    for name in model_names():
        one = entry(CatalogKind.MODEL, name)
        hub = (repository.rpartition("/")[2] for repository in one.repositories)
        names.update({normal_name(known) for known in (name, *one.aliases, *hub)})
    assert [name for name, times in names.items() if times > 1] == []


@pytest.mark.parametrize(
    ("repository", "name"),
    [
        ("Qwen/Qwen2.5-14B-Instruct", "qwen2.5-14b"),
        ("unsloth/Qwen2.5-14B-Instruct-bnb-4bit", "qwen2.5-14b"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "qwen2.5-7b"),
        ("Qwen/Qwen2.5-Math-7B", "qwen2.5-math-7b"),  # another base of its rotary positions
        ("Qwen/QwQ-32B", "qwen2.5-32b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b-v0.1"),
        ("mistralai/Mistral-7B-Instruct-v0.2", "mistral-7b-v0.2"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("mistralai/Mistral-Small-Instruct-2409", "mistral-small-22b"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "mistral-small-24b"),
        ("HuggingFaceH4/zephyr-7b-beta", "mistral-7b-v0.1"),
        ("NousResearch/Llama-2-7b-hf", "llama2-7b"),
        ("NousResearch/Meta-Llama-3-8B-Instruct", "llama3-8b"),
        ("TheBloke/Llama-2-7B-Chat-GPTQ", "llama2-7b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama3.1-70b"),
        ("hugging-quants/Meta-Llama-3.1-405B-BNB-NF4-BF16", "llama3.1-405b"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "deepseek-r1-distill-qwen-1.5b"),  # embeddings are not tied
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "llama3.1-8b"),
        ("EleutherAI/pythia-160m-deduped", "pythia-160m"),
        ("google/gemma-3-27b-it", "gemma3-27b"),
        ("CohereForAI/c4ai-command-r-v01", "command-r-35b"),
        ("CohereForAI/c4ai-command-r-08-2024", "command-r-32b"),  # fewer heads of keys and values
        ("baidu/ERNIE-4.5-21B-A3B-PT", "ernie4.5-21b-a3b"),
        ("tencent/Hunyuan-A13B-Instruct", "hunyuan-a13b"),
        ("inclusionAI/Ling-mini-2.0", "ling-mini-2.0"),
        ("internlm/internlm2_5-20b-chat", "internlm2-20b"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", None),  # it has a vision part
        ("Qwen/Qwen3-Embedding-0.6B", None),
        ("meta-llama/Llama-3.2-11B-Vision-Instruct", None),
        ("somebody/Llama-2-7b-hf", None),
        ("Qwen/Qwen2.5-14B@main", None),  # a revision is asked of the hub
    ],
)
def test_names_of_the_hub_find_their_model(repository: str, name: str | None) -> None:
    assert model_of_repository(repository) == name


def test_a_name_with_another_word_is_another_model() -> None:
    assert model_like("somebody/Meta-Llama-3-8B-Instruct-AWQ") == "llama3-8b"
    for other in ("llama3-8b-pro", "Llama-3-8B-Instruct-262k", "Qwen2.5-Math-7B-RoPE-300k", "Qwen2.5-7B-Instruct-1M"):
        assert model_like(f"somebody/{other}") is None, other


CONFIGS = {
    "qwen2.5-14b": {
        "architectures": ["Qwen2ForCausalLM"], "hidden_size": 5120, "intermediate_size": 13824,
        "max_position_embeddings": 131072, "max_window_layers": 48, "num_attention_heads": 40,
        "num_hidden_layers": 48, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
        "sliding_window": 131072, "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 152064,
    },
    "mistral-7b-v0.1": {
        "architectures": ["MistralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
        "tie_word_embeddings": False, "vocab_size": 32000,
    },
    "seed-oss-36b": {
        "architectures": ["SeedOssForCausalLM"], "attention_bias": True, "attention_out_bias": False,
        "head_dim": 128, "hidden_size": 5120, "intermediate_size": 27648, "mlp_bias": False,
        "num_attention_heads": 80, "num_hidden_layers": 64, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_theta": 10000000.0, "tie_word_embeddings": False, "vocab_size": 155136,
    },
    "moonlight-16b-a3b": {
        "architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 1, "hidden_size": 2048,
        "intermediate_size": 11264, "kv_lora_rank": 512, "moe_intermediate_size": 1408, "moe_layer_freq": 1,
        "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": True,
        "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
        "rope_theta": 50000.0, "routed_scaling_factor": 2.446, "scoring_func": "sigmoid", "topk_group": 1,
        "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 163840,
    },
}  # fmt: skip
"""Keys of config.json as the hub has them."""


@pytest.mark.parametrize("name", CONFIGS)
def test_an_entry_is_what_its_config_says(name: str) -> None:
    assert model_from_config(CONFIGS[name], name=name) == model(name)


def test_architectures_that_no_engine_builds_say_so() -> None:
    assert model("minicpm-2b").unsupported == ("architecture: MiniCPMForCausalLM",)
    run = runfile.named_model("openbmb/MiniCPM-2B-sft-bf16")
    assert run == model("minicpm-2b")
