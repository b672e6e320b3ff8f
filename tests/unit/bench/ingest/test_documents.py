"""Documents of folders and files: what is read, and what is skipped for which reason."""

from __future__ import annotations

import json
import os

import pytest

from meshwright.bench.ingest.documents import Document, DocumentTally, SkippedDocumentError, SkipReason, open_source
from meshwright.errors import InputError


def reason_of(path) -> SkipReason | None:
    try:
        Document(path=path).read()
    except SkippedDocumentError as skipped:
        return skipped.reason
    return None


def test_what_is_no_text_is_skipped_for_its_reason(tmp_path):
    for name, data in {
        "good.txt": "Grüße, 世界 🙂".encode(), "bom.txt": b"\xef\xbb\xbfhello", "empty": b"", "blank": b" \n\t",
        "binary": b"ELF\0\1\2", "latin1": "Grüße".encode("latin-1"), "utf16": "hello".encode("utf-16"),
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(data)
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "folder.txt").mkdir()
    os.mkfifo(tmp_path / "pipe")  # a read would wait for ever
    reasons = {path.name: reason_of(path) for path in tmp_path.iterdir()}
    assert reasons == {
        "good.txt": None, "bom.txt": None, "empty": SkipReason.EMPTY, "blank": SkipReason.EMPTY,
        "binary": SkipReason.BINARY, "latin1": SkipReason.NOT_UTF8, "utf16": SkipReason.BINARY,
        "broken": SkipReason.UNREADABLE, "loop": SkipReason.UNREADABLE, "folder.txt": SkipReason.NOT_A_FILE,
        "pipe": SkipReason.NOT_A_FILE,
    }  # fmt: skip
    assert Document(path=tmp_path / "bom.txt").read() == "hello"


def test_a_folder_is_a_seeded_sample_in_any_first_part(tmp_path):
    for number in range(30):
        (tmp_path / f"{number}.md").write_text(f"text {number}")
    (tmp_path / "other.txt").write_text("x")
    names = [[d.path.name for d in open_source(tmp_path, pattern="*.md", seed=s).documents] for s in (1, 1, 2)]
    assert names[0] == names[1] != names[2]
    assert sorted(names[0]) == sorted(names[2]) == sorted(f"{n}.md" for n in range(30))
    assert names[0] != sorted(names[0])


def test_lines_of_a_file_are_documents(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"body": "one"}\n\n"two \\u00e9"\n{"body": "three", "id": 3}\n', encoding="utf-8")
    source = open_source(path, text_key="body")
    assert sorted(d.read() for d in source.documents) == ["one", "three", "two é"]
    path.write_text("now something else entirely, and longer than it was before\n")
    assert {reason for d in source.documents for reason in [_reason(d)]} == {SkipReason.UNREADABLE}


def _reason(document: Document) -> SkipReason | None:
    try:
        document.read()
    except SkippedDocumentError as skipped:
        return skipped.reason
    return None


@pytest.mark.parametrize(
    "line", ["{", "3", '{"text": 4}', '{"other": "x"}', "[" * 100_000, '"\udc80'.encode("utf-8", "surrogatepass")],
    ids=["json", "number", "kind", "key", "deep", "bytes"],
)  # fmt: skip
def test_a_wrong_line_is_refused_with_its_number(tmp_path, line):
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(json.dumps("fine").encode() + b"\n" + (line if isinstance(line, bytes) else line.encode()))
    with pytest.raises(InputError, match=r"corpus\.jsonl:2: not a document"):
        open_source(path)


def test_a_source_without_documents_is_refused(tmp_path):
    with pytest.raises(InputError, match="no documents"):
        open_source(tmp_path)
    with pytest.raises(InputError, match=r"match '\*\.md'"):
        open_source(tmp_path, pattern="*.md")
    with pytest.raises(InputError, match="no such folder"):
        open_source(tmp_path / "nowhere")
    (tmp_path / "one.txt").write_text("x")
    with pytest.raises(InputError, match="--pattern"):
        open_source(tmp_path / "one.txt", pattern="*.md")


def test_the_standard_library_is_the_default():
    source = open_source(None)
    assert source.name.startswith("standard library of Python 3.")
    assert len(source.documents) > 500
    assert all(d.path.suffix == ".py" and "site-packages" not in d.path.parts for d in source.documents)


def test_the_digest_depends_on_texts_and_their_limits():
    digests = []
    for texts in (["ab", "c"], ["a", "bc"], ["ab", "c"]):
        tally = DocumentTally()
        for text in texts:
            tally.add(text)
        digests.append(tally.sha256)
    assert digests[0] == digests[2] != digests[1]
