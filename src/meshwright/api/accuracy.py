"""`meshwright.accuracy`: predictions of measured runs and their errors."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

from meshwright.api.question import AnyPath, Flag, answered_by_body, question

if TYPE_CHECKING:
    from meshwright.answers.accuracy_study import AccuracyStudy


@question("meshwright.answers.accuracy_study:accuracy_study")
def accuracy(
    *,
    runs: Annotated[
        str | os.PathLike[str] | None,
        AnyPath(
            "CSV file of your measured runs, with the columns of the shipped runs.",
            unset="the shipped runs",
            is_folder=False,
            metavar="FILE.csv",
        ),
    ] = None,
    failed: Annotated[
        str | os.PathLike[str] | None,
        AnyPath(
            "CSV file of configurations that failed to run, such as out of memory.",
            unset="the shipped ones, unless runs are given",
            is_folder=False,
            metavar="FILE.csv",
        ),
    ] = None,
    leave_one_source_out: Annotated[
        bool, Flag("Predict each source with a calibration that was refitted without it. Takes some minutes.")
    ] = False,
) -> AccuracyStudy:
    """Predict published measured runs and compare. Rates are tokens/s per device.

    Returns:
        Errors of all rows, by group, and of each row; rows that cannot be predicted have a reason.

    Raises:
        InputError: a file cannot be read; the message has the line.

    Example:
        >>> import meshwright as mw
        >>> study = mw.accuracy()
        >>> study.overall.num_predicted > 1000, sorted(study.groups)[:2]
        (True, ['accelerator', 'architecture'])
    """
    return answered_by_body()
