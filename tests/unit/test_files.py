"""Files that are either whole or absent, and documents that are what they say."""

from __future__ import annotations

import errno
import json
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
from tests.record_folders import write_every_kind

from meshwright.errors import InputError, NewerFormatError
from meshwright.files import (
    append,
    document_of,
    naming,
    refused_with,
    require_format,
    swap_names,
    sync_tree,
    write_atomically,
)


def test_writes_utf_8(tmp_path):
    path = tmp_path / "out.json"
    write_atomically(path, "µ = 1\n")
    assert path.read_bytes() == "µ = 1\n".encode()
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_replaces_what_was_there_with_the_rights_that_the_user_gives(tmp_path, umask, mode):
    path = tmp_path / "out.json"
    path.write_text("old")
    before = os.umask(umask)
    try:
        write_atomically(path, "new")
    finally:
        os.umask(before)
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == mode


def test_what_a_killed_writer_left_is_removed_and_what_others_write_now_is_not(tmp_path):
    left, now, other = (tmp_path / name for name in (".out.json.1a2b3c4d.partial", ".a.json.5e6f.partial", ".env"))
    for path in (left, now, other):
        path.write_text("half")
    for path in (left, other):
        os.utime(path, (0, 0))
    write_atomically(tmp_path / "another.json", "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == [now.name, other.name, "another.json"]


def test_a_pipe_is_written_to_and_keeps_its_name(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK)) as reader:
        write_atomically(path, "new")
        assert reader.read() == "new"
    assert path.is_fifo()
    assert [p.name for p in tmp_path.iterdir()] == ["pipe"]


def test_an_open_file_is_written_to_by_its_number(tmp_path):
    with (tmp_path / "out").open("w") as stream:
        write_atomically(Path(f"/dev/fd/{stream.fileno()}"), "new")
    assert (tmp_path / "out").read_text() == "new"


def test_a_name_in_another_encoding_becomes_escapes(tmp_path):
    write_atomically(tmp_path / "page.html", os.fsdecode(b"n\xff"))
    assert (tmp_path / "page.html").read_text() == "n\\udcff"


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "out.json"
    path.write_text("old")

    def fail(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_what_is_appended_and_trees_survive_a_power_cut(tmp_path, unsynced):
    tree = tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    for name in ("a", "deep/b"):
        (tree / name).write_text("text\n")
    (tree / "deep" / "link").symlink_to("nowhere")
    assert unsynced(tree) == ["a", "b"]
    sync_tree(tree)
    assert unsynced(tree) == []
    append(tree / "a", "and µ\n")
    assert unsynced(tree) == []
    assert (tree / "a").read_text() == "text\nand µ\n"


@pytest.mark.parametrize("torn", ["", "ha", "\0\0"])
def test_half_a_line_goes_before_the_next_is_appended(tmp_path, torn):
    for before in ("", "first\nsecond\n"):
        (tmp_path / "log").write_text(before + torn)
        append(tmp_path / "log", "third\n")
        assert (tmp_path / "log").read_text() == before + "third\n"


@pytest.mark.parametrize(("code", "raises"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_a_file_system_that_syncs_no_folders_is_no_error_and_a_broken_disk_is(tmp_path, monkeypatch, code, raises):
    def fail(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=os.strerror(code)) if raises else nullcontext():
        sync_tree(tmp_path)


def test_a_killed_writer_does_not_show(tmp_path, monkeypatch):
    """Until the rename the new text has another, hidden name."""
    seen: list[str] = []

    def look(self: Path, target: Path) -> Path:
        seen.extend(p.name for p in tmp_path.iterdir())
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", look)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "out.json", "new")
    assert len(seen) == 1
    assert seen[0].startswith(".out.json.")
    assert list(tmp_path.iterdir()) == []


def test_names_are_swapped_in_one_step_or_stay(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if swap_names(tmp_path / "a", tmp_path / "b"):
        assert [p.name for p in (tmp_path / "a").iterdir()] == ["b"]
        assert [p.name for p in (tmp_path / "b").iterdir()] == ["a"]
    assert not swap_names(tmp_path / "a", tmp_path / "absent")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_a_missing_folder_is_the_callers(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "absent" / "out.json", "x")


def test_an_error_of_a_full_disk_names_the_file(tmp_path):
    with pytest.raises(OSError, match="No space left") as caught, naming(tmp_path / "out.json"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert caught.value.filename == str(tmp_path / "out.json")
    with pytest.raises(FileNotFoundError) as caught, naming(tmp_path):
        (tmp_path / "absent").read_text()
    assert caught.value.filename == str(tmp_path / "absent")


@pytest.mark.parametrize(("document", "got"), [({"schema": "b 1"}, "got 'b 1'"), ({}, "no list"), ([1], "got 'list'")])
def test_a_document_of_another_schema_is_refused(document, got):
    with pytest.raises(InputError) as raised:
        document_of(document, schema="a 1", refusal="no list")
    assert got in raised.value.message
    assert raised.value.message.endswith("allowed: a 1")
    assert document_of({"schema": "a 1"}, schema="a 1", refusal="no list") == {"schema": "a 1"}


@pytest.mark.parametrize(
    ("document", "schema"),
    [
        ({"schema": "a 3"}, "a 2"),
        ({"schema": "a 99999999999999999999"}, "a 2"),
        ({"format": 2}, ""),
        ({"format": "7"}, ""),
    ],
)
def test_a_newer_format_is_refused_by_name(document, schema):
    with pytest.raises(NewerFormatError) as raised:
        require_format(document, where="x.json", schema=schema)
    (got,) = document.values()
    assert raised.value.message == f"x.json: unknown format: got {got!r}, allowed: {schema or 1}"
    assert "newer Meshwright" in str(raised.value.hint)


@pytest.mark.parametrize("document", [{}, {"format": 1}, {"format": None}, [1], None])
def test_what_names_no_format_is_of_the_first(document):
    require_format(document, where="x.json")


def test_records_of_a_newer_meshwright_are_refused_by_name(tmp_path, meshwright):
    write_every_kind(tmp_path)
    sidecars = {path: json.loads(path.read_text()) for path in tmp_path.rglob("*.json")}
    marked = {path: found for path, found in sidecars.items() if "schema" in found or path.name == "record.json"}
    assert len(marked) == 7, "a kind of record has neither `schema` nor `format`"
    for path, found in marked.items():
        newer = found.get("schema", "format 1").rpartition(" ")[0] + " 99"
        path.write_text(json.dumps(found | ({"schema": newer} if "schema" in found else {"format": 99})))
        outcome = meshwright("report", path.parent, "--markdown", tmp_path / "out.md")
        assert outcome.exit_code == 2, (path, outcome)
        assert "unknown format" in outcome.stderr, (path, outcome)
        assert path.name in outcome.stderr
        assert "newer Meshwright" in outcome.stderr
        path.write_text(json.dumps(found))


def test_a_key_that_is_missing_is_named_and_a_value_says_what_is_wrong():
    with pytest.raises(InputError, match=r"^no list: 'rows' is missing$"), refused_with("no list"):
        {}["rows"]
    with pytest.raises(InputError, match=r"^no list: rows: -1") as raised, refused_with("no list", hint="h"):
        raise ValueError("rows: -1")
    assert raised.value.hint == "h"
