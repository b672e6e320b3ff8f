"""Records of `bench serve` and `bench offline` read back as results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.answers.quantities import rate
from meshwright.json_values import jsonable
from meshwright.records import serving
from meshwright.records.offline import NAME, POINT_KEYS, read_offline
from meshwright.result import Result

if TYPE_CHECKING:
    from meshwright.bench.serving.summary import LoadSummary

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


def read_serving_result(folder: Path) -> ServingMeasurements:
    """Read the records of `bench serve` in a folder. Raises InputError."""
    return ServingMeasurements(folder=folder, records=serving.read_serving(folder))


def read_offline_result(folder: Path) -> OfflineMeasurements:
    """Read the record of `bench offline` in a folder. Raises InputError."""
    return OfflineMeasurements(folder=folder, document=read_offline(folder / NAME))
