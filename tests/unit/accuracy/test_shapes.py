from collections.abc import Callable

import pytest
from tests.every_member import check_every

from meshwright.accuracy.csvfile import CsvRow
from meshwright.accuracy.reasons import CannotPredictError, Reason
from meshwright.accuracy.rows import PublishedRun
from meshwright.accuracy.shapes import _key, _named_model, read_model
from meshwright.accuracy.shipped import published_models
from meshwright.catalog.lookup import CatalogKind, entry, model_names
from meshwright.cost.flops import count_parameters
from meshwright.cost.tables import model_row
from meshwright.specs.model import AttentionKind, LinearKind, Model, Router

ReadOne = Callable[..., PublishedRun]


def model_of(**cells: object) -> Model:
    return read_model(CsvRow("runs.csv", 2, {k: str(v) for k, v in cells.items()})).model


def billions(model: Model) -> float:
    return float(count_parameters(model_row(model)).total) / 1e9


def test_published_spellings_find_their_model() -> None:
    def check(published: str, name: str) -> None:
        assert model_of(model=published).name == name

    check_every(
        [
            ("LLAMA3.1-405B", "llama3.1-405b"),
            ("Llama-3.1-405B", "llama3.1-405b"),
            ("LLAMA3_70B", "llama3-70b"),
            ("Llama-2-70B", "llama2-70b"),
            ("DeepSeekV3", "deepseek-v3"),
            ("DeepSeek V3 671B", "deepseek-v3"),
            ("Qwen3_235B_a22B", "qwen3-235b-a22b"),
            ("Qwen3 MoE 30B", "qwen3-30b-a3b"),
            ("GPT OSS 120B", "gpt-oss-120b"),
            ("GPT-3 175B", "gpt3-175b"),
            ("Kimi_K2", "kimi-k2"),
            ("Mixtral-8x22B", "mixtral-8x22b"),
            ("Nemotron4-340B", "nemotron-340b"),
            ("Grok-1 314B", "grok1"),
            ("Llama4-Maverick-17B-128E", "llama4-maverick"),
            ("Meta-Llama-3.1-8B-Instruct", "llama3.1-8b"),
            ("Qwen3-30B-A3B-Base", "qwen3-30b-a3b"),
            ("Qwen3-MoE-30B-A3B", "qwen3-30b-a3b"),
            ("Qwen2.5-7B-Instruct-1M", "qwen2.5-7b"),
            ("DSv3", "deepseek-v3"),
            ("DSv2-lite", "deepseek-v2-lite"),
            ("deepseek-v3-16b", "deepseek-v2-lite"),
            ("openai/gpt-oss-20b", "gpt-oss-20b"),
            ("Mixtral-8x7B-v0.1", "mixtral-8x7b"),
            ("GPT-2 1.5B", "gpt2-xl"),
            ("llama-3-8b-128k", "llama3-8b"),
            ("Llama-3.1-8B (128K ctx)", "llama3.1-8b"),
            ("Llama-3.1-70B-Instruct-quantized.w8a8", "llama3.1-70b"),
        ],
        lambda case: check(*case),
    )


PUBLISHED_BILLIONS = [
    ("grok1", 314), ("nemotron-15b", 15.6), ("nemotron-340b", 341), ("llama4-scout", 107.8),
    ("llama4-maverick", 400.7), ("llama3.2-1b", 1.236), ("llama3.2-3b", 3.213), ("mistral-7b", 7.24),
    ("qwen2.5-7b", 7.616), ("qwen2.5-14b", 14.77), ("qwen2.5-32b", 32.76), ("qwen2.5-72b", 72.71),
    ("gemma-2b", 2.51), ("gemma-7b", 8.54), ("gemma2-9b", 9.24), ("gemma2-27b", 27.2),
    ("gemma3-12b", 11.8), ("gemma3-27b", 27.0), ("starcoder2-15b", 15.96), ("minimax-m2.5", 229),
    ("llama-65b", 65.2), ("yi-34b", 34.4), ("falcon-7b", 6.92), ("falcon-40b", 41.3), ("falcon-180b", 179),
    ("mistral-nemo-12b", 12.2), ("mistral-large-2", 123), ("phi-2", 2.78), ("phi-3-medium", 14.0),
    ("phi-3.5-moe", 41.9), ("glm-4-9b", 9.4), ("internlm2-7b", 7.74), ("baichuan2-7b", 7.51),
    ("gpt-neox-20b", 20.6), ("pythia-12b", 11.8), ("gpt-j-6b", 6.05), ("opt-1.3b", 1.32), ("opt-175b", 175),
    ("bloom-176b", 176.2), ("starcoder2-7b", 7.17), ("command-r-35b", 35), ("olmo-7b", 6.89),
    ("olmo2-32b", 32.2), ("olmoe-1b-7b", 6.92), ("dbrx-132b", 132), ("deepseek-moe-16b", 16.4),
    ("qwen1.5-moe-a2.7b", 14.3), ("minitron-4b", 4.19), ("smollm3-3b", 3.08), ("qwen2.5-3b", 3.09),
    ("qwen2-57b-a14b", 57.4), ("moonlight-16b-a3b", 15.96), ("olmo3-7b", 7.3), ("qwen3-coder-480b-a35b", 480),
]  # fmt: skip


