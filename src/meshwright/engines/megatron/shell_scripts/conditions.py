"""Conditions of a shell script: tests on words and numbers. Tests on files and programs have no known result."""

from __future__ import annotations

import re
import shlex
from fnmatch import fnmatchcase
from pathlib import Path

from meshwright.engines.megatron.megatron_lm.arithmetic import evaluate_integer
from meshwright.engines.megatron.shell_scripts.expansion import (
    NAME_IN_ARITHMETIC,
    REFERENCE,
    ShellVariables,
    expand,
)
from meshwright.engines.megatron.shell_scripts.statements import TESTS, Word
from meshwright.errors import InputError

COMPARISON = re.compile(r"(.+?)(<=|>=|==|!=|<|>)(.+)")
ON_FILES = re.compile(r"[\s\[!]*-[bcdefghkprsuwxLS]\s")
ORDERS = {"-eq": (0,), "-ne": (-1, 1), "-gt": (1,), "-lt": (-1,), "-ge": (0, 1), "-le": (-1, 0)}


def condition_holds(text: str, variables: ShellVariables, *, line: int, path: Path) -> bool | None:
    """Return the value of a condition; None: it depends on files or on a program."""
    if found := re.match(r"case (\S+) in (.*)", text):
        value = _expanded(found[1].strip("\"'"), variables, line=line, path=path)
        return any(fnmatchcase(value, pattern.strip(" \"'")) for pattern in found[2].split("|"))
    result, joined = False, "||"
    for part in re.split(
        r"(\|\||&&)", re.sub(r"\s-([ao])\s", lambda f: " && " if f[1] == "a" else " || ", text)
    ):
        if part in ("||", "&&"):
            joined = part
            continue
        if ON_FILES.match(part) or not (
            text.startswith(tuple(TESTS)) or part.lstrip("! ").startswith(tuple(TESTS))
        ):
            return None
        test = _arithmetic_test if text.startswith("((") else _word_test
        held = test(part.strip(), variables, line=line, path=path)
        result = (result or held) if joined == "||" else (result and held)
    return result


def _arithmetic_test(text: str, variables: ShellVariables, *, line: int, path: Path) -> bool:
    """Evaluate a comparison, or test that an expression is not 0. Variables that are not set are 0."""
    expression = NAME_IN_ARITHMETIC.sub(
        lambda name: str(variables.values.get(name[1]) or 0), text.strip("() ")
    )
    found, what = COMPARISON.fullmatch(expression), f"{path}:{line}"
    if found is None:
        return evaluate_integer(expression, what=what) != 0
    left, right = evaluate_integer(found[1], what=what), evaluate_integer(found[3], what=what)
    order = (left > right) - (left < right)
    return order in {"<": (-1,), ">": (1,), "<=": (-1, 0), ">=": (0, 1), "==": (0,), "!=": (-1, 1)}[found[2]]


def _word_test(text: str, variables: ShellVariables, *, line: int, path: Path) -> bool:
    """Evaluate `-z`, `-n`, a comparison of words or a comparison of numbers."""
    inside = text.removeprefix("[[").removesuffix("]]").removeprefix("[").removesuffix("]")
    try:
        parts = shlex.split(inside)
    except ValueError:
        parts = []
    is_negated = bool(parts) and parts[0] == "!"
    parts = parts[is_negated:]
    if parts and parts[0] in ("-z", "-n"):
        is_empty = not (parts[1:] and _expanded(parts[1], variables, line=line, path=path))
        return (is_empty == (parts[0] == "-z")) != is_negated
    if len(parts) == 3:
        left, right = (_expanded(parts[k], variables, line=line, path=path) for k in (0, 2))
        if parts[1] in ("=", "==", "!="):
            return (fnmatchcase(left, right) == (parts[1] != "!=")) != is_negated
        if parts[1] in ORDERS and left.isdigit() and right.isdigit():
            order = (int(left) > int(right)) - (int(left) < int(right))
            return (order in ORDERS[parts[1]]) != is_negated
    raise InputError(f"{path}:{line}: a condition that is not supported", got=text)


def _expanded(text: str, variables: ShellVariables, *, line: int, path: Path) -> str:
    """Expand a word of a condition. Variables that are not set are empty."""
    expanded = expand(Word(text=f'"{text}"', line=line), variables, path=path)
    return REFERENCE.sub("", " ".join(word.text for word in expanded))
