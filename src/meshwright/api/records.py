"""`meshwright.read_record` and `meshwright.read_records`: measurements read back from their folders."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

from meshwright.api.question import AnyPath, answered_by_body, question

if TYPE_CHECKING:
    from meshwright.answers.ingest_result import IngestBenchmark
    from meshwright.answers.record_files import (
        DeviceMeasurements,
        OfflineMeasurements,
        RecordSet,
        ServingMeasurements,
        TrainingSweep,
    )
    from meshwright.answers.training_run import TrainingRun


@question("meshwright.answers.record_files:read_result")
def read_record(
    folder: Annotated[
        str | os.PathLike[str],
        AnyPath(
            "Folder that `meshwright train`, `bench device`, `bench train`, `bench ingest`, `bench serve` or "
            "`bench offline` wrote."
        ),
    ],
) -> TrainingRun | DeviceMeasurements | TrainingSweep | IngestBenchmark | ServingMeasurements | OfflineMeasurements:
    """Read the record in a folder, of whichever kind. Imports no tensor framework.

    Returns:
        `TrainingRun` for a training, `DeviceMeasurements` for `bench device`, `TrainingSweep` for `bench train`,
        `IngestBenchmark` for `bench ingest`, `ServingMeasurements` for `bench serve`, `OfflineMeasurements` for
        `bench offline`.

    Raises:
        InputError: there is no record in the folder, or a file is damaged.

    Example:
        >>> import meshwright as mw
        >>> mw.read_record("no-such-folder")
        Traceback (most recent call last):
        meshwright.errors.InputError: there is no record in this folder: got 'no-such-folder', ...
    """
    return answered_by_body()


@question("meshwright.answers.record_files:read_results")
def read_records(folder: Annotated[str | os.PathLike[str], AnyPath("Where to look.")]) -> RecordSet:
    """Read every record in a folder and below it. Imports no tensor framework.

    Returns:
        The records in the order of their paths, and the ones that could not be read with the reason.

    Raises:
        InputError: there is no such folder.

    Example:
        >>> import meshwright as mw, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     len(mw.read_records(folder))
        0
    """
    return answered_by_body()
