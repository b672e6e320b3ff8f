"""`meshwright.mlperf_check` and its siblings: result files checked, scored, compared and packaged."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from meshwright.api.question import AnyPath, Count, Flag, PlainText, answered_by_body, question

if TYPE_CHECKING:
    from meshwright.mlperf.compare import ResultComparison
    from meshwright.mlperf.package import SubmissionPackage
    from meshwright.mlperf.results import BenchmarkCheck, BenchmarkScores, ReferencePoints

PathLike = str | os.PathLike[str]

SETS = AnyPath("Folders of sets of result_*.txt, at any depth.", least=1, metavar="DIR")
ROUND = PlainText(
    "Round whose rules apply: 5.0, 5.1, 6.0 or 6.1.",
    unset="from the folder's name or the date of the runs",
    flag="--round",
    metavar="ROUND",
)
BENCHMARK = PlainText("Benchmark.", unset="submission_benchmark of the logs", metavar="NAME")
BENCHMARKS = AnyPath("Folder of further benchmark files (*.toml).", is_file=False, exists=True)


@question("meshwright.mlperf.results:check_sets")
def mlperf_check(
    *paths: Annotated[
        PathLike,
        AnyPath("Result files, or folders of sets of result_*.txt, at any depth.", least=1, metavar="DIR_OR_FILE"),
    ],
    round_name: Annotated[str | None, ROUND] = None,
    benchmark: Annotated[str | None, BENCHMARK] = None,
    benchmarks: Annotated[Sequence[PathLike], BENCHMARKS] = (),
    unfinished: Annotated[bool, Flag("Logs may still be written: check them as far as they go.")] = False,
    official: Annotated[
        bool, Flag("Also run the official compliance checker of the round's rule set.", off="--no-official")
    ] = True,
) -> BenchmarkCheck:
    """Check result files, and sets of them, by the rules of a benchmark. Imports no tensor framework.

    Returns:
        The findings of each set, with file, line, rule, reason and remedy, and the official verdict.

    Raises:
        InputError: there is nothing to check, or a name is unknown.

    Example:
        >>> import meshwright as mw
        >>> mw.mlperf_check("runs/p1").passes  # doctest: +SKIP
        True
    """
    return answered_by_body()


@question("meshwright.mlperf.results:score_sets")
def mlperf_score(
    *paths: Annotated[PathLike, SETS],
    round_name: Annotated[str | None, ROUND] = None,
    benchmark: Annotated[str | None, BENCHMARK] = None,
    benchmarks: Annotated[Sequence[PathLike], BENCHMARKS] = (),
    num_runs: Annotated[
        int | None,
        Count("Take the first K runs alone, and estimate how likely a whole set passes.", flag="--runs", metavar="K"),
    ] = None,
) -> BenchmarkScores:
    """Score sets of runs: olympic mean, reference-convergence test, normalized minutes. Imports no tensor framework.

    Returns:
        One score for each set. They are unverified: only MLCommons verifies results.

    Raises:
        InputError: there is nothing to score, or a name is unknown.

    Example:
        >>> import meshwright as mw
        >>> mw.mlperf_score("runs/p1").scores[0].score_min  # doctest: +SKIP
        0.292
    """
    return answered_by_body()


@question("meshwright.mlperf.results:make_reference_points")
def mlperf_rcp(
    *paths: Annotated[
        PathLike, AnyPath("Folders of result_*.txt, one for each global batch size.", least=1, metavar="DIR")
    ],
    creator: Annotated[str, PlainText("Who made the runs.")],
    platform: Annotated[str, PlainText("System of the runs.")],
    when: Annotated[str, PlainText("Date or round of the runs.")] = "",
    precision: Annotated[str, PlainText("BF16 or FP32 by the rules.")] = "BF16",
    round_name: Annotated[str | None, ROUND] = None,
    benchmark: Annotated[str | None, BENCHMARK] = None,
    benchmarks: Annotated[Sequence[PathLike], BENCHMARKS] = (),
    out: Annotated[PathLike | None, AnyPath("Add the points to this file.", is_folder=False)] = None,
    replace: Annotated[bool, Flag("Replace points of the same batch size in that file.")] = False,
) -> ReferencePoints:
    """Make reference convergence points of 2 N runs at each batch size. Imports no tensor framework.

    Returns:
        The points, in the official schema and with their statistics.

    Raises:
        InputError: runs are missing or differ, or `out` holds other values.

    Example:
        >>> import meshwright as mw
        >>> mw.mlperf_rcp("runs/batch16", creator="Org", platform="1xH200").points  # doctest: +SKIP
    """
    return answered_by_body()


@question("meshwright.mlperf.compare:compare_sets")
def mlperf_compare(
    *paths: Annotated[
        PathLike,
        AnyPath("Folders of sets of result_*.txt, at any depth; none: published results alone.", metavar="DIR"),
    ],
    rounds: Annotated[
        Sequence[str], PlainText("Published results of this round.", flag="--round", metavar="ROUND")
    ] = (),
    names: Annotated[Sequence[str], PlainText("This benchmark alone.", flag="--benchmark", metavar="NAME")] = (),
    accelerators: Annotated[
        Sequence[str],
        PlainText("Published results on this accelerator, as in MI355X.", flag="--accelerator", metavar="NAME"),
    ] = (),
    devices: Annotated[int | None, Count("Published results on N accelerators.")] = None,
    published: Annotated[bool, Flag("Take published results too.", off="--no-published")] = True,
    baseline: Annotated[
        str | None, PlainText("Accelerator of the ratios.", unset="the slowest of each group", metavar="NAME")
    ] = None,
    benchmarks: Annotated[Sequence[PathLike], BENCHMARKS] = (),
) -> ResultComparison:
    """Compare results: makers and partners by accelerator, spread, generation over generation.

    Returns:
        Groups, ratios and endnotes. Results that were not published are labelled unverified.

    Raises:
        InputError: a name is unknown, or there is nothing to compare.

    Example:
        >>> import meshwright as mw
        >>> found = mw.mlperf_compare(names=["llama31_8b"], accelerators=["MI355X"], devices=8)
        >>> round(found.groups[0].maker.score_min, 1)
        99.7
    """
    return answered_by_body()


@question("meshwright.mlperf.package:write_package")
def mlperf_package(
    *paths: Annotated[PathLike, AnyPath("Folders of result_*.txt, one for each benchmark.", least=1, metavar="DIR")],
    org: Annotated[str, PlainText("Submitter; the folder's name.", metavar="NAME")],
    system: Annotated[PathLike, AnyPath("System description (JSON); its name is the system's.", is_folder=False)],
    code: Annotated[PathLike, AnyPath("Code, instructions and configurations of the runs.", is_file=False)],
    out: Annotated[PathLike, AnyPath("Folder that the submission stands in.", is_file=False)],
    round_name: Annotated[str | None, ROUND] = None,
    benchmarks: Annotated[Sequence[PathLike], BENCHMARKS] = (),
) -> SubmissionPackage:
    """Build a submission folder and run the official package checker on a copy. Imports no tensor framework.

    Returns:
        Files, scores, and what the official checkers say.

    Raises:
        InputError: no reviewer would accept the inputs; the message has all reasons.

    Example:
        >>> import meshwright as mw
        >>> mw.mlperf_package("runs/p1", org="Org", system="h200x8.json", code="src", out="sub")  # doctest: +SKIP
    """
    return answered_by_body()
