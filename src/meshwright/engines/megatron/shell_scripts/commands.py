"""Parse the commands of a shell script after the grammar of bash. What is not understood raises InputError."""

from __future__ import annotations

import re

from meshwright.engines.megatron.shell_scripts.compounds import compound
from meshwright.engines.megatron.shell_scripts.syntax import (
    AndOrList,
    Body,
    Command,
    FunctionDefinition,
    HereDocument,
    Literal,
    Part,
    ShellAssignment,
    ShellPipeline,
    ShellWord,
    SimpleCommand,
)
from meshwright.engines.megatron.shell_scripts.words import Cursor, read_word
from meshwright.errors import InputError

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]\n]*)\])?(\+?)=")
FUNCTION = re.compile(r"(?:function[ \t]+([\w.:-]+)[ \t]*(?:\([ \t]*\))?|([\w.:-]+)[ \t]*\([ \t]*\))\s*(?=[{(]|\[\[)")
REDIRECTION = re.compile(
    r"(?:\d+|\{\w+\})?(<<<|<<-|<<|<>|<&|>&|>>|>\||<(?!\()|>(?!\()|(?<![^\s;|&()])&>>|(?<![^\s;|&()])&>)"
)
PLACEHOLDER = re.compile(r"<[^\s<>|&;()$\"'\\][^<>|&;\n()$\"']*(?<!\s)(?<!\s\d)>(?=\s|[;)/]|$)")
RESERVED = re.compile(
    r"(if|then|elif|else|fi|for|while|until|do|done|case|esac|select|coproc|[{}!]|\[\[)(?=[\s;|&()<>]|$)"
)
PIPELINE_PREFIX = re.compile(r"!(?=\s)|time(\s+-p)?(?=\s)")
DECLARATIONS = ("export", "declare", "typeset", "local", "readonly")
CLOSING = ("then", "elif", "else", "fi", "do", "done", "esac", "}")


def parse_script(text: str, *, name: str, first_line: int = 1) -> Body:
    """Return the commands of a script. `name` is that of the file."""
    text = text.replace("\r\n", "\n")
    cursor = Cursor(text=text, name=name, parse_body=parse_body, first_line=first_line)
    try:
        body = parse_body(cursor)
    except RecursionError:
        raise InputError(f"{name}: commands are nested too deeply") from None
    if not cursor.is_done:
        raise cursor.error("a word that nothing begins", got=cursor.text[cursor.at :].split("\n")[0][:40])
    return body


def parse_body(cursor: Cursor) -> Body:
    """Parse commands up to a word or bracket that closes them, which is left."""
    found: list[AndOrList] = []
    while True:
        cursor.skip_lines()
        if cursor.is_done or cursor.starts(")", ";;", ";&") or reserved(cursor) in CLOSING:
            return tuple(found)
        found.append(_and_or(cursor))
        cursor.skip_blanks()
        if cursor.starts(";") and not cursor.starts(";;", ";&"):
            cursor.at += 1


def reserved(cursor: Cursor) -> str:
    """Return the reserved word at the cursor, or an empty text."""
    found = RESERVED.match(cursor.text, cursor.at)
    return found[1] if found else ""


def _and_or(cursor: Cursor) -> AndOrList:
    first, rest = _pipeline(cursor), []
    while True:
        cursor.skip_blanks()
        joined = cursor.starts("&&", "||")
        if not joined:
            break
        cursor.at += 2
        cursor.skip_lines()
        rest.append((joined, _pipeline(cursor)))
    is_background = bool(cursor.starts("&")) and not cursor.starts("&>")
    cursor.at += is_background
    return AndOrList(first=first, rest=tuple(rest), is_background=is_background)


def _pipeline(cursor: Cursor) -> ShellPipeline:
    is_negated = False
    cursor.skip_blanks()
    while prefix := PIPELINE_PREFIX.match(cursor.text, cursor.at):
        is_negated = is_negated != (prefix.group() == "!")
        cursor.at = prefix.end()
        cursor.skip_blanks()
    commands = [_command(cursor)]
    while True:
        cursor.skip_blanks()
        if not cursor.starts("|") or cursor.starts("||"):
            return ShellPipeline(commands=tuple(commands), is_negated=is_negated)
        cursor.at += 2 if cursor.starts("|&") else 1
        cursor.skip_lines()
        commands.append(_command(cursor))


