"""First adapters are the native engine's, and checkpoints of adapters belong to one base."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from meshwright import runfile
from meshwright.engines.maxtext.worker_inputs import adapters
from meshwright.errors import InputError
from meshwright.training.models import adapted, add_adapters, build_model, init_weights, materialize
from meshwright.training.weights import load_adapters, save_weights

RUN = """
model: {hidden: 32, num_layers: 2, vocab: 64, ffn_hidden: 64, attention: {num_heads: 2, num_kv_heads: 2}}
task: lora
lora: {rank: 4, alpha: 8, targets: [query, up]}
data: {sequence_length: 16}
batch: {global_sequences: 4}
cluster: here
engine: maxtext
train: {steps: 3, seed: 5, checkpoint: {folder: saved}}
"""


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def model(seed: int):
    run = runfile.loads(RUN)
    made = build_model(run.model)
    add_adapters(made, run.lora)
    materialize(made, device=torch.device("cpu"))
    init_weights(made, seed=seed)
    return made


def test_the_first_adapters_are_the_native_engines(tmp_path):
    adapters.write_initial_adapters(runfile.loads(RUN), tmp_path)
    adapters.write_initial_adapters(runfile.loads(RUN), tmp_path)  # of a training that goes on: they are there
    native, read = model(5), model(6)
    load_adapters(read, tmp_path / adapters.FOLDER)
    pairs = list(zip(adapted(native), adapted(read), strict=True))
    assert len(pairs) == 4
    for (name, wanted), (_, found) in pairs:
        assert torch.equal(found.lora_a.weight, wanted.lora_a.weight), name
        assert not found.lora_b.weight.any()


def test_checkpoints_belong_to_their_base(tmp_path):
    run = runfile.loads(RUN)
    plain = build_model(run.model)
    materialize(plain, device=torch.device("cpu"))
    for seed in (1, 2):
        init_weights(plain, seed=seed)
        save_weights(plain, tmp_path / f"base{seed}", dtype=torch.float32)
    first, second = (runfile.loads(RUN, overrides=[f"weights=base{seed}"]) for seed in (1, 2))
    adapters.refuse_other_base(first)  # there are no checkpoints yet
    adapters.write_base(first)
    adapters.write_base(second)  # what is known stays
    adapters.refuse_other_base(first)
    for other in (second, run):
        with pytest.raises(InputError, match="the adapters belong to other weights"):
            adapters.refuse_other_base(other)
