"""`meshwright tune dataloader`: its output, its file, and its refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright import runfile

RUN = """\
# what this run is for
model: {name: tiny, hidden: 32, num_layers: 2, vocab: 300, ffn_hidden: 64, attention: {num_heads: 4}}
data:
  source: text.txt   # a small one
  tokenizer: bytes
  sequence_length: 16
batch: {global_sequences: 4, micro: 2}
precision: fp32
cluster: here
train:
  steps: 4
  evaluate: {every_steps: 2, num_batches: 2}  # short
"""
QUICK = ("--workers", "0,2", "--step-time", "0.01", "--budget", "0.1s")


@pytest.fixture
def run_path(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("One two three four five six seven eight nine ten.\n" * 2000)
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.mark.when_touched  # test_apply_writes_both_counts_and_keeps_comments measures
def test_a_dry_run_measures_and_changes_nothing(meshwright, run_path, torch):
    outcome = meshwright("tune", "dataloader", run_path, *QUICK)
    assert outcome.exit_code == 0, outcome.stderr
    assert "Training: a step of 10.0 ms (as given) takes 64 tokens: 6,400 tokens/s" in outcome.stdout
    assert "Validation: a pass of 2 batches" in outcome.stdout
    assert "was: not set, so found in the first steps" in outcome.stdout
    assert "Nothing is changed" in outcome.stdout
    assert run_path.read_text() == RUN
    assert sorted(p.name for p in run_path.parent.iterdir()) == ["cache", "run.yaml", "text.txt"]


def test_apply_writes_both_counts_and_keeps_comments(meshwright, run_path, torch):
    document = meshwright("tune", "dataloader", run_path, *QUICK, "--apply", "--json").json
    values = document["values"]
    assert set(values) == {"data.workers", "train.evaluate.workers"}
    assert set(values.values()) <= {0, 2}
    assert document["before"] == {"data.workers": None, "train.evaluate.workers": None}
    text = run_path.read_text()
    assert text.startswith("# what this run is for\n")
    assert "# a small one" in text
    assert "# short" in text
    run = runfile.load(run_path)
    assert run.train.evaluate is not None
    assert [run.data.workers, run.train.evaluate.workers] == list(values.values())
    again = meshwright("tune", "dataloader", run_path, *QUICK).stdout
    assert f"(was: {values['data.workers']})" in again


@pytest.mark.when_touched  # test_apply_writes_both_counts_and_keeps_comments writes
def test_write_leaves_the_file_alone_and_takes_what_set_says(meshwright, run_path, torch):
    options = ("--write", "tuned.yaml", "--set", "train.evaluate=null", "--set", "data.workers=1")
    document = meshwright("tune", "dataloader", run_path, *QUICK, *options, "--json").json
    assert run_path.read_text() == RUN
    assert document["validation"] is None
    assert document["before"] == {"data.workers": 1}
    run = runfile.load("tuned.yaml")
    assert run.train.evaluate is None
    assert run.data.workers == document["values"]["data.workers"]


@pytest.mark.when_touched  # test_apply_writes_both_counts_and_keeps_comments writes the same file
def test_a_link_stays_a_link(meshwright, run_path, torch):
    link = run_path.with_name("link.yaml")
    link.symlink_to(run_path)
    assert meshwright("tune", "dataloader", link, *QUICK, "--apply").exit_code == 0
    assert link.is_symlink()
    assert "workers" in run_path.read_text()


def test_an_interrupt_writes_nothing(meshwright, run_path, torch, monkeypatch):
    from meshwright.training.data import Batches

    def interrupted(self: Batches, step: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Batches, "at", interrupted)
    assert meshwright("tune", "dataloader", run_path, *QUICK, "--apply").exit_code == 130
    assert run_path.read_text() == RUN


@pytest.mark.when_touched  # test_measured_stands_beside_predicted (test_train.py) predicts a step of this machine
def test_what_the_planner_expects_is_the_step(meshwright, run_path, torch):
    document = meshwright("tune", "dataloader", run_path, "--workers", "1", "--budget", "0.1s", "--json").json
    assert document["step"]["source"] == "predicted"
    assert document["step"]["seconds"] > 0
    assert document["values"]["data.workers"] == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--apply", "--write", "x.yaml"), "--apply and --write are both given"),
        (("--apply", "--set", "train.steps=9"), "--apply changes the file, and --set changes the run only"),
        (("--workers", "1,-2"), "auto, or 0 to 256"),
        (("--workers", "300"), "auto, or 0 to 256"),
        (("--budget", "soon"), "--budget is not a time"),
        (("--set", "engine=megatron"), "only the native engine"),
        (("--set", "data.workers=-1"), "data.workers"),
        (("--set", "data.source=gone.txt"), "gone.txt"),
        (("--write", "no/such/folder/x.yaml"), "cannot write"),
    ],
)
def test_bad_input_is_said_and_changes_nothing(meshwright, run_path, torch, options, words):
    outcome = meshwright("tune", "dataloader", run_path, *QUICK, *options)
    assert outcome.exit_code == 2
    assert words in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert run_path.read_text() == RUN
