"""Options that several commands share, so that one flag means one thing everywhere.

Every command is written with `verb`:

    @verb("catalog", examples=["meshwright catalog models", "meshwright catalog models llama3-8b --json"])
    @json_option
    def command(as_json: bool) -> None:
        '''Look up what Meshwright knows.'''
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from meshwright.errors import InputError

Function = Callable[..., Any]

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Write one JSON document to stdout and nothing else there."
)

html_option = click.option(
    "--html",
    "html_path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write a self-contained page that opens without a network.",
)

root_option = click.option(
    "--root",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("/"),
    show_default=True,
    metavar="FOLDER",
    help="Where the node's file system begins: /host in a container that has it mounted there.",
)

set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override one key of the run file, as in --set batch.micro=2. May be repeated.",
)

calibration_option = click.option(
    "--calibration", "calibration", metavar="FILE",
    help="Use what `meshwright calibrate` learned of the device; for cluster `here` the installed one is found.",
)  # fmt: skip


def calibration_override(path: str | None) -> list[str]:
    """`--calibration` as an override of the run file's key."""
    return [] if path is None else [f"calibration={json.dumps(path)}"]


def run_argument(*, required: bool = True) -> Callable[[Function], Function]:
    """RUN.yaml, passed on as `run_path`. Whether the file exists is for the run file's reader to say."""
    metavar = "RUN.yaml" if required else "[RUN.yaml]"
    return click.argument(
        "run_path", metavar=metavar, required=required, type=click.Path(path_type=Path, dir_okay=False)
    )


BUDGET = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>s|m|h|)")
UNIT_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
LONGEST_S = 7 * 24 * 3600.0


def _seconds(ctx: click.Context, param: click.Parameter, text: str) -> float:
    """`90`, `180s`, `3m`, `1.5h` in seconds."""
    found = BUDGET.fullmatch(text.strip())
    seconds = float(found["number"]) * UNIT_S[found["unit"]] if found else 0.0
    if not 0 < seconds <= LONGEST_S:
        raise InputError("--budget is not a time", got=text, allowed="above 0 to 168h, as in 180s, 3m or 1h")
    return seconds


def budget_option(*, default: str, help: str) -> Callable[[Function], Function]:
    """--budget TIME, passed on as `budget_s`."""
    return click.option(
        "--budget",
        "budget_s",
        callback=_seconds,
        default=default,
        show_default=True,
        metavar="TIME",
        help=help,
    )


fix_option = click.option(
    "--fix",
    "fixes",
    multiple=True,
    metavar="NAME=VALUE",
    help="Hold fields of the plan: --fix tensor=8,micro_batch=1 (or tp=8,mbs=1). May be repeated.",
)

why_not_option = click.option(
    "--why-not",
    "questions",
    multiple=True,
    metavar="NAME=VALUE",
    help="Why no plan like this: --why-not tensor=8. May be repeated.",
)


class EngineChoice(click.Choice):
    """One of the engines that are installed; their names are read when a command line or its help asks for them."""

    def __init__(self) -> None:
        self.case_sensitive = True

    @property
    def choices(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        from meshwright.catalog.engines import engine_names

        return engine_names()


_DESCRIPTION_OPTIONS = (
    click.option("--model", metavar="MODEL", help="Catalogue name or Hugging Face config.json."),
    click.option("--cluster", metavar="CLUSTER", help="ACCELERATOR-GPUS_PER_NODExNODES, as in mi355x-8x64."),
    click.option(
        "--gbs", "global_batch", type=click.IntRange(min=1), metavar="N", help="Global batch in sequences."
    ),
    click.option(
        "--seq", "sequence_length", type=click.IntRange(min=1), metavar="TOKENS", help="Tokens per sequence."
    ),
    click.option("--precision", metavar="RECIPE", help="Number formats: bf16 (the default), fp8, mxfp8, ..."),
    click.option(
        "--engine",
        type=EngineChoice(),
        help="The program that runs the step; only plans that it accepts are tried. Default: native.",
    ),
)


def description_options(function: Function) -> Function:
    """--model, --cluster, --gbs, --seq, --precision and --engine: a run without a file; None where absent."""
    return functools.reduce(lambda f, option: option(f), reversed(_DESCRIPTION_OPTIONS), function)


def verb(name: str, *, examples: Sequence[str]) -> Callable[[Function], click.Command]:
    """The `click.command` of one verb, with examples at the end of its help.

    The tests parse every example with the command that it belongs to, so an example cannot go stale.
    """
    lines = "\n".join(f"  {line}" for line in examples)
    return click.command(name, epilog=f"\b\nExamples:\n{lines}")
