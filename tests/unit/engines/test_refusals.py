"""Runs that several engines cannot do are refused by each of them, with the same key and the same reason."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshwright import runfile
from meshwright.engines.base import find_engine
from meshwright.engines.megatron.check import notes_on_data as megatron_notes
from meshwright.engines.torchtitan.check import notes_on_data as torchtitan_notes
from meshwright.errors import InputError

OTHERS = ("torchtitan", "megatron", "maxtext")
ALL = ("native", *OTHERS)
EVALUATED = ["data.validation=v.txt"]


@pytest.mark.parametrize(
    ("engines", "problem", "overrides"),
    [
        (ALL, "train: says neither steps nor tokens", ["train.steps=null"]),
        (ALL, "precision: nvfp4", ["precision=nvfp4"]),
        (OTHERS, "parallel.offload", ["plan: offload: optimizer"]),
        (("native",), "parallel.offload: states of lion", ["plan: offload: optimizer", "optimizer.name=lion"]),
        (ALL, "train.balance_bias_rate", ["train.balance_bias_rate=0.1"]),
        (ALL, "train.evaluate: random", ["train.evaluate={}"]),
        (OTHERS, "train.z_loss", ["train.z_loss=0.001"]),
        (OTHERS, "train.label_smoothing", ["train.label_smoothing=0.1"]),
        (OTHERS, "train.neftune_alpha", ["train.neftune_alpha=5"]),
        (OTHERS, "train.residual_dropout", ["train.residual_dropout=0.1"]),
        (OTHERS, "train.attention_dropout", ["train.attention_dropout=0.1"]),
        (("native",), "train.attention_dropout: tensor ranks", ["train.attention_dropout=0.1", "plan: tensor: 2"]),
        (OTHERS, "data.added_tokens", ["data.added_tokens=[<a>]"]),
        (("torchtitan", "maxtext"), "stack.offloaded_activations", ["stack.offloaded_activations=0.5"]),
        (ALL, "stack.parameter_format: the engine has no setting for fp32", ["stack.parameter_format=fp32"]),
        (("native", "torchtitan"), "stack.gradient_format", ["stack.gradient_format=bf16"]),
        (ALL, "stack.gradient_format: the engine has no setting for fp8", ["stack.gradient_format=fp8"]),
        (ALL, "stack.reduces_once: the engine has no setting for true", ["stack.reduces_once=true"]),
        (OTHERS, "optimizer.average_decay", ["optimizer.average_decay=0.9"]),
        (OTHERS, "optimizer.rate_factors", ["optimizer.rate_factors={embedding: 0.1}"]),
        (
            ("native",),
            "optimizer.rate_factors.lora_b: the run has no adapters",
            ["optimizer.rate_factors={lora_b: 16}"],
        ),
        (
            ("native",),
            "optimizer.rate_factors.embedding: the embedding is frozen",
            ["task=lora", "optimizer.rate_factors={embedding: 2}"],
        ),
        (("native",), "optimizer.rate_factors.vectors: muon", ["optimizer={name: muon, rate_factors: {vectors: 2}}"]),
        (("torchtitan", "maxtext"), "train.balance_loss", ["mixture", "train.balance_loss=0.01"]),
        (("native", "megatron"), "train.balance_loss", ["train.balance_loss=0.01"]),
        (("torchtitan", "maxtext"), "train.router_z_loss: the engine", ["mixture", "train.router_z_loss=0.01"]),
        (ALL, "train.router_z_loss: inline has no experts", ["train.router_z_loss=0.01"]),
        (OTHERS, "train.faults.spike", ["train.faults.spike=stop"]),
        (OTHERS, "train.faults.not_finite", ["train.faults.not_finite=skip"]),
        (("maxtext",), "train.evaluate.skip_first", ["train.evaluate={skip_first: 2}", *EVALUATED]),
        (("maxtext",), "train.evaluate.num_sequences", ["train.evaluate={num_sequences: 32}", *EVALUATED]),
        (("maxtext",), "data.joined_documents", ["data.joined_documents=true"]),
        (
            ("torchtitan", "megatron"),
            "train.evaluate.num_sequences: whole global",
            ["train.evaluate={num_sequences: 3}", *EVALUATED],
        ),
        (
            ("torchtitan",),
            "train.checkpoint.every_steps: the step that reaches",
            [
                "train.evaluate={target_loss: 2.0, every_steps: 10}",
                "train.checkpoint={folder: s, every_steps: 4}",
                *EVALUATED,
            ],
        ),
        (OTHERS, "train.evaluate.workers", ["train.evaluate={workers: 2}", *EVALUATED]),
        (OTHERS, "data.workers", ["data.workers=2"]),
        (OTHERS, "gemm_tuning", ["gemm_tuning=tuned.csv"]),
        (OTHERS, "kernels", ["kernels.routes={swiglu: reference}"]),
        (OTHERS, "batch.label_tokens", ["batch.label_tokens=100"]),
        (OTHERS, "train.preference", ["train.preference=dpo"]),
        (("native",), "train.preference", ["train.preference=dpo", "plan: pipeline: 2"]),
        (("native",), "batch.label_tokens", ["batch.label_tokens=100", "plan: pipeline: 2"]),
        (("torchtitan", "maxtext"), "parallel.recompute.layers", ["plan: recompute: {layers: 2}"]),
    ],
)
def test_is_refused_with_the_key(small_run, engines, problem, overrides):
    for engine in engines:
        found = [str(one) for one in find_engine(engine).check(small_run(engine, *overrides))]
        assert any(one.startswith(problem) for one in found), (engine, found)


@pytest.mark.parametrize("engine", ALL)
def test_a_plain_run_is_accepted(small_run, engine):
    assert find_engine(engine).check(small_run(engine)) == ()


@pytest.mark.parametrize(
    ("engine", "overrides"),
    [
        ("native", ["train.steps=null", "plan: tensor: 1"]),
        ("torchtitan", ["parallel={data_shard: 2}"]),
        ("megatron", ["data.workers=2"]),
        ("maxtext", ["parallel={data_shard: 2, sharding: gradients}"]),
    ],
)
def test_what_is_refused_is_not_lowered(small_run, engine, overrides):
    run = small_run(engine, *overrides)
    key = find_engine(engine).check(run)[0].key
    with pytest.raises(InputError, match=f"the {engine} engine cannot do this run: {key}"):
        find_engine(engine).lower(run, folder=Path("out"))


@pytest.mark.parametrize("engine", ["torchtitan", "maxtext"])
@pytest.mark.parametrize(
    "plan",
    [
        "parallel={data_shard: 4, pipeline: 2, schedule: zero_bubble, sharding: parameters, recompute: full}",
        "parallel={data_shard: 8, sharding: parameters, recompute: {modules: [mlp]}}",
        "parallel={data_shard: 8, sharding: parameters, recompute: selective}",
    ],
)
def test_hints_work_when_they_are_followed(small_run, engine, plan):
    contract = find_engine(engine)
    refused = contract.check(small_run(engine, plan))
    offered = [hint for problem in refused if problem.key == "parallel" for hint in [problem.hint] if hint]
    assert offered
    for hint in offered:
        for one in hint.split(" or "):
            again = contract.check(small_run(engine, plan, one.removeprefix("--set ").strip("'")))
            assert hint not in [problem.hint for problem in again], one


NAMED = "model: {name}\ndata: {{sequence_length: 4096}}\nbatch: {{global_sequences: 64, micro: 1}}\ncluster: h100-8x8\n"
NAMED += "engine: {engine}\ntrain: {{steps: 10}}\n"


@pytest.mark.parametrize("engine", ALL)
@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2", "gpt-oss-20b", "gpt3-175b", "qwen3-8b"])
def test_hints_for_a_refused_model_are_settings_that_help(engine, name):
    """Each `--set` that a refusal offers is read, and the same problem does not come back."""
    text = NAMED.format(name=name, engine=engine)
    contract = find_engine(engine)
    for problem in contract.check(runfile.loads(text)):
        for setting in re.findall(r"--set '?([\w.]+=[^\s',]+)", problem.hint or ""):
            left = contract.check(runfile.loads(text, overrides=[setting]))
            assert (problem.key, problem.reason) not in [(one.key, one.reason) for one in left], setting


@pytest.mark.parametrize("engine", OTHERS)
def test_prediction_modules_are_refused_with_the_way_to_leave_them_out(engine):
    problems = find_engine(engine).check(runfile.loads(NAMED.format(name="deepseek-v3", engine=engine)))
    assert "--set model.num_mtp_layers=0" in [one.hint for one in problems if "multi-token" in one.reason]


@pytest.mark.parametrize("engine", ALL)
def test_a_weight_of_absent_prediction_modules_is_refused(small_run, engine):
    found = find_engine(engine).check(small_run(engine, "train.mtp_loss_weight=0.1"))
    assert "train.mtp_loss_weight" in [one.key for one in found]


@dataclass(frozen=True)
class Held:
    """Data with so many samples, of which a fourth of the positions is padding."""

    num_samples: int

    @property
    def corpus(self) -> SimpleNamespace:
        usage = SimpleNamespace(num_padded=3, padding_ratio=0.25)
        return SimpleNamespace(validation=self, train_usages={"training": usage})


def test_torchtitan_says_that_it_repeats_samples_of_a_small_validation_set(small_run):
    run = small_run("torchtitan", "train.evaluate={num_batches: 4}", *EVALUATED)
    taken = 4 * run.global_batch
    assert list(torchtitan_notes(run, Held(taken).corpus)) == []
    (note,) = torchtitan_notes(run, Held(taken - 1).corpus)
    assert note.endswith("train.evaluate.num_batches=3 takes each at most once")
    assert f"the validation data has {taken - 1}" in note


def test_megatron_says_that_its_router_counts_padding(small_run):
    balanced = small_run("megatron", "mixture", "train.balance_loss=0.01")
    (note,) = megatron_notes(balanced, Held(8).corpus)
    assert note.startswith("25.0 % of the positions of training are padding")
    assert "balance loss" in note
    (note,) = megatron_notes(small_run("megatron", "mixture", "train.router_z_loss=0.01"), Held(8).corpus)
    assert "counts in its z-loss;" in note
    assert list(megatron_notes(small_run("megatron", "mixture"), Held(8).corpus)) == []
    assert list(megatron_notes(small_run("megatron"), Held(8).corpus)) == []
