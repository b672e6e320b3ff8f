from dataclasses import replace

import pytest
from tests.every_member import check_every

from meshwright.catalog.lookup import CatalogKind, entry, model, model_names
from meshwright.catalog.models import model_of_repository, own_repository
from meshwright.cost.flops import count_parameters
from meshwright.cost.tables import model_row
from meshwright.errors import UnknownNameError
from meshwright.specs.model import AttentionKind, Router

REQUIRED = [
    "llama2-7b",
    "llama2-13b",
    "llama2-70b",
    "llama3-8b",
    "llama3-70b",
    "llama3.1-8b",
    "llama3.1-70b",
    "llama3.1-405b",
    "mixtral-8x7b",
    "mixtral-8x22b",
    "deepseek-v2-lite",
    "deepseek-v2",
    "deepseek-v3",
    "qwen3-0.6b",
    "qwen3-1.7b",
    "qwen3-4b",
    "qwen3-8b",
    "qwen3-14b",
    "qwen3-32b",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "kimi-k2",
    "gpt3-175b",
    "moe-2t",
]

PUBLISHED_TOTAL = {
    # Sources: the papers and model cards named in each entry; written here a second time on purpose.
    "llama2-7b": 6.74e9,
    "llama2-13b": 13.02e9,
    "llama2-70b": 68.98e9,
    "llama3-8b": 8.03e9,
    "llama3-70b": 70.55e9,
    "llama3.1-405b": 405.85e9,
    "mixtral-8x7b": 46.7e9,
    "mixtral-8x22b": 140.6e9,
    "deepseek-v2-lite": 15.7e9,
    "deepseek-v2": 235.7e9,
    "deepseek-v3": 671e9,
    "qwen3-0.6b": 0.596e9,
    "qwen3-8b": 8.19e9,
    "qwen3-32b": 32.8e9,
    "qwen3-30b-a3b": 30.5e9,
    "qwen3-235b-a22b": 235e9,
    "gpt-oss-20b": 20.9e9,
    "gpt-oss-120b": 116.8e9,
    "kimi-k2": 1.03e12,
    "minimax-m2": 229e9,
    "gpt3-175b": 174.6e9,
}


def parameters(name, **changes):
    return count_parameters(model_row(replace(model(name), **changes)))


def test_catalogue_has_every_required_model():
    assert set(REQUIRED) <= set(model_names())


def test_shapes_give_the_published_number_of_parameters():
    def check(name, total):
        # totals are published without the multi-token prediction module
        assert float(parameters(name, num_mtp_layers=0).total) == pytest.approx(total, rel=0.005)

    check_every(PUBLISHED_TOTAL.items(), lambda case: check(*case))


def test_published_totals_agree_with_the_shapes():
    def check(name):
        published = entry(CatalogKind.MODEL, name).published
        without_mtp = published.get("total_parameters_without_mtp")
        if without_mtp is None:
            assert float(parameters(name).total) == pytest.approx(published["total_parameters"], rel=0.002)
        else:
            assert float(parameters(name, num_mtp_layers=0).total) == pytest.approx(without_mtp, rel=0.002)

    check_every(REQUIRED, check)


@pytest.mark.parametrize(
    ("name", "active"),
    [
        ("mixtral-8x7b", 12.9e9),
        ("mixtral-8x22b", 39.1e9),
        ("deepseek-v2", 21e9),
        ("gpt-oss-20b", 3.61e9),
        ("gpt-oss-120b", 5.13e9),
        ("qwen3-235b-a22b", 22e9),
    ],
)
def test_shapes_give_the_published_number_of_active_parameters(name, active):
    # sources differ on whether the input embedding counts, hence the wider bound
    assert float(parameters(name).active) == pytest.approx(active, rel=0.025)


def test_structures_are_read():
    v3, oss, gpt = model("deepseek-v3"), model("gpt-oss-20b"), model("gpt3-175b")
    assert v3.attention.kind is AttentionKind.MLA
    assert (v3.experts.router, v3.experts.num_groups, v3.experts.groups_per_token) == (Router.SIGMOID, 8, 4)
    assert (v3.num_dense_layers, v3.num_moe_layers, v3.num_mtp_layers) == (3, 58, 1)
    assert (oss.attention.window, oss.num_windowed_layers, oss.attention.bias) == (128, 12, True)
    assert not gpt.gated_ffn
    assert gpt.tied_embeddings
    assert model("qwen3-0.6b").tied_embeddings
    assert not model("qwen3-8b").tied_embeddings


