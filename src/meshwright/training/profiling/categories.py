"""Categories of kernels and operators by their names. Imports no tensor framework.

`categories.toml` is read from the top: the first pattern found in a name decides. Every GPU library has its own naming
convention, so each line says whose it is. A name that matches no line is `other` and is listed by name, never guessed.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

WAIT = "meshwright pipeline wait"
"""Name of the annotation in which a pass of a pipeline waits for another rank."""


class Category(StrEnum):
    """Kinds of work, in the order in which an instant that two of them share is counted."""

    GEMM = "GEMM"
    ATTENTION = "attention"
    ELEMENTWISE = "elementwise"  # norms, softmax, activations, reductions, indexing, copies
    OPTIMIZER = "optimizer"
    PIPELINE_WAIT = "pipeline wait"  # for a receive from another stage, its transfer included
    COMMUNICATION = "communication"  # what no computation hides
    OTHER = "other"
    IDLE = "idle"  # nothing runs: the host prepares, or waits


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """A regular expression, its meaning, and the programs whose names it reads."""

    category: Category
    expression: str
    why: str


def _patterns(table: str) -> tuple[Pattern, ...]:
    """Patterns of a table of `categories.toml`, in their order."""
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return tuple(
        Pattern(category=Category(group["category"]), expression=expression, why=why)
        for group in tables[table]
        for expression, why in group["names"]
    )


_WAITS = Pattern(category=Category.PIPELINE_WAIT, expression=f"^{WAIT}$", why="passes of the native engine's pipeline")
PATTERNS = (_WAITS, *_patterns("patterns"))
FRAMES = _patterns("frames")
"""Operators of the host that only call others: their own time is no work on data."""

DECISIVE = frozenset(
    {Category.GEMM, Category.ATTENTION, Category.OPTIMIZER, Category.PIPELINE_WAIT, Category.COMMUNICATION}
)
"""Categories whose operators pass them to the operators they call: a multiplication in AdamW is the optimizer's."""


@cache
def category(name: str) -> Category:
    """The category of a kernel.

    >>> [category(n).value for n in ("nvjet_tst_128x256_64x4_v_bz_NTT", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL")]
    ['GEMM', 'communication']
    >>> category("somebody_elses_kernel").value
    'other'
    """
    return _first(PATTERNS, name)


@cache
def operator_category(name: str) -> Category:
    """The category of an operator of the host; frames around operators are idle.

    >>> operator_category("aten::addmm").value, operator_category("MulBackward0").value
    ('GEMM', 'idle')
    """
    own = category(name)
    is_frame = own not in DECISIVE and _first(FRAMES, name) is Category.IDLE
    return Category.IDLE if is_frame else own


def _first(patterns: Iterable[Pattern], name: str) -> Category:
    found = (p.category for p in patterns if re.search(p.expression, name))
    return next(found, Category.OTHER)
