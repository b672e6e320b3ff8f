"""Configurations of Megatron-Bridge, field by field: files that ConfigContainer writes, files of overrides, settings.

run_config.yaml                          what ConfigContainer.to_yaml and its checkpoints write: it says all
"run_config.yaml more.yaml a.b=10"       overrides in files and behind them, the later counts
"more.yaml model=llama3.1-8b"            overrides of a recipe, for the catalogue's model: they do not say its shapes
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.engines.megatron.megatron_bridge.configuration import CONTAINER, sections
from meshwright.engines.megatron.megatron_lm.options import pieces_of
from meshwright.errors import InputError

ENDINGS = (".yaml", ".yml")
DISTILLATION = ("model.teacher", "model.kd_config")  # of DistillationProvider
DERIVED = {
    "model.embedding_init_method_std": "model.init_method_std",
    "validation.eval_global_batch_size": "train.global_batch_size",
    "validation.eval_micro_batch_size": "train.micro_batch_size",
}
"""Fields that are as others where nobody sets them."""

RECIPE = (
    "write it as YAML where Megatron-Bridge is installed: RECIPE().to_yaml('recipe.yaml'), or take run_config.yaml "
    "of one of its checkpoints"
)


@dataclass(frozen=True, kw_only=True)
class Field:
    """One value, plain: an enumeration, a number format or a function is its name."""

    value: Any
    line: int  # 0: behind the file


@dataclass(frozen=True, kw_only=True)
class Given:
    """All that a source says."""

    path: Path
    fields: dict[str, Field]  # section.field
    targets: dict[str, str]  # classes of sections, without their modules
    is_whole: bool  # ConfigContainer wrote it, not a person who changes a recipe
    model: str | None  # a model of the catalogue


class Fields:
    """Values by section.field, with the defaults of the classes."""

    def __init__(self, given: Given) -> None:
        self.given = given
        said = {name: field.value for name, field in given.fields.items()}
        self.is_latent = said.get(
            "model.multi_latent_attention", False
        )  # which the class of such models leaves off
        self.defaults = {
            f"{name}.{key}": value for name, held in sections().items() for key, value in held.fields.items()
        }
        if given.targets.get("model") == "MLAModelProvider":
            self.defaults |= {f"model.{k}": v for k, v in sections()["model"].latent.items()}
        self.values = self.defaults | said

    def __getitem__(self, name: str) -> Any:
        value = self.values.get(name)
        return _last_name(value) if _is_source(value) else value

    def whole(self, name: str) -> int:
        """A whole number; 0 for none. Raises InputError for anything else."""
        value = self[name] or 0
        if not isinstance(value, int):
            where = (
                self.given.path if name not in self.given.fields else f"{self.given.path}:{self.line(name)}"
            )
            raise InputError(f"{where}: {name} is not a whole number", got=value)
        return value

    def said(self) -> list[str]:
        """Those that are not at their default."""
        return [name for name, field in self.given.fields.items() if not self._is_default(name, field.value)]

    def says(self, section: str) -> bool:
        """Whether anything of `section` is said."""
        return section in self.given.targets or any(n.startswith(f"{section}.") for n in self.given.fields)

    def line(self, name: str) -> int:
        return self.given.fields[name].line

    def _is_default(self, name: str, value: Any) -> bool:
        default = self.defaults.get(name)
        if name in DERIVED:
            default = self[DERIVED[name]]
        if _is_source(default):
            return str(value) == _last_name(default)
        return value == default and isinstance(value, bool) == isinstance(default, bool)


def _is_source(default: Any) -> bool:
    """Whether a default is no literal: then it is known by its last name."""
    return isinstance(default, str) and default.startswith("=")


def _last_name(source: str) -> str | None:
    """Of `=torch.float32` it is `float32`; of a field that must be said, none."""
    return re.split(r"[.=]", source)[-1] or None


def refuse_recipe(source: str) -> None:
    """Raise InputError where `source` is a recipe: a Python file, a function of one, or its name."""
    path = source.partition(" ")[0]
    if path.endswith((".py", "_config")) or (":" in path and not Path(path).exists()):
        raise InputError("recipes of Megatron-Bridge are Python, which is not run", got=path, hint=RECIPE)


def is_bridge_yaml(source: str) -> bool:
    """Whether `source` is YAML of Megatron-Bridge: its keys are sections of ConfigContainer."""
    from ruamel.yaml import YAML, YAMLError

    path = Path(pieces_of(source)[0])
    if path.suffix not in ENDINGS:
        return False
    try:
        node = YAML().compose(path)
    except (OSError, YAMLError, UnicodeDecodeError):  # whoever reads it says what is wrong
        return False
    held = dict(_kinds(node))
    return "_target_" in held or ("map" in held.values() and held.keys() <= sections().keys())


def _kinds(node: Any) -> Iterator[tuple[str, str]]:
    """Keys of a mapping, with what kind of value each has."""
    if node is not None and node.tag.endswith(":map"):
        for key, value in node.value:
            yield str(key.value), value.tag.rpartition(":")[2]


def read(source: str) -> Given:
    """What `source` says. Raises InputError, with the line, for a name that Megatron-Bridge does not have."""
    pieces = pieces_of(source)
    paths = [piece for piece in pieces if "=" not in piece]
    fields: dict[str, Field] = {}
    targets: dict[str, str] = {}
    model, is_whole = None, False
    for path in map(Path, paths):
        content = _loaded(path)
        is_whole |= content.get("_target_") == CONTAINER
        for name, value, line in _flat(content):
            _add(name, value, fields=fields, targets=targets, where=f"{path}:{line}", line=line)
    for piece in pieces:
        name, equals, text = piece.lstrip("+").partition("=")
        if equals and name == "model":
            model = text
        elif equals:
            _add(name, _parsed(text), fields=fields, targets=targets, where="behind the file", line=0)
    return Given(path=Path(paths[0]), fields=fields, targets=targets, is_whole=is_whole, model=model)


def _loaded(path: Path) -> dict[str, Any]:
    from ruamel.yaml import YAML, YAMLError

    try:
        content = YAML().load(path)
    except OSError as error:
        raise InputError(f"cannot read the configuration: {error.strerror or error}", got=str(path)) from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not YAML: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} is not a configuration of Megatron-Bridge", hint=RECIPE)
    return content


def _parsed(text: str) -> Any:
    from ruamel.yaml import YAML, YAMLError

    try:
        return YAML(typ="safe").load(text)
    except YAMLError:
        return text


def _flat(content: Any) -> Iterator[tuple[str, Any, int]]:
    """Sections, and fields of sections, with their lines."""
    for section, held in content.items():
        line = _line(content, section)
        if not isinstance(held, dict):
            yield str(section), held, line
            continue
        for key, value in held.items():
            yield f"{section}.{key}", value, _line(held, key)


def _line(held: Any, key: str) -> int:
    try:
        return held.lc.value(key)[0] + 1
    except KeyError:  # `<<` has merged it
        return held.lc.line + 1


def _add(
    name: str, value: Any, *, fields: dict[str, Field], targets: dict[str, str], where: str, line: int
) -> None:
    section, _, key = name.partition(".")
    if section.startswith("_"):
        return
    if section not in sections():
        raise _unknown(name, section, known=sections(), where=where)
    if key == "_target_":
        targets[section] = str(value).rpartition(".")[2]
    elif key and not key.startswith("_"):
        key = key.partition(".")[0]  # of a mapping inside, which no field that is read is
        held = sections()[section]
        known = (*held.fields, *held.others, *held.computed, *held.latent)
        if key not in known and f"{section}.{key}" not in DISTILLATION:
            raise _unknown(name, key, known=known, where=where)
        if key not in held.computed:
            fields[f"{section}.{key}"] = Field(value=plain(value), line=line)
    elif not key and value is not None:
        fields[section] = Field(value=plain(value), line=line)


def _unknown(name: str, key: str, *, known: Any, where: str) -> InputError:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return InputError(
        f"{where}: Megatron-Bridge has no such field",
        got=name,
        hint=f"{hint}it leaves out what it does not know",
    )


def plain(value: Any) -> Any:
    """A value as one writes it on the command line.

    >>> plain({"_target_": "torch.nn.functional.silu", "_call_": False})
    'silu'
    >>> plain({"_target_": "megatron.core.transformer.enums.AttnBackend", "_args_": [5], "_name_": "auto"})
    'auto'
    """
    if isinstance(value, dict) and "_target_" in value:
        return str(value.get("_name_", str(value["_target_"]).rpartition(".")[2]))
    if isinstance(value, list):
        return [plain(one) for one in value]
    return None if value == "???" else value
