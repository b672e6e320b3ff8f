"""Write docs/reference/map.md anew: every package by layer, with its first line, from `pyproject.toml` and the source.

    python scripts/renew_map.py

A test compares the page with the source.
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "meshwright"
PAGE = ROOT / "docs" / "reference" / "map.md"

HEAD = """\
# Map

The packages of `src/meshwright`, from the command line to the ground, as `scripts/renew_map.py` reads them. A package \
imports packages of lower layers only, and none beside it in its own layer; import-linter checks this in every test \
run (`[tool.importlinter]` in `pyproject.toml`). [A walk through the code](../guides/code-walk.md) follows one plan \
and one training step through them.

| layer | package | holds |
| --: | --- | --- |
"""


def layers() -> list[list[str]]:
    """Return the packages and modules of each layer, the highest first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    (found,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [re.findall(r"\w+", layer) for layer in found]


def first_line(path: Path) -> str:
    """Return the first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def page() -> str:
    """Return the whole page."""
    rows = []
    for layer, names in enumerate(layers(), start=1):
        for name in names:
            folder = PACKAGE / name
            path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
            shown = path.relative_to(PACKAGE).as_posix().removesuffix("/__init__.py")
            rows.append(f"| {layer} | `{shown}` | {first_line(path)} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
