from pathlib import Path

import pytest

from meshwright.accuracy.csvfile import read_table
from meshwright.errors import InputError


def write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "some.csv"
    path.write_bytes(content)
    return path


def test_reads_cells_by_column_with_their_line(tmp_path: Path) -> None:
    path = write(tmp_path, 'id,n,extra\nfirst,3,"a, b"\n\nsecond,,\n'.encode("utf-8-sig"))
    first, second = read_table(path, required=("id", "n"))
    assert (first.line, first.text("extra"), first.count("n")) == (2, "a, b", 3)
    assert (second.line, second.number("n"), second.text("no such column")) == (4, None, "")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"id\nx\n", "missing columns n, m"),
        (b"id,n,m,n\nx,1,2,3\n", "column named twice: n"),
        (b"id,n,n\nx,1,2\n", "missing column m; column named twice: n"),
        (b"id,n,m\nx,1\n", r"some\.csv:2: row has 2 cells, the header has 3"),
        (b"id,n,m\nx,1,2\ny,1,2,3\n", r"some\.csv:3: row has 4 cells"),
        (b'id,n,m\nx,"1,2\n', "not a CSV line"),
        ("id,n,m\nLlamä,1,2\n".encode("latin-1"), "is not UTF-8"),
        (b"id,n,m\nx,\x00,2\n", "not a number|not a CSV line"),
    ],
)
def test_a_broken_file_is_bad_input(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        [row.number("n") for row in read_table(write(tmp_path, content), required=("id", "n", "m"))]


def test_a_missing_file_or_a_directory_is_bad_input(tmp_path: Path) -> None:
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(InputError, match="cannot read"):
            read_table(path, required=())


@pytest.mark.parametrize("cell", ["eight", "-1", "inf", "nan", "1e999"])
def test_a_cell_that_is_no_number_names_file_line_and_column(tmp_path: Path, cell: str) -> None:
    (row,) = read_table(write(tmp_path, f"n\n{cell}\n".encode()), required=("n",))
    with pytest.raises(InputError, match=r"some\.csv:2: n is not a number"):
        row.number("n")


def test_a_count_has_no_fraction(tmp_path: Path) -> None:
    whole, none, half = read_table(write(tmp_path, b"n\n8.0\n0\n2.5\n"), required=("n",))
    assert (whole.count("n"), none.count("n")) == (8, None)
    with pytest.raises(InputError, match="not a whole number"):
        half.count("n")


def test_a_count_that_would_overflow_is_out_of_range(tmp_path: Path) -> None:
    (row,) = read_table(write(tmp_path, b"n\n1e8\n"), required=("n",))
    with pytest.raises(InputError, match=r"some\.csv:2: n is out of range: got '1e8', allowed: <= 10,000,000"):
        row.count("n")
    assert row.count("n", limit=10**9) == 10**8


def test_all_faults_of_the_cells_are_told_at_once_with_line_and_column(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbfid,n,m\r\nx,nan,2\r\ny,1\r\nz,3,2.5\r\nw,3,1e9\r\n"
    with pytest.raises(InputError) as caught:
        read_table(write(tmp_path, content), required=("id",), numbers=("n",), counts={"m": 100})
    assert [line.partition("some.csv")[2].partition(",")[0] for line in str(caught.value).splitlines()] == [
        " has 4 faults:",
        ":3: row has 2 cells",
        ":2: n is not a number: got 'nan'",
        ":4: m is not a whole number: got '2.5'",
        ":5: m is out of range: got '1e9'",
    ]


def test_a_long_list_of_faults_ends_with_their_number(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has 30 faults:(.|\n)*and 10 more$"):
        read_table(write(tmp_path, b"n\n" + b"-1\n" * 30), required=(), numbers=("n",))
