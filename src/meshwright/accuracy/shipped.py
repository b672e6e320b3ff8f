"""Files of published runs in the package, and the tables for reading them."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

_RUNS = files("meshwright.catalog") / "data" / "runs"


def measured_runs_path() -> Path:
    """The shipped CSV of published measured runs."""
    return Path(str(_RUNS / "measured_runs.csv"))


@cache
def measured_model_names() -> frozenset[str]:
    """Names of models as the rows of the shipped measured runs state them."""
    with measured_runs_path().open(encoding="utf-8", newline="") as lines:
        return frozenset(row[column] for row in csv.DictReader(lines) for column in ("model_canonical", "model"))


@dataclass(frozen=True, kw_only=True)
class ShippedLayout:
    """Degrees of a measured run by field of `specs.plan.Plan`, and whose run it was."""

    id: str
    framework: str
    num_devices: int
    degrees: dict[str, object]


def shipped_layouts() -> dict[str, dict[str, str]]:
    """Measured runs of mixtures with layouts that a vendor ships, by model and accelerator (`layouts.toml`)."""
    return _load("layouts.toml")


@cache
def shipped_layout(model: str, accelerator: str) -> ShippedLayout | None:
    """Return the layout that a vendor ships for a model of the catalogue on an accelerator; None: it has none."""
    id = shipped_layouts().get(model, {}).get(accelerator)
    if id is None:
        return None
    with measured_runs_path().open(encoding="utf-8", newline="") as lines:
        header = next(lines)
        line = next(line for line in lines if line.startswith(f"{id},"))
    row = next(csv.DictReader([header, line]))
    columns = {"tensor": "tp", "pipeline": "pp", "context": "cp", "expert": "ep"}
    return ShippedLayout(
        id=id,
        framework=f"{row['framework']} {row['framework_version']}",
        num_devices=int(row["num_gpus"]),
        degrees={name: int(row[column]) for name, column in columns.items()},
    )


def failed_configs_path() -> Path:
    """The shipped CSV of configurations that did not run."""
    return Path(str(_RUNS / "failed_configs.csv"))


@dataclass(frozen=True, kw_only=True)
class BlindPrediction:
    """Prediction of the row `id` by `commit` of Meshwright, before anyone had read its source.

    predicted: tokens/s per device, with the ends of its 80 % interval, `low` and `high`.
    """

    id: str
    source_key: str
    commit: str
    predicted: float
    low: float
    high: float
    fits: bool  # the memory of the device is enough


@cache
def blind_predictions() -> dict[str, BlindPrediction]:
    """Predictions by row of the sources that came after the code (`fitting.blind` makes them)."""
    with blind_predictions_path().open(encoding="utf-8", newline="") as lines:
        return {row["id"]: _blind_prediction(row) for row in csv.DictReader(lines)}


def blind_predictions_path() -> Path:
    """The shipped CSV of them."""
    return Path(str(_RUNS / "blind_predictions.csv"))


@cache
def blind_sources() -> frozenset[str]:
    """Sources whose rows were predicted before they were read."""
    return frozenset(prediction.source_key for prediction in blind_predictions().values())


def _blind_prediction(row: dict[str, str]) -> BlindPrediction:
    predicted, low, high = (float(row[name]) for name in ("predicted", "low", "high"))
    return BlindPrediction(
        id=row["id"], source_key=row["source_key"], commit=row["commit"],
        predicted=predicted, low=low, high=high, fits=row["fits"] == "True",
    )  # fmt: skip


@cache
def shipped_columns() -> frozenset[str]:
    """Columns of the shipped files, and those that only tables of others have."""
    found = {"gemm_tflops", "schedule", "fsdp", "dp_shard", "dp_replicate"}
    for path in (measured_runs_path(), failed_configs_path()):
        with path.open(encoding="utf-8", newline="") as lines:
            found |= set(next(csv.reader(lines)))
    return frozenset(found)


@cache
def published_models() -> dict[str, Any]:
    """Names, families, unsupported architectures and models outside the catalogue (`models.toml`)."""
    return _load("models.toml")


@cache
def frameworks() -> dict[str, Any]:
    """Framework names with their defaults, MLPerf rounds and sweeps (`frameworks.toml`)."""
    return _load("frameworks.toml")


@cache
def published_recipes() -> dict[str, Any]:
    """Switches of published performance recipes (`recipes.toml`)."""
    return _load("recipes.toml")


@cache
def wordings() -> dict[str, Any]:
    """Vocabulary of free notes (`wordings.toml`)."""
    return _load("wordings.toml")


@cache
def column_names() -> dict[str, Any]:
    """Names of columns in other tables, with their units (`columns.toml`)."""
    return _load("columns.toml")


@cache
def published_systems() -> tuple[dict[str, Any], ...]:
    """Kernel rates that sources measured on their systems (`systems.toml`)."""
    return tuple(_load("systems.toml")["system"])


def _load(name: str) -> dict[str, Any]:
    import tomllib

    return tomllib.loads((_RUNS / name).read_text(encoding="utf-8"))
