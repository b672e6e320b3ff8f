"""`meshwright train`: the command line; the engine has its own tests."""

from __future__ import annotations

import importlib.util

import pytest

from meshwright import runfile
from meshwright.catalog import lookup as catalog
from meshwright.cli import train as cli_train
from meshwright.cli.train import introduction
from meshwright.engines import base
from meshwright.engines.external_workers import WorkersStart
from meshwright.engines.maxtext.results import LAYOUT
from meshwright.errors import InputError
from meshwright.programs import install_command
from meshwright.training import cpu_libraries
from meshwright.training.run_identity import new_identity

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")


@pytest.fixture
def run_file(tmp_path, monkeypatch, tiny_text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(tiny_text.replace(", checkpoint: {folder: saved, every_steps: 2}", ""))
    return "tiny.yaml"


def test_without_torch_it_says_how_to_install_it(meshwright, run_file, monkeypatch):
    monkeypatch.setattr(cpu_libraries, "find_spec", lambda name: None)
    outcome = meshwright("train", run_file)
    assert outcome.exit_code == 3
    assert f"hint: {install_command('torch')}" in outcome.stderr


@needs_torch
def test_an_engine_that_nothing_installed_names_is_unknown(meshwright, run_file, install_engines):
    install_engines(native="meshwright.engines.native.contract")
    outcome = meshwright("train", run_file, "--set", "engine=megatron")
    assert outcome.exit_code == 2
    assert "engine: unknown value: got 'megatron', allowed: native" in outcome.stderr


@needs_torch
def test_the_document_is_the_record(meshwright, run_file, without_page, tmp_path):
    outcome = meshwright("train", run_file, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    document = outcome.json
    assert document["ending"] == "done"
    assert document["statistics"]["steps"] == 4
    assert (tmp_path / "runs" / "tiny" / "record.json").is_file()


@needs_torch
def test_reaching_the_target_loss_is_shown_and_exits_0(meshwright, run_file, without_page, without_measuring, tmp_path):
    (tmp_path / "text.txt").write_text("ab" * 4000)
    data = "data={source: text.txt, tokenizer: bytes, sequence_length: 16}"
    target = "train.evaluate={every_steps: 1, num_batches: 1, target_loss: 100}"
    outcome = meshwright("train", run_file, *(f"--set={x}" for x in (data, target, "model.vocab=257")))
    assert outcome.exit_code == 0, outcome.stderr
    assert "loss 100 reached" in outcome.stdout
    assert "step 1, " in outcome.stdout


@pytest.mark.when_touched  # test_measured_stands_beside_predicted has both
@needs_torch
def test_without_measuring_there_is_neither_prediction_nor_mfu(meshwright, run_file, tmp_path, own_cache, monkeypatch):
    with monkeypatch.context() as context:
        context.setattr("meshwright.cli.train._write_page", lambda folder: None)
        outcome = meshwright("train", run_file, "--no-measure", "--json")
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.json["predicted"] is None
    assert outcome.json["statistics"]["mfu"] is None
    assert "this machine was not measured (--no-measure)" in outcome.json["notes"]
    assert "MFU 0" not in outcome.stderr
    outcome = meshwright("train", run_file, "--no-measure")
    assert "MFU  " not in outcome.stdout
    assert "step, median" in outcome.stdout
    assert "unknown: this device's peak was not measured" in outcome.stdout
    assert (tmp_path / "runs" / "tiny-2" / "report.html").is_file()
    assert not own_cache.exists()


@needs_torch
def test_measured_stands_beside_predicted(meshwright, run_file, tmp_path):
    outcome = meshwright("train", run_file)
    assert outcome.exit_code == 0, outcome.stderr
    for words in ("measured", "predicted (80 % interval)", "tokens/s/device", "MFU", "Results: runs/tiny"):
        assert words in outcome.stdout
    assert "loss" in outcome.stderr
    page = (tmp_path / "runs" / "tiny" / "report.html").read_text()
    assert "Predicted and measured" in page
    assert "runs/tiny/report.html" in outcome.stdout


@needs_torch
def test_only_steps_leaves_the_record_alone(meshwright, run_file, without_measuring, tmp_path):
    (tmp_path / "text.txt").write_text("ab" * 4000)
    data = "data={source: text.txt, tokenizer: bytes, sequence_length: 16}"  # without --only-steps it would write
    outcome = meshwright("train", run_file, "--only-steps", "--json", "--set", data, "--set", "model.vocab=257")
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.json["statistics"]["steps"] == 4
    assert outcome.json["sample"] is None
    assert not (tmp_path / "runs" / "tiny" / "report.html").exists()


@needs_torch
def test_a_second_training_takes_a_folder_of_its_own(meshwright, run_file, without_page, without_measuring, tmp_path):
    for _ in range(2):
        assert meshwright("train", run_file, "--set", "train.steps=1").exit_code == 0
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["tiny", "tiny-2"]


@needs_torch
def test_a_dry_run_writes_nothing(meshwright, run_file, without_measuring, tmp_path):
    outcome = meshwright("train", run_file, "--dry-run", "--json")
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.json["plan"]["micro_batch"] == 2
    assert outcome.json["data"] is None
    assert not (tmp_path / "runs").exists()


@needs_torch
def test_a_dry_run_shows_the_data(meshwright, run_file, without_measuring, tmp_path):
    (tmp_path / "asks.jsonl").write_text('{"prompt": "ask", "completion": "abcd"}\n' * 9)
    data = ("--set", "data={source: {asks: asks.jsonl}, tokenizer: bytes, sequence_length: 16}")
    asked = ("train", run_file, *data, "--set", "model.vocab=257", "--set", "batch={global_sequences: 2, micro: 1}")
    outcome = meshwright(*asked, "--dry-run", "--json", "--html", "data.html")
    assert outcome.exit_code == 0, outcome.stderr
    found = outcome.json["data"]["sources"]["asks"]
    lengths = found["lengths"]
    assert (lengths["tokens"]["total"], lengths["labels"]["total"], found["num_samples"]) == (9 * 8, 9 * 5, 5)
    page = (tmp_path / "data.html").read_text()
    for words in ("tiny: its data", "training data asks", "45 (62.5", "Labels of an example", "8–11", "4–5"):
        assert words in page, words
    shown = meshwright(*asked, "--dry-run", "--html", "data.html")
    assert "45 (62.5 %)" in shown.stdout
    assert "9 records of the format prompt" in shown.stderr
    refused = meshwright(*asked, "--html", "data.html")
    assert refused.exit_code == 2
    assert "--html is the page of the data of a dry run: got 'a training'" in refused.stderr


@pytest.mark.when_touched  # native/test_trainer.py ends such a run
@needs_torch
def test_divergence_is_a_no(meshwright, run_file, without_measuring, tmp_path):
    overrides = (
        "--set",
        "optimizer.learning_rate=1e12",
        "--set",
        "optimizer.gradient_clip=null",
        "--set",
        "train.steps=30",
    )
    outcome = meshwright("train", run_file, *overrides)
    assert outcome.exit_code == 1
    assert (tmp_path / "runs" / "tiny" / "report.html").is_file()
    assert "is not a number" in outcome.stderr


@needs_torch
@pytest.mark.parametrize("steps", ["10", "4:2", "0:1", "a:b", "-1:2"])
def test_steps_to_profile_are_two_numbers(meshwright, run_file, steps):
    outcome = meshwright("train", run_file, "--profile-steps", steps)
    assert outcome.exit_code == 2
    assert "FIRST:LAST" in outcome.stderr


@pytest.mark.when_touched  # test_a_profile_of_a_real_run profiles, test_tables_are_whole_at_every_width prints
@needs_torch
def test_a_profile_is_printed_as_shares(meshwright, run_file, without_page, without_measuring, tmp_path):
    outcome = meshwright("train", run_file, "--profile-steps", "2:3")
    assert outcome.exit_code == 0, outcome.stderr
    assert "profiled steps" in outcome.stdout
    assert "GEMM" in outcome.stdout
    assert (tmp_path / "runs" / "tiny" / "profile" / "trace-rank0.json.gz").is_file()


@pytest.mark.parametrize(
    ("is_one_process", "words"),
    [(True, "starting one process with 2 virtual devices ..."), (False, "starting 2 processes ...")],
)
def test_it_says_what_it_starts(tiny_text, tmp_path, is_one_process, words):
    run = runfile.loads(tiny_text, overrides=["parallel={data_shard: 2, sharding: parameters}"])
    start = WorkersStart(
        run=run,
        plan=run.plan,
        options=base.TrainOptions(folder=tmp_path),
        engine=run.engine,
        layout=LAYOUT,
        device_type="cpu",
        device_name="a CPU",
        cluster=catalog.cluster("h100-1x2"),
        identity=new_identity(run, plan=run.plan, results=tmp_path, fingerprints={}),
        is_one_process=is_one_process,
    )
    assert introduction(start)[-1] == words


def test_a_training_whose_report_finds_no_room_has_ended_well(tmp_path, monkeypatch, capsys):
    def full(*_, **__):
        raise InputError("cannot write report.html: No space left on device")

    monkeypatch.setattr(cli_train.output, "write_html", full)
    monkeypatch.setattr(cli_train, "load", lambda name: lambda folder: None)
    assert cli_train._write_page(tmp_path) is None
    assert capsys.readouterr().err == "note: there is no report: cannot write report.html: No space left on device\n"


@needs_torch
def test_a_model_that_is_too_large_for_this_machine_is_refused_for_its_memory(meshwright, tmp_path):
    data = "data: {sequence_length: 512}, batch: {global_sequences: 4}, train: {steps: 2}"
    (tmp_path / "large.yaml").write_text(f"{{model: llama3.1-405b, cluster: here, {data}}}")
    outcome = meshwright("train", tmp_path / "large.yaml", "--dry-run")
    assert outcome.exit_code == 1
    assert outcome.stderr.startswith("error: device memory: llama3.1-405b needs at least")
