"""Check a document against the schema and say what is wrong in the user's words."""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidationError

from meshwright.errors import nearest
from meshwright.runfile import schema
from meshwright.runfile.document import RunFileDocument
from meshwright.runfile.problems import KeyPath, RunFileProblem
from meshwright.runfile.synonyms import key_for
from meshwright.units import digits_hint

_MISSING = "is missing"
_TYPES = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "model_type": "must be a mapping of keys",
    "tuple_type": "must be a list",
}
_LIMITS = {"greater_than": ("> {}", "gt"), "greater_than_equal": (">= {}", "ge")} | {
    "less_than": ("< {}", "lt"),
    "less_than_equal": ("<= {}", "le"),
}
_YAML_1_1_BOOLEANS = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


def validate(document: RunFileDocument) -> schema.RunFile:
    """The typed run file. Raises one `RunFileError` with all that is wrong, reading errors included."""
    problems = list(document.problems)
    try:
        file = schema.RunFile.model_validate(document.value)
    except ValidationError as errors:
        problems += _from_schema(errors, known={p.path for p in problems})
        raise document.error(problems) from None
    if problems:
        raise document.error(problems)
    return file


def _from_schema(errors: ValidationError, *, known: set[KeyPath]) -> list[RunFileProblem]:
    """The schema's problems, each of them once: a key that is misspelt is not missing as well."""
    found = [_problem(error) for error in errors.errors(include_url=False)]
    misspelt = {(*p.path[:-1], p.meant) for p in found if p.meant}
    return [p for p in found if p.path not in known and not (p.message == _MISSING and p.path in misspelt)]


def _problem(error: Any) -> RunFileProblem:
    kind, got, context = error["type"], error["input"], error.get("ctx", {})
    path = _path(error["loc"])
    if kind == "extra_forbidden":  # whose last part is a key, even where it looks like a tag
        return _unknown_key((*_path(error["loc"][:-1]), str(error["loc"][-1])))
    if kind == "missing" and isinstance(path[-1], int):  # an item of a list of fixed length
        return RunFileProblem(path=path[:-1], message="has too few values")
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
        return RunFileProblem(path=path, message="is out of range", got=got, allowed=text.format(limit))
    if kind == "too_long":
        return RunFileProblem(path=path, message="has too many values", allowed=f"{context['max_length']}")
    if kind == "too_short":
        return RunFileProblem(path=path, message="has too few values", allowed=f">= {context['min_length']}")
    message = error["msg"].removeprefix("Value error, ")
    return RunFileProblem(path=path, message=message[:1].lower() + message[1:], got=got)


def _path(location: tuple[str | int, ...]) -> KeyPath:
    return tuple(part for part in location if part not in schema.UNION_TAGS)


def _unknown_key(path: KeyPath) -> RunFileProblem:
    key = str(path[-1])
    known = schema.known_keys(path[:-1])
    near = nearest(key, known)
    elsewhere = [k for k in schema.all_fields() if k.rpartition(".")[2] == key]
    if synonym := key_for(key):
        hint = f"the key is `{synonym}`"
        *parents, name = synonym.split(".")
        near = name if parents == [str(part) for part in path[:-1]] else None
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