def _command(cursor: Cursor) -> Command:
    if found := FUNCTION.match(cursor.text, cursor.at):
        line = cursor.line
        for _ in range(found.group().count("\n")):
            cursor.at = cursor.text.index("\n", cursor.at)
            cursor.newline()
        cursor.at = max(cursor.at, found.end())
        return FunctionDefinition(name=found[1] or found[2], body=_command(cursor), line=line)
    found_compound = compound(cursor)
    if found_compound is None:
        return _simple(cursor)
    documents: list[HereDocument] = []
    cursor.skip_blanks()
    while _redirection(cursor, documents):
        cursor.skip_blanks()
    return found_compound


def _simple(cursor: Cursor) -> SimpleCommand:
    line = cursor.line
    assignments: list[ShellAssignment] = []
    words: list[ShellWord | ShellAssignment] = []
    documents: list[HereDocument] = []
    while True:
        cursor.skip_blanks()
        if cursor.is_done or cursor.starts("\n", ";", "|", ")") or (cursor.starts("&") and not cursor.starts("&>")):
            break
        if not PLACEHOLDER.match(cursor.text, cursor.at) and _redirection(cursor, documents):
            continue
        if cursor.starts("<(", ">("):
            raise cursor.error("process substitution is not supported")
        if cursor.starts("("):
            raise cursor.error("a bracket that is not quoted")
        first = words[0] if words else None
        declares = isinstance(first, ShellWord) and first.bare in DECLARATIONS
        if (not words or declares) and (found := ASSIGNMENT.match(cursor.text, cursor.at)):
            (words if words else assignments).append(_assignment(cursor, found))
            continue
        word = _word(cursor)
        if word is None:
            raise cursor.error("a letter that is not supported", got=cursor.text[cursor.at])
        words.append(word)
    if not (assignments or words or line != cursor.line) and cursor.starts(";", "|", "&"):
        raise cursor.error("a command is missing", got=cursor.text[cursor.at : cursor.at + 2])
    return SimpleCommand(assignments=tuple(assignments), words=tuple(words), documents=tuple(documents), line=line)


def _assignment(cursor: Cursor, found: re.Match[str]) -> ShellAssignment:
    line, cursor.at = cursor.line, found.end()
    value: ShellWord | tuple[ShellWord, ...]
    if cursor.starts("("):
        cursor.at += 1
        value = _array(cursor)
    else:
        value = _word(cursor) or ShellWord(parts=(), line=line)
    return ShellAssignment(name=found[1], subscript=found[2] or "", is_appended=bool(found[3]), value=value, line=line)


def _array(cursor: Cursor) -> tuple[ShellWord, ...]:
    items: list[ShellWord] = []
    while True:
        cursor.skip_lines()
        if cursor.is_done:
            raise cursor.error("( is not closed")
        if cursor.starts(")"):
            cursor.at += 1
            return tuple(items)
        word = _word(cursor)
        if word is None:
            raise cursor.error("a letter that is not supported in an array", got=cursor.text[cursor.at])
        items.append(word)


def _word(cursor: Cursor) -> ShellWord | None:
    """Parse a word; `<your path>`, which the shell would take for redirections, stands for a value in it."""
    parts: list[Part] = []
    line = cursor.line
    while True:
        if found := PLACEHOLDER.match(cursor.text, cursor.at):
            cursor.at = found.end()
            parts.append(Literal(text=found.group(), is_quoted=True))
        elif word := read_word(cursor):
            parts += word.parts
        else:
            return ShellWord(parts=tuple(parts), line=line) if parts else None


def _redirection(cursor: Cursor, documents: list[HereDocument]) -> bool:
    """Parse a redirection, if there is one. Its target does not concern the arguments."""
    found = REDIRECTION.match(cursor.text, cursor.at)
    if found is None:
        return False
    cursor.at = found.end()
    cursor.skip_blanks()
    begin = cursor.at
    if cursor.starts("<(", ">("):
        cursor.at += 2
        parse_body(cursor)
        if not cursor.starts(")"):
            raise cursor.error("( is not closed")
        cursor.at += 1
        return True
    target = _word(cursor)
    if target is None:
        raise cursor.error("a redirection without a file", got=found.group())
    if found[1] in ("<<", "<<-"):
        written = cursor.text[begin : cursor.at]
        document = HereDocument(
            end=re.sub(r"[\"'\\]", "", written),
            is_literal=any(mark in written for mark in "\"'\\"),
            strips_tabs=found[1] == "<<-",
        )
        cursor.pending.append(document)
        documents.append(document)
    return True
