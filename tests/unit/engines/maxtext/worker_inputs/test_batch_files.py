"""The run's batches as files: token files where a token ends documents, else arrays of every field."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from meshwright import runfile
from meshwright.engines.maxtext.worker_inputs import batch_files
from meshwright.training.data import Batches, open_data

RUN = """
model: {hidden: 64, num_layers: 2, vocab: 258, ffn_hidden: 128, attention: {num_heads: 4, num_kv_heads: 2}}
data: {source: notes.txt, tokenizer: bytes, sequence_length: 64}
batch: {global_sequences: 4, micro: 2}
cluster: here
engine: maxtext
parallel: {data_shard: 1, sharding: none, recompute: full}
train: {steps: 3}
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes the batches of `RUN` with overrides; the folder they are in, and the run."""
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("".join(f"{i} and {i + 1}. " for i in range(500)))
    pairs = [{"prompt": f"{i} + 1 is ", "answer": f"{i + 1}."} for i in range(200)]
    Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))

    def written(*overrides: str) -> tuple[Path, runfile.Run]:
        run = runfile.loads(RUN, overrides=overrides)
        folder = Path("out")
        batch_files.write(run, folder, request=batch_files.batch_request(run, run.plan, num_processes=1))
        return folder, run

    return written


def test_text_becomes_token_files(write):
    folder, _ = write()
    assert not batch_files.has_arrays(folder)
    assert batch_files.end_token(folder) in (256, 258)  # of the tokenizer; or nothing ends in these samples
    assert (folder / "tokens.bin").stat().st_size == 4 * 65 * 4 * (3 + 1)


def test_prompts_become_arrays(write):
    folder, run = write("data.source=pairs.jsonl")
    assert batch_files.has_arrays(folder)
    assert not (folder / "tokens.bin").exists()
    rows = np.load(folder / batch_files.TRAINING)
    assert rows.shape == (3 * 4, 4, 64)
    batches = Batches(samples=open_data(run).train, global_batch=4, seed=0)
    for step in range(3):
        batch = batches.at(step)
        for field, name in enumerate(batch_files.FIELDS):
            assert (rows[4 * step : 4 * step + 4, field] == getattr(batch, name).numpy()).all(), name
    assert (rows[:, 1] < 0).mean() > 0.5  # most of a sample are prompts
    assert (rows[:, 3] == -1).any()  # and some is padding


@pytest.mark.parametrize("overrides", [["task=lora"], ["train.evaluate={every_steps: 2, num_batches: 2}"]])
def test_adapters_and_evaluation_take_arrays(write, overrides):
    folder, _ = write(*overrides)
    assert batch_files.has_arrays(folder)
    assert (folder / batch_files.VALIDATION).is_file() == ("lora" not in overrides[0])


def test_other_batches_are_written_anew(write):
    folder, _ = write("task=lora")
    before = (folder / batch_files.TRAINING).stat().st_mtime_ns
    write("task=lora")
    assert (folder / batch_files.TRAINING).stat().st_mtime_ns == before
    write()
    assert not batch_files.has_arrays(folder)
