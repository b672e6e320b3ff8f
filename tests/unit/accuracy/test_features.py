"""Switches of the software that notes of published rows state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.every_member import check_every
from tests.shipped_rows import shipped_runs

from meshwright.accuracy.rows import PublishedRun
from meshwright.specs.features import (
    FORCED_BALANCE,
    NATURAL_ROUTING,
    AttentionKernel,
    CudaGraphs,
    Dispatcher,
    Features,
    WireFormat,
)
from meshwright.specs.plan import Recompute

ReadOne = Callable[..., PublishedRun]


def features(read_one: ReadOne, notes: str, **cells: object) -> Features:
    c = read_one(notes=notes, **cells).conditions
    assert c
    return c.stack.features


STATED = [
    ("", Features()),
    ("synthetic data, second half of the page", Features()),
    ("kernel=torch; trial 3", Features(attention=AttentionKernel.UNFUSED)),
    ("kernel=flash_attention2 + RMS kernel", Features(attention=AttentionKernel.FA2)),
    ("kernel=flash_attentionv1.0.8", Features(attention=AttentionKernel.FA1)),
    ("TE + DeepEP + FlexAttn kernels",
     Features(dispatcher=Dispatcher.DEEPEP, attention=AttentionKernel.FLEX, compiles=True)),
    ("DeepEP + 1F1B A2A overlap", Features(dispatcher=Dispatcher.DEEPEP, overlaps_experts=True)),
    ("A2A dispatcher; PP32", Features(dispatcher=Dispatcher.ALL_TO_ALL)),
    ("FSDP + torch.compile + Float8", Features(compiles=True)),
    ("TE + triton kernels; mock data", Features(compiles=True)),
    ("2 kernels; mock data", Features()),
    ("FSDP; read at iteration 90", Features()),
    ("cumulative: +packed", Features(compiles=False)),
    ("2D + AsyncTP; torch.compile", Features(compiles=True, overlaps_tensor=True)),
    ("vanilla TP; float8 recipe none", Features(overlaps_tensor=False)),
    ("2 steady iterations; no TP-comm overlap", Features(overlaps_tensor=False)),
    ("FP8 attention; no recompute", Features(fp8_attention=True)),
    ("fp8_dot_product_attention=false", Features(fp8_attention=False)),
    ("gradients reduced in bf16", Features(gradient_format=WireFormat.BF16)),
    ("fp32 grad reduce", Features(gradient_format=WireFormat.FP32)),
    ("float8 tensorwise with fp8 all-gather", Features(parameter_format=WireFormat.FP8)),
    ("HybridEP; TE CUDA graphs attn/router/preprocess",
     Features(dispatcher=Dispatcher.HYBRIDEP, cuda_graphs=CudaGraphs.PARTIAL)),
    ("repo notes: cuda_graph=transformer_engine, cg_scope=['mamba']", Features(cuda_graphs=CudaGraphs.STATE_SPACE)),
    ("cuda_graph=transformer_engine, cg_scope=['mamba', 'attn']", Features(cuda_graphs=CudaGraphs.PARTIAL)),
    ("cuda_graph=none, cg_scope=['attn', 'mamba']", Features(cuda_graphs=CudaGraphs.NONE)),
    ("tokendrop; FP8 tensorwise", Features(drops_tokens=True)),
    ("dropless", Features(drops_tokens=False)),
]  # fmt: skip


def test_what_notes_state(read_one: ReadOne) -> None:
    def check(notes: str, expected: Features) -> None:
        assert features(read_one, notes) == expected

    check_every(STATED, lambda case: check(*case))


def test_the_version_states_switches_before_the_notes(read_one: ReadOne) -> None:
    def compiles(version: str, notes: str) -> bool | None:
        return features(read_one, notes, framework="torchtitan", framework_version=version).compiles

    assert compiles("2025-02, no compile", "") is False
    assert compiles("2025-02, torch.compile", "") is True
    assert compiles("2025-02, no compile", "compile from the default toml") is False
    assert compiles("2025-02", "torch.compile off") is False


def test_rungs_of_the_tables_of_torchtitan(read_one: ReadOne) -> None:
    assert features(read_one, "FSDP; read at iteration 90", framework="torchtitan").compiles is False
    assert features(read_one, "2D; torch.compile", framework="torchtitan").overlaps_tensor is False
    assert features(read_one, "2D + AsyncTP", framework="torchtitan").overlaps_tensor is True


def test_a_preset_states_all_of_its_switches(read_one: ReadOne) -> None:
    found = features(
        read_one,
        "repo preset: cuda_graph=transformer_engine, cg_scope=['attn', 'moe_router'], flex_dispatcher=hybridep",
        arch="moe",
    )
    assert found == Features(cuda_graphs=CudaGraphs.PARTIAL, dispatcher=Dispatcher.HYBRIDEP, overlaps_experts=False)
    full = features(read_one, "repo preset: cuda_graph=full_iteration, cg_scope=[], a2a_overlap=True", arch="moe")
    assert full.cuda_graphs is CudaGraphs.FULL
    assert full.overlaps_experts is True
    assert full.dispatcher is Dispatcher.ALL_TO_ALL


@pytest.mark.parametrize(
    ("notes", "imbalance"),
    [
        ("DeepEP; long context; forced balance", FORCED_BALANCE),
        ("forced uniform routing", FORCED_BALANCE),
        ("natural routing, dropless", NATURAL_ROUTING),
        ("", None),
    ],
)
def test_balance_of_experts(read_one: ReadOne, notes: str, imbalance: float | None) -> None:
    cells = {"model": "Qwen3 MoE 30B", "arch": "moe", "cp": 1, "dp": 8, "ep": 8, "gbs": 512}
    assert features(read_one, notes, **cells).expert_imbalance == imbalance


def test_offloaded_layers_are_a_share_of_the_model(read_one: ReadOne) -> None:
    found = features(read_one, "repo preset: cpu_offload_layers=8, mfsdp=True", layers=32)
    assert found.offloaded_activations == 0.25
    assert features(read_one, "activation offload expert_fc1").offloaded_activations is None


def test_all_that_maxtext_keeps_is_offloaded_where_each_tensor_is(read_one: ReadOne) -> None:
    for notes, share in (
        ("remat_policy=custom, decoder_layer_input=offload", 1.0),
        ("decoder_layer_input=offload, query_proj=device", None),
    ):
        assert features(read_one, notes, framework="MaxText").offloaded_activations == share


@pytest.mark.parametrize(("recompute", "share"), [("none + activation offload ratio 0.522", 0.522), ("none", None)])
def test_a_stated_share_of_offloaded_activations(read_one: ReadOne, recompute: str, share: float | None) -> None:
    run = read_one(recompute=recompute, notes="CPU activation offload")
    assert run.conditions
    assert run.conditions.stack.features.offloaded_activations == share
    assert any("offloading of activations" in note for note in run.assumed) == (share is None)


def test_rows_of_the_shipped_file_state_each_kind() -> None:
    """A reader that a change of the file's wording has silenced would leave everything to defaults."""
    stated = [r.conditions.stack.features for r in shipped_runs() if r.conditions]
    for name, least in (
        ("cuda_graphs", 20),
        ("dispatcher", 40),
        ("overlaps_experts", 20),
        ("attention", 150),
        ("compiles", 15),
        ("overlaps_tensor", 30),
        ("expert_imbalance", 15),
        ("offloaded_activations", 5),
    ):
        assert sum(getattr(f, name) is not None for f in stated) >= least, name


