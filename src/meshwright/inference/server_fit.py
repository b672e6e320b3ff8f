"""Constants of one server, fitted to records of `bench serve`, and the file that holds them.

    log(value) = log(published) + x        x ~ N(0, sd²)

`published` is the value of the shipped constants for the server's device, format and engine, and stays as it is. Each
constant of the server has one x. Its sd is 0.3 where points of the same architecture were published, else 2: for a CPU
the records decide, and what no record tests keeps an interval of that width.

The spread of the intervals comes from predictions of each configuration (a model with its lengths) by constants fitted
to the other configurations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from meshwright import files
from meshwright.arrays import FloatArray
from meshwright.errors import InputError
from meshwright.inference.constants import SERVER, ServingCalibration, Unknown, calibration_from, shipped_constants
from meshwright.inference.fit import HeldOut, document_of, spread_as, with_spread
from meshwright.inference.measured import MeasuredPoint, MeasuredServer
from meshwright.inference.points import PointConditions, PublishedPoint
from meshwright.inference.predict import derivatives, log_predictor
from meshwright.inference.serving import EngineTraits
from meshwright.json_values import load_json

SCHEMA = "meshwright serving calibration 2"

MODEL_SD = 0.1
"""Standard deviation of a load's logarithm that the fit assumes besides the spread of its repeats."""

FEWEST_CONFIGURATIONS = 3
"""Configurations from which held-out predictions give the spread; below it the spread of published sources stays."""


@dataclass(frozen=True, kw_only=True)
class FittedRow:
    """One measured quantity, SI: fitted with the others, and predicted by the other configurations."""

    configuration: str
    in_flight: float
    metric: str
    unit: str
    measured: float
    repeats: int
    repeats_log_sd: float
    fitted: float
    held_out: float | None  # None: there is one configuration only


@dataclass(frozen=True, kw_only=True)
class ServerCalibration:
    """Constants of one server."""

    made: str
    accelerator: str
    engine: EngineTraits
    constants: ServingCalibration
    rows: tuple[FittedRow, ...]
    unused: Mapping[str, int] = field(default_factory=dict)  # loads by the reason
    origins: tuple[Mapping[str, Any], ...] = ()

    @property
    def errors(self) -> dict[str, dict[str, float]]:
        """Median and 90th percentile of the absolute error by metric: fitted, and of held-out configurations."""
        found = {}
        for metric in dict.fromkeys(row.metric for row in self.rows):
            rows = [row for row in self.rows if row.metric == metric]
            fitted = np.abs([row.fitted / row.measured - 1 for row in rows])
            held = np.abs([row.held_out / row.measured - 1 for row in rows if row.held_out is not None])
            found[metric] = {
                "num_rows": len(rows),
                "fitted_median": float(np.median(fitted)),
                "held_out_median": float(np.median(held)) if len(held) else None,
                "held_out_p90": float(np.quantile(held, 0.9)) if len(held) else None,
            }
        return found


def fit_server(found: MeasuredServer, *, made: str) -> ServerCalibration:
    """Fit the constants of one server. Raises InputError without points."""
    if not found.points:
        raise InputError("there is nothing to calibrate from", hint="records of `meshwright bench serve`")
    accelerator = _only({p.point.groups["accelerator"] for p in found.points})
    engine = replace(found.engine, server=f"{found.engine.name} on {accelerator}")
    points = [replace(p, point=of_server(p.point, engine.server)) for p in found.points]
    constants = _fit(points)
    held_out = _held_out(points)
    if len({p.point.source for p in points}) >= FEWEST_CONFIGURATIONS:
        constants = with_spread(constants, held_out)
    else:
        constants = spread_as(constants, shipped_constants())
    return ServerCalibration(
        made=made, accelerator=accelerator, engine=engine, constants=constants, unused=found.unused,
        rows=tuple(_rows(points, constants, held_out)), origins=found.origins,
    )  # fmt: skip


def _only(names: set[str]) -> str:
    if len(names) != 1:
        raise InputError("records must be of one kind of device", got=", ".join(sorted(names)))
    return names.pop()


def of_server(point: PublishedPoint, server: str) -> PublishedPoint:
    """The point with the constants of a calibrated server."""
    conditions = point.conditions
    assert conditions is not None
    own = replace(conditions.engine, server=server)
    return replace(point, conditions=replace(conditions, engine=own))


def _conditions(points: Sequence[MeasuredPoint]) -> list[PointConditions]:
    return [c for p in points if (c := p.point.conditions) is not None]


def _fit(points: Sequence[MeasuredPoint]) -> ServingCalibration:
    """Maximum a posteriori of the server's constants, with soft tails as in `inference.fit`."""
    from scipy.optimize import least_squares  # takes 0.3 s, which only a fit needs

    conditions = _conditions(points)
    columns, log_values = log_predictor(conditions)
    base, _ = shipped_constants().prior_and_values(columns)
    own = np.array([u.factor == SERVER for u in columns])
    sd = np.array([u.sd for u in columns])[own]
    measured = np.log([c.measured for c in conditions])
    row_sd = np.array([np.hypot(MODEL_SD, p.log_sd / np.sqrt(p.num_repeats)) for p in points])

    def whole(x: FloatArray) -> FloatArray:
        values = base.copy()
        values[own] = x
        return values

    def residuals(x: FloatArray) -> FloatArray:
        error = (log_values(whole(x)) - measured) / row_sd
        soft = np.sign(error) * np.sqrt(2 * (np.sqrt(1 + error**2) - 1))
        return np.concatenate([soft, x / sd])

    solved = least_squares(residuals, np.zeros(own.sum()), method="trf", x_scale=sd)
    covariance = np.zeros((len(columns), len(columns)))
    covariance[np.ix_(own, own)] = np.linalg.inv(solved.jac.T @ solved.jac)
    return _extended(columns, whole(solved.x), covariance, num_rows=len(points), points=points)


