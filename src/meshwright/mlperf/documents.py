"""Scores and checks as JSON documents."""

from __future__ import annotations

import json
from typing import Any

from meshwright.mlperf.check import CheckReport
from meshwright.mlperf.convergence import ConvergenceTest
from meshwright.mlperf.formulas import is_number
from meshwright.mlperf.official import OfficialCheck
from meshwright.mlperf.prospects import Prospect, prospect
from meshwright.mlperf.score import Score

UNVERIFIED = "unverified: Result not verified by MLCommons Association"
NOT_MLPERF = "no MLPerf result: a benchmark of one's own"


def score_document(score: Score) -> dict[str, Any]:
    """Return everything that `meshwright mlperf score --json` prints of one set. Times are minutes."""
    rules = score.benchmark
    return {
        "folder": str(score.folder),
        "benchmark": rules.name,
        "round": rules.round,
        "round_from": score.round_from,
        "label": UNVERIFIED if rules.official else NOT_MLPERF,
        "global_batch_size": score.global_batch_size,
        "score_min": score.score_min,
        "raw_min": score.raw_min,
        "rcp_scaling": score.test.scaling,
        "passes": score.passes,
        "problems": list(score.problems),
        "runs_per_score": rules.runs,
        "num_runs": len(score.runs),
        "kept": list(score.kept),
        "dropped": list(score.dropped),
        "runs": [
            {
                "name": run.name,
                "minutes": run.minutes,
                "samples": run.samples,
                "scored": run in score.scored,
                "kept": run.name in score.kept,
                "problem": run.problem,
            }
            for run in score.runs
        ],
        "reference": _test_document(score.test),
        "prospect": _prospect_document(score_prospect(score)),
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
        "findings": [
            {
                "file": f.file, "line": f.line, "rule": f.rule, "severity": f.severity, "message": f.message,
                "why": f.why, "fix": f.fix,
            }
            for f in report.findings
        ],
        "pending": {name: list(keys) for name, keys in report.pending.items()},
        "official": None if verdict is None else _official_document(verdict),
    }  # fmt: skip


def _official_document(verdict: OfficialCheck) -> dict[str, Any]:
    return {
        "package": "mlperf-logging",
        "version": verdict.version,
        "ruleset": verdict.ruleset,
        "passes": verdict.passes,
        "not_run": verdict.not_run or None,
        "files": [{"file": v.file, "passes": v.passes, "messages": list(v.messages)} for v in verdict.verdicts],
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
        document = json.loads((score.folder / "scaling.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    factor = document.get("scaling_factor") if isinstance(document, dict) else None
    return float(factor) if is_number(factor) else None


def _test_document(test: ConvergenceTest) -> dict[str, Any]:
    point = test.point
    return {
        "message": test.message,
        "passes": test.passes,
        "submission_mean": test.submission_mean,
        "min_ok": test.min_ok,
        "mean": point and point.mean,
        "std": point and point.std,
        "global_batch_size": point and point.global_batch_size,
        "interpolated": point and point.interpolated,
        "counts": point and list(point.counts),
    }


def _prospect_document(found: Prospect | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "num_seen": found.num_seen,
        "num_runs": found.num_runs,
        "probability": found.probability,
        "expected_scaling": found.expected_scaling,
        "min_ok": found.min_ok,
        "problem": found.problem,
    }
