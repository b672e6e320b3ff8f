"""Check a document against the schema and report its faults in the user's words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from meshwright.errors import nearest
from meshwright.runfile import schema
from meshwright.runfile.document import RunFileDocument
from meshwright.runfile.fields import UNION_TAGS, built, section_of
from meshwright.runfile.problems import KeyPath, RunFileProblem
from meshwright.runfile.synonyms import LORA_TARGETS, UNSUPPORTED, key_for
from meshwright.units import digits_hint

_MISSING, _TOO_FEW = "is missing", "has too few values"
_TYPES = {
    "int_type": "must be a whole number", "int_from_float": "must be a whole number", "float_type": "must be a number",
    "bool_type": "must be true or false", "string_type": "must be text", "model_type": "must be a mapping of keys",
    "tuple_type": "must be a list",
}  # fmt: skip
_LIMITS = {"greater_than": ("> {}", "gt"), "greater_than_equal": (">= {}", "ge")} | {
    "less_than": ("< {}", "lt"),
    "less_than_equal": ("<= {}", "le"),
}
_YAML_1_1_BOOLEANS = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


T = TypeVar("T")


def validate(document: RunFileDocument) -> schema.RunFile:
    """The typed run file. Raises one `RunFileError` with all that is wrong, reading errors included."""
    problems = list(document.problems)
    try:
        file = built(schema.RunFile, section_of(schema.RunFile).model_validate(document.value))
    except ValidationError as errors:
        problems += _from_schema(errors, known={p.path for p in problems})
        raise document.error(problems) from None
    if problems:
        raise document.error(problems)
    return file


def validated(kind: type[T], value: Mapping[str, Any]) -> T | list[RunFileProblem]:
    """Return the typed section that stands by itself, outside of a run file, or all that is wrong with it."""
    try:
        return built(kind, section_of(kind).model_validate(value))
    except ValidationError as errors:
        return _from_schema(errors, known=set(), root=kind)


def _from_schema(errors: ValidationError, *, known: set[KeyPath], root: type = schema.RunFile) -> list[RunFileProblem]:
    """The schema's problems, each of them once: a key that is misspelt is not missing as well."""
    found = [_problem(error, root) for error in errors.errors(include_url=False)]
    misspelt = {(*p.path[:-1], p.meant) for p in found if p.meant}
    lists = {p.path[:-1] for p in found}  # with a wrong item: the rest of a list may be too short
    return [
        p
        for p in found
        if p.path not in known
        and not (p.message == _MISSING and p.path in misspelt)
        and not (p.message == _TOO_FEW and p.path in lists)
    ]


def _problem(error: Any, root: type) -> RunFileProblem:
    kind, got, context = error["type"], error["input"], error.get("ctx", {})
    path = _path(error["loc"])
    if kind == "extra_forbidden":  # whose last part is a key, even where it looks like a tag
        return _unknown_key((*_path(error["loc"][:-1]), str(error["loc"][-1])), root)
    if kind == "missing" and isinstance(path[-1], int):  # an item of a list of fixed length
        return RunFileProblem(path=path[:-1], message=_TOO_FEW)
    if kind == "missing":
        return RunFileProblem(path=path, message=_MISSING)
    if got is None:
        return RunFileProblem(path=path, message="is empty", hint="give it a value, or leave the key out")
    if kind in _TYPES:
        return RunFileProblem(path=path, message=_TYPES[kind], got=got, hint=_type_hint(kind, got))
    if kind in ("enum", "literal_error"):
        return _unknown_word(path, got, str(context["expected"]))
    if kind in _LIMITS:
        text, key = _LIMITS[kind]
        limit = f"{context[key]:,}".removesuffix(".0")
        allowed = text.format(limit)
        return RunFileProblem(path=path, message="is out of range", got=got, allowed=allowed, hint=_unit_hint(path))
    if kind == "too_long":
        return RunFileProblem(path=path, message="has too many values", allowed=f"{context['max_length']}")
    if kind == "too_short":
        return RunFileProblem(path=path, message=_TOO_FEW, allowed=f">= {context['min_length']}")
    message = error["msg"].removeprefix("Value error, ")
    return RunFileProblem(path=path, message=message[:1].lower() + message[1:], got=got)


def _path(location: tuple[str | int, ...]) -> KeyPath:
    return tuple(part for part in location if part not in UNION_TAGS and part != "[key]")


_UNITS = {
    "flops_per_s": "in FLOP per second, dense: 989 TFLOP/s are 989e12",
    "bytes_per_s": "in bytes per second, one direction: 450 GB/s are 450e9, 400 Gbit/s are 50e9",
    "_bytes": "in bytes: 80 GB are 80e9",
}


def _unit_hint(path: KeyPath) -> str | None:
    """The unit of a key that names it in its ending, for a number that may have another one."""
    name = ".".join(map(str, path))
    return next((hint for ending, hint in _UNITS.items() if name.endswith(ending) or f"{ending}." in name), None)


def _unknown_key(path: KeyPath, root: type) -> RunFileProblem:
    key = str(path[-1])
    known = schema.known_keys(path[:-1], root)
    near = nearest(key, known) or next((k for k in known if k.startswith(f"{key}_") or k.endswith(f"_{key}")), None)
    elsewhere = [k for k in schema.all_fields(root) if k.rpartition(".")[2] == key]
    if root is schema.RunFile and (synonym := key_for(key)):
        hint = f"the key is `{synonym}`"
        *parents, name = synonym.split(".")
        near = name if parents == [str(part) for part in path[:-1]] else None
    elif root is schema.RunFile and key.lower().replace("-", "_") in UNSUPPORTED:
        hint, near = UNSUPPORTED[key.lower().replace("-", "_")], None
    elif near == key:
        hint = "it stands in another form of this section"
    elif near:
        hint = f"did you mean {near!r}?"
    elif elsewhere:
        hint = f"the key is `{elsewhere[0]}`"
    else:
        hint = f"known here: {', '.join(known)}"
    return RunFileProblem(path=path, message="unknown key", hint=hint, meant=near)


def _unknown_word(path: KeyPath, got: object, expected: str) -> RunFileProblem:
    known = re.findall(r"'([^']*)'", expected)
    near = nearest(got, known) if isinstance(got, str) else None
    if schema.known_keys(path):
        expected = ", ".join(known) + " or a mapping"
    elif path == ("batch", "micro"):
        expected = "auto or a whole number"
    else:
        expected = ", ".join(known)
    hint = near and f"did you mean {near!r}?"
    if path[:2] == ("lora", "targets") and isinstance(got, str) and got in LORA_TARGETS:
        hint = f"it is called {LORA_TARGETS[got]} here, in every model"
    return RunFileProblem(path=path, message="unknown value", got=got, allowed=expected, hint=hint)


def _type_hint(kind: str, got: object) -> str | None:
    if kind == "string_type":
        return "put it in quotes" if isinstance(got, int | float) else None
    if kind == "bool_type" and isinstance(got, str):
        word = _YAML_1_1_BOOLEANS.get(got.lower())
        return word and f"write {word}"
    if kind in ("int_type", "float_type") and isinstance(got, str):
        return "write the number without quotes" if _reads_as_number(got) else digits_hint(got)
    return None


def _reads_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
