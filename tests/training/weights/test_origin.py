"""`weights:` of a run file: training starts where the weights of a folder, or of the hub, left off."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from tests.tiny_runs import tiny_run

from meshwright.engines.base import TrainOptions
from meshwright.engines.native import engine
from meshwright.errors import InputError, MissingDependencyError
from meshwright.training.models import build_model, init_weights
from meshwright.training.weights import find_weights, fingerprint, save_weights

pytestmark = pytest.mark.usefixtures("warm_ranks", "without_measuring")


SMALL = ("model.num_layers=2", "batch={global_sequences: 4, micro: 2}", "train.steps=2")


@pytest.fixture
def folder(tmp_path):
    """Weights of the run's model whose spread makes a loss of their own."""
    built = build_model(tiny_run(*SMALL).model, device="cpu")
    init_weights(built, seed=5, std=0.3)
    save_weights(built, tmp_path / "base", dtype=torch.float32)
    return tmp_path / "base"


def train(tmp_path, *overrides):
    run = tiny_run(*SMALL, *overrides)
    return engine.train(run, options=TrainOptions(folder=tmp_path / "out", quiet=True))


def test_the_first_loss_is_that_of_the_weights(tmp_path, folder):
    from meshwright.engines.native.batch_loader import open_batch_loader
    from meshwright.engines.native.parallel.mesh import MeshCoordinates
    from meshwright.kernels.labels import IGNORED_LABEL
    from meshwright.specs.plan import Plan
    from meshwright.training.weights import load_weights

    run = tiny_run(*SMALL)
    built = build_model(run.model, device="cpu")
    load_weights(built, folder)
    batch = (
        open_batch_loader(run, coordinates=MeshCoordinates(plan=Plan(micro_batch=2), device=torch.device("cpu")))
        .batch(0)
        .tensors
    )
    count = (batch["labels_BT"] != IGNORED_LABEL).sum()
    expected = built(batch.pop("tokens_BT"), **batch).item() / count.item()

    started = train(tmp_path, f"weights={folder}").statistics["first_loss"]
    assert started == pytest.approx(expected, rel=1e-5)
    assert train(tmp_path).statistics["first_loss"] != pytest.approx(expected, rel=1e-2)


def test_a_config_that_says_something_else_is_noted(tmp_path, folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    notes = train(tmp_path, f"weights={folder}").notes
    assert "model.norm_epsilon is 1e-05; the config.json of the weights says 0.001" in notes


@pytest.mark.parametrize(
    ("rope", "noted"), [("{}", True), ("{scaling: linear, factor: 2, original_context: 8}", False)]
)
def test_sequences_longer_than_the_positions_of_the_weights_are_noted(tmp_path, folder, rope, noted):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8}))
    notes = train(tmp_path, f"weights={folder}", f"model.rope={rope}").notes
    assert ("data.sequence_length is 16; the weights know 8 positions" in notes) == noted


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_act", "relu", "Meshwright does not compute"),
        ("quantization_config", {"quant_method": "fp8"}, "these weights are quantized"),
    ],
)
def test_weights_whose_config_asks_for_another_model_are_refused(tmp_path, folder, key, value, message):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(InputError, match=message):
        train(tmp_path, f"weights={folder}")
    assert not (tmp_path / "out").exists()


def test_weights_of_another_model_are_refused_before_anything_starts(tmp_path, folder):
    with pytest.raises(InputError, match="missing model"):
        train(tmp_path, f"weights={folder}", "model.num_layers=3")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_not_there_is_refused(tmp_path, folder):
    with pytest.raises(InputError) as caught:
        find_weights(str(tmp_path / "nowhere"))
    assert caught.value.hint == "the folder does not exist"
    with pytest.raises(InputError) as caught:
        find_weights(str(folder / "config.json"))
    assert caught.value.hint == "this is a file: name its folder"


def test_a_name_is_had_from_the_hub(monkeypatch, folder):
    def download(name, *, revision, allow_patterns, local_files_only=False):
        assert (name, revision) == ("owner/model-1.0", None)
        assert "*.safetensors" in allow_patterns
        return str(folder)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=download))
    found = find_weights("owner/model-1.0")
    assert (found.name, found.folder) == ("owner/model-1.0", folder)


def test_without_a_connection_the_folder_is_named_as_the_way_out(monkeypatch):
    def download(name, *, revision, allow_patterns, local_files_only=False):
        raise ConnectionError("cannot reach the hub\nmore words")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=download))
    with pytest.raises(InputError, match="cannot reach the hub") as caught:
        find_weights("owner/model")
    assert "give the path of its folder" in (caught.value.hint or "")


def test_without_the_library_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingDependencyError) as caught:
        find_weights("owner/model")
    assert caught.value.hint == "pip install huggingface_hub"


def test_other_weights_have_another_fingerprint(folder):
    before = fingerprint(folder)
    assert fingerprint(folder) == before
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert fingerprint(folder) != before
