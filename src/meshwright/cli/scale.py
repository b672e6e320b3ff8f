"""`meshwright scale`: what happens to a run when devices are added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from meshwright.cli.options import (
    calibration_option,
    description_options,
    fix_option,
    html_option,
    json_option,
    run_argument,
    set_option,
    verb,
)
from meshwright.errors import InputError

MAX_DEVICES = 10**7
MAX_NUMBER = 1e18

_RUN_OPTIONS = ("model", "cluster", "global_batch", "sequence_length", "precision", "engine", "calibration")


def _counts(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[int, ...]:
    """`768,1024,98_304` as whole numbers, ascending."""
    words = [word.strip().replace("_", "") for word in (text or "").split(",") if word.strip()]
    for word in words:
        if not (word.isascii() and word.isdigit() and len(word) < 9 and 0 < int(word) <= MAX_DEVICES):
            raise InputError(
                f"{param.opts[0]} has a wrong number", got=word, allowed=f"1 to {MAX_DEVICES}, as in 768,1024"
            )
    return tuple(sorted({int(word) for word in words}))


def _finite(ctx: click.Context, param: click.Parameter, number: float | None) -> float | None:
    if number is not None and not 0 < number <= MAX_NUMBER:
        raise InputError(
            f"{param.opts[0]} is out of range", got=number, allowed=f"above 0, to {MAX_NUMBER:g}"
        )
    return number


def _positive(name: str, destination: str, metavar: str, text: str) -> Any:
    return click.option(name, destination, type=float, callback=_finite, metavar=metavar, help=text)


@verb(
    "scale",
    examples=[
        "meshwright scale examples/runs/moe-2t-mi355x.yaml --devices 8192,98304 --days 22.8",
        "meshwright scale examples/runs/moe-2t-mi300x.yaml --emulate 768 --devices 16384,32768,65536",
        "meshwright scale examples/runs/llama3.1-8b-pretrain.yaml --mode weak --html scale.html",
        "meshwright scale --model moe-2t --cluster mi355x-8x1024 --gbs 32768 --seq 4096 --json",
    ],
)
@run_argument(required=False)
@description_options
@set_option
@calibration_option
@fix_option
@click.option(
    "--devices",
    "sizes",
    callback=_counts,
    metavar="N,N,...",
    help="Sizes to try, the smallest is the base; otherwise 1 to 16 times the cluster.",
)
@click.option(
    "--mode", type=click.Choice(("strong", "weak")), default="strong", show_default=True,
    help="Keep the global batch, or let it grow with the devices.",
)  # fmt: skip
@click.option("--keep-plan", is_flag=True, help="Keep one plan and change its data-parallel width alone.")
@click.option(
    "--emulate", "small", type=click.IntRange(1, MAX_DEVICES), metavar="N",
    help="Let N devices with a smaller batch stand for each size, and show what that hides.",
)  # fmt: skip
@click.option(
    "--replicas", callback=_counts, metavar="N,N,...",
    help="At the largest size, rank numbers of devices that hold the model once.",
)  # fmt: skip
@click.option("--sensitivity", "with_sensitivity", is_flag=True, help="Change one assumption at a time.")
@_positive("--tokens", "num_tokens", "N", "Length of the training; otherwise the run file's.")
@_positive("--days", "days", "D", "Length of the training: what the first size does in D days of steps.")
@click.option(
    "--goodput/--no-goodput", "with_failures", default=True, help="Show the time that failures leave, or not."
)
@html_option
@json_option
def command(
    run_path: Path | None,
    overrides: tuple[str, ...],
    mode: str,
    html_path: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Scale a run to more devices: efficiency, time to train, failures, energy and cost.

    The global batch is the run file's, for the run file's cluster. The planner chooses a plan at each size;
    with --keep-plan one plan is only made wider. --emulate gives a small cluster the share of the batch that
    it would have in a large one, and says what that cannot show.
    """
    if given["num_tokens"] is not None and given["days"] is not None:
        raise InputError("--tokens and --days both give the length of the training", hint="give one of them")
    from meshwright.cli.output import emit_json, note, progress
    from meshwright.cli.run_input import run_from
    from meshwright.planner.fixed import fixed_fields
    from meshwright.planner.scaling import Mode
    from meshwright.report.scale_study import ScaleQuestion, scale_report

    described = {name: given.pop(name) for name in _RUN_OPTIONS}
    run = run_from(run_path, overrides=overrides, **described)
    fixed = fixed_fields(given.pop("fixes"))
    with progress(f"scaling {run.model.name}"):
        report = scale_report(run, ScaleQuestion(mode=Mode(mode), fixed=fixed, **given))
    if html_path is not None:
        from meshwright.report.html import write_page
        from meshwright.report.scale_page import scale_page

        write_page(scale_page(report), path=html_path)
        note(f"wrote {html_path}")
    if as_json:
        emit_json(report.to_dict())
    else:
        from meshwright.cli.output import print_text_tables
        from meshwright.report.scale_tables import tables_of

        print_text_tables(tables_of(report))
