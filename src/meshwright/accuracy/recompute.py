"""Recomputation that a row does not state but must have used.

A published run fitted into its memory. Where a source says nothing of recomputation, the reading rule assumes none;
where that plan's allocation alone exceeds the device, the run recomputed, and whole layers is what frameworks then
offer. The note on the row says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from meshwright.accuracy.layout import NO_RECOMPUTATION
from meshwright.accuracy.rows import PublishedRun
from meshwright.accuracy.tables import memory_of, tables_of
from meshwright.specs.plan import Recompute

INFERRED = "full recomputation, without which it would not have fitted"


def with_needed_recompute(runs: Sequence[PublishedRun]) -> list[PublishedRun]:
    """The runs, those that could not have fitted otherwise with full recomputation."""
    open_rows = [i for i, r in enumerate(runs) if r.conditions is not None and NO_RECOMPUTATION in r.assumed]
    result = list(runs)
    if not open_rows:
        return result
    conditions = [c for i in open_rows if (c := runs[i].conditions) is not None]
    tables = tables_of(conditions)
    memory = memory_of(conditions, tables)
    too_big = np.asarray(memory.allocated_bytes > tables.facts.memory_bytes)
    for index in np.array(open_rows)[too_big]:
        run = runs[index]
        conditions = run.conditions
        assert conditions is not None
        plan = replace(conditions.plan, recompute=Recompute.FULL)
        assumed = tuple(INFERRED if note == NO_RECOMPUTATION else note for note in run.assumed)
        result[index] = replace(run, conditions=replace(conditions, plan=plan), assumed=assumed)
    return result
