"""Renew the keys of torchtitan's TOML files: src/meshwright/engines/torchtitan/toml_files/keys.json.

    for v in 0.1.0 0.2.0 0.2.2; do pip download --no-deps torchtitan==$v; done
    python scripts/renew_torchtitan_names.py torchtitan-0.1.0-*.whl torchtitan-0.2.0-*.whl torchtitan-0.2.2-*.whl

Wheels are read as text, oldest first, and not executed. Keys are the fields of JobConfig, which refuses others,
with the defaults of the newest version that has them; a default that is not a literal is null.
"""

from __future__ import annotations

import argparse
import ast
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parent.parent / "src/meshwright/engines/torchtitan/toml_files/keys.json"
FILES = ("torchtitan/config/job_config.py", "torchtitan/config_manager.py")


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", nargs="+", type=Path)
    wheels = parser.parse_args().wheels
    keys: dict[str, Any] = {}
    for wheel in wheels:
        keys |= dict(fields(wheel))
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(keys[name])}" for name in sorted(keys))
    source = "https://pypi.org/project/torchtitan: fields of JobConfig with their defaults"
    versions = [wheel.name.split("-")[1] for wheel in wheels]
    head = f' "source": {json.dumps(source)},\n "versions": {json.dumps(versions)},\n'
    OUT.write_text(f'{{\n{head} "keys": {{\n{lines}\n }}\n}}\n', encoding="utf-8")


def fields(wheel: Path) -> Iterator[tuple[str, Any]]:
    """Yield every key of one version, `section.key`, with its default."""
    with zipfile.ZipFile(wheel) as archive:
        path = next(name for name in FILES if name in archive.namelist())
        tree = ast.parse(archive.read(path))
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}

    def below(name: str, above: str) -> Iterator[tuple[str, Any]]:
        for node in classes[name].body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                kind = ast.unparse(node.annotation)
                if kind in classes:
                    yield from below(kind, f"{above}{node.target.id}.")
                else:
                    yield f"{above}{node.target.id}", default(node.value)

    return below("JobConfig", "")


def default(value: ast.expr | None) -> Any:
    """Return a literal, or the result of a `default_factory`."""
    if isinstance(value, ast.Call):
        factory = next((word.value for word in value.keywords if word.arg == "default_factory"), None)
        if isinstance(factory, ast.Name) and factory.id == "list":
            return []
        value = factory.body if isinstance(factory, ast.Lambda) else None
    try:
        return None if value is None else ast.literal_eval(value)
    except ValueError:
        return None


if __name__ == "__main__":
    main()
