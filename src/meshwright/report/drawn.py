"""The table of functions that draw each answer: its display in a notebook, and the page that it writes, if any.

`meshwright.result.Result` opens this module when an answer is drawn. Answers import nothing that draws them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pkgutil import resolve_name

from meshwright.report.html import write_page
from meshwright.result import Result


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Functions that return HTML of an answer, each as "module:function"."""

    notebook: str
    page: str = ""  # none: the answer writes no page


NOTEBOOK = "meshwright.report.notebook"

DRAWN = {
    "mlperf.compare:ResultComparison": Drawn(notebook=f"{NOTEBOOK}:rows_html"),
    "mlperf.package:SubmissionPackage": Drawn(notebook=f"{NOTEBOOK}:rows_html"),
    "mlperf.results:BenchmarkCheck": Drawn(notebook=f"{NOTEBOOK}:rows_html"),
    "mlperf.results:BenchmarkScores": Drawn(notebook=f"{NOTEBOOK}:rows_html"),
    "mlperf.results:ReferencePoints": Drawn(notebook=f"{NOTEBOOK}:rows_html"),
    "mlperf.running:BenchmarkRuns": Drawn(notebook=f"{NOTEBOOK}:rows_html"),
    "answers.accuracy_study:AccuracyStudy": Drawn(notebook=f"{NOTEBOOK}:accuracy_html"),
    "answers.catalog_listing:CatalogItem": Drawn(notebook=f"{NOTEBOOK}:entry_html"),
    "answers.catalog_listing:CatalogListing": Drawn(notebook=f"{NOTEBOOK}:listing_html"),
    "answers.comparison.study:SideComparison": Drawn(notebook="meshwright.report.comparison.page:comparison_fragment"),
    "answers.evaluation:Evaluation": Drawn(notebook=f"{NOTEBOOK}:evaluation_html"),
    "answers.explanation:Explanation": Drawn(notebook=f"{NOTEBOOK}:explanation_html"),
    "answers.generation:Generation": Drawn(notebook=f"{NOTEBOOK}:generation_html"),
    "answers.ingest_result:IngestBenchmark": Drawn(notebook=f"{NOTEBOOK}:ingest_html"),
    "answers.model_memory:ModelMemory": Drawn(notebook=f"{NOTEBOOK}:rows_html"),
    "answers.overview.collect:RecordReport": Drawn(
        notebook="meshwright.report.overview.page:record_fragment", page="meshwright.report.overview.page:record_page"
    ),
    "answers.plan_ranking:PlanRanking": Drawn(
        notebook=f"{NOTEBOOK}:ranking_html", page="meshwright.report.plan_space.page:ranking_page"
    ),
    "answers.record_files:DeviceMeasurements": Drawn(notebook=f"{NOTEBOOK}:device_html"),
    "answers.record_files:RecordSet": Drawn(notebook=f"{NOTEBOOK}:records_html"),
    "answers.record_files:TrainingSweep": Drawn(notebook=f"{NOTEBOOK}:sweep_html"),
    "answers.run_estimate:RunEstimate": Drawn(notebook=f"{NOTEBOOK}:estimate_html"),
    "answers.run_export:RunExport": Drawn(notebook=f"{NOTEBOOK}:rows_html"),
    "answers.run_import:RunImport": Drawn(notebook=f"{NOTEBOOK}:rows_html"),
    "answers.scale_study:ScaleReport": Drawn(notebook=f"{NOTEBOOK}:scale_html"),
    "answers.serving_accuracy:ServingAccuracy": Drawn(notebook=f"{NOTEBOOK}:serving_accuracy_html"),
    "answers.serving_calibration:ServingCalibrationResult": Drawn(notebook=f"{NOTEBOOK}:calibration_html"),
    "answers.serving_capacity:ServingCapacity": Drawn(notebook=f"{NOTEBOOK}:capacity_html"),
    "answers.serving_estimate:ServingEstimate": Drawn(notebook=f"{NOTEBOOK}:serving_estimate_html"),
    "answers.serving_plan:ServingPlan": Drawn(notebook=f"{NOTEBOOK}:serving_plan_html"),
    "answers.serving_records:OfflineMeasurements": Drawn(notebook=f"{NOTEBOOK}:offline_html"),
    "answers.serving_records:ServingMeasurements": Drawn(notebook=f"{NOTEBOOK}:serving_html"),
    "answers.sources.study:SourceReport": Drawn(
        notebook="meshwright.report.sources.page:source_fragment", page="meshwright.report.sources.page:source_page"
    ),
    "answers.training_run:TrainingRun": Drawn(notebook=f"{NOTEBOOK}:training_html"),
}
"""Functions that draw each class of answers, by its module and name."""


def notebook_html(answer: Result) -> str:
    """Return the HTML of an answer for a notebook. Raises TypeError for a class that is not in the table."""
    return resolve_name(_drawn(answer).notebook)(answer)


def write_page_of(answer: Result, *, path: str | os.PathLike[str], **about: str) -> None:
    """Draw the page of an answer and write it. `about` goes to what draws it.

    Raises InputError when it cannot be written, TypeError for a class that has no page in the table.
    """
    page = _drawn(answer).page
    if not page:
        raise TypeError(f"no page is drawn of {type(answer).__name__}")
    write_page(resolve_name(page)(answer, **about), path=path)


def _drawn(answer: Result) -> Drawn:
    """Return the entry of the answer's class, or of the nearest one that it is derived from."""
    for each in type(answer).__mro__:
        name = f"{each.__module__.removeprefix('meshwright.')}:{each.__qualname__}"
        if name in DRAWN:
            return DRAWN[name]
    raise TypeError(f"nothing draws {type(answer).__name__}: it is not in the table")
