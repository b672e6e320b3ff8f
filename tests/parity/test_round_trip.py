"""From a Hugging Face folder through training and back: transformers computes what Meshwright trained."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.parity.test_huggingface import TERMS, reference_model, tokens
from tests.rounding import assert_equals

from meshwright.catalog.huggingface import model_from_path
from meshwright.training.models import add_adapters, build_model, init_adapters, materialize
from meshwright.training.weights import load_adapters, load_weights, read_lora

pytestmark = pytest.mark.usefixtures("one_thread_and_a_cache", "without_measuring")

RUN = """
model: base
weights: base
data: {source: synthetic, sequence_length: 40}
batch: {global_sequences: 2}
precision: fp32
cluster: here
optimizer: {learning_rate: 1.0e-2}
parallel: {data_shard: 1}
train: {steps: 2, checkpoint: {folder: saved}}
"""
NAMES = ("qwen2.5", "olmo2", "gemma2", "gemma3", "gpt-oss")
CASES = ["phi4-mini-long", *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES)]


@pytest.fixture
def train(tmp_path, monkeypatch, meshwright):
    """`train(case, *options)`: a base of this case, trained."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)

    def run(case, *options):
        reference_model(case).save_pretrained("base")
        done = meshwright("train", "run.yaml", "--out", "out", "--only-steps", *options)
        assert done.exit_code == 0, done.stderr

    return run


def theirs(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()


def assert_computes(ours, models):
    """Compare the logits of models of transformers with ours."""
    assert_equals(
        lambda: dict.fromkeys(models, ours(tokens())),
        {name: model(tokens()).logits for name, model in models.items()},
        weights=ours.parameters(),
        terms=TERMS,
    )


@pytest.mark.parametrize("case", CASES)
def test_what_was_trained_is_what_transformers_loads(case, train, meshwright):
    train(case)
    out = meshwright("checkpoint", "to-hf", "saved", "hf", "--dtype", "fp32")
    assert out.exit_code == 0, out.stderr
    base, model = model_from_path("base"), model_from_path("hf")
    assert replace(model, name=base.name) == base
    ours = build_model(model, device="cpu")
    load_weights(ours, "hf")
    assert_computes(ours, {"trained": theirs("hf")})
    assert not torch.allclose(theirs("base")(tokens()).logits, ours(tokens()), atol=1e-2)


@pytest.mark.parametrize("case", CASES)
def test_weights_go_in_and_out_unchanged(case, tmp_path, monkeypatch, meshwright):
    """from-hf and to-hf give the same tensors, and a run resumes from what came in."""
    monkeypatch.chdir(tmp_path)
    reference_model(case).save_pretrained("base")
    (tmp_path / "run.yaml").write_text(RUN.replace("weights: base\n", ""))
    for command in (
        ("checkpoint", "from-hf", "run.yaml", "base"),
        ("checkpoint", "to-hf", "saved", "hf", "--dtype", "fp32"),
        ("train", "run.yaml", "--out", "out", "--only-steps", "--resume"),
        ("checkpoint", "to-hf", "saved", "trained", "--dtype", "fp32"),
    ):
        done = meshwright(*command)
        assert done.exit_code == 0, done.stderr
    base, out, trained = (theirs(folder).state_dict() for folder in ("base", "hf", "trained"))
    assert base.keys() == out.keys() == trained.keys()
    assert all(torch.equal(base[name], out[name]) for name in base)
    assert not all(torch.equal(base[name], trained[name]) for name in base)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("case", CASES)
def test_adapters_are_those_of_peft(case, train, meshwright):
    peft = pytest.importorskip("peft")
    train(case, "--set", "task=lora", "--set", "lora.rank=4")
    out = meshwright("checkpoint", "to-hf", "saved", "adapter", "--dtype", "fp32")
    assert out.exit_code == 0, out.stderr
    model = model_from_path("base")
    ours = build_model(model)
    add_adapters(ours, read_lora("adapter", model=model))
    materialize(ours, device="cpu")
    init_adapters(ours, seed=0)
    load_weights(ours, "base")
    load_adapters(ours, "adapter")
    ours.eval()
    adapted = peft.PeftModel.from_pretrained(theirs("base"), "adapter").eval()
    assert meshwright("checkpoint", "to-hf", "saved", "merged", "--merge", "--dtype", "fp32").exit_code == 0
    assert_computes(ours, {"adapter": adapted, "merged": theirs("merged")})
