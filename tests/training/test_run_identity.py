"""Identity of a run: what makes it, and what may change when it is resumed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from meshwright import runfile
from meshwright.errors import InputError
from meshwright.specs.plan import Plan
from meshwright.training.run_identity import (
    as_document,
    compare,
    continued,
    identity_from,
    identity_of_manifest,
    new_identity,
    read_identity,
    tokens_seen,
)


@pytest.fixture
def identity(tiny_text):
    def make(*overrides: str, plan: Plan | None = None, **fingerprints: str):
        run = runfile.loads(tiny_text, overrides=list(overrides))
        prints = {key.replace("_", "."): value for key, value in fingerprints.items()}
        return new_identity(run, plan=plan or Plan(), results=Path("out"), fingerprints=prints)

    return make


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("model.num_layers=1", "model.num_layers: 2 -> 1"),
        ("model.tied_embeddings=true", "model.tied_embeddings: False -> True"),
        ("model.rope.theta=500000.0", "model.rope.theta: 10000.0 -> 500000.0"),
        ("model.norm_epsilon=1e-6", "model.norm_epsilon: 1e-05 -> 1e-06"),
        ("data.source=python-stdlib", "data.source: synthetic -> python-stdlib"),
        ("data.sequence_length=8", "data.sequence_length: 16 -> 8"),
        ("data.tokenizer=bytes", "data.tokenizer: none -> bytes"),
        ("train.seed=1", "train.seed: 0 -> 1"),
        ("weights=elsewhere", "weights: none -> elsewhere"),
        ("engine=torchtitan", "engine: native -> torchtitan"),
    ],
    ids=lambda value: value.partition(" ")[0].partition("=")[0].rstrip(":"),
)
def test_what_makes_a_run_is_refused(identity, override, line):
    found = compare(identity(), identity(override))
    assert found.refused == (line,)


def test_holding_documents_out_changes_what_is_trained_on(identity):
    text = "data.source=python-stdlib"
    own = identity(text, "train.evaluate={}", "data.validation=a.txt")
    found = compare(identity(text), identity(text, "train.evaluate={}"))
    assert found.refused == ("data.holds_out_validation: False -> True",)
    assert compare(identity(text), own).refused == ()
    assert compare(own, identity(text, "train.evaluate={}", "data.validation={b: b.txt}")).refused == ()
    assert compare(identity(), identity("train.evaluate={}")).refused == ()  # random tokens


def test_every_difference_is_said_at_once(identity):
    found = compare(identity(), identity("model.num_layers=1", "train.seed=1", "optimizer.learning_rate=1e-5"))
    assert found.refused == ("model.num_layers: 2 -> 1", "train.seed: 0 -> 1")
    assert found.changed == ("optimizer.learning_rate: 0.0003 -> 1e-05",)


@pytest.mark.parametrize(
    "override",
    [
        "batch.global_sequences=8", "optimizer.schedule=linear", "optimizer.warmup_steps=2", "train.steps=8",
        "precision=fp32", "train.faults.spike=skip", "optimizer.weight_decay=0.2",
        "kernels.stored_activations={norm: int8}",
    ],
)  # fmt: skip
def test_what_may_change_is_noted(identity, override):
    found = compare(identity(), identity(override))
    assert found.refused == ()
    (line,) = found.changed
    assert line.startswith(override.partition("=")[0])


def test_a_plan_may_change(identity):
    found = compare(identity(), identity(plan=Plan(data_shard=2)))
    assert (found.refused, len(found.changed)) == ((), 1)


@pytest.mark.parametrize(
    "override", ["name=other", "data.workers=3", "train.checkpoint.keep=2", "kernels.weight_cache=on"]
)
def test_what_changes_no_update_is_no_difference(identity, override):
    assert compare(identity(), identity(override)).changed == ()


def test_lora_against_every_parameter(identity):
    found = compare(identity(), identity("task=lora", "lora.rank=4"))
    assert "task: pretrain -> lora" in found.refused
    assert "lora.rank: none -> 4" in found.refused
    back = compare(identity("task=lora", "lora.rank=4"), identity())
    assert "lora.rank: 4 -> none" in back.refused


def test_content_counts_and_not_where_it_lies(identity):
    here, there = "data.source=a.txt", "data.source=b.txt"
    moved = compare(identity(here, data_source="1"), identity(there, data_source="1"))
    assert (moved.refused, moved.changed) == ((), ("data.source: a.txt -> b.txt",))
    altered = compare(identity(here, data_source="1"), identity(here, data_source="2"))
    assert altered.refused == ("data.source: the content of a.txt has changed",)


def test_a_document_is_read_back(identity, tmp_path):
    held = identity("train.tokens=4096", "train.steps=null")
    assert identity_from(json.loads(json.dumps(as_document(held)))) == held
    (tmp_path / "identity.json").write_text('{"run_id": 3}')
    with pytest.raises(InputError, match="does not identify a run"):
        read_identity(tmp_path / "identity.json")
    assert read_identity(tmp_path / "other.json") is None


def test_an_old_manifest_is_compared_as_far_as_it_goes(identity, tiny_text):
    run = runfile.loads(tiny_text)
    manifest = {"shapes": asdict(run.model), "lora": None, "precision": "bf16", "weights": None}
    held = identity_of_manifest(json.loads(json.dumps(manifest)))
    assert held is not None
    found = compare(held, identity("model.num_layers=1", "train.seed=1"))
    assert found.refused == ("model.num_layers: 2 -> 1",)
    assert set(found.unknown) >= {"train.seed", "data.source", "data.sequence_length"}
    assert identity_of_manifest({"run": "older still"}) is None


def test_tokens_and_the_place_in_the_data_follow_the_batches_that_were_taken(identity):
    held = identity()  # 4 sequences of 16 tokens
    later = continued(held, identity("batch.global_sequences=8"), step=10, batch=12, changes=("x",))
    assert later.run_id == held.run_id
    assert later.batches == ((0, 64), (10, 128))
    assert tokens_seen(later.batches, steps=13) == 10 * 64 + 3 * 128
    assert 12 * 8 + later.sequence_offset == 12 * 4  # two batches were skipped: the data goes on where it was
    assert later.changes == ("after step 10: x",)
    again = continued(later, identity("batch.global_sequences=4"), step=13, batch=15, changes=())
    assert 15 * 4 + again.sequence_offset == 12 * 4 + 3 * 8
