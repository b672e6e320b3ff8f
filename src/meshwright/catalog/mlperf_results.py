"""Published results of MLPerf Training v5.0 and v5.1 on language models: minutes and samples of every run.

`data/mlperf_results.csv` is made by `scripts/published_mlperf.py` from the results of MLCommons
(https://github.com/mlcommons/training_results_v5.0 and _v5.1, Apache License 2.0). Logs do not say the precision.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from math import inf

from meshwright.catalog.entries import DATA
from meshwright.errors import value_named


@dataclass(frozen=True, kw_only=True)
class MLPerfResult:
    """One published set of runs. `scaling` is the factor of its scaling.json, 1 without that file."""

    round: str
    submitter: str
    system: str
    benchmark: str
    accelerator: str
    num_accelerators: int | None
    num_nodes: int | None
    global_batch_size: int
    scaling: float
    minutes: tuple[float, ...]  # of each run; infinite for a run that did not converge
    samples: tuple[float, ...]

    @property
    def name(self) -> str:
        return f"{self.round}/{self.submitter}/{self.system}/{self.benchmark}"

    @property
    def raw_min(self) -> float:
        """Mean minutes without the fastest and the slowest run."""
        kept = sorted(self.minutes)[1:-1]
        return sum(kept) / len(kept)

    @property
    def score_min(self) -> float:
        return self.raw_min * self.scaling


@cache
def mlperf_results() -> tuple[MLPerfResult, ...]:
    """All published sets that ship."""
    with (DATA / "mlperf_results.csv").open(encoding="utf-8", newline="") as stream:
        return tuple(_result(row) for row in csv.DictReader(stream))


def mlperf_result(name: str) -> MLPerfResult:
    """The set "ROUND/SUBMITTER/SYSTEM/BENCHMARK"; raises UnknownNameError.

    >>> round(mlperf_result("5.1/AMD/MI355X_EPYC_9575F_pytorch/llama2_70b_lora").score_min, 2)
    10.18
    """
    return value_named("published MLPerf result", name, {result.name: result for result in mlperf_results()})


def _result(row: dict[str, str]) -> MLPerfResult:
    counts = {
        key: int(row[key]) if row[key] else None for key in ("num_accelerators", "num_nodes", "global_batch_size")
    }
    of_runs = {
        key: tuple(inf if part == "-" else float(part) for part in row[key].split()) for key in ("minutes", "samples")
    }
    return MLPerfResult(**{**row, **counts, **of_runs, "scaling": float(row["scaling"])})  # pyright: ignore[reportArgumentType]
