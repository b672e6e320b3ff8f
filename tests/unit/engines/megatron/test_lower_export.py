"""A run that needs Transformer Engine is not trained here, and written for Megatron-LM and Megatron-Bridge."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright import runfile
from meshwright.engines.megatron import contract
from meshwright.engines.megatron.megatron_lm.arguments import known_names
from meshwright.errors import InputError
from meshwright.specs.run import Run

BASE = """
model: llama3.1-8b
data: {sequence_length: 8192}
batch: {global_sequences: 64, micro: 1}
cluster: h100-8x2
engine: megatron
parallel: {data_shard: 16, sharding: optimizer}
train: {steps: 10}
"""
LATENT = "model={hidden: 64, num_layers: 4, vocab: 256, ffn_hidden: 128, attention: {kind: mla, num_heads: 4, "
LATENT += "num_kv_heads: 4, head_dim: 24, value_head_dim: 16, kv_lora_rank: 32, rope_head_dim: 8}}"
PARTS = "model={hidden: 64, num_layers: 4, vocab: 256, ffn_hidden: 128, zero_centered_norms: true, "
PARTS += "attention: {num_heads: 4}}"
ALONE = {
    "fp8": ["precision=fp8"],
    "fp8_delayed": ["precision=fp8_delayed"],
    "fp8_blockwise": ["precision=fp8_blockwise"],
    "mxfp8": ["cluster=b200-8x2", "precision=mxfp8"],
    "nvfp4": ["cluster=b200-8x2", "precision=nvfp4"],
    "context": ["parallel={context: 4, tensor: 2, data_shard: 2, sharding: optimizer}"],
    "states": ["optimizer.states=bf16"],
    "states in host memory": ["parallel={data_shard: 16, sharding: optimizer, offload: optimizer}"],
    "latents": [LATENT],
    "latents of 5 heads": [LATENT.replace("heads: 4", "heads: 5")],
    "biases of some matrices": [PARTS.replace("num_heads: 4", "num_heads: 4, bias: true, output_bias: false")],
    "windows and gates": [PARTS.replace("num_heads: 4", "num_heads: 4, window: 128, window_pattern: [true, false], "
                                        "output_gate: true, sinks: true")],
    "windows everywhere": [PARTS.replace("num_heads: 4", "num_heads: 4, window: 64, window_pattern: [true]")],
    "latent experts": [PARTS.replace("ffn_hidden: 128", "ffn_hidden: 0").replace(
        "}}", "}, experts: {num_experts: 8, top_k: 2, ffn_hidden: 32, num_shared: 1, shared_gate: true, latent: 16}}")],
    "deepseek-v2-lite": ["model=deepseek-v2-lite", "data.sequence_length=4096",
                         "parallel={expert: 8, data_shard: 16, sharding: optimizer}"],
    "deepseek-v3": ["model=deepseek-v3", "data.sequence_length=4096", "precision=fp8_blockwise",
                    "parallel={expert: 2, pipeline: 8, data_shard: 2, sharding: optimizer}"],
}  # fmt: skip


def exported(name: str) -> tuple[Run, dict[str, str]]:
    run = runfile.loads(BASE, overrides=ALONE[name])
    launch = contract.lower_export(run, folder=Path("out"))
    assert launch.argv == ("python", "out/megatron_bridge.py")
    assert launch.num_processes == 16
    return run, dict(launch.files)


@pytest.mark.parametrize("name", ALONE)
def test_what_is_not_trained_here_is_said_to_others(name):
    run, files = exported(name)
    assert contract.check(run)
    assert contract.check_export(run) == ()
    assert set(files) == {"megatron_lm.args", "megatron_bridge.yaml", "megatron_bridge.py"}
    with pytest.raises(InputError, match="cannot do this run"):
        contract.lower(run, folder=Path("out"))
    for line in files["megatron_lm.args"].splitlines():
        assert line.split()[0].removeprefix("--") in known_names()


@pytest.mark.parametrize("file", ["megatron_lm.args", "megatron_bridge.yaml"])
@pytest.mark.parametrize("name", ALONE)
def test_it_comes_back_as_it_went(name, file, tmp_path):
    run, files = exported(name)
    path = tmp_path / f"{run.model.name}{Path(file).suffix}"
    path.write_text(files[file])
    found = contract.import_run(str(path), cluster=run.cluster_name)
    assert found.notes == ()
    again = runfile.loads(json.dumps(found.content))
    for key in ("model", "plan", "precision", "optimizer", "global_batch", "sequence_length"):
        assert getattr(again, key) == getattr(run, key), key
    stated = replace(run, stack=again.stack)  # Megatron's defaults of switches that the run leaves open
    assert (
        contract.lower_export(again, folder=Path("out")).files[file]
        == contract.lower_export(stated, folder=Path("out")).files[file]
    )


@pytest.mark.parametrize("file", ["megatron_lm.args", "megatron_bridge.yaml"])
@pytest.mark.parametrize(("share", "where"), [("1.0", "optimizer"), ("0.0", "none"), ("", None)])
def test_a_share_of_no_states_in_host_memory_is_read_as_none(file, share, where, tmp_path):
    """Without it Megatron-LM's options offload all of them, and Megatron-Bridge's fields none."""
    _, files = exported("states in host memory")
    lines = files[file].splitlines()
    (k,) = (k for k, line in enumerate(lines) if "offload" in line and "fraction" in line)
    lines[k : k + 1] = [lines[k].replace("1.0", share)] if share else []
    path = tmp_path / f"changed{Path(file).suffix}"
    path.write_text("\n".join(lines))
    found = contract.import_run(str(path), cluster="h100-8x2").content["parallel"].get("offload", "none")
    assert found == (where or ("optimizer" if file.endswith(".args") else "none"))


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("precision: fp8_rowwise", ["precision=fp8_rowwise"]),
        ("optimizer.states: 16-bit states need", ["optimizer.states=bf16", "parallel.sharding=none"]),
        ("model: Megatron-LM's YARN has an original context of 4096", [
            LATENT.replace("}}", "}, rope: {scaling: yarn, factor: 4, original_context: 8192}}")]),
        ("train.trackers", ["precision=fp8", "train.trackers=[tensorboard]"]),
        ("parallel.offload: Megatron keeps optimizer states in host memory only where its distributed", [
            "parallel={data_shard: 16, sharding: none, offload: optimizer}"]),
        ("parallel.offload: Megatron keeps optimizer states in host memory in fp32", [
            "optimizer.states=bf16", "parallel={data_shard: 16, sharding: optimizer, offload: optimizer}"]),
        ("stack.parameter_format: Megatron gathers weights in 8 bits from optimizer states on the device", [
            "precision=fp8", "stack.parameter_format=fp8",
            "parallel={data_shard: 16, sharding: optimizer, offload: optimizer}"]),
    ],
)  # fmt: skip
def test_what_others_cannot_do_either_is_refused(key, overrides):
    problems = contract.check_export(runfile.loads(BASE, overrides=overrides))
    assert any(str(problem).startswith(key) for problem in problems), problems


@pytest.mark.parametrize(("name", "is_given"), [("latents", False), ("latents of 5 heads", True)])
def test_heads_that_do_not_divide_the_width_have_a_width_of_their_own(name, is_given):
    """`validate_args` divides the width by the heads where it is not given, although latent attention ignores it."""
    _, files = exported(name)
    assert ("--kv-channels 24" in files["megatron_lm.args"].splitlines()) == is_given
    assert ("kv_channels: 24" in files["megatron_bridge.yaml"]) == is_given


def test_experts_have_the_kernels_of_transformer_engine():
    experts = {"model=mixtral-8x7b", "parallel={data_shard: 16, expert: 8, sharding: optimizer}"}
    for overrides, expected in ((experts, 1), ((), 0)):
        run = runfile.loads(BASE, overrides=tuple(overrides))
        files = contract.lower_export(run, folder=Path("out")).files
        lines = files["megatron_lm.args"].splitlines()
        for name in ("moe-grouped-gemm", "moe-permute-fusion", "moe-router-fusion"):
            assert lines.count(f"--{name}") == expected, name
            assert files["megatron_bridge.yaml"].count(f"{name.replace('-', '_')}: true") == expected, name
