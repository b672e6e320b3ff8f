"""Trainings on GPUs: numbers of each precision, compiled, on several GPUs, saved and resumed, profiled."""

from __future__ import annotations

import json

import pytest

from meshwright.training.profiling.categories import Category


def test_the_record_names_the_gpu(train):
    record = train("out")
    assert record["ending"] == "done"
    assert record["device"]["type"] == "cuda"
    assert 0 < record["statistics"]["peak_memory_bytes"] < record["device"]["memory_bytes"]


def test_bf16_follows_fp32(train, losses):
    train("wide", "precision=fp32")
    train("narrow", "precision=bf16")
    assert losses("narrow") == pytest.approx(losses("wide"), rel=0.02)
    assert losses("narrow")[-1] < losses("narrow")[0] - 0.5


@pytest.mark.parametrize("precision", ["fp8", "fp8_rowwise"])
def test_fp8_follows_bf16(train, losses, precision):
    torch = pytest.importorskip("torch")
    from meshwright.training import device

    if not device.multiplies_fp8(torch.device("cuda", 0)):
        pytest.skip("this GPU has no fp8 GEMM")
    train("wide")
    train("narrow", f"precision={precision}")
    assert losses("narrow") == pytest.approx(losses("wide"), rel=0.05)
    assert losses("narrow") != losses("wide")  # or nothing was narrow


def test_the_same_run_twice_has_the_same_losses_to_rounding(train, losses):
    train("first")
    train("second")
    assert losses("first") == pytest.approx(losses("second"), rel=1e-3)


def test_a_compiled_run_follows_the_eager_one(train, losses):
    train("eager")
    train("compiled", "train.compile=true")
    assert losses("compiled") == pytest.approx(losses("eager"), rel=0.01)


@pytest.mark.num_gpus(2)
@pytest.mark.parametrize(
    "parallel",
    [
        "{data_shard: 2, sharding: none}",
        "{data_shard: 2, sharding: optimizer}",
        "{data_shard: 2, sharding: parameters}",
        "{data_shard: 1, tensor: 2}",
        "{data_shard: 1, context: 2}",
        "{data_shard: 1, pipeline: 2}",
    ],
)
def test_two_gpus_through_nccl_follow_one(train, losses, parallel):
    train("one", "precision=fp32")
    record = train("two", "precision=fp32", f"parallel={parallel}")
    assert record["statistics"]["num_devices"] == 2
    assert losses("two") == pytest.approx(losses("one"), rel=1e-3)


@pytest.mark.num_gpus(2)
def test_experts_through_nccl_follow_one_gpu(train, losses):
    experts = ("model.experts={num_experts: 4, top_k: 2, ffn_hidden: 256}", "model.ffn_hidden=0", "precision=fp32",
               "model.family=MixtralForCausalLM")  # fmt: skip
    train("one", *experts)
    train("two", *experts, "parallel={data_shard: 2, expert: 2, sharding: parameters}")
    assert losses("two") == pytest.approx(losses("one"), rel=5e-3)  # a token may go to another expert


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_resumed_run_goes_on_as_the_whole_one(train, losses, asynchronous):
    """Asynchronous checkpoints are copied to pinned memory while steps go on."""
    saves = "train.checkpoint={{folder: {}, every_steps: 5, asynchronous: {}}}"
    train("whole", saves.format("saved-whole", asynchronous))
    mine = saves.format("saved", asynchronous)
    train("parts", mine, "train.steps=10")
    train("parts", mine, arguments=("--resume",))
    assert losses("parts") == pytest.approx(losses("whole"), rel=1e-3)


def test_the_table_of_kernels_knows_what_runs(train, tmp_path):
    """Time of kernels that no line of the table recognises; their names are in `unknown` of the summary."""
    train("out", arguments=("--profile",))
    found = json.loads((tmp_path / "out" / "profile" / "summary.json").read_text())
    assert found["device"] == "gpu"
    assert found["shares"][Category.OTHER.value] < 0.02, found["unknown"]
    assert found["shares"][Category.GEMM.value] > 0
    assert found["shares"][Category.ATTENTION.value] > 0
    assert sum(found["shares"].values()) == pytest.approx(1.0)
