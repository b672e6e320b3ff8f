"""`meshwright tune gemm`: its output, its file, and a run that reads the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from meshwright import runfile
from meshwright.bench.gemm import _Work
from meshwright.kernels import linear as linear_module
from meshwright.kernels.linear import GemmKind, GemmRoute
from meshwright.training.step_gemms import Gemm

QUICK = ("--budget", "0.2s")


@pytest.fixture
def run_path(tmp_path, monkeypatch, tiny_text) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path / "run.yaml"
    path.write_text("# a small one\n" + tiny_text.replace("cluster: here", "cluster: here  # this machine"))
    return path


@pytest.fixture
def faster(monkeypatch):
    """A machine whose gradients of weights take half the time with factors in rows."""

    def sample_s(work: _Work, p: Gemm) -> float:
        layer = (torch.bfloat16, p.m, p.n, p.k)
        route = linear_module._routes.get(layer, {}).get(p.kernel)
        return 0.5e-3 if p.kernel is GemmKind.WEIGHT_GRADIENT and route is GemmRoute.TORCH_ROWS else 1e-3

    monkeypatch.setattr(_Work, "sample_s", sample_s)


@pytest.fixture
def equal(monkeypatch):
    monkeypatch.setattr(_Work, "sample_s", lambda work, p: 1e-3)


def files(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def test_where_nothing_is_faster_that_is_said_and_nothing_written(meshwright, run_path, equal):
    before = run_path.read_text()
    outcome = meshwright("tune", "gemm", run_path, *QUICK, "--apply", "--out", "tuned.json")
    assert outcome.exit_code == 0, outcome.stderr
    assert "Nothing is significantly faster: nothing is written." in outcome.stdout
    assert "Tried: route: torch" in outcome.stdout
    assert files(run_path.parent) == {"run.yaml"}
    assert run_path.read_text() == before


def test_a_dry_run_tells_and_changes_nothing(meshwright, run_path, faster):
    outcome = meshwright("tune", "gemm", run_path, *QUICK)
    assert outcome.exit_code == 0, outcome.stderr
    assert "2.00 (2.00 to 2.00)   torch, rows" in outcome.stdout
    assert "Nothing is changed: --out FILE keeps it" in outcome.stdout
    assert files(run_path.parent) == {"run.yaml"}


def test_apply_keeps_the_file_and_names_it_and_a_training_takes_it(meshwright, run_path, faster, without_measuring):
    document = meshwright("tune", "gemm", run_path, *QUICK, "--apply", "--json").json
    assert document["found"]
    assert document["written"] == [str(run_path.with_suffix(".gemm.json")), str(run_path)]
    assert document["step"]["speed_up"]["low"] > 1
    text = run_path.read_text()
    assert text.startswith("# a small one\n")
    assert "# this machine" in text
    run = runfile.load(run_path)
    assert run.gemm_tuning == document["written"][0]
    kept = json.loads(Path(run.gemm_tuning).read_text())
    assert {row["route"] for row in kept["choices"]["routes"]} == {"torch, rows"}
    assert kept["products"] == document["products"]
    outcome = meshwright("train", run_path, "--dry-run")
    assert outcome.exit_code == 0, outcome.stderr
    assert "GEMMs as in" in outcome.stdout + outcome.stderr
    again = meshwright("tune", "gemm", run_path, *QUICK, "--apply")
    assert f"gemm_tuning was: {run.gemm_tuning}" in " ".join(again.stdout.split())


def test_write_leaves_the_file_alone_and_takes_what_set_says(meshwright, run_path, faster):
    before = run_path.read_text()
    options = ("--out", "t.json", "--write", "tuned.yaml", "--set", "train.steps=7")
    assert meshwright("tune", "gemm", run_path, *QUICK, *options).exit_code == 0
    assert run_path.read_text() == before
    run = runfile.load("tuned.yaml")
    assert (run.gemm_tuning, run.train.steps) == ("t.json", 7)


def test_an_interrupt_writes_nothing(meshwright, run_path, monkeypatch):
    def interrupted(work: _Work, p: Gemm) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(_Work, "sample_s", interrupted)
    assert meshwright("tune", "gemm", run_path, *QUICK, "--apply").exit_code == 130
    assert files(run_path.parent) == {"run.yaml"}


@pytest.mark.parametrize(
    ("options", "exit_code", "words"),
    [
        (("--apply", "--write", "x.yaml"), 2, "--apply and --write are both given"),
        (("--apply", "--set", "train.steps=9"), 2, "--apply changes the file"),
        (("--out", "run.yaml"), 2, "--out is the run file itself"),
        (("--out", "no/such/x.json"), 2, "no such folder"),
        (("--budget", "never"), 2, "--budget is not a time"),
        (("--set", "engine=megatron"), 2, "only the native engine"),
        (("--set", "cluster=h100-8x1", "--set", "parallel={data_shard: 8}", "--set", "batch.global_sequences=16"),
         3, "this machine has no accelerator"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_said(meshwright, run_path, equal, options, exit_code, words):
    outcome = meshwright("tune", "gemm", run_path, *QUICK, *options)
    assert outcome.exit_code == exit_code
    assert words in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert files(run_path.parent) == {"run.yaml"}
