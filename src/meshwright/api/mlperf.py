"""`meshwright.mlperf_check` and its siblings: result files checked, scored, compared and packaged."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.api import arguments
from meshwright.errors import InputError

if TYPE_CHECKING:
    from meshwright.mlperf.compare import ResultComparison
    from meshwright.mlperf.package import SubmissionPackage
    from meshwright.mlperf.results import BenchmarkCheck, BenchmarkScores, ReferencePoints

PathLike = str | os.PathLike[str]


def mlperf_check(
    *paths: PathLike,
    round_name: str | None = None,
    benchmark: str | None = None,
    benchmarks: Sequence[PathLike] = (),
    unfinished: bool = False,
    official: bool = True,
) -> BenchmarkCheck:
    """Check result files, and sets of them, by the rules of a benchmark. Imports no tensor framework.

    Args:
        paths: result files, or folders of sets of result_*.txt, at any depth.
        round_name: round whose rules apply; from the folder's name or the date of the runs without one.
        benchmark: name of the benchmark; that of the logs without one.
        benchmarks: folders of further benchmark files.
        unfinished: the logs may still be written.
        official: ask the official compliance checker too.

    Returns:
        The findings of each set, with file, line, rule, reason and remedy, and the official verdict.

    Raises:
        InputError: there is nothing to check, or a name is unknown.

    Example:
        >>> import meshwright as mw
        >>> mw.mlperf_check("runs/p1").passes  # doctest: +SKIP
        True
    """
    from meshwright.mlperf.results import check_sets

    return check_sets(
        _paths("paths", paths, least=1), round=_text("round_name", round_name), benchmark=_text("benchmark", benchmark),
        folders=_paths("benchmarks", benchmarks), unfinished=arguments.flag("unfinished", unfinished),
        official=arguments.flag("official", official),
    )  # fmt: skip


def mlperf_score(
    *paths: PathLike,
    round_name: str | None = None,
    benchmark: str | None = None,
    benchmarks: Sequence[PathLike] = (),
    num_runs: int | None = None,
) -> BenchmarkScores:
    """Score sets of runs: olympic mean, reference-convergence test, normalized minutes. Imports no tensor framework.

    Args:
        paths: folders of sets of result_*.txt, at any depth.
        round_name: round whose rules apply; from the folder's name or the date of the runs without one.
        benchmark: name of the benchmark; that of the logs without one.
        benchmarks: folders of further benchmark files.
        num_runs: score the first runs only, and estimate how likely a whole set passes.

    Returns:
        One score for each set. They are unverified: only MLCommons verifies results.

    Raises:
        InputError: there is nothing to score, or a name is unknown.

    Example:
        >>> import meshwright as mw
        >>> mw.mlperf_score("runs/p1").scores[0].score_min  # doctest: +SKIP
        0.292
    """
    from meshwright.mlperf.results import score_sets

    return score_sets(
        _paths("paths", paths, least=1), round=_text("round_name", round_name), benchmark=_text("benchmark", benchmark),
        folders=_paths("benchmarks", benchmarks),
        num_runs=None if num_runs is None else arguments.count("num_runs", num_runs),
    )  # fmt: skip


def mlperf_rcp(
    *paths: PathLike,
    creator: str,
    platform: str,
    when: str = "",
    precision: str = "BF16",
    round_name: str | None = None,
    benchmark: str | None = None,
    benchmarks: Sequence[PathLike] = (),
    out: PathLike | None = None,
    replace: bool = False,
) -> ReferencePoints:
    """Make reference convergence points of 2 N runs at each batch size. Imports no tensor framework.

    Args:
        paths: folders of result_*.txt, one for each global batch size.
        creator: who made the runs.
        platform: system of the runs.
        when: date or round of the runs.
        precision: BF16 or FP32 by the rules.
        round_name: round whose rules apply; from the folder's name or the date of the runs without one.
        benchmark: name of the benchmark; that of the logs without one.
        benchmarks: folders of further benchmark files.
        out: add the points to this file.
        replace: replace points of the same batch size in `out`.

    Returns:
        The points, in the official schema and with their statistics.

    Raises:
        InputError: runs are missing or differ, or `out` holds other values.

    Example:
        >>> import meshwright as mw
        >>> mw.mlperf_rcp("runs/batch16", creator="Org", platform="1xH200").points  # doctest: +SKIP
    """
    from meshwright.mlperf.reference_runs import ReferenceDescription
    from meshwright.mlperf.results import make_reference_points

    description = ReferenceDescription(
        creator=_given("creator", creator), platform=_given("platform", platform), when=_given("when", when),
        precision=_given("precision", precision),
    )  # fmt: skip
    return make_reference_points(
        _paths("paths", paths, least=1), description=description, round=_text("round_name", round_name),
        benchmark=_text("benchmark", benchmark), folders=_paths("benchmarks", benchmarks),
        out=None if out is None else arguments.path("out", out), replace=arguments.flag("replace", replace),
    )  # fmt: skip


def mlperf_compare(
    *paths: PathLike,
    rounds: Sequence[str] = (),
    names: Sequence[str] = (),
    accelerators: Sequence[str] = (),
    devices: int | None = None,
    published: bool = True,
    baseline: str | None = None,
    benchmarks: Sequence[PathLike] = (),
) -> ResultComparison:
    """Compare results: makers and partners by accelerator, spread, generation over generation.

    Args:
        paths: folders of sets of result_*.txt, at any depth; none: published results alone.
        rounds: published results of these rounds.
        names: results of these benchmarks.
        accelerators: published results on these accelerators, as in MI355X.
        devices: published results on as many accelerators.
        published: take published results too.
        baseline: accelerator of the ratios; the slowest of each group without one.
        benchmarks: folders of further benchmark files.

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
    from meshwright.mlperf.compare import compare_sets

    return compare_sets(
        _paths("paths", paths), rounds=_texts("rounds", rounds), benchmarks=_texts("names", names),
        accelerators=_texts("accelerators", accelerators),
        devices=None if devices is None else arguments.count("devices", devices),
        published=arguments.flag("published", published), baseline=_text("baseline", baseline),
        folders=_paths("benchmarks", benchmarks),
    )  # fmt: skip


