"""Integer weights: bytes with scales, the rate of their GEMMs, and the engines and devices that run them."""

from __future__ import annotations

import tomllib
from importlib.resources import files

import pytest
from tests.every_member import check_every

from meshwright.api.inference import ENGINES
from meshwright.catalog import lookup as catalog
from meshwright.errors import InputError, UnknownNameError
from meshwright.files import toml_table
from meshwright.inference.checkpoint import TABLE
from meshwright.inference.formats import WEIGHT_FORMATS, check_run, computed_in, weight_format
from meshwright.inference.memory import parameters, weight_bytes

H100 = catalog.accelerator("h100")
LOAD = ("--input-tokens", 1024, "--output-tokens", 256, "--concurrency", "1,64", "--json")


def test_bytes_hold_a_scale_and_a_zero_point_for_each_group():
    for group, expected in ((128, 4.15625), (64, 4.3125), (32, 4.625)):
        assert weight_format(f"int4-g{group}", H100).bytes_per_value * 8 == expected
    assert weight_format("int4", H100).bytes_per_value == weight_format("gptq-g128", H100).bytes_per_value
    assert weight_format("w8a16-g64", H100).bytes_per_value * 8 == 8 + 24 / 64
    model = catalog.model("llama3.1-70b")
    held = weight_bytes(model, weight_format("awq", H100))
    kept = held.embedding + held.head + 80 * held.kept_layer  # 16 bits
    assert held.total == pytest.approx((parameters(model).total - kept / 2) * 4.15625 / 8 + kept)


@pytest.mark.parametrize(
    "name", ["int4-g", "int4-g0", "int4-gx", "fp8-g32", "int8-g64", "int5", "int4-g-1", "int4-g1", "int4-g999999"]
)
def test_groups_of_other_formats_and_sizes_are_refused(name):
    with pytest.raises(UnknownNameError, match="unknown precision"):
        weight_format(name, H100)


def test_every_format_that_a_checkpoint_states_is_known():
    for name in toml_table(TABLE)["methods"].values():
        assert weight_format(name, H100).is_quantised
    architectures = {catalog.accelerator(name).architecture for name in catalog.accelerator_names()}
    text = (files("meshwright.inference") / "data" / "formats.toml").read_text(encoding="utf-8")
    for found in WEIGHT_FORMATS.values():
        for engine, on in (found.engines or {}).items():
            assert engine in ENGINES
            assert set(on) <= architectures
            assert engine in tomllib.loads(text)["sources"]


def test_gemms_run_in_the_format_of_the_activations():
    for device in ("a100", "h100", "l40s"):
        place = catalog.accelerator(device)
        assert computed_in(weight_format("int4", place), place) == "bf16"
        assert computed_in(weight_format("int8", place), place) == "int8"
        assert computed_in(weight_format("mxfp4", place), place) == "bf16"
        assert place.peak_flops_per_s["int8"] == pytest.approx(2 * place.peak_flops_per_s["bf16"], rel=0.02)


def test_activations_of_mxfp4_weights_have_8_bits_on_nvidia(meshwright):
    for device, expected in (("b200", "fp8"), ("mi355x", "fp4")):
        place = catalog.accelerator(device)
        assert computed_in(weight_format("mxfp4", place), place) == expected
    asked = ("inference", "estimate", "--model", "gpt-oss-20b", "--cluster", "b200-1x1", *LOAD)
    assert "multiply mxfp4 weights at the rate of fp8" in " ".join(meshwright(*asked).json["notes"])


@pytest.mark.parametrize(
    ("precision", "engine", "device", "hint"),
    [
        ("int8", "vllm", "b200", "on Ampere, Ada, Hopper"),
        ("int8", "trtllm", "h100", "on no device"),
        ("int4", "vllm", "mi300x", "x86-64"),
        ("int4", "trtllm", "b200", "on Ampere, Ada, Hopper"),
        ("awq", "llamacpp", "h100", "on no device"),
    ],
)
def test_what_an_engine_does_not_run_is_refused(meshwright, precision, engine, device, hint):
    place = catalog.accelerator(device)
    with pytest.raises(InputError) as caught:
        check_run(weight_format(precision, place), engine, place)
    assert hint in str(caught.value.hint)
    asked = ("--model", "llama3.1-8b", "--cluster", f"{device}-1x1", "--precision", precision, "--engine", engine)
    for command in ("estimate", "plan"):
        load = LOAD if command == "estimate" else (*LOAD[:4], "--json")
        shown = meshwright("inference", command, *asked, *load)
        assert shown.exit_code == 2
        assert "is not known to multiply" in shown.stderr


def test_every_accelerator_serves_a_model_in_16_bits(meshwright):
    """V100 multiplies fp16 and no bf16."""

    def check(name):
        tokens = ("--input-tokens", 64, "--output-tokens", 16)
        outcome = meshwright("inference", "estimate", "--model", "qwen3-0.6b", "--cluster", f"{name}-1x1", *tokens)
        assert outcome.exit_code == 0, outcome.stderr

    check_every([name for name in catalog.accelerator_names() if name != "cpu"], check)


def test_all_engines_run_formats_that_name_none():
    for engine in ENGINES:
        check_run(weight_format("fp8", H100), engine, H100)
    check_run(weight_format("int4-g32", H100), "generic", H100)  # as vllm


def test_a_quantised_repository_is_estimated_in_its_own_format(meshwright):
    asked = ("--cluster", "h100-1x1", *LOAD)
    awq = meshwright("inference", "estimate", "--model", "Qwen/Qwen2.5-32B-Instruct-AWQ", *asked).json
    wide = meshwright("inference", "estimate", "--model", "Qwen/Qwen2.5-32B-Instruct", *asked).json
    assert (awq["precision"], awq["kv_precision"], wide["precision"]) == ("int4", "bf16", "bf16")
    assert "GEMMs widen int4 to bf16" in " ".join(awq["notes"])
    one, many = zip(awq["loads"], wide["loads"], strict=True)
    assert one[0]["itl_s"]["value"] < 0.45 * one[1]["itl_s"]["value"]  # bound by the read of the weights
    prompts = [one[i]["prompt_components_s"]["linear"] for i in (0, 1)]
    assert prompts[0] == pytest.approx(prompts[1], rel=0.1)  # bound by GEMMs in 16 bits
    assert many[0]["device_memory"]["cache_bytes"] > many[1]["device_memory"]["cache_bytes"] + 40e9
