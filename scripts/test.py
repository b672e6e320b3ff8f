"""Run the tests that a change touches, nearest first.

    python scripts/test.py --changed                 tests of files that differ from the last commit
    python scripts/test.py --changed --since main    tests of files that differ from a branch or commit
    python scripts/test.py src/meshwright/units.py   tests of these files, changed or not
    python scripts/test.py --changed --list          print the tests and how far each is from the change
    python scripts/test.py --changed -- -n 0 -k name what follows -- goes to pytest

A test touches a file at distance 1 if it imports it, at distance 2 if it imports a module that does (for documents:
the commands that they run). `--distance` sets how far to go.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from scripts.check import number  # noqa: E402
from tests.changes import changed_files, git, touches_all  # noqa: E402 - the path comes first
from tests.import_graph import ImportGraph  # noqa: E402


def tests_of(root: Path) -> Iterator[str]:
    """Yield the files that pytest collects: tests, documents, and sources, whose docstrings hold doctests."""
    for folder, pattern in (("tests", "test_*.py"), ("docs", "*.md"), ("src", "*.py")):
        for path in (root / folder).rglob(pattern):
            if folder != "src" or ">>>" in path.read_text(encoding="utf-8"):
                yield path.relative_to(root).as_posix()
    yield "README.md"


def nearest(root: Path, changed: frozenset[str], *, distance: int) -> dict[str, int]:
    """Return the tests within `distance` of a changed file, nearest first."""
    graph = ImportGraph(root)
    found = {}
    for test in tests_of(root):
        reached = graph.distances(test)
        if near := [reached[name] for name in changed if reached.get(name, distance + 1) <= distance]:
            found[test] = min(near)
    return dict(sorted(found.items(), key=lambda item: item[1]))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    made.add_argument("files", nargs="*", help="files whose tests run")
    made.add_argument("--changed", action="store_true", help="add the files that differ from a commit")
    made.add_argument("--since", default="HEAD", metavar="COMMIT", help="the commit; default: %(default)s")
    made.add_argument(
        "--distance", type=number(0), default=1, help="imports between test and file; default: %(default)s"
    )
    made.add_argument("--list", action="store_true", help="print the tests and run none")
    return made


def main() -> int:
    """Run the tests; return the exit code of pytest, 0 if nothing changed, or 2 for bad input."""
    ours = list(takewhile(lambda word: word != "--", sys.argv[1:]))
    options, for_pytest = parser().parse_args(ours), sys.argv[len(ours) + 2 :]
    paths = [Path(name).resolve() for name in options.files]
    if unknown := [str(path) for path in paths if not (path.is_file() and path.is_relative_to(ROOT))]:
        return _refuse(f"no such file in this checkout: {', '.join(unknown)}")
    files = {path.relative_to(ROOT).as_posix() for path in paths}
    if options.changed:
        if git(ROOT, "rev-parse", "--verify", f"{options.since}^{{commit}}") is None:
            return _refuse(f"no commit: {options.since}")
        files |= changed_files(ROOT, options.since)
    elif not files:
        return _refuse("name files, or ask for --changed")
    if everything := touches_all(ROOT, files):
        shown = ", ".join(everything)
        print(f"{shown}: any test may depend on it; python -m pytest -q -n 2 runs all that can", file=sys.stderr)
    found = nearest(ROOT, frozenset(files), distance=options.distance)
    if options.list or not found:
        print("\n".join(f"{far} {test}" for test, far in found.items()) or "no test is that near")
        return 0
    print(f"{len(found)} files of tests touch {len(files)} changed files", file=sys.stderr)
    return subprocess.call([sys.executable, "-m", "pytest", "-q", *for_pytest, *found], cwd=ROOT)


def _refuse(reason: str) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
