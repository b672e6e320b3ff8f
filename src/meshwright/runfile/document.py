"""Read YAML into plain values that remember where they stood.

It follows the YAML 1.2 core schema, with one addition: digits may be grouped (`4_194_304`).
And there are bounds: one document, keys are text and appear once, numbers are finite, no tags, and a size,
a depth and a number of values that no honest run file reaches, so that a hostile one costs little.
"""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from meshwright.catalog import lookup as catalog
from meshwright.errors import RunFileError, nearest
from meshwright.json_values import first_bytes, parse_json
from meshwright.runfile.problems import KeyPath, RunFileProblem, SourceLocation, as_error, key_name
from meshwright.units import MAX_DIGITS

MAX_BYTES = 64 * 1024
MAX_VALUES = 10_000
TEXTS_OR_MAPPINGS = ("cluster", "parallel", "parallel.recompute", "data.source", "data.validation")
"""Keys that are text or mappings."""
MAX_DEPTH = 20

_INT = re.compile(r"[-+]?\d+(_\d+)*|0x[0-9a-fA-F]+|0o[0-7]+|0b[01]+")
_FLOAT = re.compile(r"[-+]?(\.\d+|\d+(_\d+)*(\.\d*)?)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_CONSTANTS = {"": None, "~": None} | {
    spelling: value
    for word, value in (("null", None), ("true", True), ("false", False))
    for spelling in (word, word.title(), word.upper())
}
_TAGS = {  # the ones that the parser gives to untagged values
    f"tag:yaml.org,2002:{kind}"
    for kind in ("map", "seq", "str", "int", "float", "bool", "null", "timestamp", "merge", "value")
}


@dataclass(frozen=True, kw_only=True)
class RunFileDocument:
    """The content of a run file, before it is validated."""

    file: str
    text: str = ""
    value: dict[str, Any]
    places: dict[KeyPath, SourceLocation] = field(default_factory=dict)
    problems: tuple[RunFileProblem, ...] = ()

    def stated(self, *path: str) -> Any:
        """The value that the file states at `path`; None where it states none, or null."""
        found: Any = self.value
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        return found

    def error(self, problems: list[RunFileProblem]) -> RunFileError:
        """The exception that says all of `problems`."""
        return as_error(problems, file=self.file, places=self.places)


def read_text(path: str | os.PathLike[str], *, kind: str = "run file") -> str:
    """The text of a file; every way in which it is not the text of a file of this kind is a `RunFileError`."""
    name = os.fspath(path)
    try:
        data = first_bytes(Path(name), MAX_BYTES + 1)
    except FileNotFoundError:
        raise RunFileError("no such file", file=name, hint=_near_file(Path(name), kind)) from None
    except IsADirectoryError:
        raise RunFileError(f"is a folder, not {_a(kind)}", file=name) from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise RunFileError(f"cannot be read ({getattr(error, 'strerror', None) or error})", file=name) from None
    if len(data) > MAX_BYTES:
        raise RunFileError(f"is too large for {_a(kind)}", file=name, allowed=f"<= {MAX_BYTES // 1024} KiB")
    if b"\0" in data:
        raise RunFileError(f"is a binary file, not {_a(kind)}", file=name)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise RunFileError("is not UTF-8 text", file=name, line=line) from None
    return _of_resolved(text, name) if name.endswith(".json") else text


def _of_resolved(text: str, name: str) -> str:
    """The run file that the `resolved.json` of a training holds; other JSON as it is."""
    try:
        document = parse_json(text)
    except ValueError:
        return text
    if not isinstance(document, dict) or "plan_in_words" not in document:
        return text
    if not isinstance(found := document.get("run_file"), str):
        raise RunFileError("a resolved run without its run file", file=name, hint="take the run.yaml of its folder")
    return found


