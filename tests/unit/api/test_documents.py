"""`to_dict()` is the document of the command's `--json`."""

from __future__ import annotations

from typing import Any

import pytest
from tests.example_runs import OPEN_RUN, PINNED_RUN

import meshwright as mw

TIMES = ("seconds",)
"""Keys of measured times, which differ from call to call."""

SERVED = ("--model", "llama3.1-8b", "--cluster", "h100-2x1")
LENGTHS = ("--input-tokens", 512, "--output-tokens", 64)

COMMANDS = {
    "plan": ("plan", str(OPEN_RUN), "--top", "3", "--why-not", "tensor=8", "--pareto"),
    "estimate": ("estimate", str(PINNED_RUN)),
    "estimate memory": ("estimate", "--memory", "--model", "llama3.1-8b", "--devices", 8),
    "explain": ("explain", str(PINNED_RUN), "--why-not", "tensor=8"),
    "scale": ("scale", str(OPEN_RUN), "--devices", "32,64"),
    "scale emulated": ("scale", str(OPEN_RUN), "--devices", "128", "--emulate", "64"),
    "scale replicas": ("scale", str(OPEN_RUN), "--devices", "64", "--replicas", "8,16", "--sensitivity"),
    "inference capacity": ("inference", "capacity", *SERVED, "--context", 1000),
    "inference estimate": ("inference", "estimate", *SERVED, *LENGTHS, "--concurrency", "1,4"),
    "inference plan": ("inference", "plan", *SERVED, *LENGTHS, "--itl", 20),
    "inference accuracy": ("inference", "accuracy"),
    "mlperf compare": ("mlperf", "compare", "--benchmark", "llama31_8b", "--devices", "8"),
    "models": ("catalog", "models"),
    "model": ("catalog", "models", "llama3-8b"),
    "accelerators": ("catalog", "accelerators"),
    "clusters": ("catalog", "clusters"),
    "cluster": ("catalog", "clusters", "h100-8x4"),
    "claims": ("catalog", "claims"),
    "claim": ("catalog", "claims", "scale_06"),
    "runs": ("catalog", "runs"),
    "run": ("catalog", "runs", "llama3-8b"),
}


def untimed(document: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key not in TIMES}


@pytest.mark.parametrize("name", COMMANDS)
def test_of_each_verb(meshwright, results, name):
    outcome = meshwright(*COMMANDS[name], "--json")
    assert outcome.exit_code == 0, outcome.stderr
    assert untimed(results[name].to_dict()) == untimed(outcome.json)


@pytest.mark.parametrize("verb", ["check", "score"])
def test_of_result_files(meshwright, results, lora_runs, verb):
    more = ("--no-official",) if verb == "check" else ()
    outcome = meshwright("mlperf", verb, str(lora_runs), "--round", "5.1", "--json", *more)
    found = results[f"mlperf {verb}"]
    assert outcome.exit_code == (0 if found.passes else 1)
    assert found.to_dict() == outcome.json


def test_wrong_arguments_about_result_files(tmp_path):
    for call in (
        lambda: mw.mlperf_check(),
        lambda: mw.mlperf_check(3),
        lambda: mw.mlperf_check(tmp_path, official="no"),
        lambda: mw.mlperf_score(tmp_path, round_name=5.1),
        lambda: mw.mlperf_score(tmp_path, num_runs=0),
        lambda: mw.mlperf_compare(rounds="5.1"),
        lambda: mw.mlperf_compare(devices=0),
        lambda: mw.mlperf_rcp(tmp_path, creator=1, platform="p"),
        lambda: mw.mlperf_package(tmp_path, org="o", system=None, code="c", out="o"),
        lambda: mw.mlperf_run("proxy_pretrain_xs", num_runs="ten"),
        lambda: mw.mlperf_run("proxy_pretrain_xs", seeds=[1.5]),
    ):
        with pytest.raises(mw.InputError):
            call()


def test_of_a_run_from_keyword_arguments(meshwright):
    described = {"model": "llama3.1-8b", "cluster": "h100-8x4"}
    plans = mw.plan(**described, global_sequences=256, sequence_length=4096, precision="fp8", top=2)
    options = ("--model", "llama3.1-8b", "--cluster", "h100-8x4", "--gbs", "256", "--seq", "4096")
    outcome = meshwright("plan", *options, "--precision", "fp8", "--top", "2", "--json")
    found, expected = untimed(plans.to_dict()), untimed(outcome.json)
    assert found["request"].pop("source") == "run"
    assert expected["request"].pop("source") == "command line"
    assert found == expected


ROW = {
    "source_key": "somebody", "task": "pretrain", "model": "Llama3 8B", "arch": "dense", "gpu": "H100-SXM-80GB",
    "num_gpus": 8, "gpus_per_node": 8, "seq_len": 8192, "mbs": 1, "gbs": 128, "tp": 1, "pp": 1, "cp": 2, "dp": 4,
    "dp_type": "DDP+distopt", "recompute": "none", "precision": "fp8", "framework": "NeMo",
    "framework_version": "24.07", "date": "2024-09-09", "tok_s_gpu_best": 13000, "metric_kind": "steady_state",
    "quality": "A-vendor-table",
}  # fmt: skip
"""A measured run that states every condition."""


def test_of_accuracy(meshwright, write_csv):
    path = write_csv(ROW, ROW | {"model": "nobody's"})
    outcome = meshwright("accuracy", "--runs", str(path), "--json")
    assert outcome.exit_code == 0, outcome.stderr
    study = mw.accuracy(runs=path)
    assert study.to_dict() == outcome.json
    assert (study.overall.num_predicted, study.overall.num_rows) == (1, 2)
    assert "1 of 2 measured runs" in str(study)
    frame = study.to_frame()
    assert list(frame["reason"].isna()) == [True, False]
    assert frame["error_ratio"][0] == pytest.approx(
        frame["predicted_tokens_per_s_per_device"][0] / frame["measured_tokens_per_s_per_device"][0] - 1
    )
    assert "<svg" in study._repr_html_()