def mlperf_package(
    *paths: PathLike,
    org: str,
    system: PathLike,
    code: PathLike,
    out: PathLike,
    round_name: str | None = None,
    benchmarks: Sequence[PathLike] = (),
) -> SubmissionPackage:
    """Build a submission folder and run the official package checker on a copy. Imports no tensor framework.

    Args:
        paths: folders of result_*.txt, one for each benchmark.
        org: submitter; the folder's name.
        system: system description (JSON); its name is the system's.
        code: folder of code, instructions and configurations of the runs.
        out: folder that the submission stands in.
        round_name: round whose rules apply; from the folder's name or the date of the runs without one.
        benchmarks: folders of further benchmark files.

    Returns:
        Files, scores, and what the official checkers say.

    Raises:
        InputError: no reviewer would accept the inputs; the message has all reasons.

    Example:
        >>> import meshwright as mw
        >>> mw.mlperf_package("runs/p1", org="Org", system="h200x8.json", code="src", out="sub")  # doctest: +SKIP
    """
    from meshwright.mlperf.package import write_package

    return write_package(
        _paths("paths", paths, least=1), out=arguments.path("out", out), org=_given("org", org),
        system=arguments.path("system", system), code=arguments.path("code", code),
        round=_text("round_name", round_name), folders=_paths("benchmarks", benchmarks),
    )  # fmt: skip


def _paths(name: str, given: object, *, least: int = 0) -> tuple[Path, ...]:
    found = tuple(arguments.path(name, item) for item in arguments.items(name, given, example='["runs/p1"]'))
    if len(found) < least:
        raise InputError(f"{name} are missing", allowed="one path or more")
    return found


def _texts(name: str, given: object) -> tuple[str, ...]:
    return tuple(_given(name, item) for item in arguments.items(name, given, example='["5.1"]'))


def _text(name: str, given: object) -> str | None:
    return None if given is None else _given(name, given)


def _given(name: str, given: object) -> str:
    if not isinstance(given, str):
        raise InputError(name, got=given, allowed="text")
    return given
