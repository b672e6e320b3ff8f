from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

from tests.rounding import assert_equals
from tests.tiny_models import DENSE, MIXTURE

from meshwright.catalog import lookup as catalog
from meshwright.catalog.families import FAMILIES
from meshwright.errors import InputError
from meshwright.training.models import build_model, init_weights
from meshwright.training.weights import config_of, family_of, file_names, load_weights, reading, save_weights
from meshwright.training.weights.reading import tensors_of


def filled(model=DENSE, *, seed=0, **options):
    built = build_model(model, device="cpu", **options)
    init_weights(built, seed=seed)
    return built


def same(a, b) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


@pytest.mark.parametrize("model", [DENSE, MIXTURE, replace(DENSE, tied_embeddings=True)])
@pytest.mark.parametrize("file_bytes", [10_000, 10**9])
def test_what_is_saved_comes_back(model, file_bytes, tmp_path):
    save_weights(filled(model), tmp_path / "w", dtype=torch.float32, file_bytes=file_bytes)
    again = filled(model, seed=1)
    load_weights(again, tmp_path / "w")
    assert same(again, filled(model))
    assert (tmp_path / "w" / "model.safetensors.index.json").exists() == (file_bytes == 10_000)


def test_a_folder_of_weights_is_on_the_disk_before_it_has_its_name(tmp_path, unsynced):
    save_weights(filled(), tmp_path / "w", file_bytes=10_000)
    assert unsynced(tmp_path / "w") == []


def test_files_are_as_the_library_reads_them(tmp_path):
    built = filled(MIXTURE)
    save_weights(built, tmp_path / "w", dtype=torch.bfloat16)
    held = safetensors_torch.load_file(tmp_path / "w" / "model.safetensors")
    up_EFD = built.layers["1"].ffn.experts.up
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    assert torch.equal(held[name], up_EFD[2].bfloat16())
    expected = {n for ours in tensors_of(built) for n in file_names(MIXTURE, ours, family=family_of(MIXTURE))}
    assert held.keys() == expected


def test_portions_are_no_larger_than_asked(tmp_path):
    save_weights(filled(), tmp_path / "w", file_bytes=10_000)
    index = json.loads((tmp_path / "w" / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert files == {p.name for p in (tmp_path / "w").glob("*.safetensors")}
    assert index["metadata"]["total_size"] == 2 * sum(p.numel() for p in filled().parameters())
    assert all((tmp_path / "w" / f).stat().st_size < 12_000 for f in files)


def test_a_stage_reads_its_own_layers(tmp_path):
    save_weights(filled(), tmp_path / "w", dtype=torch.float32)
    stage = filled(seed=1, layers=range(1, 2))
    load_weights(stage, tmp_path / "w")
    whole = filled().state_dict()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in stage.state_dict().items())


def test_an_interrupted_save_leaves_nothing(tmp_path, monkeypatch):
    from meshwright.training.weights import writing

    def fail(*_args, **_kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(writing, "write_file", fail)
    with pytest.raises(OSError, match="disk full"):
        save_weights(filled(), tmp_path / "w")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_something_is_not_overwritten(tmp_path):
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="not empty"):
        save_weights(filled(), tmp_path / "w")
    assert (tmp_path / "w" / "thesis.txt").exists()


# --- files that are not what they should be


def saved(tmp_path, change=None, *, model=DENSE):
    save_weights(filled(model), tmp_path / "w", dtype=torch.float32)
    file = tmp_path / "w" / "model.safetensors"
    tensors = safetensors_torch.load_file(file)
    if change is not None:
        change(tensors)
        safetensors_torch.save_file(tensors, file)
    return tmp_path / "w"


def refused(folder, model=DENSE) -> str:
    built = filled(model, seed=1)
    before = {name: tensor.clone() for name, tensor in built.state_dict().items()}
    with pytest.raises(InputError) as error:
        load_weights(built, folder)
    assert all(torch.equal(tensor, before[name]) for name, tensor in built.state_dict().items())
    return str(error.value)


def test_missing_tensors_are_named(tmp_path):
    folder = saved(tmp_path, lambda t: t.pop("model.norm.weight"))
    assert "missing model.norm.weight" in refused(folder)


def test_unexpected_tensors_are_named(tmp_path):
    folder = saved(tmp_path, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}))
    assert "unexpected model.layers.0.self_attn.q_proj.bias" in refused(folder)


def test_a_tensor_of_another_shape_is_named(tmp_path):
    folder = saved(tmp_path, lambda t: t.update({"model.norm.weight": torch.zeros(33)}))
    message = refused(folder)
    assert "model.norm.weight has another shape: got (33,), allowed: (32,)" in message


