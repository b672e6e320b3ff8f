"""Shell scripts that call Megatron-LM, read without running them: the arguments of `pretrain_gpt.py`.

Supported are assignments, arrays, `+=`, quotes, continued lines, `${NAME:-word}` and its variants, arithmetic in
`$((...))`, and `if`, `case`, `&&` and `||` on words. A variable that is not set expands to itself, `$NAME`: a reader
that needs its value raises an error, and conditions treat it as empty, as the shell does. Sourced files are not read.
Loops and functions that set variables or call the program raise an error: to ignore them would change the result.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum
from pathlib import Path

from meshwright.engines.megatron.shell_scripts.blocks import without_blocks
from meshwright.engines.megatron.shell_scripts.conditions import condition_holds
from meshwright.engines.megatron.shell_scripts.expansion import ShellVariables, expand
from meshwright.engines.megatron.shell_scripts.statements import (
    ASSIGNMENT,
    TESTS,
    Statement,
    Word,
    statements,
)
from meshwright.errors import InputError

PROGRAM = re.compile(r"(^|/)(pretrain|train|finetune|posttrain)\w*\.py$")
LOOPS = ("for", "while", "until", "select")
BRANCHES = ("if", "elif", "else", "fi", "then")
INSTEAD = (
    "or put echo before torchrun in a copy, run that, and import what it prints, in a file called NAME.args"
)
COMMAND_PREFIXES = ("export", "local", "readonly", "declare", "typeset", "exec", "time", "srun", "eval")
REDIRECTION = re.compile(r"\d*[<>]")


class BranchState(Enum):
    """State of one branch of an `if`."""

    RUNS = "runs"
    WAITS = "waits"  # no branch has run yet
    DONE = "done"  # another branch has run
    UNKNOWN = "unknown"  # depends on files, which are not examined


def script_arguments(text: str, *, path: Path, given: Iterable[str] = ()) -> list[Word]:
    """Return the arguments of the training program. `given` are NAME=value and positional arguments of the script.

    Raises InputError, with the line, for a script that calls no program or contains what is not supported.
    """
    variables = ShellVariables()
    position = 0
    for argument in given:
        name, equals, value = argument.partition("=")
        position += not equals
        variables.values[name if equals else str(position)] = value if equals else argument
    try:
        text, variables.functions = without_blocks(text)
        arguments = _run(statements(text, path=path), variables, path=path)
    except InputError as error:
        raise InputError(error.message, hint=error.hint or INSTEAD) from None
    if arguments is None:
        raise InputError(
            f"{path} calls no pretrain_gpt.py", hint="files with only arguments are called NAME.args"
        )
    return arguments


def program_arguments(words: list[Word]) -> list[Word] | None:
    """Return the words after the training program, also where the command is one word of `sh -c`."""
    parts = [
        Word(text=part, line=word.line)
        for word in words
        for part in (word.text.split() if ".py " in word.text else [word.text])
    ]
    for k, word in enumerate(parts):
        if PROGRAM.search(word.text):
            stop = (at for at in range(k, len(parts)) if REDIRECTION.match(parts[at].text))
            return parts[k + 1 : next(stop, len(parts))]
    return None


def _run(script: list[Statement], variables: ShellVariables, *, path: Path) -> list[Word] | None:
    """Execute the assignments; return the arguments of the training program when it is called."""
    branches: list[BranchState] = []  # of the surrounding `if` statements, outermost first
    before: Statement | None = None
    succeeded: bool | None = True  # of the previous statement; None: unknown
    loops = 0
    for statement in script:
        first = statement.words[0].text
        loops += (first in LOOPS) - (first == "done")
        is_skipped = before is not None and bool(before.then) and succeeded is not (before.then == "&&")
        before = statement
        if first in BRANCHES:
            _branch(first, statement, branches, variables, path=path)
            continue
        is_unknown = BranchState.UNKNOWN in branches or (is_skipped and succeeded is None)
        words = _without_prefixes(statement)
        if words and ASSIGNMENT.match(words[0].text) and is_unknown:
            raise InputError(f"{path}:{statement.line}: depends on the existence of files", got=words[0].text)
        if is_skipped or any(branch is not BranchState.RUNS for branch in branches):
            continue
        if first.startswith(tuple(TESTS)):
            succeeded = condition_holds(first, variables, line=statement.line, path=path)
            continue
        succeeded = True
        if loops or first in variables.functions:
            body = variables.functions.get(first) or " ".join(word.text for word in words)
            _require_no_effect(body, f"{path}:{statement.line}", first)
            continue
        if first == "shift":
            variables.shift()
        while words and (found := ASSIGNMENT.match(words[0].text)):
            _assign(found, words.pop(0), variables, path=path)
        expanded = [one for word in words for one in expand(word, variables, path=path)]
        if arguments := program_arguments(expanded):
            return arguments
    return None


def _without_prefixes(statement: Statement) -> list[Word]:
    """Return the words of a statement without `export` and similar commands and their options."""
    words = list(statement.words)
    while words and (
        words[0].text in COMMAND_PREFIXES or (len(words) < len(statement.words) and words[0].text[0] == "-")
    ):
        words.pop(0)
    return words


def _require_no_effect(body: str, where: str, name: str) -> None:
    """Raise InputError for the body of a loop or function that sets variables or calls the program."""
    if ASSIGNMENT.search(body) or ".py" in body:
        what = "loops and functions that set variables or call the program are not supported"
        raise InputError(f"{where}: {what}", got=name)


def _branch(
    kind: str, statement: Statement, branches: list[BranchState], variables: ShellVariables, *, path: Path
) -> None:
    """Update `branches` at `if`, `elif`, `else` and `fi`."""
    if kind == "then":
        return
    if kind != "if" and not branches:
        raise InputError(f"{path}:{statement.line}: {kind} without if")
    if kind == "fi":
        branches.pop()
        return
    around = branches if kind == "if" else branches[:-1]
    state = BranchState.WAITS if kind == "if" else branches.pop()
    if state is BranchState.WAITS and all(branch is BranchState.RUNS for branch in around):
        state = BranchState.RUNS if kind == "else" else _state_of(statement, variables, path=path)
    elif state is BranchState.RUNS:
        state = BranchState.DONE
    branches.append(state)


def _state_of(statement: Statement, variables: ShellVariables, *, path: Path) -> BranchState:
    """Return the state of the branch below a condition."""
    held = condition_holds(statement.words[-1].text, variables, line=statement.line, path=path)
    return BranchState.UNKNOWN if held is None else BranchState.RUNS if held else BranchState.WAITS


def _assign(found: re.Match[str], word: Word, variables: ShellVariables, *, path: Path) -> None:
    name, appends, value = found.group(1), found.group(2), word.text[found.end() :]
    before = variables.values.get(name)
    if value.startswith("("):
        items = [
            one
            for part in _array_words(value[1:-1], word.line, path=path)
            for one in expand(part, variables, path=path)
        ]
        old = before if isinstance(before, list) else [Word(text=before, line=word.line)] if before else []
        variables.values[name] = [*old, *items] if appends else items
        return
    expanded = expand(word, variables, path=path, begin=found.end(), split=False)
    text = " ".join(one.text for one in expanded)
    if appends and isinstance(before, list):
        raise InputError(f"{path}:{word.line}: text is added to an array", got=word.text)
    variables.values[name] = f"{before or ''}{text}" if appends else text


def _array_words(text: str, line: int, *, path: Path) -> list[Word]:
    """Return the words of an array, which may have several lines."""
    return [
        Word(text=word.text, line=word.line + line - 1)
        for statement in statements(text, path=path)
        for word in statement.words
    ]
