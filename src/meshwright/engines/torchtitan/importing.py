"""Torchtitan's configurations as run files. Imports no torch.

llama3_8b.toml                              a file of torchtitan's versions up to 0.2
llama3:llama3_8b, folder/module.py:train    a function of torchtitan 0.3.0, evaluated by `described`
trees.json                                  what `described` printed, perhaps on another machine
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from meshwright.engines.base import Imported
from meshwright.engines.torchtitan.config_trees.run_content import import_tree
from meshwright.engines.torchtitan.lower import FUNCTION
from meshwright.engines.torchtitan.probe import require_version
from meshwright.engines.torchtitan.toml_files.run_content import import_toml
from meshwright.errors import InputError

DESCRIBED = "meshwright.engines.torchtitan.config_trees.evaluate"


def import_run(source: str, *, cluster: str) -> Imported:
    """The run on `cluster` that a configuration of torchtitan describes."""
    path = Path(source)
    if path.suffix == ".toml":
        return import_toml(path, cluster=cluster)
    if path.suffix == ".json":
        return import_tree(_stored(path), cluster=cluster)
    return import_tree(_described(source), cluster=cluster)


def _described(source: str) -> dict[str, Any]:
    """The tree that a configuration module makes, evaluated in a process of its own."""
    require_version()
    name = f"{source}:{FUNCTION}" if source.endswith(".py") else source
    place, _, function = name.rpartition(":")
    if not place or not function.isidentifier():
        raise InputError(
            "no configuration of torchtitan", got=source,
            allowed="MODULE:FUNCTION, PATH.py:FUNCTION, a TOML file, or a tree as JSON",
        )  # fmt: skip
    if place.endswith(".py") and not Path(place).is_file():
        raise InputError("there is no such file", got=place)
    done = subprocess.run([sys.executable, "-m", DESCRIBED, name], capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"torchtitan does not start here: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return _buildable(json.loads(done.stdout.splitlines()[-1])[name], source)


def _stored(path: Path) -> dict[str, Any]:
    """The one tree of a file that `described` printed."""
    try:
        trees = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read the trees: {error.strerror or error}", got=str(path)) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is no JSON: {error}") from None
    if not isinstance(trees, dict) or len(trees) != 1:
        raise InputError(
            f"{path} does not hold one tree of torchtitan",
            hint=f"python -m {DESCRIBED} MODULE:FUNCTION > {path}",
        )
    return _buildable(next(iter(trees.values())), str(path))


def _buildable(tree: Any, source: str) -> dict[str, Any]:
    if isinstance(tree, dict) and "error" in tree:
        raise InputError(
            f"torchtitan cannot build {source} here: {tree['error']}",
            hint=f"where it can, `python -m {DESCRIBED} MODULE:FUNCTION > tree.json`, and import tree.json here",
        )
    if not isinstance(tree, dict) or tree.get("is") != "Trainer":
        kind = tree.get("is") if isinstance(tree, dict) else type(tree).__name__
        raise InputError(f"{source} is no Trainer.Config", got=kind)
    return tree
