"""Categories of a compiled step's instructions, from the text of its HLO (`--xla_dump_hlo_as_text` writes it).

The names of XLA's instructions say little: `fusion.12`, `ynn_fusion`. The text decides, in this order:

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

from meshwright.training.profiling.categories import Category
from meshwright.training.profiling.categories import category as category_of_kernel

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
