"""Records as people have them: every format, found from its keys, reported, and refused where it is not clear."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from meshwright.errors import InputError, MissingDependencyError
from meshwright.training.data import json_stream
from meshwright.training.data.chat import ChatML
from meshwright.training.data.records import RecordCounts, read_records, rules_from_options
from meshwright.training.data.source import DocumentSource, open_source
from meshwright.training.data.tokenization import tokenise
from meshwright.training.data.tokenizer import ByteTokenizer

HI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
SHAREGPT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
HI_TEXT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"


def read(source: str | Path) -> tuple[list[str], RecordCounts]:
    found, counts = open_source(str(source)), RecordCounts()
    assert isinstance(found, DocumentSource)
    return [document.text for document in found.documents(counts=counts)], counts


def document_of(record: dict[str, Any], **rules: str) -> tuple[str, list[str]]:
    """The text of a record, and the parts that are trained on."""
    (found,) = read_records(
        [("x:1", record)], rules=rules_from_options(rules, name="x"), chat=ChatML(), counts=RecordCounts()
    )
    return found.text, [found.text[a:b] for a, b in found.trained or ()]


def error_of(record: dict[str, Any], **rules: str) -> str:
    with pytest.raises(InputError) as found:
        document_of(record, **rules)
    return str(found.value)


PARTS = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "messages": {"messages": HI},
    "parts": {"messages": [{"role": "user", "content": PARTS}, HI[1]]},
    "weights": {"messages": [HI[0], HI[1] | {"weight": 1}]},
    "sharegpt": {"conversations": SHAREGPT},
    "conversation": {"conversation": SHAREGPT},
    "roles": {"conversations": HI},
    "alpaca": {"instruction": "hi", "input": "", "output": "yo"},
    "dolly": {"instruction": "hi", "context": "", "response": "yo"},
    "null": {"instruction": "hi", "input": None, "output": "yo", "messages": None, "text": None},
    "pair of lists": {"prompt": HI[:1], "completion": HI[1:]},
    "JSON text": {"messages": json.dumps(HI)},
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_same_conversation_in_every_format(name: str) -> None:
    assert document_of(CONVERSATIONS[name]) == (HI_TEXT, ["yo<|im_end|>"])


def test_what_stands_beside_a_conversation_is_part_of_it() -> None:
    system = "<|im_start|>system\nbe brief<|im_end|>\n"
    assert document_of({"system": "be brief", "conversations": SHAREGPT})[0] == system + HI_TEXT
    alpaca = {"instruction": "hi", "output": "yo", "system": "be brief", "history": [["a", "b"]]}
    text, trained = document_of(alpaca)
    assert text.startswith(system + "<|im_start|>user\na<|im_end|>")
    assert trained == ["b<|im_end|>", "yo<|im_end|>"]
    assert document_of({"instruction": "add", "input": "1 2", "output": "3"})[0].startswith(
        "<|im_start|>user\nadd\n1 2<|im_end|>"
    )


def test_flags_choose_the_answers() -> None:
    talk = [*HI, HI[0], {"role": "assistant", "content": "no"}]
    off = {"train": False}
    assert document_of({"messages": talk}, answers="last")[1] == ["no<|im_end|>"]
    assert document_of({"messages": [*talk[:3], talk[3] | {"weight": 0}]})[1] == ["yo<|im_end|>"]
    assert document_of({"messages": [talk[0], talk[1] | off, *talk[2:]]})[1] == ["no<|im_end|>"]
    assert document_of({"messages": [talk[0] | off, talk[1] | off]})[1] == []
    assert "weight: got 0.5, allowed: true, false" in error_of({"messages": [HI[0], HI[1] | {"weight": 0.5}]})
    assert "only assistant messages" in error_of({"messages": [HI[0] | {"train": True}, HI[1]]})
    assert "contradict" in error_of({"messages": [HI[0], HI[1] | {"weight": 1, "train": False}]})


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "x:1: a record of no known format: got 'no keys'"),
        ({"prompt": "a"}, "a record of no known format: got 'prompt'"),
        ({"text": "a", "messages": HI}, "several formats: messages and text"),
        ({"instruction": "a", "output": "b", "text": "c"}, "several formats: alpaca and text"),
        ({"messages": HI, "conversations": SHAREGPT}, "several formats: messages and sharegpt"),
        ({"prompt": "a", "completion": "b", "response": "c"}, "several keys may be meant"),
        ({"text": 7}, "'text' is not text: got 'int'"),
        ({"instruction": 7, "output": "b"}, "'instruction' is not text: got 'int'"),
        ({"messages": []}, "a conversation is a list of messages"),
        ({"messages": "not JSON"}, "messages is text that is not JSON"),
        ({"messages": [{"role": "user", "content": 7}]}, "message 1: content is not text: got 'int'"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "part 1 of its content is not text: got 'str'"),
        (
            {"messages": [{"role": "user", "content": [PARTS[0], {"type": "image_url", "image_url": {}}]}]},
            "message 1: part 2 of its content is not text: got 'image_url', allowed: text",
        ),
        ({"conversations": [{"from": "alien", "value": "a"}]}, "message 1: unknown speaker: got 'alien'"),
        ({"conversations": [{"from": "human", "content": "a"}]}, "mixes from and value with role and content"),
        ({"messages": HI, "tools": [{"name": "f"}]}, "has tools, which the chat template does not write"),
        ({"messages": HI, "tools": "{"}, "tools is text that is not JSON"),
        ({"system": "a", "messages": [{"role": "system", "content": "b"}]}, "without a system message"),
        ({"instruction": "a", "output": "b", "history": [["a"]]}, "history is a list of pairs"),
    ],
)  # fmt: skip
def test_a_record_that_is_not_clear_is_refused(record: dict[str, Any], message: str) -> None:
    assert message in error_of(record)


def answers_of(record: dict[str, Any], **rules: str) -> list[tuple[str, str]]:
    """Of each document of a record the text, and what of it is trained on."""
    found = read_records(
        [("x:1", record)], rules=rules_from_options(rules, name="x"), chat=ChatML(), counts=RecordCounts()
    )
    return [(d.text, "".join(d.text[a:b] for a, b in d.trained or ())) for d in found]


BAD = [{"role": "assistant", "content": "no"}]
BAD_TEXT = HI_TEXT.replace("yo", "no")


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": HI[:1], "chosen": HI[1:], "rejected": BAD},
        {"chosen": HI, "rejected": HI[:1] + BAD},
        {"prompt": "hi", "chosen": HI, "rejected": HI[:1] + BAD, "score_chosen": 5.0},
        {"prompt": json.dumps(HI[:1]), "chosen": json.dumps(HI[1:]), "rejected": json.dumps(BAD)},
        {"chosen": [SHAREGPT[0], SHAREGPT[1]], "rejected": [SHAREGPT[0], {"from": "gpt", "value": "no"}]},
    ],
)
def test_pairs_of_conversations_are_two_documents_with_one_prompt(record: dict[str, Any]) -> None:
    assert answers_of(record) == [(HI_TEXT, "yo<|im_end|>"), (BAD_TEXT, "no<|im_end|>")]


@pytest.mark.parametrize(
    "record", [{"prompt": "1+1=", "chosen": "2", "rejected": "30"}, {"chosen": "1+1=2", "rejected": "1+1=30"}]
)
def test_pairs_of_texts_are_two_documents_with_one_prompt(record: dict[str, Any]) -> None:
    assert answers_of(record) == [("1+1=2", "2"), ("1+1=30", "30")]


def test_a_space_before_an_answer_is_its_own() -> None:
    assert [a for _, a in answers_of({"chosen": "Say: yes", "rejected": "Say: no"})] == [" yes", " no"]


def test_a_pair_with_an_empty_text_is_counted_whole() -> None:
    counts = RecordCounts()
    record = {"prompt": "", "chosen": "", "rejected": "no"}
    rules = rules_from_options({}, name="x")
    assert list(read_records([("x:1", record)], rules=rules, chat=ChatML(), counts=counts)) == []
    assert counts.num_empty == 1


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "hi", "chosen": HI[1:], "rejected": BAD}, "prompt is text, and the answers are lists of messages"),
        ({"prompt": "hi", "chosen": "yo", "rejected": BAD}, "'rejected' is not text"),
        ({"prompt": "hi", "chosen": HI[1], "rejected": BAD[0]}, "a conversation is a list of messages"),
        ({"prompt": "hi", "chosen": "yo", "rejected": "no", "completion": "yo"}, "several formats"),
    ],
)
def test_a_pair_that_is_not_clear_is_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        answers_of(record)


def test_a_format_can_be_forced_and_formats_are_not_mixed(tmp_path: Path) -> None:
    both = {"instruction": "hi", "output": "yo", "text": "plain"}
    assert document_of(both, format="text") == ("plain", [])
    assert document_of(both, format="alpaca") == (HI_TEXT, ["yo<|im_end|>"])
    assert "the record is not of the format messages" in error_of(both, format="messages")
    file = tmp_path / "x.jsonl"
    file.write_text('{"text": "a"}\n{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(InputError, match=r"x\.jsonl:2: a record of the format prompt after .* text"):
        read(file)
    with pytest.raises(InputError, match=r"unknown format: got 'alpacca'(.|\n)*'alpaca'"):
        open_source(f"{file}?format=alpacca")
    with pytest.raises(InputError, match="contradict"):
        open_source(f"{file}?format=prompt&text=a")


@pytest.mark.parametrize("kind", ["parquet", "arrow", "hub"])
def test_a_null_text_of_a_column_is_named(tmp_path: Path, kind: str) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": ["a b", None], "id": [1, 2]})
    place = tmp_path / f"x.{kind}"
    if kind == "parquet":
        parquet.write_table(table, place)
    elif kind == "arrow":
        with pyarrow.ipc.new_file(str(place), table.schema) as file:
            file.write_table(table)
    else:
        pytest.importorskip("datasets").Dataset(table).save_to_disk(str(place))
    with pytest.raises(InputError, match=r"row \d: a record of no known format: got 'text \(null\), id'") as refused:
        read(place)
    assert "remove the records whose text is null" in str(refused.value.hint)


def test_formats_and_keys_without_a_use_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    named = [HI[0] | {"name": "Ann"}, HI[1]]
    file.write_text("".join(json.dumps({"id": n, "messages": named}) + "\n" for n in range(3)))
    _, counts = read(file)
    assert counts.as_json() == {
        "formats": {"messages": 3},
        "unused_keys": {"id": 3, "messages[].name": 3},
        "num_empty": 0,
        "num_conversations": 3,
    }
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.jsonl").write_text('{"text": ""}\n{"text": "a"}\n')
    (tmp_path / "sub" / "b.zip").write_bytes(b"PK")
    source = open_source(str(tmp_path / "sub"))
    assert isinstance(source, DocumentSource)
    assert source.notes == ("1 files of other kinds are not read (.zip)",)
    for _ in range(2):  # built, and from the cache
        store = tokenise(source, ByteTokenizer(), cache=tmp_path / "cache")
        assert store.counts == {"formats": {"text": 2}, "unused_keys": {}, "num_empty": 1, "num_conversations": 0}


# --- files ---


def test_json_arrays_objects_and_lines_are_the_same(tmp_path: Path) -> None:
    records = [{"text": f"ä\u2028{n}"} for n in range(50)]
    lines = "\r\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    contents = {
        "a.json": json.dumps(records, indent=2),
        "b.json": "\ufeff" + json.dumps(records, ensure_ascii=False),
        "c.json": lines,
        "d.jsonl": "\ufeff" + lines + "\r\n\r\n",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content.encode())
        assert read(tmp_path / name)[0] == [record["text"] for record in records], name
    (tmp_path / "e.json").write_text("[]")
    assert read(tmp_path / "e.json")[0] == []


def test_a_large_array_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "_CHUNK_CHARACTERS", 1 << 16)
    file, num_records = tmp_path / "x.json", 4000
    with file.open("w") as stream:
        stream.write("[" + ",\n".join(json.dumps({"text": "x" * 5000}) for _ in range(num_records)) + "]")
    source = open_source(str(file))
    assert isinstance(source, DocumentSource)
    tracemalloc.start()
    assert sum(len(document.text) for document in source.documents()) == 5000 * num_records
    assert tracemalloc.get_traced_memory()[1] < file.stat().st_size / 10
    tracemalloc.stop()


def test_a_record_larger_than_what_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "_CHUNK_CHARACTERS", 100)
    texts = ["a" * 12345, 'b"\\' * 777, "c"]
    (tmp_path / "x.json").write_text(json.dumps([{"text": text} for text in texts], indent=1))
    assert read(tmp_path / "x.json")[0] == texts


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.json", b'[{"text": "a"},\n {"text": "b"', r"x\.json:2: not JSON: the file is truncated"),
        ("x.json", b'[{"text": "a"}', "the array has no end"),
        ("x.json", b'[{"text": "a"}\n{"text": "b"}]', r"x\.json:2: not JSON: expected , or \]"),
        ("x.json", b'[{"text": "a"}] more', "text after the array"),
        ("x.json", b'[{"text": "a"},\n7]', r"x\.json:2: an element is not a JSON object"),
        ("x.json", b'[{"text": "a"},]', "an element is not a JSON object"),
        ("x.json", b'{"data": [{"text": "a"}]}', "no known format: got 'data'"),
        ("x.json", b"7", "not a JSON object"),
        ("x.jsonl", b'{"text": "a", "text": "b"}', r"x\.jsonl:1: not JSON: the key 'text' is there twice"),
        ("x.json", b'[\n{"text": "a", "text": "b"}]', r"x\.json:2: not JSON: the key 'text' is there twice"),
        ("x.jsonl", b'{"text": ' + b"[" * 100_000, r"x\.jsonl:1: not JSON"),
        ("x.json", b'{"text": ' + b"[" * 100_000, r"x\.json:1: not JSON"),
        ("x.jsonl", b'{"text": "a\x00b"}', "Invalid control character"),
        ("x.txt", "text".encode("utf-16-le"), "NUL bytes: it is not text"),
        ("x.csv", b"a,a\n1,2\n", r"x\.csv:1: the first row names the columns, each once"),
        ("x.csv", b"text,n\na,1\nb\n", r"x\.csv:3: a row of another number of fields: got 1, allowed: 2"),
        ("x.csv", b'text\n"a" b\n', r"x\.csv:2: not ','-separated values"),
        ("x.csv", b'text\n"never closed\n', "not ','-separated values"),
        ("x.csv", b"text\na\x00b\n", "NUL"),
        ("x.csv", b"text\n\xff\n", "not UTF-8"),
        ("x.csv", b"a,b\n1,2\n", "no known format: got 'a, b'"),
        ("x.jsonl.gz", gzip.compress(b'{"text": "abc"}\n' * 99, mtime=0)[:-20], "cannot read .*end-of-stream"),
        ("x.jsonl.bz2", bz2.compress(b'{"text": "abc"}\n' * 99)[:-9], "cannot read"),
        ("x.jsonl.xz", lzma.compress(b'{"text": "abc"}\n' * 99)[:-9], "cannot read"),
        ("x.jsonl.gz", b"not gzip", "cannot read"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        read(tmp_path / name)


def test_tables_of_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes('\ufeffprompt,completion,id\r\n"a, ""b""\r\nc",d,1\r\n\r\ne,,2\r\n'.encode())
    texts, counts = read(tmp_path / "a.csv")
    assert texts == ['a, "b"\r\ncd', "e"]
    assert counts.as_json()["unused_keys"] == {"id": 2}
    (tmp_path / "b.tsv").write_text("text\tn\n" + "x" * 300_000 + "\t1\n")
    assert read(tmp_path / "b.tsv")[0] == ["x" * 300_000]
    (tmp_path / "c.csv").write_text("messages\n" + '"' + json.dumps(HI).replace('"', '""') + '"\n')
    assert read(tmp_path / "c.csv")[0] == [HI_TEXT]
    (tmp_path / "d.csv").write_text("")
    assert read(tmp_path / "d.csv")[0] == []
    with pytest.raises(InputError, match=r"no column.*'body'.*text, n"):
        read(f"{tmp_path / 'b.tsv'}?text=body")


def test_compressed_files_are_the_same_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b'{"text": "abc"}\n'
    for suffix, compress in ((".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)):
        (tmp_path / f"x.jsonl{suffix}").write_bytes(compress(content))
        assert read(tmp_path / f"x.jsonl{suffix}")[0] == ["abc"]
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    (tmp_path / "x.jsonl.zst").write_bytes(b"")
    with pytest.raises(MissingDependencyError, match="pip install zstandard"):
        read(tmp_path / "x.jsonl.zst")


def test_arrow_files_and_streams_hold_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    rows = pyarrow.table({"messages": [HI, [*HI, HI[0] | {"name": "Ann"}]]})
    with pyarrow.ipc.new_file(str(tmp_path / "a.arrow"), rows.schema) as writer:
        writer.write_table(rows)
    with pyarrow.ipc.new_stream(str(tmp_path / "b.arrow"), rows.schema) as writer:
        writer.write_table(rows)
    for name in ("a", "b"):
        texts, counts = read(tmp_path / f"{name}.arrow")
        assert texts[0] == HI_TEXT
        assert counts.as_json()["unused_keys"] == {"messages[].name": 1}  # null in all other messages
    (tmp_path / "c.arrow").write_bytes(b"no arrow")
    with pytest.raises(InputError, match="cannot read"):
        read(tmp_path / "c.arrow")


def test_links_that_lead_in_circles_and_empty_folders(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_text("once")
    (tmp_path / "a" / "loop").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "self.txt").symlink_to(tmp_path / "a" / "self.txt")
    assert read(tmp_path / "a")[0] == ["once"]
    with pytest.raises(InputError, match="no such data"):
        open_source(str(tmp_path / "a" / "self.txt"))
    (tmp_path / "b.jsonl").mkdir()
    with pytest.raises(InputError, match="no readable file there"):
        open_source(str(tmp_path / "b.jsonl"))


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"text": "a"}\n')
    source = open_source(str(file))
    assert isinstance(source, DocumentSource)
    assert source.fingerprint
    file.write_text('{"text": "ab"}\n')
    with pytest.raises(InputError, match="was changed while it was read"):
        tokenise(source, ByteTokenizer(), cache=tmp_path / "cache")
    assert not list((tmp_path / "cache" / "tokens").glob("[0-9a-f]*"))
    os.utime(file, ns=(0, 0))
    assert read(file)[0] == ["ab"]


def test_zstandard_files_are_the_same_text_and_a_cut_one_is_refused(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    frames = [zstandard.compress(f'{{"text": "{word * 9999}"}}\n'.encode()) for word in ("ab", "cd")]
    (tmp_path / "x.jsonl.zst").write_bytes(b"".join(frames))  # as pzstd writes them: frames one after the other
    assert read(tmp_path / "x.jsonl.zst")[0] == ["ab" * 9999, "cd" * 9999]
    (tmp_path / "x.jsonl.zst").write_bytes(frames[0][:-5])
    with pytest.raises(InputError, match="cannot read"):
        read(tmp_path / "x.jsonl.zst")
    (tmp_path / "x.jsonl.zst").write_bytes(b"not zstandard")
    with pytest.raises(InputError, match="cannot read"):
        read(tmp_path / "x.jsonl.zst")