def _a(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def parse(text: str, *, file: str) -> RunFileDocument:
    """A run file's text as a document. Raises `RunFileError` where it is not YAML or not a mapping."""
    root = _compose(text, file=file)
    if root is None:
        raise RunFileError("is empty", file=file, hint="a run file needs at least model, data, batch and cluster")
    builder = _Builder()
    try:
        value = builder.build(root, (), ())
    except _RefusedError as refused:
        raise as_error([refused.problem], file=file, places=builder.places) from None
    if not isinstance(value, dict):
        hint = "a run file looks like `model: llama3.1-8b`, one key a line"
        raise RunFileError("must be a mapping of keys", file=file, line=1, hint=hint)
    return RunFileDocument(file=file, text=text, value=value, places=builder.places, problems=tuple(builder.problems))


class NamedOverride(str):
    """`key.path=value` of an option or an argument, by whose name errors call it: `--network`."""

    __slots__ = ("name",)
    name: str

    def __new__(cls, assignment: str, *, name: str) -> NamedOverride:
        found = super().__new__(cls, assignment)
        found.name = name
        return found


def override(document: RunFileDocument, assignment: str) -> RunFileDocument:
    """`document` with one `key.path=value` laid over it; the value is YAML."""
    key, equals, text = assignment.partition("=")
    path = tuple(key.strip().split("."))
    named = assignment.name if isinstance(assignment, NamedOverride) else None
    label = named or f"--set {key_name((key.strip(),))}"
    if not equals or not all(path):
        raise RunFileError("must read key=value", file="--set", got=assignment, hint="--set batch.micro=2")
    root = _compose(text, file=label)
    builder = _Builder(place=label)
    try:
        value = None if root is None else builder.build(root, path, ())
    except _RefusedError as refused:
        raise as_error([refused.problem], file=label, places=builder.places) from None
    places = {p: place for p, place in document.places.items() if p[: len(path)] != path}
    return RunFileDocument(
        file=document.file,
        text=document.text,
        value=_replaced(document.value, path, value, label),
        places=places | {path: label} | builder.places,
        problems=document.problems + tuple(builder.problems),
    )


def _replaced(mapping: Any, path: tuple[str, ...], value: Any, label: str, depth: int = 0) -> dict[str, Any]:
    if isinstance(mapping, str):
        mapping = in_full(path[:depth], mapping, key=path[depth])
    if not isinstance(mapping, dict):
        parent = ".".join(path[:depth])
        hint = f"--set '{parent}={{{path[depth]}: ...}}'" if parent in TEXTS_OR_MAPPINGS else None
        raise RunFileError(f"{parent} is not a mapping here", file=label, got=str(mapping), hint=hint)
    head, is_last = path[depth], depth == len(path) - 1
    if is_last:
        return mapping | {head: value}
    below = mapping.get(head)
    return mapping | {head: _replaced({} if below is None else below, path, value, label, depth + 1)}


_NAMED_CLUSTER_KEYS = (
    "name", "accelerator", "fabric", "network", "oversubscription", "device_memory", "host_memory", "power_w",
)  # fmt: skip
"""Keys that a cluster with a name may have."""


def in_full(path: Sequence[str], text: str, *, key: str) -> str | dict[str, Any]:
    """The text of a model or a cluster as the mapping to which `key` may be added; other text as it is.

    >>> in_full(["cluster"], "h100-8x4", key="network")
    {'name': 'h100-8x4'}
    """
    if tuple(path) == ("model",):
        return {"base": text}
    return {"name": text} if tuple(path) == ("cluster",) and key in _NAMED_CLUSTER_KEYS else text


def _near_file(path: Path, kind: str) -> str | None:
    try:
        near = nearest(path.name, (p.name for p in path.parent.iterdir() if p.is_file()))
    except (OSError, ValueError):
        return None
    if near:
        return f"did you mean {str(path.with_name(near))!r}?"
    if kind != "run file":
        return None
    if path.suffix not in (".yaml", ".yml") and (known := nearest(str(path), catalog.run_file_names())):
        return f"did you mean {known!r}, which ships?"
    return "`meshwright catalog runs` lists those that ship"


def _compose(text: str, *, file: str) -> Any:
    """The node graph of one YAML document, None when there is nothing in it."""
    if len(text) > MAX_BYTES:
        raise RunFileError("is too large for a run file", file=file, allowed=f"<= {MAX_BYTES // 1024} KiB")
    try:
        with warnings.catch_warnings():  # of anchors that are used twice
            warnings.simplefilter("ignore")
            return YAML(typ="safe", pure=True).compose(text)
    except RecursionError:
        raise RunFileError("is nested too deeply", file=file, allowed=f"<= {MAX_DEPTH} levels") from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = None if mark is None else int(mark.line) + 1
        problem = " ".join(str(error.problem or error.context or "syntax error").split())
        if "single document" in str(error.context):
            problem = "a run file holds one document, here a second one begins"
        hint = "indent with spaces: YAML allows no tabs" if _has_tab(text, line) else None
        raise RunFileError(f"is not YAML: {problem}", file=file, line=line, hint=hint) from None
    except YAMLError as error:
        problem = getattr(error, "reason", None) or "syntax error"
        raise RunFileError(f"is not YAML: {problem}", file=file) from None
    except Exception as error:  # the parser lets a few Python errors through on garbage
        raise RunFileError(f"is not YAML: {type(error).__name__}", file=file) from None


def _has_tab(text: str, line: int | None) -> bool:
    lines = text.splitlines()
    nearby = lines[max(0, line - 2) : line] if line else []
    return any("\t" in content[: len(content) - len(content.lstrip())] or ":\t" in content for content in nearby)


class _RefusedError(Exception):
    """The document breaks a bound; nothing more can be said about it."""

    def __init__(self, problem: RunFileProblem) -> None:
        self.problem = problem


class _Builder:
    """Turns nodes into values and collects places and problems on the way."""

    def __init__(self, place: SourceLocation | None = None) -> None:
        self.place = place  # stands for every line when the text is not a file
        self.places: dict[KeyPath, SourceLocation] = {}
        self.problems: list[RunFileProblem] = []
        self.num_values = 0

    def build(self, node: Any, path: KeyPath, parents: tuple[int, ...]) -> Any:
        """The value of `node`. Aliases are expanded; the bounds hold for what they expand to."""
        place = self.place or node.start_mark.line + 1
        self.places.setdefault(path, place)
        self.num_values += 1
        if id(node) in parents:
            raise _RefusedError(RunFileProblem(path=path, message="contains itself", place=place))
        if len(parents) >= MAX_DEPTH:
            allowed = f"<= {MAX_DEPTH} levels"
            raise _RefusedError(RunFileProblem(message="is nested too deeply", allowed=allowed, place=place))
        if self.num_values > MAX_VALUES:
            allowed = f"<= {MAX_VALUES} values, aliases counted as often as they are used"
            raise _RefusedError(RunFileProblem(message="has too many values", allowed=allowed))
        if str(node.tag) not in _TAGS:
            self.problems.append(RunFileProblem(path=path, message="tags (!...) are not allowed in a run file"))
        below = (*parents, id(node))
        if isinstance(node, ScalarNode):
            return self._scalar(node, path)
        if isinstance(node, MappingNode):
            return self._mapping(node, path, below)
        return [self.build(item, (*path, i), below) for i, item in enumerate(node.value)]

    def _mapping(self, node: MappingNode, path: KeyPath, parents: tuple[int, ...]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            place = self.place or key_node.start_mark.line + 1
            key = self._key(key_node, path, place)
            if key is None:
                continue
            if key in found:
                first = self.places[(*path, key)]
                message = "appears twice" if first == place else f"appears twice (first on line {first})"
                self.problems.append(RunFileProblem(path=(*path, key), message=message, place=place))
                continue
            self.places[(*path, key)] = place
            found[key] = self.build(value_node, (*path, key), parents)
        return found

    def _key(self, node: Node, path: KeyPath, place: SourceLocation) -> str | None:
        key = node.value
        if isinstance(node, ScalarNode) and (node.style is not None or _is_text(key)):
            return key
        got = key if isinstance(node, ScalarNode) else {} if isinstance(node, MappingNode) else []
        self.problems.append(RunFileProblem(path=path, message="keys must be text", got=got, place=place))
        return None

    def _scalar(self, node: ScalarNode, path: KeyPath) -> Any:
        if node.style is not None:  # quoted
            return node.value
        try:
            return _plain_value(node.value)
        except ValueError as error:
            self.problems.append(RunFileProblem(path=path, message=str(error), got=node.value))
            return None


def _is_text(text: str) -> bool:
    return text not in _CONSTANTS and not _INT.fullmatch(text) and not _FLOAT.fullmatch(text)


def _plain_value(text: str) -> Any:
    """The value of an unquoted scalar.

    >>> [_plain_value(t) for t in ("1e-4", "4_194_304", "0x10", "yes", "~", "1f1b")]
    [0.0001, 4194304, 16, 'yes', None, '1f1b']
    """
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INT.fullmatch(text):
        if len(text) > MAX_DIGITS:
            raise ValueError("number is too large")
        return int(text, {"0x": 16, "0o": 8, "0b": 2}.get(text[:2], 10))
    if _FLOAT.fullmatch(text):
        number = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        if not math.isfinite(number):
            raise ValueError("number must be finite")
        return number
    return text
