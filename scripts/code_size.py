"""Measure the lengths of files and functions, and write docs/reference/code-size.md.

    python scripts/code_size.py [--check]

Lengths are physical lines, with comments and blank lines. A function's length is from its `def` to its last line,
without its docstring: that of a public function documents its arguments. The parameters of a question do not count
either: they are the table of its arguments and options. `--check` writes nothing and fails if a file
or a function of the package is longer than `MOST`.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "meshwright"
PAGE = ROOT / "docs" / "reference" / "code-size.md"
OTHER_FOLDERS = ("tests", "benchmarks", "scripts")
NUM_LONGEST = 12
MOST = {"file": 600, "function": 60}
"""Lines at most. A function fits a screen, a file a reader's head."""


ALIKE = """\
## Code that looks alike

A fact, a parser or a routine stands once. These look alike and stay separate:

- dataclasses and enums: two with fields of the same types are two things
- tables, whose rows are records: rules of engines, operations, model families, schedules, fitted constants
- signatures that a caller fixes: `forward` of core attentions, `RowFunctions` in PyTorch and in Triton, operators and
  their gradients, `to_dict`, `to_rows` and `summary` of results
- arguments of public functions, and of the functions behind them: each is documented where it is called
- keys of other programs' formats, such as RoPE scaling of Hugging Face and of torchtitan, which change independently
- inputs of tests that a reader should see where they are used, golden files and generated reports
""".splitlines()


@dataclass(frozen=True, kw_only=True)
class FunctionSize:
    """Length of one function or method."""

    name: str  # with its classes and enclosing functions
    file: str  # relative to the package or to the repository
    lines: int


@dataclass(frozen=True, kw_only=True)
class FileSize:
    """Length of one file, and of its functions."""

    file: str
    lines: int
    functions: tuple[FunctionSize, ...]


def file_size(path: Path, *, base: Path) -> FileSize:
    """Measure one Python file."""
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(base).as_posix()
    functions = tuple(
        FunctionSize(name=qualified, file=name, lines=_length(node) - _table_length(node))
        for qualified, node in _functions(ast.parse(text))
    )
    return FileSize(file=name, lines=len(text.splitlines()), functions=functions)


def _length(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _table_length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of the docstring, and of the parameters of a question."""
    docstring = _length(node.body[0]) if ast.get_docstring(node) is not None else 0
    called = [d.func for d in node.decorator_list if isinstance(d, ast.Call)]
    is_question = any(isinstance(function, ast.Name) and function.id == "question" for function in called)
    return docstring + (node.body[0].lineno - node.lineno if is_question else 0)


def _functions(node: ast.AST, prefix: str = "") -> Iterable[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue  # no function is defined in an expression
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from _functions(child, f"{prefix}{child.name}." if named else prefix)


def sizes(folder: Path, *, base: Path) -> list[FileSize]:
    """Measure every Python file in `folder`, the longest first."""
    found = [file_size(path, base=base) for path in folder.rglob("*.py")]
    return sorted(found, key=lambda size: (-size.lines, size.file))


def longest_functions(files: Iterable[FileSize]) -> list[FunctionSize]:
    """All functions of `files`, the longest first."""
    return sorted((f for size in files for f in size.functions), key=lambda f: (-f.lines, f.file, f.name))


def excesses(files: Sequence[FileSize]) -> list[str]:
    """Files and functions that are longer than `MOST` allows."""
    return [
        *(f"{f.file}: {f.lines} lines, allowed {MOST['file']}" for f in files if f.lines > MOST["file"]),
        *(
            f"{f.file}: {f.name}: {f.lines} lines, allowed {MOST['function']}"
            for f in longest_functions(files)
            if f.lines > MOST["function"]
        ),
    ]


def page(files: Sequence[FileSize]) -> str:
    """Text of the page for the files of the package."""
    functions = longest_functions(files)
    others = [(name, sizes(ROOT / name, base=ROOT)) for name in OTHER_FOLDERS]
    rooms = sorted({f.file.partition("/")[0] for f in files if "/" in f.file})
    by_room = [(f"`{room}`", [f for f in files if f.file.startswith(f"{room}/")]) for room in rooms]
    by_room.insert(0, ("top level", [f for f in files if "/" not in f.file]))
    return "\n".join(
        [
            "# Code size",
            "",
            "Written by `python scripts/code_size.py`. Lengths are physical lines, with comments and blank lines; "
            "those of functions without their docstrings. A test holds that no file has more than "
            f"{MOST['file']} lines and no function more than {MOST['function']}.",
            "",
            *_table(
                ("", "lines", "where"),
                [
                    ("longest file", files[0].lines, f"`{files[0].file}`"),
                    ("longest function", functions[0].lines, f"`{functions[0].file}`: `{functions[0].name}`"),
                ],
            ),
            "",
            "## Rooms of the package",
            "",
            *_sums([*by_room, ("**package**", files)]),
            "",
            "## Other folders",
            "",
            *_sums([(f"`{name}`", found) for name, found in others]),
            "",
            "## Longest files",
            "",
            *_table(("file", "lines"), [(f"`{f.file}`", f.lines) for f in files[:NUM_LONGEST]]),
            "",
            "## Longest functions",
            "",
            *_table(
                ("function", "lines", "file"),
                [(f"`{f.name}`", f.lines, f"`{f.file}`") for f in functions[:NUM_LONGEST]],
            ),
            "",
            *ALIKE,
        ]
    )


def _sums(groups: Sequence[tuple[str, Sequence[FileSize]]]) -> list[str]:
    columns = ("", "files", "lines", "functions", "longest file", "longest function")
    rows = []
    for name, files in groups:
        functions = longest_functions(files)
        rows.append(
            (
                name, len(files), f"{sum(f.lines for f in files):,}", f"{len(functions):,}",
                max((f.lines for f in files), default=0), functions[0].lines if functions else 0,
            )
        )  # fmt: skip
    return _table(columns, rows)


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(map(str, cells))} |" for cells in lines]


def main() -> None:
    """Write the page, or check the package against it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the page and write nothing")
    files = sizes(PACKAGE, base=PACKAGE)
    if not parser.parse_args().check:
        PAGE.write_text(page(files), encoding="utf-8")
    elif found := excesses(files):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
