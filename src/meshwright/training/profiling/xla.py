"""Time by category from a trace of JAX's profiler (`*.trace.json.gz`), as `shares.summarize` of PyTorch's.

An event of an instruction contains the module, the number of the execution and the device. The instructions of the
first device count. A step begins where the execution before it ends, or else with its first instruction, and ends with
its last one: JAX dispatches steps ahead, and annotations of the host say little about the device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from meshwright.training.profiling.categories import Category
from meshwright.training.profiling.hlo import instruction_categories
from meshwright.training.profiling.shares import end_us, nested_events, summary_of
from meshwright.training.profiling.steps import ProfileSteps

FIRST_DEVICE = "0"


def summarize_executions(
    trace: Mapping[str, Any], *, module: str, hlo: str, traced: ProfileSteps, steps: ProfileSteps
) -> dict[str, Any]:
    """Return the content of `profile/summary.json` for `steps` of the `traced` ones.

    `hlo` is the text of `module`, which is executed once per step. Raises ValueError if the trace has another number
    of executions than of traced steps.
    """
    runs: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        about = event.get("args", {})
        if about.get("hlo_module") == module and str(about.get("device_ordinal")) == FIRST_DEVICE:
            runs[str(about.get("run_id"))].append(event)
    executions = sorted(runs.values(), key=_start_us)
    expected = traced.last - traced.first + 1
    if len(executions) != expected:
        raise ValueError(f"the trace holds {len(executions)} executions of {module}, and {expected} steps")
    first = steps.first - traced.first
    counted = executions[first:]
    begin_us = max(map(end_us, executions[first - 1])) if first else _start_us(counted[0])
    kinds = instruction_categories(hlo)
    lanes: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for event in (event for execution in counted for event in execution):
        lanes[event.get("pid"), event.get("tid")].append(event)
    found = [
        event
        for lane, inside in lanes.items()
        for event in nested_events(inside, lane, category_of=lambda name: kinds.get(name, Category.OTHER))
    ]
    return summary_of(
        found, windows=[(begin_us, max(map(end_us, counted[-1])))], device="cpu",
        steps=list(range(steps.first, steps.last + 1)),
    )  # fmt: skip


def _start_us(execution: list[Mapping[str, Any]]) -> float:
    return min(float(event["ts"]) for event in execution)
