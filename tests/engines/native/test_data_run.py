"""Tokenizers, and the data of a whole run: text in, batches out."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from meshwright.errors import InputError, MissingDependencyError
from meshwright.runfile import loads
from meshwright.specs.run import Data, Evaluate, Run, Train
from meshwright.training.data import Batches, Corpus, open_data, open_tokenizer, require_sources
from meshwright.training.data.bpe import SMALLEST_VOCAB
from meshwright.training.data.conversations import Conversation
from meshwright.training.data.documents import TextDocument, TextSpan
from meshwright.training.data.megatron import write_indexed
from meshwright.training.data.packing import StreamSamples, WholeSamples
from meshwright.training.data.source import DocumentSource, open_source
from meshwright.training.data.tokenization import _encode, _parts, tokenise
from meshwright.training.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer

RUN = """
model: {name: tiny, hidden: 32, num_layers: 1, vocab: 512, ffn_hidden: 64,
        attention: {num_heads: 2, num_kv_heads: 2, head_dim: 16}}
data: {source: synthetic, sequence_length: 32}
batch: {global_tokens: 128}
precision: fp32
cluster: here
train: {steps: 4}
"""


@pytest.fixture
def run() -> Run:
    return loads(RUN)


def with_data(run: Run, *, evaluate: bool = False, **data: Any) -> Run:
    train = Train(steps=4, evaluate=Evaluate(num_batches=1) if evaluate else None)
    return replace(run, data=Data(**data), train=train)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for n in range(40):
        (folder / f"{n:02d}.txt").write_text(f"The number is {n}, and the next number is {n + 1}.\n" * 8)
    return folder


@pytest.fixture
def bpe(text: Path, tmp_path: Path) -> Tokenizer:
    pytest.importorskip("tokenizers")
    source = open_source(str(text))
    return open_tokenizer("bpe:300", source=source, cache=tmp_path / "cache")


@pytest.mark.parametrize("name", ["bytes", "bpe:300"])
def test_text_survives_and_alignment_agrees_with_encoding(text: Path, tmp_path: Path, name: str) -> None:
    pytest.importorskip("tokenizers")
    tokenizer = open_tokenizer(name, source=open_source(str(text)), cache=tmp_path)
    for sample in ("number 7\n\n  naïve 漢字 🙂", "x", " "):
        (ids,) = tokenizer.encode([sample])
        assert tokenizer.decode(ids.tolist()) == sample
        aligned = tokenizer.align(sample)
        assert np.array_equal(aligned.ids_N, ids)
        assert len(aligned.stops_N) == len(ids)
        assert aligned.stops_N.max() == len(sample)
        assert tokenizer.end not in ids


def test_a_trained_tokenizer_is_made_once_and_always_the_same(text: Path, tmp_path: Path, bpe: Tokenizer) -> None:
    source = open_source(str(text))
    again = open_tokenizer("bpe:300", source=source, cache=tmp_path / "cache")
    elsewhere = open_tokenizer("bpe:300", source=source, cache=tmp_path / "other")
    assert bpe.fingerprint == again.fingerprint == elsewhere.fingerprint
    assert len(list((tmp_path / "cache" / "tokenizers").glob("*/tokenizer.json"))) == 1
    assert bpe.vocab <= 300
    (ids,) = bpe.encode(["The number is 5"])
    assert len(ids) < len("The number is 5") / 2


def test_a_tokenizer_file_is_read_with_its_config(tmp_path: Path, bpe: JsonTokenizer) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(bpe.text)
    plain = open_tokenizer(str(folder / "tokenizer.json"), source=None, cache=tmp_path)
    assert plain.end == bpe.end
    config = {"eos_token": {"content": "<|im_end|>"}, "chat_template": "{{ eos_token }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    found = open_tokenizer(str(folder), source=None, cache=tmp_path)
    assert found.end != bpe.end
    assert found.chat.render(Conversation(messages=[{"role": "user", "content": "x"}])).text == "<|im_end|>"
    assert found.fingerprint != bpe.fingerprint
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<none>"}')
    with pytest.raises(InputError, match="no end-of-document token"):
        open_tokenizer(str(folder), source=None, cache=tmp_path)


def test_a_start_token_is_used_where_the_tokenizer_adds_one(tmp_path: Path, bpe: JsonTokenizer) -> None:
    import tokenizers

    inner = tokenizers.Tokenizer.from_str(bpe.text)
    start = inner.token_to_id("<|im_start|>")
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
    )
    (tmp_path / "t.json").write_text(inner.to_str())
    tokenizer = open_tokenizer(str(tmp_path / "t.json"), source=None, cache=tmp_path)
    assert tokenizer.start == start
    (document,) = _encode([*_parts([TextDocument(text="number")])], tokenizer)
    assert document.ids_N.tolist() == [start, *tokenizer.encode(["number"])[0].tolist(), tokenizer.end]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bpe:x", "bpe:SIZE"),
        ("bpe:10", f"{SMALLEST_VOCAB} to"),
        ("./none", "cannot read the tokenizer"),
        ("none.json", "cannot read the tokenizer"),
        ("{tmp}/broken.json", "not a tokenizer.json"),
        ("{tmp}/latin.json", "not JSON"),
        ("not a name!", "no such tokenizer"),
        ("nobody/nothing", "does not provide the tokenizer"),
    ],
)
def test_a_name_without_tokenizer_is_bad_input(
    tmp_path: Path, text: Path, name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "broken.json").write_text("{}")
    (tmp_path / "latin.json").write_bytes(b"\xff")
    with pytest.raises(InputError, match=message):
        open_tokenizer(name.format(tmp=tmp_path), source=open_source(str(text)), cache=tmp_path)


def test_a_tokenizer_by_name_comes_from_the_hub(
    tmp_path: Path, bpe: JsonTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    asked = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        assert "tokenizer.json" in allow_patterns
        (tmp_path / "tokenizer.json").write_text(bpe.text)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", download)
    found = open_tokenizer("some/model@v2", source=None, cache=tmp_path)
    assert (found.name, found.fingerprint) == ("some/model@v2", bpe.fingerprint)
    assert asked == [("some/model", "v2")]


def test_without_the_library_bytes_still_work(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    assert open_tokenizer("bytes", source=None, cache=tmp_path).vocab == 257
    with pytest.raises(MissingDependencyError, match="pip install tokenizers"):
        open_tokenizer("bpe:300", source=open_source(str(text)), cache=tmp_path)


def test_only_the_answer_and_its_end_are_trained_on() -> None:
    tokenizer = ByteTokenizer()
    document = TextDocument(text="é?yes", trained=(TextSpan(2, 5),))
    (tokens,) = _encode([*_parts([document])], tokenizer)
    assert tokens.trained_N is not None
    assert tokens.ids_N[tokens.trained_N].tolist() == [*b"yes", tokenizer.end]


def test_an_answer_is_found_among_the_tokens_of_the_whole_text(bpe: Tokenizer) -> None:
    asked, answered = "The number is 7?\n", "The next number is 8, naïve 漢字."
    document = TextDocument(text=asked + answered, trained=(TextSpan(len(asked), len(asked) + len(answered)),))
    (tokens,) = _encode([*_parts([document])], bpe)
    assert tokens.trained_N is not None
    assert bpe.decode(tokens.ids_N[tokens.trained_N].tolist()) == answered
    assert bpe.decode(tokens.ids_N[~tokens.trained_N].tolist()) == asked
    assert tokens.trained_N[-1]


def test_of_a_conversation_only_the_answers_are_trained_on(bpe: Tokenizer) -> None:
    messages = [{"role": r, "content": c} for r, c in (("user", "is 7"), ("assistant", "number"), ("user", "next"))]
    (tokens,) = _encode([*_parts([bpe.chat.render(Conversation(messages=messages))])], bpe)
    assert tokens.trained_N is not None
    end_of_turn = bpe.encode(["<|im_end|>"])[0].tolist()
    assert tokens.ids_N[tokens.trained_N].tolist() == [*bpe.encode(["number"])[0].tolist(), *end_of_turn]
    assert len(end_of_turn) == 1
    assert bpe.end not in tokens.ids_N  # the template ends the text


def test_long_text_is_cut_before_lines_and_loses_nothing(monkeypatch: pytest.MonkeyPatch, bpe: Tokenizer) -> None:
    text = "".join(f"def f{n}():\n\n    return {n}\n\n\n" for n in range(200))
    whole = bpe.encode([text])[0]
    monkeypatch.setattr("meshwright.training.data.tokenization._PART_CHARACTERS", 100)
    pieces = [part.text for part in _parts([TextDocument(text=text)])]
    assert len(pieces) > 20
    assert "".join(pieces) == text
    assert np.array_equal(np.concatenate(bpe.encode(pieces)), whole)


@pytest.mark.parametrize("end", ["\n", " ", "."], ids=["lines", "words", "neither"])
def test_a_long_document_is_tokenised_in_bounded_memory(tmp_path, monkeypatch, bpe: Tokenizer, end: str) -> None:
    for name, value in (("_PART_CHARACTERS", 100), ("_BATCH_CHARACTERS", 200)):
        monkeypatch.setattr(f"meshwright.training.data.tokenization.{name}", value)
    texts = ["".join(f"number{n:03d}{end}" for n in range(200)), "The next."]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    whole = [[*bpe.encode([text])[0].tolist(), bpe.end] for text in texts]
    asked: list[int] = []
    encode = bpe.encode
    monkeypatch.setattr(bpe, "encode", lambda given: asked.append(sum(map(len, given))) or encode(given))
    reports = []
    source = open_source(str(tmp_path / "texts.jsonl"), cache=tmp_path)
    store = tokenise(source, bpe, cache=tmp_path, report=reports.append, shard_tokens=50)
    assert max(asked) <= 400
    starts = [*(store.start_of(number) for number in range(2)), store.num_tokens]
    tokens = [store.tokens(*ends).tolist() for ends in pairwise(starts)]
    if end == ".":
        assert [bpe.decode(ids) for ids in tokens] == texts  # cut within a word, which has other tokens
    else:
        assert tokens == whole
    assert (reports[-1].num_documents, reports[-1].num_tokens) == (2, sum(map(len, tokens)))


def test_a_long_document_with_a_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.training.data.tokenization._LONGEST_MASKED", 8)
    with pytest.raises(InputError, match="too long: got '9 characters', allowed: <= 8"):
        list(_parts([TextDocument(text="123456789", trained=(TextSpan(0, 1),))]))


def test_a_run_on_text_trains_and_validates(run: Run, text: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    run = with_data(run, source=str(text), tokenizer="bpe:300", evaluate=True)
    run = replace(run, global_batch=1)
    corpus = open_data(run, cache=tmp_path / "cache")
    assert isinstance(corpus.train, StreamSamples)
    assert corpus.tokenizer is not None
    assert corpus.validation is not None
    assert corpus.validation.num_samples >= 1
    batch = Batches(samples=corpus.train, global_batch=4, vocab=run.model.vocab).at(0)
    assert "number is" in corpus.tokenizer.decode(batch.tokens_BT[0].tolist())
    assert corpus.num_tokens is not None
    whole = open_data(with_data(run, source=str(text), tokenizer="bpe:300"), cache=tmp_path / "cache")
    assert whole.num_tokens is not None
    assert corpus.num_tokens < whole.num_tokens
    assert whole.validation is None


def test_a_run_on_answers_packs_whole_documents(run: Run, tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"{n}+1=", "completion": f"{n + 1}"}) for n in range(100)]
    (tmp_path / "sums.jsonl").write_text("\n".join(lines))
    run = replace(with_data(run, source=str(tmp_path / "sums.jsonl"), tokenizer="bytes", evaluate=True), global_batch=1)
    corpus = open_data(run, cache=tmp_path / "cache")
    assert isinstance(corpus.train, WholeSamples)
    sample = corpus.train.sample(0)
    counted = sample.labels_T[sample.labels_T >= 0]
    assert ByteTokenizer().decode(counted.tolist()).isdigit()
    assert (counted == 256).sum() == sample.documents_T.max() + 1  # every answer's end


def test_answers_that_are_all_cut_are_refused(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "long.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": "p" * 40, "completion": "yes"}) for _ in range(20)))
    data = {"source": str(file), "tokenizer": "bytes"}
    with pytest.raises(InputError, match=r"nothing to train on(.|\n)*20 records, 20 of them(.|\n)*raise data.seq"):
        open_data(with_data(run, **data), cache=tmp_path / "cache")
    longer = replace(with_data(run, **data), sequence_length=43)
    assert open_data(longer, cache=tmp_path / "cache").usage["training"]["num_cut"] == 0
    text = tmp_path / "text.jsonl"
    text.write_text("\n".join(json.dumps({"prompt": "1+1=", "completion": "2"}) for _ in range(100)))
    data = {"source": str(text), "validation": str(file), "tokenizer": "bytes", "evaluate": True}
    with pytest.raises(InputError, match=r"long.jsonl has nothing to train on"):
        open_data(with_data(run, **data), cache=tmp_path / "cache")


def test_every_batch_of_answers_has_a_label_and_the_rest_is_counted(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    prompts = ["p" * (40 if n % 4 else 3) for n in range(80)]  # three of four lose their answer
    file.write_text("\n".join(json.dumps({"prompt": p, "completion": "yes"}) for p in prompts))
    corpus = open_data(with_data(run, source=str(file), tokenizer="bytes"), cache=tmp_path / "cache")
    samples = [corpus.train.sample(n) for n in range(corpus.train.num_samples)]
    assert all((s.labels_T >= 0).sum() == 4 for s in samples)
    positions = 20 * corpus.train.sequence_length
    usage = corpus.usage
    lengths = usage["training"].pop("lengths")
    assert (lengths["tokens"]["total"], lengths["labels"]["total"]) == (60 * 44 + 20 * 7, 20 * 4)
    assert (lengths["shortest"], lengths["longest"]) == (1, 2)
    assert usage == {
        "sources": {},
        "training": {
            "num_documents": 80,
            "num_cut": 60,
            "num_without_labels": 60,
            "longest_tokens": 44,
            "num_samples": 20,
            "num_samples_without_labels": 60,
            "num_padded": 20,
            "label_ratio": sum(int((s.labels_T >= 0).sum()) for s in samples) / positions,
            "padding_ratio": sum(int((s.documents_T < 0).sum()) for s in samples) / positions,
        },
        "validation": {},
    }
    formats, note = corpus.notes
    assert formats.startswith("training data: ")
    assert "60 cut by data.sequence_length, 60 without a label" in note


def test_the_label_ratio_of_a_stream_is_that_of_its_samples(run: Run, text: Path, tmp_path: Path) -> None:
    corpus = open_data(with_data(run, source=str(text), tokenizer="bytes", evaluate=True), cache=tmp_path / "cache")
    assert corpus.validation is not None
    held_out = corpus.validation_usages["validation"]
    for samples, usage in ((corpus.train, corpus.train_usages["training"]), (corpus.validation, held_out)):
        labels = sum(int((samples.sample(n).labels_T >= 0).sum()) for n in range(samples.num_samples))
        assert usage is not None
        assert usage.label_ratio == labels / (samples.num_samples * samples.sequence_length) < 1
    assert corpus.notes == ()


def test_a_run_with_validation_data_of_its_own(run: Run, text: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("validation " * 100)
    run = with_data(run, source=str(text), tokenizer="bytes", validation=str(tmp_path / "other.txt"), evaluate=True)
    corpus = open_data(run, cache=tmp_path / "cache")
    assert corpus.validation is not None
    assert "validation" in ByteTokenizer().decode(corpus.validation.sample(1).tokens_T.tolist())


def test_a_run_on_token_files_needs_no_tokenizer(run: Run, tmp_path: Path) -> None:
    write_indexed(tmp_path / "x", [np.arange(512), np.arange(512)], dtype=np.uint16)
    corpus = open_data(with_data(run, source=str(tmp_path / "x")), cache=tmp_path / "cache")
    assert (corpus.num_tokens, corpus.tokenizer) == (1024, None)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("token", [-3, 512])
@pytest.mark.parametrize("is_large", [False, True])
def test_a_token_outside_of_the_vocabulary_is_refused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: int, is_large: bool
) -> None:
    if is_large:  # the range is then kept in the cache
        monkeypatch.setattr("meshwright.training.data.token_range.REMEMBERED_BYTES", 0)
    write_indexed(tmp_path / "x", [np.arange(512), np.array([1, token, 2])], dtype=np.int32)
    write_indexed(tmp_path / "good", [np.arange(512)], dtype=np.int32)
    cache, bad, good = tmp_path / "cache", str(tmp_path / "x"), str(tmp_path / "good")
    for data in ({"source": bad}, {"source": bad}, {"source": good, "validation": bad, "evaluate": True}):
        with pytest.raises(InputError, match=rf"x\.bin has a token(.|\n)*{token}(.|\n)*0 to 511"):
            open_data(with_data(run, **data), cache=cache)
    open_data(with_data(run, source=good), cache=cache)
    write_indexed(tmp_path / "x", [np.arange(511), np.arange(2)], dtype=np.int32)
    open_data(with_data(run, source=bad), cache=cache)  # written anew, read anew
    assert (cache / "token-ranges").exists() == is_large


def test_missing_data_is_found_without_reading_and_the_hub_is_not_asked(run: Run, text: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such data"):
        require_sources(with_data(run, source=str(tmp_path / "none.jsonl")))
    with pytest.raises(InputError, match="no such data"):
        require_sources(with_data(run, source=str(text), validation=str(tmp_path / "none.txt"), evaluate=True))
    require_sources(with_data(run, source="owner/name?split=train"))
    require_sources(with_data(run, source=str(text)))
    require_sources(run)


def test_a_synthetic_run_is_endless(run: Run, tmp_path: Path) -> None:
    corpus = open_data(with_data(run, evaluate=True), cache=tmp_path)
    assert corpus.num_tokens is None
    assert corpus.validation is not None
    assert not np.array_equal(corpus.train.sample(0).tokens_T, corpus.validation.sample(0).tokens_T)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"source": "{text}"}, r"data.tokenizer is missing(.|\n)*bpe:512"),
        ({"source": "{text}", "tokenizer": "bytes", "vocab": 100}, "more tokens than the model"),
        ({"source": "{tmp}/short.txt", "tokenizer": "bytes"}, "too small: one global batch needs 4 samples of 32"),
        ({"source": "{tmp}/none.txt", "tokenizer": "bytes"}, "no such data"),
        ({"source": "{tmp}/empty.txt", "tokenizer": "bytes"}, "the data has no text"),
    ],
)
def test_data_that_cannot_be_trained_on_is_bad_input(
    run: Run, text: Path, tmp_path: Path, data: dict[str, Any], message: str
) -> None:
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "empty.txt").write_text("")
    if vocab := data.pop("vocab", None):
        run = replace(run, model=replace(run.model, vocab=vocab))
    named = {key: value.format(text=text, tmp=tmp_path) for key, value in data.items()}
    with pytest.raises(InputError, match=message):
        open_data(with_data(run, **named), cache=tmp_path / "cache")


@pytest.mark.slow
def test_the_default_corpus_is_ready_in_seconds(run: Run, tmp_path: Path) -> None:
    run = replace(run, model=replace(run.model, vocab=4096))
    data: Corpus = open_data(
        with_data(run, source="python-stdlib", tokenizer="bpe:4096", evaluate=True), cache=tmp_path
    )
    assert data.num_tokens is not None
    assert data.num_tokens > 2e6
    assert isinstance(open_source("python-stdlib"), DocumentSource)
