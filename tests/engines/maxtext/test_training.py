"""Trainings with MaxText on this CPU, held against the native engine step by step.

Same weights (Hugging Face safetensors), same batches in the same order, fp32: losses and gradient norms agree to the
last digits that sums in another order leave. Devices are virtual ones of one process.
"""

from __future__ import annotations

import shutil

import pytest

pytest.importorskip("torch", reason="the native engine needs PyTorch")

from meshwright.answers.comparison.study import compare_items

SHARDED = "{data_shard: 2, sharding: parameters, recompute: full}"
TOLERANCE = 3e-6  # relative; docs/guides/maxtext.md has what was measured
DENSE = """
model: {name: toy, family: LlamaForCausalLM, hidden: 64, num_layers: 2, vocab: 258, ffn_hidden: 128,
  attention: {num_heads: 4, num_kv_heads: 2}}
"""
MIXTURE = DENSE.replace(
    "family: LlamaForCausalLM, hidden: 64, num_layers: 2, vocab: 258, ffn_hidden: 128",
    "family: Qwen3MoeForCausalLM, hidden: 64, num_layers: 2, vocab: 258",
).replace(
    "num_kv_heads: 2}}",
    "num_kv_heads: 2, head_dim: 16, qk_norm: true}, experts: {num_experts: 4, top_k: 2, ffn_hidden: 32}}",
)

ROUTED_BY_SIGMOID = """
model: {name: toy, family: DeepseekV3ForCausalLM, hidden: 64, num_layers: 3, vocab: 258, ffn_hidden: 96,
  norm_epsilon: 1.0e-6, rope: {scaling: yarn, factor: 4, original_context: 32, mscale: 1.0, mscale_all_dims: 1.0},
  attention: {kind: mla, num_heads: 4, head_dim: 24, value_head_dim: 16, query_lora_rank: 24, kv_lora_rank: 16,
    rope_head_dim: 8},
  experts: {num_experts: 8, top_k: 3, ffn_hidden: 32, num_shared: 1, num_dense_layers: 1, router: sigmoid,
    num_groups: 4, groups_per_token: 2, routed_scale: 2.5}}
train: {steps: 20, balance_bias_rate: 0.02}
"""
ROUTED_BY_SOFTMAX = """
model: {name: toy, family: DeepseekV2ForCausalLM, hidden: 64, num_layers: 3, vocab: 258, ffn_hidden: 96,
  norm_epsilon: 1.0e-6,
  attention: {kind: mla, num_heads: 4, head_dim: 24, value_head_dim: 16, kv_lora_rank: 16, rope_head_dim: 8},
  experts: {num_experts: 8, top_k: 3, ffn_hidden: 32, num_shared: 2, num_dense_layers: 1, normalize_top_k: false,
    routed_scale: 1.5}}
"""


@pytest.fixture(scope="module")
def dense(make_toy):
    return make_toy("dense", DENSE)


@pytest.fixture(scope="module")
def mixture(make_toy):
    return make_toy("mixture", MIXTURE)


@pytest.fixture(scope="module")
def latents(make_toy):
    return make_toy("latents", ROUTED_BY_SIGMOID)


def test_the_command_trains_as_the_native_engine(dense):
    """Fully sharded over two devices."""
    code, stderr = dense.run("train", "run.yaml", "--json", "--out=sharded", f"--set=parallel={SHARDED}")
    assert code == 0, stderr
    taken = dense.steps("sharded")
    dense.assert_native(taken)
    assert taken[-1]["loss"] < taken[0]["loss"] - 0.5
    record, native = dense.record("sharded"), dense.record("native")
    assert record["ending"] == "done"
    assert dense.device("sharded") == dense.device("native")  # `bench train` measures engines side by side
    assert record["software"]["maxtext"] == "0.2.5"
    assert record["statistics"].keys() == native["statistics"].keys()
    for key in ("model_flops_per_token", "parameters", "tokens"):  # one FLOP rule for both
        assert record["statistics"][key] == native["statistics"][key]
    assert record["statistics"]["num_devices"] == 2
    assert record["statistics"]["peak_memory_bytes"] > 100 << 20
    assert (dense.folder / "sharded" / "report.html").is_file()
    logs = (dense.folder / "sharded" / "logs").iterdir()
    assert [path.name for path in logs] == ["rank-0.txt"]  # one process with virtual devices


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["one", "tensor", "pipeline", "context", "four"])
def test_other_axes(dense, plan):
    dense.assert_native(dense.train(plan, plan=plan))


@pytest.mark.slow
def test_tensors_of_a_custom_policy_give_the_same_steps(dense):
    plan = "parallel={data_shard: 2, sharding: parameters, recompute: {modules: [norm, activation, mlp]}}"
    dense.assert_native(dense.train("places", "stack.offloaded_activations=1", plan))


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["sharded", "four"])
def test_a_loss_in_tiles_is_that_of_all_tokens(dense, plan):
    dense.assert_native(dense.train(f"tiles-{plan}", "kernels.loss_chunk=32", plan=plan))


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["one", "experts"])
def test_a_mixture_of_experts(mixture, plan):
    mixture.assert_native(mixture.train(plan, plan=plan))


