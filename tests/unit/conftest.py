"""Rows of published runs with only the cells that a test is about, records of a device that does not exist, two runs.

The runs are estimated once, one without a pipeline and one with.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from meshwright import runfile
from meshwright.accuracy.rows import FAILED_COLUMNS, MEASURED_COLUMNS, PublishedRun, read_failed, read_runs
from meshwright.cost.update import OPTIMIZER_BYTES
from meshwright.records.device import DeviceRecorder, row_of
from meshwright.records.measurement import Measurement
from meshwright.records.points import Point, PointFamily, Workload, points_of

if TYPE_CHECKING:
    from meshwright.answers.run_estimate import RunEstimate

SIDECAR = {
    "device": {
        "accelerator": None, "type": "cpu", "name": "a device", "count": 1,
        "memory_bytes": 64 * 2**30, "compute_units": 0, "threads": 8,
    },
    "driver": None,
    "software": {"torch": "2.13.0", "python": "3.11.7"},
    "command": ["meshwright", "bench", "device"],
    "started": "2026-01-02T03:04:05+00:00",
    "ended": None,
    "git_commit": None,
    "budget_s": 60.0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Machine:
    """True rates of a device. GEMMs reach less of `flops_per_s` the shallower they are."""

    flops_per_s: float = 1e12
    copy_bytes_per_s: float = 50e9
    launch_s: float = 2e-6
    attention_ratio: float = 0.25
    elementwise_factor: float = 2.0
    optimizer_passes: float = 1.5
    message_s: float = 1e-4
    message_bytes_per_s: float = 5e9

    def seconds(self, p: Point) -> float:
        """Of one call."""
        match p.family:
            case PointFamily.GEMM:
                peak = self.flops_per_s / (4 if p.format == "fp32" else 1)
                reached = min(p.m, p.n, p.k) / (min(p.m, p.n, p.k) + 64)
                return max(p.flops / (peak * reached), p.bytes / self.copy_bytes_per_s) + self.launch_s
            case PointFamily.ATTENTION:
                return p.flops / (self.flops_per_s * self.attention_ratio) + self.launch_s
            case PointFamily.ELEMENTWISE:
                return self.elementwise_factor * p.bytes / self.copy_bytes_per_s + self.launch_s
            case PointFamily.OPTIMIZER:
                return self.optimizer_passes * OPTIMIZER_BYTES * p.m / self.copy_bytes_per_s + self.launch_s
            case PointFamily.LAUNCH:
                return self.launch_s
            case PointFamily.COLLECTIVES:
                return self.message_s + p.size_bytes / self.message_bytes_per_s
            case _:
                return p.bytes / self.copy_bytes_per_s + self.launch_s

    def record(self, folder: Path, *, workload: Workload | None = None, count: int = 150, noise: float = 0.01) -> Path:
        """Write records of its kernels and collectives, a few samples of each point; what whole steps take follows from
        parameters that are no rates of it."""
        out, draw = DeviceRecorder(folder, sidecar=SIDECAR, resume=False), random.Random(1)
        for family in PointFamily:
            if family in (PointFamily.TRANSFER, PointFamily.TRAINING):
                continue
            points = points_of(family, device_type="cpu", formats=("bf16", "fp32"), workload=workload, num_processes=2)
            for point in islice(points, count):
                middle = self.seconds(point)
                samples = tuple(middle * draw.lognormvariate(0, noise) for _ in range(9))
                out.append(row_of(point, Measurement(seconds=samples, calls=1, target_ratio=0.03)))
        return folder


@pytest.fixture(scope="session")
def machine() -> Machine:
    return Machine()


@pytest.fixture(scope="session")
def recorded(machine, tmp_path_factory) -> Callable[[], Path]:
    """The folder of the machine's records, written once."""
    folder = machine.record(tmp_path_factory.mktemp("records"))
    return lambda: folder


LLAMA = {
    "source_key": "somebody",
    "task": "pretrain",
    "model": "Llama3 8B",
    "arch": "dense",
    "gpu": "H100-SXM-80GB",
    "num_gpus": 8,
    "gpus_per_node": 8,
    "seq_len": 8192,
    "mbs": 1,
    "gbs": 128,
    "tp": 1,
    "pp": 1,
    "cp": 2,
    "dp": 4,
    "dp_type": "DDP+distopt",
    "recompute": "none",
    "precision": "fp8",
    "framework": "NeMo",
    "framework_version": "24.07",
    "date": "2024-09-09",
    "tok_s_gpu_best": 13000,
    "metric_kind": "steady_state",
    "quality": "A-vendor-table",
}
"""A row that says everything."""


@pytest.fixture
def write_csv(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows (cells by column) as a CSV file with all columns that either kind of file needs."""

    def write(*rows: dict[str, object], name: str = "runs.csv") -> Path:
        columns = dict.fromkeys((*MEASURED_COLUMNS, *FAILED_COLUMNS, *LLAMA, *(c for row in rows for c in row)))
        path = tmp_path / name
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(columns), restval="")
            writer.writeheader()
            writer.writerows(rows)
        return path

    return write


@pytest.fixture
def read_one(write_csv: Callable[..., Path]) -> Callable[..., PublishedRun]:
    """Reads one row: the complete one with the given cells changed ("" or None empties a cell)."""

    def read(*, failed: bool = False, **cells: object) -> PublishedRun:
        path = write_csv(LLAMA | cells)
        return (read_failed if failed else read_runs)(path)[0]

    return read


@pytest.fixture
def read_many(write_csv: Callable[..., Path]) -> Callable[..., list[PublishedRun]]:
    """Reads rows that are the complete one with the given cells changed."""

    def read(*changes: dict[str, object]) -> list[PublishedRun]:
        return read_runs(write_csv(*(LLAMA | change for change in changes)))

    return read


@pytest.fixture
def read_many_failed(write_csv: Callable[..., Path]) -> Callable[..., list[PublishedRun]]:
    """Reads failed configurations that are the complete row with the given cells changed."""

    def read(*changes: dict[str, object]) -> list[PublishedRun]:
        return read_failed(write_csv(*(LLAMA | change for change in changes), name="failed.csv"))

    return read


EXAMPLES = Path(__file__).parents[2] / "examples" / "runs"

PIPELINED = """
model: llama3-8b
data: {sequence_length: 4096}
batch: {global_sequences: 64, micro: 1}
precision: bf16
cluster: h100-8x4
parallel: {tensor: 2, pipeline: 4, virtual_pipeline: 2}
engine: megatron
costs: {usd_per_device_hour: 2.0}
train: {tokens: 1e10}
"""


@pytest.fixture(scope="session")
def flat() -> RunEstimate:
    from meshwright.answers.run_estimate import estimate_run

    return estimate_run(runfile.load(EXAMPLES / "llama3.1-8b-pretrain.yaml"))


@pytest.fixture(scope="session")
def pipelined() -> RunEstimate:
    from meshwright.answers.run_estimate import estimate_run

    return estimate_run(runfile.loads(PIPELINED, file="pipelined.yaml"))
