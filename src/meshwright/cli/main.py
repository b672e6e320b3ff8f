"""The `meshwright` command: a table of verbs, and the one place where errors become messages and exit codes.

    0    done
    1    the answer is no: does not fit, a check failed
    2    bad input
    3    an optional package or a device is missing
    70   a bug (the code that sysexits.h gives to an internal software error)
    130  interrupted with Ctrl-C;  141  the reader of stdout went away (128 + signal, as a shell has it)

A verb's module is imported when the verb runs, so `meshwright --help` imports none.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import click

from meshwright import __version__
from meshwright.cli.output import emit_json
from meshwright.errors import MeshwrightError, MissingDependencyError, UnknownNameError

EXIT_USAGE, EXIT_MISSING, EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 2, 3, 70, 130, 141
DEBUG_VARIABLE = "MESHWRIGHT_DEBUG"

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What a disk that is full or broken answers: never a bug of ours."""


@dataclass(frozen=True, kw_only=True)
class Verb:
    """One sub-command: where it lives and what the help says of it before it is imported."""

    target: str  # "module:attribute"
    section: str  # heading it stands under in the help
    help: str


VERBS: dict[str, Verb] = {
    "plan": Verb(
        target="meshwright.cli.plan:command",
        section="Plan",
        help="Search all legal sharding plans and rank them.",
    ),
    "estimate": Verb(
        target="meshwright.cli.estimate:command",
        section="Plan",
        help="Step time, memory, timeline and cost of one plan.",
    ),
    "explain": Verb(
        target="meshwright.cli.explain:command",
        section="Plan",
        help="Why one plan beats another, component by component.",
    ),
    "scale": Verb(
        target="meshwright.cli.scale:command",
        section="Plan",
        help="Time to train, cost, energy and goodput as devices are added.",
    ),
    "train": Verb(
        target="meshwright.cli.train:command",
        section="Train",
        help="Train a model here: on the CPU, on one accelerator, or on many.",
    ),
    "export": Verb(
        target="meshwright.cli.export:command",
        section="Train",
        help="Write a run as another engine's own configuration.",
    ),
    "import": Verb(
        target="meshwright.cli.import_:command",
        section="Train",
        help="Read another engine's configuration as a run file.",
    ),
    "launch": Verb(
        target="meshwright.cli.launch:command",
        section="Train",
        help="Start a run on one host or many: torchrun, Slurm, Kubernetes.",
    ),
    "rehearse": Verb(
        target="meshwright.cli.rehearse:command",
        section="Train",
        help="Try a plan's structure on local CPU processes, against one process.",
    ),
    "checkpoint": Verb(
        target="meshwright.cli.checkpoint:command",
        section="Train",
        help="Look at checkpoints, check them, and exchange weights with Hugging Face.",
    ),
    "bench": Verb(
        target="meshwright.cli.bench:command",
        section="Measure",
        help="Measure a device: matrix products, attention, memory, collectives.",
    ),
    "calibrate": Verb(
        target="meshwright.cli.calibrate:command",
        section="Measure",
        help="Turn measurements of a device into what the planner uses.",
    ),
    "accuracy": Verb(
        target="meshwright.cli.accuracy:command",
        section="Verify",
        help="Predictions beside published measurements, with the error of each.",
    ),
    "doctor": Verb(
        target="meshwright.cli.doctor:command",
        section="Node",
        help="Is this node healthy, and as fast as it should be; many nodes side by side.",
    ),
    "tune": Verb(
        target="meshwright.cli.tune:command",
        section="Node",
        help="Settings of this node that training feels: what would change, apply, restore.",
    ),
    "catalog": Verb(
        target="meshwright.cli.catalog:command",
        section="Look up",
        help="Known models, accelerators, clusters and claims, with sources.",
    ),
}


