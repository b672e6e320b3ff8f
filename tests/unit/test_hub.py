"""Names of the Hugging Face hub resolve to its cache as in transformers: refs, snapshots, revisions, offline."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

constants = pytest.importorskip("huggingface_hub.constants")

import meshwright as mw
from meshwright.errors import InputError, MissingDependencyError
from meshwright.hub import fetch

OLD, NEW = "a" * 40, "b" * 40
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 97,
}


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A cache as `huggingface_hub` lays it out: two commits, one of them with a branch and one with a tag."""
    repository = tmp_path / "hub" / "models--owner--tiny-1.0"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(NEW)
    (repository / "refs" / "v1").write_text(OLD)
    for commit, layers in ((OLD, 1), (NEW, 2)):
        folder = repository / "snapshots" / commit
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return repository


@pytest.mark.parametrize(
    ("name", "commit"),
    [("owner/tiny-1.0", NEW), ("owner/tiny-1.0@main", NEW), ("owner/tiny-1.0@v1", OLD), (f"owner/tiny-1.0@{OLD}", OLD)],
)
def test_a_revision_is_the_snapshot_that_the_cache_names(cache, name, commit):
    assert fetch(name, patterns=["config.json"], what="the config") == cache / "snapshots" / commit


@pytest.mark.parametrize("name", ["owner/other", "owner/tiny-1.0@v2"])
def test_what_the_cache_lacks_is_bad_input_with_a_way_out(cache, name):
    with pytest.raises(InputError, match="does not provide the config") as caught:
        fetch(name, patterns=["config.json"], what="the config")
    assert "there is no such folder or file" in caught.value.message
    assert "give the path of its folder" in caught.value.hint


def test_a_snapshot_without_the_file_is_not_enough(cache):
    with pytest.raises(InputError, match="does not provide the weights"):
        fetch(f"owner/tiny-1.0@{OLD}", patterns=["*.safetensors"], what="the weights")


@pytest.mark.parametrize("name", ["tiny", "a/b/c", "../x", "owner/tiny@", "owner/tiny@/x", ""])
def test_other_texts_are_no_names(name):
    with pytest.raises(InputError, match="not a repository"):
        fetch(name, patterns=["*"], what="the weights")


def test_a_run_names_its_model_on_the_hub(cache):
    content = {
        "model": "owner/tiny-1.0@v1",
        "data": {"sequence_length": 16},
        "batch": {"global_sequences": 4},
        "cluster": "h100-8x1",
    }
    model = mw.load_run(content).model
    assert (model.name, model.num_layers, model.hidden) == ("tiny-1.0", 1, 32)


def test_without_the_library_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingDependencyError) as caught:
        fetch("owner/model", patterns=["*"], what="the weights")
    assert caught.value.hint == "pip install huggingface_hub"
