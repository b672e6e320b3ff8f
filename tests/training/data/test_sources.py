"""Sources: every kind of file, records, conversations, and what cannot be read."""

from __future__ import annotations

import gzip
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from meshwright.errors import InputError, MissingDependencyError
from meshwright.training.data.chat import ChatML, JinjaChat
from meshwright.training.data.conversations import Conversation
from meshwright.training.data.documents import TextDocument
from meshwright.training.data.megatron import write_indexed
from meshwright.training.data.records import RecordCounts, RecordRules, read_records
from meshwright.training.data.source import DocumentSource, TokenFiles, open_source


def texts(name: str | Path) -> list[str]:
    source = open_source(str(name))
    assert isinstance(source, DocumentSource)
    return [document.text for document in source.documents()]


def write_lines(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("\n".join(json.dumps(r) for r in records) + "\n\n", encoding="utf-8")
    return path


def test_a_folder_a_glob_and_a_file_are_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "b.txt").write_bytes("\ufeffbé\r\nx".encode())
    (tmp_path / "a.md").write_text("a")
    (tmp_path / "sub" / "c.txt.gz").write_bytes(gzip.compress(b"c"))
    (tmp_path / "image.png").write_bytes(b"\x89")
    (tmp_path / ".hidden" / "d.txt").write_text("d")
    assert texts(tmp_path) == ["a", "bé\r\nx", "c"]
    assert texts(f"{tmp_path}/*.txt") == ["bé\r\nx"]
    assert texts(f"{tmp_path}/**/c*") == ["c"]
    assert texts(tmp_path / "a.md") == ["a"]


def test_a_relative_glob_begins_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a1.txt").write_text("one")
    monkeypatch.chdir(tmp_path)
    assert texts("a?.txt") == texts("*.txt") == ["one"]


def test_json_lines_hold_text_answers_or_conversations(tmp_path: Path) -> None:
    kinds = {
        "a": {"text": "plain"},
        "b": {"prompt": "1+1=", "completion": "2"},
        "c": {"question": "why?", "answer": "so"},
        "d": {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]},
    }
    for name, record in kinds.items():
        write_lines(tmp_path / f"{name}.jsonl", record)
    source = open_source(str(tmp_path))
    assert isinstance(source, DocumentSource)
    plain, pair, question, chat = source.documents()
    assert plain == TextDocument(text="plain")
    assert [pair.text[a:b] for a, b in pair.trained or ()] == ["2"]
    assert [question.text[a:b] for a, b in question.trained or ()] == ["so"]
    assert [chat.text[a:b] for a, b in chat.trained or ()] == ["yo<|im_end|>"]


def test_the_key_of_the_text_can_be_named(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "x.jsonl", {"body": "a", "text": "no"}, {"body": "b"})
    assert texts(f"{file}?text=body") == ["a", "b"]


def test_parquet_is_read_by_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": ["a", "b"], "n": [1, 2]}), tmp_path / "x.parquet")
    assert texts(tmp_path / "x.parquet") == texts(f"{tmp_path / 'x.parquet'}?text=text") == ["a", "b"]
    with pytest.raises(InputError, match=r"no column.*'body'.*text, n"):
        texts(f"{tmp_path / 'x.parquet'}?text=body")
    (tmp_path / "y.parquet").write_bytes(b"PAR1 broken")
    with pytest.raises(InputError, match="cannot read"):
        texts(tmp_path / "y.parquet")


@pytest.fixture
def datasets() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other libraries, at import
        return pytest.importorskip("datasets")


@pytest.mark.filterwarnings("ignore")
def test_a_saved_data_set_is_read_by_split(tmp_path: Path, datasets: Any) -> None:
    one = datasets.Dataset.from_dict({"text": ["a", "b"], "n": [1, 2]})
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": one, "test": one.select([1])}).save_to_disk(tmp_path / "both")
    assert texts(tmp_path / "one") == texts(tmp_path / "both") == ["a", "b"]
    assert texts(f"{tmp_path / 'both'}?split=test&text=text") == ["b"]
    first, second = open_source(str(tmp_path / "one")), open_source(f"{tmp_path / 'both'}?split=test")
    assert isinstance(first, DocumentSource)
    assert isinstance(second, DocumentSource)
    assert first.fingerprint != second.fingerprint
    with pytest.raises(InputError, match=r"no such split.*train, test"):
        open_source(f"{tmp_path / 'both'}?split=dev")
    with pytest.raises(InputError, match="no column"):
        texts(f"{tmp_path / 'one'}?text=body")


