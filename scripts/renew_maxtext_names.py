"""Renew the keys of MaxText's configurations: src/meshwright/engines/maxtext/config/keys.json.

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

OUT = Path(__file__).resolve().parent.parent / "src/meshwright/engines/maxtext/config/keys.json"


def main() -> None:
    """Write the file."""
    base = yaml.safe_load(Path(types.__file__).with_name("base.yml").read_text(encoding="utf-8"))
    base = {key: None if str(value).startswith("/") else value for key, value in base.items()}
    names = sorted({*types.MaxTextConfig.model_fields, *base})
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(base.get(name))}" for name in names)
    source = "https://pypi.org/project/maxtext, maxtext/configs: fields of MaxTextConfig, defaults of base.yml"
    head = f' "source": {json.dumps(source)},\n "version": {json.dumps(version("maxtext"))},\n'
    OUT.write_text(f'{{\n{head} "keys": {{\n{lines}\n }}\n}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
