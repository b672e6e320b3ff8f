"""Configurations of Primus: YAML files with the module and model files that they name, merged as Primus merges them.

primus.yaml                        in a checkout of Primus, whose files are found from there
"primus.yaml PRIMUS_TP=2 lr=1e-4"  variables of `${NAME:default}` in capitals, then fields

Merging: primus/core/config (yaml_loader, preset_loader) and primus/core/launcher/parser.py at fd1eeabb.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.engines.megatron.megatron_lm.options import YAML_ENDINGS, split_source, yaml_node
from meshwright.errors import InputError
from meshwright.json_values import read_yaml

ROOT = "PRIMUS_PATH"  # the variable of Primus's own scripts
CONFIGS = "primus/configs"
TRAINERS = ("pre_trainer", "post_trainer")
SHARED_MODEL = "language_model.yaml"  # of which each model of Megatron-LM is an extension
RESERVED = ("framework", "config", "model", "overrides", "name")
_VARIABLE = re.compile(r"\$\{([^:{}]+)(?::([^}]*))?\}")


@dataclass(frozen=True, kw_only=True)
class PrimusFields:
    """The merged fields of the trainer of one configuration."""

    path: Path
    framework: str
    fields: dict[str, Any]
    presets: dict[str, Any]  # fields that all configurations have, with their values
    of_model: frozenset[str]  # fields that the model's files add to them


@dataclass(kw_only=True)
class _Loader:
    """Reads YAML and replaces variables; `missing` are those without a value."""

    variables: Mapping[str, str]
    missing: dict[str, None] = field(default_factory=dict)

    def load(self, path: Path) -> dict[str, Any]:
        """Return a file over the files that it extends. Raises InputError for one that cannot be read."""
        try:
            return self._load(path)
        except RecursionError:
            raise InputError(f"{path} is nested too deeply, or contains itself") from None

    def _load(self, path: Path, *, inside: tuple[Path, ...] = ()) -> dict[str, Any]:
        if path.resolve() in inside:
            raise InputError(f"{path} extends itself")
        content = self._resolved(read_yaml(path))
        if not isinstance(content, dict):
            raise InputError(f"{path} is not a mapping", got=type(content).__name__)
        extended = content.pop("extends", [])
        merged: dict[str, Any] = {}
        for one in [extended] if isinstance(extended, str) else extended:
            merged = _merged(merged, self._load(path.parent / one, inside=(*inside, path.resolve())))
        return _merged(merged, content)

    def _resolved(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._resolved(one) for key, one in value.items()}
        if isinstance(value, list):
            return [self._resolved(one) for one in value]
        if not isinstance(value, str) or not _VARIABLE.search(value):
            return value
        return scalar(_VARIABLE.sub(self._value, value))

    def _value(self, found: re.Match[str]) -> str:
        name, default = found[1], found[2]
        if name not in self.variables and default is None:
            self.missing[name] = None
        return self.variables.get(name, default or "")


def is_primus_yaml(source: str) -> bool:
    """Return True if `source` is YAML with modules or with files that it extends, as those of Primus."""
    node = yaml_node(source)
    pairs = node.value if node is not None and node.tag.endswith(":map") else ()
    return not {"modules", "extends"}.isdisjoint(key.value for key, _ in pairs)


def read(source: str) -> PrimusFields:
    """Return the configuration of `source`. Raises InputError for files that are not there and missing variables."""
    name, *rest = split_source(source)
    path, variables, settings = Path(name), {}, {}
    for part in rest:
        key, equals, value = part.removeprefix("--").partition("=")
        if not equals:
            raise InputError("not a setting of a configuration", got=part, allowed="VARIABLE=value, field=value")
        (variables if key.isupper() else settings)[key] = value
    loader = _Loader(variables=variables)
    content = loader.load(path)
    module = _trainer(content, path)
    framework = str(module.get("framework", "megatron"))
    fields, presets, of_model = module, {}, {}
    if framework == "megatron" and "config" in module:
        shared = _preset(path, framework, "modules", str(module["config"]), variables)
        own = _preset(path, framework, "models", str(module.get("model")), variables)
        presets, of_model = loader.load(shared), loader.load(own)
        base = own.with_name(SHARED_MODEL)
        presets = (loader.load(base) if base.is_file() else {}) | presets
        kept = {key: value for key, value in module.items() if key not in RESERVED}
        fields = _merged(_merged(of_model, loader.load(shared) | kept), module.get("overrides") or {})
    if loader.missing:
        needed = " ".join(f"{name}=..." for name in loader.missing)
        raise InputError(f"{path} needs variables", got=", ".join(loader.missing), hint=f'"{path.name} {needed}"')
    fields |= {key: scalar(value) for key, value in settings.items()}
    return PrimusFields(
        path=path, framework=framework, presets=presets,
        fields={key: None if value == "null" else value for key, value in fields.items()},
        of_model=frozenset(key for key in of_model if key not in presets),
    )  # fmt: skip


def _trainer(content: dict[str, Any], path: Path) -> dict[str, Any]:
    modules = content.get("modules")
    for name in TRAINERS:
        if isinstance(modules, dict) and isinstance(module := modules.get(name), dict):
            return module
    got = ", ".join(map(str, modules)) if isinstance(modules, dict) else None
    raise InputError(f"{path}: no module of Primus that trains", got=got, allowed=", ".join(TRAINERS))


def _preset(path: Path, framework: str, kind: str, name: str, variables: Mapping[str, str]) -> Path:
    """Return the file `name` of modules or models of Primus, from the folders above `path`."""
    file = name if name.endswith(YAML_ENDINGS) else f"{name}.yaml"
    named = [Path(variables[ROOT])] if ROOT in variables else []
    for root in (*named, *path.resolve().parents):
        found = root / CONFIGS / kind / framework / file
        if found.is_file():
            return found
    hint = f'put the configuration into a checkout of Primus, or name one: "{path.name} {ROOT}=FOLDER"'
    raise InputError(f"{path} names a file that is not here", got=f"{CONFIGS}/{kind}/{framework}/{file}", hint=hint)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `over` laid over `base`, mapping by mapping."""
    found = dict(base)
    for key, value in over.items():
        nested = isinstance(found.get(key), dict) and isinstance(value, dict)
        found[key] = _merged(found[key], value) if nested else value
    return found


def scalar(text: str) -> Any:
    """Return the boolean or number that a text is after its variables are replaced, as Primus reads it.

    >>> scalar("true"), scalar("8"), scalar("8.0e-4"), scalar("8b")
    (True, 8, 0.0008, '8b')
    """
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    is_number = re.fullmatch(r"-?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text)
    return float(text) if is_number else text
