"""`meshwright explain`: the difference of two plans by component, in ms and GiB."""

from __future__ import annotations

from typing import Any

from meshwright.answers.components import label
from meshwright.answers.difference import PlanDifference
from meshwright.answers.documents.plan import why_not_sentence
from meshwright.answers.explanation import Explanation, verdict_sentence
from meshwright.answers.quantities import percent, rate, value_of
from meshwright.api.plan import explain
from meshwright.api.question import ask
from meshwright.cli.output import (
    Align,
    bar_width,
    emitted_json,
    exit_unless,
    print_hardware,
    print_line,
    print_table,
    progress,
)
from meshwright.cli.run_input import run_from
from meshwright.planner.estimate import PlanEstimate
from meshwright.planner.explain import Difference

BAR_WIDTH = 16
"""Characters of the longest bar, on either side of the axis."""

TABLE_WIDTH = 80
"""Columns of the table of components with bars of that width."""


def run(*, asked: dict[str, Any], overrides: tuple[str, ...], **keys: Any) -> None:
    """Compare the run's plan with another, and answer the questions of --why-not; exit with 1 if it cannot run.

    `keys`: options of keys of both run files.
    """
    asked["run"] = run = run_from(asked["run"], overrides=overrides, **keys)
    if asked["against"] is not None:
        asked["against"] = run_from(asked["against"], **keys)
    with progress(f"explaining {run.name}"):
        answer = ask(explain, asked)
    if not emitted_json(answer):
        print_hardware(run.cluster)
        _print(answer)
    exit_unless(answer.obstacle is None)


# --- tables ---


def _print(answer: Explanation) -> None:
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
    step = done.step
    return (
        f"{done.plan.describe()}, {value_of(step.step)} a step, {rate(step.tokens_per_s_per_device.value)} "
        f"tokens/s/device, MFU {percent(step.mfu.value)}"
    )


def _cells(d: Difference, decimals: int) -> tuple[str, str, str]:
    return f"{d.winner:,.{decimals}f}", f"{d.loser:,.{decimals}f}", f"{d.delta:+,.{decimals}f}"


def _signed_bar(delta: float, largest: float) -> str:
    """A bar to the left of the axis if the second plan is faster, to the right if it is slower."""
    widest = bar_width(BAR_WIDTH, table=TABLE_WIDTH)
    length = round(widest * abs(delta) / largest) if largest > 0 else 0
    left, right = (length, 0) if delta < 0 else (0, length)
    return f"{'█' * left:>{widest}}│{'█' * right}"
