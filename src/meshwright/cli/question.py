"""Options of a command from the parameters of the question that it asks (`meshwright.api.question`)."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import click

from meshwright.api import question as api
from meshwright.api import runs
from meshwright.api.arguments import MAX_COUNT
from meshwright.cli import options
from meshwright.targets import load


class JoinedType(click.ParamType):
    """A list, separated by commas, whose items are of another type: ascending numbers, each once, or names."""

    def __init__(self, item: click.ParamType) -> None:
        self.item, self.name = item, item.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        texts = [text.strip() for text in value.strip().removesuffix(",").split(",")]
        if not all(texts):
            allowed = f": {', '.join(self.item.choices)}" if isinstance(self.item, click.Choice) else ""
            self.fail(f"{value!r} has an empty item, allowed are items between commas{allowed}", param, ctx)
        return tuple(self.item.convert(text, param, ctx) for text in texts)


class CommandType(click.ParamType):
    """A command, quoted as for a shell, as its words."""

    name = "command"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return tuple(shlex.split(value))
        except ValueError as error:
            self.fail(f"{error}: {value!r}; allowed is a command, quoted as for a shell", param, ctx)


def options_of(question: api.Question, *, without: Sequence[str] = ()) -> Iterator[options.Decorator]:
    """The options and arguments of a question, in the order of its parameters; none for those in `without`."""
    for name, parameter in question.parameters.items():
        declared = question.signature.parameters[name]
        if name in without or isinstance(parameter, api.Hook):
            continue
        if isinstance(parameter, api.NamedCounts):
            for key, about in parameter.options.items():
                flag = f"--{key.replace('_', '-')}"
                yield click.option(flag, key, type=options.CountRange(1), default=None, metavar="N", help=about)
        elif declared.kind is declared.KEYWORD_ONLY:
            yield _option(
                name,
                parameter,
                default=question.defaults.get(name),
                is_required=name not in question.defaults,
                is_listed=name in question.repeated,
            )
        else:
            yield _argument(name, parameter, question)


def options_from(question: str, *, without: Sequence[str]) -> options.Decorator:
    """Options of another question, "module:function", but for `without`. The command's body takes them by name."""
    return options.option_group(options_of(api.question_of(load(question)), without=without))


def key_options(*names: str) -> options.Decorator:
    """Options of a run that the question does not take: "overrides", and keys of `runs.KEYS`, None where absent."""
    known = {**runs.KEYS, "overrides": runs.OVERRIDES}
    return options.option_group(_option(name, known[name], is_listed=known[name].takes_list) for name in names)


def asked_of(question: api.Question, options: dict[str, Any]) -> dict[str, Any]:
    """Take the arguments of a question out of the options of its command."""
    asked = {name: options.pop(name) for name in question.parameters if name in options}
    for name, parameter in question.parameters.items():
        if isinstance(parameter, api.NamedCounts):
            given = {key: options.pop(key) for key in parameter.options if key in options}
            asked[name] = {key: number for key, number in given.items() if number is not None}
    return asked


def _argument(name: str, parameter: api.QuestionParameter, question: api.Question) -> options.Decorator:
    is_listed = name in question.repeated
    required = parameter.least > 0 if is_listed else name not in question.defaults
    metavar = parameter.metavar or name.upper()
    metavar = (metavar if required else f"[{metavar}]") + ("..." if is_listed else "")
    return click.argument(name, type=_kind(parameter), metavar=metavar, nargs=-1 if is_listed else 1, required=required)


def _option(
    name: str,
    parameter: api.QuestionParameter,
    *,
    default: Any = None,
    is_required: bool = False,
    is_listed: bool = False,
) -> options.Decorator:
    names = [parameter.option(name), name]
    settings: dict[str, Any] = {"help": _help(parameter, default, is_listed=is_listed)}
    if isinstance(parameter, api.Flag):
        if parameter.off:
            names[0] += f"/{parameter.off}"
        return click.option(*names, is_flag=True, default=default, show_default=bool(default), **settings)
    if name in COMPLETED:
        settings["shell_complete"] = _completed
    kind, metavar = _kind(parameter), _metavar(name, parameter)
    if parameter.is_joined:
        kind, metavar, is_listed = JoinedType(kind), f"{metavar},{metavar},...", False
    elif isinstance(parameter, api.ShellCommand):
        kind, is_listed = CommandType(), False
    settings |= {"type": kind, "metavar": metavar, "multiple": is_listed}
    if is_required:
        settings["required"] = True
    elif not is_listed:
        is_shown = default not in (None, "") and not isinstance(default, tuple)
        settings |= {"default": default, "show_default": is_shown}
    return click.option(*names, **settings)


COMPLETED = {
    "model": ("meshwright.catalog.models:model_names", "{}"),
    "cluster": ("meshwright.catalog.accelerators:accelerator_names", "{}-8x1"),
    "precision": ("meshwright.specs.precision:PRECISIONS", "{}"),
}
"""Options whose values a shell completes, with the names, or the function that returns them, and their form."""


def _completed(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    target, form = COMPLETED[param.name or ""]
    listed: Any = load(target)
    names: Iterable[str] = listed() if callable(listed) else listed  # pyright: ignore[reportAssignmentType]
    found = (form.format(name) for name in names)
    before, comma, last = incomplete.rpartition(",") if isinstance(param.type, JoinedType) else ("", "", incomplete)
    return [f"{before}{comma}{name}" for name in found if name.startswith(last)]


def _help(parameter: api.QuestionParameter, default: object, *, is_listed: bool) -> str:
    about = parameter.about
    if isinstance(parameter, api.OneOf) and parameter.is_joined:
        about = f"{about.removesuffix('.')}: {', '.join(parameter.values)}."
    if is_listed and not (parameter.is_joined or isinstance(parameter, api.ShellCommand)):
        about += " May be repeated."
    # click writes the default of a list in parentheses.
    unset = parameter.unset or (",".join(map(str, default)) if isinstance(default, tuple) else "")
    return f"{about}  [default: {unset}]" if unset else about


METAVARS = {api.Count: "N", api.Number: "X", api.Amount: "X", api.Step: "N", api.AnyName: "NAME"}


def _metavar(name: str, parameter: api.QuestionParameter) -> str | None:
    if isinstance(parameter, runs.EngineName):
        return None
    if isinstance(parameter, api.OneOf):
        return name[0].upper() if parameter.is_joined else None  # click lists the values of a choice
    if parameter.metavar:
        return parameter.metavar
    if isinstance(parameter, api.AnyPath):
        return "FILE" if not parameter.is_folder else "DIR" if not parameter.is_file else "PATH"
    return METAVARS.get(type(parameter), "TEXT")


def _kind(parameter: api.QuestionParameter) -> click.ParamType:
    match parameter:
        case api.AnyPath():
            # As text, which the question checks: an empty one would be the current folder as a path.
            return click.Path(exists=parameter.exists, file_okay=parameter.is_file, dir_okay=parameter.is_folder)
        case api.Count():
            return options.CountRange(parameter.low, parameter.high if parameter.high < MAX_COUNT else None)
        case api.Number():
            return options.AmountType()
        case api.Amount():
            return options.AmountRange(parameter.high)
        case api.OneOf():
            return options.SynonymChoice(parameter.values, synonyms=parameter.synonyms)
        case runs.EngineName():
            return options.EngineChoice()
        case api.Step():
            return options.StepType()
        case _:
            return click.STRING
