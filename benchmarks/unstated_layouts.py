"""Published runs whose layout nobody states, beside the best plan that the planner finds.

    python benchmarks/unstated_layouts.py [--markdown]

Each run gives the question: model, devices, batch, sequence length, precision and software. The planner answers it as
`meshwright plan` does, and the rate of its best plan stands beside the measured one. The row had no part in the
calibration, which needs a layout. A submission that was tuned for a contest should come near the best plan, and no run
should be far above it. It takes some seconds.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

from meshwright.accuracy.csvfile import CsvRow
from meshwright.accuracy.layout import PublishedLayout, stated_batch
from meshwright.accuracy.reasons import CannotPredictError, Reason
from meshwright.accuracy.rows import PublishedRun, read_row, read_runs, table_of_runs
from meshwright.accuracy.shipped import measured_runs_path
from meshwright.accuracy.software import Software
from meshwright.accuracy.tables import cluster_of
from meshwright.planner import PlanRequest, search
from meshwright.specs.memory_budget import WHOLE_DEVICE_RATIO
from meshwright.specs.model import Model
from meshwright.specs.plan import Plan
from meshwright.specs.precision import PRECISIONS

TPU_STACKS = ("maxtext", "pax")
"""Stacks whose runs MaxText could have made; Megatron stands for all others."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A run and the planner's best plan for it. Rates in tokens/s per device."""

    run: PublishedRun
    measured: float
    predicted: float
    plan: Plan

    @property
    def signed_error(self) -> float:
        return self.predicted / self.measured - 1


def unstated() -> list[CsvRow]:
    """The shipped rows that lack a layout and nothing else that the reader asks for before it."""
    without = {run.line for run in read_runs(measured_runs_path()) if run.reason is Reason.NO_PARALLELISM}
    return [row for row in table_of_runs(measured_runs_path()) if row.line in without]


def only_batch(row: CsvRow, model: Model, *, num_devices: int, seq_len: int, software: Software) -> PublishedLayout:
    """A reader of layouts that asks for the batch alone; its plan is a placeholder for the planner's."""
    batch = stated_batch(row, seq_len)
    if batch is None:
        raise CannotPredictError(Reason.NO_BATCH)
    return PublishedLayout(plan=Plan(), global_batch=batch, assumed=())


def answer(row: CsvRow) -> Answer | str:
    """The planner's answer to the question of one row, or why there is none."""
    run = read_row(row, layout=only_batch)
    c = run.conditions
    if c is None:
        return str(run.reason)
    if not run.tokens_per_s_per_device:
        return "no rate"
    request = PlanRequest(
        model=c.model,
        lora=c.lora,
        cluster=cluster_of(c),
        seq_len=c.seq_len,
        global_batch=c.global_batch,
        precision=PRECISIONS[c.precision],
        stack=c.stack,
        engine="maxtext" if c.stack.framework in TPU_STACKS else "megatron",
        usable_memory_ratio=WHOLE_DEVICE_RATIO,
    )
    best = search(request, top=1).best
    if best is None:
        return "no plan fits"
    rate = c.tokens_per_step / best.step_s / c.num_devices
    return Answer(run=run, measured=run.tokens_per_s_per_device, predicted=rate, plan=best.plan)


def cells(found: Answer) -> tuple[str, ...]:
    run = found.run
    assert run.conditions is not None
    devices = f"{run.conditions.num_devices:,} {run.conditions.accelerator.name}"
    rates = (f"{found.measured:,.0f}", f"{found.predicted:,.0f}", f"{found.signed_error:+.0%}")
    return (run.id, run.model_name, devices, run.conditions.stack.framework, *rates, found.plan.describe())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="as the table of docs/reference/found-layouts.md")
    markdown = parser.parse_args().markdown
    if markdown:
        print("| run | model | devices | software | measured | best plan | | plan |")
        print("|---|---|---|---|--:|--:|--:|---|")
    found = [(row, answer(row)) for row in unstated()]
    answers = [a for _, a in found if isinstance(a, Answer)]
    for a in answers:
        print(f"| {' | '.join(cells(a))} |" if markdown else "  ".join(cells(a)))
    if not markdown:
        print(*(f"{row.text('id')}: {reason}" for row, reason in found if isinstance(reason, str)), sep="\n")
    errors = np.array([a.signed_error for a in answers])
    print(
        f"\n{len(answers)} runs: median error {np.median(np.abs(errors)):.0%}, "
        f"{int(np.sum(errors < -0.1))} more than 10 % above the best plan"
    )


if __name__ == "__main__":
    main()