def _extended(
    columns: Sequence[Unknown], values: FloatArray, covariance: FloatArray, *, num_rows: int,
    points: Sequence[MeasuredPoint],
) -> ServingCalibration:  # fmt: skip
    sources = dict(Counter(p.point.source for p in points))
    return ServingCalibration(
        keys=tuple(u.key for u in columns), values=values, covariance=covariance, row_sd=MODEL_SD, source_sd=0.0,
        interval_scale=1.0, num_rows=num_rows, sources=sources,
    )  # fmt: skip


def _held_out(points: Sequence[MeasuredPoint]) -> list[HeldOut]:
    """Each configuration predicted by constants fitted to the others, in the order of the points; [] for one alone."""
    names = list(dict.fromkeys(p.point.source for p in points))
    if len(names) < 2:
        return []
    found: dict[str, HeldOut] = {}
    for name in names:
        part = [p for p in points if p.point.source == name]
        fitted = _fit([p for p in points if p.point.source != name])
        columns, log_values = log_predictor(_conditions(part))
        x, covariance = fitted.prior_and_values(columns)
        jacobian = derivatives(log_values, x)
        variance = np.einsum("ij,jk,ik->i", jacobian, covariance, jacobian)
        errors = log_values(x) - np.log([c.measured for c in _conditions(part)])
        for p, error, v in zip(part, errors, variance, strict=True):
            found[p.point.id] = HeldOut(point=p.point, log_error=float(error), log_sd=float(np.sqrt(v)))
    return [found[p.point.id] for p in points]


def _rows(
    points: Sequence[MeasuredPoint], constants: ServingCalibration, held_out: Sequence[HeldOut]
) -> list[FittedRow]:
    columns, log_values = log_predictor(_conditions(points))
    fitted = np.exp(log_values(constants.prior_and_values(columns)[0]))
    errors = [np.exp(h.log_error) for h in held_out] or [None] * len(points)
    return [
        FittedRow(
            configuration=p.point.source, in_flight=float(c.load.concurrency or c.limit.sequences),
            metric=p.point.metric, unit=p.point.unit, measured=c.measured, repeats=p.num_repeats,
            repeats_log_sd=p.log_sd, fitted=float(f), held_out=None if e is None else float(e * c.measured),
        )
        for p, c, f, e in zip(points, _conditions(points), fitted, errors, strict=True)
    ]  # fmt: skip


# --- the file ---


def to_document(found: ServerCalibration) -> dict[str, Any]:
    """JSON document of a calibration: constants with the rows and records that they came from."""
    constants = found.constants
    base = {k: float(v) for k, v in zip(constants.keys, constants.values, strict=True) if not _is_own(k)}
    own = [i for i, key in enumerate(constants.keys) if _is_own(key)]
    part = replace(
        constants, keys=tuple(constants.keys[i] for i in own), values=constants.values[own],
        covariance=constants.covariance[np.ix_(own, own)],
    )  # fmt: skip
    document = document_of(part, [])
    return {
        "schema": SCHEMA, "made": found.made, "accelerator": found.accelerator, "engine": asdict(found.engine),
        "errors": found.errors, "unused_loads": dict(found.unused),
        **{k: document[k] for k in OF_CONSTANTS},
        "published": base, "configurations": dict(constants.sources), "records": list(found.origins),
        "rows": [asdict(row) for row in found.rows],
    }  # fmt: skip


OF_CONSTANTS = ("num_rows", "row_sd", "source_sd", "interval_scale", "group_scales", "unknowns", "correlation")


def _is_own(key: str) -> bool:
    return f"/{SERVER}=" in key


def read_server_calibration(path: Path) -> ServerCalibration:
    """Read the file of `meshwright inference calibrate`. Raises InputError for another or a damaged file."""
    try:
        document = load_json(path)
        return _from_document(files.document_of(document, schema=SCHEMA, refusal=f"{path}: not a serving calibration"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise InputError(
            f"{path}: not a serving calibration ({type(error).__name__}: {error})",
            hint="`meshwright inference calibrate` makes it",
        ) from None


def _from_document(document: Mapping[str, Any]) -> ServerCalibration:
    """The constants of the file; levels that it has not seen, as of another number format, are those shipped."""
    own = calibration_from({**document, "sources": document["configurations"]})
    seen = document["published"]
    shipped = shipped_constants()
    other = [i for i, key in enumerate(shipped.keys) if key not in seen]
    keys = (*own.keys, *seen, *(shipped.keys[i] for i in other))
    covariance = np.zeros((len(keys), len(keys)))
    covariance[: len(own.keys), : len(own.keys)] = own.covariance
    covariance[len(keys) - len(other) :, len(keys) - len(other) :] = shipped.covariance[np.ix_(other, other)]
    values = np.concatenate([own.values, list(seen.values()), shipped.values[other]])
    constants = replace(own, keys=keys, values=values, covariance=covariance)
    if not (np.isfinite(values).all() and np.isfinite(covariance).all()):
        raise ValueError("a constant is no finite number")
    return ServerCalibration(
        made=str(document["made"]), accelerator=str(document["accelerator"]),
        engine=EngineTraits(**document["engine"]), constants=constants,
        rows=tuple(FittedRow(**row) for row in document["rows"]), unused=dict(document["unused_loads"]),
        origins=tuple(document["records"]),
    )  # fmt: skip