def test_weights_of_another_family_are_refused(tmp_path):
    assert "missing" in refused(saved(tmp_path, model=MIXTURE))


def test_quantised_weights_are_refused(tmp_path):
    folder = saved(tmp_path, lambda t: t.update({"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1)}))
    assert "quantised" in refused(folder)


def test_old_buffers_tied_heads_and_prediction_layers_are_passed_over(tmp_path):
    def change(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
        tensors["model.layers.2.eh_proj.weight"] = torch.zeros(4)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    tied = replace(DENSE, tied_embeddings=True)
    load_weights(filled(tied, seed=1), saved(tmp_path, change, model=tied))


def other_head(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][-1, -1] += 1


@pytest.mark.parametrize("at_a_time", [1, 1 << 24])
def test_another_head_beside_tied_embeddings_is_refused(tmp_path, monkeypatch, at_a_time):
    monkeypatch.setattr(reading, "_COMPARED_WEIGHTS", at_a_time)
    tied = replace(DENSE, tied_embeddings=True)
    message = refused(saved(tmp_path, other_head, model=tied), tied)
    assert "lm_head.weight is not model.embed_tokens.weight" in message
    assert "the embeddings are tied" in message


def test_the_hint_on_another_head_leads_to_what_transformers_computes(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = saved(tmp_path, other_head, model=replace(DENSE, tied_embeddings=True))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ours = filled(replace(DENSE, tied_embeddings=False), seed=1)
    load_weights(ours, folder)
    tokens = torch.arange(12)[None]
    assert_equals(lambda: {"": ours(tokens)}, {"": theirs(tokens).logits}, weights=ours.parameters(), terms=DENSE.vocab)


@pytest.mark.parametrize("content", [b"", b"\x00" * 8, b"\xff" * 64])
def test_a_broken_file_is_refused(content, tmp_path):
    folder = saved(tmp_path)
    (folder / "model.safetensors").write_bytes(content)
    assert "not a whole safetensors file" in refused(folder)


def test_a_truncated_file_is_refused(tmp_path):
    folder = saved(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "not a whole safetensors file" in refused(folder)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "it holds nothing"),
        ({"pytorch_model.bin": "x"}, "PyTorch's own format"),
        ({"model.safetensors.index.json": "{"}, "index of the weights cannot be read"),
        ({"model.safetensors.index.json": "[]"}, "index of the weights cannot be read"),
        ({"model.safetensors.index.json": '{"weight_map": {"a": "b.safetensors"}}'}, "not there: b.safetensors"),
        ({"model.safetensors.index.json": '{"weight_map": {"a": "../b.safetensors"}}'}, "files of other folders"),
        ({"model.safetensors.index.json": '{"weight_map": {"a": "/b.safetensors"}}'}, "files of other folders"),
    ],
)
def test_folders_without_weights_are_refused(files, message, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert message in refused(tmp_path)


def test_a_folder_that_does_not_exist_is_refused(tmp_path):
    assert "the folder does not exist" in refused(tmp_path / "nowhere")


def test_an_index_that_misplaces_a_tensor_is_refused(tmp_path):
    save_weights(filled(), tmp_path / "w", file_bytes=10_000)
    path = tmp_path / "w" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = "model-00001-of-" + sorted(index["weight_map"].values())[0][-17:]
    path.write_text(json.dumps(index))
    assert "lacks model.norm.weight" in refused(tmp_path / "w")


# --- families


@pytest.mark.when_touched  # test_what_is_saved_comes_back names tensors of a dense model and of a mixture
@pytest.mark.parametrize(
    "name",
    [
        name
        for name in catalog.model_names()
        if (family := FAMILIES.get(catalog.model(name).family))
        and family.trains
        and not name.startswith(("gpt", "gemma"))
    ],
)
def test_every_catalogued_model_has_names_for_all_its_tensors(name):
    model = catalog.model(name)
    family = family_of(model)
    names = [n for ours in tensors_of(build_model(model)) for n in file_names(model, ours, family=family)]
    single = [n for n in names if re.sub(r"^model\.layers\.\d+\.", "", n) not in family.fused]
    assert len(single) == len(set(single))
    assert config_of(model, dtype="bfloat16")["architectures"] == [model.family]


def test_shapes_that_no_architecture_has_are_refused(tmp_path):
    shared = replace(MIXTURE, experts=replace(MIXTURE.experts, num_shared=1))
    with pytest.raises(InputError, match="no architecture of Hugging Face transformers has these shapes"):
        save_weights(filled(shared), tmp_path / "w")
    assert not (tmp_path / "w").exists()
