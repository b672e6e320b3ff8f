"""Parse compound commands: `if`, `case`, `for`, `while`, groups and tests."""

from __future__ import annotations

import re

from meshwright.engines.megatron.shell_scripts.syntax import (
    ArithmeticCommand,
    Body,
    CaseCommand,
    Command,
    CountingCommand,
    ForCommand,
    GroupCommand,
    GroupKind,
    IfCommand,
    ShellWord,
    TestCommand,
    WhileCommand,
)
from meshwright.engines.megatron.shell_scripts.words import (
    BLANKS,
    METACHARACTERS,
    Cursor,
    double_brackets,
    parse_expression,
    read_word,
)

KEYWORD = re.compile(r"(if|for|while|until|case|select|coproc|\{|\[\[)(?=[\s;|&()<>]|$)|\(\(|\(")
TEST_OPERATORS = ("&&", "||", "(", ")", "<", ">")


def compound(cursor: Cursor) -> Command | None:
    """Parse the compound command at the cursor; None: it is none."""
    found = KEYWORD.match(cursor.text, cursor.at)
    if found is None:
        return None
    kind, line = found.group(), cursor.line
    if kind == "((" and (expression := double_brackets(cursor, cursor.at + 2)) is not None:
        return ArithmeticCommand(expression=expression, line=line)
    cursor.at += 1 if kind == "((" else len(kind)
    match kind:
        case "(" | "((":
            return GroupCommand(body=_closed(cursor, ")", kind), kind=GroupKind.SUBSHELL)
        case "{":
            return GroupCommand(body=_closed(cursor, "}", kind), kind=GroupKind.BRACES)
        case "[[":
            return TestCommand(tokens=_test(cursor), line=line)
        case "if":
            return _if(cursor, line)
        case "case":
            return _case(cursor, line)
        case "for":
            return _for(cursor, line)
        case "while" | "until":
            condition = _closed(cursor, "do", kind)
            body = _closed(cursor, "done", kind)
            return WhileCommand(condition=condition, body=body, is_until=kind == "until", line=line)
    raise cursor.error("a command that is not supported", got=kind)


def _closed(cursor: Cursor, end: str, kind: str) -> Body:
    """Parse commands and the word that ends them."""
    body = cursor.parse_body(cursor)
    if not _take(cursor, end):
        raise cursor.error(f"{kind} is not closed by {end}")
    return body


def _take(cursor: Cursor, *ends: str) -> str:
    """Pass one of `ends` if it stands at the cursor, and return it."""
    for end in ends:
        if re.compile(rf"{re.escape(end)}(?![\w-])").match(cursor.text, cursor.at):
            cursor.at += len(end)
            return end
    return ""


def _if(cursor: Cursor, line: int) -> IfCommand:
    branches = []
    while True:
        condition = _closed(cursor, "then", "if")
        branches.append((condition, cursor.parse_body(cursor)))
        end = _take(cursor, "elif", "else", "fi")
        if not end:
            raise cursor.error("if is not closed by fi")
        if end == "elif":
            continue
        otherwise = _closed(cursor, "fi", "if") if end == "else" else ()
        return IfCommand(branches=tuple(branches), otherwise=otherwise, line=line)


def _case(cursor: Cursor, line: int) -> CaseCommand:
    cursor.skip_blanks()
    word, clauses = read_word(cursor), []
    cursor.skip_lines()
    if word is None or not _take(cursor, "in"):
        raise cursor.error("case without in")
    while True:
        cursor.skip_lines()
        if _take(cursor, "esac"):
            return CaseCommand(word=word, clauses=tuple(clauses), line=line)
        patterns: list[ShellWord] = []
        cursor.at += bool(cursor.starts("("))
        while True:
            cursor.skip_blanks()
            pattern = read_word(cursor)
            cursor.skip_blanks()
            if pattern is None or not cursor.starts("|", ")"):
                raise cursor.error("a case that is not closed or not supported")
            patterns.append(pattern)
            cursor.at += 1
            if cursor.text[cursor.at - 1] == ")":
                break
        body = cursor.parse_body(cursor)
        end = cursor.starts(";;&", ";;", ";&")
        cursor.at += len(end)
        clauses.append((tuple(patterns), body, end or ";;"))
        cursor.skip_lines()
        if not end and not re.compile(r"esac\b").match(cursor.text, cursor.at):
            raise cursor.error("a case that is not closed or not supported")


def _for(cursor: Cursor, line: int) -> ForCommand | CountingCommand:
    cursor.skip_blanks()
    if cursor.starts("(("):
        begin = cursor.at
        parts = double_brackets(cursor, begin + 2)
        if parts is None:
            raise cursor.error("for (( is not closed")
        text = cursor.text[begin + 2 : cursor.at - 2]
        bounds = [begin + 2]
        for one in text.split(";"):
            bounds.append(bounds[-1] + len(one) + 1)
        if len(bounds) != 4:
            raise cursor.error("for (( needs three expressions", got=text)
        expressions = tuple(parse_expression(cursor, bounds[k], bounds[k + 1] - 1) for k in range(3))
        _skip_semicolon(cursor)
        return CountingCommand(expressions=expressions, body=_loop(cursor), line=line)
    name = read_word(cursor)
    if name is None or name.bare is None:
        raise cursor.error("for without a name")
    words: tuple[ShellWord, ...] | None = None
    cursor.skip_lines()
    if _take(cursor, "in"):
        found = []
        cursor.skip_blanks()
        while word := read_word(cursor):
            found.append(word)
            cursor.skip_blanks()
        words = tuple(found)
    _skip_semicolon(cursor)
    return ForCommand(name=name.bare, words=words, body=_loop(cursor), line=line)


def _loop(cursor: Cursor) -> Body:
    if cursor.starts("{"):
        cursor.at += 1
        return _closed(cursor, "}", "for")
    if not _take(cursor, "do"):
        raise cursor.error("for without do")
    return _closed(cursor, "done", "for")


def _skip_semicolon(cursor: Cursor) -> None:
    cursor.skip_blanks()
    cursor.at += bool(cursor.starts(";"))
    cursor.skip_lines()


def _test(cursor: Cursor) -> tuple[ShellWord | str, ...]:
    """Parse the words and operators up to `]]`."""
    tokens: list[ShellWord | str] = []
    while True:
        cursor.skip_lines()
        if cursor.is_done:
            raise cursor.error("[[ is not closed")
        if cursor.starts("]]"):
            cursor.at += 2
            return tuple(tokens)
        before = tokens[-1] if tokens else ""
        is_expression = isinstance(before, ShellWord) and before.bare == "=~"
        operator = "" if is_expression else cursor.starts(*TEST_OPERATORS)
        if operator:
            tokens.append(operator)
            cursor.at += len(operator)
            continue
        word = read_word(cursor, stop=BLANKS if is_expression else METACHARACTERS)
        if word is None:
            raise cursor.error("a condition that is not supported", got=cursor.text[cursor.at])
        tokens.append(word)
