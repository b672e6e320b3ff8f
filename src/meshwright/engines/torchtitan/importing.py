"""Configurations of torchtitan as run files. Imports no torch.

llama3_8b.toml                              a file of torchtitan up to 0.2
llama3:llama3_8b, folder/module.py:train    a function of torchtitan 0.3.0, evaluated by `config_trees.evaluate`
trees.json                                  the output of `config_trees.evaluate`, perhaps of another machine
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from meshwright.engines.base import Imported, StatedCluster
from meshwright.engines.torchtitan.config_trees.run_content import import_tree
from meshwright.engines.torchtitan.lower import FUNCTION
from meshwright.engines.torchtitan.probe import require_version
from meshwright.engines.torchtitan.toml_files.run_content import import_toml
from meshwright.errors import InputError
from meshwright.json_values import load_json, parse_json

EVALUATE = "meshwright.engines.torchtitan.config_trees.evaluate"


def import_run(source: str, *, cluster: StatedCluster, ignore: Collection[str] = ()) -> Imported:
    """Return the run on `cluster` that a configuration of torchtitan describes; only a TOML file has keys to ignore."""
    path = Path(source)
    if path.suffix == ".toml" or (path.suffix not in (".py", ".json") and path.is_file()):
        return import_toml(path, cluster=cluster, ignore=ignore)
    if ignore:
        raise InputError("--ignore is for keys of TOML files, and this is none", got=source)
    if path.suffix == ".json":
        return import_tree(_read_tree(path), cluster=cluster)
    return import_tree(_evaluate(source), cluster=cluster)


def _evaluate(source: str) -> dict[str, Any]:
    """Evaluate a configuration module in a separate process and return its tree."""
    require_version()
    name = f"{source}:{FUNCTION}" if source.endswith(".py") else source
    module, _, function = name.rpartition(":")
    if not module or not function.isidentifier():
        raise InputError(
            "no configuration of torchtitan", got=source,
            allowed="MODULE:FUNCTION, PATH.py:FUNCTION, a TOML file, or a tree as JSON",
        )  # fmt: skip
    if module.endswith(".py") and not Path(module).is_file():
        raise InputError("there is no such file", got=module)
    done = subprocess.run([sys.executable, "-m", EVALUATE, name], capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"torchtitan does not start here: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return _require_trainer(parse_json(done.stdout.splitlines()[-1])[name], source)


def _read_tree(path: Path) -> dict[str, Any]:
    """Return the only tree of a file that `config_trees.evaluate` printed."""
    try:
        trees = load_json(path)
    except OSError as error:
        raise InputError(f"cannot read the trees: {error.strerror or error}", got=str(path)) from None
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    if not isinstance(trees, dict) or len(trees) != 1:
        raise InputError(
            f"{path} does not hold one tree of torchtitan", hint=f"python -m {EVALUATE} MODULE:FUNCTION > {path}"
        )
    return _require_trainer(next(iter(trees.values())), str(path))


def _require_trainer(tree: Any, source: str) -> dict[str, Any]:
    """Return `tree`, the tree of a `Trainer.Config`. Raises InputError for anything else."""
    if isinstance(tree, dict) and "error" in tree:
        raise InputError(
            f"torchtitan cannot build {source} here: {tree['error']}",
            hint=f"`python -m {EVALUATE} MODULE:FUNCTION > tree.json` on another machine, and import tree.json here",
        )
    if not isinstance(tree, dict) or tree.get("is") != "Trainer":
        kind = tree.get("is") if isinstance(tree, dict) else type(tree).__name__
        raise InputError(f"{source} is no Trainer.Config", got=kind)
    return tree
