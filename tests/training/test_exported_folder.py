"""An exported folder keeps what came from Hugging Face, and transformers loads its model and its tokenizer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")

from meshwright import runfile
from meshwright.engines.exporting import export_saved
from meshwright.training import checkpoints, conversion
from meshwright.training.checkpoints import SavedCheckpoint
from meshwright.training.data import open_data, open_tokenizer
from meshwright.training.data.source import open_source
from meshwright.training.models import build_model, init_weights
from meshwright.training.weights import save_weights

MODEL = (
    "{name: tiny, family: LlamaForCausalLM, hidden: 32, num_layers: 2, vocab: 320, ffn_hidden: 64,"
    " attention: {num_heads: 4, num_kv_heads: 2}}"
)
TEXT = f"""
model: {MODEL}
data: {{source: synthetic, sequence_length: 16}}
batch: {{global_sequences: 4, micro: 2}}
precision: fp32
cluster: here
train: {{steps: 2}}
"""
CONFIG = {"bos_token_id": 5, "eos_token_id": [7, 9], "pad_token_id": 3, "initializer_range": 0.07, "use_cache": True}
GENERATION = {"eos_token_id": [7, 9], "temperature": 0.6, "do_sample": True}
MAP = {"eos_token": "<|endoftext|>", "pad_token": "<|im_end|>"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    return tmp_path / "corpus.txt"


@pytest.fixture
def base(tmp_path, corpus):
    """A folder as it comes from the hub: weights, config, generation config, tokenizer, chat template."""
    built = build_model(runfile.loads(TEXT).model, device="cpu")
    init_weights(built, seed=5)
    folder = tmp_path / "base"
    save_weights(built, folder, dtype=torch.float32)
    change(folder / "config.json", max_position_embeddings=2048, **CONFIG)
    source = open_source(str(corpus), cache=tmp_path / "cache")
    tokenizer = open_tokenizer("bpe:300", source=source, cache=tmp_path / "cache")
    tokenizer.save(folder)
    change(folder / "tokenizer_config.json", model_max_length=2048)
    (folder / "special_tokens_map.json").write_text(json.dumps(MAP))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    return folder


def change(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def read(folder: Path, name: str = "config.json") -> dict:
    return json.loads((folder / name).read_text())


def checkpoint(tmp_path, *overrides, **about) -> SavedCheckpoint:
    """A checkpoint of random weights, as a run with these overrides saves it."""
    from meshwright.training.weights import find_weights

    run = runfile.loads(TEXT, overrides=overrides)
    module = build_model(run.model, device="cpu")
    init_weights(module, seed=1)
    origin = None if run.weights is None else find_weights(run.weights)
    manifest = checkpoints.as_manifest(checkpoints.content(run, weights=origin)) | about
    state = conversion._weights(module) | conversion._buffers(module)
    path = checkpoints.save(state, folder=tmp_path / "saved", step=1, about=manifest, keep=None)
    return SavedCheckpoint(path=path, step=1)


def export(tmp_path, *overrides, run=None, **about):
    saved = checkpoint(tmp_path, *overrides, **about)
    done = export_saved(saved, tmp_path / "out", run=run, dtype="bf16", merge=False)
    return tmp_path / "out", done.notes


def test_what_came_from_hugging_face_goes_out_unchanged(tmp_path, base):
    out, notes = export(tmp_path, f"weights={base}")
    assert read(out) == read(base) | {"torch_dtype": "bfloat16"}
    names = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    for name in (*names, "chat_template.jinja"):
        assert (out / name).read_bytes() == (base / name).read_bytes(), name
    assert notes == ()


def test_a_run_with_the_tokenizer_of_its_weights_keeps_its_files(tmp_path, base, corpus):
    out, notes = export(
        tmp_path, f"weights={base}", f"data.source={corpus}", f"data.tokenizer={base}", "model.vocab=320"
    )
    assert (out / "tokenizer_config.json").read_bytes() == (base / "tokenizer_config.json").read_bytes()
    assert read(out)["eos_token_id"] == [7, 9]
    assert notes == ()


def test_positions_are_at_least_the_trained_sequence_length(tmp_path, base):
    out, _ = export(tmp_path, f"weights={base}", "data.sequence_length=8192")
    assert read(out)["max_position_embeddings"] == 8192


@pytest.mark.parametrize(("length", "positions"), [(16, 16), (8192, 8192)])
def test_from_random_weights_positions_are_the_trained_sequence_length(tmp_path, length, positions):
    out, notes = export(tmp_path, f"data.sequence_length={length}")
    config = read(out)
    assert config["max_position_embeddings"] == positions
    assert config["eos_token_id"] is None  # 2 and 1 are transformers' defaults
    assert config["bos_token_id"] is None
    assert notes == ("the run has no tokenizer",)


def test_a_scaled_context_counts(tmp_path):
    rope = "{scaling: llama3, factor: 4, original_context: 64, low_frequency: 1, high_frequency: 4}"
    out, _ = export(tmp_path, f"model.rope={rope}")
    assert read(out)["max_position_embeddings"] == 256


def test_a_changed_model_replaces_the_keys_of_its_base(tmp_path, base):
    change(base / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    out, _ = export(tmp_path, f"weights={base}", "model.rope={theta: 500000.0}")
    config = read(out)
    assert config["rope_theta"] == 500000
    assert "rope_parameters" not in config
    assert config["eos_token_id"] == [7, 9]
    assert config["max_position_embeddings"] == 2048


@pytest.mark.parametrize("kind", ["bpe", "bytes", "file"])
def test_a_tokenizer_of_the_run_is_loaded_by_transformers(tmp_path, corpus, base, kind):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "letters.json").write_text((base / "tokenizer.json").read_text())
    name = {"bpe": "bpe:320", "bytes": "bytes", "file": str(tmp_path / "own" / "letters.json")}[kind]
    out, notes = export(tmp_path, f"data.source={corpus}", f"data.tokenizer={name}")
    assert [note for note in notes if "names no eos_token" not in note] == []
    assert len(notes) == (kind == "file")
    source = open_source(str(corpus), cache=tmp_path / "cache")
    ours = open_tokenizer(name, source=source, cache=tmp_path / "cache")
    loaded = transformers.AutoTokenizer.from_pretrained(out)
    for text in ("the quick né 狐\n\n  fox ", "\x00\t<b>"):
        (expected,) = ours.encode([text])
        assert loaded(text)["input_ids"] == expected.tolist()
        assert loaded.decode(expected.tolist()) == text
    assert (loaded.eos_token_id, loaded.bos_token_id) == (ours.end, ours.start)
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert (model.config.eos_token_id, model.config.bos_token_id) == (ours.end, None)
    write = transformers.pipeline("text-generation", model=model, tokenizer=loaded)
    assert write("the", max_new_tokens=3, do_sample=False)[0]["generated_text"].startswith("the")


def test_a_start_token_is_set(tmp_path, corpus, base):
    tokenizer = read(base, "tokenizer.json")
    special = {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}}
    single = [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    out, _ = export(tmp_path, f"data.source={corpus}", f"data.tokenizer={tmp_path / 'tokenizer.json'}")
    assert read(out)["bos_token_id"] == 1
    assert read(out, "tokenizer_config.json")["bos_token"] == "<|im_start|>"


@pytest.mark.parametrize("is_base", [True, False])
@pytest.mark.parametrize("named", ["tokenizer_config.json", "special_tokens_map.json", None])
def test_an_end_token_that_no_file_names_is_noted_and_written(tmp_path, base, corpus, named, is_base):
    """transformers reads both files; where neither names the token, it is found by its name."""
    transformers = pytest.importorskip("transformers")
    change(base / "config.json", eos_token_id=None)
    (base / "generation_config.json").unlink()
    for name in {"tokenizer_config.json", "special_tokens_map.json"} - {named}:
        kept = {key: value for key, value in read(base, name).items() if key != "eos_token"}
        (base / name).write_text(json.dumps(kept))
    weights = [f"weights={base}"] if is_base else []
    out, notes = export(tmp_path, *weights, f"data.source={corpus}", f"data.tokenizer={base}")
    assert [note for note in notes if "names no eos_token: <|endoftext|>" in note] == list(notes)
    assert len(notes) == (named is None)
    opened = runfile.loads(TEXT, overrides=[f"data.source={corpus}", f"data.tokenizer={base}", "batch.micro=1"])
    assert any("names no eos_token" in note for note in open_data(opened).notes) == (named is None)
    loaded = transformers.AutoTokenizer.from_pretrained(out)
    assert loaded.eos_token == "<|endoftext|>"
    if named is None or not is_base:
        assert read(out)["eos_token_id"] == loaded.eos_token_id


def test_another_tokenizer_than_that_of_the_weights_replaces_it(tmp_path, base, corpus):
    out, _ = export(tmp_path, f"weights={base}", f"data.source={corpus}", "data.tokenizer=bytes")
    assert read(out, "generation_config.json") == GENERATION | {"eos_token_id": 256, "bos_token_id": None}
    assert read(out)["eos_token_id"] == 256
    assert "pad_token_id" not in read(out)
    assert len(read(out, "tokenizer.json")["model"]["vocab"]) == 256
    assert not (out / "chat_template.jinja").exists()


def test_an_old_manifest_gives_defaults_and_a_note(tmp_path):
    out, notes = export(tmp_path, sequence_length=None, data=None)
    assert read(out)["max_position_embeddings"] == 4096
    assert "eos_token_id" not in read(out)
    assert any("old checkpoint" in note for note in notes)


def test_the_run_file_fills_an_old_manifest(tmp_path, corpus):
    run = runfile.loads(TEXT, overrides=[f"data.source={corpus}", "data.tokenizer=bytes"])
    out, notes = export(tmp_path, run=run, sequence_length=None, data=None)
    assert read(out)["max_position_embeddings"] == 16
    assert (out / "tokenizer.json").is_file()
    assert notes == ()


def test_a_base_that_is_gone_or_changed_is_noted(tmp_path, base):
    saved = checkpoint(tmp_path, f"weights={base}")
    file = base / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    done = export_saved(saved, tmp_path / "changed", run=None, dtype="bf16", merge=False)
    assert "have changed since the training" in done.notes[0]
    base.rename(tmp_path / "moved")
    done = export_saved(saved, tmp_path / "gone", run=None, dtype="bf16", merge=False)
    assert "is not found" in done.notes[0]
    assert not (tmp_path / "gone" / "tokenizer.json").exists()


def test_a_tokenizer_that_is_gone_or_changed_is_noted(tmp_path, corpus):
    out, notes = export(tmp_path, f"data.source={corpus}", "data.tokenizer=bytes", tokenizer_fingerprint="other")
    assert "has changed since the training" in notes[0]
    assert not (out / "tokenizer.json").exists()
    assert read(out)["eos_token_id"] is None


def test_an_interrupted_export_leaves_nothing(tmp_path, monkeypatch):
    from meshwright.engines import exporting

    def fail(*_):
        raise OSError("disk full")

    saved = checkpoint(tmp_path)
    monkeypatch.setattr(exporting, "complete_folder", fail)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match="disk full"):
        export_saved(saved, tmp_path / "out", run=None, dtype="bf16", merge=False)
    assert sorted(tmp_path.iterdir()) == before


def test_weights_without_a_config_are_a_base_too(tmp_path, base):
    (base / "config.json").unlink()
    out, _ = export(tmp_path, f"weights={base}", sequence_length=None, data=None)
    assert read(out)["max_position_embeddings"] == 4096
    assert (out / "tokenizer.json").is_file()


def test_without_its_tokenizer_a_run_leaves_that_of_its_weights(tmp_path, base, corpus):
    own = tmp_path / "own"
    own.mkdir()
    (own / "tokenizer.json").write_text((base / "tokenizer.json").read_text())
    saved = checkpoint(tmp_path, f"weights={base}", f"data.source={corpus}", f"data.tokenizer={own}")
    own.rename(tmp_path / "moved")
    done = export_saved(saved, tmp_path / "out", run=None, dtype="bf16", merge=False)
    assert "is not found; the weights' tokenizer is written" in done.notes[0]
    assert (tmp_path / "out" / "chat_template.jinja").is_file()


def test_merged_adapters_go_out_with_the_files_of_their_base(tmp_path, base):
    run = runfile.loads(TEXT, overrides=[f"weights={base}", "task=lora", "lora={rank: 2, alpha: 4}"])
    conversion.export_initial_adapters(run, tmp_path / "adapter")
    conversion.import_weights(run, tmp_path / "adapter", folder=tmp_path / "saved")
    saved = SavedCheckpoint(path=tmp_path / "saved" / "step-00000000", step=0)
    base.rename(tmp_path / "new")
    done = export_saved(
        saved, tmp_path / "out", run=replace(run, weights=str(tmp_path / "new")), dtype="fp32", merge=True
    )
    assert done.notes == ()
    assert read(tmp_path / "out") == read(tmp_path / "new")
    assert (tmp_path / "out" / "chat_template.jinja").is_file()
