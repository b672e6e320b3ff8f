"""Write the text of torchtitan's configurations, which `import` reads where torchtitan is not installed.

    python scripts/renew_torchtitan_text.py

reads every configuration of the installed torchtitan as text, and keeps of its modules: imports, constants, classes
with their fields, and the functions that configurations call. Its licence is in the file.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from meshwright.engines.torchtitan.config_text import modules, tree
from meshwright.engines.torchtitan.config_text.expressions import Expressions
from meshwright.engines.torchtitan.config_text.values import Function
from meshwright.errors import InputError
from meshwright.files import write_atomically

NO_TRAINING = "torchtitan.experiments.rl"
ALL_FUNCTIONS = ("config_registry", "config_utils", "param_init", "models.utils", "models.common")
"""Modules whose functions configurations of other projects call, too."""


def main() -> None:
    """Write the file."""
    spec = find_spec("torchtitan")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    called: set[tuple[str, int]] = set()
    used: dict[str, str] = {}
    call, find = Expressions.call_function, modules.ProjectModules.find

    def noted(self: Expressions, function: Function, *arguments: object) -> object:
        body = function.body
        called.add((function.scope.file, body[0].lineno if isinstance(body, list) else body.lineno))
        return call(self, function, *arguments)  # type: ignore[arg-type]

    def found(self: modules.ProjectModules, name: str) -> modules.ModuleText | None:
        one = find(self, name)
        if one is not None and name.partition(".")[0] == "torchtitan":
            used[name] = one.file
        return one

    Expressions.call_function, modules.ProjectModules.find = noted, found  # type: ignore[method-assign, assignment]
    for registry in sorted(package.rglob("config_registry.py")):
        name = ".".join(("torchtitan", *registry.relative_to(package).with_suffix("").parts))
        if name.startswith(NO_TRAINING):
            continue
        for node in ast.parse(registry.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.args.args:
                try:
                    tree.read_tree(name, node.name)
                except InputError as error:
                    print(error.message[:150])
    texts = {}
    for name, file in sorted(used.items()):
        if name.startswith(NO_TRAINING):
            continue
        text = Path(file).read_text()
        texts[name] = [Path(file).name == "__init__.py", _kept(text, file, name, called)]
    licence = next(one for one in metadata.files("torchtitan") or () if one.name == "LICENSE").read_text()
    content = {"release": metadata.version("torchtitan"), "licence": licence, "modules": texts}
    write_atomically(modules.RELEASE, json.dumps(content, indent=0) + "\n")


def _kept(text: str, file: str, name: str, called: set[tuple[str, int]]) -> str:
    """Return the part of a module that configurations need."""
    module = ast.parse(text)
    keeps_all = name.endswith(ALL_FUNCTIONS) or (".models." in name and file.endswith("__init__.py"))
    module.body = [*_needed(module.body, file, called, keeps_all=keeps_all)]
    return ast.unparse(module)


def _needed(body: list[ast.stmt], file: str, called: set[tuple[str, int]], *, keeps_all: bool) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            is_data = any("dataclass" in ast.unparse(one) for one in node.decorator_list)
            inside = [*_needed(node.body, file, called, keeps_all=is_data)]
            node.body = inside or [ast.Pass()]
            yield node
        elif isinstance(node, ast.FunctionDef):
            if isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant):
                is_called = (file, node.body[0].lineno) in called
                node.body = node.body[1:] or [ast.Pass()]
            else:
                is_called = (file, node.body[0].lineno) in called
            if keeps_all or is_called:
                yield node
        elif isinstance(node, ast.Try):
            node.body = [*_needed(node.body, file, called, keeps_all=keeps_all)]
            yield node
        elif not isinstance(node, ast.AsyncFunctionDef) and not (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            yield node


if __name__ == "__main__":
    main()
