"""Renew the fields of Megatron-Bridge's configurations: src/meshwright/engines/megatron/megatron_bridge/fields.json.

    pip download --no-deps --python-version 3.12 --only-binary :all: megatron-bridge==0.6.2 megatron-core==0.19.2
    python scripts/renew_bridge_names.py megatron_bridge-0.6.2-*.whl megatron_core-0.19.2-*.whl \\
        --older megatron_bridge-0.3.1-*.whl megatron_core-0.16.1-*.whl

Wheels are read as text, and neither installed nor executed. A section of ConfigContainer has the fields of its first
class, including those inherited from Megatron-Core and megatron.training, with their defaults; a default that is not a
literal is its source after an equals sign. `computed` are fields that are not set by users, `others` fields of the
section's other classes, of classes derived from them, and of an older release.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parent.parent / "src/meshwright/engines/megatron/megatron_bridge/fields.json"
CONTAINER = ("megatron.bridge.training.config", "ConfigContainer")
COMPUTED = "=computed"
LATENT = ("megatron.bridge.models.mla_provider", "MLAModelProvider")

Name = tuple[str, str]  # module, class


class Wheels:
    """Classes in the source of some wheels."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths, self.sources = paths, {}
        for path in paths:
            with zipfile.ZipFile(path) as archive:
                for file in archive.namelist():
                    if file.startswith("megatron/") and file.endswith(".py"):
                        module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                        self.sources[module] = archive.read(file).decode()
        self.module = cache(self._module)
        self.fields = cache(self._fields)
        self.ancestors = cache(self._ancestors)

    def named(self) -> str:
        """Return the wheels with their hashes."""
        return ", ".join(f"{p.name} sha256:{hashlib.sha256(p.read_bytes()).hexdigest()}" for p in self.paths)

    def _module(self, module: str) -> tuple[dict[str, ast.ClassDef], dict[str, Name]]:
        """Return the classes and imported names of a module."""
        classes, imported = {}, {}
        package = module if self._is_package(module) else module.rpartition(".")[0]
        for node in ast.walk(ast.parse(self.sources[module])):
            if isinstance(node, ast.ClassDef):
                classes[node.name] = node
            if isinstance(node, ast.ImportFrom):
                parent = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1])
                origin = ".".join(filter(None, [parent if node.level else "", node.module]))
                imported |= {alias.asname or alias.name: (origin, alias.name) for alias in node.names}
        return classes, imported

    def _is_package(self, module: str) -> bool:
        return any(name.startswith(f"{module}.") for name in self.sources)

    def find(self, name: str, *, seen_from: str) -> Name | None:
        """Return the definition of the class `name` in module `seen_from`; None outside the wheels."""
        if seen_from not in self.sources:
            return None
        classes, imported = self.module(seen_from)
        if name in classes:
            return seen_from, name
        return self.find(imported[name][1], seen_from=imported[name][0]) if name in imported else None

    def bases(self, name: Name) -> list[Name]:
        """Return the base classes of `name` as written."""
        written = [base for base in self.module(name[0])[0][name[1]].bases if isinstance(base, ast.Name)]
        found = [self.find(base.id, seen_from=name[0]) for base in written]
        return [base for base in found if base and base != name]

    def _ancestors(self, name: Name) -> frozenset[Name]:
        return frozenset({name}).union(*(self.ancestors(base) for base in self.bases(name)))

    def _fields(self, name: Name) -> dict[str, Any]:
        """Return the fields of a dataclass with their defaults, those of its bases first; the leftmost base wins."""
        node = self.module(name[0])[0][name[1]]
        found: dict[str, Any] = {}
        for base in reversed(self.bases(name)):
            found |= self.fields(base)
        if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
            return found
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                if "ClassVar" in ast.unparse(line.annotation) or line.target.id.startswith("_"):
                    continue
                found.pop(line.target.id, None)
                found[line.target.id] = COMPUTED if _is_computed(line.value) else _default(line.value)
        return found

    def sections(self) -> Iterator[tuple[str, list[Name]]]:
        """Return the fields of the container with the classes in their annotations."""
        for line in self.module(CONTAINER[0])[0][CONTAINER[1]].body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                names = [node for node in ast.walk(line.annotation) if isinstance(node, ast.Name)]
                names.sort(key=lambda node: (node.lineno, node.col_offset))
                classes = [found for n in names if (found := self.find(n.id, seen_from=CONTAINER[0]))]
                if classes:
                    yield line.target.id, classes

    def derived(self, classes: list[Name]) -> Iterator[Name]:
        """Return the classes of Megatron-Bridge that are, or are derived from, one of `classes`."""
        for module in self.sources:
            if module.startswith("megatron.bridge."):
                for name in self.module(module)[0]:
                    if self.ancestors((module, name)) & set(classes):
                        yield module, name


def _is_computed(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Call) and any(
        keyword.arg == "init" and ast.unparse(keyword.value) == "False" for keyword in value.keywords
    )


def _default(value: ast.expr | None) -> Any:
    """Return a literal, or the expression as text after an equals sign."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        said = {keyword.arg: keyword.value for keyword in value.keywords}
        if "default_factory" in said:
            return {"list": [], "dict": {}}.get(made := ast.unparse(said["default_factory"]), f"={made}()")
        value = said.get("default")
    if value is None:
        return "="
    written = ast.unparse(value)
    if written == "float('inf')":  # which JSON has not
        return "=inf"
    try:
        is_sum = not any(isinstance(node, (ast.Name, ast.Call)) for node in ast.walk(value))
        return eval(written, {"__builtins__": {}}) if is_sum else f"={written}"  # 2 ** 32
    except SyntaxError:
        return f"={written}"


def described(wheels: Wheels, older: Wheels) -> dict[str, Any]:
    """Return class, fields and other fields by section."""
    former = {
        section: {f for name in older.derived(classes) for f in older.fields(name)}
        for section, classes in older.sections()
    }
    found = {}
    for section, classes in wheels.sections():
        known = wheels.fields(classes[0])
        others = {f for name in wheels.derived(classes) for f in wheels.fields(name)}
        found[section] = {
            "class": ".".join(classes[0]),
            "fields": {field: default for field, default in known.items() if default != COMPUTED},
            "computed": sorted(field for field, default in known.items() if default == COMPUTED),
            "others": sorted((others | former.get(section, set())) - set(known)),
        }
    base, latent = found["model"]["fields"], wheels.fields(LATENT)
    found["model"]["latent"] = {k: v for k, v in latent.items() if k not in base or base[k] != v}
    return found


def main() -> None:
    """Read the wheels on the command line, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path, nargs=2, metavar="WHEEL")
    parser.add_argument("--older", type=Path, nargs=2, required=True, metavar="WHEEL")
    arguments = parser.parse_args()
    wheels, older = Wheels(arguments.wheels), Wheels(arguments.older)
    content = {
        "source": "https://github.com/NVIDIA-NeMo/Megatron-Bridge and https://github.com/NVIDIA/Megatron-LM, "
        "dataclasses of ConfigContainer (megatron/bridge/training/config.py), as released on the package index",
        "version": arguments.wheels[0].name.split("-")[1],
        "core": arguments.wheels[1].name.split("-")[1],
        "wheels": wheels.named(),
        "older": older.named(),
        "sections": described(wheels, older),
    }
    OUT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
