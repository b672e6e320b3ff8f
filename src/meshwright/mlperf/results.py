"""Answers about sets of result files: checks, scores, reference points. `meshwright.mlperf_...` returns them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from meshwright.errors import InputError
from meshwright.files import write_atomically
from meshwright.json_values import jsonable, load_json, picked
from meshwright.mlperf.benchmarks import Benchmark
from meshwright.mlperf.check import CheckReport, check_path
from meshwright.mlperf.convergence import COUNT_KEYS, ReferencePoint, points_of, pruned, read_points
from meshwright.mlperf.formulas import is_number
from meshwright.mlperf.log import RunLog, read_log
from meshwright.mlperf.official import OfficialCheck, official_check
from meshwright.mlperf.prospects import Prospect, prospect
from meshwright.mlperf.score import Score, result_files, result_folders, rules_of, score_folder, scored_run
from meshwright.result import Result

Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True)
class SkippedSet:
    """A folder or file that is no set of a known benchmark."""

    where: Path
    reason: str


@dataclass(frozen=True, kw_only=True)
class CheckedSet:
    """Findings of our rules about one set or file, and the verdict of the official compliance checker."""

    report: CheckReport
    official: OfficialCheck | None  # None: it was not asked

    @property
    def passes(self) -> bool:
        """Return True if neither rejects anything."""
        return self.report.passes and (self.official is None or self.official.passes is not False)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BenchmarkCheck(Result):
    """Checks of sets of result files.

    Attributes:
        sets: one entry for each set or file: `report` with `findings`, and `official`.
        skipped: sets without a check, with the reason.
    """

    sets: tuple[CheckedSet, ...]
    skipped: tuple[SkippedSet, ...] = ()

    @property
    def passes(self) -> bool:
        """Return True if no set has an error."""
        return all(checked.passes for checked in self.sets)

    def to_dict(self) -> dict[str, Any]:
        documents = [check_document(each.report, each.official, passes=each.passes) for each in self.sets]
        return _one_or_several(documents, self.skipped, key="where")

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each finding: set, file, line, rule, severity, message, why, fix."""
        return [{"set": str(each.report.where), **f.as_row()} for each in self.sets for f in each.report.findings]

    def summary(self) -> str:
        """Return the numbers of sets, errors and warnings."""
        errors = sum(len(each.report.errors) for each in self.sets)
        warnings = sum(len(each.report.findings) for each in self.sets) - errors
        verdict = "passes" if self.passes else "does not pass"
        return f"{len(self.sets)} checked: {errors} errors, {warnings} warnings; {verdict}"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BenchmarkScores(Result):
    """Scores of sets of result files. Unverified: only MLCommons verifies results.

    Attributes:
        scores: one for each set.
        skipped: sets without a score, with the reason.
    """

    scores: tuple[Score, ...]
    skipped: tuple[SkippedSet, ...] = ()

    @property
    def passes(self) -> bool:
        """Return True if every set is a result."""
        return all(score.passes for score in self.scores)

    def to_dict(self) -> dict[str, Any]:
        return _one_or_several([score_document(score) for score in self.scores], self.skipped, key="folder")

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each set: minutes raw and normalized, factor, verdict."""
        return [
            {
                "folder": str(s.folder), "benchmark": s.benchmark.name, "round": s.benchmark.round,
                "num_runs": len(s.runs), "global_batch_size": s.global_batch_size, "raw_min": s.raw_min,
                "rcp_scaling": s.test.scaling, "score_min": s.score_min, "passes": s.passes,
                "problems": "; ".join(s.problems),
            }
            for s in self.scores
        ]  # fmt: skip

    def summary(self) -> str:
        """Return benchmark, minutes and verdict of each set."""
        parts = [
            f"{s.benchmark.name} {'no score' if s.score_min is None else f'{s.score_min:.3f} min'}"
            f"{'' if s.passes else ', no result'}"
            for s in self.scores[:3]
        ]
        more = f"; {len(self.scores) - 3} more sets" if len(self.scores) > 3 else ""
        return "; ".join(parts) + more + "; unverified"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ReferencePoints(Result):
    """Reference convergence points that were made of runs.

    Attributes:
        benchmark: rules of the benchmark.
        document: the points in the official schema.
    """

    benchmark: Benchmark
    document: dict[str, Any] = field(repr=False)

    @property
    def points(self) -> tuple[ReferencePoint, ...]:
        """The points with their statistics, by batch size."""
        return points_of(self.document, path=Path(self.benchmark.name), runs=self.benchmark.runs)

    def to_dict(self) -> dict[str, Any]:
        """Return the document of `meshwright mlperf rcp --json`, in the official schema."""
        return jsonable(self.document)

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each point; counts are samples. A pruned point is not compared with."""
        kept = pruned(self.points, runs=self.benchmark.runs)
        return [
            {
                "global_batch_size": p.global_batch_size, "num_runs": len(p.counts), "mean": p.mean, "std": p.std,
                "min_ok": p.min_ok, "is_pruned": p not in kept,
            }
            for p in self.points
        ]  # fmt: skip

    def summary(self) -> str:
        """Return the benchmark and the batch sizes."""
        sizes = ", ".join(str(p.global_batch_size) for p in self.points)
        return f"{self.benchmark.name}: samples to convergence at batch sizes {sizes}"


