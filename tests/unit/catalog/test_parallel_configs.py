"""config.json of families with attention and feed-forward in parallel; parameters are compared in tests/parity."""

from dataclasses import replace

import pytest
from tests.every_member import check_every

from meshwright.catalog import lookup as catalog
from meshwright.catalog.huggingface import model_from_config
from meshwright.catalog.lookup import CatalogKind, entry
from meshwright.cost.flops import count_parameters
from meshwright.cost.tables import model_row
from meshwright.engines.base import check_export
from meshwright.errors import InputError
from meshwright.runfile import from_options

SIZES = {"hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 8, "vocab_size": 128}
WIDE = SIZES | {"intermediate_size": 96}
FALCON_40B = {"new_decoder_architecture": True, "num_kv_heads": 2, "multi_query": True, "parallel_attn": True}

PUBLISHED = {
    "command-r-35b": ("CohereForCausalLM", {"hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40,
                      "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 256000,
                      "logit_scale": 0.0625, "rope_theta": 8e6, "use_qk_norm": False}),
    "falcon-7b": ("FalconForCausalLM", {"hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
                  "vocab_size": 65024, "alibi": False, "bias": False, "multi_query": True, "parallel_attn": True,
                  "new_decoder_architecture": False, "apply_residual_connection_post_layernorm": False}),
    "falcon-40b": ("FalconForCausalLM", {"hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128,
                   "num_kv_heads": 8, "vocab_size": 65024, "new_decoder_architecture": True}),
    "falcon-180b": ("FalconForCausalLM", {"hidden_size": 14848, "num_hidden_layers": 80, "num_attention_heads": 232,
                    "num_kv_heads": 8, "vocab_size": 65024, "new_decoder_architecture": True}),
    "gpt-neox-20b": ("GPTNeoXForCausalLM", {"hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 44,
                     "num_attention_heads": 64, "vocab_size": 50432, "rotary_pct": 0.25, "rotary_emb_base": 10000,
                     "hidden_act": "gelu_fast", "attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0}),
    "pythia-12b": ("GPTNeoXForCausalLM", {"hidden_size": 5120, "intermediate_size": 20480, "num_hidden_layers": 36,
                   "num_attention_heads": 40, "vocab_size": 50688, "rotary_pct": 0.25, "rotary_emb_base": 10000,
                   "use_parallel_residual": True, "tie_word_embeddings": False}),
    "phi-2": ("PhiForCausalLM", {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32,
              "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 51200, "qk_layernorm": False,
              "partial_rotary_factor": 0.4, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "rope_theta": 1e4}),
}  # fmt: skip


def read(architecture: str, **config: object):
    return model_from_config(config | {"architectures": [architecture]}, name="m")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_the_model_of_the_catalogue(name):
    architecture, config = PUBLISHED[name]
    config = config | {"architectures": [architecture]}
    assert model_from_config(config, name=name) == catalog.model(name)
    published = entry(CatalogKind.MODEL, name).published["total_parameters"]
    assert float(count_parameters(model_row(catalog.model(name))).total) == pytest.approx(published, rel=1e-3)


def test_falcon_has_one_key_value_head_or_those_it_states():
    shapes = [
        (model.attention.num_kv_heads, model.parallel_norms)
        for model in (
            read("FalconForCausalLM", **SIZES),
            read("FalconForCausalLM", **SIZES, num_kv_heads=4, multi_query=False),
            read("FalconForCausalLM", **SIZES, **FALCON_40B),
            read("FalconForCausalLM", **SIZES, **FALCON_40B, num_ln_in_parallel_attn=1),
            read("FalconForCausalLM", **SIZES, parallel_attn=False),
        )
    ]
    assert shapes == [(1, 1), (8, 1), (2, 2), (2, 1), (1, 0)]


def test_alibi_is_refused_with_the_reason():
    with pytest.raises(InputError, match="alibi is not costed: it adds a bias to each score of attention"):
        read("FalconForCausalLM", **SIZES, alibi=True)


def test_a_gpt_neox_without_parallel_residuals_has_layers_of_gpt_2():
    assert read("GPTNeoXForCausalLM", **WIDE, use_parallel_residual=False).parallel_norms == 0


def test_windows_are_in_three_of_four_layers():
    assert read("Cohere2ForCausalLM", **WIDE).windowed_layers == (True, True, True, False) * 2


@pytest.mark.parametrize(
    ("architecture", "changes", "named"),
    [
        ("FalconForCausalLM", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn: 2"),
        ("FalconForCausalLM", FALCON_40B | {"parallel_attn": False},
         "parallel_attn: False with new_decoder_architecture"),
        ("FalconForCausalLM", {"hidden_dropout": 0.1}, "hidden_dropout: 0.1"),
        ("Cohere2ForCausalLM", {"use_parallel_block": False, "intermediate_size": 96}, "use_parallel_block: False"),
        ("PhiForCausalLM", {"hidden_act": "xielu", "intermediate_size": 96}, "hidden_act: 'xielu'"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_named(architecture, changes, named):
    assert read(architecture, **SIZES, **changes).unsupported == (named,)


def test_no_engine_builds_them():
    run = from_options(model="gpt-neox-20b", cluster="h100-8x4", global_batch=64, sequence_length=2048)

    def check(engine):
        reasons = " ".join(problem.reason for problem in check_export(replace(run, engine=engine)))
        assert "parallel_norms of gpt-neox-20b is 2" in reasons

    check_every(("native", "megatron", "torchtitan", "maxtext"), check)
