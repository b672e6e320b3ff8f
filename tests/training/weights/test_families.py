"""A model family is one record: config, names in files and training follow it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

from tests.tiny_models import DENSE

from meshwright.catalog.families import FAMILIES
from meshwright.catalog.huggingface import architectures, model_from_config, model_from_path
from meshwright.errors import InputError
from meshwright.training.models import build_model, init_weights
from meshwright.training.weights import load_weights, save_weights

LLAMA = FAMILIES["LlamaForCausalLM"]
NEW = replace(
    LLAMA,
    architecture="OtherForCausalLM",
    model_type="other",
    tensors={**LLAMA.tensors, "attention.output.weight": "self_attn.dense.weight"},
)
MODEL = replace(DENSE, family=NEW.architecture)


@pytest.fixture
def other_family(monkeypatch):
    monkeypatch.setitem(FAMILIES, NEW.architecture, NEW)


def filled(seed: int):
    built = build_model(MODEL, device="cpu")
    init_weights(built, seed=seed)
    return built


@pytest.mark.usefixtures("other_family")
def test_weights_of_a_new_record_come_back_under_its_names(tmp_path):
    saved, loaded = filled(0), filled(1)
    save_weights(saved, tmp_path / "w", dtype=torch.float32)
    held = safetensors_torch.load_file(tmp_path / "w" / "model.safetensors")
    assert torch.equal(held["model.layers.1.self_attn.dense.weight"], saved.layers["1"].attention.output.weight)
    assert not any("o_proj" in name for name in held)
    load_weights(loaded, tmp_path / "w")
    assert all(torch.equal(t, saved.state_dict()[n]) for n, t in loaded.state_dict().items())


@pytest.mark.usefixtures("other_family")
def test_the_config_of_a_new_record_is_written_and_read(tmp_path):
    save_weights(filled(0), tmp_path / "w")
    config = json.loads((tmp_path / "w" / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["OtherForCausalLM"], "other")
    assert replace(model_from_path(tmp_path / "w"), name="tiny") == MODEL
    assert "OtherForCausalLM" in architectures()


def test_without_a_record_the_family_is_unknown():
    with pytest.raises(InputError, match="cannot build this architecture"):
        build_model(MODEL, device="cpu")
    with pytest.raises(InputError, match="unknown architecture"):
        model_from_config({"architectures": ["OtherForCausalLM"]}, name="tiny")


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda f: f.architecture)
def test_a_family_that_is_trained_has_names_and_one_that_is_not_has_a_reason(family):
    assert family.trains == bool(family.tensors) == (not family.not_trained)
