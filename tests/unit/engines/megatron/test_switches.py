"""Switches of software in the files for Megatron-LM and Megatron-Bridge, and in Megatron's own configuration."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from meshwright import runfile
from meshwright.engines.base import find_engine
from meshwright.engines.beginning import note_on_switches
from meshwright.engines.megatron import contract
from meshwright.engines.megatron.megatron_bridge.configuration import sections
from meshwright.engines.megatron.megatron_lm.arguments import SET_OTHERWISE, known_names
from meshwright.engines.megatron.switches import capacity, transformer_switches
from meshwright.errors import InputError
from meshwright.specs.features import Dispatcher, Features

BASE = """
model: qwen3-30b-a3b
data: {sequence_length: 4096}
batch: {global_sequences: 64, micro: 1}
cluster: h100-8x2
engine: megatron
parallel: {data_shard: 8, tensor: 2, expert: 8, expert_tensor: 1, sharding: optimizer}
train: {steps: 10}
"""
PRESET = {
    "cuda_graph_impl": "none",
    "moe_token_dispatcher_type": "alltoall",
    "overlap_moe_expert_parallel_comm": False,
    "tp_comm_overlap": False,
}
"""Settings of a run that states no switch."""

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
    "capacity_factor=1.25": {"moe_expert_capacity_factor": 1.25, "moe_pad_expert_input_to_capacity": True},
    "expert_imbalance=1": {"moe_router_force_load_balancing": True},
    "drops_tokens=true": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    "offloaded_activations=0.25": {"cpu_offloading": True, "cpu_offloading_num_layers": 12},
}


def run_of(*switches: str, **keys: str):
    given = [f"{key}={value}" for key, value in keys.items()]
    return runfile.loads(BASE, overrides=[*(f"stack.{switch}" for switch in switches), *given])


@pytest.mark.parametrize("switch", CASES)
def test_a_switch_is_in_both_files(switch):
    run = run_of(switch)
    assert transformer_switches(run, run.plan) | capacity(run) == PRESET | CASES[switch]
    files = contract.lower_export(run, folder=Path("out")).files
    lines, model = files["megatron_lm.args"].splitlines(), YAML().load(files["megatron_bridge.yaml"])["model"]
    for key, value in CASES[switch].items():
        words = value if isinstance(value, list) else [value]
        line = " ".join(["--" + key.replace("_", "-"), *([] if value is True else map(str, words))])
        if key not in SET_OTHERWISE:
            assert line in lines
            assert line.split()[0][2:] in known_names()
        assert key in sections()["model"].fields
        written = model[key]["_name_"] if key == "attention_backend" else model[key]
        assert written == value
    assert note_on_switches(run, is_export=True) == ()


def test_no_export_forces_the_balance_of_experts_by_itself():
    """A router would learn nothing: the estimate's default stands for benchmarks."""
    for switches in ((), ("expert_imbalance=1.4",)):
        files = contract.lower_export(run_of(*switches), folder=Path("out")).files
        assert not [name for name, text in files.items() if re.search("force.load.balancing", text)]
    (note,) = note_on_switches(run_of("expert_imbalance=1.4"), is_export=True)
    assert note.endswith("stack.expert_imbalance: 1.4")


def test_formats_between_ranks():
    run = runfile.loads(BASE, overrides=["stack.gradient_format=bf16", "stack.parameter_format=fp8", "precision=fp8"])
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
    run = run_of("dispatcher=deepep", "cuda_graphs=none", "compiles=true")
    (note,) = note_on_switches(run)
    assert "stack.dispatcher: deepep" in note
    assert "cuda_graphs" not in note
    (note,) = note_on_switches(run, is_export=True)
    assert note.endswith("stack.compiles: true")


ALL_FOUR = ("capacity_factor=1.5", "fp8_attention=true", "fuses_experts=true", "offloaded_activations=0.5")


def test_only_the_file_for_bridge_has_attention_in_fp8_and_fused_experts():
    run = run_of("fp8_attention=true", "fuses_experts=true", precision="mxfp8", cluster="b200-8x2")
    launch = contract.lower_export(run, folder=Path("out"))
    assert launch.env == {"NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1"}
    written = YAML().load(launch.files["megatron_bridge.yaml"])
    assert written["mixed_precision"]["fp8_dot_product_attention"] is True
    fused = {"use_transformer_engine_op_fuser": True, "moe_mlp_glu_interleave_size": 32}
    assert fused.items() <= written["model"].items()
    assert fused.keys() <= sections()["model"].fields.keys()
    assert "fp8_dot_product_attention" in sections()["mixed_precision"].fields
    assert not {"fp8-dot-product-attention", "use-transformer-engine-op-fuser"} & known_names().keys()


