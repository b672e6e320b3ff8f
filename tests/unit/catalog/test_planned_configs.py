"""config.json of families that are planned and not trained; parameters are compared in tests/parity."""

from dataclasses import replace

import pytest
from tests.every_member import check_every

from meshwright.catalog import lookup as catalog
from meshwright.catalog.families import FAMILIES, NOT_READ
from meshwright.catalog.huggingface import model_from_config
from meshwright.engines.base import check_export
from meshwright.errors import InputError
from meshwright.runfile import from_options
from meshwright.specs.model import FullLayers, NormPlacement, Router

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 8,
         "num_key_value_heads": 2, "vocab_size": 128, "head_dim": 8}  # fmt: skip


def read(architecture: str, **changes: object):
    return model_from_config(SIZES | changes | {"architectures": [architecture]}, name="m")


def test_windows_are_in_the_layers_that_have_them():
    assert read("Olmo3ForCausalLM").windowed_layers == (True, True, True, False) * 2
    assert read("Exaone4ForCausalLM", sliding_window_pattern=2).windowed_layers == (True, False) * 4
    assert read("Exaone4ForCausalLM", sliding_window=None).num_windowed_layers == 0
    every_second = read("SmolLM3ForCausalLM", use_sliding_window=True, sliding_window=16, no_rope_layer_interval=2)
    assert every_second.windowed_layers == (False, True) * 4


def test_llama_4_has_experts_and_chunks_in_some_layers():
    model = read("Llama4ForCausalLM", num_local_experts=4, interleave_moe_layer_step=2, intermediate_size_mlp=160)
    assert (model.num_moe_layers, model.ffn_hidden, model.experts.shared_hidden) == (4, 160, 96)
    assert model.windowed_layers == (True, True, True, False) * 2
    assert model.attention.window == 8192


def test_norms_and_routers():
    assert read("Exaone4ForCausalLM").norm_placement is NormPlacement.AFTER
    assert read("Glm4ForCausalLM").norm_placement is NormPlacement.BOTH
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    dots = read("Dots1ForCausalLM", first_k_dense_replace=1, **experts)
    assert (dots.experts.router, dots.num_moe_layers, dots.num_windowed_layers) == (Router.SIGMOID, 7, 0)


def test_numbers_of_experts_by_layer_are_named():
    model = read("HunYuanMoEV1ForCausalLM", num_experts=4, moe_topk=[1, 2])
    assert model.unsupported == ("moe_topk: [1, 2], a number for each layer",)


def test_what_has_no_formula_is_refused_by_name():
    def check(architecture):
        assert architecture not in FAMILIES
        with pytest.raises(InputError, match="is not read, because it has") as caught:
            read(architecture)
        assert NOT_READ[architecture] in str(caught.value)

    check_every(NOT_READ, check)


GEMMA_4 = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 12, "num_attention_heads": 8, "vocab_size": 128,
    "num_key_value_heads": 4, "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 2,
    "attention_k_eq_v": True, "sliding_window": 32, "hidden_size_per_layer_input": 0,
    "architectures": ["Gemma4ForCausalLM"],
}  # fmt: skip


def gemma_4(**changes: object):
    return model_from_config(GEMMA_4 | changes, name="m")


def test_gemma_4_has_full_layers_of_another_shape():
    model = gemma_4()
    assert model.attention.full_layers == FullLayers(head_dim=16, num_kv_heads=2, shares_values=True)
    assert model.windowed_layers == ((True,) * 5 + (False,)) * 2
    written = gemma_4(per_layer_config={i: {"head_dim": 16, "num_key_value_heads": 2} for i in ("05", "11")})
    assert written.attention == model.attention
    full = gemma_4(layer_types=["full_attention"] * 12, attention_k_eq_v=False).attention
    assert (full.head_dim, full.num_kv_heads, full.full_layers) == (16, 4, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size_per_layer_input": 16}, "hidden_size_per_layer_input is not costed"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers is not costed"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"per_layer_config": {"5": {"head_dim": 16}}}, "per_layer_config"),
        ({"num_global_key_value_heads": 3}, "do not divide 8 heads"),
    ],
)
def test_gemma_4_names_what_has_no_formula(changes, message):
    with pytest.raises(InputError, match=message):
        gemma_4(**changes)


@pytest.mark.parametrize("engine", ["native", "torchtitan", "megatron", "maxtext"])
def test_no_engine_builds_a_model_of_shapes_alone(engine):
    """Its positions and multipliers are not read: to lower it would train another model."""
    alone = [family for family in FAMILIES.values() if family.shapes_only]
    check_every(alone, lambda family: _is_not_built(family, engine), name=lambda f: f.architecture)


def _is_not_built(family, engine):
    run = from_options(model="llama3.1-8b", cluster="h100-8x1", global_batch=8, sequence_length=4096, engine=engine)
    run = replace(run, model=replace(run.model, family=family.architecture))
    reasons = [problem.reason for problem in check_export(run)]
    assert f"a config of {family.architecture} is read for its shapes alone" in " ".join(reasons)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gemma4-31b", {}),
        (
            "gemma4-26b-a4b",
            {
                "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16,
                "num_key_value_heads": 8, "num_global_key_value_heads": 2, "enable_moe_block": True,
                "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
            },
        ),
    ],
)  # fmt: skip
def test_gemma_4_of_the_catalogue_is_what_its_config_says(name, changes):
    config = {
        "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 4,
        "attention_k_eq_v": True, "vocab_size": 262144, "sliding_window": 1024, "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0, "architectures": ["Gemma4ForCausalLM"],
    }  # fmt: skip
    assert model_from_config(config | changes, name=name) == catalog.model(name)
