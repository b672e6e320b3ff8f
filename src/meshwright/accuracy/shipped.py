"""Files of published runs in the package, and the tables for reading them."""

from __future__ import annotations

import csv
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


def failed_configs_path() -> Path:
    """The shipped CSV of configurations that did not run."""
    return Path(str(_RUNS / "failed_configs.csv"))


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
    """Names, families, unsupported architectures and models outside the catalogue.

    Of `models.toml`, and the shapes of well-known models of `named_models.toml`.
    """
    data = _load("models.toml")
    return data | {"model": data["model"] | _load("named_models.toml")["model"]}


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
def published_systems() -> tuple[dict[str, Any], ...]:
    """Kernel rates that sources measured on their systems (`systems.toml`)."""
    return tuple(_load("systems.toml")["system"])


def _load(name: str) -> dict[str, Any]:
    import tomllib

    return tomllib.loads((_RUNS / name).read_text(encoding="utf-8"))
