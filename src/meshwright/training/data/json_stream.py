"""JSON records of a file without holding the file: lines, an array, or objects one after the other."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from meshwright.errors import InputError

_CHUNK_CHARACTERS = 1 << 20
_MARGIN = 32  # an error so far before the end of what is read is no value that is cut there
_SPACE = " \t\n\r"


def json_lines(stream: TextIO, *, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """One object a line, with its place; empty lines are skipped. Raises InputError at the first other line."""
    for where, record in json_line_values(stream, name=name):
        if not isinstance(record, dict):
            hint = "name the file .json if it is one array" if isinstance(record, list) else None
            raise InputError(f"{where}: a line is one JSON object", got=type(record).__name__, hint=hint)
        yield where, record


def json_line_values(stream: TextIO, *, name: str) -> Iterator[tuple[str, Any]]:
    """One JSON value a line, with its place; empty lines are skipped. Raises InputError at the first other line."""
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        where = f"{name}:{number}"
        try:
            value = _DECODER.decode(line.strip(_SPACE))
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: not JSON: {error}") from error
        yield where, value


def json_values(stream: TextIO, *, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The objects of an array, or of a file of objects, each with its line. Holds one object and a chunk.

    Raises InputError for anything else.
    """
    text = _Window(stream, name)
    is_array = text.skip_space() == "["
    if is_array:
        text.advance(1)
    is_first = True
    while (character := text.skip_space()) not in ("", "]" if is_array else ""):
        if is_array and not is_first:
            if character != ",":
                raise text.error("not JSON: expected , or ]")
            text.advance(1)
            character = text.skip_space()
        if character != "{":
            raise text.error("an element is not a JSON object" if is_array else "not a JSON object")
        where = f"{name}:{text.line}"
        yield where, text.object()
        is_first = False
    if is_array:
        if not character:
            raise text.error("the array has no end: the file is truncated")
        text.advance(1)
        if text.skip_space():
            raise text.error("text after the array")


class _Window:
    """The part of a stream that is read and not used yet, and the line at which it begins."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self.stream, self.name, self.line = stream, name, 1
        self._text, self._at, self._has_ended = "", 0, False

    def skip_space(self) -> str:
        """The next character that is no space, or nothing at the end."""
        while True:
            while self._at < len(self._text):
                character = self._text[self._at]
                if character not in _SPACE:
                    return character
                self.advance(1)
            if not self._read(_CHUNK_CHARACTERS):
                return ""

    def advance(self, number: int) -> None:
        """Step over `number` characters."""
        self.line += self._text.count("\n", self._at, self._at + number)
        self._at += number

    def object(self) -> Mapping[str, Any]:
        """The object that begins here."""
        while True:
            try:
                record, stop = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - _MARGIN
                if is_cut and self._read(max(_CHUNK_CHARACTERS, len(self._text))):  # doubling: linear time
                    continue
                line = self.line + self._text.count("\n", self._at, error.pos)
                what = "the file is truncated" if is_cut else error.msg
                raise InputError(f"{self.name}:{line}: not JSON: {what}") from error
            except (ValueError, RecursionError) as error:
                raise self.error(f"not JSON: {error}") from error
            self.advance(stop - self._at)
            return record

    def error(self, message: str) -> InputError:
        """An error at this line."""
        return InputError(f"{self.name}:{self.line}: {message}")

    def _read(self, number: int) -> bool:
        """Read more; False at the end."""
        if self._has_ended:
            return False
        more = self.stream.read(number)
        self._has_ended = not more
        self._text, self._at = self._text[self._at :] + more, 0
        return bool(more)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. JSON parsers keep the last value of a repeated key, so the others would be lost."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {repeated!r} is there twice")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_without_repeats)
