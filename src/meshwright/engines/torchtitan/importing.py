"""Configurations of torchtitan as run files. Imports no torch.

llama3_8b.toml                              a file of torchtitan up to 0.2
llama3:llama3_8b, folder/module.py:train    a function of later versions, read as text by `config_text`
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from meshwright.engines.base import Imported, StatedCluster
from meshwright.engines.torchtitan.config_text.tree import read_tree
from meshwright.engines.torchtitan.config_trees.run_content import import_tree
from meshwright.engines.torchtitan.lower import FUNCTION
from meshwright.engines.torchtitan.toml_files.run_content import import_toml
from meshwright.errors import InputError


def import_run(source: str, *, cluster: StatedCluster, ignore: Collection[str] = ()) -> Imported:
    """Return the run on `cluster` that a configuration of torchtitan describes; only a TOML file has keys to ignore."""
    path = Path(source)
    if path.suffix == ".toml" or (path.suffix != ".py" and path.is_file()):
        return import_toml(path, cluster=cluster, ignore=ignore)
    if ignore:
        raise InputError("--ignore is for keys of TOML files, and this is none", got=source)
    module, _, function = (f"{source}:{FUNCTION}" if source.endswith(".py") else source).rpartition(":")
    if not module or not function.isidentifier():
        raise InputError(
            "no configuration of torchtitan", got=source, allowed="MODULE:FUNCTION, PATH.py:FUNCTION, or a TOML file"
        )
    tree = read_tree(module, function)
    if (kind := tree.get("is") if isinstance(tree, dict) else type(tree).__name__) != "Trainer":
        raise InputError(f"{source} is no Trainer.Config", got=kind)
    return import_tree(tree, cluster=cluster)