def test_moe_2t_allows_the_replica_of_the_whitepaper():
    """A replica of 384 GPUs with EP inside 8, or 16 as Primus has it, and virtual stages of whole layers."""
    m = model("moe-2t")
    assert float(parameters("moe-2t").total) == pytest.approx(2e12, rel=0.03)
    for expert, pipeline in ((8, 48), (16, 24), (32, 12)):
        assert expert * pipeline == 384
        assert m.experts.num_experts % expert == 0
        assert m.num_layers % (2 * pipeline) == 0  # at least two virtual stages
    replicas_on_64k = 65_536 / 384
    assert 32_768 * 4096 / replicas_on_64k == pytest.approx(0.75 * 2**20)
    assert {"identity", "replica", "sequence_length"} <= set(entry(CatalogKind.MODEL, "moe-2t").assumptions)
    assert "training_tokens" in entry(CatalogKind.MODEL, "moe-2t").unknown


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("LLAMA3.1-405B", "llama3.1-405b"),
        ("Llama3 70B", "llama3-70b"),
        ("Qwen3_30B_a3B", "qwen3-30b-a3b"),
        ("DeepSeekV3", "deepseek-v3"),
        ("GPT OSS 120B", "gpt-oss-120b"),
        ("Kimi_K2", "kimi-k2"),
    ],
)
def test_names_of_published_runs_find_their_model(written, name):
    assert model(written).name == name


@pytest.mark.parametrize(
    ("repository", "name"),
    [
        ("mistralai/Mistral-7B-v0.3", "mistral-7b-v0.3"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b-v0.1"),  # another vocabulary, and a window
        ("Qwen/Qwen2.5-32B", "qwen2.5-32b"),
        ("Qwen/Qwen2.5-72B-Instruct", "qwen2.5-72b"),
        ("meta-llama/Llama-4-Scout-17B-16E", "llama4-scout"),
        ("meta-llama/Llama-4-Maverick-17B-128E-Instruct", "llama4-maverick"),
        ("tiiuae/Falcon3-7B-Base", "falcon3-7b"),
        ("tiiuae/Falcon3-10B-Instruct", "falcon3-10b"),
    ],
)
def test_names_of_the_hub_find_their_model(repository, name):
    assert model_of_repository(repository) == name


def test_llama4_is_its_language_part():
    scout, maverick = model("llama4-scout"), model("llama4-maverick")
    assert (scout.num_moe_layers, maverick.num_moe_layers) == (48, 24)
    assert (maverick.experts.num_experts, maverick.experts.num_shared, maverick.ffn_hidden) == (128, 1, 16_384)
    assert (scout.attention.window, scout.num_windowed_layers) == (8192, 36)
    for name in ("llama4-scout", "llama4-maverick"):
        assert float(parameters(name).active) == pytest.approx(17e9, rel=0.06)  # without the input embedding


@pytest.mark.parametrize(
    ("short", "name"),
    [
        ("qwen3-235b", "qwen3-235b-a22b"), ("Qwen3 30B", "qwen3-30b-a3b"), ("gemma-3-27b", "gemma3-27b"),
        ("gemma-3-27b-it", "gemma3-27b"), ("llama3.1-70b-instruct", "llama3.1-70b"),
        ("kimi-linear", "kimi-linear-48b-a3b"),
    ],
)  # fmt: skip
def test_a_beginning_that_one_model_has_is_a_name(short, name):
    assert model(short).name == name


@pytest.mark.parametrize("short", ["mistral-7b", "gpt-oss", "qwen3"])
def test_a_beginning_that_several_models_have_names_them(short):
    with pytest.raises(UnknownNameError) as refused:
        model(short)
    assert (refused.value.hint or "").startswith(f"did you mean one of {short}-")


def test_no_name_of_the_catalogue_is_another_one_with_other_hyphens():
    squeezed = [name.replace("-", "") for name in model_names()]
    assert len(set(squeezed)) == len(squeezed)


def test_unknown_model_is_an_error():
    with pytest.raises(UnknownNameError, match="did you mean 'llama3-8b'"):
        model("lama3-8b")


@pytest.mark.parametrize(
    ("name", "repository"),
    [
        ("qwen3-8b", "Qwen/Qwen3-8B"),  # DeepSeek-R1-0528-Qwen3-8B has its shapes
        ("deepseek-v2", "deepseek-ai/DeepSeek-V2"),
        ("phi4", "microsoft/phi-4"),
        ("minimax-m2", "MiniMaxAI/MiniMax-M2"),
        ("llama3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("moe-2t", None),
    ],
)
def test_the_repository_of_a_model_has_its_name_and_no_further_training(name, repository):
    assert own_repository(name) == repository