def check_sets(
    paths: Sequence[Path],
    *,
    round_name: str | None = None,
    benchmark: str | None = None,
    benchmarks: Sequence[Path] = (),
    unfinished: bool = False,
    official: bool = True,
) -> BenchmarkCheck:
    """Check result files, and the sets at and below folders. `benchmarks` hold further benchmark files."""
    wanted = [found for path in paths for found in ([path] if path.is_file() else result_folders(path))]
    reports, skipped = _of_sets(
        wanted, check_path, done="checked", round=round_name, benchmark=benchmark, folders=benchmarks,
        unfinished=unfinished,
    )  # fmt: skip
    checked = []
    for report in reports:
        finished = [f for f in report.files if not (unfinished and f.name in report.pending)]
        verdict = official_check(finished, report.benchmark) if official and finished else None
        checked.append(CheckedSet(report=report, official=verdict))
    return BenchmarkCheck(sets=tuple(checked), skipped=skipped)


def _of_sets(
    wanted: Sequence[Path], make: Callable[..., Made], *, done: str, **about: Any
) -> tuple[tuple[Made, ...], tuple[SkippedSet, ...]]:
    """Findings of `make` on each set, and the sets that it cannot read. Raises InputError if these are all."""
    found: list[Made] = []
    skipped: list[SkippedSet] = []
    sets = list(dict.fromkeys(wanted))
    for where in sets:
        try:
            found.append(make(where, **about))
        except InputError as error:
            if len(sets) == 1:
                raise
            skipped.append(SkippedSet(where=where, reason=error.message))
    if not found:
        raise InputError(f"none of {len(sets)} sets could be {done}; the first: {skipped[0].reason}")
    return tuple(found), tuple(skipped)


def score_sets(
    paths: Sequence[Path],
    *,
    round_name: str | None = None,
    benchmark: str | None = None,
    benchmarks: Sequence[Path] = (),
    num_runs: int | None = None,
) -> BenchmarkScores:
    """Score the sets at and below `paths`, or the first `num_runs` of each."""
    wanted = [folder for path in paths for folder in result_folders(path)]
    about = {"round": round_name, "benchmark": benchmark, "folders": benchmarks, "num_runs": num_runs}
    scores, skipped = _of_sets(wanted, score_folder, done="scored", **about)
    return BenchmarkScores(scores=scores, skipped=skipped)


