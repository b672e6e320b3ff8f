"""Sections of a run file: pydantic models that are derived from dataclasses, whose fields are the keys.

The type of a field gives the type of the value. Marks of `specs.limits` in it give the range of one value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache, partial, reduce
from operator import or_
from types import GenericAlias, NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, create_model
from pydantic.functional_validators import AfterValidator, BeforeValidator, model_validator
from pydantic_core import PydanticKnownError

from meshwright.specs.limits import Limits, Names, NoKey, Spelled

T = TypeVar("T")
_WORD, _NUMBER, _MAPPING, _VARIANT = "(word)", "(number)", "(mapping)", "(variant)"
UNION_TAGS = {_WORD, _NUMBER, _MAPPING, _VARIANT}
"""Stand in the location of an error where a value may be of two kinds; no key is called so."""


class RunFileSection(BaseModel):
    """A mapping of the run file: its keys are known, its values are what they look like."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=(), defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """Leave out the keys that are null, which have their defaults, and keep the nulls that are values."""
        if not isinstance(value, dict):
            return value
        known = [(name, key) for name, key in cls.model_fields.items() if not key.is_required()]
        nulls = {name for name, key in known if key.default is None or NoneType not in get_args(key.annotation)}
        return {name: one for name, one in value.items() if one is not None or name not in nulls}


def whole(value: object) -> object:
    """`15e12` is a float to YAML and a count to everybody else."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def readable(text: str) -> str:
    """The text. Raises ValueError where nothing of it can be seen, or some of it cannot be printed."""
    if not text.isprintable() or not text.strip():
        raise ValueError("must be printable text")
    return text


Text = Annotated[str, Field(max_length=4096), AfterValidator(readable)]
_LAX = Field(strict=False)  # an enum from its value, a tuple from a list; the items stay strict


def keys_of(kind: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields that are keys of its section."""
    hints = get_type_hints(kind, include_extras=True)
    return {f.name: hints[f.name] for f in fields(kind) if NoKey not in get_args(hints[f.name])}


@cache
def section_of(kind: type) -> type[RunFileSection]:
    """Return the section whose keys are the fields of a dataclass, with the same defaults."""
    usual = {f.name: _default(f.default, f.default_factory) for f in fields(kind)}
    keys = {name: (checked(hint), usual[name]) for name, hint in keys_of(kind).items()}
    return create_model(kind.__name__, __base__=RunFileSection, __doc__=kind.__doc__, **keys)  # pyright: ignore


def _default(value: Any, factory: Any) -> Any:
    return Field(default_factory=factory) if factory is not MISSING else ... if value is MISSING else value


def built(kind: type[T], section: RunFileSection) -> T:
    """Return the dataclass of a section that is derived from it."""
    return kind(**{name: getattr(section, name) for name in type(section).model_fields})


def checked(hint: Any) -> Any:
    """Return the type by which pydantic reads a value of a dataclass's field."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        kind = str if parts[0] is str else checked(parts[0])  # its limits are all that holds for it
        return Annotated[(kind, *map(_constraint, parts[1:]))]
    if origin in (Union, UnionType):
        return _one_of([part for part in parts if part is not NoneType], NoneType in parts)
    if origin is tuple:
        return Annotated[GenericAlias(tuple, tuple(map(checked, parts))), _LAX]
    if origin is Mapping:
        return GenericAlias(dict, tuple(map(checked, parts)))
    if is_dataclass(hint):
        return Annotated[section_of(hint), AfterValidator(partial(built, hint))]  # pyright: ignore
    if hint is str:
        return Text
    if hint is int:
        return Annotated[int, BeforeValidator(whole)]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return Annotated[hint, _LAX]
    return hint


def _constraint(mark: Any) -> Any:
    """Return what pydantic has for a mark of `specs.limits`, or the mark where it is pydantic's own."""
    if isinstance(mark, Limits):
        return Field(**{name: limit for name, limit in vars(mark).items() if limit is not None})
    if isinstance(mark, Names):
        return BeforeValidator(partial(_known, mark))
    if isinstance(mark, Spelled):
        return BeforeValidator(mark.read)
    return AfterValidator(mark) if callable(mark) else mark


def _known(names: Names, value: object) -> object:
    known = tuple(names.known() if callable(names.known) else names.known)
    if known and value not in known:  # where none is known what looks one up says why
        raise PydanticKnownError("enum", {"expected": ", ".join(map(repr, known))})
    return value


def _one_of(parts: Sequence[Any], may_be_none: bool) -> Any:
    """A value of one of several kinds, which the value itself tells apart: its errors are those of its kind."""
    tags = [_tag(part) for part in parts]
    mark = None
    if tags.count(_MAPPING) > 1:  # the first one is meant where its required key is there
        variant = parts[tags.index(_MAPPING)]
        tags[tags.index(_MAPPING)] = _VARIANT
        keys = (section_of(variant) if is_dataclass(variant) else variant).model_fields
        mark = next(name for name, key in keys.items() if key.is_required())
    kinds: list[Any] = [checked(part) for part in parts]
    if len(kinds) > 1:
        choices = (Annotated[kind, Tag(tag)] for kind, tag in zip(kinds, tags, strict=True))

        def tag_of(value: object) -> str:
            if isinstance(value, dict) and _MAPPING in tags:
                return _VARIANT if mark is not None and mark in value else _MAPPING
            return _NUMBER if _NUMBER in tags and not isinstance(value, str) else _WORD

        kinds = [Annotated[reduce(or_, choices), Discriminator(tag_of)]]
    return kinds[0] | None if may_be_none else kinds[0]


def _tag(part: Any) -> str:
    kind = get_args(part)[0] if get_origin(part) is Annotated else part
    origin = get_origin(kind) or kind
    is_mapping = is_dataclass(kind) or (isinstance(origin, type) and issubclass(origin, Mapping | RunFileSection))
    return _MAPPING if is_mapping else _NUMBER if kind is int else _WORD
