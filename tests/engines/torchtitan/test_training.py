"""Trainings with torchtitan on this CPU, through the test-only shim, held against the native engine step by step.

Same weights (Hugging Face safetensors), same batches in the same order, fp32: losses and gradient norms agree to the
last digits that sums in another order leave.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed: pip install 'meshwright[torchtitan]'", allow_module_level=True)

import torch

from meshwright import runfile
from meshwright.engines.native.models import build_model, init_weights, materialize
from meshwright.engines.native.weights import save_weights

SHIM = Path(__file__).parent / "shim"
TOLERANCE = 2e-6  # relative; 5e-7 was the most on 20 steps of one and two processes
TEXT = """
model: {name: toy, family: LlamaForCausalLM, hidden: 64, num_layers: 2, vocab: 257, ffn_hidden: 128,
  attention: {num_heads: 4, num_kv_heads: 2}}
weights: start
data: {source: notes.txt, tokenizer: bytes, sequence_length: 64}
batch: {global_sequences: 8, micro: 2}
optimizer: {learning_rate: 2.0e-3, warmup_steps: 4, schedule: cosine}
precision: fp32
cluster: here
engine: torchtitan
train: {steps: 20}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run file, its text and the weights that it starts from."""
    folder = tmp_path_factory.mktemp("toy")
    (folder / "run.yaml").write_text(TEXT)
    notes = [
        f"{i} times {j} is {i * j}. " + ("\n\n" if j == 12 else "") for i in range(60) for j in range(13)
    ]
    (folder / "notes.txt").write_text("".join(notes))
    run = runfile.loads(TEXT)
    model = build_model(run.model)
    materialize(model, device=torch.device("cpu"))
    init_weights(model, seed=1)
    save_weights(model, folder / "start", dtype=torch.float32)
    return folder


def train(folder: Path, *arguments: str, with_shim: bool = True) -> subprocess.CompletedProcess[str]:
    """`meshwright train run.yaml` in a process of its own."""
    path = os.pathsep.join([*([str(SHIM)] if with_shim else []), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, "-m", "meshwright", "train", "run.yaml", "--json", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )


def steps(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def native(folder) -> list[dict[str, float]]:
    done = train(folder, "--set=engine=native", "--out=native", with_shim=False)
    assert done.returncode == 0, done.stderr
    return steps(folder / "native")


def assert_equal(taken: list[dict[str, float]], native: list[dict[str, float]]) -> None:
    for mine, theirs in zip(taken, native, strict=True):
        assert mine["learning_rate"] == pytest.approx(theirs["learning_rate"], rel=1e-12)
        for key in ("loss", "gradient_norm"):
            assert mine[key] == pytest.approx(theirs[key], rel=TOLERANCE), (mine["step"], key)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "plan"),
    [("one", "{data_shard: 1, sharding: none}"), ("two", "{data_shard: 2, sharding: parameters}")],
)
def test_losses_are_those_of_the_native_engine(folder, native, name, plan):
    done = train(folder, f"--set=parallel={plan}", f"--out={name}")
    assert done.returncode == 0, done.stderr
    taken = steps(folder / name)
    assert [line["step"] for line in taken] == list(range(1, 21))
    assert_equal(taken, native)
    assert taken[-1]["loss"] < taken[0]["loss"] - 0.5
    record = json.loads(done.stdout)
    assert record["ending"] == "done"
    assert record["run"]["engine"] == "torchtitan"
    assert record["software"]["torchtitan"] == "0.3.0"
    assert len(record["ranks"]["step_s"]) == record["statistics"]["num_devices"]
    assert record["statistics"]["tokens"] == 20 * 8 * 64
    assert (folder / name / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_model_parallel_losses_are_those_of_the_native_engine(folder, native, axis):
    plan = f"--set=parallel={{data_shard: 1, {axis}: 2, sharding: none}}"
    done = train(folder, plan, "--set=train.steps=4", f"--out={axis}")  # the warm-up's rates are the same
    assert done.returncode == 0, done.stderr
    assert_equal(steps(folder / axis), native[:4])


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_are_resumed_by_one_with_the_same_batches(folder, native):
    saves = ["--set=train.checkpoint={folder: saved, every_steps: 2}", "--out=resumed"]
    two, one = "{data_shard: 2, sharding: parameters}", "{data_shard: 1, sharding: none}"
    done = train(folder, f"--set=parallel={two}", "--set=train.steps=4", *saves)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(folder / "saved" / "step-4")
    again = train(folder, f"--set=parallel={one}", "--set=train.steps=4", *saves)
    assert again.returncode == 2
    assert "already holds checkpoints" in again.stderr
    done = train(folder, f"--set=parallel={one}", "--set=train.steps=4", "--resume", *saves)
    assert done.returncode == 0, done.stderr
    taken = steps(folder / "resumed")
    assert [line["step"] for line in taken] == [1, 2, 3, 4]
    assert_equal(taken, native[:4])


def test_one_flop_rule_for_both(folder, native):
    records = [json.loads((folder / name / "record.json").read_text()) for name in ("one", "native")]
    mine, theirs = (record["statistics"] for record in records)
    assert mine.keys() == theirs.keys()
    for key in ("model_flops_per_token", "parameters", "trained_parameters", "tokens", "num_devices"):
        assert mine[key] == theirs[key]


def test_without_an_accelerator_it_is_refused_before_anything_starts(folder):
    done = train(folder, "--out=refused", with_shim=False)
    assert done.returncode == 3
    assert "torchtitan 0.3.0 needs an accelerator" in done.stderr
    assert not (folder / "refused").exists()


def test_a_process_that_fails_is_reported_with_its_error(folder):
    done = train(folder, "--set=parallel={data_shard: 1, sharding: none}", "--set=model.vocab=64", "--set=weights=null",
                 "--out=failed")  # fmt: skip
    assert done.returncode in (1, 2)
    assert "vocabulary" in done.stderr, done.stderr
