"""New tokens: the rows and the loss of transformers' resized models, under plans, with adapters, resumed, exported."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from tests import tiny_runs

from meshwright.engines.exporting import export_saved
from meshwright.engines.native.assembly import assemble
from meshwright.engines.native.batch_loader import open_batch_loader
from meshwright.engines.native.check import check
from meshwright.engines.native.parallel.mesh import MeshCoordinates
from meshwright.errors import InputError
from meshwright.specs.plan import Plan
from meshwright.training import checkpoints
from meshwright.training.models import build_model, init_weights
from meshwright.training.weights import save_weights

pytestmark = pytest.mark.usefixtures("warm_ranks", "without_measuring", "without_page")

NEW = ["<|im_start|>", "<|im_end|>"]
ALONE = MeshCoordinates(plan=Plan(micro_batch=2), device=torch.device("cpu"))
TALK = [{"role": "user", "content": "Are you there?"}, {"role": "assistant", "content": "I am."}]
LORA = ("task=lora", "lora={rank: 3, modules_to_save: [embedding, head]}")


@pytest.fixture
def base(tmp_path):
    """A folder with a tokenizer of 257 tokens and weights of as many rows."""
    folder = tmp_path / "base"
    save_weights(filled(tiny_runs.tiny_run("model.vocab=257").model), folder, dtype=torch.float32)
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=257, special_tokens=["</s>"], initial_alphabet=alphabet)
    inner.train_from_iterator(["x"], trainer)
    inner.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "talks.jsonl").write_text((json.dumps({"messages": TALK}) + "\n") * 16)
    return folder


def filled(model):
    built = build_model(model, device="cpu")
    init_weights(built, seed=3)
    with torch.no_grad():  # rows whose mean is not 0
        for name in ("embedding.weight", "head.weight"):
            built.get_parameter(name).add_(torch.linspace(-0.3, 0.5, model.hidden))
    return built


def run_of(base, *overrides: str, vocab: int = 260):
    return tiny_runs.tiny_run(
        f"data={{source: {base.parent / 'talks.jsonl'}, tokenizer: {base}, sequence_length: 48}}",
        f"data.added_tokens={json.dumps(NEW)}", f"weights={base}", f"model.vocab={vocab}",
        "batch={global_sequences: 4, micro: 2}", *overrides,
    )  # fmt: skip


@pytest.mark.parametrize("rows", ["mean", "zeros"])
@pytest.mark.parametrize("kind", [(), LORA], ids=["all weights", "adapters"])
def test_rows_and_loss_are_those_of_a_resized_model_of_transformers(base, rows, kind):
    run = run_of(base, f"data.added_rows={rows}", *kind)
    parts, loader = assemble(run, coordinates=ALONE, weights=base), open_batch_loader(run, coordinates=ALONE)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs.resize_token_embeddings(260, mean_resizing=True)
    if rows == "zeros":
        with torch.no_grad():
            theirs.get_input_embeddings().weight[257:] = theirs.get_output_embeddings().weight[257:] = 0
    for ours, their in (("embedding", theirs.get_input_embeddings()), ("head", theirs.get_output_embeddings())):
        found = parts.modules[0].get_parameter(f"{ours}.weight")
        torch.testing.assert_close(found, their.weight, rtol=1e-5, atol=2e-5)  # transformers adds noise
        assert torch.equal(found[:257], their.weight[:257])

    batch = loader.batch(0)
    assert {257, 258} <= set(batch.tensors["tokens_BT"].unique().tolist())  # both marks have one token
    loss = parts.stepper.loss(batch.tensors, scale=batch.counts.loss_scale)
    tokens, labels, documents = (batch.tensors[f"{name}_BT"] for name in ("tokens", "labels", "documents"))
    losses = []
    for row, goal, of in zip(tokens, labels, documents, strict=True):
        for document in of.unique()[of.unique() >= 0]:
            logits = theirs(row[of == document][None]).logits[0]
            losses.append(torch.nn.functional.cross_entropy(logits, goal[of == document], reduction="none"))
    counted = torch.cat(losses)[torch.cat([*labels])[torch.cat([*documents]) >= 0] >= 0]
    assert loss.item() == pytest.approx(counted.mean().item(), rel=1e-5)


PARALLEL = ["{data_shard: 2, sharding: parameters}", "{tensor: 2}"]


def test_a_training_is_the_same_under_plans_resumed_and_exported_with_its_tokenizer(base, tmp_path, tiny_run):
    def training(name: str, num_steps: int = 3, parallel: str = "{data_shard: 1}", **sections: str):
        (tmp_path / name).mkdir(exist_ok=True)
        return tiny_run(
            tmp_path / name, model=f"{{base: {base}, vocab: 260}}", weights=str(base), parallel=parallel,
            data=f"{{source: {tmp_path / 'talks.jsonl'}, tokenizer: {base}, sequence_length: 48, added_tokens: {NEW}}}",
            batch="{global_sequences: 4, micro: 2}", optimizer="{learning_rate: 1.0e-2, schedule: constant}",
            train=f"{{steps: {num_steps}, checkpoint: {{folder: saved, every_steps: 1}}}}", precision="fp32",
            **sections,
        )  # fmt: skip

    whole = training("whole")
    whole.train()
    training("parted", 2).train()
    training("parted").train("--resume")
    assert training("parted").losses() == whole.losses()
    for parallel in PARALLEL:
        training(parallel[1:5], parallel=parallel).train()
        assert training(parallel[1:5]).losses() == pytest.approx(whole.losses(), rel=1e-5)

    training("lora", task="lora", lora=LORA[1].removeprefix("lora=")).train()
    for name in ("whole", "lora"):
        saved = checkpoints.choose(tmp_path / name / "saved", None)
        export_saved(saved, tmp_path / f"{name}-hf", run=None, dtype="fp32", merge=name == "lora")
        require_exported(tmp_path / f"{name}-hf")


def require_exported(exported):
    """The folder is a model of transformers with the new tokens and their rows."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    assert tokenizer.convert_tokens_to_ids(NEW) == [257, 258]
    assert tokenizer("<|im_start|>a").input_ids[0] == 257
    model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    assert model.get_output_embeddings().weight.shape[0] == model.config.vocab_size == 260
    assert 258 in model.generation_config.eos_token_id  # an answer's end, with that of a document


def test_a_vocabulary_that_is_too_small_names_the_one_that_does(base):
    with pytest.raises(InputError, match=r"more tokens than the model(.|\n)*model.vocab=259"):
        open_batch_loader(run_of(base, vocab=258), coordinates=ALONE)
    with pytest.raises(InputError, match="another shape"):
        assemble(run_of(base, "data.added_tokens=[]"), coordinates=ALONE, weights=base)


def test_adapters_without_embedding_and_head_and_other_tokenizers_are_refused(base):
    assert [p.key for p in check(run_of(base, "task=lora", "lora={rank: 2}"))] == ["data.added_tokens"]
    with pytest.raises(InputError, match="the tokenizer bytes takes none"):
        open_batch_loader(run_of(base, "data.tokenizer=bytes"), coordinates=ALONE)
    with pytest.raises(InputError, match="named once"):
        run_of(base, "data.added_tokens=[<a>, <a>]")
