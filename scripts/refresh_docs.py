"""Write what commands print now into the `console` blocks of Markdown pages: after a new calibration, say.

    python scripts/refresh_docs.py README.md docs/guides/scaling.md [--skipped]

Blocks behind a `<!--- skip: next` line are left alone unless --skipped is given; so are blocks with a line `...`.
Read the pages afterwards: prose that quotes a number does not change by itself.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(?P<skip><!--- skip: next[^\n]*-->\n)?```(?P<kind>console|bash)\n(?P<body>.*?)```", re.DOTALL)
ENVIRONMENT = {"COLUMNS": "110", "NO_COLOR": "1"}


def commands(body: str) -> list[str]:
    """The commands of a block; a line that ends in a backslash goes on."""
    found = []
    for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
        lines = part.splitlines()
        length = next(i for i, line in enumerate(lines, start=1) if not line.endswith("\\"))
        found.append("\n".join(lines[:length]))
    return found


def printed(command: str, folder: Path) -> str:
    """Output of `command`, on both streams, without trailing blanks."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env=os.environ | ENVIRONMENT | {"PATH": path},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.rstrip().splitlines())


def refresh(page: Path, *, skipped: bool) -> None:
    """Run the blocks of one page in one folder, in order, as its test does."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "examples").symlink_to(ROOT / "examples")

        def fresh(match: re.Match[str]) -> str:
            body = match["body"]
            if (match["skip"] and not skipped) or re.search(r"^\.\.\.$", body, re.MULTILINE):
                return match[0]
            if match["kind"] == "bash":  # what it writes is there for the blocks after it
                printed(body, folder)
                return match[0]
            blocks = "".join(f"$ {c}\n{printed(c, folder)}" for c in commands(body))
            return f"{match['skip'] or ''}```console\n{blocks}```"

        page.write_text(BLOCK.sub(fresh, page.read_text(encoding="utf-8")), encoding="utf-8")


def main() -> None:
    """Refresh the pages named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", type=Path, nargs="+")
    parser.add_argument("--skipped", action="store_true", help="also blocks that tests skip")
    options = parser.parse_args()
    for page in options.pages:
        refresh(page, skipped=options.skipped)


if __name__ == "__main__":
    main()
