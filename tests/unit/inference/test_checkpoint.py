"""Formats of weights where none is given: those of the models' own checkpoints."""

from __future__ import annotations

import json

import pytest

from meshwright import runfile
from meshwright.catalog import lookup as catalog
from meshwright.catalog.huggingface import model_from_hub
from meshwright.files import toml_table
from meshwright.inference.checkpoint import TABLE, own_precision
from meshwright.inference.formats import WEIGHT_FORMATS
from meshwright.inference.positions import config_of


def test_every_row_of_the_table_is_a_model_and_a_format():
    for name, precision in toml_table(TABLE)["models"].items():
        found, note = own_precision(name, catalog.model(name))
        assert found == precision
        assert found in WEIGHT_FORMATS
        assert found in note
    assert set(toml_table(TABLE)["caches"]) <= set(toml_table(TABLE)["models"])


def test_the_cache_of_gpt_oss_has_16_bits_unless_another_is_stated(meshwright):
    """Engines give it the format of activations, as its checkpoint has no scales of a cache."""
    asked = ("inference", "estimate", "--cluster", "b200-1x1", "--input-tokens", 64, "--output-tokens", 9, "--json")
    for model, stated, expected in (
        ("gpt-oss-20b", (), "bf16"),
        ("gpt-oss-20b", ("--kv-precision", "fp8"), "fp8"),
        ("llama3.1-8b", ("--precision", "mxfp4"), "fp8"),
    ):
        assert meshwright(*asked, "--model", model, *stated).json["kv_precision"] == expected


def compressed(kind, weights, inputs, *groups):
    """The `quantization_config` that compressed-tensors writes."""
    group = {
        "weights": {"num_bits": weights, "type": kind, "group_size": 128 if inputs is None else None},
        "input_activations": None if inputs is None else {"num_bits": inputs, "type": kind},
    }
    return {"quant_method": "compressed-tensors", "config_groups": dict.fromkeys(groups or ["group_0"], group)}


@pytest.mark.parametrize(
    ("quantised", "found", "said"),
    [
        (None, "bf16", None),
        ({"quant_method": "fp8"}, "fp8", "fp8 is the format"),
        ({"quant_method": "mxfp4"}, "mxfp4", "mxfp4 is the format"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4", "int4 is the format"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "int4-g32", "int4-g32 is the format"),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, "int4-g7168", "int4-g7168 is the format"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "w8a16", "w8a16 is the format"),
        ({"quant_method": "gptq", "bits": 3}, "bf16", "a method without an estimate (gptq-int3)"),
        ({"quant_method": "bitsandbytes"}, "bf16", "a method without an estimate (bitsandbytes)"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4", "nvfp4 is the format"),
        (compressed("int", 8, 8), "int8", "int8 is the format"),
        (compressed("float", 8, 8), "fp8", "fp8 is the format"),
        (compressed("int", 4, None), "int4", "int4 is the format"),
        ({"quant_method": "compressed-tensors"}, "bf16", "without an estimate"),
        ({"quant_method": "compressed-tensors", "config_groups": [3]}, "bf16", "without an estimate"),
        (compressed("int", 4, None, "group_0", "group_1"), "bf16", "without an estimate (compressed-tensors)"),
        ({}, "bf16", None),
        ([1], "bf16", "without an estimate"),
    ],
)
def test_a_config_says_its_own_format(tmp_path, quantised, found, said):
    """Also where the table has another one for the model of that name."""
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantised}))
    for name in (tmp_path, tmp_path / "config.json"):
        precision, note = own_precision(str(name), catalog.model("deepseek-v3"))
        assert precision == found
        assert (note is None) == (said is None)
        assert said is None or said in note


@pytest.mark.parametrize(
    ("model", "precision"), [("gpt-oss-20b", "mxfp4"), ("openai/gpt-oss-20b", "mxfp4"), ("llama3.1-8b", "bf16")]
)
def test_commands_take_the_checkpoints_format(meshwright, model, precision):
    asked = ("--model", model, "--cluster", "h100-1x1")
    lengths = ("--input-tokens", 512, "--output-tokens", 128)
    for command in (("capacity", *asked), ("estimate", *asked, *lengths), ("plan", *asked, *lengths)):
        document = meshwright("inference", *command, "--json").json
        assert document["precision"] == precision
        notes = " ".join(document["notes"])
        assert ("is the format of the checkpoint" in notes) == (precision != "bf16")
        assert ("held in mxfp4 and widened to bf16" in notes) == (precision == "mxfp4")  # H100 has no 4-bit units
        shown = meshwright("inference", *command)
        assert f"in {precision}" in shown.stdout.splitlines()[0]
        stated = meshwright("inference", *command, "--precision", "fp8", "--json").json
        assert stated["precision"] == "fp8"
        assert "is the format of the checkpoint" not in " ".join(stated["notes"])


def test_hub_names_of_the_catalogue_need_no_network(meshwright, monkeypatch):
    def unreachable(*_, **__):
        raise AssertionError("the hub was asked")

    monkeypatch.setitem(model_from_hub.__globals__, "fetch", unreachable)
    asked = ("--cluster", "h200-8x1", "--input-tokens", 512, "--output-tokens", 128, "--json")
    document = meshwright("inference", "estimate", "--model", "deepseek-ai/DeepSeek-R1", *asked).json
    with pytest.raises(AssertionError, match="the hub was asked"):
        config_of("nobody/nothing")
    assert (document["model"], document["precision"]) == ("deepseek-v3", "fp8")


@pytest.mark.parametrize(
    ("name", "known", "precision", "words"),
    [
        ("Qwen/Qwen3-32B-FP8", "qwen3-32b", "fp8", "fp8 is the format"),
        ("TheBloke/Llama-2-7B-Chat-GPTQ", "llama2-7b", "int4", "int4 is the format"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", "qwen2.5-7b", "w8a16", "w8a16 is the format"),
        ("hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4", "llama3.1-70b", "int4", "int4 is the format"),
        ("RedHatAI/Llama-3.3-70B-Instruct-quantized.w8a8", "llama3.1-70b", "int8", "int8 is the format"),
        ("nvidia/Llama-3.3-70B-Instruct-NVFP4", "llama3.1-70b", "nvfp4", "nvfp4 is the format"),
        ("unsloth/Qwen2.5-14B-Instruct-bnb-4bit", "qwen2.5-14b", "bf16", "without an estimate (bnb-4bit)"),
        ("unsloth/gpt-oss-20b-BF16", "gpt-oss-20b", "bf16", ""),
        ("Qwen/Qwen2.5-14B", "qwen2.5-14b", "bf16", ""),
    ],
)
def test_a_repository_of_the_catalogue_names_its_format(name, known, precision, words):
    found, note = own_precision(name, runfile.named_model(name))
    assert (runfile.named_model(name).name, found) == (known, precision)
    assert words in note if words else note is None
