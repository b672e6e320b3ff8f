"""Keys of other tools lead to the run file's."""

from __future__ import annotations

import pytest

from meshwright import runfile
from meshwright.errors import RunFileError
from meshwright.runfile import schema
from meshwright.runfile.synonyms import LORA_TARGETS, SYNONYMS

TEXT = """
model: llama3.1-8b
data: {sequence_length: 8192}
batch: {global_sequences: 64}
cluster: h100-8x8
"""


@pytest.mark.parametrize(
    "line", ["torchft: true", "train: {fault-tolerance: {enable: true}}", "train: {min_replicas: 1}"]
)
def test_training_on_without_a_lost_replica_is_refused_with_the_reason(line):
    with pytest.raises(RunFileError, match=r"unknown key(.|\n)*all processes restart(.|\n)*--max-restarts") as caught:
        runfile.loads(TEXT + line)
    assert "did you mean" not in str(caught.value)


def test_every_synonym_is_of_a_key_that_exists():
    assert set(SYNONYMS.values()) - set(schema.all_fields()) == set()


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("microbatch: 2", "batch.micro"),
        ("gradient_checkpointing: true", "parallel.recompute"),
        ("activation-checkpointing: true", "parallel.recompute"),
        ("strategy: fsdp", "parallel"),
        ("lr: 1e-4", "optimizer.learning_rate"),
        ("num_gpus: 8", "cluster"),
        ("parallel: {zero_stage: 3}", "parallel.sharding"),
        ("parallel: {tensor_model_parallel_size: 8}", "parallel.tensor"),
        ("optimizer: {Warmup: 100}", "optimizer.warmup_steps"),
        ("train: {max_steps: 100}", "train.steps"),
        ("task: lora\nlora: {load_in_4bit: true}", "lora.base_format"),
    ],
)
def test_an_unknown_key_leads_to_ours(line, key):
    with pytest.raises(RunFileError) as caught:
        runfile.loads(TEXT + line, file="run.yaml")
    assert caught.value.hint == f"the key is `{key}`"


def test_a_part_of_a_key_of_the_section_comes_before_keys_of_others():
    with pytest.raises(RunFileError) as caught:
        runfile.loads(TEXT + "task: lora\nlora: {base: nf4}", file="run.yaml")  # there is `model.base`
    assert caught.value.hint == "did you mean 'base_format'?"


@pytest.mark.parametrize(("word", "ours"), [("q_proj", "query"), ("gate_up_proj", "gate, up"), ("c_attn", "qkv")])
def test_a_matrix_by_its_name_in_peft_leads_to_ours(word, ours):
    with pytest.raises(RunFileError) as caught:
        runfile.loads(TEXT + f"task: lora\nlora: {{targets: [{word}]}}", file="run.yaml")
    assert caught.value.hint == f"it is called {ours} here, in every model"
    assert "too few" not in str(caught.value)


def test_every_target_that_a_hint_names_exists():
    for ours in LORA_TARGETS.values():
        run = runfile.loads(TEXT + f"task: lora\nlora: {{targets: [{ours}]}}", file="run.yaml")
        assert run.lora is not None
        assert ", ".join(run.lora.targets) == ours


def test_a_synonym_in_its_own_section_is_not_missing_as_well():
    with pytest.raises(RunFileError) as caught:
        runfile.loads(TEXT.replace("sequence_length", "seq_len"), file="run.yaml")
    assert caught.value.hint == "the key is `data.sequence_length`"