@pytest.mark.filterwarnings("ignore")
def test_a_data_set_by_name_goes_through_the_library(monkeypatch: pytest.MonkeyPatch, datasets: Any) -> None:
    def load_dataset(name: str, config: str | None, *, split: str) -> Any:
        if name != "some/corpus":
            raise ConnectionError(f"Couldn't reach {name!r}\nmore")
        return datasets.Dataset.from_dict({"text": [f"{config} {split}"]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert texts("some/corpus?config=raw&split=test") == ["raw test"]
    with pytest.raises(InputError, match=r"cannot load it: Couldn't reach 'other'"):
        open_source("other")


def test_a_missing_library_names_its_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("datasets", "pyarrow", "jinja2"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(MissingDependencyError, match="pip install datasets"):
        open_source("some/corpus")
    (tmp_path / "x.parquet").write_bytes(b"")
    with pytest.raises(MissingDependencyError, match="pip install pyarrow"):
        texts(tmp_path / "x.parquet")
    with pytest.raises(MissingDependencyError, match="pip install jinja2"):
        JinjaChat(template="", marks={}).render(Conversation(messages=[{"role": "user", "content": ""}]))


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_token_files_are_named_with_or_without_suffix(tmp_path: Path, suffix: str) -> None:
    write_indexed(tmp_path / "x_text_document", [np.arange(3)], dtype=np.uint16)
    source = open_source(f"{tmp_path / 'x_text_document'}{suffix}")
    assert isinstance(source, TokenFiles)
    assert source.prefixes == (tmp_path / "x_text_document",)


def test_the_standard_library_is_a_corpus_of_megabytes() -> None:
    source = open_source("python-stdlib")
    assert isinstance(source, DocumentSource)
    assert source.num_bytes is not None
    assert source.num_bytes > 5e6
    assert sum(len(d.text) for d in source.documents()) > 5e6


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text": 1}\n', r"x\.jsonl:2: 'text' is not text: got 'int'"),
        (b'{"text": "a"}\n\n{"a": 1, "b": 2}\n', r"x\.jsonl:3: a record of no known format: got 'a, b'"),
        (b'{"text": "a"\n', r"x\.jsonl:1: not JSON"),
        (b"[1]\n", r"x\.jsonl:1: a line is one JSON object: got 'list'"),
        (b'{"text": "\xff"}\n', r"not UTF-8: byte 0xff near offset 10"),
        (b'{"messages": [{"role": "robot", "content": ""}]}\n', r"x\.jsonl:1: message 1: unknown role: got 'robot'"),
        (b'{"messages": [{"role": "user"}]}\n', r"x\.jsonl:1: message 1: content is not text: got 'null'"),
        (b'{"messages": ["hi"]}\n', r"x\.jsonl:1: message 1 is not an object"),
        (b'{"text": "\\ud800"}\n', r"x\.jsonl:1: half a character, which is not text: got 'U\+D800'"),
        (b'{"prompt": "a", "completion": null}\n', r"x\.jsonl:1: .*got 'prompt, completion \(null\)'"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=message):
        texts(tmp_path / "x.jsonl")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.txt", "no such data"),
        ("{tmp}/none", "no such data"),
        ("./none", "no such data"),
        ("a/b/c", "no such data"),
        ("some name", "no such data"),
        ("{tmp}/empty", "no readable file"),
        ("{tmp}/*.txt", "no readable file"),
        ("{tmp}/a.bin", "unknown kind"),
        ("{tmp}/a.md?txet=b", r"unknown option.*'txet'(.|\n)*did you mean 'text'"),
        ("python-stdlib?text=b", "allowed: none"),
        pytest.param("x" * 5000, "cannot open the data: File name too long", id="long"),
        ("{tmp}/**x", "cannot open the data: Invalid pattern"),
    ],
)
def test_a_name_without_data_is_bad_input(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.bin").write_bytes(b"")
    (tmp_path / "a.md").write_text("")
    with pytest.raises(InputError, match=message):
        open_source(name.format(tmp=tmp_path))


def test_unreadable_text_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match=r"x\.txt is not UTF-8: byte 0xe9 near offset 3"):
        texts(tmp_path)
    (tmp_path / "x.txt").write_bytes(b"")
    with pytest.raises(InputError, match="a text file has no keys"):
        texts(f"{tmp_path / 'x.txt'}?text=body")
    whole = gzip.compress(b"some text" * 9)
    for damaged in (whole[:-6], whole[:12] + b"\xff" * 8 + whole[20:], b"no gzip"):
        (tmp_path / "y.txt.gz").write_bytes(damaged)
        with pytest.raises(InputError, match=r"cannot read .*y\.txt\.gz"):
            texts(tmp_path / "y.txt.gz")


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CONVERSATION = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no"},
]


def test_a_template_of_the_tokenizer_marks_every_answer() -> None:
    pytest.importorskip("jinja2")
    chat = JinjaChat(template=TEMPLATE, marks={"bos_token": "<s>", "eos_token": "</s>"})
    document = chat.render(Conversation(messages=CONVERSATION))
    assert document.text == "<s>[system]be brief[user]hi[assistant]yo</s>[user]more[assistant]no</s>"
    assert [document.text[a:b] for a, b in document.trained or ()] == ["yo</s>", "no</s>"]
    assert document.is_rendered


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages|length }}{{ messages[-1]['content'] }}", "no fixed place"),
        ("{{ raise_exception('no system role') }}", "refuses the conversation: no system role"),
        ("{{ messages.", "cannot be used"),
        ("{{ messages.__class__.__mro__ }}", "cannot be used"),  # the sandbox holds
    ],
)
def test_a_template_that_cannot_be_used_is_bad_input(template: str, message: str) -> None:
    pytest.importorskip("jinja2")
    with pytest.raises(InputError, match=message):
        JinjaChat(template=template, marks={}).render(Conversation(messages=CONVERSATION))


def test_the_default_template_is_chat_ml() -> None:
    record = {"messages": CONVERSATION[1:3]}
    (document,) = read_records([("x:1", record)], rules=RecordRules(), chat=ChatML(), counts=RecordCounts())
    assert document.text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
