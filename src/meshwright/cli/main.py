"""The `meshwright` command: a table of verbs, and the one place where errors become messages and exit codes.

    0    done
    1    the answer is no: does not fit, a check failed
    2    bad input
    3    an optional package or a device is missing
    70   a bug (the code that sysexits.h gives to an internal software error)
    130  interrupted with Ctrl-C;  141  the reader of stdout went away;  143  SIGTERM (128 + signal, as a shell has it)

Declarations and bodies of verbs are imported when they are needed: see `meshwright.cli.verbs`.
"""

from __future__ import annotations

import errno
import gc
import io
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click

from meshwright.cli.output import begin_json, emit_json_error, say
from meshwright.cli.verbs import TABLE, LazyGroup, verbs_of
from meshwright.errors import MeshwrightError, Terminated, sigterm_interrupts
from meshwright.targets import load
from meshwright.version import __version__

EXIT_USAGE, EXIT_MISSING, EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE, STOPPED = 2, 3, 70, 130, 141, 143
DEBUG_VARIABLE = "MESHWRIGHT_DEBUG"

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a full or broken disk."""

COMMANDS = TABLE["synonyms"]
"""Commands by names that other tools give them, for the hint of an unknown command."""

ASKED_AS_COMMANDS = {"help": "--help", "version": "--version"}
"""Commands that other tools have -> the option that answers; `help plan` is `plan --help`."""

KEYS = ("task", "objective", "kernels", "train", "optimizer")
"""Keys of the run file without a name elsewhere that are tried as options."""

ADVICE = TABLE["advice"]
"""Options that nothing has by that name -> the way to an answer."""

VERBS = verbs_of(TABLE["sections"])
"""The commands by section, each with its line of the help; its declaration is in the module of its name."""


@click.group(
    cls=LazyGroup,
    verbs=VERBS,
    synonyms=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="\b\nExamples:\n"
    "  meshwright plan --model llama3.1-8b --cluster mi355x-8x8 --gbs 512 --seq 8192\n"
    "  meshwright catalog models\n\n"
    "Every command has --help with examples, and --json.",
)
@click.version_option(__version__, "-V", "--version", prog_name="meshwright")
def group() -> None:
    """Plan, train and measure large language models on any GPU cluster."""


def main() -> NoReturn:
    """Entry point of the console script and of `python -m meshwright`."""
    gc.disable()  # imports make little garbage, and each collection visits everything that they have made
    for handle in range(3):
        try:
            os.fstat(handle)
        except OSError:  # the caller closed it: the next file would take its number, and what libraries print
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - open to the end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 prints ? instead of a traceback
    sys.exit(run(sys.argv[1:]))


def run(args: Sequence[str]) -> int:
    """Run one command line (without the program's name) and return its exit code."""
    begin_json()
    try:
        with sigterm_interrupts():
            code = _invoke(list(args) or ["--help"])
        sys.stdout.flush()  # here, where a closed pipe is handled
        return code
    except BrokenPipeError:
        _silence_stdout()
        return EXIT_BROKEN_PIPE
    except (Exception, KeyboardInterrupt) as error:
        is_full = isinstance(error, OSError) and error.filename is None and error.errno in _NO_ROOM
        if is_full:
            _silence_stdout()  # it may be what is full, and its buffer would fail again at exit
        known = _explained(error)
        if known is None and os.environ.get(DEBUG_VARIABLE) == "1":
            raise
        message, hint, exit_code = known or _unexpected(error)
        say(f"error: {message}")
        if hint:
            say(f"hint: {hint}")
        if _wants_json(args) and not is_full:
            emit_json_error({"error": {"message": message, "hint": hint, "exit_code": exit_code}})
        return exit_code


def _invoke(args: list[str]) -> int:
    """Run the group as `click.Group.main` does, but raise its errors."""
    if "_MESHWRIGHT_COMPLETE" in os.environ:
        complete = load("click.shell_completion:shell_complete")
        instruction = os.environ["_MESHWRIGHT_COMPLETE"]
        return complete(group, {}, "meshwright", "_MESHWRIGHT_COMPLETE", instruction)
    if args[0] in ASKED_AS_COMMANDS:
        args = [*args[1:], ASKED_AS_COMMANDS[args[0]]]
    try:
        with group.make_context("meshwright", args) as ctx:
            group.invoke(ctx)
    except click.exceptions.Exit as leave:
        return leave.exit_code
    return 0


def _wants_json(args: Sequence[str]) -> bool:
    """True if the raw arguments ask for JSON: a command line that cannot be parsed gets its error as JSON too."""
    before_separator = args[: args.index("--")] if "--" in args else args
    return "--json" in before_separator


def _explained(error: BaseException) -> tuple[str, str | None, int] | None:
    """Message, hint and exit code of an error that is no bug; None for another one."""
    match error:
        case MeshwrightError():
            return error.message, error.hint, error.exit_code
        case click.ClickException():
            return usage_message(error), usage_hint(error), EXIT_USAGE
        case Terminated():
            return "terminated", None, STOPPED
        case KeyboardInterrupt() | click.Abort():
            return "interrupted", None, EXIT_INTERRUPTED
        case shutil.Error(args=[[(_, path, why), *_], *_]):  # of copied folders
            return f"{path}: {why}", None, EXIT_USAGE
        case OSError() if error.filename is not None:  # what writes names its path (`files.naming`)
            hint = "free some room, or write elsewhere" if error.errno in _NO_ROOM else None
            return f"{error.filename}: {error.strerror}", hint, EXIT_USAGE
        case OSError() if error.errno in _NO_ROOM:
            return f"cannot write the output: {error.strerror}", None, EXIT_USAGE
    return None


def _unexpected(error: BaseException) -> tuple[str, str, int]:
    """Message, hint and exit code of an absent package of another project, or of a bug."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package and package != "meshwright":
        message = f"this needs the Python package {package!r}, which is not installed"
        return message, f"pip install {package}", EXIT_MISSING
    message = f"internal error: {type(error).__name__}: {' '.join(str(error).split())}"
    return message, f"this is a bug, please report it with the output under {DEBUG_VARIABLE}=1", EXIT_INTERNAL


def _silence_stdout() -> None:
    """Keep the interpreter from failing when it flushes stdout at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# --- hints ---


def usage_message(error: click.ClickException) -> str:
    """The message of a usage error, in our form."""
    if isinstance(error, click.NoSuchOption):
        return f"unknown option: got {error.option_name!r}"
    text = error.format_message().rstrip(".")
    return text[:1].lower() + text[1:]


def usage_hint(error: click.ClickException) -> str | None:
    """The option that was meant, or where to look."""
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    if isinstance(error, click.NoSuchOption):
        if ctx is not None and (hint := _run_file_hint(error.option_name, ctx.command)):
            return hint
        if error.possibilities:
            return f"did you mean {error.possibilities[0]!r}?"
    return f"see `{ctx.command_path} --help`" if ctx else None


def _run_file_hint(option: str, command: click.Command) -> str | None:
    """Return the option that sets the run-file key which other tools call `option`; None if there is none."""
    name = option.lstrip("-")
    key = load("meshwright.runfile.synonyms:key_for")(name) or (name if name in KEYS else None)
    options = {flag for parameter in command.params for flag in parameter.opts}
    if name in ADVICE and "--cluster" in options:
        return ADVICE[name]
    if key is None:
        return None
    flags = {p.key: p.option(name) for name, p in load("meshwright.api.runs:KEYS").items()}
    if flags.get(key) in options:
        return f"the option is `{flags[key]}`"
    section, _, field = key.partition(".")
    if "--fix" in options and section == "parallel" and field:
        return f"fix a field of the plan: --fix {field}=VALUE"
    if "--set" in options:
        return f"set the key of the run file: --set {key}=VALUE"
    return None
