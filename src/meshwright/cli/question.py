"""Options of a command from the parameters of the question that it asks (`meshwright.api.question`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from meshwright.api.arguments import MAX_COUNT
from meshwright.api.question import (
    AnyName,
    AnyPath,
    Count,
    Flag,
    Hook,
    Number,
    OneOf,
    Question,
    QuestionParameter,
    Step,
)
from meshwright.cli.options import AmountType, CountRange, StepType

Decorator = Callable[[Any], Any]


def options_of(question: Question, *, without: Sequence[str] = ()) -> Iterator[Decorator]:
    """The options and arguments of a question, in the order of its parameters; none for those in `without`."""
    for name, parameter in question.parameters.items():
        declared = question.signature.parameters[name]
        if name in without or isinstance(parameter, Hook):
            continue
        if declared.kind is declared.KEYWORD_ONLY:
            yield _option(name, parameter, question)
        else:
            yield _argument(name, parameter, question)


def _argument(name: str, parameter: QuestionParameter, question: Question) -> Decorator:
    is_listed = name in question.repeated
    required = parameter.least > 0 if is_listed else name not in question.defaults
    metavar = parameter.metavar or name.upper()
    metavar = (metavar if required else f"[{metavar}]") + ("..." if is_listed else "")
    return click.argument(
        name, type=_kind(parameter), metavar=metavar, nargs=-1 if is_listed else 1, required=required
    )


def _option(name: str, parameter: QuestionParameter, question: Question) -> Decorator:
    names = [parameter.flag or f"--{name.replace('_', '-')}", name]
    is_listed, defaults = name in question.repeated, question.defaults
    default = defaults.get(name)
    settings: dict[str, Any] = {"help": _help(parameter, is_listed=is_listed)}
    if isinstance(parameter, Flag):
        if parameter.off:
            names[0] += f"/{parameter.off}"
        return click.option(
            *names, is_flag=True, default=bool(default), show_default=bool(default), **settings
        )
    settings |= {"type": _kind(parameter), "metavar": _metavar(parameter), "multiple": is_listed}
    if name not in defaults:
        settings["required"] = True
    elif not is_listed:
        settings |= {"default": default, "show_default": default not in (None, "")}
    return click.option(*names, **settings)


def _help(parameter: QuestionParameter, *, is_listed: bool) -> str:
    repeated = " May be repeated." if is_listed else ""
    unset = f"  [default: {parameter.unset}]" if parameter.unset else ""
    return f"{parameter.about}{repeated}{unset}"


def _metavar(parameter: QuestionParameter) -> str | None:
    if parameter.metavar or isinstance(parameter, OneOf):
        return parameter.metavar or None  # click lists the values of a choice
    if isinstance(parameter, AnyPath):
        return "FILE" if not parameter.is_folder else "DIR"
    return {Count: "N", Number: "X", Step: "N", AnyName: "NAME"}.get(type(parameter), "TEXT")


def _kind(parameter: QuestionParameter) -> click.ParamType | None:
    match parameter:
        case AnyPath():
            return click.Path(
                exists=parameter.exists,
                file_okay=parameter.is_file,
                dir_okay=parameter.is_folder,
                path_type=Path,
            )
        case Count():
            return CountRange(parameter.low, parameter.high if parameter.high < MAX_COUNT else None)
        case Number():
            return AmountType()
        case OneOf():
            return click.Choice(parameter.values)
        case Step():
            return StepType()
        case _:
            return click.STRING