@pytest.mark.slow
def test_resumed_on_two_devices_and_continued_by_the_native_engine(dense):
    """Twelve steps of one device, the other eight of two; the weights then go back into the native engine."""
    saves = "train.checkpoint={folder: saved, every_steps: 6}"
    dense.assert_native(dense.train("resumed", saves))
    checkpoints = dense.folder / "saved" / "maxtext" / "checkpoints"
    assert sorted(int(path.name) for path in checkpoints.iterdir() if path.name.isdecimal()) == [6, 12, 18, 20]
    code, stderr = dense.run("train", "run.yaml", "--out=resumed", f"--set={saves}")
    assert code == 2
    assert "the results of a training are in this folder" in stderr

    code, stderr = dense.run(
        "checkpoint", "to-hf", "resumed/meshwright_run.yaml", "twelve", "--step=12", "--dtype=fp32"
    )
    assert code == 0, stderr
    begun = [
        dense.train(f"begun-{engine}", f"engine={engine}", "weights=twelve", "train.steps=4")
        for engine in ("maxtext", "native")
    ]
    assert begun[0][0]["loss"] == pytest.approx(begun[1][0]["loss"], rel=TOLERANCE)
    assert begun[0][0]["loss"] < dense.native[0]["loss"] - 0.5

    for late in ("18", "20"):
        shutil.rmtree(checkpoints / late)
    rest = dense.train("resumed", saves, plan="sharded", resume=True)
    dense.assert_native(rest)


@pytest.mark.slow
def test_weights_are_drawn_where_none_are_given(dense):
    taken = dense.train("drawn", "weights=null", "precision=bf16")
    assert taken[0]["loss"] == pytest.approx(dense.native[0]["loss"], rel=0.01)  # of the same distributions
    assert taken[-1]["loss"] < taken[0]["loss"] - 0.5


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["sharded", "experts", "context"])
def test_latents_with_biases_that_follow_the_load(latents, plan):
    latents.assert_native(latents.train(plan, plan=plan))


@pytest.mark.slow
def test_latents_with_softmax_scores(make_toy):
    toy = make_toy("softmax", ROUTED_BY_SOFTMAX)
    toy.assert_native(toy.train("one"))


@pytest.mark.slow
def test_routing_biases_go_on_and_out(latents):
    """Exported biases are those of the native engine after twelve steps; the other eight are taken elsewhere."""
    from safetensors.torch import load_file

    saves = "train.checkpoint={folder: saved, every_steps: 12}"
    latents.assert_native(latents.train("resumed", saves))
    latents.train("native-12", "engine=native", saves.replace("saved", "saved-native"))
    found = {}
    run_file = "resumed/meshwright_run.yaml"
    for out, where, dtype in (
        ("mine", run_file, "fp32"),
        ("theirs", "saved-native", "fp32"),
        ("rounded", run_file, "bf16"),
    ):
        code, stderr = latents.run("checkpoint", "to-hf", where, out, "--step=12", f"--dtype={dtype}")
        assert code == 0, stderr
        found[out] = load_file(latents.folder / out / "model.safetensors")
    mine, theirs, rounded = found.values()
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        is_bias = name.endswith("e_score_correction_bias")
        assert (mine[name] - tensor).abs().max() < (1e-7 if is_bias else 1e-5), name
        assert rounded[name].dtype == (tensor.dtype if is_bias else rounded["model.norm.weight"].dtype)

    shutil.rmtree(latents.folder / "saved" / "maxtext" / "checkpoints" / "20")
    latents.assert_native(latents.train("resumed", saves, plan="sharded", resume=True))


@pytest.mark.slow
def test_a_profile_has_the_categories_of_the_native_engine(dense):
    options = ("--json", "--only-steps", "--set=train.steps=12", "--profile-steps=6:8")
    for engine in ("maxtext", "native"):
        code, stderr = dense.run(
            "train", "run.yaml", *options, f"--out=profiled-{engine}", f"--set=engine={engine}",
            f"--set=parallel={SHARDED}",
        )  # fmt: skip
        assert code == 0, stderr
    record = dense.record("profiled-maxtext")
    found = record["profile"]
    assert found["steps"] == [6, 7, 8]
    assert sum(found["shares"].values()) == pytest.approx(1)
    for name in ("GEMM", "attention", "elementwise", "optimizer", "communication", "idle"):
        assert found["shares"][name] > 0, name
    assert found["unknown"] == []
    lines = dense.steps("profiled-maxtext")
    assert [line["step"] for line in lines if line.get("profiled")] == [5, 6, 7, 8, 9]
    assert record["statistics"]["step_s"]["n"] == 4  # without three that warm up
    sides = [str(dense.folder / f"profiled-{engine}") for engine in ("native", "maxtext")]
    compared = compare_items(sides, is_like_for_like=True)
    assert compared.gaps
    assert not any("not split" in text for text in compared.cautions)
