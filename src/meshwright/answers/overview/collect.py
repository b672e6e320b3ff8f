"""Records, estimates and published figures of one report."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright import runfile
from meshwright.answers.comparison.kernel_sides import CallRates, kernel_calls
from meshwright.answers.comparison.opening import open_side
from meshwright.answers.comparison.record_sides import faults_named, read_side, record_folders, training_side
from meshwright.answers.comparison.sides import Metric, Side, SideValue
from meshwright.answers.overview.measured_passes import MeasuredPass, measured_passes
from meshwright.answers.serving_question import PriceTerms
from meshwright.answers.training_run import TrainingRun, read_training
from meshwright.errors import InputError
from meshwright.json_values import jsonable
from meshwright.records import training
from meshwright.result import Result
from meshwright.specs.run import Run

if TYPE_CHECKING:
    from meshwright.answers.run_estimate import RunEstimate


@dataclass(frozen=True, kw_only=True)
class ReportEntry:
    """One record, estimate or published figure; the other fields are there where it has them."""

    side: Side
    run: TrainingRun | None = None
    estimate: RunEstimate | None = None
    kernels: tuple[CallRates, ...] = ()
    passes: tuple[MeasuredPass, ...] = ()

    @property
    def name(self) -> str:
        return self.side.name

    def value(self, metric: Metric) -> SideValue | None:
        """The value of this metric if the entry has exactly one."""
        found = [v for v in self.side.values if v.metric == metric]
        return found[0] if len(found) == 1 else None

    def known(self, metric: Metric) -> float:
        """The value of this metric as a number; 0 where the entry has none, or several."""
        found = self.value(metric)
        return 0.0 if found is None else found.value

    def condition(self, name: str) -> str:
        """The entry's conditions of this name."""
        return "; ".join(self.side.conditions(name)[:3])


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RecordReport(Result):
    """All entries of a report.

    Attributes:
        entries: records, estimates and published figures, in the order of the arguments and of their paths.
        unreadable: reason of each record of a folder that could not be read.
        terms: price of a device-hour, licence, utilisation.
    """

    entries: tuple[ReportEntry, ...]
    unreadable: tuple[str, ...] = ()
    terms: PriceTerms = field(default_factory=PriceTerms)

    @property
    def trainings(self) -> list[TrainingRun]:
        """The trainings among the entries."""
        return [e.run for e in self.entries if e.run is not None]

    def to_dict(self) -> dict[str, Any]:
        from meshwright.answers.comparison.study import endnotes
        from meshwright.answers.overview.cost import cost_rows

        return jsonable(
            {
                "rows": self.to_rows(), "unreadable": self.unreadable,
                "cost": [asdict(r) for r in cost_rows(self.costed, self.terms)],
                "endnotes": endnotes([e.side for e in self.entries]),
            }
        )  # fmt: skip

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each value: entry, kind, workload, metric, unit, value, n, evidence, conditions."""
        return [
            {
                "name": e.name, "kind": e.side.kind, "workload": v.workload, "metric": v.metric.name,
                "unit": v.metric.unit, "value": v.value, "num_samples": len(v.samples), "statistic": v.statistic.value,
                "evidence": v.evidence.value,
                **{f"condition_{k.replace(' ', '_')}": t for k, t in v.conditions.items() if k != "evidence"},
            }
            for e in self.entries
            for v in e.side.values
        ]  # fmt: skip

    @property
    def costed(self) -> list[SideValue]:
        """Rates that have a price per token, each with the entry's name as workload."""
        from meshwright.answers.overview.cost import priced_values

        return [v for e in self.entries for v in priced_values(e.side)]

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report as one page that opens offline. Raises InputError when it cannot be written."""
        self.write_html(path)

    def summary(self) -> str:
        """Return the number of entries of each kind."""
        counts = Counter(e.side.kind for e in self.entries)
        return ", ".join(f"{kind}: {n:,}" for kind, n in counts.items())


def collect(
    items: Sequence[str], *, read_run: Callable[[Path], Run] = runfile.load, terms: PriceTerms | None = None
) -> RecordReport:
    """Open every argument; a folder gives one entry for each record at and below it.

    Raises InputError with file and field for a damaged record that is named itself, and where nothing can be read.
    """
    entries: list[ReportEntry] = []
    unreadable: list[str] = []
    for item in items:
        if item.strip() and Path(item).is_dir():
            _read_folder(Path(item), entries, unreadable)
        else:
            entries.append(_opened(item, read_run))
    if not entries:
        raise InputError(
            f"no record can be read: {unreadable[0]}" if unreadable else "nothing to report", got=", ".join(items),
            hint="name folders of records",
        )  # fmt: skip
    return RecordReport(entries=tuple(entries), unreadable=tuple(unreadable), terms=terms or PriceTerms())


def _read_folder(folder: Path, entries: list[ReportEntry], unreadable: list[str]) -> None:
    found = record_folders(folder)
    if not found:
        raise InputError(
            "there is no record at or below this folder", got=str(folder),
            allowed="what train, bench device, kernels, train, serve, offline, ingest or mlperf run wrote",
        )  # fmt: skip
    taken = {entry.name for entry in entries}
    for path, mark in found.items():
        name = path.resolve().name if path == folder else str(path.relative_to(folder))
        name = str(path) if name in taken else name  # figures and tables tell entries by their names
        try:
            entries.append(_entry(path, mark, name))
        except InputError as error:
            if path == folder:
                raise
            unreadable.append(error.message)


def _entry(path: Path, mark: str, name: str) -> ReportEntry:
    if mark != training.RECORD:
        return ReportEntry(side=read_side(path, mark, name=name), kernels=kernel_calls(path, mark))
    with faults_named(path / mark):
        done = read_training(path)
        return ReportEntry(side=training_side(done, name=name), run=done, passes=measured_passes(path))


def _opened(item: str, read_run: Callable[[Path], Run]) -> ReportEntry:
    from meshwright.answers.run_estimate import estimate_run

    side = open_side(item, read_run=read_run)
    if side.kind != "estimate":
        return ReportEntry(side=side)
    return ReportEntry(side=side, estimate=estimate_run(read_run(Path(side.facts["file"]))))
