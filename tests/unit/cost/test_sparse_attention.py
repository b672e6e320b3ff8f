"""Sparse and compressed attention: DeepSeek-V3.2, GLM-5, DeepSeek-V4."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.calibration.memory import memory_constants
from meshwright.catalog import lookup as catalog
from meshwright.catalog.stacks import stack_for_engine
from meshwright.cost.flops import attention_core_flops_per_token, count_parameters, model_flops_per_token
from meshwright.cost.memory.activations import layer_bytes
from meshwright.cost.sparse_attention import (
    gathers_keys,
    index_score_flops,
    indexer_bytes_per_token,
    scored_keys,
    selected_keys,
    stream_bytes_per_token,
)
from meshwright.cost.tables import BatchTable, model_row, plan_row, precision_row
from meshwright.engines.base import check_export
from meshwright.errors import InputError
from meshwright.inference.memory import cached_values, served
from meshwright.inference.work import _mean_keys
from meshwright.planner.estimate import estimate_plan
from meshwright.planner.legality import legality_context, violations
from meshwright.planner.request import PlanRequest
from meshwright.runfile import from_options
from meshwright.specs.hardware import Stack
from meshwright.specs.model import Attention, AttentionKind, Model
from meshwright.specs.model_parts import contradictions, parts_of
from meshwright.specs.plan import Plan, Recompute
from meshwright.specs.precision import PRECISIONS
from meshwright.specs.sparse_attention import Compression, Indexer

DENSE = catalog.model("deepseek-v3")
DSA = catalog.model("deepseek-v3.2")
GLM = catalog.model("glm-5")
FLASH = catalog.model("deepseek-v4-flash")
PRO = catalog.model("deepseek-v4-pro")
PLAN = Plan(pipeline=4, expert=8, data_shard=8, sharding=1)


def with_top_k(model: Model, top_k: int) -> Model:
    assert model.attention.indexer is not None
    indexer = replace(model.attention.indexer, top_k=top_k)
    return replace(model, attention=replace(model.attention, indexer=indexer))


def request(model: Model, *, seq_len: int = 4096, batch: int = 256, engine: str = "any") -> PlanRequest:
    return PlanRequest(
        model=model, cluster=catalog.cluster("mi355x-8x4"), seq_len=seq_len, global_batch=batch,
        precision=PRECISIONS["bf16"], stack=stack_for_engine(engine), engine=engine,
    )  # fmt: skip


def components(model: Model, *, seq_len: int = 4096, plan: Plan = PLAN) -> dict[str, float]:
    return dict(estimate_plan(request(model, seq_len=seq_len), plan).step.components_s)


@pytest.mark.parametrize(
    ("model", "total", "active"),
    [(DSA, 671.9e9, 37.5e9), (GLM, 744e9, 40e9), (FLASH, 284e9, 13e9), (PRO, 1.6e12, 49e9)],
    ids=lambda value: getattr(value, "name", None),
)
def test_parameters_without_prediction_modules_are_the_published_ones(model, total, active):
    counted = count_parameters(model_row(replace(model, num_mtp_layers=0)))
    assert counted.total == pytest.approx(total, rel=0.02)
    assert counted.active == pytest.approx(active, rel=0.025)


def test_an_indexer_has_the_parameters_of_its_matrices():
    """Queries 1536 x 64 x 128, one key of 128, weights of 64 heads and the LayerNorm of the key, in 61 + 1 layers."""
    more = count_parameters(model_row(DSA)).total - count_parameters(model_row(DENSE)).total
    assert more == 62 * (1536 * 64 * 128 + 7168 * 128 + 7168 * 64 + 2 * 128)


@settings(max_examples=40, deadline=None)
@given(top_k=st.integers(1, 300_000), seq_len=st.integers(2, 262_144))
def test_flops_of_attention_with_all_keys_selected_are_those_of_dense_attention(top_k, seq_len):
    sparse, dense = model_row(with_top_k(DSA, top_k)), model_row(DENSE)
    core, whole = (attention_core_flops_per_token(m, seq_len=seq_len) for m in (sparse, dense))
    assert core <= whole * (1 + 1e-9)
    if top_k >= seq_len:
        assert core == pytest.approx(whole)


def test_attention_that_selects_all_keys_takes_as_long_as_dense_attention_and_the_indexer_comes_on_top():
    dense, sparse = components(DENSE), components(with_top_k(DSA, 4096))
    # Shares of a step whose host and power limits differ slightly.
    assert sparse["attention_core"] == pytest.approx(dense["attention_core"], rel=0.02)
    assert sparse["indexer"] > 0
    assert dense["indexer"] == 0


@settings(max_examples=30, deadline=None)
@given(top_k=st.integers(64, 65_536))
def test_more_selected_keys_are_never_less_work(top_k):
    few, more = (model_row(with_top_k(DSA, k)) for k in (top_k, 2 * top_k))
    assert selected_keys(few, 131_072) <= selected_keys(more, 131_072)
    flops = [float(model_flops_per_token(m, seq_len=131_072)) for m in (few, more)]
    assert flops[0] <= flops[1]


def test_long_sequences_gather_and_short_ones_do_not():
    """In latent space a key costs 1,088 values a head instead of 320: masked dense attention is less work before."""
    row = model_row(DSA)
    assert [int(gathers_keys(row, s)) for s in (2048, 4096, 16_384, 131_072)] == [0, 0, 1, 1]
    assert int(gathers_keys(model_row(FLASH), 128)) == 1


def test_attention_of_long_sequences_is_several_times_faster():
    plan = replace(PLAN, recompute=Recompute.FULL)
    dense, sparse = (components(m, seq_len=131_072, plan=plan) for m in (DENSE, DSA))
    assert 4 < dense["attention_core"] / sparse["attention_core"] < 16
    assert sparse["attention_core"] + sparse["indexer"] < dense["attention_core"]


def test_the_indexer_grows_with_the_square_of_the_sequence_and_attention_does_not():
    row = model_row(DSA)
    scores = [float(index_score_flops(row, scored_keys(row, s))) for s in (65_536, 131_072)]
    assert scores[1] == pytest.approx(2 * scores[0])
    assert float(selected_keys(row, 131_072)) == pytest.approx(2048 - 2048**2 / 2 / 131_072)
    assert float(selected_keys(row, 0)) == 0.0  # of a search's least memory


def test_an_indexer_that_is_not_trained_has_no_backward_pass():
    frozen = replace(DSA, attention=replace(DSA.attention, indexer=replace(DSA.attention.indexer, is_trained=False)))
    assert components(frozen)["indexer"] < components(DSA)["indexer"]
    kept = [float(indexer_bytes_per_token(model_row(m), 131_072, 2.0)) for m in (frozen, DSA)]
    assert kept == [4 * 2048, 4 * 2048 + 2 * 65 * 129]


def test_layers_that_share_a_choice_have_no_indexer():
    half = replace(DSA, attention=replace(DSA.attention, indexer=replace(DSA.attention.indexer, num_layers=30)))
    fewer = components(half)["indexer"] / components(DSA)["indexer"]
    assert fewer == pytest.approx(30 / 61, rel=0.02)


def test_tensor_ranks_repeat_the_indexer():
    one = components(DSA)
    two = components(DSA, plan=replace(PLAN, tensor=2, data_shard=4, sequence_parallel=True))
    # Half as many data ranks: twice as many micro-batches on each.
    assert two["indexer"] == pytest.approx(2 * one["indexer"], rel=0.05)


def test_compressed_layers_are_counted_by_their_stride():
    c = FLASH.attention.compression
    assert c is not None
    assert (c.num_layers(indexed=True), c.num_layers(indexed=False), c.long_stride) == (21, 20, 128)
    row = model_row(FLASH)
    core = float(attention_core_flops_per_token(replace(row, num_mtp_layers=0), seq_len=4096))
    window, selected = 128 - 128**2 / 8192, (2048 - 2048**2 / 8192) / 4
    assert core == pytest.approx(2 * 64 * 1024 * (43 * window + 21 * selected + 20 * 16))


def test_streams_widen_messages_between_stages_and_what_layers_keep():
    one = replace(FLASH, residual_streams=1)
    row = model_row(FLASH)
    assert float(stream_bytes_per_token(row, 2.0)) == (2 * 2 * 5 + 2 * 4 * 4) * 4096
    assert float(stream_bytes_per_token(model_row(one), 2.0)) == 0
    wide, narrow = (estimate_plan(request(m), PLAN) for m in (FLASH, one))
    assert wide.step.components_s["elementwise"] > 1.4 * narrow.step.components_s["elementwise"]
    assert wide.memory.reserved_bytes > narrow.memory.reserved_bytes


def test_a_layer_keeps_what_recomputing_it_saved():
    """20 layers of a DeepSeek-V4, 8 MI355X, 2 stages: 11.5 GB less on the first for two recomputed layers, whose two
    micro-batches in flight then keep their inputs (AMD-AGI/Primus, pull request 965)."""
    kept = layer_bytes(
        model_row(FLASH), BatchTable(seq_len=4096, global_batch=64),
        plan_row(Plan(pipeline=2, expert=4, data_shard=4)), precision_row(PRECISIONS["bf16"]),
        memory_constants(Stack(framework="primus-megatron", vintage=2026.6)), 4096,
    )  # fmt: skip
    inputs = 2 * 4 * 4096 * 4096
    measured = [11.5 * unit / 2 / 2 + inputs for unit in (1e9, 2**30)]
    assert 0.8 * measured[1] < float(kept.moe) < 1.05 * measured[0]


@pytest.mark.parametrize("model", [DSA, GLM, FLASH, PRO], ids=lambda m: m.name)
def test_catalogue_models_have_no_contradictions_and_are_planned(model):
    assert not list(contradictions(model))
    assert estimate_plan(request(model), PLAN).step.step.value > 0
    assert parts_of(model)["attention.indexer"] == model.attention.indexer


def test_tensor_ranks_divide_the_groups_of_the_output_projection():
    context = legality_context(request(FLASH))
    found = violations(replace(PLAN, tensor=16, data_shard=1, pipeline=2, expert=8), context=context)
    assert any("8 groups of the output projection" in str(v) for v in found)


@pytest.mark.parametrize("engine", ["native", "megatron", "torchtitan", "maxtext"])
@pytest.mark.parametrize("name", ["deepseek-v3.2", "deepseek-v4-flash"])
def test_engines_refuse_with_the_reason(engine, name):
    run = from_options(model=name, cluster="mi355x-8x4", global_batch=256, sequence_length=4096, engine=engine)
    (problem,) = [u for u in check_export(run) if u.key == "model.attention"]
    assert "sparse attention" in problem.reason
    assert "trains it" in (problem.hint or "")


@pytest.mark.parametrize("model", [DSA, FLASH], ids=lambda m: m.name)
def test_the_native_engine_does_not_build_it(model):
    pytest.importorskip("torch")
    from meshwright.training.models.families import check_model

    with pytest.raises(InputError, match="the native engine has no sparse attention"):
        check_model(replace(model, family=""))


def test_serving_reads_selected_latents_and_all_keys_of_the_indexer():
    assert cached_values(DSA) == 512 + 64 + 128
    assert (_mean_keys(DSA, 131_072), _mean_keys(DSA, 100)) == (61 * 2048, 6100)
    with pytest.raises(InputError, match="compressed attention"):
        served(FLASH)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_lora_rank": 0}, "needs query_lora_rank"),
        ({"kind": AttentionKind.GQA}, "needs latent attention"),
        ({"compression": Compression(strides=(4,) * 61)}, "attention.kind shared"),
        ({"indexer": Indexer(num_heads=4, head_dim=8, top_k=16, num_layers=99)}, "more than num_layers"),
    ],
)
def test_impossible_indexers_are_contradictions(changes, message):
    broken = replace(DSA, attention=replace(DSA.attention, **changes))
    assert any(message in problem for problem in contradictions(broken))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_groups": 7}, "does not divide num_heads"),
        ({"output_lora_rank": 0}, "needs attention.output_lora_rank"),
        ({"num_kv_heads": 2}, "one key/value head"),
        ({"num_windowed_layers": 3}, "window in every layer"),
        ({"indexer": None}, "need each other"),
        ({"compression": None}, "needs attention.compression"),
        ({"compression": Compression(strides=(4, 128))}, "has 2 layers"),
        ({"compression": Compression(strides=(4, 128, 64) + (0,) * 40)}, "several strides"),
    ],
)
def test_impossible_compressions_are_contradictions(changes, message):
    broken = replace(FLASH, attention=replace(FLASH.attention, **changes))
    assert any(message in problem for problem in contradictions(broken))


def test_a_run_file_states_the_same_shapes(tmp_path):
    shapes = {
        "name": "small", "hidden": 512, "num_layers": 4, "vocab": 1024,
        "attention": {
            "kind": "shared", "num_heads": 8, "num_kv_heads": 1, "head_dim": 64, "query_lora_rank": 128,
            "rope_head_dim": 16, "window": 32, "num_windowed_layers": 4, "output_lora_rank": 64, "output_groups": 2,
            "indexer": {"num_heads": 4, "head_dim": 32, "top_k": 64, "is_trained": False},
            "compression": {"strides": [0, 4, 128, 4]},
        },
        "experts": {"num_experts": 8, "top_k": 2, "ffn_hidden": 256, "num_hashed_layers": 1},
        "residual_streams": 4,
    }  # fmt: skip
    run = from_options(model=shapes, cluster="mi355x-8x4", global_batch=64, sequence_length=4096, engine="any")
    a = run.model.attention
    assert a.indexer == Indexer(num_heads=4, head_dim=32, top_k=64, is_trained=False)
    assert a.compression == Compression(strides=(0, 4, 128, 4))
    shapes["attention"]["output_groups"] = 3
    with pytest.raises(InputError, match="does not divide num_heads"):
        from_options(model=shapes, cluster="mi355x-8x4", global_batch=64, sequence_length=4096, engine="any")


def test_grouped_attention_knows_none_of_it():
    plain = model_row(Model(name="m", hidden=64, num_layers=2, vocab=128, ffn_hidden=128,
                            attention=Attention(num_heads=4, num_kv_heads=4, head_dim=16)))  # fmt: skip
    assert (plain.index_heads, plain.selected_share, plain.pooled_share, plain.streams) == (0, 0, 0, 1)
