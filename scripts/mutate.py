"""Change places of the source one at a time and show that tests fail.

    python scripts/mutate.py src/meshwright/cost/overlap.py tests/unit/cost/test_overlap.py
    python scripts/mutate.py --count 10 --seed 2 --table table.md SOURCE TESTS [TESTS ...]

A place is a comparison, a sum, a product, a condition or a number inside a function. Each change is made in a copy of
the checkout, in which pytest runs the tests until the first failure. Exit code 1: a change made no test fail. Not every
such change is a gap: some change nothing that can be seen (a limit that no input reaches), so read the survivors.
Everything after `--` goes to pytest (`-- -m slow`).
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("src", "tests", "docs", "examples", "benchmarks", "scripts", "conftest.py", "pyproject.toml", "README.md")
LIMIT_S = 1200
"""A change may make a loop endless."""
OTHER = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in",
    ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is", ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*",
    ast.FloorDiv: "*",
}  # fmt: skip
"""The operator that takes the place of another one."""


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One change of a source."""

    line: int
    before: str
    after: str
    text: str
    """The whole source after the change."""


def mutations(source: str) -> Iterator[Mutation]:
    """Yield every change of `source`, of code inside functions."""
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    seen = set()
    for function in functions:
        for node in (inside for statement in function.body for inside in ast.walk(statement)):
            for before, after in _changes(node, source):
                start = _offset(source, node)
                if (start, before, after) not in seen and source.startswith(before, start):
                    seen.add((start, before, after))
                    text = source[:start] + after + source[start + len(before) :]
                    yield Mutation(line=node.lineno, before=before, after=after, text=text)  # type: ignore[attr-defined]


def _changes(node: ast.AST, source: str) -> Iterator[tuple[str, str]]:
    """Yield the text of a node and the text that takes its place."""
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in OTHER:
            yield _around(source, node, left, OTHER[type(operator)], right)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in OTHER:
            yield _around(source, node, left, OTHER[type(operator)], right)
        case ast.Constant(value=bool(value)):
            yield str(value), str(not value)
        case ast.Constant(value=int() | float()):
            before = ast.get_source_segment(source, node) or ""
            yield before, f"({before} + 1)"
        case ast.If(test=test) | ast.IfExp(test=test):
            before = ast.get_source_segment(source, node) or ""
            condition = ast.get_source_segment(source, test) or ""
            yield before, before.replace(condition, f"not ({condition})", 1)


def _around(source: str, node: ast.AST, left: ast.AST, operator: str, right: ast.AST) -> tuple[str, str]:
    before = ast.get_source_segment(source, node) or ""
    sides = [ast.get_source_segment(source, side) or "" for side in (left, right)]
    return before, f"({sides[0]}) {operator} ({sides[1]})"


def _offset(source: str, node: ast.AST) -> int:
    """Return the index of a node's first character; a column of `ast` counts bytes."""
    lines = source.splitlines(keepends=True)
    line = lines[node.lineno - 1]  # type: ignore[attr-defined]
    column = len(line.encode()[: node.col_offset].decode())  # type: ignore[attr-defined]
    return sum(map(len, lines[: node.lineno - 1])) + column  # type: ignore[attr-defined]


def first_failure(copy: Path, tests: list[str], options: list[str]) -> str | None:
    """Return the first test that fails in the copy; None if all pass. Raises SystemExit where none runs."""
    environment = os.environ | {"PYTHONPATH": str(copy / "src"), "CI": "true"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *options, *tests]
    try:
        done = subprocess.run(command, cwd=copy, env=environment, text=True, stdout=subprocess.PIPE, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"no end within {LIMIT_S} s"
    if done.returncode in (0, 1):
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        return None if done.returncode == 0 else failed[1] if failed else "the session"
    if done.returncode == 2 and "error" in done.stdout:
        return "collection"
    raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("source", help="the file that is changed")
    made.add_argument("tests", nargs="+", help="what pytest runs")
    made.add_argument("--count", type=int, default=5, help="changes that are tried; default: %(default)s")
    made.add_argument("--seed", type=int, default=0, help="draws the places; default: %(default)s")
    made.add_argument("--table", type=Path, help="add the rows to this Markdown file")
    return made


def main() -> int:
    """Try the changes; return 1 if one made no test fail."""
    given = sys.argv[1:]
    split = given.index("--") if "--" in given else len(given)
    options = parser().parse_args(given[:split])
    if not (ROOT / options.source).is_file() or not options.source.endswith(".py"):
        parser().error(f"{options.source}: no Python file of the checkout, as src/meshwright/units.py is")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            place = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            place(ROOT / name, copy / name)
        return _try_all(copy, options, given[split + 1 :])


def _try_all(copy: Path, options: argparse.Namespace, for_pytest: list[str]) -> int:
    path = copy / options.source
    source = path.read_text(encoding="utf-8")
    if failed := first_failure(copy, options.tests, for_pytest):
        raise SystemExit(f"without a change, {failed} fails")
    drawn = list(mutations(source))
    random.Random(options.seed).shuffle(drawn)
    survived = 0
    for mutation in drawn[: options.count]:
        path.write_text(mutation.text, encoding="utf-8")
        failed = first_failure(copy, options.tests, for_pytest)
        survived += failed is None
        _show(options, mutation, failed)
    return int(survived > 0)


def _show(options: argparse.Namespace, mutation: Mutation, failed: str | None) -> None:
    before, after = (" ".join(text.split())[:60].replace("|", r"\|") for text in (mutation.before, mutation.after))
    row = f"| `{options.source}:{mutation.line}` | `{before}` | `{after}` | {f'`{failed}`' if failed else 'none'} |"
    print(row, flush=True)
    if options.table:
        with options.table.open("a", encoding="utf-8") as file:
            file.write(row + "\n")


if __name__ == "__main__":
    sys.exit(main())
