"""Options that `generate` and `chat` share: sampling, length, and which weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from meshwright.cli.options import Function, step_option

_WEIGHTS = (
    step_option,
    click.option(
        "--dtype", type=click.Choice(["fp32", "bf16", "fp16"]),
        help="Number format.  [default: as trained, or as the files are]",
    ),
    click.option(
        "--tokenizer", metavar="NAME", help="Another tokenizer: `bytes`, a tokenizer.json, its folder, OWNER/NAME."
    ),
    click.option("--adapter", metavar="FOLDER", help="LoRA adapter to add to the weights; or the run that trained it."),
)  # fmt: skip

_GENERATION = (
    click.option(
        "--max-tokens", type=click.IntRange(min=1), metavar="N",
        help="Most tokens of a completion.  [default: 256, or what the trained positions leave room for]",
    ),
    click.option(
        "--temperature", type=float, metavar="T", help="0 takes the most probable token.  [default: the model's, or 0]"
    ),
    click.option("--top-k", type=int, metavar="K", help="Draw from the K most probable tokens; 0: from all."),
    click.option(
        "--top-p", type=float, metavar="P", help="Draw from the most probable tokens that together have P."
    ),
    click.option(
        "--min-p", type=float, metavar="P", help="Draw from tokens with at least P times the largest probability."
    ),
    click.option(
        "--repetition-penalty", type=float, metavar="R",
        help="Above 1 makes tokens that are there already less probable."
    ),
    click.option(
        "--seed", type=click.IntRange(min=0), metavar="N",
        help="Seed of the random streams.  [default: a new one, in --json]",
    ),
    click.option(
        "--stop", "stop", multiple=True, metavar="TEXT", help="Text before which a completion ends. May be repeated."
    ),
    click.option(
        "--beyond-positions", is_flag=True, help="Allow more positions than the model is trained for."
    ),
)  # fmt: skip


def weights_options(function: Function) -> Callable[..., Any]:
    """Options of which weights, and how they are held, named as the arguments of `meshwright.generate`."""
    return functools.reduce(lambda f, option: option(f), reversed(_WEIGHTS), function)


def generation_options(function: Function) -> Callable[..., Any]:
    """Options of sampling, length and weights, named as the arguments of `meshwright.generate`."""
    return functools.reduce(lambda f, option: option(f), reversed((*_GENERATION, *_WEIGHTS)), function)
