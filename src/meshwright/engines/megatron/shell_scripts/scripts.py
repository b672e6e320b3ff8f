"""Shell scripts that call Megatron-LM, read without running them: the arguments of `pretrain_gpt.py`.

`parsing` parses the grammar of bash, `interpreter` executes it: variables, arrays, conditions, loops, functions,
`eval`, `bash -c` and here-documents. Every token is parsed; what is not supported raises InputError with its line.
A variable that is not set expands to itself, `$NAME`: a reader that needs its value raises an error, and conditions
treat it as empty, as the shell does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from meshwright.engines.megatron.shell_scripts.builtins import Leave
from meshwright.engines.megatron.shell_scripts.interpreter import Findings, Interpreter
from meshwright.engines.megatron.shell_scripts.parsing import parse_script
from meshwright.engines.megatron.shell_scripts.programs import program_at
from meshwright.engines.megatron.shell_scripts.state import ShellValue, ShellVariables, UnknownText
from meshwright.engines.megatron.shell_scripts.syntax import Word
from meshwright.errors import InputError

SBATCH = re.compile(r"#SBATCH\s+(--[\w-]+|-[A-Za-z])[=\s]*([^\s#]+)")
SLURM_NAMES = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",), "cpus-per-task": ("SLURM_CPUS_PER_TASK",),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE",),
}  # fmt: skip
SLURM_SHORT = {"-N": "nodes", "-n": "ntasks", "-c": "cpus-per-task"}
OF_ONE_RUN = (
    "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_SUBMIT_DIR", "SLURM_PROCID",
    "SLURM_LOCALID", "SLURM_NODEID",
)  # fmt: skip
CALL = "CALL"
"""Name of the value that chooses among calls with different arguments."""
INSTEAD = "or put echo before torchrun in a copy, run that, and import what it prints, in a file called NAME.args"


@dataclass(frozen=True, kw_only=True)
class WantedCall:
    """The program whose arguments a reader asks for.

    at: returns the place of the program in the words of a command, -1 to have all words; None: the command runs none.
    environment: variables of the command that stand before its words, as NAME=value.
    """

    name: str = "pretrain_gpt.py"
    at: Callable[[list[Word]], int | None] = program_at
    environment: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ScriptCall:
    """The arguments of the training program, what of the script was not followed, and the texts of files it writes."""

    arguments: tuple[Word, ...]
    notes: tuple[str, ...]
    documents: tuple[str, ...] = ()


GPT = WantedCall()


def script_call(text: str, *, path: Path, given: Iterable[str] = (), wanted: WantedCall = GPT) -> ScriptCall:
    """Return the call of the training program. `given` are NAME=value and positional arguments of the script.

    Of calls with different arguments, `CALL=N` chooses the N-th one. Raises InputError, with the line, for a script
    that calls no program or contains what is not supported.
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
    found = Findings(program_at=wanted.at, environment=wanted.environment)
    try:
        body = parse_script(text, name=str(path))
        with suppress(Leave):
            Interpreter(variables=variables, found=found).run(body)
    except InputError as error:
        raise InputError(error.message, hint=error.hint or INSTEAD) from None
    chosen = str(named.get(CALL, 1))
    if not found.calls:
        more = f" ({'; '.join(found.notes)})" if found.notes else ""
        raise InputError(f"{path} calls no {wanted.name}{more}", hint="files with only arguments are called NAME.args")
    calls: dict[tuple[str, ...], list[Word]] = {}
    for call in found.calls:
        calls.setdefault(tuple(word.text for word in call), call)
    lines = ", ".join(str(call[0].line) if call else "?" for call in calls.values())
    if len(calls) > 1 and not (chosen.isdecimal() and 0 < int(chosen) <= len(calls)):
        what = f"{path} trains with different arguments, at lines {lines}: {CALL} is not one of them"
        raise InputError(what, got=chosen, allowed=f"1 to {len(calls)}")
    number = int(chosen) if len(calls) > 1 else 1
    other = f"{path} trains with different arguments, at lines {lines}: those of {CALL}={number} are read"
    notes = (*found.notes, *([other] if len(calls) > 1 else []))
    return ScriptCall(arguments=tuple([*calls.values()][number - 1]), notes=notes, documents=tuple(found.documents))


def slurm_values(text: str) -> dict[str, ShellValue]:
    """Return the variables of a script by name; those of the job are unknown. None without `#SBATCH` lines.

    Source: the section on output variables of `man sbatch`.
    Counts that are no positive whole numbers, such as ranges of nodes, are left out.
    """
    head = [*takewhile(lambda line: not line.strip() or line.startswith("#"), text.splitlines())]  # sbatch reads it
    if not any(line.startswith("#SBATCH") for line in head):
        return {}
    found = [one for line in head if (one := SBATCH.match(line))]
    given = {SLURM_SHORT.get(one[1], one[1].removeprefix("--")): one[2] for one in found}
    counts = {name: int(given[name]) for name in SLURM_NAMES if re.fullmatch(r"0*[1-9]\d*", given.get(name, ""))}
    if "ntasks" not in given and {"nodes", "ntasks-per-node"} <= counts.keys():
        counts["ntasks"] = counts["nodes"] * counts["ntasks-per-node"]
    values: dict[str, ShellValue] = {name: UnknownText(reason=f"${name} depends on the machine") for name in OF_ONE_RUN}
    return values | {variable: str(count) for name, count in counts.items() for variable in SLURM_NAMES[name]}
