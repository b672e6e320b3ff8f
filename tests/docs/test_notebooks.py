"""The example notebooks run, and hold the outputs that a reader sees."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def shown(notebook) -> list[list[str]]:
    """Kinds of the outputs of each code cell: `text/html`, the name of a stream."""
    return [
        [kind for o in cell.outputs if o.get("name") != "stderr" for kind in o.get("data", {o.get("name"): ""})]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def test_there_is_one():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_the_stored_outputs_are_results_that_load_nothing(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    pages = [
        o["data"]["text/html"]
        for cell in notebook.cells
        if cell.cell_type == "code"
        for o in cell.outputs
        if "text/html" in o.get("data", {})
    ]
    assert sum('<div class="meshwright">' in page for page in pages) >= 6
    assert sum("<svg" in page for page in pages) >= 4
    text = "".join(pages).replace("http://www.w3.org", "")
    assert [loading for loading in ("<script", "src=", "<link", "url(") if loading in text] == []
    assert str(ROOT) not in text


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="trains")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_runs_and_shows_the_same_kinds_of_output(path, tmp_path):
    """In a process of its own: the Jupyter client's event loop and warnings are not those of the tests."""
    import json
    import subprocess

    code = (
        "import json, sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]);"
        "from renew_notebook import executed; import nbformat;"
        "nbformat.write(executed(Path(sys.argv[2])), sys.argv[3])"
    )
    out = tmp_path / "executed.ipynb"
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "scripts"), str(path), str(out)],
        capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert shown(nbformat.from_dict(json.loads(out.read_text()))) == shown(nbformat.read(path, as_version=4))
