"""`meshwright.compare`: records, estimates and published figures beside a baseline."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from meshwright.api import arguments

if TYPE_CHECKING:
    from meshwright.answers.comparison.study import SideComparison


def compare(
    baseline: str | os.PathLike[str], *sides: str | os.PathLike[str], like_for_like: bool = False
) -> SideComparison:
    """Compare records, estimates and published figures with a baseline. Imports no tensor framework.

    A side is a folder of records, a run file, `claim:ID,...`, `mlperf:ROUND/SUBMITTER/SYSTEM/BENCHMARK` with `*` for
    any text, or `points:KEY=TEXT,...`; `NAME=SIDE` gives it a name.

    Args:
        baseline: the side that all ratios refer to.
        sides: the others, at least one.
        like_for_like: require the same model, tokens, batch and FLOP rule.

    Returns:
        Ratios by workload with bootstrap intervals, geometric means with leave-one-out, what differs, warnings, and
        the time per token by cause where the records have a profile.

    Raises:
        InputError: a side cannot be read, or the sides have nothing in common.
        InfeasibleError: `like_for_like`, and their work differs.

    Example:
        >>> import meshwright as mw
        >>> found = mw.compare("claim:s65_02", "claim:s65_01")
        >>> round(found.means[0].value, 3)
        1.026
    """
    from meshwright.answers.comparison.study import compare_items
    from meshwright.api.runs import load_run, planned_run

    items = [
        side if isinstance(side, str) else str(arguments.path("side", side)) for side in (baseline, *sides)
    ]
    return compare_items(
        items, is_like_for_like=like_for_like, read_run=lambda path: planned_run(load_run(path))
    )
