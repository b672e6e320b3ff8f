"""`meshwright.accuracy`: predictions of measured runs and their errors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshwright.api import arguments

if TYPE_CHECKING:
    from meshwright.answers.accuracy_study import AccuracyStudy


def accuracy(
    *,
    runs: str | os.PathLike[str] | None = None,
    failed: str | os.PathLike[str] | None = None,
    calibrations: Sequence[str | os.PathLike[str]] = (),
    leave_one_source_out: bool = False,
) -> AccuracyStudy:
    """Predict published measured runs and compare. Rates are tokens/s per device.

    Args:
        runs: CSV file of measured runs, in the columns of the shipped one. Default: the shipped runs.
        failed: CSV file of configurations that ran out of memory. Default: the shipped ones with the shipped runs.
        calibrations: files of `meshwright calibrate --from-tables`, one for each accelerator.
        leave_one_source_out: predict each source by a calibration fitted without it; this takes some minutes.

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
    from meshwright.answers.accuracy_study import accuracy_study

    return accuracy_study(
        runs=None if runs is None else arguments.path("runs", runs),
        failed=None if failed is None else arguments.path("failed", failed),
        calibrations=[
            arguments.path("calibrations", p) for p in arguments.items("calibrations", calibrations)
        ],
        leave_one_source_out=arguments.flag("leave_one_source_out", leave_one_source_out),
    )
