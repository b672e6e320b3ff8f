"""Time by category from a trace of JAX's profiler (`*.trace.json.gz`) and the text of the step's HLO.

`--xla_dump_hlo_as_text` writes the text. The names of XLA's instructions say little (`fusion.12`, `ynn_fusion`), so it
decides, in this order:

    communication   the operation: all-reduce, all-gather, ...
    optimizer       a frame of the instruction's Python stack lies in a file of OPTIMIZER
    attention       a frame lies in a file of ATTENTION
    GEMM            a dot, a convolution, a custom call that is named so, or a fusion that contains one of them
    idle            loops and calls, whose instructions are in the trace themselves
    elementwise     everything else: maps, reductions, copies
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.training.profiling.categories import Category
from meshwright.training.profiling.categories import category as category_of_kernel
from meshwright.training.profiling.shares import end_us, nested_events, summary_of
from meshwright.training.profiling.steps import ProfileSteps

FIRST_DEVICE = "0"  # whose instructions count
COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast", "send", "recv",
)  # fmt: skip
ENDS = ("", "-start", "-done")
COMMUNICATING = frozenset(name + end for name in COLLECTIVES for end in ENDS)
FRAMES = frozenset({"while", "call", "conditional", "async-start", "async-update", "async-done"})
GEMMS = frozenset({"dot", "convolution", "ragged-dot"})
OPTIMIZER = re.compile(r"/optax/|/flax/nnx/training/optimizer\.py$")
ATTENTION = re.compile(r"/attention_op\.py$|/kernels/attention/|/attention_mla\.py$|splash_attention|flash_attention")

COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = .*? ([a-z][a-z0-9-]*)\(")
CALLED = re.compile(r"\bcalls=%?([\w.-]+)")
TARGET = re.compile(r'custom_call_target="([^"]+)"')
STACK = re.compile(r"\bstack_frame_id=(\d+)")
FILE = re.compile(r'^(\d+) "(.*)"$')
LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) ")
FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)\}")


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """An instruction of a computation: its operation, the computations it calls, and the files of its Python stack."""

    name: str
    operation: str
    called: str = ""  # the computation of a fusion
    target: str = ""  # of a custom call
    files: tuple[str, ...] = ()


@dataclass(kw_only=True)
class StackTable:
    """The tables at the beginning of the text, from which a frame's number leads to the files of its stack."""

    files: dict[int, str] = field(default_factory=dict)
    locations: dict[int, int] = field(default_factory=dict)  # -> file
    frames: dict[int, tuple[int, int]] = field(default_factory=dict)  # -> location, calling frame

    def read(self, line: str) -> None:
        """Add a line of one of the tables."""
        if match := FILE.match(line):
            # functions follow the files under the same numbers, and have no path
            if "/" in match[2] or match[2].endswith(".py"):
                self.files.setdefault(int(match[1]), match[2])
        elif match := LOCATION.match(line):
            self.locations[int(match[1])] = int(match[2])
        elif match := FRAME.match(line):
            self.frames[int(match[1])] = int(match[2]), int(match[3])

    def stack(self, frame: int) -> tuple[str, ...]:
        """Files from the frame to the first one of the program."""
        found: list[str] = []
        seen: set[int] = set()
        while frame in self.frames and frame not in seen:  # the first frame calls itself
            seen.add(frame)
            location, caller = self.frames[frame]
            found.append(self.files.get(self.locations.get(location, 0), ""))
            frame = caller
        return tuple(found)


def instruction_categories(text: str) -> dict[str, Category]:
    """Return the category of each instruction by name.

    >>> text = '''ENTRY %main (a: f32[4,4]) -> f32[4,4] {
    ...   %dot.1 = f32[4,4]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    ...   ROOT %all-reduce = f32[4,4]{1,0} all-reduce(%dot.1), to_apply=%add
    ... }'''
    >>> {name: kind.value for name, kind in instruction_categories(text).items()}
    {'dot.1': 'GEMM', 'all-reduce': 'communication'}
    """
    computations: dict[str, list[Instruction]] = defaultdict(list)
    stacks, current = StackTable(), ""
    for line in text.splitlines():
        if match := COMPUTATION.match(line):
            current = match[1]
        elif current and (instruction := _instruction(line, stacks)) is not None:
            computations[current].append(instruction)
        elif not current:
            stacks.read(line)
    return {one.name: _category(one, computations) for inside in computations.values() for one in inside}


def _instruction(line: str, stacks: StackTable) -> Instruction | None:
    match = INSTRUCTION.match(line)
    if match is None:
        return None
    called, target, stack = CALLED.search(line), TARGET.search(line), STACK.search(line)
    return Instruction(
        name=match[1], operation=match[2], called=called[1] if called else "", target=target[1] if target else "",
        files=stacks.stack(int(stack[1])) if stack else (),
    )  # fmt: skip


def _category(one: Instruction, computations: Mapping[str, Iterable[Instruction]]) -> Category:
    inside = (one, *computations.get(one.called, ()))
    if any(i.operation in COMMUNICATING for i in inside):
        return Category.COMMUNICATION
    if one.operation in FRAMES:
        return Category.IDLE
    for pattern, kind in ((OPTIMIZER, Category.OPTIMIZER), (ATTENTION, Category.ATTENTION)):
        if any(pattern.search(file) for file in one.files):
            return kind
    if any(i.operation in GEMMS for i in inside):
        return Category.GEMM
    return category_of_kernel(one.target) if one.target else Category.ELEMENTWISE


def summarize_executions(
    trace: Mapping[str, Any], *, module: str, hlo: str, traced: ProfileSteps, steps: ProfileSteps
) -> dict[str, Any]:
    """Return the content of `profile/summary.json` for `steps` of the `traced` ones, as `shares.summarize` does.

    An event of an instruction contains the module, the number of the execution and the device. A step begins where the
    execution before it ends, or else with its first instruction, and ends with its last one: JAX dispatches steps
    ahead, and annotations of the host say little about the device.
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
