"""Blocks of a shell script as what `shell` reads: `case` as `if`, functions and texts behind `<<` left out.

Lines keep their numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from meshwright.errors import InputError

TEXT_BEHIND = re.compile(r"(?<!<)<<-?\s*(['\"]?)([A-Za-z_]\w*)\1")
FUNCTION = re.compile(r"(\s*)(?:function\s+([\w-]+)\s*(?:\(\s*\))?|([\w-]+)\s*\(\s*\))\s*(\{.*)?$")
CASE = re.compile(r"^(\s*)case\s+(\S+)\s+in\b", re.MULTILINE)
PATTERNS = re.compile(r"\(?\s*((?:[^()\n\"']|\"[^\"]*\"|'[^']*')+)\)")
PIECES = re.compile(
    r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|(?<![^\s;])\#[^\n]*|\$\([^()]*\)|(?P<open>\bcase\b(?=\s+\S+\s+in\b))"""
    r"""|(?P<close>\besac\b)|(?P<end>;;)""",
    re.VERBOSE,
)


def without_blocks(text: str) -> tuple[str, dict[str, str]]:
    """`text` with `if` for `case`, and the bodies of its functions by name, which are not in it any more."""
    lines, functions = list(_without_texts(text.split("\n"))), {}
    k = 0
    while k < len(lines):
        found = FUNCTION.match(lines[k])
        if found:
            stop = _end_of_function(lines, k, indent=found[1])
            functions[found[2] or found[3]] = "\n".join(lines[k : stop + 1]).partition("{")[2]
            lines[k : stop + 1] = [""] * (stop + 1 - k)
            k = stop
        k += 1
    return _without_cases("\n".join(lines)), functions


def _without_texts(lines: list[str]) -> Iterator[str]:
    """Lines; those behind `<<WORD` up to WORD are empty."""
    until = ""
    for line in lines:
        if until:
            yield ""
            until = "" if line.strip() == until else until
            continue
        found = None if line.lstrip().startswith("#") else TEXT_BEHIND.search(line)
        yield line if found is None else line[: found.start()]
        until = found[2] if found else ""


def _end_of_function(lines: list[str], begin: int, *, indent: str) -> int:
    """The line that ends the function which begins at `begin`: a brace as far in as its name."""
    if lines[begin].rstrip().endswith("}"):
        return begin
    for k in range(begin + 1, len(lines)):
        if lines[k].startswith(f"{indent}}}"):
            return k
    return begin


def _without_cases(text: str) -> str:
    """Every `case WORD in PATTERN) ...` as `if case WORD in PATTERN; then ...`."""
    found = CASE.search(text)
    if found is None:
        return text
    done, at, kind = [text[: found.start()], found[1]], found.end(), "if"
    while True:
        gap = re.compile(r"(?:\s|#[^\n]*)*").match(text, at)
        assert gap is not None
        done.append("\n" * gap.group().count("\n"))
        at = gap.end()
        if text.startswith("esac", at):
            return "".join((*done, "fi", _without_cases(text[at + len("esac") :])))
        patterns = PATTERNS.match(text, at)
        if patterns is None:
            raise InputError(f"line {text.count(chr(10), 0, at) + 1}: a case that is not supported")
        stop, at_next = _end_of_clause(text, patterns.end())
        body = _without_cases(text[patterns.end() : stop])
        done.append(f"{kind} case {found[2]} in {patterns[1].strip()}; then {body};")
        at, kind = at_next, "elif"


def _end_of_clause(text: str, at: int) -> tuple[int, int]:
    """Where a clause's commands end, and where the next clause, or `esac`, begins."""
    depth = 0
    for piece in PIECES.finditer(text, at):
        if piece["open"]:
            depth += 1
        elif piece["close"] and depth:
            depth -= 1
        elif piece["close"]:
            return piece.start(), piece.start()
        elif piece["end"] and not depth:
            return piece.start(), piece.end()
    raise InputError(f"line {text.count(chr(10), 0, at) + 1}: a case is not closed")
