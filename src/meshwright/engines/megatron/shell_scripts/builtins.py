"""Commands of the shell itself, as far as they change variables or the order of execution."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.engines.megatron.shell_scripts.conditions import bracket_holds
from meshwright.engines.megatron.shell_scripts.integers import UnknownValueError
from meshwright.engines.megatron.shell_scripts.parsing import parse_script
from meshwright.engines.megatron.shell_scripts.state import MAX_LENGTH, UnknownText
from meshwright.engines.megatron.shell_scripts.syntax import ShellAssignment, ShellWord, SimpleCommand, Word
from meshwright.errors import InputError
from meshwright.json_values import load_text

if TYPE_CHECKING:
    from meshwright.engines.megatron.shell_scripts.interpreter import Interpreter, Status


class Leave(Exception):  # noqa: N818 - it is no error
    """`exit`, `return`, `break` or `continue`."""

    def __init__(self, kind: str, *, count: int = 1, status: Status = True) -> None:
        super().__init__(kind)
        self.kind, self.count, self.status = kind, count, status


SUCCEEDING = frozenset(["cd", "mkdir", "pushd", "popd", "touch", "module", "conda", "rm", "cp", "sleep", "date"])
"""Commands whose failure would be an error of the script."""


def _leave(shell: Interpreter, command: SimpleCommand, words: list[Word]) -> Status:
    kind, text = words[0].text, words[1].text if len(words) > 1 else ""
    count = int(text) if text.isdigit() else None
    if kind in ("break", "continue"):
        if shell.uncertain:
            raise InputError(f"{shell.where(command.line)}: {kind} depends on {shell.uncertain}")
        raise Leave(kind, count=1 if count is None else count)
    status = None if text and count is None else not count
    raise Leave(kind, status=status)


def _shift(shell: Interpreter, command: SimpleCommand, words: list[Word]) -> Status:
    text = words[1].text if len(words) > 1 else "1"
    if shell.uncertain or not text.isdigit():
        raise InputError(f"{shell.where(command.line)}: shift depends on {shell.uncertain or text}")
    if int(text) > len(shell.variables.positional):
        return False
    shell.variables.positional = shell.variables.positional[int(text) :]
    return True


def _set(shell: Interpreter, command: SimpleCommand, words: list[Word]) -> Status:
    rest = [word.text for word in words[1:]]
    while rest and re.match(r"[-+][A-Za-z]", rest[0]):
        if re.match(r"[-+]\w*o", rest[0]):
            rest.pop(0)
        rest = rest[1:]
    if not rest and not (len(words) > 1 and words[-1].text == "--"):
        return True
    if shell.uncertain:
        raise InputError(f"{shell.where(command.line)}: set depends on {shell.uncertain}")
    shell.variables.positional = tuple(rest[1:] if rest and rest[0] == "--" else rest)
    return True


def _declare(shell: Interpreter, command: SimpleCommand, words: list[Word]) -> Status:
    kind = words[0].text
    options = "".join(word.text for word in words[1:] if word.text.startswith("-"))
    if "n" in options.lstrip("-") and kind != "export":
        raise InputError(f"{shell.where(command.line)}: references to variables are not supported", got=kind)
    is_local = kind == "local" or (kind in ("declare", "typeset") and "g" not in options)
    assignments = [word for word in command.words if isinstance(word, ShellAssignment)]
    late = [word for word in words[1:] if re.match(r"[A-Za-z_]\w*\+?=", word.text)]  # export "NAME=value"
    names = [one.name for one in assignments] + [
        word.text.partition("=")[0] for word in words[1:] if not word.text.startswith("-")
    ]
    for name in names:
        if is_local:
            shell.variables.make_local(name)
            if name not in [one.name for one in assignments] and shell.variables.locals and "=" not in name:
                shell.variables.unset(name)
        if kind == "export" or "x" in options:
            shell.variables.exported.add(name)
    for one in assignments:
        if "A" in options:
            shell.variables.set(one.name, UnknownText(reason=f"{one.name} is an associative array"))
        else:
            shell.assign(one)
    if (kind == "readonly" or "r" in options) and not shell.variables.locals:
        shell.variables.readonly |= {*names}
    for word in late:
        name, _, value = word.text.partition("=")
        shell.assign_text(name, value, line=word.line, unknown=word.unknown)
    return True


def _unset(shell: Interpreter, command: SimpleCommand, words: list[Word]) -> Status:
    for word in words[1:]:
        if word.text in ("-v", "-f"):
            continue
        if shell.uncertain:
            shell.assign_text(word.text, "", line=word.line, unknown="")
        elif words[1].text == "-f":
            shell.variables.functions.pop(word.text, None)
        else:
            shell.variables.unset(word.text)
    return True


def _echo(shell: Interpreter, command: SimpleCommand, words: list[Word]) -> Status:
    """Print, for `$(echo ...)`."""
    rest, end = words[1:], "\n"
    while rest and re.fullmatch(r"-[neE]+", rest[0].text):
        end = "" if "n" in rest[0].text else end
        if "e" in rest[0].text:
            shell.output = None
        rest = rest[1:]
    if shell.uncertain or any(word.unknown for word in rest):
        shell.output = None
    if shell.output is not None:
        shell.output.append(" ".join(word.text for word in rest) + end)
    return True


def _expr(shell: Interpreter, command: SimpleCommand, words: list[Word]) -> Status:
    """Print the value of whole numbers with their operators, for `$(expr 16 / 4)`; all else is not known."""
    text = " ".join(word.text for word in words[1:])
    if shell.output is None or shell.uncertain or not re.fullmatch(r"[\d\s+*/%()-]+", text):
        shell.output = None
        return None
    value = shell.expander.at(command.line).integer(text)
    shell.output.append(f"{value}\n")
    return value != 0


def _printf(shell: Interpreter, command: SimpleCommand, words: list[Word]) -> Status:
    shell.output = None
    if len(words) > 2 and words[1].text == "-v":
        shell.assign_text(words[2].text, "", line=command.line, unknown="it is what printf prints")
    return True


def _let(shell: Interpreter, command: SimpleCommand, words: list[Word]) -> Status:
    value = 0
    for word in words[1:]:
        before = dict(shell.variables.values)
        try:
            value = shell.expander.at(command.line).integer(word.text, unset_is_zero=True)
        except UnknownValueError:
            return None
        shell.blur(before, line=command.line)
    return value != 0


def _read(shell: Interpreter, command: SimpleCommand, words: list[Word]) -> Status:
    """Make the variables that `read`, `mapfile` or `getopts` set unknown."""
    if words[0].text == "getopts" and not shell.variables.positional and len(words) == 3:
        return False
    for word in words[1:]:
        if re.fullmatch(r"[A-Za-z_]\w*", word.text):
            reason = f"{words[0].text} sets it"
            shell.assign_text(word.text, "", line=command.line, unknown=reason)
    shell.assign_text("REPLY", "", line=command.line, unknown="read sets it")
    if words[0].text == "getopts":
        raise InputError(f"{shell.where(command.line)}: getopts with arguments is not supported")
    return None


def _eval(shell: Interpreter, command: SimpleCommand, words: list[Word]) -> Status:
    text = " ".join(word.text for word in words[1:])
    body = parse_script(text, name=shell.variables.name, first_line=command.line)
    return shell.run_nested(body)


def script_file(shell: Interpreter, named: Word) -> Path | None:
    """Return the file of a script that a script names, seen from here or from its folder; None: it is not there."""
    seen = (Path(named.text), Path(shell.variables.name).parent / named.text)
    return None if named.unknown else next((path for path in seen if path.is_file()), None)


def script_text(shell: Interpreter, path: Path, *, line: int) -> str:
    """Return the text of a script. Raises InputError, with the line that names it, if it cannot be read."""
    try:
        if path.stat().st_size > MAX_LENGTH:
            raise ValueError(f"it has more than {MAX_LENGTH:,} bytes")
        return load_text(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{shell.where(line)}: cannot read {path}: {error}") from None


def _source(shell: Interpreter, command: SimpleCommand, words: list[Word]) -> Status:
    """Execute a script in this shell, if it is there."""
    shell.output = None
    if len(words) < 2:
        return False
    named = words[1]
    path = script_file(shell, named)
    if path is None:
        shell.found.notes.append(
            f"{shell.where(command.line)}: {named.text} is not read: set its variables after the file"
        )
        return True
    body = parse_script(script_text(shell, path, line=command.line), name=str(path))
    positional = shell.variables.positional
    if len(words) > 2:
        shell.variables.positional = tuple(word.text for word in words[2:])
    try:
        return shell.run_nested(body)
    except Leave as leave:
        if leave.kind != "return":
            raise
        return leave.status
    finally:
        shell.variables.positional = positional if len(words) > 2 else shell.variables.positional


def _bracket(shell: Interpreter, command: SimpleCommand, words: list[Word]) -> Status:
    inside = [word for word in command.words[1:] if isinstance(word, ShellWord)]
    if words[0].text == "[":
        if not inside or inside[-1].bare != "]":
            raise InputError(f"{shell.where(command.line)}: [ is not closed")
        inside = inside[:-1]
    return bracket_holds(inside, shell.expander, line=command.line)


def _alias(shell: Interpreter, command: SimpleCommand, words: list[Word]) -> Status:
    raise InputError(f"{shell.where(command.line)}: alias is not supported")


WITHOUT_EFFECT = (":", "true", "exec", "trap", "ulimit", "umask", "shopt", "wait", "enable", "hash")
Builtin = Callable[["Interpreter", SimpleCommand, list[Word]], "bool | None"]
BUILTINS: dict[str, Builtin] = {
    **dict.fromkeys(("exit", "return", "break", "continue"), _leave),
    **dict.fromkeys(("export", "declare", "typeset", "local", "readonly"), _declare),
    **dict.fromkeys(("read", "mapfile", "readarray", "getopts"), _read),
    **dict.fromkeys(("source", "."), _source),
    **dict.fromkeys(("[", "test"), _bracket),
    **dict.fromkeys(WITHOUT_EFFECT, lambda *_: True),
    "shift": _shift, "set": _set, "unset": _unset, "echo": _echo, "printf": _printf, "let": _let, "eval": _eval,
    "false": lambda *_: False, "alias": _alias, "expr": _expr,
}  # fmt: skip
"""Functions of the shell's own commands, by name."""
