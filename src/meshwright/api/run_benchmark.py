"""`meshwright.mlperf_run`: timed runs of a benchmark. `plan_benchmark` checks them, `rate_of_shape` measures shapes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.api import arguments
from meshwright.api.runs import Overrides

if TYPE_CHECKING:
    from meshwright.mlperf.running import BenchmarkRuns, PreparedSet

SAY_EVERY_S = 10.0
Say = Callable[[str], None]


def mlperf_run(
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
    launcher: Sequence[str] = (),
    say: Say | None = None,
) -> BenchmarkRuns:
    """Take the timed runs of a benchmark, or those that are missing of a set that was interrupted. Imports PyTorch.

    Args:
        name: a benchmark, such as "proxy_pretrain_xs", or the path of a run file whose `name` is that of one.
        out: folder of the set, by default runs/NAME.
        num_runs: as many as a score takes without a number.
        round_name: round whose rules apply, the newest without one.
        division: "closed" refuses settings that the rules fix, "open" takes them.
        overrides: keys of the run file that a submitter chooses.
        data: folder of the data set; proxies bring theirs.
        weights: folder of the weights to start from.
        org: organization, for the logs.
        platform: name of the system, for the logs.
        system: JSON file whose fields replace those of the gathered description of the system.
        seeds: one for each run; drawn from the system without them.
        warm_up_steps: steps on random tokens before the clock starts; the benchmark's without a number.
        num_concurrent: runs side by side; 1 without a number, of a proxy as many as there are cores.
        launcher: command that starts the processes of a run, on several hosts, as in ["srun", "--nodes=2", ...]; it
            sets the variables that torchrun sets.
        say: receives lines of progress.

    Returns:
        The runs with status, samples, loss and minutes, and the folder of their logs.

    Raises:
        InputError: a setting that the closed division does not allow, another set in `out`, or a wrong value.
        MissingDependencyError: data, weights or a package is absent; the message says where to get it.
        RunFailedError: a run ended with an error.

    Example:
        >>> import meshwright as mw
        >>> mw.mlperf_run("proxy_pretrain_xs", out="runs/p1").num_converged  # doctest: +SKIP
        10
    """
    asked = locals()

    from meshwright.mlperf.progress import SetProgress
    from meshwright.mlperf.running import take_runs

    prepared = _prepared(asked)
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

    `choices` are arguments of `mlperf_run`.
    """
    from tempfile import TemporaryDirectory

    from meshwright.mlperf.running import as_mapping

    with TemporaryDirectory() as scratch:
        asked = signature(mlperf_run).bind(name, **{**choices, "out": Path(scratch) / "set"})
        asked.apply_defaults()
        return dict(as_mapping(_prepared(asked.arguments)))


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


def _prepared(asked: Mapping[str, Any]) -> PreparedSet:
    """The runs that the arguments of `mlperf_run` ask for, checked."""
    from meshwright.mlperf.running import RunChoices, named_benchmark, prepare_set

    benchmark, of_file = named_benchmark(asked["name"], round_name=asked["round_name"])

    def count(name: str, *, least: int = 1, most: int) -> int | None:
        return None if asked[name] is None else arguments.count(name, asked[name], least=least, most=most)

    def path(name: str) -> Path | None:
        return None if asked[name] is None else arguments.path(name, asked[name])

    launcher = arguments.items("launcher", asked["launcher"], example='["srun", "--nodes=2"]')
    choices = RunChoices(
        num_runs=count("num_runs", most=1000),
        seeds=tuple(arguments.count("seeds", n, least=0) for n in arguments.items("seeds", asked["seeds"])),
        division=arguments.choice("division", asked["division"], ["closed", "open"]),
        org=asked["org"],
        platform=asked["platform"],
        data=path("data"),
        weights=path("weights"),
        system=path("system"),
        warm_up_steps=count("warm_up_steps", least=0, most=1000),
        num_concurrent=count("num_concurrent", most=1024),
        launcher=tuple(str(part) for part in launcher),
    )
    folder = path("out") or Path("runs") / benchmark.name
    changes = (*of_file, *arguments.overrides(asked["overrides"]))
    return prepare_set(benchmark, folder=folder, overrides=changes, choices=choices)
