"""Records read back as results: trainings, measurements of a device, sweeps of trainings, ingestion.

read_result(folder)       the record in a folder
read_results(folder)      every record in a folder and below it
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.answers.ingest_result import IngestBenchmark
from meshwright.answers.quantities import rate
from meshwright.answers.training_run import TrainingRun, read_training
from meshwright.errors import InputError
from meshwright.json_values import jsonable
from meshwright.records import device, ingest, serving, training, trainings
from meshwright.records.offline import NAME, POINT_KEYS, read_offline
from meshwright.result import Result

if TYPE_CHECKING:
    from meshwright.bench.serving.summary import LoadSummary
    from meshwright.bench.training_summary import Summary

SHOWN = (
    "repeat", "wall_s", "num_requests", "num_ok", "input_tokens", "output_tokens", "reasoning_tokens", "requests_per_s",
    "output_tokens_per_s", "total_tokens_per_s", "server_wait_ratio", "refusal",
)  # fmt: skip
"""Values of a load that its row has."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ServingMeasurements(Result):
    """Loads on one server by `meshwright bench serve`.

    Attributes:
        folder: the folder that they were read from.
        records: the rows of `serving.csv` and the content of `serving.json`.
    """

    folder: Path
    records: serving.ServingRecords

    @cached_property
    def summaries(self) -> list[LoadSummary]:
        """Median and interval of each load over its repeats."""
        from meshwright.bench.serving.summary import summaries

        return summaries(self.records.points)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `serving.json` and each load with all of its values."""
        return jsonable({**self.records.sidecar, "loads": [s.document() for s in self.summaries]})

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each load and repeat: the load, counts, rates, and medians of latencies."""
        rows = []
        for point in self.records.points:
            latencies = {name: getattr(point, name) for name in serving.LATENCIES}
            medians = {f"{name}_median": found and found.median for name, found in latencies.items()}
            shown = {name: getattr(point, name) for name in SHOWN}
            rows.append({"load": point.load.name, **shown, **medians})
        return rows

    def summary(self) -> str:
        """Return the model, the number of loads and the fastest one in which no request failed."""
        name = self.records.sidecar["endpoint"].get("model", "a server")
        rates = [
            (v.value, s.load.name) for s in self.summaries if not s.errors and (v := s.value("total_tokens_per_s"))
        ]
        measured = sum(bool(s.usable) for s in self.summaries)
        line = f"{name}: {measured} of {len(self.summaries)} loads measured"
        return line if not rates else f"{line}; most {rate(max(rates)[0])} total tokens/s, {max(rates)[1]}"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class OfflineMeasurements(Result):
    """Batches of one engine or server by `meshwright bench offline`.

    Attributes:
        folder: the folder that they were read from.
        document: the content of `offline.json`.
    """

    folder: Path
    document: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `offline.json`."""
        return dict(self.document)

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each pair of lengths, with measured rates only."""
        return [
            {"pair": p["name"], "num_replicas": p["num_replicas"], **{name: p["point"][name] for name in POINT_KEYS}}
            for p in self.document["pairs"]
        ]

    def summary(self) -> str:
        """Return the model, replicas, and the pair with most output tokens/s."""
        found = [(row["output_tokens_per_s"], row["pair"]) for row in self.to_rows() if row["num_ok"]]
        line = f"{self.document['model']}, replicas: {self.document['num_replicas']}, pairs measured: {len(found)}"
        return line if not found else f"{line}; most {rate(max(found)[0])} output tokens/s, {max(found)[1]}"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DeviceMeasurements(Result):
    """Measurements of one device by `meshwright bench device`.

    Attributes:
        folder: the folder that they were read from.
        records: the rows of `records.csv` and the content of `records.json`.
    """

    folder: Path
    records: device.Records

    @property
    def device(self) -> dict[str, Any]:
        """Name, memory and software of the device."""
        return dict(self.records.sidecar["device"] or {})

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `records.json` and the measurements."""
        return jsonable({**self.records.sidecar, "records": self.records.path, "measurements": self.to_rows()})

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each measurement: the shape, seconds with their 95 % interval, status."""
        rows = [asdict(row) for row in self.records.rows]
        return [{**_scalars(row.pop("point")), **_scalars(row)} for row in rows]

    def summary(self) -> str:
        """Return the device's name and the number of measurements."""
        rows, measured = len(self.records.rows), len(self.records.measured)
        return f"{self.device.get('name', 'unknown device')}: {measured:,} of {rows:,} points measured"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TrainingSweep(Result):
    """Repeated trainings of several configurations by `meshwright bench train`.

    Attributes:
        folder: the folder that they were read from.
        trainings: the rows of `trainings.csv` and the content of `trainings.json`.
    """

    folder: Path
    trainings: trainings.Trainings

    @cached_property
    def summaries(self) -> list[Summary]:
        """Median and interval of each configuration, measured and predicted."""
        from meshwright.bench.training_summary import summaries

        names = dict.fromkeys(row.configuration for row in self.trainings.rows)
        return summaries(self.trainings.rows, names=list(names))

    def to_dict(self) -> dict[str, Any]:
        from meshwright.bench.training_summary import contests, verdict

        return jsonable(
            {
                "records": self.trainings.path,
                "device": self.trainings.sidecar["device"],
                "configurations": self.summaries,
                "engines": contests(self.summaries),
                "verdict": verdict(self.summaries),
                "page": None,
            }
        )

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each training: configuration, step time, throughput, prediction, status."""
        return [_scalars(asdict(row)) for row in self.trainings.rows]

    def summary(self) -> str:
        """Return the device, the number of configurations and the fastest one."""
        name = (self.trainings.sidecar["device"] or {}).get("name", "unknown device")
        measured = [s for s in self.summaries if s.is_measured]
        line = f"{name}: {len(measured)} of {len(self.summaries)} configurations measured"
        if not measured:
            return line
        best = max(measured, key=lambda s: s.tokens_per_s_per_device.value)
        return f"{line}; fastest {best.name}: {rate(best.tokens_per_s_per_device.value)} tokens/s/device"


AnyRecord = (
    TrainingRun | DeviceMeasurements | TrainingSweep | IngestBenchmark | ServingMeasurements | OfflineMeasurements
)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RecordSet(Result):
    """Every record in a folder and below it, in the order of their paths. Iterating yields the records.

    Attributes:
        folder: the folder that was searched.
        records: the records.
        unreadable: path and reason of each record that could not be read.
    """

    folder: Path
    records: tuple[AnyRecord, ...]
    unreadable: tuple[tuple[Path, str], ...] = ()

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[AnyRecord]:
        return iter(self.records)

    def __getitem__(self, index: int) -> AnyRecord:
        return self.records[index]

    @property
    def trainings(self) -> tuple[TrainingRun, ...]:
        """Records of `meshwright train`."""
        return tuple(r for r in self.records if isinstance(r, TrainingRun))

    @property
    def devices(self) -> tuple[DeviceMeasurements, ...]:
        """Records of `meshwright bench device`."""
        return tuple(r for r in self.records if isinstance(r, DeviceMeasurements))

    @property
    def sweeps(self) -> tuple[TrainingSweep, ...]:
        """Records of `meshwright bench train`."""
        return tuple(r for r in self.records if isinstance(r, TrainingSweep))

    @property
    def ingestions(self) -> tuple[IngestBenchmark, ...]:
        """Records of `meshwright bench ingest`."""
        return tuple(r for r in self.records if isinstance(r, IngestBenchmark))

    @property
    def serving(self) -> tuple[ServingMeasurements, ...]:
        """Records of `meshwright bench serve`."""
        return tuple(r for r in self.records if isinstance(r, ServingMeasurements))

    @property
    def offline(self) -> tuple[OfflineMeasurements, ...]:
        """Records of `meshwright bench offline`."""
        return tuple(r for r in self.records if isinstance(r, OfflineMeasurements))

    def to_dict(self) -> dict[str, Any]:
        """Return the document of each record by its kind, and the unreadable files."""
        found = {
            kind: [{"folder": r.folder, **r.to_dict()} for r in getattr(self, kind)]
            for kind in ("trainings", "devices", "sweeps", "ingestions", "serving", "offline")
        }
        unreadable = [{"path": path, "reason": reason} for path, reason in self.unreadable]
        return jsonable({"folder": self.folder, **found, "unreadable": unreadable})

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row for each record: kind, folder, device; for a training also model, plan and throughput."""
        return [_overview(record) for record in self.records]

    def summary(self) -> str:
        """Return the number of records of each kind."""
        counts = Counter(type(record).__name__ for record in self.records)
        return f"{self.folder}: {', '.join(f'{n} {kind}' for kind, n in counts.items()) or 'no record'}"


