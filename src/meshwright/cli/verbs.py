"""Declarations of verbs, and the only place of this package that imports inside a function.

    @verb("report")
    @html_option
    def command(*, html_path: Path | None) -> None:
        '''Report on records.'''
        ...

A verb whose body imports much has it in another module, as `commands/plan.py` has it in `plan.py`:

    @verb("plan", body="meshwright.cli.plan:run")

The table `verbs.toml` has the examples of each verb, and its line in the help of `meshwright`.

`meshwright --help` imports no declaration, `meshwright plan --help` imports one, `meshwright plan` also its body.
"""

from __future__ import annotations

import gc
import inspect
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from keyword import iskeyword
from pathlib import Path
from typing import Any

import click

from meshwright.api.question import Question, question_of
from meshwright.cli.output import AS_JSON
from meshwright.cli.question import asked_of, options_of
from meshwright.errors import MissingDependencyError, UnknownNameError
from meshwright.targets import load

COMMANDS = "meshwright.cli.commands"

TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

JSON_HELP = "Write one JSON document to stdout and nothing else there."

RUN_FILE_HELP = "RUN.yaml is a run file, or the name of one that ships (see `meshwright catalog runs`)."
"""Last paragraph of the help of every verb that takes a run file."""


@dataclass(frozen=True, kw_only=True)
class Verb:
    """One sub-command: its declaration, or the target of it, and its line in the help of the group."""

    target: str | click.Command  # "module:attribute"
    section: str  # heading it stands under in the help
    help: str


class LazyCommand(click.Command):
    """A command whose body is its own function, or `module:function`, imported when it runs. It takes options by name.

    The options of a question are one argument of the body, `asked`, by the names of the question's parameters.
    """

    def __init__(self, *args: Any, body: str | None, question: Question | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.body, self.question = body, question

    def invoke(self, ctx: click.Context) -> Any:
        options = {name: value for name, value in ctx.params.items() if name != AS_JSON}
        if self.question is not None:
            options["asked"] = asked_of(self.question, options)
        function = self.function()
        if not gc.isenabled():  # `main` stops it while code is imported
            gc.freeze()
            gc.enable()
        return ctx.invoke(function, **options)

    def function(self) -> Callable[..., Any]:
        """The body."""
        if self.body is not None:
            return load(self.body)
        assert self.callback is not None  # `verb` decorates a function
        return self.callback


class LazyGroup(click.Group):
    """A click group whose commands are the rows of a table."""

    def __init__(
        self, *args: Any, verbs: Mapping[str, Verb], synonyms: Mapping[str, str] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.verbs, self.synonyms = verbs, synonyms or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        verb = self.verbs.get(cmd_name)
        return None if verb is None else _open(cmd_name, verb)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.verbs:
            error = UnknownNameError("command", args[0], known=self.verbs)
            if meant := self.synonyms.get(args[0].lower()):
                error.hint = f"the command is `{ctx.command_path} {meant}`"
            raise error
        if self.verbs[args[0]].section == "Choose a plan":
            # Starting NumPy's threads takes longer than the multiplications of planning.
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section in dict.fromkeys(verb.section for verb in self.verbs.values()):
            with formatter.section(section):
                formatter.write_dl([(n, v.help) for n, v in self.verbs.items() if v.section == section])


def verbs_of(sections: Mapping[str, Mapping[str, str]]) -> dict[str, Verb]:
    """The verbs of a table: their lines of the help by section and name. Each is declared in the module of its name."""
    return {
        name: Verb(target=f"{COMMANDS}.{name}{'_' * iskeyword(name)}:command", section=section, help=about)
        for section, verbs in sections.items()
        for name, about in verbs.items()
    }


def verb(
    name: str, *, body: str | None = None, question: str | None = None, without: Sequence[str] = ()
) -> Callable[[Callable[..., None]], click.Command]:
    """Declare a verb by its name, behind the name of its group if it has one; its last option is --json.

    The decorated function holds its other options and, as docstring, its help. It is the body, unless `body` names
    another function.

    `question`: the public function, "module:function", whose parameters are the first options, but for `without`.
    """

    def declare(function: Callable[..., None]) -> click.Command:
        asked = None if question is None else question_of(load(question))
        for option in [] if asked is None else reversed([*options_of(asked, without=without)]):
            function = option(function)
        declared = click.command(name.split()[-1], cls=LazyCommand, body=body, question=asked, epilog=_epilog(name))
        command = declared(function)
        command.params.append(click.Option(["--json", AS_JSON], is_flag=True, help=JSON_HELP))
        command.help = inspect.cleandoc(command.help or "")
        arguments = [p.name for p in command.params if isinstance(p, click.Argument)]
        if {"run", "run_path"} & {*arguments}:
            command.help += f"\n\n{RUN_FILE_HELP}"
        return command

    return declare


def verb_group(name: str, *, about: str, verbs: Mapping[str, Sequence[click.Command]]) -> LazyGroup:
    """A command that only holds others, such as `bench`, by section; without one of them it prints its help."""
    table = {
        str(one.name): Verb(target=one, section=section, help=(one.help or "").partition("\n")[0])
        for section, listed in verbs.items()
        for one in listed
    }

    @click.group(name, cls=LazyGroup, verbs=table, help=about, invoke_without_command=True, epilog=_epilog(name))
    @click.pass_context
    def command(ctx: click.Context) -> None:
        if ctx.invoked_subcommand is None:
            click.echo(ctx.get_help())

    return command


def _epilog(name: str) -> str:
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in TABLE["examples"].get(name, ()))])


def _open(name: str, verb: Verb) -> click.Command:
    """The declaration of a verb. An installation may lack one."""
    if isinstance(verb.target, click.Command):
        return verb.target
    try:
        return load(verb.target)
    except ModuleNotFoundError as error:
        if error.name == verb.target.partition(":")[0]:
            raise MissingDependencyError(f"this installation has no command {name!r}") from error
        raise
