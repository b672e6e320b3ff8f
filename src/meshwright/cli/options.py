"""Options that several commands share, so that one flag means one thing everywhere."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from meshwright.api.arguments import seconds
from meshwright.errors import InputError
from meshwright.targets import load
from meshwright.units import digits_hint, parse_amount, parse_count

Function = Callable[..., Any]
Decorator = Callable[[Function], Function]


class SynonymChoice(click.Choice[str]):
    """One of `choices`; `synonyms` are other names of the first."""

    def __init__(self, choices: Sequence[str], *, synonyms: Sequence[str]) -> None:
        super().__init__(choices)
        self.synonyms = synonyms

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return super().convert(self.choices[0] if value in self.synonyms else value, param, ctx)


class PathType(click.Path):
    """A path. An empty one, as of a variable that is not set, would be the current folder and is refused."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(path_type=Path, **settings)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the path is empty", param, ctx)
        return super().convert(value, param, ctx)


class CountRange(click.IntRange):
    """A whole number, whose message for "128k" or "8,192" has the digits that it may mean."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and not value.strip().lstrip("+-").replace("_", "").isdecimal():
            hint = digits_hint(value)
            self.fail(f"{value!r} is not a whole number" + (f": {hint}" if hint else ""), param, ctx)
        return super().convert(value, param, ctx)  # pyright: ignore[reportArgumentType]


class AmountType(click.types.FloatParamType):
    """A number, as "15T" too; the message for "128k" has the digits that it may mean."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            found = parse_amount(value) if isinstance(value, str) else value
            return super().convert(found, param, ctx)  # pyright: ignore[reportArgumentType]
        except click.BadParameter:
            if hint := digits_hint(str(value)):
                self.fail(f"{value!r} is not a number: {hint}", param, ctx)
            raise


class AmountRange(AmountType):
    """A number above 0, up to `high`."""

    def __init__(self, high: float) -> None:
        self.high = high

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not 0 < found <= self.high:  # nor is a NaN
            self.fail(f"{value} is not above 0, up to {self.high:g}", param, ctx)
        return found


class StepType(click.ParamType):
    """Steps of a checkpoint, or `best`."""

    name = "step"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == "best" or isinstance(value, int):
            return value
        if value.isdecimal():
            return int(value)
        self.fail(f"{value!r} is neither a step nor `best`", param, ctx)


def option_group(options: Iterable[Decorator]) -> Decorator:
    """Options as one decorator, in their order."""
    listed = tuple(options)
    return lambda function: functools.reduce(lambda f, option: option(f), reversed(listed), function)


def _valued(names: Sequence[str], **settings: Any) -> Decorator:
    """An option whose help shows its default, if it has one."""
    return click.option(*names, show_default="default" in settings, **settings)


def count_option(
    *names: str, help: str, low: int = 1, high: int | None = None, metavar: str = "N", **settings: Any
) -> Decorator:
    """An option that takes a whole number from `low` to `high`; `settings` go to `click.option`."""
    return _valued(names, type=CountRange(low, high), metavar=metavar, help=help, **settings)


def file_option(*names: str, help: str, metavar: str = "FILE", **settings: Any) -> Decorator:
    """An option that takes the path of a file."""
    kind = PathType(dir_okay=False)
    return _valued(names, type=kind, metavar=metavar, help=help, **settings)


def folder_option(*names: str, help: str, metavar: str = "DIR", **settings: Any) -> Decorator:
    """An option that takes the path of a folder."""
    kind = PathType(file_okay=False)
    return _valued(names, type=kind, metavar=metavar, help=help, **settings)


def seconds_option(*names: str, help: str, low: float = 0, above: bool = False, **settings: Any) -> Decorator:
    """An option that takes a time of at least `low` seconds, or with `above` of more."""
    kind = click.FloatRange(min=low, min_open=above)
    return _valued(names, type=kind, metavar="SECONDS", help=help, **settings)


html_option = file_option("--html", "html_path", help="Write a self-contained HTML page that opens without a network.")

markdown_option = file_option("--markdown", "markdown_path", help="Write the tables and notes as Markdown.")

figure_options = option_group(
    folder_option(f"--{form}", f"{form}_folder", help=f"Write each figure as one {form.upper()} file.")
    for form in ("png", "svg")
)

root_option = folder_option(
    "--root", default=Path("/"), metavar="FOLDER",
    help="Root of the node's file system, such as /host in a container that mounts it there.",
)  # fmt: skip


def write_option(*, help: str) -> Decorator:
    """--write OUT.yaml: a copy of the run file with the values that the command found."""
    return file_option("--write", "write_path", metavar="OUT.yaml", help=help)


def names_in(text: str | None) -> tuple[str, ...]:
    """The names of an option that takes them between commas, each once; none where it is absent."""
    return tuple(dict.fromkeys(name.strip() for name in (text or "").split(",") if name.strip()))


def run_argument(*, required: bool = True) -> Decorator:
    """RUN.yaml, passed on as `run_path`. The reader of run files reports a missing file, with similar names."""
    metavar = "RUN.yaml" if required else "[RUN.yaml]"
    return click.argument("run_path", metavar=metavar, required=required, type=PathType(dir_okay=False))


def _seconds(ctx: click.Context, param: click.Parameter, text: str) -> float:
    return seconds("--budget", text)


def budget_option(*, default: str, help: str) -> Decorator:
    """--budget TIME, passed on as `budget_s`."""
    return click.option(
        "--budget", "budget_s", callback=_seconds, default=default, show_default=True, metavar="TIME", help=help
    )


PLANNING_NAMES = "meshwright.catalog.engines:planning_names"
"""The function that returns the names of the installed engines, and `any`."""


class EngineChoice(click.Choice):
    """An engine's name. Engines are looked for when there is a value, and for the help.

    The message for another program has the way to plan for it.
    """

    def __init__(self) -> None:
        self.case_sensitive = True

    @property
    def choices(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return load(PLANNING_NAMES)()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value not in self.choices:
            known = ", ".join(map(repr, self.choices))
            any_engine = "--engine any plans for other programs, with every choice of a plan that the cost model knows"
            self.fail(f"{value!r} is not one of {known}; {any_engine}", param, ctx)
        return super().convert(value, param, ctx)


def numbers(
    *, low: int, high: int, example: str, word: str | None = None
) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """Callback of an option that takes `4,2,2`: whole numbers in ascending order, each once.

    None where the option is absent or is `word`. Digits may be grouped as in 98_304. Raises InputError unless
    it is a number from `low` to `high`.
    """

    def parse(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[int, ...] | None:
        if text is None or text.strip() == word:
            return None
        found = [part.strip() for part in text.split(",") if part.strip()]
        wrong = next((number for number in found if not _is_between(low, number, high)), None)
        if not found or wrong is not None:
            allowed = f"{f'{word}, or ' if word else ''}{low} to {high}, as in {example}"
            raise InputError(f"{param.opts[0]} has a wrong number", got=wrong or text, allowed=allowed)
        return tuple(sorted({parse_count(number) for number in found}))

    return parse


def _is_between(low: int, number: str, high: int) -> bool:
    try:
        return low <= parse_count(number) <= high
    except ValueError:
        return False
