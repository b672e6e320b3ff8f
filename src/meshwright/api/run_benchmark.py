"""Runs of a benchmark from Python: `benchmark_runs` takes them, `plan_benchmark` checks, `rate_of_shape` measures."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.api import arguments
from meshwright.api.runs import Overrides

if TYPE_CHECKING:
    from meshwright.mlperf.running import BenchmarkRuns, PreparedSet

SAY_EVERY_S = 10.0
Say = Callable[[str], None]


def benchmark_runs(name: str, *, say: Say | None = None, **choices: Any) -> BenchmarkRuns:
    """Take the runs of a benchmark, or those that are missing of a set that was interrupted.

    Args:
        name: a benchmark, such as "proxy_pretrain_xs", or the path of a run file whose `name` is that of one.
        say: receives lines of progress.
        choices: as of `plan_benchmark`.

    Raises:
        InputError: a setting that the closed division does not allow, another set in `out`, or a wrong value.
        MissingDependencyError: data, weights or a package is absent; the message says where to get it.
        RunFailedError: a run ended with an error.

    Example:
        >>> from meshwright.api.run_benchmark import benchmark_runs
        >>> done = benchmark_runs("proxy_pretrain_xs", out="runs/p1")  # doctest: +SKIP
        >>> done.num_converged  # doctest: +SKIP
        10
    """
    from meshwright.mlperf.progress import SetProgress
    from meshwright.mlperf.running import take_runs

    prepared = _prepared(name, **choices)
    progress = SetProgress(
        prepared.benchmark,
        prepared.held,
        global_batch=prepared.run.global_batch,
        say=say or (lambda line: None),
        every_s=SAY_EVERY_S,
    )
    return take_runs(prepared, report=progress.report)


def plan_benchmark(name: str, **choices: Any) -> dict[str, Any]:
    """Check the runs of a benchmark; return what would run. Writes into a folder that is removed again.

    Keyword arguments: `out` (folder of the set), `num_runs`, `round_name`, `division`, `overrides` (keys of the run
    file), `data`, `weights`, `org`, `platform`, `system` (JSON file), `seeds`, `warm_up_steps`, `num_concurrent`.
    """
    from tempfile import TemporaryDirectory

    from meshwright.mlperf.running import as_mapping

    with TemporaryDirectory() as scratch:
        return dict(as_mapping(_prepared(name, **{**choices, "out": Path(scratch) / "set"})))


def rate_of_shape(
    name: str,
    *,
    round_name: str | None = None,
    overrides: Overrides = (),
    num_steps: int = 20,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Train the shapes of a benchmark on random tokens for `num_steps`; the rate and MFU. Not a result.

    Raises InfeasibleError where the memory of this machine's devices does not suffice, with the arithmetic.
    """
    from meshwright.mlperf.running import named_benchmark
    from meshwright.mlperf.shape import measure_shape

    benchmark, of_file = named_benchmark(name, round_name=round_name)
    changes = (*of_file, *arguments.overrides(overrides))
    return measure_shape(
        benchmark, overrides=changes, num_steps=num_steps, dry_run=dry_run, started_s=time.time()
    )


def _prepared(
    name: str,
    *,
    out: str | os.PathLike[str] | None = None,
    num_runs: int | None = None,
    round_name: str | None = None,
    division: str = "closed",
    overrides: Overrides = (),
    data: str | os.PathLike[str] | None = None,
    weights: str | os.PathLike[str] | None = None,
    org: str = "unnamed",
    platform: str | None = None,
    system: str | os.PathLike[str] | None = None,
    seeds: Sequence[int] = (),
    warm_up_steps: int | None = None,
    num_concurrent: int | None = None,
) -> PreparedSet:
    from meshwright.mlperf.running import RunChoices, named_benchmark, prepare_set

    benchmark, of_file = named_benchmark(name, round_name=round_name)
    choices = RunChoices(
        num_runs=num_runs,
        seeds=tuple(seeds),
        division=arguments.choice("division", division, ["closed", "open"]),
        org=org,
        platform=platform,
        data=None if data is None else arguments.path("data", data),
        weights=None if weights is None else arguments.path("weights", weights),
        system=None if system is None else arguments.path("system", system),
        warm_up_steps=warm_up_steps,
        num_concurrent=num_concurrent,
    )
    folder = Path("runs") / benchmark.name if out is None else arguments.path("out", out)
    return prepare_set(
        benchmark, folder=folder, overrides=(*of_file, *arguments.overrides(overrides)), choices=choices
    )
