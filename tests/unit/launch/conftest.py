"""One run on two nodes of eight MI355X, as an engine lowers it, and how texts are held against golden files."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.launch.environment import environment
from meshwright.launch.request import LaunchRequest

GOLDEN = Path(__file__).parent / "golden"
SITE = {"interface": "ens1f0", "rdma_devices": "mlx5_0,mlx5_1"}


@pytest.fixture
def make_request() -> Callable[..., LaunchRequest]:
    """`make_request(num_nodes=1)`: the usual request with other fields."""
    usual = LaunchRequest(
        name="first",
        argv=("python", "-m", "meshwright", "train", "runs/first/run.yaml", "--out", "runs/first"),
        files={"run.yaml": "model: llama3.1-8b\n"},
        folder=Path("runs/first"),
        num_nodes=2,
        devices_per_node=8,
        vendor="AMD",
        environment=environment(
            vendor="AMD",
            architecture="CDNA 4",
            engine="native",
            num_nodes=2,
            devices_per_node=8,
            site=SITE,
            layers={},
            folder=Path("runs/first"),
            user="ann",
        ),
        exclude=("node07", "node11"),
        max_restarts=3,
        checkpoints="saved/first",
    )
    return lambda **fields: replace(usual, **fields)


@pytest.fixture
def is_golden() -> Callable[[str, str], None]:
    """`is_golden(text, "job.sh")`. MESHWRIGHT_GOLDEN=write writes the file instead, to be read before it is kept."""

    def compare(text: str, name: str) -> None:
        path = GOLDEN / name
        if os.environ.get("MESHWRIGHT_GOLDEN") == "write":
            path.write_text(text)
        assert text == path.read_text()

    return compare


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A folder with `run.yaml`, 32 MI355X, and `site.yaml`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MESHWRIGHT_SITE", raising=False)
    Path("run.yaml").write_text(RUN)
    Path("site.yaml").write_text(SITE_FILE)
    return "run.yaml"


RUN = """
model: llama3.1-8b
data: {sequence_length: 8192}
batch: {global_sequences: 512}
cluster: mi355x-8x4
parallel: {data_shard: 32, sharding: parameters, recompute: full}
train: {steps: 1000, checkpoint: {folder: saved/first, every_steps: 100}}
"""
SITE_FILE = """
interface: ens1f0
environment: {NCCL_DEBUG: null, OMP_NUM_THREADS: "4"}
slurm: {partition: gpu, account: llm, time: "1-00:00:00"}
kubernetes: {image: "registry.example/train:1", claims: [{name: shared, mount: /results}]}
skypilot: {accelerator: MI355X, buckets: {/results: "s3://runs"}}
"""
