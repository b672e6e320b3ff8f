"""Expansion of the words of a shell script.

A variable that is not set expands to itself, `$NAME`, and so does what depends on files and programs: `Word.unknown`
says why. Unquoted values are split at blanks. A pattern of files stays as it is, as in a folder without such files.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

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

BLANKS = " \t\n"
BRACES = re.compile(r"\{([^{}]*)\}")
SEQUENCE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?|([A-Za-z])\.\.([A-Za-z])")
MAX_SEQUENCE = 10_000
UNSET = "it is not set"
OPEN_BOX = "\u2423"  # stands for blanks in what is not known, which is one word


class SplitWords(tuple[Word, ...]):
    """Words that are already split."""


@dataclass(frozen=True, kw_only=True)
class Expander:
    """Variables and the output of commands, which expansions need."""

    variables: ShellVariables
    output_of: Callable[[Body], str | UnknownText]
    unset_is_empty: bool = False  # as in conditions

    def where(self, line: int) -> str:
        return f"{self.variables.name}:{line}"

    def integer(self, text: str, *, line: int, unset_is_zero: bool = False) -> int:
        """Return the value of an arithmetic expression; see `integer_of`."""
        return integer_of(text, self.variables, where=self.where(line), unset_is_zero=unset_is_zero)


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

    def split(self, text: str) -> None:
        """Add text that is split at blanks."""
        for part in re.split(r"([ \t\n]+)", text):
            if part and part[0] in BLANKS:
                self.close()
            else:
                self.text += part


def expand(word: ShellWord, expander: Expander) -> list[Word]:
    """Return the words to which a word expands: none, one or several."""
    return [one for single in _without_braces(word, expander) for one in _expand_one(single, expander)]


def _expand_one(word: ShellWord, expander: Expander, *, splits_text: bool = False) -> list[Word]:
    fields = _Fields(line=word.line)
    for part in word.parts:
        if isinstance(part, Literal):
            if splits_text and not part.is_quoted:
                fields.split(part.text)
                continue
            fields.text += part.text
            fields.is_kept = fields.is_kept or part.is_quoted
            continue
        value = _value(part, expander, line=word.line, is_split=not part.is_quoted)
        if isinstance(value, UnknownText) and len(word.parts) == 1 and (choices := _choices(value, part, word.line)):
            return [Word(text=part.source, line=word.line, unknown=value.reason, choices=choices)]
        if isinstance(value, UnknownText) and not value.text:
            fields.text += part.source
            fields.unknown = fields.unknown or value.reason
            fields.is_kept = fields.is_kept or part.is_quoted
        elif isinstance(value, UnknownText):
            fields.reason = value.reason
            _add_text(fields, value.text, part)
        elif isinstance(value, str):
            _add_text(fields, value, part)
        else:
            _add_several(fields, value, part)
    fields.close()
    return fields.done


def _choices(value: UnknownText, part: Part, line: int) -> tuple[tuple[Word, ...], ...]:
    """Return what a part of unknown value may expand to; none: it is not known."""
    takes_all = isinstance(part, ShellParameter) and part.subscript in ("@", "*")
    found: list[tuple[Word, ...]] = []
    for one in value.choices:
        if isinstance(one, str) and not takes_all and not part.is_quoted:
            found.append(tuple(Word(text=text, line=line) for text in one.split()))
        elif isinstance(one, tuple) and takes_all and (part.is_quoted or not any(" " in word.text for word in one)):
            found.append(one)
        else:
            return ()
    return tuple(found)


def _add_text(fields: _Fields, text: str, part: Part) -> None:
    if part.is_quoted:
        fields.text, fields.is_kept = fields.text + text, True
    else:
        fields.split(text)


def _add_several(fields: _Fields, value: tuple[Word, ...], part: Part) -> None:
    """Add the elements of an array, each in a word of its own."""
    for k, element in enumerate(value):
        if k:
            fields.close()
        if element.choices and not fields.text:
            fields.done.append(element)
            continue
        if part.is_quoted or isinstance(value, SplitWords):
            fields.text, fields.is_kept = fields.text + element.text, True
        else:
            fields.split(element.text)
        fields.unknown = fields.unknown or element.unknown
        fields.line = element.line or fields.line


def joined(word: ShellWord, expander: Expander) -> str | UnknownText:
    """Return a word that is not split, as in assignments and conditions."""
    text = ""
    for part in word.parts:
        value = part.text if isinstance(part, Literal) else _value(part, expander, line=word.line)
        if isinstance(value, UnknownText):
            return replace(value, choices=())
        text += value if isinstance(value, str) else " ".join(element.text for element in value)
    return text


def as_written(word: ShellWord, expander: Expander) -> str | UnknownText:
    """Return a word that is not split, with `$NAME` for what is not known."""
    text, reason, if_empty = "", "", ""
    for part in word.parts:
        value = part.text if isinstance(part, Literal) else _value(part, expander, line=word.line)
        if isinstance(value, UnknownText):
            text += value.text or ("" if isinstance(part, Literal) else part.source.replace(" ", OPEN_BOX))
            reason = value.reason if reason in ("", UNSET) else reason
            if_empty += value.if_empty or ""
            continue
        one = value if isinstance(value, str) else " ".join(element.text for element in value)
        text, if_empty = text + one, if_empty + one
        if not isinstance(value, str):
            reason = reason or next((element.unknown for element in value if element.unknown), "")
    if not reason:
        return text
    return UnknownText(reason=reason, text=text, if_empty=if_empty if reason == UNSET else None)


def pattern_of(word: ShellWord, expander: Expander) -> str | UnknownText:
    """Return a word as a pattern of `fnmatch`, in which quoted text has no special characters."""
    text = ""
    for part in word.parts:
        one = joined(ShellWord(parts=(part,), line=word.line), expander)
        if isinstance(one, UnknownText):
            return one
        if not part.is_quoted and re.search(r"[@!+?*]\(", one):
            raise InputError(f"{expander.where(word.line)}: a pattern that is not supported", got=one)
        text += re.sub(r"([*?[])", r"[\1]", one) if part.is_quoted else one.replace("[^", "[!")
    return text


def _value(
    part: Part, expander: Expander, *, line: int, is_split: bool = False
) -> str | tuple[Word, ...] | UnknownText:
    """Return the value of a part: text, the elements of `@`, or unknown."""
    match part:
        case Literal():
            return part.text
        case ShellOutput():
            return expander.output_of(part.commands)
        case ShellArithmetic():
            text = joined(ShellWord(parts=part.expression, line=line), expander)
            if isinstance(text, UnknownText):
                return text
            try:
                return str(expander.integer(text, line=line, unset_is_zero=expander.unset_is_empty))
            except UnknownValueError as error:
                return UnknownText(reason=str(error) or UNSET)
        case ShellParameter():
            return _parameter(part, expander, line=line, is_split=is_split)


def _parameter(
    part: ShellParameter, expander: Expander, *, line: int, is_split: bool
) -> str | tuple[Word, ...] | UnknownText:
    value = expander.variables.get(part.name)
    if part.name in expander.variables.removed:
        expander = replace(expander, unset_is_empty=True)
    if part.prefix == "!":
        if not isinstance(value, str) or part.subscript or part.operation:
            return value if isinstance(value, UnknownText) else UnknownText(reason=UNSET)
        return _parameter(replace(part, name=value, prefix=""), expander, line=line, is_split=is_split)
    takes_all = part.subscript in ("@", "*") or part.name in ("@", "*")
    if isinstance(value, str) and takes_all:
        value = (Word(text=value, line=line),)
    if isinstance(value, tuple) and not takes_all:
        value = _element(value, part, expander, line=line)
    if part.prefix == "#":
        if value is None and expander.unset_is_empty:
            return "0"
        if isinstance(value, UnknownText | None):
            return value or UnknownText(reason=UNSET)
        return str(len(value))
    if part.operation.lstrip(":") in ("-", "=", "+", "?") and part.operation != "":
        return _with_default(part, value, expander, line=line, is_split=is_split)
    if value is None and expander.unset_is_empty:
        return "" if not takes_all else ()
    if isinstance(value, UnknownText) and expander.unset_is_empty and value.if_empty is not None:
        value = value.if_empty
    if isinstance(value, UnknownText | None):
        value = value or UnknownText(reason=UNSET)
        return replace(value, text="", if_empty=None, choices=()) if part.operation else value
    if not part.operation:
        return _star(value) if part.is_quoted and "*" in (part.subscript, part.name) else value
    if part.operation == ":" and isinstance(value, tuple):
        return _slice(value, part, expander, line=line)
    if isinstance(value, tuple):
        return tuple(replace(element, text=_changed(element.text, part, expander, line=line)) for element in value)
    return _changed(value, part, expander, line=line)


def _star(value: str | tuple[Word, ...]) -> str:
    return value if isinstance(value, str) else " ".join(element.text for element in value)


def _element(
    value: tuple[Word, ...], part: ShellParameter, expander: Expander, *, line: int
) -> str | UnknownText | None:
    """Return an element of an array; without a subscript the first one."""
    try:
        index = expander.integer(part.subscript or "0", line=line)
    except (UnknownValueError, InputError):
        return UnknownText(reason="an element of an array that is not supported")
    if not -len(value) <= index < len(value):
        return None
    element = value[index]
    return UnknownText(reason=element.unknown) if element.unknown else element.text


def _with_default(
    part: ShellParameter, value: ShellValue | None, expander: Expander, *, line: int, is_split: bool
) -> str | tuple[Word, ...] | UnknownText:
    """Return `${NAME:-word}` and its variants."""
    if isinstance(value, UnknownText):
        return replace(value, choices=())
    is_set = value is not None and (not part.operation.startswith(":") or value not in ("", ()))
    kind = part.operation[-1]
    operand = ShellWord(parts=part.operand, line=line)
    if kind == "+":
        return _operand(part, expander, line=line, is_split=is_split) if is_set else ""
    if is_set and value is not None:
        return value
    if kind == "-":
        return _operand(part, expander, line=line, is_split=is_split)
    if kind == "=":
        default = joined(operand, expander)
        expander.variables.set(part.name, default)
        return default
    return UnknownText(reason=UNSET)


def _operand(
    part: ShellParameter, expander: Expander, *, line: int, is_split: bool
) -> str | tuple[Word, ...] | UnknownText:
    """Return the word of `${NAME:-word}`, whose quotes count where it is split."""
    operand = ShellWord(parts=part.operand, line=line)
    if is_split and any(one.is_quoted for one in part.operand):
        return SplitWords(_expand_one(operand, expander, splits_text=True))
    only = part.operand[0] if len(part.operand) == 1 else None
    if only is not None and not isinstance(only, Literal):
        return _value(only, expander, line=line)
    return joined(operand, expander)


def _slice(
    value: tuple[Word, ...], part: ShellParameter, expander: Expander, *, line: int
) -> tuple[Word, ...] | UnknownText:
    if part.name in ("@", "*"):
        value = (Word(text=expander.variables.name, line=line), *value)
    bounds = _bounds(part, expander, line=line)
    if isinstance(bounds, UnknownText):
        return bounds
    begin, length = bounds
    begin = max(0, begin + len(value)) if begin < 0 else begin
    return value[begin:] if length is None else value[begin : begin + max(0, length)]


def _bounds(part: ShellParameter, expander: Expander, *, line: int) -> tuple[int, int | None] | UnknownText:
    """Return offset and length of `${NAME:offset:length}`."""
    text = joined(ShellWord(parts=part.operand, line=line), expander)
    if isinstance(text, UnknownText):
        return text
    offset, _, length = text.partition(":")
    try:
        found = [expander.integer(one, line=line) for one in ((offset, length) if length else (offset,))]
    except UnknownValueError as error:
        return UnknownText(reason=str(error) or UNSET)
    return found[0], found[1] if length else None


def _changed(text: str, part: ShellParameter, expander: Expander, *, line: int) -> str:
    """Return text after `#`, `%`, `/`, `^`, `,` or `:`."""
    kind, where = part.operation, expander.where(line)
    if kind == ":":
        bounds = _bounds(part, expander, line=line)
        if isinstance(bounds, UnknownText):
            raise InputError(f"{where}: an expansion that is not known", got=part.source)
        begin, length = bounds
        begin = begin + len(text) if begin < 0 else begin
        if begin < 0:
            return ""
        return text[begin:] if length is None else text[begin:length] if length < 0 else text[begin : begin + length]
    if kind in ("^", "^^", ",", ",,") and not part.operand:
        change = str.upper if kind[0] == "^" else str.lower
        return change(text) if len(kind) == 2 else change(text[:1]) + text[1:]
    if kind in ("#", "##", "%", "%%"):
        pattern = pattern_of(ShellWord(parts=part.operand, line=line), expander)
        if isinstance(pattern, UnknownText):
            raise InputError(f"{where}: an expansion that is not known", got=part.source)
        lengths = range(len(text) + 1) if len(kind) == 1 else range(len(text), -1, -1)
        for k in lengths:
            cut, rest = (text[:k], text[k:]) if kind[0] == "#" else (text[len(text) - k :], text[: len(text) - k])
            if fnmatchcase(cut, pattern):
                return rest
        return text
    if kind in ("/", "//"):
        found = joined(ShellWord(parts=part.operand, line=line), expander)
        if not isinstance(found, UnknownText) and not re.search(r"[*?[\\]", found) and found.count("/") <= 1:
            old, _, new = found.partition("/")
            return text if not old else text.replace(old, new, 1 if kind == "/" else -1)
    raise InputError(f"{where}: an expansion that is not supported", got=part.source)


def _without_braces(word: ShellWord, expander: Expander) -> list[ShellWord]:
    """Return the words of `{a,b}` and `{1..3}`."""
    for k, part in enumerate(word.parts):
        if not isinstance(part, Literal) or part.is_quoted:
            continue
        for found in BRACES.finditer(part.text):
            if (items := _items(found[1], expander, word)) is None:
                continue
            before, after = part.text[: found.start()], part.text[found.end() :]
            words: list[ShellWord] = []
            for item in items:
                changed = Literal(text=f"{before}{item}{after}")
                one = replace(word, parts=(*word.parts[:k], changed, *word.parts[k + 1 :]))
                words += _without_braces(one, expander)
                if len(words) > MAX_SEQUENCE:
                    raise InputError(f"{expander.where(word.line)}: a sequence that is too long", got=part.text[:80])
            return words
        rest = BRACES.sub("", part.text)
        if re.search(r"\{[^}]*,|,[^{]*\}", rest):
            where = expander.where(word.line)
            raise InputError(f"{where}: nested braces, or variables in braces, are not supported", got=part.text)
    return [word]


def _items(text: str, expander: Expander, word: ShellWord) -> list[str] | None:
    """Return what a pair of braces lists; None: it has no special meaning."""
    if found := SEQUENCE.fullmatch(text):
        if found[4]:
            begin, end, step = ord(found[4]), ord(found[5]), 1
        else:
            begin, end, step = int(found[1]), int(found[2]), abs(int(found[3] or 1)) or 1
        if any(one.lstrip("-").startswith("0") and len(one) > 1 for one in (found[1] or "", found[2] or "")):
            raise InputError(f"{expander.where(word.line)}: padded sequences are not supported", got=text)
        if abs(end - begin) // step > MAX_SEQUENCE:
            raise InputError(f"{expander.where(word.line)}: a sequence that is too long", got=text)
        numbers = range(begin, end + (1 if end >= begin else -1), step if end >= begin else -step)
        return [chr(k) if found[4] else str(k) for k in numbers]
    return text.split(",") if "," in text else None
