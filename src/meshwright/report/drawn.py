"""The table of functions that draw each answer: its display in a notebook, and the page that it writes, if any.

`meshwright.result.Result` opens this module when an answer is drawn. Answers import nothing that draws them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pkgutil import resolve_name

from meshwright.report.html import write_page
from meshwright.result import Result

NOTEBOOKS = {
    "mlperf.compare:ResultComparison": "notebook:rows_html",
    "mlperf.package:SubmissionPackage": "notebook:rows_html",
    "mlperf.results:BenchmarkCheck": "notebook:rows_html",
    "mlperf.results:BenchmarkScores": "notebook:rows_html",
    "mlperf.results:ReferencePoints": "notebook:rows_html",
    "mlperf.running:BenchmarkRuns": "notebook:rows_html",
    "answers.model_memory:ModelMemory": "notebook:rows_html",
    "answers.run_export:RunExport": "notebook:rows_html",
    "answers.run_import:RunImport": "notebook:rows_html",
    "answers.run_survey:ConfigurationSurvey": "notebook:rows_html",
    "answers.serving_accuracy:ServingAccuracy": "notebook:tables_html",
    "answers.serving_calibration:ServingCalibrationResult": "notebook:tables_html",
    "answers.serving_estimate:ServingEstimate": "notebook:tables_html",
    "answers.serving_plan:ServingPlan": "notebook:tables_html",
    "answers.record_files:ServingMeasurements": "notebook:tables_html",
    "answers.accuracy_study:AccuracyStudy": "notebook:accuracy_html",
    "answers.catalog_listing:CatalogItem": "notebook:entry_html",
    "answers.catalog_listing:CatalogListing": "notebook:listing_html",
    "answers.comparison.study:SideComparison": "comparison.page:comparison_fragment",
    "answers.evaluation:Evaluation": "notebook:evaluation_html",
    "answers.explanation:Explanation": "notebook:explanation_html",
    "answers.generation:Generation": "notebook:generation_html",
    "answers.ingest_result:IngestBenchmark": "notebook:ingest_html",
    "answers.overview.collect:RecordReport": "overview.page:record_fragment",
    "answers.plan_ranking:PlanRanking": "notebook:ranking_html",
    "answers.record_files:DeviceMeasurements": "notebook:device_html",
    "answers.record_files:RecordSet": "notebook:records_html",
    "answers.record_files:TrainingSweep": "notebook:sweep_html",
    "answers.run_estimate:RunEstimate": "notebook:estimate_html",
    "answers.scale_study:ScaleReport": "notebook:scale_html",
    "answers.serving_capacity:ServingCapacity": "notebook:capacity_html",
    "answers.record_files:OfflineMeasurements": "notebook:offline_html",
    "answers.sources.study:SourceReport": "sources.page:source_fragment",
    "answers.training_run:TrainingRun": "notebook:training_html",
}
"""The function of `report` that returns HTML for a notebook, of each class of answers by its module and name."""

PAGES = {
    "answers.overview.collect:RecordReport": "overview.page:record_page",
    "answers.plan_ranking:PlanRanking": "plan_space.page:ranking_page",
    "answers.sources.study:SourceReport": "sources.page:source_page",
}
"""The function that returns the page, of the classes that write one."""


def notebook_html(answer: Result) -> str:
    """Return the HTML of an answer for a notebook. Raises TypeError for a class that is not in the table."""
    return _drawn(answer, NOTEBOOKS, what="nothing draws {}: it is not in the table")(answer)


def write_page_of(answer: Result, *, path: str | os.PathLike[str], **about: str) -> None:
    """Draw the page of an answer and write it. `about` goes to what draws it.

    Raises InputError when it cannot be written, TypeError for a class that has no page in the table.
    """
    draw = _drawn(answer, PAGES, what="no page is drawn of {}")
    write_page(draw(answer, **about), path=path)


def _drawn(answer: Result, drawn: Mapping[str, str], *, what: str) -> Callable[..., str]:
    """Return the function of the answer's class, or of the nearest one that it is derived from."""
    for each in type(answer).__mro__:
        name = f"{each.__module__.removeprefix('meshwright.')}:{each.__qualname__}"
        if name in drawn:
            return resolve_name(f"meshwright.report.{drawn[name]}")
    raise TypeError(what.format(type(answer).__name__))
