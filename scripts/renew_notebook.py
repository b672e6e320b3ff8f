"""Execute the example notebooks and store their outputs: `python scripts/renew_notebook.py`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "examples" / "notebooks"
LIMIT_S = 600


def executed(path: Path) -> nbformat.NotebookNode:
    """The notebook at `path` with the outputs of a fresh run, in a folder of its own."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook, timeout=LIMIT_S, kernel_name="python3", resources={"metadata": {"path": folder}}
        )
        return client.execute()


def tidied(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Without what differs from run to run and says nothing: times of execution, progress on stderr."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
    return notebook


if __name__ == "__main__":
    for found in sorted(NOTEBOOKS.glob("*.ipynb")):
        nbformat.write(tidied(executed(found)), found)
        print(found)
