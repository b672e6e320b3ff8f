"""`meshwright explain`: why one plan beats another, in ms and GiB."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshwright.cli.options import (
    calibration_option,
    json_option,
    run_argument,
    set_option,
    verb,
    why_not_option,
)

if TYPE_CHECKING:
    from meshwright.cli.output import Align
    from meshwright.planner.estimate import PlanEstimate
    from meshwright.planner.explain import Difference
    from meshwright.report.difference import PlanDifference
    from meshwright.report.explanation import Explanation

BAR_WIDTH = 16


@verb(
    "explain",
    examples=[
        "meshwright explain examples/runs/llama3.1-70b-pinned.yaml",
        "meshwright explain examples/runs/llama3.1-70b-pinned.yaml --why-not tensor=8",
        "meshwright explain pinned.yaml --against other.yaml --json",
    ],
)
@run_argument()
@click.option(
    "--against", "against_path", type=click.Path(dir_okay=False, path_type=Path), metavar="OTHER.yaml",
    help="The run to compare with; without it, the planner's best plan for the same run.",
)  # fmt: skip
@why_not_option
@set_option
@calibration_option
@json_option
def command(
    run_path: Path,
    against_path: Path | None,
    questions: tuple[str, ...],
    overrides: tuple[str, ...],
    calibration: str | None,
    as_json: bool,
) -> None:
    """Compare the run's plan with another, component by component, and say what decides.

    Without --against the other plan is the planner's best for the same run; if the run leaves its plan open,
    the best plan is compared with the second best. --set changes RUN.yaml, not OTHER.yaml.
    """
    from meshwright.cli.output import emit_json, progress
    from meshwright.cli.run_input import run_from
    from meshwright.planner.fixed import fixed_fields
    from meshwright.report.explanation import explain_pair, explain_run

    run, asked = (
        run_from(run_path, overrides=overrides, calibration=calibration),
        [fixed_fields([q]) for q in questions],
    )
    with progress(f"explaining {run.name}"):
        if against_path is None:
            answer = explain_run(run, questions=asked)
        else:
            answer = explain_pair(run, run_from(against_path, calibration=calibration), questions=asked)
    if as_json:
        emit_json(answer.to_dict())
    else:
        _print(answer)


# --- tables ---


def _print(answer: Explanation) -> None:
    from meshwright.cli.output import print_line
    from meshwright.report.documents.plan import why_not_sentence

    if answer.obstacle is not None:
        print_line(f"{answer.this_name} is out: {answer.obstacle}")
        print_line(f"{answer.other_name}: {_summary(answer.other)}")
    if answer.difference is not None:
        _print_difference(answer, answer.difference)
    if answer.limit is not None:
        limit = answer.limit
        print_line()
        print_line(
            f"Memory binds: without its limit {limit.plan.describe()} would take "
            f"{limit.step_s * 1e3:,.1f} ms, but it needs {limit.needed_gib:.1f} GiB "
            f"and {limit.available_gib:.1f} GiB may be used."
        )
    for answered in answer.why_not:
        print_line()
        print_line(f"Why not {why_not_sentence(answered)}")


def _print_difference(answer: Explanation, difference: PlanDifference) -> None:
    from meshwright.cli.output import print_line, print_table
    from meshwright.report.components import label
    from meshwright.report.documents.explanation import verdict_sentence

    print_line(f"{answer.this_name}: {_summary(difference.this)}")
    print_line(f"{answer.other_name}: {_summary(difference.other)}")
    if not difference.changes:
        print_line("They are the same plan.")
    else:
        print_line(f"from the first to the second: {', '.join(map(str, difference.changes))}")
    print_line()
    step, comparison = difference.step_ms, difference.comparison
    shown = [d for d in comparison.components_ms if max(abs(d.winner), abs(d.loser)) > 5e-4 * step.winner]
    largest = max((abs(d.delta) for d in shown), default=0.0)
    rows = [(label(d.name), *_cells(d, 1), _signed_bar(d.delta, largest)) for d in shown]
    rows.append(("step", *_cells(step, 1), ""))
    sides: dict[str, Align] = {"first": "right", "second": "right", "difference": "right"}
    print_table({"ms of a step": "left", **sides, "": "left"}, rows)
    print_line()
    print_table({"GiB per device": "left", **sides}, [(d.name, *_cells(d, 2)) for d in comparison.memory_gib])
    print_line()
    print_line(verdict_sentence(answer, difference), style="bold")


def _summary(done: PlanEstimate) -> str:
    from meshwright.report.quantities import percent, rate, value_of

    step = done.step
    return (
        f"{done.plan.describe()}, {value_of(step.step)} a step, {rate(step.tokens_per_s_per_device.value)} "
        f"tokens/s/device, MFU {percent(step.mfu.value)}"
    )


def _cells(d: Difference, decimals: int) -> tuple[str, str, str]:
    return f"{d.winner:,.{decimals}f}", f"{d.loser:,.{decimals}f}", f"{d.delta:+,.{decimals}f}"


def _signed_bar(delta: float, largest: float) -> str:
    """Left of the axis where the second plan gains, right of it where it loses."""
    length = round(BAR_WIDTH * abs(delta) / largest) if largest > 0 else 0
    left, right = (length, 0) if delta < 0 else (0, length)
    return f"{'█' * left:>{BAR_WIDTH}}│{'█' * right}"
