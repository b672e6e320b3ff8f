"""Switches of the recipes that published tables were measured with."""

from __future__ import annotations

import pytest
from tests.shipped_rows import shipped_runs

from meshwright.accuracy.conditions import RunConditions
from meshwright.accuracy.reasons import Reason
from meshwright.accuracy.shipped import published_models, published_recipes
from meshwright.accuracy.software import Recipe, recipe_for
from meshwright.catalog import lookup as catalog
from meshwright.catalog.stacks import features_of, stack_names
from meshwright.specs.features import CudaGraphs, Dispatcher
from meshwright.specs.plan import Recompute
from meshwright.specs.precision import PRECISIONS

PAGE = "github:NVIDIA-NeMo/Megatron-Bridge docs/performance-summary.md"


@pytest.fixture(scope="module")
def conditions() -> dict[str, RunConditions]:
    """Of the shipped rows, by their names."""
    return {r.id: r.conditions for r in shipped_runs() if r.conditions}


def recipe(vintage: float, *, source: str = PAGE, precision: str = "mxfp8") -> Recipe | None:
    return recipe_for(
        source=source,
        stack="megatron-bridge",
        vintage=vintage,
        model="qwen3-30b-a3b",
        accelerator="gb200",
        precision=precision,
    )


def test_the_last_one_up_to_the_release_decides() -> None:
    dropping, partial, full = recipe(2025.667), recipe(2026.25), recipe(2026.417)
    assert dropping
    assert partial
    assert full
    assert (dropping.features.drops_tokens, dropping.features.dispatcher) == (True, Dispatcher.ALL_TO_ALL)
    assert (partial.features.drops_tokens, partial.features.cuda_graphs) == (False, CudaGraphs.PARTIAL)
    assert full.features.cuda_graphs is CudaGraphs.FULL
    assert full.features.fp8_attention
    assert recipe(2025.0) is None


def test_a_format_without_its_own_has_the_one_of_all_formats() -> None:
    found = recipe(2026.417, precision="bf16")
    assert found
    assert found.features.cuda_graphs is CudaGraphs.PARTIAL


def test_only_pages_of_the_project_were_measured_with_it() -> None:
    assert recipe(2026.25, source="github:somebody/else README.md") is None


def test_maxtext_on_gpus_recomputes_what_its_page_says(conditions: dict[str, RunConditions]) -> None:
    plan = conditions["dgxc_bench-0115"].plan
    assert plan.recompute is Recompute.SELECTIVE
    assert set(plan.recompute_modules) == {"core_attention", "norm", "activation", "mlp"}
    assert conditions["dgxc_bench-0115"].stack.features.cuda_graphs is CudaGraphs.NONE


def test_maxtext_on_tpus_has_the_tiles_and_degrees_of_its_recipes(conditions: dict[str, RunConditions]) -> None:
    maverick, scout, qwen = (
        conditions[row] for row in ("tpu_recipes-0025", "tpu_recipes-0026", "tpu_recipes_ironwood-0015")
    )
    assert (maverick.plan.tensor, maverick.plan.data_shard) == (4, 32)
    assert maverick.software["cuda_graphs"] == CudaGraphs.FULL
    assert (scout.plan.tensor, scout.plan.recompute) == (1, Recompute.FULL)
    assert qwen.stack.features.attention_tile == 1536
    assert qwen.stack.features.fuses_attention_backward
    old = features_of(conditions["maxtext_tpu_tables-0020"].stack, catalog.accelerator("tpu-v5e"))
    assert (old.attention_tile, old.fuses_attention_backward) == (512, False)


def test_an_entry_without_models_is_for_those_that_no_other_names() -> None:
    page = {"source": "github:AI-Hypercomputer/tpu-recipes training/ironwood", "stack": "maxtext", "vintage": 2026.0}
    named, other = (
        recipe_for(**page, model=model, accelerator="tpu7x", precision="bf16")
        for model in ("gpt-oss-120b", "llama3.1-8b")
    )
    assert named
    assert other
    assert (named.features.attention_tile, other.features.attention_tile) == (1536, 2048)


def test_names_are_those_of_the_catalogue() -> None:
    for entry in published_recipes()["recipe"]:
        assert entry["stack"] in stack_names()
        assert entry["source"]
        for name in set(entry["models"]) - set(published_models()["model"]):
            catalog.model(name)
        for name in entry["accelerators"]:
            catalog.accelerator(name)
        assert set(entry.get("precisions", ())) <= set(PRECISIONS)
    assert set(published_recipes()["pages"]) == {entry["stack"] for entry in published_recipes()["recipe"]}


