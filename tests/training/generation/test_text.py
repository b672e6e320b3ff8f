"""Text while tokens come: parts add up to the whole text, characters are whole, stop strings never show."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from meshwright.training.data.source import open_source
from meshwright.training.data.tokenizer import ByteTokenizer, JsonTokenizer
from meshwright.training.generation import TextStream

BYTES = ByteTokenizer()
TEXTS = st.text(st.sampled_from("ab <|end né漢🙂\n"), max_size=40)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    from meshwright.training.data import open_tokenizer

    folder = tmp_path_factory.mktemp("bpe")
    (folder / "corpus.txt").write_text("the quick brown fox né 漢字 jumps 🙂 over\n" * 20)
    source = open_source(str(folder / "corpus.txt"), cache=folder)
    return open_tokenizer("bpe:290", source=source, cache=folder)


@pytest.fixture(scope="module")
def sentencepiece():
    """As Llama 2's: a space is a mark before a word, the first one is dropped, unknown characters are bytes."""
    import json

    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {"</s>": 256, "\u2581a": 257, "\u2581b": 258, "a": 259}
    decoders = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    document = {
        "version": "1.0",
        "added_tokens": [],
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": True},
    }
    return JsonTokenizer(json.dumps(document), name="sp", config={"eos_token": "</s>"})


def parts_of(tokenizer, tokens, stops=()) -> tuple[list[str], TextStream]:
    stream, parts = TextStream(tokenizer, stops=stops), []
    for token in tokens:
        parts.append(stream.push(int(token)))
        if stream.is_stopped:
            return parts, stream
    return [*parts, stream.finish()], stream


@given(st.lists(st.integers(0, 255), max_size=40))
def test_parts_of_any_bytes_add_up(tokens):
    parts, stream = parts_of(BYTES, tokens)
    assert "".join(parts) == stream.text == BYTES.decode(tokens)


@given(TEXTS)
def test_a_part_never_ends_within_a_character(text):
    parts, _ = parts_of(BYTES, text.encode())
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


def test_parts_of_bpe_tokens_add_up(bpe):
    @given(st.lists(st.integers(0, bpe.vocab - 1), max_size=30))
    def add_up(tokens):
        parts, stream = parts_of(bpe, tokens)
        assert "".join(parts) == stream.text == bpe.decode(tokens)

    add_up()


def test_parts_of_words_and_bytes_add_up(sentencepiece):
    @given(st.lists(st.sampled_from(["né漢🙂", " a", " b", "a"]), max_size=10))
    def add_up(words):
        ids = {" a": [257], " b": [258], "a": [259]}
        tokens = [token for word in words for token in ids.get(word, word.encode())]
        parts, stream = parts_of(sentencepiece, tokens)
        assert "".join(parts) == stream.text == "".join(words).removeprefix(" ")

    add_up()


def test_spaces_between_tokens_come_with_the_later_one(sentencepiece):
    assert parts_of(sentencepiece, [257, 258, 259])[0] == ["a", " b", "a", ""]


@given(TEXTS, st.lists(st.text(st.sampled_from("ab<|end"), min_size=1, max_size=4), max_size=3))
def test_a_text_ends_before_its_first_stop_string(text, stops):
    found = [text.find(stop) for stop in stops if stop in text]
    parts, stream = parts_of(BYTES, text.encode(), stops)
    # the stop string that is whole first ends the text; a longer one may begin before it
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert stream.is_stopped == bool(found)
    assert "".join(parts) == stream.text
    assert text.startswith(stream.text)
    if found:
        first = min(ends)
        assert len(stream.text) == min(text[:first].find(s) for s in stops if s in text[:first])
    else:
        assert stream.text == text


def test_the_beginning_of_a_stop_string_is_held_back():
    stream = TextStream(BYTES, stops=["<|end|>"])
    assert [stream.push(b) for b in b"ab<|en"] == ["a", "b", "", "", "", ""]
    assert stream.push(ord("x")) == "<|enx"
    assert stream.finish() == ""
