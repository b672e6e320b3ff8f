"""The record of a real run, and the page that explains its keys."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.tiny_runs import tiny_run

from meshwright import runfile
from meshwright.engines.base import TrainOptions
from meshwright.engines.native import engine
from meshwright.engines.native.kernel_routing import merged_choices
from meshwright.records.training import STATISTICS
from meshwright.specs.plan import Plan
from meshwright.training import telemetry

pytestmark = pytest.mark.when_touched  # test_trainer.py and test_progress.py read records of the same engine
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "record.md"
OPEN = {
    "run",
    "software",
    "environment",
    "identity.settings",
    "identity.fingerprints",
    "predicted.components_s",
    "predicted.uncertainty",
    "profile.shares",
    "profile.communication",
}
OPEN |= {
    "statistics.data_usage.sources",
    "statistics.data_usage.validation",
    "statistics.data_usage.training.lengths.tokens",
    "statistics.data_usage.training.lengths.labels",
    "statistics.data_progress",
    "statistics.data_workers.training",
    "statistics.data_workers.validation",
}
"""Keys whose content is explained elsewhere or differs from run to run."""

OF_OTHER_ENGINES = {"time_s.between_steps"}
OF_SEVERAL_SOURCES = {"validation_losses"}
OF_LABEL_TOKENS = {"batches", "labels"}
OF_PAIRS = {"rewards", "validation_rewards"}
OF_COMPLETIONS = {"completions"}

ESTIMATE = {"value", "low", "high", "unit", "tier"}
SPREAD = {"n", "median", "low", "high"}


def documented(heading: str) -> set[str]:
    section = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {key for cell in cells for key in re.findall(r"`([\w.]+)`", cell)}


def keys(value: object, above: str = "") -> set[str]:
    """Dotted keys of nested objects; estimates, spreads and open keys count as one."""
    if not isinstance(value, dict) or above in OPEN or set(value) in (ESTIMATE, SPREAD):
        return set()
    found = set()
    for name, below in value.items():
        path = f"{above}.{name}" if above else name
        found |= {path} | keys(below, path)
    return found


@pytest.fixture(scope="module")
def left(tmp_path_factory, tiny_text):
    """A run that shows every key there is: it has experts, predicts several tokens, validates, saves and profiles."""
    folder = tmp_path_factory.mktemp("left")
    (folder / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog. " * 600)
    overrides = (
        "model.vocab=257",
        "model.num_layers=1",  # the trace of a step is written operation by operation
        "batch.micro=4",
        "model.experts={num_experts: 4, top_k: 2, ffn_hidden: 32}",
        "model.num_mtp_layers=1",
        f"data={{source: {folder / 'corpus.txt'}, tokenizer: bytes, sequence_length: 16}}",
        "train.steps=14",
        "train.evaluate={every_steps: 4, num_batches: 1}",
        f"train.checkpoint.folder={folder / 'saved'}",
        "stack={cuda_graphs: full, overlaps_experts: true}",
        "kernels.routes={adamw: fused, fp8_cast: reference}",
    )
    run = runfile.loads(tiny_text, overrides=overrides)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHWRIGHT_CACHE", str(folder / "cache"))
        record = engine.train(run, options=TrainOptions(folder=folder / "out", quiet=True, profile=True))
    return record, folder / "out"


def test_every_key_of_the_record_is_explained_and_every_explained_key_is_there(left):
    _, folder = left
    found = keys(json.loads((folder / "record.json").read_text()))
    assert found == documented("record.json") - OF_OTHER_ENGINES


def test_records_of_all_engines_have_the_statistics_of_this_one(left):
    """`external_record` fills in the keys of the table that other programs do not measure."""
    record, _ = left
    assert record.statistics.keys() == set(STATISTICS)


def test_every_key_of_the_step_log_is_explained(left):
    _, folder = left
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    others = OF_SEVERAL_SOURCES | OF_LABEL_TOKENS | OF_PAIRS | OF_COMPLETIONS
    assert set().union(*lines) == documented("steps.jsonl") - others


def test_the_record_is_what_is_returned(left):
    record, folder = left
    assert json.loads((folder / "record.json").read_text())["statistics"] == record.statistics


def test_settings_without_effect_are_noted(left):
    record, _ = left
    switches = "stack.cuda_graphs: full, stack.overlaps_experts: true"
    assert f"estimates read these switches, and the engine does not set them: {switches}" in record.notes
    assert "kernels.routes.fp8_cast: no process called fp8_cast" in record.notes
    assert ("adamw", "fused", "run file") in {(row["op"], row["route"], row["why"]) for row in record.kernels}


def test_phases_add_up_and_the_dates_agree(left):
    record, _ = left
    parts = dict(record.time_s)
    total_s = parts.pop("total")
    assert sum(parts.values()) == pytest.approx(total_s)
    assert all(parts[name] > 0 for name in ("start_up", "warm_up", "training", "validation", "checkpoint"))
    lasted = datetime.fromisoformat(record.ended) - datetime.fromisoformat(record.started)
    assert lasted.total_seconds() == pytest.approx(total_s, abs=1.5)


def test_rates_and_spread_agree(left):
    s = left[0].statistics
    assert s["throughput"]["n"] == s["step_s"]["n"] == 7  # without three that warm up and four under the profiler
    assert s["throughput"]["median"] == pytest.approx(s["tokens_per_s_per_device"])
    assert s["throughput"]["low"] * s["step_s"]["high"] == pytest.approx(4 * 16)
    assert s["mfu"] * s["peak_flops_per_s"] == pytest.approx(s["tokens_per_s_per_device"] * s["model_flops_per_token"])


def test_no_name_of_the_host_or_the_user(left, monkeypatch):
    import getpass
    import socket

    text = (left[1] / "record.json").read_text()
    device = json.loads(text)["device"]
    assert set(device) == {key.partition(".")[2] for key in documented("record.json") if key.startswith("device.")}
    assert socket.gethostname() not in device["system"]
    assert f"/{getpass.getuser()}/" not in json.dumps(device)


def _gather(rank: int, num_ranks: int, folder: str) -> None:
    found = telemetry.gather_scalars({"step_s": 1.0 + rank, "peak_memory_bytes": 7.0}, num_ranks=num_ranks)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))


@pytest.mark.distributed
def test_every_process_tells_its_own(tmp_path):
    from meshwright.training.processes import run_ranks

    run_ranks(_gather, str(tmp_path), num_ranks=2, device_type="cpu")
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == {"step_s": [1.0, 2.0], "peak_memory_bytes": [7.0, 7.0]}


def test_choices_of_all_ranks_are_merged():
    norm = {"op": "rms_norm", "route": "reference", "why": "default", "architecture": "cpu", "refused": []}
    loss = norm | {"op": "linear_cross_entropy", "route": "cached", "refused": [{"route": "a", "reason": "b"}]}
    found = merged_choices([[norm | {"calls": 2}], [norm | {"calls": 3}, loss | {"calls": 1}], [loss | {"calls": 1}]])
    assert found == (norm | {"calls": 3, "ranks": "0-1"}, loss | {"calls": 1, "ranks": "1-2"})


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.usefixtures("warm_ranks", "without_measuring")
def test_the_record_has_the_choices_of_the_last_stage(tmp_path):
    run = replace(tiny_run("batch.global_sequences=4", "train.steps=1"), plan=Plan(pipeline=2, micro_batch=2))
    record = engine.train(run, options=TrainOptions(folder=tmp_path / "out", quiet=True))
    ranks = {row["op"]: row["ranks"] for row in record.kernels}
    assert ranks["linear_cross_entropy"] == "1"
    assert ranks["rms_norm"] == "0-1"
