"""Statements of a shell script, split into words that are not expanded yet."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import InputError

TESTS = {"[[": "]]", "[": " ]", "((": "))"}
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")


@dataclass(frozen=True, kw_only=True)
class Word:
    """One argument and its line."""

    text: str
    line: int


@dataclass(frozen=True, kw_only=True)
class Statement:
    """One command as it is written."""

    words: tuple[Word, ...]
    line: int
    then: str = ""  # `&&` or `||` after it


def statements(text: str, *, path: Path) -> list[Statement]:
    """Return a script's commands in order. The parentheses of an array belong to the word that assigns it."""
    text = text.replace("\\\n", "\v")  # which still counts as a line
    found: list[Statement] = []
    words: list[Word] = []
    at, line = 0, 1

    def end() -> None:
        nonlocal words
        if words:
            then = text[at : at + 2] if text[at : at + 2] in ("&&", "||") else ""
            found.append(Statement(words=tuple(words), line=words[0].line, then=then))
        words = []

    while at < len(text):
        letter = text[at]
        if letter in "\n;|&":
            end()
        if letter in " \t\r\v\n;|&":
            line += letter in "\n\v"
            at += 1
        elif letter == "#":
            stop = min(k for k in (text.find("\n", at), text.find("\v", at), len(text)) if k >= 0)
            at = stop
        else:
            stop = _end_of_test(text, at) if not words else 0
            stop = stop or _end_of_word(text, at, line=line, path=path)
            words.append(Word(text=text[at:stop], line=line))
            line += sum(text.count(mark, at, stop) for mark in "\n\v")
            at = stop
            if words[-1].text in ("then", "else", "do"):
                end()
            elif words[-1].text in ("if", "elif") and len(words) == 1:
                at = _condition(text, at, words, line)
    end()
    return found


def _condition(text: str, at: int, words: list[Word], line: int) -> int:
    """Append the condition up to `; then` as one word; return its end."""
    found = re.compile(r"\s*(.*?)\s*(?:;|\n|\v)\s*(?=then\b)", re.DOTALL).match(text, at)
    if found is None:
        return at
    words.append(Word(text=found.group(1).replace("\v", " "), line=line))
    return found.end(1)


def _end_of_test(text: str, at: int) -> int:
    """Return the end of the test command at `at`: `[ ... ]`, `[[ ... ]]`, `((...))`; 0: there is none."""
    for opening, closing in TESTS.items():
        begins = text.startswith(opening, at) and (opening == "((" or text[at + len(opening)].isspace())
        if begins and (stop := text.find(closing, at + len(opening))) >= 0:
            return stop + len(closing)
    return 0


def _end_of_word(text: str, at: int, *, line: int, path: Path) -> int:
    """Return the end of the word at `at`, including quotes, `$(...)`, `${...}` and the list of an array."""
    array = ASSIGNMENT.match(text, at)
    if array and text[array.end() : array.end() + 1] == "(":
        return end_of_quoted(text, array.end(), ")", line=line, path=path)
    while at < len(text) and text[at] not in " \t\r\n\v;|&":
        if text[at] == "\\":
            at += 2
        elif text[at] in "'\"`":
            at = end_of_quoted(text, at, text[at], line=line, path=path)
        elif text.startswith(("$(", "${"), at):
            closing = ")" if text[at + 1] == "(" else "}"
            at = end_of_quoted(text, at + 1, closing, line=line, path=path)
        elif text[at] in "()":
            raise InputError(f"{path}:{line}: functions and subshells are not supported")
        else:
            at += 1
    return at


def end_of_quoted(text: str, at: int, closing: str, *, line: int, path: Path) -> int:
    """Return the position after the bracket or quote that closes the one at `at`."""
    opening, k = text[at], at + 1
    while k < len(text):
        if text[k] == "\\" and opening != "'":
            k += 2
        elif text[k] == closing:
            return k + 1
        elif opening == "(" and text[k] == "#" and text[k - 1] in " \t\n\v":
            k = min(end for end in (text.find("\n", k), text.find("\v", k), len(text)) if end >= 0)
        elif opening in "({" and text[k] in "'\"":
            k = end_of_quoted(text, k, text[k], line=line, path=path)
        elif opening in '("' and text.startswith(("$(", "${"), k):
            k = end_of_quoted(text, k + 1, ")" if text[k + 1] == "(" else "}", line=line, path=path)
        elif opening == "(" and text[k] == "(":
            k = end_of_quoted(text, k, ")", line=line, path=path)
        else:
            k += 1
    raise InputError(f"{path}:{line}: {opening} is not closed")