def test_models_outside_the_catalogue_have_their_published_size() -> None:
    def check(name: str, published_billions: float) -> None:
        assert billions(model_of(model=name)) == pytest.approx(published_billions, rel=0.015)

    check_every(PUBLISHED_BILLIONS, lambda case: check(*case))


def test_models_of_the_catalogue_are_known_as_tables_write_them() -> None:
    """A row that states no shape has those of the model that it names."""

    def check(name: str, published_billions: float) -> None:
        assert billions(model_of(model=name)) == pytest.approx(published_billions, rel=0.015)

    named = [
        ("ERNIE 4.5 21B-A3B", 21.8), ("Hunyuan-A13B", 80.4), ("Ling-mini-2.0", 16.3), ("DeepSeek-LLM-7B", 6.91),
        ("DeepSeek LLM 67B", 67.4), ("Mistral Small 24B", 23.6), ("Mistral-Small-3.1-24B", 23.6),
        ("InternLM2 20B", 19.9), ("Qwen2.5-14B-Instruct", 14.8), ("Zephyr-7B", 7.24), ("Granite-3.1-8B", 8.17),
        ("EXAONE 4.0 32B", 32.0), ("Mistral-7B-Instruct-v0.1", 7.24), ("DeepSeek-R1-Distill-Llama-70B", 70.6),
    ]  # fmt: skip
    check_every(named, lambda case: check(*case))


def test_a_family_without_its_size_is_noted(read_one: ReadOne) -> None:
    assert "Mistral Small read as mistral-small-24b" in read_one(model="Mistral Small").assumed


def test_no_two_names_are_one_key() -> None:
    """OPT has 1.3 and 13 billion parameters: without the point one would be read as the other."""
    names = [*published_models()["model"], *model_names()]
    assert len({_key(name) for name in names}) == len(names)
    assert model_of(model="OPT 1.3B").hidden < model_of(model="OPT-13B").hidden


def test_named_models_have_their_parallel_blocks() -> None:
    names = ("Falcon 40B", "GPT-NeoX", "pythia-6.9b", "GPT-J 6B", "phi-1.5", "Command R", "Phi-2", "OPT-1.3B")
    assert [_named_model(name)[0].parallel_norms for name in names] == [2, 2, 2, 1, 1, 1, 1, 0]


def test_every_entry_has_a_source() -> None:
    data = published_models()
    assert all(entry["source"] for entry in (*data["model"].values(), *data["family"]))


def test_every_listed_name_leads_to_a_model() -> None:
    data = published_models()
    for name in (*data["names"], *data["ambiguous_names"]):
        assert billions(model_of(model=name)) > 0


def test_a_truncated_model_keeps_the_layer_shape() -> None:
    whole, cut = (model_of(model="deepseek-v3"), model_of(model="deepseekv3-L4", notes="dense_layers=1 per summary"))
    assert (cut.num_layers, cut.num_dense_layers, cut.num_mtp_layers) == (4, 1, 0)
    assert cut.attention == whole.attention
    assert cut.attention.kind is AttentionKind.MLA
    proxy = model_of(model="Llama3.1 405B (proxy, 21 layers)")
    assert (proxy.num_layers, proxy.hidden) == (21, 16384)


def test_a_truncated_alternating_model_stays_50_percent_dense() -> None:
    cut = model_of(model="Llama4-Maverick", layers=32)
    assert (cut.num_layers, cut.num_dense_layers, cut.num_moe_layers) == (32, 16, 16)
    assert cut.num_windowed_layers == 24
    assert cut.experts
    assert cut.experts.router is Router.SIGMOID


def test_the_rows_own_dimensions_win() -> None:
    model = model_of(model="llama3-405b-L4", layers=4, hidden=16384, heads=128, kv_heads=16, ffn=53248, vocab=128000)
    assert (model.attention.num_kv_heads, model.vocab, model.num_layers) == (16, 128000, 4)


def test_latent_attention_ignores_listed_key_value_heads() -> None:
    assert model_of(model="DeepSeekV3", kv_heads=7).attention == model_of(model="DeepSeekV3").attention


@pytest.mark.parametrize(
    ("cells", "gated", "tied"),
    [
        ({"model": "nanotron-3.57B", "layers": 28, "hidden": 3072, "heads": 32, "kv_heads": 32, "ffn": 8192,
          "vocab": 131072, "params_b": 3.573}, True, True),
        ({"model": "nanotron-8.86B", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32, "ffn": 14336,
          "vocab": 131072, "params_b": 8.859}, True, False),
        ({"model": "BLOOM-176B", "layers": 70, "hidden": 14336, "heads": 112, "kv_heads": 112, "ffn": 57344,
          "vocab": 250880, "params_b": 176}, False, True),
    ],
)  # fmt: skip
def test_families_and_printed_sizes_decide_gates_and_ties(cells: dict[str, object], gated: bool, tied: bool) -> None:
    model = model_of(**cells)
    assert (model.gated_ffn, model.tied_embeddings) == (gated, tied)
    assert billions(model) == pytest.approx(cells["params_b"], rel=0.005)


