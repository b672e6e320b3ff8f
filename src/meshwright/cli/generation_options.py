"""Options that `generate` and `chat` share: sampling, length, and which weights."""

from __future__ import annotations

import click

from meshwright.cli.options import count_option, option_group, step_option

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
    count_option(
        "--max-tokens",
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
    count_option("--seed", low=0, help="Seed of the random streams.  [default: a new one, in --json]"),
    click.option(
        "--stop", "stop", multiple=True, metavar="TEXT", help="Text before which a completion ends. May be repeated."
    ),
    click.option(
        "--beyond-positions", is_flag=True, help="Allow more positions than the model is trained for."
    ),
)  # fmt: skip


weights_options = option_group(_WEIGHTS)
"""Options of which weights, and how they are held, named as the arguments of `meshwright.generate`."""

generation_options = option_group((*_GENERATION, *_WEIGHTS))
"""Options of sampling, length and weights, named as the arguments of `meshwright.generate`."""
