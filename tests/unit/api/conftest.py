"""Results that several tests look at, each made once; a training's folder as an engine leaves it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.example_runs import OPEN_RUN, PINNED_RUN
from tests.unit.mlperf.conftest import SyntheticLog

import meshwright as mw

RECORD: dict[str, Any] = {
    "run": {"name": "night", "model": {"name": "llama3.1-8b"}, "plan_in_words": "DP8 fsdp mbs1"},
    "device": {"name": "NVIDIA H100 80GB HBM3", "accelerator": "h100"},
    "ending": "done",
    "statistics": {
        "steps": 4, "first_loss": 11.5, "last_loss": 6.25, "step_s": {"n": 3, "median": 7.0, "low": 6.5, "high": 21.0},
        "throughput": {"n": 3, "median": 9362.0, "low": 3120.0, "high": 10082.0}, "tokens_per_s_per_device": 9362.0,
        "mfu": 0.44, "peak_memory_bytes": 60 * 2**30,
    },
    "started": "2026-01-02T03:04:05+00:00",
    "predicted": {"step": {"value": 6.8, "low": 6.0, "high": 7.8, "unit": "s", "tier": "interpolated"}},
}  # fmt: skip


@pytest.fixture
def write_training() -> Callable[[Path], Path]:
    """Writes the files of a training of four steps into a folder."""

    def write(folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"step": i, "loss": 11.5 - i, "step_s": 7.0}) + "\n" for i in range(1, 5)]
        (folder / "record.json").write_text(json.dumps(RECORD))
        (folder / "steps.jsonl").write_text("".join(lines))
        (folder / "run.yaml").write_text("model: llama3.1-8b\n")
        return folder

    return write


@pytest.fixture(scope="session")
def plans() -> mw.PlanRanking:
    return mw.plan(OPEN_RUN, top=3, why_not={"tensor": 8}, front=True)


@pytest.fixture(scope="session")
def lora_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten result files of llama2_70b_lora, one of a run that was aborted."""
    folder = tmp_path_factory.mktemp("mlperf") / "llama2_70b_lora"
    for index in range(10):
        log = SyntheticLog(seed=index, evaluations=5)
        if index == 3:
            log.row("run_stop")["metadata"]["status"] = "aborted"
        log.write(folder / f"result_{index}.txt")
    return folder


@pytest.fixture(scope="session")
def results(plans: mw.PlanRanking, lora_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One result of every verb that needs no framework."""
    return {
        "plan": plans,
        "estimate": mw.estimate(PINNED_RUN),
        "estimate memory": mw.estimate_memory(model="llama3.1-8b", devices=8),
        "explain": mw.explain(PINNED_RUN, why_not={"tensor": 8}),
        "explain against": mw.explain(PINNED_RUN, against=plans.pinned(rank=2)),
        "scale": mw.scale(OPEN_RUN, devices=[32, 64]),
        "scale emulated": mw.scale(OPEN_RUN, devices=[128], emulate=64),
        "scale replicas": mw.scale(OPEN_RUN, devices=[64], replicas=[8, 16], sensitivity=True),
        "inference capacity": mw.inference_capacity(model="llama3.1-8b", cluster="h100-2x1", context=1000),
        "inference estimate": mw.inference_estimate(
            model="llama3.1-8b", cluster="h100-2x1", input_tokens=512, output_tokens=64, concurrency=[1, 4]
        ),
        "inference plan": mw.inference_plan(
            model="llama3.1-8b", cluster="h100-2x1", input_tokens=512, output_tokens=64, itl_s=0.02
        ),
        "inference accuracy": mw.inference_accuracy(),
        "mlperf check": mw.mlperf_check(lora_runs, round_name="5.1", official=False),
        "mlperf score": mw.mlperf_score(lora_runs, round_name="5.1"),
        "mlperf compare": mw.mlperf_compare(names=["llama31_8b"], devices=8),
        "models": mw.catalog.models(),
        "model": mw.catalog.models()["llama3-8b"],
        "accelerators": mw.catalog.accelerators(),
        "clusters": mw.catalog.clusters(),
        "cluster": mw.catalog.clusters()["h100-8x4"],
        "claims": mw.catalog.claims(),
        "claim": mw.catalog.claims()["scale_06"],
        "runs": mw.catalog.runs(),
        "run": mw.catalog.runs()["llama3-8b"],
    }
