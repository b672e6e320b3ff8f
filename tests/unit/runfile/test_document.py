"""Reading YAML: numbers, places, bounds."""

from __future__ import annotations

import pytest

from meshwright.errors import RunFileError
from meshwright.runfile import document as documents
from meshwright.runfile.document import MAX_BYTES, parse


def value_of(text: str) -> object:
    document = parse(f"key: {text}", file="run.yaml")
    assert not document.problems
    return document.value["key"]


def problem_of(text: str) -> str:
    document = parse(f"key: {text}", file="run.yaml")
    assert document.problems
    return str(document.error(list(document.problems)))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("3.0e-4", 3e-4),
        ("1E5", 1e5),
        (".5", 0.5),
        ("5.", 5.0),
        ("4_194_304", 4_194_304),
        ("1_000.5", 1000.5),
        ("0x10", 16),
        ("0o17", 15),
        ("0b101", 5),
        ("017", 17),
        ("+3", 3),
        ("-3", -3),
    ],
)
def test_numbers_of_the_core_schema_and_grouped_digits(text: str, value: float) -> None:
    got = value_of(text)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize("text", ["1e", "e4", "1__0", "_1", "1_", "0xg", "1:30", "2024-01-01", "1.2.3", "yes", "on"])
def test_what_only_resembles_a_number_or_a_truth_is_text(text: str) -> None:
    assert value_of(text) == text


@pytest.mark.parametrize(("text", "value"), [('"1e-4"', "1e-4"), ("'true'", "true"), ("|-\n  12", "12")])
def test_quoted_is_text(text: str, value: str) -> None:
    assert value_of(text) == value


@pytest.mark.parametrize(("text", "value"), [("~", None), ("", None), ("NULL", None), ("True", True), ("false", False)])
def test_words(text: str, value: object) -> None:
    assert value_of(text) is value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (".nan", "must be finite"),
        ("-.inf", "must be finite"),
        ("1e999", "must be finite"),
        ("9" * 30, "too large"),
        ("9" * 5000, "too large"),
        ("!!python/object:os.system {}", "tags"),
        ("!mine 3", "tags"),
        ("!!binary aGVsbG8=", "tags"),
        ("!!set {a}", "tags"),
    ],
)
def test_values_that_no_run_file_needs(text: str, words: str) -> None:
    assert words in problem_of(text)
    assert "run.yaml:1: key" in problem_of(text)


def test_places_are_lines() -> None:
    document = parse("a: 1\nb:\n  c: [1,\n    2]\n", file="f")
    assert document.places[("b", "c", 1)] == 4
    assert document.places[("b", "c")] == 3


def test_a_repeated_key_names_both_lines() -> None:
    document = parse("a: 1\nb:\n  c: 2\n  d: 3\n  c: 4\n", file="f")
    assert str(document.error(list(document.problems))) == "f:5: b.c: appears twice (first on line 3)"
    assert document.value["b"]["c"] == 2


@pytest.mark.parametrize("key", ["1", "1.5", "true", "~", "[a]", "{a: b}"])
def test_keys_are_text(key: str) -> None:
    document = parse(f"? {key}\n: 1\n", file="f")
    assert "keys must be text" in str(document.error(list(document.problems)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("[1, 2]", "must be a mapping"),
        ("hello", "must be a mapping"),
        ("a: 1\n---\nb: 2\n", "one document"),
        ("a:\n\tb: 1\n", "no tabs"),
        ("a: [1\n", "f:2: is not YAML"),
        ("a: *nobody\n", "undefined alias"),
        ("a: &x [*x]\n", "contains itself"),
        pytest.param("[" * 5000, "nested too deeply", marks=pytest.mark.when_touched),  # the next is nested as well
        ("a: " + "[" * 30 + "]" * 30, "nested too deeply"),
        ("a: \x07", "is not YAML"),
        ("a: 1\n" * (MAX_BYTES // 4), "too large"),
        ('a: "\\UFFFFFFFF"', "is not YAML"),
    ],
)
def test_refused(text: str, words: str) -> None:
    with pytest.raises(RunFileError) as caught:
        parse(text, file="f")
    assert words in str(caught.value)
    assert str(caught.value).startswith("f")


def test_aliases_are_expanded_within_bounds() -> None:
    assert parse("a: &x {b: 1}\nc: *x\n", file="f").value == {"a": {"b": 1}, "c": {"b": 1}}
    bomb = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
    )
    with pytest.raises(RunFileError, match="too many values"):
        parse(bomb, file="f")


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"\xff\xfe\x00", "binary"), (b"a: 1\nb: \xff", "2: is not UTF-8"), (b" " * (MAX_BYTES + 1), "too large")],
)
def test_files_that_are_not_text(tmp_path, content: bytes, words: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(RunFileError, match=words):
        documents.read_text(path)


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert documents.read_text(path) == "a: 1\n"


def test_a_missing_file_names_the_nearest(tmp_path) -> None:
    (tmp_path / "llama.yaml").write_text("a: 1\n")
    with pytest.raises(RunFileError, match=r"no such file[\s\S]*llama\.yaml"):
        documents.read_text(tmp_path / "lama.yaml")


@pytest.mark.parametrize("path", ["", "nowhere/at/all.yaml", "null\0byte", "x" * 5000])
def test_names_of_no_file(path: str) -> None:
    with pytest.raises(RunFileError):
        documents.read_text(path)


def test_a_folder_is_no_run_file(tmp_path) -> None:
    with pytest.raises(RunFileError, match="is a folder"):
        documents.read_text(tmp_path)


def test_override_replaces_and_adds() -> None:
    document = parse("a: {b: 1, c: 2}\n", file="f")
    document = documents.override(document, "a.b={x: [1, 2]}")
    document = documents.override(document, "d.e=1e3")
    assert document.value == {"a": {"b": {"x": [1, 2]}, "c": 2}, "d": {"e": 1000.0}}
    assert document.places[("a", "b", "x", 1)] == "--set a.b"
    assert document.places[("a", "c")] == 1


@pytest.mark.parametrize("assignment", ["a.b", "=1", "a..b=1", ".a=1", "a.=1", "", "a.b=[1", "a.b.c=1", "a.b=&x [*x]"])
def test_overrides_that_say_nothing(assignment: str) -> None:
    with pytest.raises(RunFileError, match="--set"):
        documents.override(parse("a: {b: 1}\n", file="f"), assignment)
