"""`meshwright.mlperf_run`: timed runs of a benchmark. `plan_benchmark` checks them, `rate_of_shape` measures shapes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from meshwright.api import arguments
from meshwright.api import question as api
from meshwright.api.question import answered_by_body, question, question_of
from meshwright.api.runs import OVERRIDES, Overrides

if TYPE_CHECKING:
    from meshwright.mlperf.running import BenchmarkRuns, PreparedSet

SAY_EVERY_S = 10.0
Say = Callable[[str], None]


@question("meshwright.api.run_benchmark:benchmark_runs")
def mlperf_run(
    name: Annotated[
        str,
        api.PlainText(
            "A benchmark, such as `proxy_pretrain_xs`, or the path of a run file named like one.",
            metavar="BENCHMARK_OR_RUN.yaml",
        ),
    ],
    *,
    out: Annotated[
        str | os.PathLike[str] | None,
        api.AnyPath(
            "Folder of the set: result_0.txt, result_1.txt, ... and their records.", unset="runs/NAME", is_file=False
        ),
    ] = None,
    num_runs: Annotated[
        int | None, api.Count("Number of runs.", unset="the number that a score takes", flag="--runs", high=1000)
    ] = None,
    round_name: Annotated[
        str | None, api.PlainText("Round whose rules apply.", unset="the newest", flag="--round", metavar="ROUND")
    ] = None,
    division: Annotated[
        str, api.OneOf("closed: settings that the rules fix are refused if they differ.", values=("closed", "open"))
    ] = "closed",
    overrides: Annotated[Overrides, OVERRIDES] = (),
    data: Annotated[
        str | os.PathLike[str] | None, api.AnyPath("Folder of the data set ($MESHWRIGHT_MLPERF_DATA).", metavar="DIR")
    ] = None,
    weights: Annotated[
        str | os.PathLike[str] | None,
        api.AnyPath("Folder of the weights to start from ($MESHWRIGHT_MLPERF_WEIGHTS).", metavar="DIR"),
    ] = None,
    org: Annotated[str, api.PlainText("Organization, for the logs.", metavar="NAME")] = "unnamed",
    platform: Annotated[
        str | None, api.PlainText("Name of the system, for the logs.", unset="cores and architecture", metavar="NAME")
    ] = None,
    system: Annotated[
        str | os.PathLike[str] | None,
        api.AnyPath(
            "JSON file whose fields replace gathered fields in the description of the system.",
            is_folder=False,
            exists=True,
        ),
    ] = None,
    seeds: Annotated[
        Sequence[int], api.Count("Seeds, to repeat runs.", unset="from the system", low=0, is_joined=True)
    ] = (),
    warm_up_steps: Annotated[
        int | None,
        api.Count(
            "Steps on random tokens before the clock starts; they are undone.",
            unset="the benchmark's",
            flag="--warm-up",
            low=0,
            high=1000,
        ),
    ] = None,
    num_concurrent: Annotated[
        int | None,
        api.Count("Runs side by side.", unset="1; for a proxy the number of cores", flag="--concurrent", high=1024),
    ] = None,
    launcher: Annotated[
        Sequence[str],
        api.ShellCommand(
            "Command that starts the processes of a run, on several hosts too, as in 'torchrun --no-python ...'. It "
            "sets the variables that torchrun sets.",
            metavar="COMMAND",
        ),
    ] = (),
    say: Annotated[Say | None, api.Hook("Receives lines of progress.")] = None,
) -> BenchmarkRuns:
    """Take the timed runs of a benchmark, or those that are missing of a set that was interrupted. Imports PyTorch.

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
    return answered_by_body()


def benchmark_runs(*, say: Say | None, **asked: Any) -> BenchmarkRuns:
    """The answer to `mlperf_run`."""
    from meshwright.mlperf.running import SetProgress, take_runs

    prepared = _prepared(**asked)
    progress = SetProgress(
        prepared.benchmark,
        prepared.held,
        global_batch=prepared.run.global_batch,
        say=say or (lambda line: None),
        every_s=SAY_EVERY_S,
    )
    return take_runs(prepared, report=progress.report)


def plan_benchmark(**asked: Any) -> dict[str, Any]:
    """Check the runs of a benchmark; return what would run. Writes into a folder that is removed again.

    `asked` are arguments of `mlperf_run`.
    """
    from tempfile import TemporaryDirectory

    from meshwright.mlperf.running import as_mapping

    found = question_of(mlperf_run)
    with TemporaryDirectory() as scratch:
        given = found.defaults | asked | {"out": Path(scratch) / "set"}
        del given["say"]
        return dict(as_mapping(_prepared(**found.checked(given))))


def rate_of_shape(
    name: str, *, round_name: str | None = None, overrides: Overrides = (), num_steps: int = 20, dry_run: bool = False
) -> dict[str, Any]:
    """Train the shapes of a benchmark on random tokens for `num_steps`; the rate and MFU. Not a result.

    Raises InfeasibleError where the memory of this machine's devices does not suffice, with the arithmetic.
    """
    from meshwright.mlperf.running import named_benchmark
    from meshwright.mlperf.shape import measure_shape

    benchmark, of_file = named_benchmark(name, round_name=round_name)
    changes = (*of_file, *arguments.overrides(overrides))
    return measure_shape(benchmark, overrides=changes, num_steps=num_steps, dry_run=dry_run, started_s=time.time())


def _prepared(
    *, name: str, out: Path | None, round_name: str | None, overrides: Sequence[str], **choices: Any
) -> PreparedSet:
    """The runs that the arguments of `mlperf_run` ask for."""
    from meshwright.mlperf.running import RunChoices, named_benchmark, prepare_set

    benchmark, of_file = named_benchmark(name, round_name=round_name)
    folder = out or Path("runs") / benchmark.name
    return prepare_set(benchmark, folder=folder, overrides=(*of_file, *overrides), choices=RunChoices(**choices))
