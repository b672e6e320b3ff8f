"""Fields of Megatron-Bridge configurations: files written by ConfigContainer, files of overrides, settings.

run_config.yaml                          written by ConfigContainer.to_yaml and its checkpoints: complete
"run_config.yaml more.yaml a.b=10"       overrides in files and after them; the last one counts
"more.yaml recipe=pretrain model=NAME"   overrides of a recipe, for a model of the catalogue; `recipe`: pretrain, sft or
                                         peft, whose shared fields come before those of the file
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from meshwright.engines import refusals
from meshwright.engines.base import is_setting
from meshwright.engines.megatron.megatron_bridge.configuration import CONTAINER, sections
from meshwright.engines.megatron.megatron_lm.options import split_source, yaml_node
from meshwright.errors import InputError
from meshwright.json_values import parse_word, read_yaml

DISTILLATION = ("model.teacher", "model.kd_config")  # of DistillationProvider
DERIVED = {
    "model.embedding_init_method_std": "model.init_method_std",
    "validation.eval_global_batch_size": "train.global_batch_size",
    "validation.eval_micro_batch_size": "train.micro_batch_size",
}
"""Fields that have the value of another field if they are not set."""

FIELDS = tomllib.loads(Path(__file__).with_name("fields.toml").read_text(encoding="utf-8"))
RECIPES: dict[str, dict[str, Any]] = FIELDS["recipes"]

RECIPE = (
    "write it as YAML where Megatron-Bridge is installed: RECIPE().to_yaml('recipe.yaml'), or take run_config.yaml "
    "of one of its checkpoints"
)


@dataclass(frozen=True, kw_only=True)
class BridgeField:
    """The value of a field. Enumerations, number formats and functions are represented by their names."""

    value: Any
    line: int  # 0: after the file


class BridgeFields:
    """The fields of a source by section.field; fields that it lacks have the defaults of their classes."""

    def __init__(
        self, given: dict[str, BridgeField], *, path: Path, targets: dict[str, str], is_complete: bool,
        model: str | None, recipe: str,
    ) -> None:  # fmt: skip
        self.given, self.path = given, path
        self.targets = targets  # classes of sections, without their modules
        self.is_complete = is_complete  # written by ConfigContainer, not an override of a recipe
        self.model = model  # of the catalogue
        self.recipe = recipe  # kind whose shared fields are in `given`; empty for none
        values = {name: field.value for name, field in given.items()}
        # False by default even in the class of models with latent attention.
        self.is_latent = values.get("model.multi_latent_attention", False)
        self.defaults = {
            f"{name}.{key}": value for name, section in sections().items() for key, value in section.fields.items()
        }
        if targets.get("model") == "MLAModelProvider":
            self.defaults |= {f"model.{k}": v for k, v in sections()["model"].latent.items()}
        self.values = self.defaults | values

    def __getitem__(self, name: str) -> Any:
        value = self.values.get(name)
        return _last_name(value) if _is_source(value) else value

    def integer(self, name: str) -> int:
        """Return a whole number; 0 for None. Raises InputError for anything else."""
        value = self[name] or 0
        if not isinstance(value, int):
            where = self.path if name not in self.given else f"{self.path}:{self.given[name].line}"
            raise InputError(f"{where}: {name} is not a whole number", got=value)
        return value

    def changed(self) -> list[str]:
        """Return the names of fields that are not at their default."""
        return [name for name, field in self.given.items() if not self._is_default(name, field.value)]

    def has_section(self, section: str) -> bool:
        """Return True if any field of `section` is given."""
        return section in self.targets or any(name.startswith(f"{section}.") for name in self.given)

    def _is_default(self, name: str, value: Any) -> bool:
        default = self.defaults.get(name)
        if name in DERIVED:
            default = self[DERIVED[name]]
        if _is_source(default):
            return str(value) == _last_name(default)
        return value == default and isinstance(value, bool) == isinstance(default, bool)


def _is_source(default: Any) -> TypeGuard[str]:
    """Return True if a default is source code, not a literal; it is compared by its last name."""
    return isinstance(default, str) and default.startswith("=")


def _last_name(source: str) -> str | None:
    """Return `float32` for `=torch.float32`, and None for a required field."""
    return re.split(r"[.=]", source)[-1] or None


def refuse_recipe(source: str) -> None:
    """Raise InputError if `source` is a recipe: a Python file, a function in one, or its name."""
    path = source.partition(" ")[0]
    if path.endswith((".py", "_config")) or (":" in path and not Path(path).exists()):
        raise InputError("recipes of Megatron-Bridge are Python, which is not executed", got=path, hint=RECIPE)


def is_bridge_yaml(source: str) -> bool:
    """Return True if `source` is YAML of Megatron-Bridge: its keys are sections of ConfigContainer."""
    node = yaml_node(source)
    pairs = node.value if node is not None and node.tag.endswith(":map") else ()
    values = {str(key.value): value for key, value in pairs}
    if "_target_" in values:
        return str(values["_target_"].value).startswith("megatron")
    return any(value.tag.endswith(":map") for value in values.values()) and values.keys() <= sections().keys()


def read(source: str, *, ignore: Collection[str] = ()) -> BridgeFields:
    """Read the fields of `source`, without the unknown ones of `ignore`.

    Raises InputError, with the line, for a name that Megatron-Bridge does not have.
    """
    parts = split_source(source)
    paths = [part for part in parts if not is_setting(part)]
    fields: dict[str, BridgeField] = {}
    targets: dict[str, str] = {}
    named = dict(part.split("=", 1) for part in parts if part.startswith(("model=", "recipe=")))
    if (recipe := named.get("recipe", "")) not in ("", *RECIPES):
        raise InputError("no kind of recipes whose shared fields are known", got=recipe, allowed=", ".join(RECIPES))
    for name, value, _ in _flat(RECIPES.get(recipe, {})):
        fields[name] = BridgeField(value=value, line=0)
    is_complete = False
    ignored: list[str] = []
    for path in map(Path, paths):
        content = _load(path)
        is_complete |= content.get("_target_") == CONTAINER
        for name, value, line in _flat(content):
            try:
                _add(name, value, fields=fields, targets=targets, where=f"{path}:{line}", line=line)
            except InputError:
                if name not in ignore:
                    raise
                ignored.append(name)
    for part in parts:
        name, equals, text = part.lstrip("+").partition("=")
        if equals and name not in named:
            _add(name, parse_word(text), fields=fields, targets=targets, where="after the file", line=0)
    refusals.unknown_keys(ignored, fields, program="Megatron-Bridge", ignore=ignore)
    return BridgeFields(
        fields, path=Path(paths[0]), targets=targets, is_complete=is_complete, model=named.get("model"), recipe=recipe
    )


def _load(path: Path) -> dict[str, Any]:
    from ruamel.yaml import YAML

    content = read_yaml(path, load=YAML().load)
    if not isinstance(content, dict):
        raise InputError(f"{path} is not a configuration of Megatron-Bridge", hint=RECIPE)
    return content


def _flat(content: Any) -> Iterator[tuple[str, Any, int]]:
    """Yield sections and fields of sections with their lines."""
    for section, fields in content.items():
        line = _line(content, section)
        if not isinstance(fields, dict):
            yield str(section), fields, line
            continue
        for key, value in fields.items():
            yield f"{section}.{key}", value, _line(fields, key)


def _line(mapping: Any, key: str) -> int:
    try:
        return mapping.lc.value(key)[0] + 1
    except AttributeError:  # of no file
        return 0
    except KeyError:  # merged by `<<`
        return mapping.lc.line + 1


def _add(
    name: str, value: Any, *, fields: dict[str, BridgeField], targets: dict[str, str], where: str, line: int
) -> None:
    section, _, key = name.partition(".")
    if section.startswith("_"):
        return
    if section not in sections():
        raise _unknown(name, section, known=sections(), where=where)
    if key == "_target_":
        targets[section] = str(value).rpartition(".")[2]
    elif key and not key.startswith("_"):
        key = key.partition(".")[0]  # of a nested mapping; no imported field is one
        declared = sections()[section]
        known = (*declared.fields, *declared.others, *declared.computed, *declared.latent)
        if key not in known and f"{section}.{key}" not in DISTILLATION:
            raise _unknown(name, key, known=known, where=where)
        if key not in declared.computed:
            fields[f"{section}.{key}"] = BridgeField(value=plain(value), line=line)
    elif not key:  # in place of a whole section
        for one in [one for one in fields if one.partition(".")[0] == section]:
            del fields[one]
        if value is not None:
            fields[section] = BridgeField(value=plain(value), line=line)


def _unknown(name: str, key: str, *, known: Any, where: str) -> InputError:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    hint += f"it ignores unknown fields: --ignore {name}"
    return InputError(f"{where}: Megatron-Bridge has no such field", got=name, hint=hint)


def plain(value: Any) -> Any:
    """Return a value as it is written on the command line.

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
