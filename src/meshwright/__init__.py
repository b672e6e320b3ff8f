"""Meshwright plans, trains and measures large language models on any GPU cluster.

    import meshwright as mw

    plans = mw.plan(model="llama3.1-8b", cluster="h100-8x4", global_sequences=512, sequence_length=8192)
    done = mw.estimate(plans.pinned())

The names in `__all__` are the public interface and follow semantic versioning; everything else is private and
may change. They are imported when they are first used, so that `import meshwright` costs nothing. Only `train`,
`generate`, `evaluate`, `bench_device`, `bench_ingest` and `mlperf_run` import a tensor framework.

To read the source, start at `meshwright.specs` (what things are), then `meshwright.cost.step` (how long a step
takes), then `meshwright.planner` (which plan is best).
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from meshwright.version import __version__

if TYPE_CHECKING:
    from meshwright.answers.accuracy_study import AccuracyStudy
    from meshwright.answers.catalog_listing import CatalogItem, CatalogListing
    from meshwright.answers.comparison.study import SideComparison
    from meshwright.answers.evaluation import Evaluation
    from meshwright.answers.explanation import Explanation
    from meshwright.answers.generation import Completion, Generation
    from meshwright.answers.ingest_result import IngestBenchmark
    from meshwright.answers.model_memory import ModelMemory
    from meshwright.answers.overview.collect import RecordReport
    from meshwright.answers.plan_ranking import PlanRanking
    from meshwright.answers.record_files import (
        DeviceMeasurements,
        OfflineMeasurements,
        RecordSet,
        ServingMeasurements,
        TrainingSweep,
    )
    from meshwright.answers.run_estimate import RunEstimate
    from meshwright.answers.run_export import RunExport
    from meshwright.answers.run_import import RunImport
    from meshwright.answers.run_survey import ConfigurationSurvey
    from meshwright.answers.scale_study import ScaleReport
    from meshwright.answers.serving_accuracy import ServingAccuracy
    from meshwright.answers.serving_calibration import ServingCalibrationResult
    from meshwright.answers.serving_capacity import ServingCapacity
    from meshwright.answers.serving_estimate import ServingEstimate
    from meshwright.answers.serving_plan import ServingPlan
    from meshwright.answers.sources.study import SourceReport
    from meshwright.answers.training_run import TrainingRun
    from meshwright.api import catalog
    from meshwright.api.accuracy import accuracy
    from meshwright.api.bench import bench_device, bench_train
    from meshwright.api.bench_ingest import bench_ingest
    from meshwright.api.compare import compare
    from meshwright.api.configurations import export, import_run, survey_configurations
    from meshwright.api.estimate import estimate, estimate_memory
    from meshwright.api.evaluate import evaluate
    from meshwright.api.explain import explain
    from meshwright.api.generate import generate
    from meshwright.api.inference import (
        inference_accuracy,
        inference_calibrate,
        inference_capacity,
        inference_estimate,
        inference_plan,
    )
    from meshwright.api.mlperf import mlperf_check, mlperf_compare, mlperf_package, mlperf_rcp, mlperf_score
    from meshwright.api.plan import plan
    from meshwright.api.records import read_record, read_records
    from meshwright.api.report import report_records, report_sources
    from meshwright.api.run_benchmark import mlperf_run
    from meshwright.api.runs import load_run
    from meshwright.api.scale import scale
    from meshwright.api.train import train
    from meshwright.errors import (
        InfeasibleError,
        InputError,
        MeshwrightError,
        MissingDependencyError,
        RunFileError,
        UnknownNameError,
    )
    from meshwright.mlperf.compare import ResultComparison
    from meshwright.mlperf.package import SubmissionPackage
    from meshwright.mlperf.results import BenchmarkCheck, BenchmarkScores, ReferencePoints
    from meshwright.mlperf.running import BenchmarkRuns
    from meshwright.specs.estimate import Estimate, Tier
    from meshwright.specs.plan import Plan
    from meshwright.specs.run import Run

__all__ = [
    "AccuracyStudy",
    "BenchmarkCheck",
    "BenchmarkRuns",
    "BenchmarkScores",
    "CatalogItem",
    "CatalogListing",
    "Completion",
    "ConfigurationSurvey",
    "DeviceMeasurements",
    "Estimate",
    "Evaluation",
    "Explanation",
    "Generation",
    "InfeasibleError",
    "IngestBenchmark",
    "InputError",
    "MeshwrightError",
    "MissingDependencyError",
    "ModelMemory",
    "OfflineMeasurements",
    "Plan",
    "PlanRanking",
    "RecordReport",
    "RecordSet",
    "ReferencePoints",
    "ResultComparison",
    "Run",
    "RunEstimate",
    "RunExport",
    "RunFileError",
    "RunImport",
    "ScaleReport",
    "ServingAccuracy",
    "ServingCalibrationResult",
    "ServingCapacity",
    "ServingEstimate",
    "ServingMeasurements",
    "ServingPlan",
    "SideComparison",
    "SourceReport",
    "SubmissionPackage",
    "Tier",
    "TrainingRun",
    "TrainingSweep",
    "UnknownNameError",
    "__version__",
    "accuracy",
    "bench_device",
    "bench_ingest",
    "bench_train",
    "catalog",
    "compare",
    "estimate",
    "estimate_memory",
    "evaluate",
    "explain",
    "export",
    "generate",
    "import_run",
    "inference_accuracy",
    "inference_calibrate",
    "inference_capacity",
    "inference_estimate",
    "inference_plan",
    "load_run",
    "mlperf_check",
    "mlperf_compare",
    "mlperf_package",
    "mlperf_rcp",
    "mlperf_run",
    "mlperf_score",
    "plan",
    "read_record",
    "read_records",
    "report_records",
    "report_sources",
    "scale",
    "survey_configurations",
    "train",
]

_HOMES = {
    "api.accuracy": ("accuracy",),
    "api.bench": ("bench_device", "bench_train"),
    "api.bench_ingest": ("bench_ingest",),
    "api.compare": ("compare",),
    "api.estimate": ("estimate", "estimate_memory"),
    "api.evaluate": ("evaluate",),
    "api.configurations": ("export", "import_run", "survey_configurations"),
    "api.explain": ("explain",),
    "api.generate": ("generate",),
    "api.inference": (
        "inference_accuracy", "inference_calibrate", "inference_capacity", "inference_estimate", "inference_plan",
    ),
    "api.plan": ("plan",),
    "api.records": ("read_record", "read_records"),
    "api.mlperf": ("mlperf_check", "mlperf_compare", "mlperf_package", "mlperf_rcp", "mlperf_score"),
    "api.report": ("report_records", "report_sources"),
    "api.run_benchmark": ("mlperf_run",),
    "api.runs": ("load_run",),
    "api.scale": ("scale",),
    "api.train": ("train",),
    "errors": (
        "InfeasibleError", "InputError", "MeshwrightError", "MissingDependencyError", "RunFileError",
        "UnknownNameError",
    ),
    "mlperf.compare": ("ResultComparison",),
    "mlperf.package": ("SubmissionPackage",),
    "mlperf.results": ("BenchmarkCheck", "BenchmarkScores", "ReferencePoints"),
    "mlperf.running": ("BenchmarkRuns",),
    "answers.accuracy_study": ("AccuracyStudy",),
    "answers.catalog_listing": ("CatalogItem", "CatalogListing"),
    "answers.comparison.study": ("SideComparison",),
    "answers.evaluation": ("Evaluation",),
    "answers.explanation": ("Explanation",),
    "answers.generation": ("Completion", "Generation"),
    "answers.ingest_result": ("IngestBenchmark",),
    "answers.model_memory": ("ModelMemory",),
    "answers.overview.collect": ("RecordReport",),
    "answers.plan_ranking": ("PlanRanking",),
    "answers.record_files": (
        "DeviceMeasurements", "OfflineMeasurements", "RecordSet", "ServingMeasurements", "TrainingSweep",
    ),
    "answers.run_estimate": ("RunEstimate",),
    "answers.run_export": ("RunExport",),
    "answers.run_import": ("RunImport",),
    "answers.run_survey": ("ConfigurationSurvey",),
    "answers.scale_study": ("ScaleReport",),
    "answers.serving_accuracy": ("ServingAccuracy",),
    "answers.serving_calibration": ("ServingCalibrationResult",),
    "answers.serving_capacity": ("ServingCapacity",),
    "answers.serving_estimate": ("ServingEstimate",),
    "answers.serving_plan": ("ServingPlan",),
    "answers.sources.study": ("SourceReport",),
    "answers.training_run": ("TrainingRun",),
    "specs.estimate": ("Estimate", "Tier"),
    "specs.plan": ("Plan",),
    "specs.run": ("Run",),
}  # fmt: skip
"""Public names by the module that defines them."""

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "catalog":
        return import_module("meshwright.api.catalog")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    return getattr(import_module(f"meshwright.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """This package, whose public names stay what they are.

    Python binds a submodule to its package under its own name when it is first imported. The package
    `meshwright.accuracy` must not replace the function `accuracy`, nor `meshwright.catalog` the API's catalogue.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if (name in _HOME_OF or name == "catalog") and isinstance(value, ModuleType):
            return
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
