"""Expansion of the words of a shell script.

A variable that is not set expands to itself, `$NAME`, and so does what depends on files and programs: `Word.unknown`
says why. Unquoted values are split at blanks. A pattern of files stays as it is, as in a folder without such files.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TypeVar

from meshwright.engines.megatron.shell_scripts.integers import UnknownValueError, integer_of
from meshwright.engines.megatron.shell_scripts.state import ShellValue, ShellVariables, UnknownText
from meshwright.engines.megatron.shell_scripts.syntax import (
    Body,
    Literal,
    Part,
    ShellArithmetic,
    ShellOutput,
    ShellParameter,
    ShellWord,
    Word,
)
from meshwright.errors import InputError

BRACES = re.compile(r"\{([^{}]*)\}")
SEQUENCE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?|([A-Za-z])\.\.([A-Za-z])")
MAX_SEQUENCE = 10_000
UNSET = "it is not set"
T = TypeVar("T")
OPEN_BOX = "\u2423"  # stands for blanks in what is not known, which is one word


class SplitWords(tuple[Word, ...]):
    """Words that are already split."""


@dataclass(kw_only=True)
class _Fields:
    """Words under construction."""

    line: int
    done: list[Word] = field(default_factory=list)
    text: str = ""
    unknown: str = ""
    reason: str = ""  # for every word with a `$` of a value that is known in part
    is_kept: bool = False  # also if it is empty: something in it was quoted

    def close(self) -> None:
        if self.text or self.is_kept:
            unknown = self.unknown or (self.reason if "$" in self.text else "")
            self.done.append(Word(text=self.text, line=self.line, unknown=unknown))
        self.text, self.unknown, self.is_kept = "", "", False

    def add(self, text: str, *, is_quoted: bool) -> None:
        """Add text, which is split at blanks unless it is quoted."""
        if is_quoted:
            self.text, self.is_kept = self.text + text, True
            return
        for k, part in enumerate(re.split(r"[ \t\n]+", text)):
            if k:
                self.close()
            self.text += part

    def add_several(self, value: tuple[Word, ...], *, is_quoted: bool) -> None:
        """Add the elements of an array, each in a word of its own."""
        for k, element in enumerate(value):
            if k:
                self.close()
            if element.choices and not self.text:
                self.done.append(element)
                continue
            self.add(element.text, is_quoted=is_quoted or isinstance(value, SplitWords))
            self.unknown = self.unknown or element.unknown
            self.line = element.line or self.line


Value = str | tuple[Word, ...] | UnknownText
"""Of a part: text, the elements of `@`, or unknown."""


@dataclass(frozen=True, kw_only=True)
class Expander:
    """Expands words with variables and the output of commands."""

    variables: ShellVariables
    output_of: Callable[[Body], str | UnknownText]
    unset_is_empty: bool = False  # as in conditions
    line: int = 0

    def at(self, line: int) -> Expander:
        """Return the expander of a line."""
        return replace(self, line=line)

    @property
    def where(self) -> str:
        return f"{self.variables.name}:{self.line}"

    def integer(self, text: str, *, unset_is_zero: bool = False) -> int:
        """Return the value of an arithmetic expression; see `integer_of`."""
        return integer_of(text, self.variables, where=self.where, unset_is_zero=unset_is_zero)

    def words(self, word: ShellWord) -> list[Word]:
        """Return the words to which a word expands: none, one or several."""
        here = self.at(word.line)
        return [one for parts in here._without_braces(word.parts) for one in here._split(parts)]

    def joined(self, word: ShellWord) -> str | UnknownText:
        """Return a word that is not split, as in assignments and conditions."""
        return self.at(word.line)._joined(word.parts)

    def as_written(self, word: ShellWord) -> str | UnknownText:
        """Return a word that is not split, with `$NAME` for what is not known."""
        text, reason, if_empty = "", "", ""
        here = self.at(word.line)
        for part in word.parts:
            value = here._value(part)
            if isinstance(value, UnknownText):
                text += value.text or ("" if isinstance(part, Literal) else part.source.replace(" ", OPEN_BOX))
                reason = value.reason if reason in ("", UNSET) else reason
                if_empty += value.if_empty or ""
                continue
            text, if_empty = text + _text_of(value), if_empty + _text_of(value)
            if not isinstance(value, str):
                reason = reason or next((element.unknown for element in value if element.unknown), "")
        if not reason:
            return text
        return UnknownText(reason=reason, text=text, if_empty=if_empty if reason == UNSET else None)

    def pattern(self, word: ShellWord) -> str | UnknownText:
        """Return a word as a pattern of `fnmatch`, in which quoted text has no special characters."""
        return self.at(word.line)._pattern(word.parts)

    def _split(self, parts: tuple[Part, ...], *, splits_text: bool = False) -> list[Word]:
        fields = _Fields(line=self.line)
        for part in parts:
            if isinstance(part, Literal):
                if splits_text:
                    fields.add(part.text, is_quoted=part.is_quoted)
                else:
                    fields.text, fields.is_kept = fields.text + part.text, fields.is_kept or part.is_quoted
                continue
            value = self._value(part, is_split=not part.is_quoted)
            if isinstance(value, UnknownText) and len(parts) == 1 and (choices := self._choices(value, part)):
                return [Word(text=part.source, line=self.line, unknown=value.reason, choices=choices)]
            if isinstance(value, UnknownText) and not value.text:
                fields.text += part.source
                fields.unknown = fields.unknown or value.reason
                fields.is_kept = fields.is_kept or part.is_quoted
            elif isinstance(value, UnknownText):
                fields.reason = value.reason
                fields.add(value.text, is_quoted=part.is_quoted)
            elif isinstance(value, str):
                fields.add(value, is_quoted=part.is_quoted)
            else:
                fields.add_several(value, is_quoted=part.is_quoted)
        fields.close()
        return fields.done

    def _choices(self, value: UnknownText, part: Part) -> tuple[tuple[Word, ...], ...]:
        """Return what a part of unknown value may expand to; none: it is not known."""
        takes_all = isinstance(part, ShellParameter) and part.subscript in ("@", "*")
        found: list[tuple[Word, ...]] = []
        for one in value.choices:
            if isinstance(one, str) and not takes_all and not part.is_quoted:
                found.append(tuple(Word(text=text, line=self.line) for text in one.split()))
            elif isinstance(one, tuple) and takes_all and (part.is_quoted or not any(" " in word.text for word in one)):
                found.append(one)
            else:
                return ()
        return tuple(found)

    def _joined(self, parts: tuple[Part, ...]) -> str | UnknownText:
        text = ""
        for part in parts:
            value = self._value(part)
            if isinstance(value, UnknownText):
                return replace(value, choices=())
            text += _text_of(value)
        return text

    def _pattern(self, parts: tuple[Part, ...]) -> str | UnknownText:
        text = ""
        for part in parts:
            one = self._joined((part,))
            if isinstance(one, UnknownText):
                return one
            if not part.is_quoted and re.search(r"[@!+?*]\(", one):
                raise InputError(f"{self.where}: a pattern that is not supported", got=one)
            text += re.sub(r"([*?[])", r"[\1]", one) if part.is_quoted else one.replace("[^", "[!")
        return text

    def _value(self, part: Part, *, is_split: bool = False) -> Value:
        match part:
            case Literal():
                return part.text
            case ShellOutput():
                return self.output_of(part.commands)
            case ShellArithmetic():
                text = self._joined(part.expression)
                if isinstance(text, UnknownText):
                    return text
                try:
                    return str(self.integer(text, unset_is_zero=self.unset_is_empty))
                except UnknownValueError as error:
                    return UnknownText(reason=str(error) or UNSET)
            case ShellParameter():
                return self._parameter(part, is_split=is_split)

    def _parameter(self, part: ShellParameter, *, is_split: bool) -> Value:
        if part.name in self.variables.removed and not self.unset_is_empty:
            return replace(self, unset_is_empty=True)._parameter(part, is_split=is_split)
        value = self.variables.get(part.name)
        if part.prefix == "!":
            if not isinstance(value, str) or part.subscript or part.operation:
                return value if isinstance(value, UnknownText) else UnknownText(reason=UNSET)
            return self._parameter(replace(part, name=value, prefix=""), is_split=is_split)
        takes_all = part.subscript in ("@", "*") or part.name in ("@", "*")
        if isinstance(value, str) and takes_all:
            value = (Word(text=value, line=self.line),)
        if isinstance(value, tuple) and not takes_all:
            value = self._element(value, part)
        if part.prefix == "#":
            if value is None and self.unset_is_empty:
                return "0"
            return str(len(value)) if isinstance(value, str | tuple) else value or UnknownText(reason=UNSET)
        if part.operation and part.operation.lstrip(":") in ("-", "=", "+", "?"):
            return self._with_default(part, value, is_split=is_split)
        if value is None and self.unset_is_empty:
            return "" if not takes_all else ()
        if isinstance(value, UnknownText) and self.unset_is_empty and value.if_empty is not None:
            value = value.if_empty
        if isinstance(value, UnknownText | None):
            value = value or UnknownText(reason=UNSET)
            return replace(value, text="", if_empty=None, choices=()) if part.operation else value
        if not part.operation:
            return _text_of(value) if part.is_quoted and "*" in (part.subscript, part.name) else value
        if part.operation == ":" and isinstance(value, tuple):
            return self._slice(value, part)
        if isinstance(value, tuple):
            return tuple(replace(element, text=self._changed(element.text, part)) for element in value)
        return self._changed(value, part)

    def _element(self, value: tuple[Word, ...], part: ShellParameter) -> str | UnknownText | None:
        """Return an element of an array; without a subscript the first one."""
        try:
            index = self.integer(part.subscript or "0")
        except (UnknownValueError, InputError):
            return UnknownText(reason="an element of an array that is not supported")
        if not -len(value) <= index < len(value):
            return None
        element = value[index]
        return UnknownText(reason=element.unknown) if element.unknown else element.text

    def _with_default(self, part: ShellParameter, value: ShellValue | None, *, is_split: bool) -> Value:
        """Return `${NAME:-word}` and its variants."""
        if isinstance(value, UnknownText):
            return replace(value, choices=())
        is_set = value is not None and (not part.operation.startswith(":") or value not in ("", ()))
        kind = part.operation[-1]
        if kind == "+":
            return self._operand(part, is_split=is_split) if is_set else ""
        if is_set and value is not None:
            return value
        if kind == "-":
            return self._operand(part, is_split=is_split)
        if kind == "=":
            default = self._joined(part.operand)
            self.variables.set(part.name, default)
            return default
        return UnknownText(reason=UNSET)

    def _operand(self, part: ShellParameter, *, is_split: bool) -> Value:
        """Return the word of `${NAME:-word}`, whose quotes count where it is split."""
        if is_split and any(one.is_quoted for one in part.operand):
            return SplitWords(self._split(part.operand, splits_text=True))
        if len(part.operand) == 1:
            return self._value(part.operand[0])
        return self._joined(part.operand)

    def _slice(self, value: tuple[Word, ...], part: ShellParameter) -> tuple[Word, ...] | UnknownText:
        if part.name in ("@", "*"):
            value = (Word(text=self.variables.name, line=self.line), *value)
        bounds = self._bounds(part)
        if isinstance(bounds, UnknownText):
            return bounds
        begin, length = bounds
        begin = max(0, begin + len(value)) if begin < 0 else begin
        return value[begin:] if length is None else value[begin : begin + max(0, length)]

    def _bounds(self, part: ShellParameter) -> tuple[int, int | None] | UnknownText:
        """Return offset and length of `${NAME:offset:length}`."""
        text = self._joined(part.operand)
        if isinstance(text, UnknownText):
            return text
        offset, _, length = text.partition(":")
        try:
            return self.integer(offset), self.integer(length) if length else None
        except UnknownValueError as error:
            return UnknownText(reason=str(error) or UNSET)

    def _changed(self, text: str, part: ShellParameter) -> str:
        """Return text after `#`, `%`, `/`, `^`, `,` or `:`."""
        kind = part.operation
        if kind == ":":
            begin, length = self._known(self._bounds(part), part)
            begin = begin + len(text) if begin < 0 else begin
            if begin < 0:
                return ""
            end = None if length is None else length if length < 0 else begin + length
            return text[begin:end]
        if kind in ("^", "^^", ",", ",,") and not part.operand:
            change = str.upper if kind[0] == "^" else str.lower
            return change(text) if len(kind) == 2 else change(text[:1]) + text[1:]
        if kind in ("#", "##", "%", "%%"):
            pattern = self._known(self._pattern(part.operand), part)
            lengths = range(len(text) + 1) if len(kind) == 1 else range(len(text), -1, -1)
            for k in lengths:
                cut, rest = (text[:k], text[k:]) if kind[0] == "#" else (text[len(text) - k :], text[: len(text) - k])
                if fnmatchcase(cut, pattern):
                    return rest
            return text
        if kind in ("/", "//"):
            found = self._joined(part.operand)
            if not isinstance(found, UnknownText) and not re.search(r"[*?[\\]", found) and found.count("/") <= 1:
                old, _, new = found.partition("/")
                return text if not old else text.replace(old, new, 1 if kind == "/" else -1)
        raise InputError(f"{self.where}: an expansion that is not supported", got=part.source)

    def _known(self, value: T | UnknownText, part: ShellParameter) -> T:
        """Return a value of the operand of `part`. Raises InputError if it is not known."""
        if isinstance(value, UnknownText):
            raise InputError(f"{self.where}: an expansion that is not known", got=part.source)
        return value

    def _without_braces(self, parts: tuple[Part, ...]) -> list[tuple[Part, ...]]:
        """Return the parts of the words of `{a,b}` and `{1..3}`."""
        for k, part in enumerate(parts):
            if not isinstance(part, Literal) or part.is_quoted:
                continue
            for found in BRACES.finditer(part.text):
                if (items := self._items(found[1])) is None:
                    continue
                before, after = part.text[: found.start()], part.text[found.end() :]
                words: list[tuple[Part, ...]] = []
                for item in items:
                    changed = Literal(text=f"{before}{item}{after}")
                    words += self._without_braces((*parts[:k], changed, *parts[k + 1 :]))
                    if len(words) > MAX_SEQUENCE:
                        raise InputError(f"{self.where}: a sequence that is too long", got=part.text[:80])
                return words
            if re.search(r"\{[^}]*,|,[^{]*\}", BRACES.sub("", part.text)):
                what = "nested braces, or variables in braces, are not supported"
                raise InputError(f"{self.where}: {what}", got=part.text)
        return [parts]

    def _items(self, text: str) -> list[str] | None:
        """Return what a pair of braces lists; None: it has no special meaning."""
        found = SEQUENCE.fullmatch(text)
        if not found:
            return text.split(",") if "," in text else None
        if found[4]:
            begin, end, step = ord(found[4]), ord(found[5]), 1
        else:
            begin, end, step = int(found[1]), int(found[2]), abs(int(found[3] or 1)) or 1
        if any(one.lstrip("-").startswith("0") and len(one) > 1 for one in (found[1] or "", found[2] or "")):
            raise InputError(f"{self.where}: padded sequences are not supported", got=text)
        if abs(end - begin) // step > MAX_SEQUENCE:
            raise InputError(f"{self.where}: a sequence that is too long", got=text)
        numbers = range(begin, end + (1 if end >= begin else -1), step if end >= begin else -step)
        return [chr(k) if found[4] else str(k) for k in numbers]


def _text_of(value: str | tuple[Word, ...]) -> str:
    return value if isinstance(value, str) else " ".join(element.text for element in value)