@pytest.mark.parametrize(
    ("row", "graphs", "overlaps"),
    [
        ("megatron_bridge-0296", CudaGraphs.FULL, True),  # whose note lists the dispatcher alone
        ("megatron_bridge-0299", CudaGraphs.FULL, True),
        ("megatron_bridge-0046", CudaGraphs.NONE, False),  # a preset without any of the release's defaults
        ("megatron_bridge-0058", CudaGraphs.NONE, False),
        ("megatron_bridge-0189", CudaGraphs.PARTIAL, False),  # whose note lists the dispatcher alone
        ("megatron_bridge-0202", CudaGraphs.STATE_SPACE, False),
        ("megatron_bridge-0212", CudaGraphs.NONE, False),
        ("megatron_bridge-0155", CudaGraphs.NONE, False),  # cuda_graph=none, whatever its scope
    ],
)
def test_rows_have_the_switches_of_their_recipe(
    conditions: dict[str, RunConditions], row: str, graphs: CudaGraphs, overlaps: bool
) -> None:
    software = conditions[row].software
    assert (software["cuda_graphs"], software["overlaps_experts"]) == (graphs, overlaps)


def test_a_row_without_recomputation_has_its_recipe_s(conditions: dict[str, RunConditions]) -> None:
    assert conditions["megatron_bridge-0036"].plan.recompute_modules == ("mla_up_projection", "mlp")


@pytest.mark.parametrize(
    ("row", "modules"),
    [
        ("megatron_bridge-0202", {"moe", "norm", "core_attention", "activation"}),
        ("megatron_bridge-0189", set()),
        ("megatron_bridge-0219", {"activation", "norm"}),
    ],
)
def test_hybrids_recompute_as_their_recipe(conditions: dict[str, RunConditions], row: str, modules: set[str]) -> None:
    assert set(conditions[row].plan.recompute_modules) == modules


def test_recipes_of_some_mixtures_do_not_overlap_tensor_parallelism(conditions: dict[str, RunConditions]) -> None:
    """DeepSeek-V3 and Qwen3 235B on H100, Nemotron 3 Super and NVFP4: tp_comm_overlap is False there."""
    rows = ("megatron_bridge-0036", "megatron_bridge-0248", "megatron_bridge-0229", "megatron_bridge-0163")
    assert [conditions[row].software["overlaps_tensor"] for row in rows] == [False] * 4
    assert conditions["megatron_bridge-0101"].software["overlaps_tensor"] is True


def test_adapters_of_nemo_and_its_bridge_are_those_of_one_matrix(conditions: dict[str, RunConditions]) -> None:
    for row in ("dgxc_bench-0107", "dgxc_bench-0137", "megatron_bridge-0083"):
        lora = conditions[row].lora
        assert lora
        assert lora.targets == ("qkv",)


def test_early_recipes_split_experts_over_tensor_ranks(conditions: dict[str, RunConditions]) -> None:
    """Megatron-Core's default; the tables of the spring of 2025 print the width."""
    early, later = conditions["dgxc_bench-0079"], conditions["dgxc_bench-0083"]
    assert (early.plan.expert_tensor, later.plan.expert_tensor) == (4, 1)
    assert conditions["dgxc_bench-0062"].plan.expert_tensor == 4  # a page of a release, measured with "dev"


def test_notes_precede_a_recipe(conditions: dict[str, RunConditions]) -> None:
    """The recipe of 26.02 sends by all-to-all, the row's note names HybridEP."""
    assert conditions["megatron_bridge-0053"].software["dispatcher"] == Dispatcher.HYBRIDEP


def test_a_note_can_leave_out_multi_token_prediction(conditions: dict[str, RunConditions]) -> None:
    without, module = conditions["megatron_bridge-0010"], conditions["megatron_bridge-0006"]
    assert (without.model.num_mtp_layers, module.model.num_mtp_layers) == (0, 1)


@pytest.mark.parametrize(
    ("vintage", "accelerator", "graphs"),
    [(2024.45, "h100", CudaGraphs.NONE), (2024.87, "h100", CudaGraphs.PARTIAL), (2025.42, "b200", CudaGraphs.FULL)],
)
def test_adapters_of_mlperf_have_graphs_since_its_round_4_1(
    vintage: float, accelerator: str, graphs: CudaGraphs
) -> None:
    found = recipe_for(
        source="github:mlcommons/training_results_v4.0 NVIDIA/results",
        stack="mlperf-nvidia",
        vintage=vintage,
        model="llama2-70b",
        accelerator=accelerator,
        precision="fp8",
    )
    assert found
    assert found.features.cuda_graphs is graphs


