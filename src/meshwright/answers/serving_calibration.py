"""Constants of one server from its records: what `meshwright inference calibrate` prints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.answers.quantities import percent
from meshwright.answers.text_table import TextTable
from meshwright.inference.constants import PRIORS, SERVER, UNPUBLISHED_SD
from meshwright.inference.measured import ServedGiven, measured_server
from meshwright.inference.server_fit import ServerCalibration, fit_server, to_document
from meshwright.json_values import jsonable
from meshwright.result import Result
from meshwright.runfile import named_cluster
from meshwright.runfile.hardware import stated_cluster

KNOWN = 0.8
"""Share of its prior's standard deviation below which a constant counts as measured."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ServingCalibrationResult(Result):
    """Constants of one server with the errors of their predictions.

    Attributes:
        calibration: constants, the rows that they were fitted to, and the records of these.
    """

    calibration: ServerCalibration

    def to_dict(self) -> dict[str, Any]:
        """Return the document of the calibration file."""
        return jsonable(to_document(self.calibration))

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each measured quantity."""
        return [vars(row) for row in self.calibration.rows]

    def summary(self) -> str:
        """Return the calibration's origin, with its number of rows."""
        return self.calibration.made

    def tables(self) -> list[TextTable]:
        """Errors by quantity, and the constants that the records measured."""
        errors = [
            (metric, e["num_rows"], percent(e["fitted_median"]),
             "" if e["held_out_median"] is None else percent(e["held_out_median"]),
             "" if e["held_out_p90"] is None else percent(e["held_out_p90"]))
            for metric, e in self.calibration.errors.items()
        ]  # fmt: skip
        headings = ("error of", "rows", "fitted, median", "held out, median", "held out, p90")
        # Constants whose interval the records made narrower; the others keep the prior's.
        found, server = self.calibration.constants, self.calibration.engine.server
        place = {key: i for i, key in enumerate(found.keys)}
        rows = []
        for prior in PRIORS:
            i = place.get(f"{prior.name}/{SERVER}={server}")
            if i is None:
                continue
            sd = math.sqrt(found.covariance[i, i])
            if sd < KNOWN * UNPUBLISHED_SD:
                rows.append((prior.name, f"x {math.exp(found.values[i]):.3g}", f"x {math.exp(sd):.2f}"))
        return [
            TextTable(title="", headings=headings, rows=errors),
            TextTable(title="", headings=("constant", "of the published", "known within"), rows=rows),
        ]


def serving_calibration(
    *, records: Sequence[Path], cluster: str, given: ServedGiven | None = None,
    hardware: Mapping[str, Any] | None = None,
) -> ServingCalibrationResult:  # fmt: skip
    """Fit the constants of one server, whose `hardware` is stated by keys of a run file. Raises InputError for records
    that cannot be used."""
    place = named_cluster(stated_cluster(cluster, **(hardware or {})))
    found = measured_server(records, cluster=place, given=given)
    models = sorted({p.point.groups["model"] for p in found.points})
    loads = len({p.point.line for p in found.points})
    made = (
        f"{found.engine.name} on {place.accelerator.name}, from {loads} loads of {', '.join(models)} "
        f"in {len(records)} folder{'s' if len(records) > 1 else ''}"
    )
    return ServingCalibrationResult(calibration=fit_server(found, made=made))
