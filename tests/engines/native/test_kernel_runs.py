"""Runs of the native engine with Triton kernels, in the interpreter, beside the same runs with references."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
from tests.kernel_cases import needs_interpreter
from tests.tiny_runs import SHARED_EXPERT, tiny_run

from meshwright import runfile
from meshwright.engines.base import Measuring, TrainOptions
from meshwright.engines.native import engine

pytestmark = [needs_interpreter, pytest.mark.usefixtures("without_measuring")]
README_RUN = Path(__file__).parents[3] / "examples" / "runs" / "tiny-llama-cpu.yaml"
README = (
    "model.hidden=64", "model.num_layers=1", "model.ffn_hidden=96", "data.sequence_length=32",
    "model.attention={num_heads: 4, num_kv_heads: 2}", "batch={global_sequences: 2, micro: 2}", "train.steps=3",
    "optimizer.warmup_steps=1", "data.tokenizer=bytes", "model.vocab=257", "precision=fp32",
    f"data.source={Path(__file__)}",  # short; its own is the standard library
)  # fmt: skip
GPT_OSS = (
    "model.experts={num_experts: 4, top_k: 2, ffn_hidden: 32, bias: true}", "model.ffn_hidden=0",
    "model.activation=clamped_swiglu",
    "model.attention={num_heads: 4, num_kv_heads: 2, sinks: true, bias: true, output_bias: true}",
)  # fmt: skip
DENSE_KERNELS = ("linear_cross_entropy", "swiglu", "rms_norm", "rotary", "adamw", "attention")
EXPERT_KERNELS = (*DENSE_KERNELS, "router", "grouped_gemm", "permute", "unpermute")
FP8_KERNELS = (
    "linear_cross_entropy", "rms_norm", "rotary", "adamw", "attention", "router", "permute", "unpermute",
    "fp8_cast", "fp8_gated_cast", "fp8_gated_gradients", "fp8_gemm", "fp8_grouped_gemm",
)  # fmt: skip
SHORT = ("model.num_layers=1", "model.vocab=32", "batch.global_sequences=2", "data.sequence_length=8", "train.steps=2")
RUNS = {
    "gpt-oss": (lambda *more: tiny_run(*GPT_OSS, *SHORT, *more), EXPERT_KERNELS, 2e-5),
    "readme": (
        lambda *more: runfile.loads(README_RUN.read_text(encoding="utf-8"), overrides=(*README, *more)),
        DENSE_KERNELS,
        2e-5,
    ),
    "mixture": (
        lambda *more: tiny_run(
            SHARED_EXPERT, "train.balance_loss=0.01", "train.router_z_loss=0.01", "model.num_layers=2", *more
        ),
        EXPERT_KERNELS,
        2e-5,
    ),
    "lora": (lambda *more: tiny_run("task=lora", "model.num_layers=2", *more), DENSE_KERNELS, 2e-5),
    # In bf16, which the interpreter cuts where PyTorch rounds; a value may round to its neighbour of 8 bits.
    "fp8 mixture": (
        lambda *more: tiny_run(
            SHARED_EXPERT, "precision=fp8_blockwise", "model.attention.num_kv_heads=4",
            "model.num_layers=1", *more,
        ),
        FP8_KERNELS,
        5e-3,
    ),
}  # fmt: skip


def losses(run, folder):
    """Losses of all steps, and the routes that were taken by operation."""
    engine.train(run, options=TrainOptions(folder=folder, quiet=True, measuring=Measuring.NEVER))
    lines = (folder / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    record = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    taken = {(row["op"], row["route"]) for row in record["kernels"]}
    return [json.loads(line)["loss"] for line in lines], taken


@pytest.mark.when_touched  # models/test_kernel_parity.py trains with kernels, unit/kernels has each of these
@pytest.mark.parametrize(
    "name", [n if n == "gpt-oss" else pytest.param(n, marks=pytest.mark.slow) for n in RUNS]
)  # it has all operations of 16 and 32 bits
@pytest.mark.when_touched  # training/models/test_kernel_parity.py takes the same steps without an engine
def test_losses_are_those_of_the_references(name, tmp_path):
    make, kernels, bound = RUNS[name]
    found = {}
    for route in ("reference", "triton"):
        chosen = ", ".join(f"{op}: {route}" for op in kernels)
        run = make("batch.micro=2", f"kernels.routes={{{chosen}}}")
        found[route], taken = losses(run, tmp_path / route)
        assert {(op, route) for op in kernels} <= taken
    assert found["triton"] == pytest.approx(found["reference"], rel=bound)
    assert found["reference"][-1] != found["reference"][0]


@pytest.fixture(scope="module")
def losses_of_the_readme(tmp_path_factory):
    """Losses of the README's run as it stands."""
    plain = runfile.loads(README_RUN.read_text(encoding="utf-8"), overrides=README)
    return losses(plain, tmp_path_factory.mktemp("plain"))[0]


@pytest.mark.parametrize(
    ("chunk", "tokens"),
    [
        ("16", 16),
        pytest.param("all", 64, marks=pytest.mark.slow),
        pytest.param("auto", 64, marks=pytest.mark.when_touched),
    ],  # auto comes to all
)
def test_the_chunk_of_the_loss_is_what_the_run_says(chunk, tokens, tmp_path, losses_of_the_readme):
    """Losses are those of any other chunk, and the record has its tokens; 64 are those of a micro-batch."""
    run = runfile.loads(README_RUN.read_text(encoding="utf-8"), overrides=(*README, f"kernels.loss_chunk={chunk}"))
    found, _ = losses(run, tmp_path)
    record = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))
    row = next(row for row in record["kernels"] if row["op"] == "linear_cross_entropy")
    assert (row["chunk_tokens"], row["num_chunks"]) == (tokens, 64 // tokens)
    assert found == pytest.approx(losses_of_the_readme, rel=1e-6)
