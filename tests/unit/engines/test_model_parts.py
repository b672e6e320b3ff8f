"""Engines that lack a part of a model refuse it by its name; no part is dropped in silence."""

from __future__ import annotations

import re
from dataclasses import fields, replace

import pytest
from tests.every_member import check_every

from meshwright import runfile
from meshwright.catalog import lookup as catalog
from meshwright.engines.maxtext.check import check as check_maxtext
from meshwright.engines.megatron.check import check as check_megatron
from meshwright.engines.megatron.check import check_export
from meshwright.engines.native.check import check as check_native
from meshwright.engines.refusals import HYBRID_PARTS, SPARSE_PARTS
from meshwright.engines.torchtitan.check import check as check_torchtitan
from meshwright.specs.model import Activation, Attention, Experts, FullLayers, Model, NormPlacement, Rope, StateSpace
from meshwright.specs.model_parts import ABSENT, NOT_BUILT, contradictions, parts_of
from meshwright.specs.sparse_attention import Compression, Indexer

TEXT = """
model: {name: m, family: FAMILY, hidden: 64, num_layers: 2, vocab: 512, ffn_hidden: 128,
  attention: {num_heads: 4, num_kv_heads: 2, window: 8}, experts: {num_experts: 4, top_k: 2, ffn_hidden: 32}}
data: {sequence_length: 64}
batch: {global_sequences: 4}
cluster: h100-8x1
train: {steps: 2}
"""
PRESENT = {
    "activation": Activation.GELU_TANH,
    "norm_placement": NormPlacement.BOTH,
    "zero_centered_norms": True,
    "scaled_embeddings": True,
    "logit_cap": 30.0,
    "windowed_rope": Rope(theta=5.0),
    "rope.rotated_share": 0.5,
    "rope.attention_factor": 1.5,
    "rope.short_factors": (1.0,),
    "rope.long_factors": (1.0,),
    "attention.window_pattern": (True, False, True),
    "attention.output_bias": True,
    "attention.qk_norm_across_heads": True,
    "attention.score_divisor": 100,
    "attention.score_cap": 50.0,
    "attention.sinks": True,
    "attention.output_gate": True,
    "attention.full_layers": FullLayers(head_dim=32, num_kv_heads=1),
    "parallel_norms": 1,
    "head_bias": True,
    "ffn_bias": True,
    "experts.bias": True,
    "experts.shared_gate": True,
    "experts.latent": 64,
    "experts.own_norms": True,
    "mtp_shared": True,
    "num_labels": 1,
}
WITHOUT_MENTION = {
    "name", "hidden", "num_layers", "vocab", "attention", "ffn_hidden", "gated_ffn", "experts", "tied_embeddings",
    "num_mtp_layers", "learned_positions", "norm_bias", "norm_epsilon", "rope", "family", "unsupported", "kind",
    "num_heads", "num_kv_heads", "head_dim", "value_head_dim", "query_lora_rank", "kv_lora_rank", "rope_head_dim",
    "window", "num_windowed_layers", "output_lora_rank", "bias", "qk_norm", "num_experts", "top_k", "num_shared",
    "shared_ffn_hidden",
    "num_dense_layers", "router", "num_groups", "groups_per_token", "normalize_top_k", "routed_scale", "theta",
    "scaling", "factor", "original_context", "low_frequency", "high_frequency", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dims", "truncate",
}  # fmt: skip
"""Fields that each engine lowers or refuses in its own words."""


def run_with(path, value, *, family="MixtralForCausalLM"):
    run = runfile.loads(TEXT.replace("FAMILY", family))
    model = run.model
    if path == "attention.qk_norm_across_heads":
        model = replace(model, attention=replace(model.attention, qk_norm=True))
    if path == "windowed_rope":
        model = replace(model, attention=replace(model.attention, num_windowed_layers=2))
    section, _, name = path.rpartition(".")
    if not section:
        return replace(run, model=replace(model, **{name: value}))
    changed = replace(getattr(model, section), **{name: value})
    return replace(run, model=replace(model, **{section: changed}))


EACH_ENGINE = pytest.mark.parametrize(
    "check",
    [check_torchtitan, check_maxtext, check_megatron, check_export],
    ids=["torchtitan", "maxtext", "megatron", "export"],
)


ENGINE_PARTS = {
    "zero_centered_norms", "attention.sinks", "attention.window_pattern", "attention.output_gate", "experts.latent",
    "experts.shared_gate",
}  # fmt: skip
LOWERED = {
    check_megatron: {"rope.rotated_share", "attention.output_bias", "ffn_bias"},
    check_export: {"rope.rotated_share", "attention.output_bias", "ffn_bias"} | ENGINE_PARTS,
}
"""Parts that an engine trains or writes, by its check; tests of that engine hold them."""