def make_reference_points(
    paths: Sequence[Path],
    *,
    creator: str,
    platform: str,
    when: str = "",
    precision: str = "BF16",
    round_name: str | None = None,
    benchmark: str | None = None,
    benchmarks: Sequence[Path] = (),
    out: Path | None = None,
    replace: bool = False,
) -> ReferencePoints:
    """Make points of folders of runs; with `out` add them to that file and return all of its points."""
    origin = {"Creator": creator, "When": when, "Platform": platform, "Precision": precision}
    document, rules = reference_document(
        paths, origin=origin, round=round_name, benchmark=benchmark, more_benchmarks=benchmarks
    )
    if out is not None:
        document = write_reference_file(out, document, rules, replace=replace)
    return ReferencePoints(benchmark=rules, document=document)


def _one_or_several(documents: list[dict[str, Any]], skipped: Sequence[SkippedSet], *, key: str) -> dict[str, Any]:
    """Return the document of the only set, or the documents of all."""
    if len(documents) == 1 and not skipped:
        return jsonable(documents[0])
    return jsonable({"sets": documents, "skipped": [{key: str(s.where), "reason": s.reason} for s in skipped]})


_NOT_HYPERPARAMETERS = ("global_batch_size", "train_samples", "eval_samples")


def reference_document(
    folders: Sequence[Path],
    *,
    origin: Mapping[str, str],
    round: str | None = None,
    benchmark: str | None = None,
    more_benchmarks: Sequence[Path] = (),
) -> tuple[dict[str, Any], Benchmark]:
    """Return the points of folders of runs, one batch size each. Raises InputError with all problems at once.

    `origin` are keys of the official schema: Creator, When, Platform, Precision.
    """
    document: dict[str, Any] = {}
    problems: list[str] = []
    rules: Benchmark | None = None
    for folder in folders:
        logs = [read_log(path) for path in result_files(folder)]
        if not logs:
            raise InputError("no result_*.txt in this folder", got=str(folder))
        found, _ = rules_of(logs, folder=folder, round=round, benchmark=benchmark, folders=more_benchmarks)
        if rules is not None and found.name != rules.name:
            problems.append(f"{folder} is {found.name}, not {rules.name}")
            continue
        rules = found
        row, wrong = _point(folder, logs, rules, origin)
        problems += wrong
        if row is not None:
            name = f"{rules.name}_ref_{row['BS']}"
            if name in document:
                problems.append(f"{folder} has batch size {row['BS']}, as another folder")
            document[name] = row
    if problems or rules is None:
        raise InputError("runs make no reference points:\n  " + "\n  ".join(problems))
    return document, rules


def write_reference_file(path: Path, document: dict[str, Any], rules: Benchmark, *, replace: bool) -> dict[str, Any]:
    """Add points to the file `path`, atomically, and return all. Other values of a batch size need `replace`."""
    existing: dict[str, Any] = {}
    if path.exists():
        read_points(path, runs=rules.runs)
        existing = load_json(path)
    same = [k for k in document if k in existing and existing[k] != document[k]]
    if same and not replace:
        raise InputError(f"{path} holds other values of {', '.join(same)}", hint="--replace")
    merged = dict(sorted({**existing, **document}.items(), key=lambda item: item[1]["BS"]))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(merged, indent=2) + "\n")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from error
    return merged


