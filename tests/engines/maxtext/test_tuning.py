"""Fine-tuning and evaluation with MaxText on this CPU, held against the native engine step by step.

Same weights, same first adapters, same batches with the same prompts left out of the loss, fp32.
"""

from __future__ import annotations

import json
import shutil

import pytest

pytest.importorskip("torch", reason="the native engine needs PyTorch")

ANSWERS = """
model: {name: toy, family: LlamaForCausalLM, hidden: 64, num_layers: 2, vocab: 258, ffn_hidden: 128,
  attention: {num_heads: 4, num_kv_heads: 2}}
data: {source: pairs.jsonl, tokenizer: bytes, sequence_length: 64}
train: {steps: 20, evaluate: {every_steps: 8, num_batches: 3}}
"""
ADAPTERS = f"{ANSWERS}task: lora\nlora: {{rank: 4, alpha: 8, targets: [query, key, value, output, gate, up, down]}}\n"


EXPERTS = (
    ADAPTERS.replace(
        "family: LlamaForCausalLM, hidden: 64, num_layers: 2, vocab: 258, ffn_hidden: 128",
        "family: Qwen3MoeForCausalLM, hidden: 64, num_layers: 2, vocab: 258",
    )
    .replace(
        "num_kv_heads: 2}}",
        "num_kv_heads: 2, head_dim: 16, qk_norm: true}, experts: {num_experts: 4, top_k: 2, ffn_hidden: 32}}",
    )
    .replace(", gate, up, down]", "]")
)


@pytest.fixture(scope="module")
def answers(make_toy):
    return make_toy("answers", ANSWERS)


@pytest.fixture(scope="module")
def adapters(make_toy):
    return make_toy("adapters", ADAPTERS)


def test_adapters_learn_answers_as_in_the_native_engine(adapters):
    taken = adapters.train("one")
    adapters.assert_native(taken)
    assert taken[-1]["loss"] < taken[0]["loss"] - 0.2
    assert [line["step"] for line in taken if "validation_loss" in line] == [8, 16, 20]
    record, native = adapters.record("one"), adapters.record("native")
    assert record["ending"] == "done"
    same = ("model_flops_per_token", "parameters", "trained_parameters", "tokens", "num_devices")
    assert [record["statistics"][key] for key in same] == [native["statistics"][key] for key in same]


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["sharded", "tensor", "context"])
def test_adapters_on_two_devices(adapters, plan):
    adapters.assert_native(adapters.train(plan, plan=plan))


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["one", "sharded", "pipeline", "context"])
def test_all_weights_learn_answers_as_in_the_native_engine(answers, plan):
    answers.assert_native(answers.train(plan, plan=plan))


@pytest.mark.slow
def test_adapters_of_attention_beside_experts_on_two_devices(make_toy):
    experts = make_toy("experts", EXPERTS)
    experts.assert_native(experts.train("two", plan="experts"))


@pytest.mark.slow
def test_adapters_go_on_on_two_devices_and_into_the_native_engine(adapters):
    """Twelve steps of one device, the other eight of two; merged, the native engine begins where they ended."""
    saves = "train.checkpoint={folder: saved, every_steps: 6}"
    adapters.assert_native(adapters.train("resumed", saves))
    where = ("checkpoint", "to-hf", "resumed/meshwright_run.yaml")
    code, stderr = adapters.run(*where, "adapter")
    assert code == 0, stderr
    config = json.loads((adapters.folder / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], len(config["target_modules"])) == (4, 8.0, 7)
    code, stderr = adapters.run(*where, "merged", "--merge", "--dtype=fp32")
    assert code == 0, stderr
    hardly = ("train.steps=1", "optimizer.warmup_steps=1", "optimizer.learning_rate=1.0e-9")
    begun = adapters.train("begun", "engine=native", "weights=merged", *hardly)
    assert begun[0]["validation_loss"] == pytest.approx(adapters.native[-1]["validation_loss"], rel=1e-5)

    for late in ("18", "20"):
        shutil.rmtree(adapters.folder / "saved" / "maxtext" / "checkpoints" / late)
    words = ("train", "run.yaml", "--out=resumed", "--resume", f"--set={saves}", "--set=weights=merged")
    code, stderr = adapters.run(*words)
    assert code == 2
    assert "the adapters belong to other weights" in stderr
    rest = adapters.train("resumed", saves, plan="sharded", resume=True)
    adapters.assert_native(rest)


@pytest.mark.slow
def test_training_ends_at_its_target_in_bf16(adapters):
    target = adapters.native[-1]["validation_loss"] + 0.1
    taken = adapters.train("target", "precision=bf16", f"train.evaluate.target_loss={target}")
    record = adapters.record("target")
    assert record["ending"] == "target"
    assert record["statistics"]["target"]["steps"] == len(taken)
    assert taken[-1]["validation_loss"] <= target
    assert taken[0]["loss"] == pytest.approx(adapters.native[0]["loss"], rel=0.01)