@EACH_ENGINE
def test_a_part_is_refused_by_its_name(check):
    assert set(PRESENT) == set(ABSENT) - set(HYBRID_PARTS) - set(SPARSE_PARTS)

    def is_refused(path):
        reasons = [problem.reason for problem in check(run_with(path, PRESENT[path]))]
        named = [reason for reason in reasons if reason.startswith(f"{path} of m is ")]
        assert (named == []) == (path in LOWERED.get(check, ()))

    check_every(PRESENT, is_refused)


@pytest.mark.parametrize("path", sorted(NOT_BUILT))
def test_the_native_engine_refuses_what_it_does_not_build(path):
    reasons = " ".join(problem.reason for problem in check_native(run_with(path, PRESENT[path])))
    assert re.search(rf"{re.escape(path)} of m is .*, which is not built", reasons)


@EACH_ENGINE
def test_a_hybrid_is_refused(check):
    run = run_with("state_space", StateSpace(state_size=16, num_heads=2, head_dim=8, num_groups=1))
    hybrid = replace(run, model=replace(run.model, layer_pattern="M*"))
    assert "layers of one block each" in " ".join(problem.reason for problem in check(hybrid))


@EACH_ENGINE
def test_sparse_attention_is_refused_with_what_it_has(check):
    def is_refused(path, value):
        assert path in SPARSE_PARTS
        reasons = " ".join(problem.reason for problem in check(run_with(path, value)))
        assert f"m has sparse attention ({path}), which no engine here builds" in reasons

    check_every(
        [
            ("attention.indexer", Indexer(num_heads=2, head_dim=8, top_k=16)),
            ("attention.compression", Compression(strides=(4, 128))),
            ("attention.output_groups", 2),
            ("residual_streams", 4),
            ("experts.num_hashed_layers", 1),
        ],
        lambda case: is_refused(*case),
    )


@pytest.mark.parametrize("check", [check_torchtitan, check_maxtext], ids=["torchtitan", "maxtext"])
def test_layers_of_gpt_oss_have_their_parts_and_no_others(check):
    plain = run_with("attention.bias", True, family="GptOssForCausalLM")
    reasons = " ".join(problem.reason for problem in check(plain))
    for path in ("activation", "attention.window_pattern", "attention.sinks", "experts.bias"):
        assert f"{path} of m is" in reasons


def test_every_field_of_a_model_is_a_part_or_known_to_all_engines():
    parts = {path.rpartition(".")[2] for path in ABSENT}
    names = {f.name for kind in (Model, Attention, Experts, Rope) for f in fields(kind)}
    assert names - parts - WITHOUT_MENTION == set()


def test_parts_that_say_what_holds_anyway_are_none():
    run = run_with("attention.score_divisor", 16)
    attention = replace(run.model.attention, window_pattern=(False,), output_bias=False)
    assert parts_of(replace(run.model, attention=attention, windowed_rope=run.model.rope)) == {}


def test_files_with_fused_matrices_are_refused():
    run = run_with("experts", None, family="Phi3ForCausalLM")
    for check in (check_torchtitan, check_maxtext, check_megatron):
        assert any("as one tensor" in problem.reason for problem in check(run))


def test_dense_layers_in_places_that_are_not_known_are_refused_before_anything_is_measured():
    run = runfile.loads(TEXT.replace("FAMILY", "Qwen3MoeForCausalLM"))
    run = replace(run, model=replace(run.model, experts=replace(run.model.experts, num_dense_layers=1)))
    assert "model.experts.num_dense_layers" in [problem.key for problem in check_native(run)]
    dense = replace(run.model, family="Qwen3ForCausalLM", experts=None, ffn_hidden=64)
    assert not check_native(replace(run, model=dense))


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        ({"num_groups": 3, "groups_per_token": 1}, "not divisible into 3 groups"),
        ({"num_groups": 2, "groups_per_token": 4}, "a token uses 1 to 2 groups of experts"),
        ({"num_groups": 8, "groups_per_token": 1, "top_k": 2}, "groups have 1 experts, top_k is 2"),
    ],
)
def test_groups_that_no_token_can_choose_from_are_contradictions(groups, problem):
    experts = replace(catalog.model("deepseek-v3").experts, num_experts=8, **{"top_k": 1} | groups)
    assert problem in " ".join(contradictions(replace(catalog.model("deepseek-v3"), experts=experts)))


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3", "kimi-k2", "glm-4.5"])
def test_published_groups_are_none(name):
    assert not list(contradictions(catalog.model(name)))