def _point(
    folder: Path, logs: Sequence[RunLog], rules: Benchmark, origin: Mapping[str, str]
) -> tuple[dict[str, Any] | None, list[str]]:
    runs = [scored_run(log, rules) for log in logs]
    problems = [f"{folder}/{run.name}: {run.problem}" for run in runs if run.problem]
    batches = {run.global_batch_size for run in runs}
    if len(batches) != 1 or None in batches:
        problems.append(f"{folder}: the runs have no common global batch size")
    if len(runs) < 2 * rules.runs:
        problems.append(f"{folder}: {len(runs)} of the {2 * rules.runs} runs of a point")
    varied = [k for k in rules.hyperparameters if len({repr(log.value(k)) for log in logs}) > 1]
    problems += [f"{folder}: {key} differs between the runs" for key in varied]
    counts = [run.samples for run in runs if run.samples is not None]
    if problems:
        return None, problems
    hyperparameters = {
        key: logs[0].value(key)
        for key, rule in rules.hyperparameters.items()
        if rule.tunable and key not in _NOT_HYPERPARAMETERS and logs[0].last(key) is not None
    }
    row = {
        "Benchmark": rules.name,
        **origin,
        "BS": batches.pop(),
        "Hyperparams": hyperparameters,
        COUNT_KEYS[0 if rules.name == "llama2_70b_lora" else 1]: [int(c) if c == int(c) else c for c in counts],
    }
    return row, []


# --- documents ---


UNVERIFIED = "unverified: Result not verified by MLCommons Association"
NOT_MLPERF = "no MLPerf result: a benchmark of one's own"


def score_document(score: Score) -> dict[str, Any]:
    """Return everything that `meshwright mlperf score --json` prints of one set. Times are minutes."""
    rules = score.benchmark
    point = score.test.point
    return {
        "folder": str(score.folder),
        "benchmark": rules.name,
        "round": rules.round,
        "round_from": score.round_from,
        "label": UNVERIFIED if rules.official else NOT_MLPERF,
        **picked(score, "global_batch_size", "score_min", "raw_min"),
        "rcp_scaling": score.test.scaling,
        "passes": score.passes,
        "problems": list(score.problems),
        "runs_per_score": rules.runs,
        "num_runs": len(score.runs),
        "kept": list(score.kept),
        "dropped": list(score.dropped),
        "runs": [
            picked(run, "name", "minutes", "samples")
            | {"scored": run in score.scored, "kept": run.name in score.kept, "problem": run.problem}
            for run in score.runs
        ],
        "reference": {
            **picked(score.test, "message", "passes", "submission_mean", "min_ok"),
            **{name: point and getattr(point, name) for name in ("mean", "std", "global_batch_size", "interpolated")},
            "counts": point and list(point.counts),
        },
        "prospect": asdict(found) if (found := score_prospect(score)) else None,
        "scaling_json": scaling_file(score),
    }


def check_document(report: CheckReport, verdict: OfficialCheck | None, *, passes: bool) -> dict[str, Any]:
    """Return what `meshwright mlperf check --json` prints of one set or file."""
    return {
        "where": str(report.where),
        "benchmark": report.benchmark.name,
        "round": report.benchmark.round,
        "round_from": report.round_from,
        "passes": passes,
        "num_errors": len(report.errors),
        "num_warnings": len(report.findings) - len(report.errors),
        "files": [path.name for path in report.files],
        "findings": [f.as_row() for f in report.findings],
        "pending": {name: list(keys) for name, keys in report.pending.items()},
        "official": None if verdict is None else _official_document(verdict),
    }


def _official_document(verdict: OfficialCheck) -> dict[str, Any]:
    return {
        "package": "mlperf-logging",
        **picked(verdict, "version", "ruleset", "passes"),
        "not_run": verdict.not_run or None,
        "files": [asdict(v) for v in verdict.verdicts],
    }


def score_prospect(score: Score) -> Prospect | None:
    """Probability that a whole set passes; None where the set is whole."""
    if len(score.runs) >= score.benchmark.runs or score.global_batch_size is None:
        return None
    samples = [run.samples for run in score.runs]
    return prospect(score.benchmark, samples, global_batch_size=score.global_batch_size)


def scaling_file(score: Score) -> float | None:
    """Factor that `scaling.json` of the folder holds; None without the file."""
    try:
        document = load_json(score.folder / "scaling.json")
    except (OSError, ValueError):
        return None
    factor = document.get("scaling_factor") if isinstance(document, dict) else None
    return float(factor) if is_number(factor) else None
