"""`mw.generate`: from every kind of model, with the settings of its files, within its positions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")

from tests.tiny_folders import END, TEMPLATE, change, random_model, tiny_checkpoint, tiny_folder, tiny_run

import meshwright as mw
from meshwright.engines.exporting import export_saved
from meshwright.training import checkpoints
from meshwright.training.checkpoints import SavedCheckpoint
from meshwright.training.data import open_tokenizer
from meshwright.training.data.source import open_source
from meshwright.training.generation.requests import notes_on_spaces
from meshwright.training.run_identity import IDENTITY, as_document, new_identity, write_identity
from meshwright.training.telemetry import resolved as resolved_run
from meshwright.training.weights import save_weights

PROMPTS = ["Once upon a time", "né 漢字", "x"]


pytestmark = pytest.mark.usefixtures("cache_of_module")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model") / "tiny", template=TEMPLATE)


def texts(model, prompts=PROMPTS, **settings) -> list[str]:
    return [c.text for c in mw.generate(model, prompts, **({"max_tokens": 20} | settings)).completions]


def test_texts_equal_those_of_transformers(folder):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for prompt, completion in zip(PROMPTS, mw.generate(folder, PROMPTS, max_tokens=20).completions, strict=True):
        given = tokenizer(prompt, return_tensors="pt")
        out = model.generate(**given, max_new_tokens=20, do_sample=False, pad_token_id=0)[0]
        theirs = out[given["input_ids"].shape[1] :]
        assert list(completion.tokens) == theirs.tolist()
        assert completion.text == tokenizer.decode(theirs, skip_special_tokens=True)


def test_a_conversation_equals_that_of_transformers(folder):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    theirs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert texts(folder, messages) == texts(folder, theirs)


def test_a_checkpoint_and_its_export_write_the_same(tmp_path):
    path = tiny_checkpoint(tmp_path / "saved")
    tiny_checkpoint(tmp_path / "saved", step=9, seed=6)
    export_saved(SavedCheckpoint(path=path, step=3), tmp_path / "out", run=None, dtype="fp32", merge=False)
    expected = texts(tmp_path / "out")
    assert texts(path) == texts(tmp_path / "saved", step=3) == expected
    assert texts(tmp_path / "saved") != expected  # step 9
    assert mw.generate(tmp_path / "saved", "x", max_tokens=1).model["step"] == 9


@pytest.mark.parametrize("targets", ["[query, value]", "[query, key, value, output, gate, up, down]"])
def test_adapters_and_their_merged_export_write_the_same(tmp_path, folder, targets):
    lora = ("task=lora", f"weights={folder}", f"lora={{rank: 4, alpha: 8, targets: {targets}}}")
    path = tiny_checkpoint(tmp_path / "saved", *lora)
    saved = SavedCheckpoint(path=path, step=3)
    export_saved(saved, tmp_path / "merged", run=None, dtype="fp32", merge=True)
    export_saved(saved, tmp_path / "adapter", run=None, dtype="fp32", merge=False)
    expected = texts(tmp_path / "merged")
    assert texts(path) == expected != texts(folder)
    assert texts(tmp_path / "adapter") == texts(folder, adapter=tmp_path / "adapter") == expected


def results_of(tmp_path, **resolved) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    (run / "resolved.json").write_text(json.dumps({"name": "tiny", "engine": "native", "train": {}} | resolved))
    return run


def test_a_run_folder_means_its_newest_checkpoint(tmp_path):
    path = tiny_checkpoint(tmp_path / "saved")
    run = results_of(tmp_path, train={"checkpoint": {"folder": str(tmp_path / "saved")}})
    assert texts(run) == texts(path)


def test_a_run_that_was_moved_with_its_checkpoints_is_found(tmp_path):
    place = tmp_path / "before"
    tiny_checkpoint(place / "saved")
    run = results_of(place, train={"checkpoint": {"folder": str(place / "saved")}})
    write_identity(run / IDENTITY, new_identity(tiny_run(), plan=None, results=run, fingerprints={}))
    expected = texts(run)
    moved = place.rename(tmp_path / "after")
    assert texts(moved / "run") == expected


def test_the_resolved_run_names_its_checkpoints_for_other_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tiny_run("train.checkpoint={folder: saved}")
    assert run.plan is not None
    assert resolved_run(run, plan=run.plan)["train"]["checkpoint"]["folder"] == str(tmp_path / "saved")


def test_the_checkpoint_of_another_run_of_the_same_name_is_refused(tmp_path):
    ours, theirs = (new_identity(tiny_run(), plan=None, results=tmp_path / "run", fingerprints={}) for _ in range(2))
    about = {"run": "tiny", "identity": as_document(theirs)}
    checkpoints.save({"a": torch.zeros(1)}, folder=tmp_path / "saved", step=3, about=about, keep=None)
    run = results_of(tmp_path, train={"checkpoint": {"folder": str(tmp_path / "saved")}})
    write_identity(run / IDENTITY, ours)
    with pytest.raises(mw.InputError, match="is of another run"):
        mw.generate(run, "x")


@pytest.mark.parametrize(
    ("resolved", "message"),
    [
        ({}, "saved no weights"),
        ({"name": "other"}, "is of another run"),
        ({"engine": "maxtext"}, "in a format of its own"),
    ],
    ids=["nothing saved", "another run", "another engine"],
)
def test_a_run_folder_without_weights_of_its_own_is_refused(tmp_path, resolved, message):
    tiny_checkpoint(tmp_path / "saved")
    saved = {"train": {"checkpoint": {"folder": str(tmp_path / "saved")}}} if resolved else {}
    with pytest.raises(mw.InputError, match=message):
        mw.generate(results_of(tmp_path, **saved, **resolved), "x")


def test_a_run_without_checkpoints_means_its_adapter(tmp_path, folder):
    lora = ("task=lora", f"weights={folder}", "lora={rank: 4, alpha: 8, targets: [query]}")
    path = tiny_checkpoint(tmp_path / "saved", *lora)
    run = results_of(tmp_path)
    export_saved(SavedCheckpoint(path=path, step=3), run / "adapter", run=None, dtype="fp32", merge=False)
    assert texts(run) == texts(path) == texts(folder, adapter=run)


def test_a_note_names_prompts_that_end_in_a_space(tmp_path, folder):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the answer is that it is the one that is there\n" * 20)
    source = open_source(str(corpus), cache=tmp_path / "cache")
    own = open_tokenizer("bpe:265", source=source, cache=tmp_path / "cache")
    prompts = ["the answer is", "the answer is ", "it is\n", " ", [{"role": "user", "content": "is "}]]
    noted = [note for note in mw.generate(folder, prompts, max_tokens=1).notes if "ends in a space" in note]
    assert noted == []  # every byte is a token
    (several,) = notes_on_spaces(prompts, own)
    assert several.startswith(
        "2 prompts (the first: 2) end in a space, which this tokenizer writes as part of the next"
    )
    assert notes_on_spaces(prompts[:1], own) == ()
    save_weights(random_model("model.vocab=270"), tmp_path / "bpe", dtype=torch.float32)
    own.save(tmp_path / "bpe")
    found = mw.generate(tmp_path / "bpe", "the answer is ", max_tokens=1).notes
    assert any(note.startswith("prompt 1 ends in a space") for note in found)


@pytest.mark.parametrize("base_format", ["full", "nf4"])
def test_a_note_says_that_training_was_on_a_quantised_base(tmp_path, folder, base_format):
    lora = ("task=lora", f"weights={folder}", f"lora={{rank: 4, targets: [query], base_format: {base_format}}}")
    path = tiny_checkpoint(tmp_path / "saved", *lora)
    saved, run = SavedCheckpoint(path=path, step=3), results_of(tmp_path, lora={"base_format": base_format})
    done = [
        export_saved(saved, place, run=None, dtype="fp32", merge=merge)
        for place, merge in ((run / "adapter", False), (tmp_path / "merged", True))
    ]
    noted = [d.notes for d in done]
    noted += [mw.generate(model, "x", max_tokens=1).notes for model in (path, run, run / "adapter")]
    noted += [mw.generate(folder, "x", max_tokens=1, adapter=run).notes]
    noted += [mw.evaluate(path, choices=_quiz(tmp_path)).notes]
    of_base = [[note for note in notes if f"are of the base in {base_format}; evaluate" in note] for notes in noted]
    assert [len(found) for found in of_base] == [base_format == "nf4"] * 7


def _quiz(tmp_path) -> Path:
    (tmp_path / "quiz.jsonl").write_text(json.dumps({"context": "a", "choices": ["b", "c"], "answer": "b"}) + "\n")
    return tmp_path / "quiz.jsonl"


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("generation_config.json", "{", "cannot read .*generation_config.json"),
        ("generation_config.json", "[]", "generation_config.json is no JSON object"),
        ("generation_config.json", '{"eos_token_id": [1, "x"]}', "eos_token_id: got .*x"),
        ("config.json", {"max_position_embeddings": "many"}, "max_position_embeddings: got .*many"),
        ("config.json", {"max_position_embeddings": True}, "max_position_embeddings: got .*True"),
    ],
    ids=["cut", "list", "end", "text", "truth"],
)
def test_a_damaged_description_is_refused(tmp_path, file, text, message):
    copied = tiny_folder(tmp_path / "tiny")
    change(copied / file, **text) if isinstance(text, dict) else (copied / file).write_text(text)
    with pytest.raises(mw.InputError, match=message):
        mw.generate(copied, "x", max_tokens=1)


def test_another_tokenizer_needs_none_in_the_folder(tmp_path):
    bare = tiny_folder(tmp_path / "tiny")
    (bare / "tokenizer.json").unlink()
    assert mw.generate(bare, "x", max_tokens=1, tokenizer="bytes").notes == ()


def test_a_damaged_checkpoint_is_refused(tmp_path):
    path = tiny_checkpoint(tmp_path / "saved")
    file = next(path.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(mw.InputError, match="is damaged"):
        mw.generate(path, "x")


def test_a_name_of_the_hub_is_found_in_the_cache(tmp_path, folder, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    commit = "c" * 40
    repository = tmp_path / "hub" / "models--owner--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "v1").write_text(commit)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / commit).symlink_to(folder)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert texts("owner/tiny@v1") == texts(folder)
    with pytest.raises(mw.InputError, match="does not provide the weights"):
        mw.generate("owner/tiny", "x")  # the cache has no main branch


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "no/such/folder", ""])
def test_what_is_no_model_is_bad_input(name):
    with pytest.raises(mw.InputError):
        mw.generate(name, "x")


def test_a_folder_without_a_model_is_bad_input(tmp_path):
    with pytest.raises(mw.InputError, match="no model in this place"):
        mw.generate(tmp_path, "x")


# --- endings ---


@pytest.fixture
def copy(tmp_path):
    return lambda **settings: tiny_folder(tmp_path / "copy", template=TEMPLATE, **settings)


def test_end_tokens_of_the_generation_config_end_a_text(folder, copy):
    (whole,) = mw.generate(folder, "x", max_tokens=20).completions
    end = whole.tokens[6]
    place = whole.tokens.index(end)
    (ended,) = mw.generate(copy(generation={"eos_token_id": [end, 250]}), "x", max_tokens=20).completions
    assert ended.ending == "end_token"
    assert ended.tokens == whole.tokens[: place + 1]


def test_a_stop_string_ends_a_text_and_is_not_in_it(folder):
    whole = texts(folder, "x", max_tokens=40)[0]
    stop = whole[10:12]
    (stopped,) = mw.generate(folder, "x", max_tokens=40, stop=[stop]).completions
    assert stopped.ending == "stop"
    assert stopped.text == whole[: whole.index(stop)]


def test_what_the_template_writes_after_an_answer_ends_it(folder):
    from meshwright.training.data.tokenizer import ByteTokenizer, tokenizer_from_path, turn_end

    assert turn_end(tokenizer_from_path(folder)).stops == ("</assistant>",)
    assert turn_end(ByteTokenizer()).stops == ("<|im_end|>",)


def test_a_special_token_after_an_answer_is_an_end_token(copy):
    from meshwright.training.data.tokenizer import tokenizer_from_path, turn_end

    place = copy()
    (place / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
    change(place / "tokenizer_config.json", eos_token="<|endoftext|>")
    assert turn_end(tokenizer_from_path(place)).tokens == (END,)


def test_positions_are_never_exceeded_in_silence(copy):
    place = copy(max_position_embeddings=24)
    with pytest.raises(mw.InputError, match=r"prompt 2 is too long: 20 tokens and 5 to generate.*24") as caught:
        mw.generate(place, ["x", "y" * 20, "z"], max_tokens=5)
    assert "--beyond-positions" in caught.value.hint
    with pytest.raises(mw.InputError, match=r"prompt 1 .* 24 .*; prompt 2"):
        mw.generate(place, ["x" * 24, "y" * 30])
    (done,) = mw.generate(place, "x" * 20).completions
    assert (len(done.tokens), done.ending) == (4, "positions")
    beyond = mw.generate(place, "x" * 20, max_tokens=5, beyond_positions=True)
    assert beyond.completions[0].tokens[:4] == done.tokens
    assert beyond.notes == ("1 of 1 texts go beyond the 24 trained positions",)


def test_a_checkpoint_knows_its_sequence_length(tmp_path):
    path = tiny_checkpoint(tmp_path / "saved", "data.sequence_length=16")
    with pytest.raises(mw.InputError, match="16, the positions"):
        mw.generate(path, "x" * 17)


# --- sampling ---


def test_the_same_seed_draws_the_same_texts_in_any_batch(folder):
    settings = {"temperature": 1.5, "seed": 3}
    drawn = texts(folder, **settings)
    assert texts(folder, **settings, batch=1) == drawn
    assert texts(folder, **(settings | {"seed": 4})) != drawn
    assert texts(folder, temperature=1.5, top_k=1) == texts(folder)


def test_settings_of_the_generation_config_hold_until_others_are_given(copy):
    named = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 0, "num_beams": 4}
    place = copy(generation=named)
    done = mw.generate(place, "x", max_tokens=2, min_p=0.1)
    found = {name: done.settings[name] for name in ("temperature", "top_p", "top_k", "min_p")}
    assert found == {"temperature": 0.6, "top_p": 0.9, "top_k": None, "min_p": 0.1}
    assert done.notes == (
        "as generation_config.json says: temperature 0.6, top_p 0.9",
        "generation_config.json: num_beams 4 is not applied",
    )
    greedy = mw.generate(place, "x", max_tokens=2, temperature=0).settings
    assert (greedy["temperature"], greedy["top_p"]) == (0, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1}, "temperature: got -1"),
        ({"temperature": float("nan")}, "temperature: got nan"),
        ({"temperature": "hot"}, "temperature: got 'hot'"),
        ({"top_k": 1.5}, "top_k: got 1.5"),
        ({"top_p": 0}, "top_p: got 0"),
        ({"top_p": 1.1}, "top_p: got 1.1"),
        ({"min_p": 2}, "min_p: got 2"),
        ({"repetition_penalty": 0}, "repetition_penalty: got 0"),
        ({"temperature": 0, "top_k": 5}, "top_k would do nothing"),
        ({"max_tokens": 0}, "max_tokens: got 0"),
        ({"seed": -1}, "seed: got -1"),
        ({"batch": 0}, "batch: got 0"),
        ({"stop": "x"}, "stop: got 'x'"),
        ({"stop": [""]}, "stop: got ''"),
        ({"dtype": "int8"}, "dtype: got 'int8'"),
        ({"step": 3}, "only checkpoints have steps"),
        ({"tokenizer": "bytez"}, "no such tokenizer"),
        ({"adapter": "nowhere"}, "not a LoRA adapter"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_bad_input(folder, settings, message):
    with pytest.raises(mw.InputError, match=message):
        mw.generate(folder, "x", **settings)


@pytest.mark.parametrize("prompts", [[], 3, None, {"a": 1}, [3], [["a"]], ["\ud800"], [[]]], ids=repr)
def test_a_wrong_prompt_is_bad_input(folder, prompts):
    with pytest.raises(mw.InputError):
        mw.generate(folder, prompts)


def test_a_wrong_value_in_the_generation_config_names_the_file(copy):
    with pytest.raises(mw.InputError, match=r"generation_config.json: temperature: got 'hot'"):
        mw.generate(copy(generation={"do_sample": True, "temperature": "hot"}), "x")


def test_an_empty_prompt_begins_a_document(folder):
    done = mw.generate(folder, "", max_tokens=3)
    assert done.completions[0].num_prompt_tokens == 1
    assert len(done.completions[0].tokens) == 3


def test_bf16_computes_in_bf16(folder):
    done = mw.generate(folder, "x", max_tokens=2, dtype="bf16")
    assert done.model["dtype"] == "bf16"


def test_the_result_is_a_document_rows_and_a_page(folder):
    done = mw.generate(folder, PROMPTS, max_tokens=3)
    document = json.loads(json.dumps(done.to_dict()))
    assert [c["prompt"] for c in document["completions"]] == PROMPTS
    assert document["device"]["type"] in ("cpu", "cuda")
    assert document["software"]["torch"] == torch.__version__
    assert [row["num_tokens"] for row in done.to_rows()] == [3, 3, 3]
    assert "tokens/s" in str(done)
    assert "né 漢字" in done._repr_html_()
