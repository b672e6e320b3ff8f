"""Switches of software in the files for Megatron-LM and Megatron-Bridge, and in Megatron's own configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from meshwright import runfile
from meshwright.engines.beginning import note_on_switches
from meshwright.engines.megatron import contract
from meshwright.engines.megatron.megatron_bridge.configuration import sections
from meshwright.engines.megatron.megatron_lm.arguments import known_names
from meshwright.engines.megatron.switches import transformer_switches

BASE = """
model: qwen3-30b-a3b
data: {sequence_length: 4096}
batch: {global_sequences: 64, micro: 1}
cluster: h100-8x2
engine: megatron
parallel: {data_shard: 8, tensor: 2, expert: 8, expert_tensor: 1, sharding: optimizer}
train: {steps: 10}
"""
CASES = {
    "cuda_graphs=none": {"cuda_graph_impl": "none"},
    "cuda_graphs=partial": {
        "cuda_graph_impl": "transformer_engine",
        "cuda_graph_scope": ["attn", "moe_router", "moe_preprocess"],
    },
    "cuda_graphs=full": {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]},
    "dispatcher=all-to-all": {"moe_token_dispatcher_type": "alltoall"},
    "dispatcher=deepep": {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"},
    "dispatcher=hybridep": {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"},
    "overlaps_experts=true": {"overlap_moe_expert_parallel_comm": True},
    "overlaps_tensor=true": {"tp_comm_overlap": True},
    "attention=fa3": {"attention_backend": "flash"},
    "attention=cudnn": {"attention_backend": "fused"},
}


def run_of(*switches: str):
    return runfile.loads(BASE, overrides=[f"stack.{switch}" for switch in switches])


@pytest.mark.parametrize("switch", CASES)
def test_a_switch_is_in_both_files(switch):
    run = run_of(switch)
    assert transformer_switches(run, run.plan) == CASES[switch]
    files = contract.lower_export(run, folder=Path("out")).files
    lines, model = files["megatron_lm.args"].splitlines(), YAML().load(files["megatron_bridge.yaml"])["model"]
    for key, value in CASES[switch].items():
        words = value if isinstance(value, list) else [value]
        line = " ".join(["--" + key.replace("_", "-"), *([] if value is True else words)])
        assert line in lines
        assert line.split()[0][2:] in known_names()
        assert key in sections()["model"].fields
        written = model[key]["_name_"] if key == "attention_backend" else model[key]
        assert written == value
    assert note_on_switches(run, is_export=True) == ()


def test_formats_between_ranks():
    run = runfile.loads(
        BASE,
        overrides=["stack.gradient_format=bf16", "stack.parameter_format=fp8", "precision=fp8"],
    )
    files = contract.lower_export(run, folder=Path("out")).files
    assert {"--grad-reduce-in-bf16", "--fp8-param-gather"} <= set(files["megatron_lm.args"].splitlines())
    precision = YAML().load(files["megatron_bridge.yaml"])["mixed_precision"]
    assert (precision["grad_reduce_in_fp32"], precision["fp8_param_gather"]) == (False, True)


def test_our_own_processes_reduce_in_the_format_that_is_stated():
    found = {}
    for form in ("fp32", "bf16"):
        run = run_of(f"gradient_format={form}")
        launch = contract.lower(run, folder=Path("out"))
        found[form] = json.loads(launch.files["megatron.json"])["ddp"]["grad_reduce_in_fp32"]
        assert note_on_switches(run) == ()
    assert found == {"fp32": True, "bf16": False}


def test_what_is_not_set_is_noted():
    run = run_of("dispatcher=deepep", "cuda_graphs=none", "drops_tokens=true")
    (note,) = note_on_switches(run)
    assert "stack.dispatcher: deepep" in note
    assert "cuda_graphs" not in note
    (note,) = note_on_switches(run, is_export=True)
    assert note.endswith("stack.drops_tokens: true")


@pytest.mark.filterwarnings("ignore:full scope is deprecated")  # its own default
@pytest.mark.parametrize("switch", CASES)
def test_megatron_takes_them(switch):
    """The values are those of TransformerConfig's fields, by its own checks where these need no GPU."""
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    values = dict(CASES[switch])
    if "attention_backend" in values:
        values["attention_backend"] = AttnBackend[values["attention_backend"]]
    if switch in ("dispatcher=hybridep", "dispatcher=deepep"):
        values |= {
            "num_moe_experts": 8,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 64,
            "expert_model_parallel_size": 2,
        }
    if switch == "overlaps_experts=true":
        values |= {"num_moe_experts": 8, "moe_ffn_hidden_size": 64, "expert_model_parallel_size": 2, "bf16": True,
                   "moe_token_dispatcher_type": "alltoall"}  # fmt: skip
    if switch == "cuda_graphs=partial":
        values |= {"num_moe_experts": 8, "moe_ffn_hidden_size": 64}
    config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, **values)
    for key, value in values.items():
        if key != "cuda_graph_scope":
            assert getattr(config, key) == value