@pytest.mark.parametrize(("name", "num_read"), [("megatron_bridge.yaml", 4), ("megatron_lm.args", 2)])
def test_what_is_written_is_imported_again(tmp_path, name, num_read):
    run = run_of(*ALL_FOUR, precision="mxfp8", cluster="b200-8x2")
    (tmp_path / name).write_text(contract.lower_export(run, folder=tmp_path).files[name])
    found = contract.import_run(str(tmp_path / name), cluster="b200-8x2").content["stack"]
    stated = run.stack.features.stated()
    assert len(found.items() & stated.items()) == num_read
    others = {key: value for key, value in found.items() if stated.get(key) != value}
    assert others == {
        "cuda_graphs": "none", "dispatcher": "all-to-all", "overlaps_experts": False, "overlaps_tensor": False,
        "gradient_format": "fp32", **({"fuses_experts": False} if name == "megatron_lm.args" else {}),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("switches", "key", "reason"),
    [
        ({"stack.fp8_attention": "true"}, "stack.fp8_attention", "no attention in fp8 under bf16"),
        ({"stack.fp8_attention": "true", "precision": "fp8_blockwise"}, "stack.fp8_attention", "blockwise"),
        ({"stack.parameter_format": "fp8"}, "stack.parameter_format", "not gathered in 8 bits under bf16"),
        ({"stack.fuses_experts": "true"}, "stack.fuses_experts", "only in mxfp8"),
        ({"optimizer.states": "int8"}, "optimizer.states", "none in int8"),
        ({"stack.offloaded_activations": "1"}, "stack.offloaded_activations", "at most 47 of 48"),
        ({"stack.offloaded_activations": "0.3"}, "stack.offloaded_activations", "are 14.4"),
        (
            {"stack.offloaded_activations": "0.5", "parallel.recompute": "full"},
            "stack.offloaded_activations",
            "under recomputation",
        ),
        ({"stack": "{capacity_factor: 1.25, dispatcher: deepep}"}, "stack.dispatcher", "does not pad"),
        (
            {"stack.capacity_factor": "1.25", "model": "llama3-8b", "parallel.expert": "1"},
            "stack.capacity_factor",
            "has no experts",
        ),
    ],
)
def test_conditions_of_megatron(switches, key, reason):
    run = runfile.loads(BASE, overrides=[f"{k}={v}" for k, v in switches.items()])
    problems = [problem for problem in contract.check_export(run) if problem.key == key]
    assert problems
    assert reason in problems[0].reason


@pytest.mark.parametrize("engine", ["native", "torchtitan", "maxtext"])
@pytest.mark.parametrize("switch", ["capacity_factor=1.25", "drops_tokens=true", "fp8_attention=true"])
def test_other_engines_refuse_what_changes_the_numbers(engine, switch):
    key = f"stack.{switch.partition('=')[0]}"
    with_it, without = run_of(switch, engine=engine, parallel="auto"), run_of(engine=engine, parallel="auto")
    assert key in [problem.key for problem in find_engine(engine).check(with_it)]
    assert key not in [problem.key for problem in find_engine(engine).check(without)]


def test_a_capacity_decides_what_the_busiest_rank_computes():
    assert Features(capacity_factor=1.5, expert_imbalance=1.4).busiest_expert_ratio == 1.5
    assert Features(drops_tokens=True, expert_imbalance=1.4).busiest_expert_ratio == 1.0
    assert Features(expert_imbalance=1.4).busiest_expert_ratio == 1.4
    for factor, busiest in ((1.25, 1.25), (3.0, 1.4)):  # DeepEP does not pad
        unpadded = Features(capacity_factor=factor, expert_imbalance=1.4, dispatcher=Dispatcher.DEEPEP)
        assert (unpadded.busiest_expert_ratio, unpadded.pads_experts) == (busiest, False)
    with pytest.raises(InputError, match="drops_tokens is false"):
        run_of("capacity_factor=1.5", "drops_tokens=false")


@pytest.mark.filterwarnings("ignore:full scope is deprecated")  # its own default
@pytest.mark.parametrize("switch", CASES)
def test_megatron_takes_them(switch):
    """The values are those of TransformerConfig's fields, by its own checks where these need no GPU."""
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    values: dict = {"num_layers": 2, "num_attention_heads": 4} | CASES[switch]
    if "offloaded" in switch:
        values["num_layers"] = 48
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
    config = TransformerConfig(hidden_size=64, **values)
    for key, value in values.items():
        if key != "cuda_graph_scope":
            assert getattr(config, key) == value