class LazyGroup(click.Group):
    """A click group whose commands are the rows of a table: `VERBS`, or the one given."""

    def __init__(self, *args: Any, verbs: dict[str, Verb] = VERBS, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.verbs = verbs

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        verb = self.verbs.get(cmd_name)
        return None if verb is None else _load(cmd_name, verb)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.verbs:
            raise UnknownNameError("command", args[0], known=self.verbs)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section in dict.fromkeys(verb.section for verb in self.verbs.values()):
            with formatter.section(section):
                formatter.write_dl([(n, v.help) for n, v in self.verbs.items() if v.section == section])


def verb_group(name: str, *, about: str, verbs: dict[str, Verb], examples: Sequence[str]) -> LazyGroup:
    """A command that only holds others, such as `bench`; without one of them it prints its help."""
    lines = "\n".join(f"  {line}" for line in examples)

    @click.group(
        name,
        cls=LazyGroup,
        verbs=verbs,
        help=about,
        invoke_without_command=True,
        epilog=f"\b\nExamples:\n{lines}",
    )
    @click.pass_context
    def command(ctx: click.Context) -> None:
        if ctx.invoked_subcommand is None:
            click.echo(ctx.get_help())

    return command


def _load(name: str, verb: Verb) -> click.Command:
    module, attribute = verb.target.split(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name == module:
            raise MissingDependencyError(f"this installation has no command {name!r}") from error
        raise


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="\b\nExamples:\n"
    "  meshwright plan --model llama3.1-8b --cluster mi355x-8x8 --gbs 512 --seq 8192\n"
    "  meshwright catalog models\n\n"
    "Every command has --help with examples, and --json.",
)
@click.version_option(__version__, prog_name="meshwright")
def group() -> None:
    """Plan, train and measure large language models on any GPU cluster."""


def main() -> NoReturn:
    """Entry point of the console script and of `python -m meshwright`."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller closed it
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - open to the end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 prints ? instead of a traceback
    sys.exit(run(sys.argv[1:]))


def run(args: Sequence[str]) -> int:
    """Run one command line (without the program's name) and return its exit code."""
    as_json = _wants_json(args)
    try:
        code = _invoke(list(args) or ["--help"])
        sys.stdout.flush()  # here, where a closed pipe is still ours to handle
        return code
    except MeshwrightError as error:
        return _fail(error.message, hint=error.hint, exit_code=error.exit_code, as_json=as_json)
    except click.ClickException as error:
        return _fail(_sentence(error), hint=_usage_hint(error), exit_code=EXIT_USAGE, as_json=as_json)
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted", hint=None, exit_code=EXIT_INTERRUPTED, as_json=as_json)
    except BrokenPipeError:
        _silence_stdout()
        return EXIT_BROKEN_PIPE
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            _silence_stdout()  # which may be what is full: what it still holds cannot be written at exit either
            return _fail(
                f"cannot write the output: {error.strerror}", hint=None, exit_code=EXIT_USAGE, as_json=False
            )
        if os.environ.get(DEBUG_VARIABLE) == "1":
            raise
        return _fail_unexpected(error, as_json=as_json)


def _invoke(args: list[str]) -> int:
    """What `click.Group.main` does, without its own idea of errors."""
    if "_MESHWRIGHT_COMPLETE" in os.environ:
        from click.shell_completion import shell_complete

        instruction = os.environ["_MESHWRIGHT_COMPLETE"]
        return shell_complete(group, {}, "meshwright", "_MESHWRIGHT_COMPLETE", instruction)
    try:
        with group.make_context("meshwright", args) as ctx:
            group.invoke(ctx)
    except click.exceptions.Exit as leave:
        return leave.exit_code
    return 0


def _wants_json(args: Sequence[str]) -> bool:
    """Asked of the raw arguments: a command line that cannot be parsed still gets its error as JSON."""
    before_separator = args[: args.index("--")] if "--" in args else args
    return "--json" in before_separator


def _fail(message: str, *, hint: str | None, exit_code: int, as_json: bool) -> int:
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
    if as_json:
        emit_json({"error": {"message": message, "hint": hint, "exit_code": exit_code}})
    return exit_code


def _fail_unexpected(error: Exception, *, as_json: bool) -> int:
    """What no command foresaw: another project's package that is absent, or a bug."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package and package != "meshwright":
        message = f"this needs the Python package {package!r}, which is not installed"
        return _fail(message, hint=f"pip install {package}", exit_code=EXIT_MISSING, as_json=as_json)
    message = f"internal error: {type(error).__name__}: {' '.join(str(error).split())}"
    hint = f"this is a bug, please report it with the output under {DEBUG_VARIABLE}=1"
    return _fail(message, hint=hint, exit_code=EXIT_INTERNAL, as_json=as_json)


def _sentence(error: click.ClickException) -> str:
    if isinstance(error, click.NoSuchOption):
        return f"unknown option: got {error.option_name!r}"
    text = error.format_message().rstrip(".")
    return text[:1].lower() + text[1:]


def _usage_hint(error: click.ClickException) -> str | None:
    if isinstance(error, click.NoSuchOption) and error.possibilities:
        return f"did you mean {error.possibilities[0]!r}?"
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    return f"see `{ctx.command_path} --help`" if ctx else None


def _silence_stdout() -> None:
    """The reader is gone; keep the interpreter from complaining when it flushes stdout at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
