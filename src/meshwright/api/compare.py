"""`meshwright.compare`: records, estimates and published figures beside a baseline."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from meshwright.api.question import Flag, PathOrText, answered_by_body, question

if TYPE_CHECKING:
    from meshwright.answers.comparison.study import SideComparison


@question("meshwright.api.compare:comparison")
def compare(
    baseline: Annotated[str | os.PathLike[str], PathOrText("The side that all ratios refer to.")],
    *sides: Annotated[str | os.PathLike[str], PathOrText("The others, at least one.", least=1, metavar="SIDE")],
    like_for_like: Annotated[
        bool, Flag("Require the same model, tokens, batch and FLOP rule, and split the gap by cause.")
    ] = False,
) -> SideComparison:
    """Compare records, estimates and published figures with a baseline. Imports no tensor framework.

    A side is a folder of records, a run file, `claim:ID,...`, `mlperf:ROUND/SUBMITTER/SYSTEM/BENCHMARK` with `*` for
    any text, or `points:KEY=TEXT,...`; `NAME=SIDE` gives it a name.

    Returns:
        Ratios by workload with intervals, geometric means with leave-one-out, what differs, warnings, and
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
    return answered_by_body()


def comparison(*, baseline: str, sides: Sequence[str], like_for_like: bool) -> SideComparison:
    """The answer to `compare`."""
    from meshwright.answers.comparison.study import compare_items
    from meshwright.api.runs import load_run, planned_run

    return compare_items(
        (baseline, *sides), is_like_for_like=like_for_like, read_run=lambda path: planned_run(load_run(path))
    )
