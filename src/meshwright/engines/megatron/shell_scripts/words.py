"""Parse the words of a shell script: quotes, escapes and expansions. Open ones raise InputError with the line."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

from meshwright.engines.megatron.shell_scripts.syntax import (
    AndOrList,
    HereDocument,
    Literal,
    Part,
    ShellArithmetic,
    ShellOutput,
    ShellParameter,
    ShellWord,
)
from meshwright.errors import InputError

BLANKS = " \t\r\n"
METACHARACTERS = f"{BLANKS};|&<>()"
NAME = re.compile(r"[A-Za-z_]\w*")
SPECIAL = "@*#?$!-"  # $@, $?, ...
OPERATIONS = (":-", ":=", ":+", ":?", "-", "=", "+", "?", "##", "#", "%%", "%", "//", "/#", "/%", "/",
              "^^", "^", ",,", ",", ":", "@")  # fmt: skip
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "f": "\f", "v": "\v"}


@dataclass(kw_only=True)
class Cursor:
    """A position in a script, with the here-documents whose text follows at the next line."""

    text: str
    name: str  # of the file, for messages
    parse_body: Callable[[Cursor], tuple[AndOrList, ...]]  # parses the commands of `$(...)` up to `)`
    first_line: int = 1
    at: int = 0
    pending: list[HereDocument] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ends = [k for k, letter in enumerate(self.text) if letter == "\n"]

    @property
    def line(self) -> int:
        return self.line_of(self.at)

    def line_of(self, at: int) -> int:
        """Return the line of a position."""
        return self.first_line + bisect_left(self._ends, at)

    @property
    def is_done(self) -> bool:
        return self.at >= len(self.text)

    def starts(self, *texts: str) -> str:
        """Return the first of `texts` that stands at the cursor, or an empty text."""
        return next((text for text in texts if self.text.startswith(text, self.at)), "")

    def error(self, message: str, *, got: object = None) -> InputError:
        return InputError(f"{self.name}:{self.line}: {message}", got=got)

    def skip_blanks(self) -> None:
        """Skip blanks, continued lines and a comment."""
        while not self.is_done:
            if self.starts(" ", "\t", "\r"):
                self.at += 1
            elif self.starts("\\\n"):
                self.at += 2
            elif self.starts("\\\r\n"):
                self.at += 3
            elif self.starts("#"):
                stop = self.text.find("\n", self.at)
                self.at = len(self.text) if stop < 0 else stop
            else:
                return

    def skip_lines(self) -> None:
        """Skip blanks, comments and ends of lines."""
        self.skip_blanks()
        while self.starts("\n"):
            self.newline()
            self.skip_blanks()

    def newline(self) -> None:
        """Pass the end of a line and read the here-documents that begin after it."""
        self.at += 1
        waiting, self.pending = self.pending, []
        for document in waiting:
            self._read_document(document)

    def _read_document(self, document: HereDocument) -> None:
        lines, line = [], self.line
        while not self.is_done:
            stop = self.text.find("\n", self.at)
            stop = len(self.text) if stop < 0 else stop
            text = self.text[self.at : stop]
            self.at = min(stop + 1, len(self.text))
            text = text.lstrip("\t") if document.strips_tabs else text
            if text.rstrip("\r") == document.end:
                break
            lines.append(text)
        content = "".join(f"{text}\n" for text in lines)
        if document.is_literal:
            document.parts = (Literal(text=content, is_quoted=True),)
            return
        inner = Cursor(text=content, name=self.name, parse_body=self.parse_body, first_line=line)
        document.parts = double_quoted(inner, until="", quotes_are_literal=True)


def read_word(cursor: Cursor, *, stop: str = METACHARACTERS) -> ShellWord | None:
    """Parse the word at the cursor; None: there is none."""
    line, parts = cursor.line, tuple(_unquoted(cursor, stop))
    return ShellWord(parts=parts, line=line) if parts else None


def _unquoted(cursor: Cursor, stop: str) -> list[Part]:
    parts: list[Part] = []
    while not cursor.is_done:
        letter = cursor.text[cursor.at]
        if cursor.starts("\\\n"):
            cursor.at += 2
        elif letter == "\\" and cursor.at + 1 < len(cursor.text):
            parts.append(Literal(text=cursor.text[cursor.at + 1], is_quoted=True))
            cursor.at += 2
        elif letter in stop:
            break
        elif letter == "'":
            parts.append(Literal(text=_until_quote(cursor), is_quoted=True))
        elif cursor.starts("$'"):
            cursor.at += 1
            parts.append(Literal(text=_ansi_quoted(cursor), is_quoted=True))
        elif letter == '"' or cursor.starts('$"'):
            cursor.at += 1 if letter == '"' else 2
            inside = double_quoted(cursor, until='"')
            parts += inside or [Literal(text="", is_quoted=True)]
        elif letter in "$`":
            parts.append(_expansion(cursor, is_quoted=False))
        else:
            begin = cursor.at
            cursor.at += 1
            while not cursor.is_done and cursor.text[cursor.at] not in f"{stop}\\'\"$`":
                cursor.at += 1
            parts.append(Literal(text=cursor.text[begin : cursor.at]))
    return parts


def _until_quote(cursor: Cursor) -> str:
    """Return the text in single quotes."""
    stop = cursor.text.find("'", cursor.at + 1)
    if stop < 0:
        raise cursor.error("' is not closed")
    found, cursor.at = cursor.text[cursor.at + 1 : stop], stop + 1
    return found


def _ansi_quoted(cursor: Cursor) -> str:
    r"""Return the text in `$'...'` with its escapes, such as `\n`, replaced."""
    found = re.compile(r"'((?:\\.|[^'\\])*)'", re.DOTALL).match(cursor.text, cursor.at)
    if found is None:
        raise cursor.error("$' is not closed")
    cursor.at = found.end()
    if re.search(r"\\[xuUc0-7]", found[1]):
        raise cursor.error("an escape that is not supported", got=found.group())
    return re.sub(r"\\(.)", lambda one: ESCAPES.get(one[1], one[1]), found[1], flags=re.DOTALL)


def double_quoted(cursor: Cursor, *, until: str, quotes_are_literal: bool = False) -> tuple[Part, ...]:
    """Parse text in which only `$`, a backquote and a backslash have a meaning, up to and with `until`.

    An empty `until` is the end of the text.
    """
    parts: list[Part] = []
    begin = cursor.at

    def flush() -> None:
        if cursor.at > begin:
            parts.append(Literal(text=cursor.text[begin : cursor.at], is_quoted=True))

    while not (until and cursor.starts(until)):
        if cursor.is_done:
            if not until:
                flush()
                return tuple(parts)
            raise cursor.error(f"{until} is not closed")
        if cursor.starts("\\"):
            flush()
            escaped = cursor.text[cursor.at + 1 : cursor.at + 2]
            meant = '$`"\\}' if until == "}" else "$`\\" if quotes_are_literal else '$`"\\'
            if escaped and escaped in meant:
                parts.append(Literal(text=escaped, is_quoted=True))
            elif escaped != "\n":
                parts.append(Literal(text=f"\\{escaped}", is_quoted=True))
            cursor.at = begin = min(cursor.at + 2, len(cursor.text))
        elif cursor.starts("$", "`"):
            flush()
            parts.append(_expansion(cursor, is_quoted=True))
            begin = cursor.at
        elif until == "}" and cursor.starts('"'):  # "${NAME:-"word"}": the quotes are removed
            flush()
            cursor.at += 1
            parts += double_quoted(cursor, until='"')
            begin = cursor.at
        else:
            cursor.at += 1
    flush()
    cursor.at += len(until)
    return tuple(parts)


def _expansion(cursor: Cursor, *, is_quoted: bool) -> Part:
    """Parse what begins with `$` or a backquote."""
    begin = cursor.at
    if cursor.starts("`"):
        found = re.compile(r"`((?:\\.|[^`\\])*)`", re.DOTALL).match(cursor.text, begin)
        if found is None:
            raise cursor.error("` is not closed")
        text = re.sub(r"\\([$`\\])", r"\1", found[1])
        inner = Cursor(text=f"{text})", name=cursor.name, parse_body=cursor.parse_body, first_line=cursor.line)
        commands = cursor.parse_body(inner)
        cursor.at = found.end()
        return ShellOutput(commands=commands, source=found.group(), is_quoted=is_quoted)
    if cursor.starts("$((") and (expression := double_brackets(cursor, begin + 3)) is not None:
        source = cursor.text[begin : cursor.at]
        return ShellArithmetic(expression=expression, source=source, is_quoted=is_quoted)
    if cursor.starts("$("):
        cursor.at += 2
        commands = cursor.parse_body(cursor)
        if not cursor.starts(")"):
            raise cursor.error("$( is not closed")
        cursor.at += 1
        return ShellOutput(commands=commands, source=cursor.text[begin : cursor.at], is_quoted=is_quoted)
    if cursor.starts("${"):
        return _braced(cursor, is_quoted=is_quoted)
    cursor.at += 1
    name = NAME.match(cursor.text, cursor.at)
    one = cursor.text[cursor.at : cursor.at + 1]
    if name is None and not (one and (one.isdigit() or one in SPECIAL)):
        return Literal(text="$", is_quoted=is_quoted)
    cursor.at = name.end() if name else cursor.at + 1
    return ShellParameter(
        name=name.group() if name else one, source=cursor.text[begin : cursor.at], is_quoted=is_quoted
    )


def double_brackets(cursor: Cursor, begin: int) -> tuple[Part, ...] | None:
    """Parse the rest of `((expression))` from `begin` on; None, without moving, for a subshell in a subshell."""
    depth, at = 0, begin
    while at < len(cursor.text):
        letter = cursor.text[at]
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            break
        at += 1
    if cursor.text[at : at + 2] != "))":
        return None
    parts = parse_expression(cursor, begin, at)
    cursor.at = at + 2
    return parts


def parse_expression(cursor: Cursor, begin: int, stop: int) -> tuple[Part, ...]:
    """Parse an arithmetic expression, in which quotes are removed."""
    text = cursor.text[begin:stop].replace('"', "")
    inner = Cursor(text=text, name=cursor.name, parse_body=cursor.parse_body, first_line=cursor.line_of(begin))
    return double_quoted(inner, until="", quotes_are_literal=True)


def _braced(cursor: Cursor, *, is_quoted: bool) -> ShellParameter:
    """Parse `${NAME...}`."""
    begin = cursor.at
    cursor.at += 2
    prefix = ""
    if cursor.starts("#", "!") and not cursor.starts("#}", "!}", "#:", "#-"):
        prefix = cursor.text[cursor.at]
        cursor.at += 1
    found = re.compile(rf"[A-Za-z_]\w*|\d+|[{re.escape(SPECIAL)}]").match(cursor.text, cursor.at)
    if found is None:
        raise cursor.error("an expansion that is not supported", got=cursor.text[begin : begin + 20])
    cursor.at = found.end()
    subscript = ""
    if cursor.starts("["):
        stop = cursor.text.find("]", cursor.at)
        if stop < 0:
            raise cursor.error("[ is not closed")
        subscript, cursor.at = cursor.text[cursor.at + 1 : stop], stop + 1
    operation = cursor.starts(*OPERATIONS)
    if not operation and not cursor.starts("}"):
        raise cursor.error("an expansion that is not supported", got=cursor.text[begin : begin + 20])
    cursor.at += len(operation)
    if is_quoted:
        operand = double_quoted(cursor, until="}")
    else:
        operand = tuple(_unquoted(cursor, "}"))
        if not cursor.starts("}"):
            raise cursor.error("${ is not closed")
        cursor.at += 1
    return ShellParameter(
        name=found.group(), source=cursor.text[begin : cursor.at], subscript=subscript, prefix=prefix,
        operation=operation, operand=operand, is_quoted=is_quoted,
    )  # fmt: skip
