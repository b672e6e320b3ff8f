"""Renew the keys of MaxText's configurations and models: keys.json and models.json of engines/maxtext/config.

    ~/.cache/meshwright/maxtext-0.2.5/bin/python scripts/renew_maxtext_names.py

Run it in the environment of `python -m meshwright.engines.maxtext.environment`. Keys are the fields of MaxTextConfig,
which refuses others; defaults are those of base.yml, null for absent keys and for paths.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import maxtext.configs.types as types
import yaml

OUT = Path(__file__).resolve().parent.parent / "src/meshwright/engines/maxtext/config"


def main() -> None:
    """Write the files. Keys that other versions had are kept."""
    folder = Path(types.__file__).with_name("models")
    models = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.yml"))}
    _write(
        "models",
        models,
        source="https://pypi.org/project/maxtext, maxtext/configs/models: what its files say of its own models",
    )
    base = yaml.safe_load(Path(types.__file__).with_name("base.yml").read_text(encoding="utf-8"))
    base = {key: None if str(value).startswith("/") else value for key, value in base.items()}
    names = sorted({*types.MaxTextConfig.model_fields, *base})
    source = "https://pypi.org/project/maxtext, maxtext/configs: fields of MaxTextConfig, defaults of base.yml"
    _write("keys", {name: base.get(name) for name in names}, source=source)


def _write(name: str, values: dict[str, object], *, source: str) -> None:
    path = OUT / f"{name}.json"
    before = json.loads(path.read_text(encoding="utf-8"))
    head = {"source": source, "version": version("maxtext")}
    head |= {key: value for key, value in before.items() if key not in (*head, name)}
    parts = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items() if not isinstance(value, dict)]
    tables = {key: value for key, value in head.items() if isinstance(value, dict)} | {name: values}
    for key, table in tables.items():
        lines = ",\n".join(f"  {json.dumps(one)}: {json.dumps(value)}" for one, value in table.items())
        parts.append(f" {json.dumps(key)}: {{\n{lines}\n }}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
