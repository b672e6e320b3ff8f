"""Run files times what is swept: every combination, and what cannot be is said before anything is trained."""

from __future__ import annotations

import pytest
from tests.record_folders import write_sweep

from meshwright.errors import InputError, RunFileError
from meshwright.records import trainings
from meshwright.records.sweep import ONLY_STEPS, configurations, parse_sweep
from meshwright.runfile import load


@pytest.fixture
def run_file(tmp_path, tiny_text):
    path = tmp_path / "tiny.yaml"
    path.write_text(tiny_text)
    return path


def made(*paths, sweeps=(), overrides=(), steps=5):
    return configurations(paths, sweeps=[parse_sweep(s) for s in sweeps], overrides=overrides, steps=steps)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("batch.micro=1,2, 4", ("1", "2", "4")),
        ("parallel={tensor: 2, data_shard: 1},auto", ("{tensor: 2, data_shard: 1}", "auto")),
        ("model='a,b',c", ("'a,b'", "c")),
        ("name=x=y", ("x=y",)),
    ],
)
def test_values_are_split_at_commas_outside_brackets_and_quotes(text, values):
    assert parse_sweep(text).values == values


@pytest.mark.parametrize("text", ["batch.micro", "batch.micro=", "=1,2", "batch.micro=1,,2", "batch.micro=2,2"])
def test_what_is_no_sweep_is_refused(text):
    with pytest.raises(InputError, match="--sweep"):
        parse_sweep(text)


def test_several_sweeps_give_all_combinations(run_file):
    found = made(run_file, sweeps=["batch.micro=1,2", "precision=bf16,fp32"])
    assert [c.name for c in found] == [
        "tiny micro=1 precision=bf16",
        "tiny micro=1 precision=fp32",
        "tiny micro=2 precision=bf16",
        "tiny micro=2 precision=fp32",
    ]
    assert len({c.digest for c in found}) == 4


def test_only_the_steps_are_left_of_a_run(run_file):
    text = run_file.read_text().replace("train: {", "train: {faults: {not_finite: roll_back}, ")
    run_file.write_text(text + "optimizer: {warmup_steps: 3}\n")
    (found,) = made(run_file, overrides=["train.seed=3"], steps=2)
    run = load(run_file, overrides=found.overrides)
    assert found.overrides[: len(ONLY_STEPS)] == ONLY_STEPS
    assert (run.num_steps, run.optimizer.warmup_steps, run.train.seed) == (2, 2, 3)
    assert run.train.checkpoint is None
    assert run.train.evaluate is None
    assert run.train.trackers == ()


def test_a_run_that_counts_tokens_takes_steps_here(run_file):
    run_file.write_text(run_file.read_text().replace("steps: 4", "tokens: 1e6"))
    (found,) = made(run_file, steps=7)
    assert load(run_file, overrides=found.overrides).num_steps == 7


def test_run_files_of_one_name_go_by_their_paths(run_file, tmp_path):
    other = tmp_path / "other" / "tiny.yaml"
    other.parent.mkdir()
    other.write_text(run_file.read_text())
    assert [c.name for c in made(run_file, other)] == [str(run_file), str(other)]


def test_what_cannot_be_together_is_one_configuration_refused(run_file):
    found = made(run_file, sweeps=["batch.micro=2,3"])
    assert found[0].refusal == ""
    assert "does not divide the global batch of 4 sequences: got 3" in found[1].refusal


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        ("batch.mikro=1,2", "unknown key"),
        ("batch.micro=1,many", "allowed: auto or a whole number"),
        ("batch.micro=3,5", "does not divide"),  # all of them
        ("engine=native,tensorflow", "tensorflow"),
        ("train.checkpoint={folder: here}", "must stay null"),
    ],
)
def test_bad_input_is_said_at_once(run_file, sweep, words):
    with pytest.raises(InputError, match=words):
        made(run_file, sweeps=[sweep])


def test_twice_is_once_too_often(run_file, tmp_path):
    with pytest.raises(InputError, match="a key twice"):
        made(run_file, sweeps=["batch.micro=1", "batch.micro=2"])
    with pytest.raises(InputError, match="run file is named twice"):
        made(run_file, run_file)
    with pytest.raises(InputError, match="too many configurations"):
        made(run_file, sweeps=["train.seed=" + ",".join(map(str, range(1001)))])
    with pytest.raises(RunFileError, match="no such file"):
        made(tmp_path / "tinny.yaml")


@pytest.mark.parametrize("cell", [",7,", ",0.44,", ",6e10,"])
def test_a_measured_training_without_a_value_is_refused(tmp_path, cell):
    write_sweep(tmp_path / "sweep")
    path = tmp_path / "sweep" / trainings.CSV_NAME
    path.write_text(path.read_text().replace(cell, ",,", 1))
    with pytest.raises(InputError, match=r"csv:2: \w+ is empty: got 'status ok', allowed: a number"):
        trainings.read(path.parent)