def test_what_a_gpt_leaves_out_is_filled_and_noted(read_one: ReadOne) -> None:
    run = read_one(model="GPT-h1024-L12", layers=12, hidden=1024, heads=16, framework="Megatron-DeepSpeed")
    assert run.conditions
    model = run.conditions.model
    assert (model.ffn_hidden, model.vocab, model.attention.num_kv_heads) == (4096, 51200, 16)
    assert model.learned_positions == 8192
    assert {"feed-forward 4 x hidden", "vocabulary 51200"} <= set(run.assumed)


def test_a_reading_of_an_ambiguous_name_is_noted(read_one: ReadOne) -> None:
    assert "Llama-7B read as llama2-7b" in read_one(model="Llama-7B").assumed


def test_multi_token_prediction_is_trained_only_by_stacks_that_do(read_one: ReadOne) -> None:
    cells = {"model": "DeepSeek-V3", "tp": 1, "cp": 1, "dp": 8, "ep": 8}
    bridge = read_one(**cells, framework="NeMo Megatron-Bridge").conditions
    torch = read_one(**cells, framework="torchtitan").conditions
    assert bridge
    assert torch
    assert torch.model.num_mtp_layers == 0
    assert bridge.model.num_mtp_layers == model_of(model="DeepSeek-V3").num_mtp_layers


def test_published_models_are_none_of_the_catalogues():
    """A model that stands in both would be read with other shapes here than by its name elsewhere."""
    assert not {_key(name) for name in published_models()["model"]} & {
        _key(alias) for name in model_names() for alias in (name, *entry(CatalogKind.MODEL, name).aliases)
    }


def test_aliases_of_the_catalogue_are_names_in_tables():
    found, note = _named_model("GLM 4.5 Air")
    assert (found.name, note) == ("glm-4.5-air", ())


def test_models_with_linear_attention_are_read_by_name():
    assert model_of(model="Qwen3-Next-80B-A3B").linear_attention.kind is LinearKind.GDN
    pure = model_of(model="Zebra-Llama-300M KDA (pure)", arch="hybrid")
    assert pure.linear_attention.kind is LinearKind.KDA
    assert all(pure.linear_layers)
    assert billions(pure) == pytest.approx(0.3, rel=0.05)


@pytest.mark.parametrize("name", ["Qwen3.5-60B-A6B", "Kimi-Linear-7B", "gemma4-4b", "gemma3n-e4b"])
def test_shapes_that_nobody_lists_are_not_taken_from_a_plain_family(name):
    with pytest.raises(CannotPredictError, match=r"linear attention|each layer"):
        model_of(model=name, hidden=2048, layers=24, heads=16, ffn=4096)


OWN_MIXTURE = {
    "model": "Ours 9B", "model_canonical": "", "arch": "moe", "layers": 24, "hidden": 2048, "heads": 16, "kv_heads": 4,
    "ffn": "", "moe_ffn": 7168, "vocab": 128256, "experts": 8, "topk": 2, "params_b": "",
}  # fmt: skip


def test_a_mixture_of_no_known_name_has_the_dimensions_of_its_row(read_one: ReadOne) -> None:
    run = read_one(**OWN_MIXTURE)
    assert run.conditions is not None, run.reason_detail
    model = run.conditions.model
    assert model.experts is not None
    assert (model.experts.num_experts, model.experts.top_k, model.experts.ffn_hidden) == (8, 2, 7168)
    assert (model.num_moe_layers, model.gated_ffn, model.experts.num_shared) == (24, True, 0)
    assert billions(model) == pytest.approx(9.23, rel=0.02)
    assert {"experts in every layer", "no shared experts"} <= set(run.assumed)


def test_a_mixture_of_its_own_has_dense_layers_and_shared_experts(read_one: ReadOne) -> None:
    run = read_one(**OWN_MIXTURE | {"shared_experts": 1, "ffn": 8192, "notes": "dense_layers=3"})
    assert run.conditions is not None, run.reason_detail
    model = run.conditions.model
    assert model.experts is not None
    assert (model.num_dense_layers, model.ffn_hidden, model.experts.shared_hidden) == (3, 8192, 7168)
    assert "no shared experts" not in run.assumed


@pytest.mark.parametrize("column", ["experts", "topk", "moe_ffn"])
def test_a_mixture_that_leaves_its_experts_out_is_refused(read_one: ReadOne, column: str) -> None:
    run = read_one(**OWN_MIXTURE | {column: ""})
    assert run.reason is Reason.UNKNOWN_ARCHITECTURE
    assert run.reason_detail.endswith(f"has no {column}")
