"""Shell scripts that call Megatron-LM, read without running them: the arguments of `pretrain_gpt.py`.

`commands` parses the grammar of bash, `interpreter` executes it: variables, arrays, conditions, loops, functions,
`eval`, `bash -c` and here-documents. Every token is parsed; what is not supported raises InputError with its line.
A variable that is not set expands to itself, `$NAME`: a reader that needs its value raises an error, and conditions
treat it as empty, as the shell does.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from meshwright.engines.megatron.shell_scripts.builtins import Leave
from meshwright.engines.megatron.shell_scripts.commands import parse_script
from meshwright.engines.megatron.shell_scripts.interpreter import Findings, Interpreter
from meshwright.engines.megatron.shell_scripts.slurm import slurm_values
from meshwright.engines.megatron.shell_scripts.state import ShellValue, ShellVariables
from meshwright.engines.megatron.shell_scripts.syntax import Word
from meshwright.errors import InputError

INSTEAD = "or put echo before torchrun in a copy, run that, and import what it prints, in a file called NAME.args"


@dataclass(frozen=True, kw_only=True)
class ScriptCall:
    """The arguments of the training program, and what of the script was not followed."""

    arguments: tuple[Word, ...]
    notes: tuple[str, ...]


def script_call(text: str, *, path: Path, given: Iterable[str] = ()) -> ScriptCall:
    """Return the call of the training program. `given` are NAME=value and positional arguments of the script.

    Raises InputError, with the line, for a script that calls no program, calls it with different arguments, or
    contains what is not supported.
    """
    named: dict[str, ShellValue] = slurm_values(text)
    positional: list[str] = []
    for argument in given:
        name, equals, value = argument.partition("=")
        if equals and name.isidentifier():
            named[name] = value
        else:
            positional.append(argument)
    variables = ShellVariables(name=str(path), values=named, positional=tuple(positional), exported=set(named))
    found = Findings()
    try:
        body = parse_script(text, name=str(path))
        with suppress(Leave):
            Interpreter(variables=variables, found=found).run(body)
    except InputError as error:
        raise InputError(error.message, hint=error.hint or INSTEAD) from None
    return _only_call(found, path)


def _only_call(found: Findings, path: Path) -> ScriptCall:
    if not found.calls:
        more = f" ({'; '.join(found.notes)})" if found.notes else ""
        raise InputError(
            f"{path} calls no pretrain_gpt.py{more}", hint="files with only arguments are called NAME.args"
        )
    first, *others = ([word.text for word in call] for call in found.calls)
    for k, other in enumerate(others, start=1):
        if other != first:
            lines = " and ".join(str(found.calls[m][0].line) if found.calls[m] else "?" for m in (0, k))
            raise InputError(f"{path} calls the training program with different arguments: lines {lines}", hint=INSTEAD)
    return ScriptCall(arguments=tuple(found.calls[0]), notes=tuple(found.notes))
