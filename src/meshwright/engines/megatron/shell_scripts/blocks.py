"""Blocks of a shell script in a form that `scripts` reads: `case` as `if`, without functions and here-documents.

Lines keep their numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from meshwright.errors import InputError

HERE_DOCUMENT = re.compile(r"(?<!<)<<-?\s*(['\"]?)([A-Za-z_]\w*)\1")
FUNCTION = re.compile(r"(\s*)(?:function\s+([\w-]+)\s*(?:\(\s*\))?|([\w-]+)\s*\(\s*\))\s*(\{.*)?$")
CASE = re.compile(r"^(\s*)case\s+(\S+)\s+in\b", re.MULTILINE)
PATTERNS = re.compile(r"\(?\s*((?:[^()\n\"']|\"[^\"]*\"|'[^']*')+)\)")
CLAUSE_TOKENS = re.compile(
    r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|(?<![^\s;])\#[^\n]*|\$\([^()]*\)|(?P<open>\bcase\b(?=\s+\S+\s+in\b))"""
    r"""|(?P<close>\besac\b)|(?P<end>;;)""",
    re.VERBOSE,
)


def without_blocks(text: str) -> tuple[str, dict[str, str]]:
    """Return `text` with `if` for `case` and without functions, and the bodies of the functions by name."""
    lines, functions = list(_without_here_documents(text.split("\n"))), {}
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


def _without_here_documents(lines: list[str]) -> Iterator[str]:
    """Yield the lines; those of a here-document, from `<<WORD` to WORD, are empty."""
    until = ""
    for line in lines:
        if until:
            yield ""
            until = "" if line.strip() == until else until
            continue
        found = None if line.lstrip().startswith("#") else HERE_DOCUMENT.search(line)
        yield line if found is None else line[: found.start()]
        until = found[2] if found else ""


def _end_of_function(lines: list[str], begin: int, *, indent: str) -> int:
    """Return the last line of the function that begins at `begin`: a brace with the indentation of its name."""
    if lines[begin].rstrip().endswith("}"):
        return begin
    for k in range(begin + 1, len(lines)):
        if lines[k].startswith(f"{indent}}}"):
            return k
    return begin


def _without_cases(text: str) -> str:
    """Rewrite every `case WORD in PATTERN) ...` as `if case WORD in PATTERN; then ...`."""
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
    """Return the end of a clause's commands and the begin of the next clause or `esac`."""
    depth = 0
    for token in CLAUSE_TOKENS.finditer(text, at):
        if token["open"]:
            depth += 1
        elif token["close"] and depth:
            depth -= 1
        elif token["close"]:
            return token.start(), token.start()
        elif token["end"] and not depth:
            return token.start(), token.end()
    raise InputError(f"line {text.count(chr(10), 0, at) + 1}: a case is not closed")
