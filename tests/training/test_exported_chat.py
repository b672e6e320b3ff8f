"""An exported model that was trained on conversations: transformers writes the same prompt and stops where we stop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

from tests.training.data import chat_templates as known

import meshwright as mw
from meshwright import runfile
from meshwright.engines.exporting import export_saved
from meshwright.training import checkpoints, conversion
from meshwright.training.checkpoints import SavedCheckpoint
from meshwright.training.data.conversations import Conversation
from meshwright.training.data.corpus import open_data
from meshwright.training.data.tokenizer import tokenizer_from_path, turn_end
from meshwright.training.models import add_adapters, build_model
from meshwright.training.weights import adapters_of, find_weights, save_weights

ASKED = [{"role": "user", "content": "Who?"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "It is I."}]
TEXT = """
name: tiny
model: {name: tiny, family: LlamaForCausalLM, hidden: 64, num_layers: 2, vocab: 400, ffn_hidden: 32,
        attention: {num_heads: 2, num_kv_heads: 2}}
data: {sequence_length: 128}
batch: {global_sequences: 1, micro: 1}
precision: fp32
cluster: here
train: {steps: 1}
"""
TEMPLATES = {
    "none": None, "chatml": known.CHATML, "llama3": known.LLAMA3, "qwen2.5": known.QWEN25, "mistral": known.MISTRAL,
    "gemma": known.GEMMA, "phi3": known.PHI3, "deepseek": known.DEEPSEEK, "generation": known.GENERATION,
    "llama3.1": known.LLAMA31, "qwen3": known.QWEN3,
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))


def write_tokenizer(folder: Path, template: str | None, *, special=known.SPECIAL_TOKENS) -> Path:
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=380, special_tokens=list(special), show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    model.train_from_iterator(["who is it that it is"] * 3, trainer)
    model.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def chain(model, following: dict[int, int]):
    """A model in which every token has one successor: no layer adds anything, and the head finds the embedding."""
    built = build_model(model, device="cpu")
    embedding = torch.nn.functional.normalize(
        torch.randn(model.vocab, model.hidden, generator=torch.Generator().manual_seed(0)), dim=1
    )
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.fill_(0 if parameter.ndim > 1 else 1)
        built.get_parameter("embedding.weight").copy_(embedding)
        head = torch.zeros_like(embedding)
        for token, successor in following.items():
            head[successor] += embedding[token]
        built.get_parameter("head.weight").copy_(head)
    return built


def made(tmp_path, template, record=None, *, special=known.SPECIAL_TOKENS, ends=(), **about):
    """A base folder, a checkpoint of a training on `record` from it, and its export with the notes."""
    base = tmp_path / "base"
    (tmp_path / "talk.jsonl").write_text(json.dumps(record or {"messages": ANSWERED}) + "\n")
    shapes = runfile.loads(TEXT, overrides=["data.source=synthetic"]).model
    save_weights(build_model(shapes, device="cpu"), base, dtype=torch.float32)
    tokenizer = tokenizer_from_path(write_tokenizer(base, template, special=special))
    config = json.loads((base / "config.json").read_text()) | {"eos_token_id": tokenizer.end, "bos_token_id": 0}
    (base / "config.json").write_text(json.dumps(config))
    ends = [tokenizer.end, *(tokenizer.encode([text])[0][0].item() for text in ends)]
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": ends if len(ends) > 1 else ends[0]}))
    run = runfile.loads(TEXT, overrides=[
        f"weights={base}", f"data.source={tmp_path / 'talk.jsonl'}", f"data.tokenizer={base}",
    ])  # fmt: skip
    asked = tokenizer.encode([tokenizer.chat.prompt(Conversation(messages=ASKED))])[0].tolist()
    end = (*turn_end(tokenizer).tokens, tokenizer.end)[0]
    a, b = tokenizer.encode(["x"])[0][0].item(), tokenizer.encode(["y"])[0][0].item()
    module = chain(run.model, {asked[-1]: a, a: b, b: end, end: a} | {tokenizer.end: a})
    corpus = open_data(run)
    content = checkpoints.content(
        run, weights=find_weights(str(base)), tokenizer=tokenizer, has_conversations=corpus.has_conversations
    )
    manifest = checkpoints.as_manifest(content) | about
    path = checkpoints.save(conversion._weights(module), folder=tmp_path / "saved", step=1, about=manifest, keep=None)
    saved = SavedCheckpoint(path=path, step=1)
    done = export_saved(saved, tmp_path / "out", run=None, dtype="fp32", merge=False)
    return path, tmp_path / "out", done.notes


@pytest.mark.parametrize("name", TEMPLATES)
def test_transformers_stops_where_meshwright_stops(tmp_path, name):
    checkpoint, out, notes = made(tmp_path, TEMPLATES[name])
    assert notes == ()
    (ours,) = mw.generate(checkpoint, [ASKED], max_tokens=9).completions
    (ours_of_export,) = mw.generate(out, [ASKED], max_tokens=9).completions
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    loaded = transformers.AutoTokenizer.from_pretrained(out)
    given = loaded.apply_chat_template(ASKED, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    theirs = model.generate(**given, max_new_tokens=9, do_sample=False)[0][given["input_ids"].shape[1] :]
    assert theirs.tolist() == list(ours.tokens) == list(ours_of_export.tokens)
    assert len(theirs) == 3  # x, y and the mark
    assert loaded.decode(theirs, skip_special_tokens=True) == ours.text == "xy"


@pytest.mark.parametrize("talk", [ASKED, ANSWERED, [{"role": "system", "content": " Be\n brief. "}, *ANSWERED]])
def test_the_exported_template_writes_what_training_wrote(tmp_path, talk):
    _, out, _ = made(tmp_path, None)
    loaded = transformers.AutoTokenizer.from_pretrained(out)
    ours = tokenizer_from_path(tmp_path / "base").chat
    assert loaded.apply_chat_template(talk, tokenize=False) == ours.render(Conversation(messages=talk)).text
    assert loaded.apply_chat_template(talk, tokenize=False, add_generation_prompt=True) == ours.prompt(
        Conversation(messages=talk)
    )


@pytest.mark.parametrize("record", [{"text": "no talk " * 40}, {"prompt": "a", "completion": "b"}])
def test_other_data_leaves_the_base_as_it_is(tmp_path, record):
    _, out, notes = made(tmp_path, None, record)
    assert not (out / "chat_template.jinja").exists()
    assert (out / "generation_config.json").read_bytes() == (tmp_path / "base" / "generation_config.json").read_bytes()
    assert notes == ()


def test_a_mark_of_several_tokens_is_noted(tmp_path):
    _, out, notes = made(tmp_path, None, special=("<s>", "</s>"))
    assert (out / "chat_template.jinja").is_file()
    assert len(notes) == 1
    assert "answers end at the text '<|im_end|>', which is" in notes[0]
    assert "stop_strings" in notes[0]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": ANSWERED},
        {"instruction": "Who?", "output": "I."},
        {"prompt": ASKED, "completion": ANSWERED[1:]},
        {"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "I."}]},
    ],
)
@pytest.mark.parametrize("about", [{}, {"has_conversations": None}])  # the second: other engines, old checkpoints
def test_conversations_of_every_format_count(tmp_path, record, about):
    _, out, _ = made(tmp_path, None, record, **about)
    end = tokenizer_from_path(out)
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [end.end, *turn_end(end).tokens]


def test_a_missing_generation_config_is_written(tmp_path):
    checkpoint, _, _ = made(tmp_path, None)
    (tmp_path / "base" / "generation_config.json").unlink()
    saved = SavedCheckpoint(path=checkpoint, step=1)
    export_saved(saved, tmp_path / "again", run=None, dtype="fp32", merge=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert len(model.generation_config.eos_token_id) == 2
    assert model.generation_config.bos_token_id == 0


@pytest.mark.parametrize(
    ("template", "ends", "is_noted"),
    [(None, (), True), (None, ("<|im_end|>",), True), (known.CHATML, (), True), (known.CHATML, ("<|im_end|>",), False)],
)
def test_an_adapter_of_conversations_that_its_base_does_not_end_is_noted(tmp_path, template, ends, is_noted):
    path, _, _ = made(tmp_path, template, ends=ends)
    lora = {"rank": 2, "alpha": 4.0, "dropout": 0.0, "targets": ["query"], "base_format": "full"}
    manifest = checkpoints.read_manifest(path) | {"lora": lora}
    content = checkpoints.content_of(manifest)
    module = build_model(content.shapes, device="cpu")
    add_adapters(module, content.lora)
    state = {f"weights.{name}": tensor.detach() for name, tensor in adapters_of(module).items()}
    about = checkpoints.as_manifest(content)
    saved = checkpoints.save(state, folder=tmp_path / "tuned", step=2, about=about, keep=None)
    notes = [
        export_saved(SavedCheckpoint(path=saved, step=2), tmp_path / name, run=None, dtype="fp32", merge=merge).notes
        for name, merge in (("adapter", False), ("merged", True))
    ]
    assert [any("--merge writes both" in note for note in found) for found in notes] == [is_noted, False]
    assert (tmp_path / "merged" / "chat_template.jinja").is_file()