def test_a_named_dispatcher_means_expert_parallelism(read_one: ReadOne) -> None:
    cells = {"model": "Qwen3 MoE 30B", "arch": "moe", "cp": 1, "dp": 8, "ep": "", "gbs": 512}
    named, silent = read_one(notes="DeepEP", **cells).conditions, read_one(notes="", **cells).conditions
    assert named
    assert silent
    assert (named.plan.expert, silent.plan.expert) == (8, 1)


def test_attention_that_the_version_names(read_one: ReadOne) -> None:
    versions = {
        v: features(read_one, "", framework="Pax (JAX)", framework_version=v)
        for v in ("24.04 XLA", "24.04 TE", "2024-03 TE")
    }
    assert versions["24.04 XLA"].attention is AttentionKernel.UNFUSED
    assert versions["2024-03 TE"].attention is AttentionKernel.UNFUSED
    assert versions["24.04 TE"].attention is None
    assert features(read_one, "", framework="MaxText", framework_version="XLA").attention is None


def test_recipes_that_recompute_split_models(read_one: ReadOne) -> None:
    cells = {"framework": "NeMo AutoModel", "recompute": ""}
    split = read_one(tp=2, cp=1, dp=4, **cells).conditions
    whole = read_one(tp=1, cp=1, dp=8, **cells).conditions
    assert split
    assert whole
    assert split.plan.recompute is Recompute.FULL
    assert whole.plan.recompute is Recompute.NONE


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ({"framework": "torchtune", "model": "LLAMA3.1-8B"}, Recompute.FULL),
        ({"framework": "Pax (JAX)", "model": "Pax-GPT-175B"}, Recompute.FULL),
        ({"framework": "Pax (JAX)", "model": "Pax-GPT-5B"}, Recompute.SELECTIVE),
        ({"framework": "Pax (JAX)", "model": "LLAMA2-7B"}, Recompute.NONE),
        ({"framework": "torchtitan", "model": "LLAMA3.1-8B"}, Recompute.SELECTIVE),
        ({"framework": "torchtitan", "model": "LLAMA3.1-70B"}, Recompute.FULL),
        ({"framework": "MaxText", "model": "LLAMA3.1-8B"}, Recompute.FULL),
        ({"framework": "NeMo", "model": "LLAMA3.1-8B"}, Recompute.NONE),
    ],
)
def test_recomputation_of_recipes(read_one: ReadOne, cells: dict[str, str], expected: Recompute) -> None:
    """A row that states none has its framework's recipe; one that does keeps its own."""
    silent = read_one(arch="dense", recompute="", **cells).conditions
    stated = read_one(arch="dense", recompute="none", **cells).conditions
    assert silent
    assert stated
    assert silent.plan.recompute is expected
    assert stated.plan.recompute is Recompute.NONE


def test_a_policy_of_its_own_is_not_the_default_of_the_framework(read_one: ReadOne) -> None:
    """MaxText's custom policy keeps tensors that a row may not name: taken as full, and said to be."""
    run = read_one(framework="MaxText", arch="dense", recompute="custom")
    assert "recomputation 'custom' read as full" in run.assumed