def read_result(folder: Path) -> AnyRecord:
    """Read the record in `folder`, of whichever kind. Raises InputError when there is none."""
    for name, read in _READERS.items():
        if (folder / name).is_file():
            return read(folder)
    raise InputError(
        "there is no record in this folder", got=str(folder), allowed=f"a folder with {', '.join(_READERS)}",
        hint="read_records() also looks in the folders below",
    )  # fmt: skip


def read_results(folder: Path) -> RecordSet:
    """Read every record in `folder` and below it. Raises InputError when `folder` is no folder."""
    if not folder.is_dir():
        raise InputError("no such folder", got=str(folder))
    # Unlike Path.rglob, os.walk passes over folders that are removed meanwhile.
    found = {Path(root) for root, _, files in os.walk(folder) if not _READERS.keys().isdisjoint(files)}
    paths = sorted(found)
    records, unreadable = [], []
    for path in paths:
        for name, read in _READERS.items():
            if not (path / name).is_file():
                continue
            try:
                records.append(read(path))
            except InputError as error:
                unreadable.append((path / name, error.message))
    return RecordSet(folder=folder, records=tuple(records), unreadable=tuple(unreadable))


_READERS: dict[str, Callable[[Path], AnyRecord]] = {
    training.RECORD: read_training,
    device.CSV_NAME: lambda folder: DeviceMeasurements(folder=folder, records=device.read(folder)),
    trainings.CSV_NAME: lambda folder: TrainingSweep(folder=folder, trainings=trainings.read(folder)),
    ingest.SIDECAR_NAME: lambda folder: IngestBenchmark(records=ingest.read_ingest(folder)),
    serving.CSV_NAME: lambda folder: ServingMeasurements(folder=folder, records=serving.read_serving(folder)),
    NAME: lambda folder: OfflineMeasurements(folder=folder, document=read_offline(folder / NAME)),
}
"""Reader of each kind of record by the file that marks its folder."""


def _overview(record: AnyRecord) -> dict[str, Any]:
    row: dict[str, Any] = {"kind": type(record).__name__, "folder": str(record.folder), "started": None}
    if isinstance(record, TrainingRun):
        s = record.statistics
        return row | {
            "started": record.record["started"],
            "device": record.record["device"]["name"],
            "model": record.run["model"]["name"],
            "plan": record.run["plan_in_words"],
            "ending": record.record["ending"],
            "steps": s["steps"],
            "step_s": s["step_s"]["median"] if s["step_s"]["n"] else None,
            "tokens_per_s_per_device": s["tokens_per_s_per_device"],
            "last_loss": s["last_loss"],
        }
    if isinstance(record, OfflineMeasurements):
        return row | {"started": record.document["started"], "model": record.document["model"]}
    sidecar = record.trainings.sidecar if isinstance(record, TrainingSweep) else record.records.sidecar
    if isinstance(record, ServingMeasurements):
        row |= {"model": sidecar["endpoint"].get("model")}
    return row | {"started": sidecar["started"], "device": (sidecar["device"] or {}).get("name")}


def _scalars(row: dict[str, Any]) -> dict[str, Any]:
    """Enums as their values."""
    return {name: getattr(value, "value", value) for name, value in row.items()}