@pytest.mark.parametrize(
    ("vintage", "accelerator", "context", "stored"),
    [
        (2025.42, "b200", 1, ("feed_forward",)), (2026.42, "gb300", 1, ("feed_forward",)), (2025.42, "gb200", 8, ()),
        (2024.87, "b200", 2, ()), (2025.42, "h100", 1, ()),
    ],
)  # fmt: skip
def test_adapters_of_mlperf_keep_eight_bits_of_a_whole_sequence_on_blackwell(vintage, accelerator, context, stored):
    found = recipe_for(
        source="github:mlcommons/training_results_v5.0 NVIDIA/results", stack="mlperf-nvidia", vintage=vintage,
        model="llama2-70b", accelerator=accelerator, precision="fp8", context=context,
    )  # fmt: skip
    assert (found.stored if found else ()) == stored


def test_adapters_of_mlperf_that_ran_are_not_refused() -> None:
    """Their logs print 168.8 GB on devices of 192 GB."""
    rows = [r for r in shipped_runs() if "max_memory_usage logged 168.8" in " ".join((*r.unread, *r.assumed, r.notes))]
    assert len(rows) >= 10
    assert not [r.id for r in rows if r.conditions is None or r.conditions.plan.stored_activations is None]


def test_recipes_for_tpus_state_what_their_memory_depends_on(conditions: dict[str, RunConditions]) -> None:
    tiled, sharded, narrow = (conditions[f"tpu_recipes-{n}"] for n in ("0006", "0011", "0015"))
    assert tiled.plan.loss_chunk == tiled.seq_len * tiled.plan.micro_batch // 16
    assert (sharded.plan.data_shard, sharded.plan.data_replicate) == (512, 1)  # over both slices
    assert narrow.all_in_16_bits
    assert not conditions["tpu_recipes-0016"].all_in_16_bits  # on 64 chips weights have 32 bits


def test_adapters_on_192_gb_recompute_a_quarter_of_their_layers(conditions: dict[str, RunConditions]) -> None:
    """In 16 bits their activations need 220 GiB; on MI325X (256 GB) nothing is recomputed."""
    by_device = {
        c.accelerator.name: c.plan.recompute_layers
        for name, c in conditions.items()
        if name.startswith("mlperf_v5.0") and c.stack.framework == "mlperf-amd" and c.lora
    }
    assert by_device == {"mi300x": 21, "mi325x": None}


def test_a_format_of_the_recipe_that_is_not_modelled_is_a_reason() -> None:
    """Google multiplies in int8 in MLPerf; rows state no format."""
    rows = [r for r in shipped_runs() if r.id.startswith("mlperf_v4.1")]
    reasons = {(r.reason, r.reason_detail) for r in rows if r.accelerator_name == "TPU v6e"}
    assert reasons == {(Reason.UNKNOWN_PRECISION, "int8 on tpu-v6e")}


def test_another_depth_has_the_recipe_of_its_model() -> None:
    def found(model: str) -> Recipe | None:
        return recipe_for(
            source="github:NVIDIA/dgxc-benchmarking grok1/README.md",
            stack="nemo",
            vintage=2025.0,
            model=model,
            accelerator="h100",
            precision="bf16",
        )

    assert found("grok1-4-layers") == found("grok1")
    assert found("grok1") is not None


def test_a_depth_that_contradicts_the_printed_parameters_is_refused() -> None:
    rows = {r.id: r for r in shipped_runs()}
    assert rows["dgxc_bench-0262"].reason is Reason.INCONSISTENT
    assert "32 layers" in rows["dgxc_bench-0262"].reason_detail
    assert rows["dgxc_bench-0264"].reason is None


@pytest.mark.parametrize("model", ["gpt-oss-20b", "deepseek-v3"])
def test_mixtures_of_mlperf_have_fused_experts_on_blackwell(model: str) -> None:
    def found(vintage: float, accelerator: str) -> Recipe | None:
        return recipe_for(
            source="github:mlcommons/training_results_v6.0 NVIDIA/results", stack="mlperf-nvidia", vintage=vintage,
            model=model, accelerator=accelerator, precision="mxfp8",
        )  # fmt: skip

    round_6 = found(2026.42, "gb300")
    assert round_6
    assert round_6.features.fuses_experts
    assert round_6.features.dispatcher is Dispatcher.HYBRIDEP
    assert round_6.features.cuda_graphs is CudaGraphs.FULL
    assert found(2025.42, "gb300") is None
    assert found(2026.42, "h100") is None
