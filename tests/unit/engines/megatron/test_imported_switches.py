"""Switches of software that are imported: those that our files state, and those of other people's scripts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from meshwright import runfile
from meshwright.catalog.stacks import features_of
from meshwright.engines.megatron import contract
from meshwright.engines.megatron.facts import FACTS
from meshwright.engines.megatron.megatron_lm.arguments import known_names
from meshwright.engines.megatron.switches import ABSENT, BRIDGE_ONLY, SWITCHES
from meshwright.errors import RunFileError
from meshwright.planner.engines import AnyValue
from meshwright.specs.features import CudaGraphs, Dispatcher, Features, WireFormat
from meshwright.specs.run import Run

BASE = """
model: qwen3-30b-a3b
data: {sequence_length: 4096}
batch: {global_sequences: 64, micro: 1}
cluster: h100-8x2
engine: megatron
parallel: {data_shard: 8, tensor: 2, expert: 8, expert_tensor: 1, sharding: optimizer}
train: {steps: 10}
"""
NUM_LAYERS = 48
DENSE = ("model=qwen3-8b", "parallel={data_shard: 8, tensor: 2, sharding: optimizer}")
SPLIT_NOWHERE = ("parallel={data_shard: 16, sharding: optimizer}",)

NAMES = dict.fromkeys(name for name, _ in (*FACTS.switches, *FACTS.exported_switches))
NUMBERS = {"capacity_factor": [0.5, 1.0, 1.25], "offloaded_activations": [0.0, round(1 / NUM_LAYERS, 6), 0.25, 0.5]}
"""Values of switches that are numbers."""


def values(name: str) -> list[object]:
    """Values of a switch that the engine's facts name, and None."""
    allowed = [kinds for known, kinds in (*FACTS.switches, *FACTS.exported_switches) if known == name]
    if any(isinstance(kinds, AnyValue) for kinds in allowed):
        return [None, *NUMBERS[name]]
    return [None, *dict.fromkeys(value for kinds in allowed for value in kinds)]


IMPOSSIBLE = ("does not run on", "drops_tokens is false", "does not multiply")
"""Errors of combinations that no run has."""


@st.composite
def stated_runs(draw) -> Run:
    """Runs that Megatron's files can hold, with any combination of the switches that its facts name."""
    switches = {name: draw(st.sampled_from(values(name)), label=name) for name in NAMES}
    shape = draw(st.sampled_from([(), DENSE, SPLIT_NOWHERE]), label="shape")
    fp8 = draw(st.sampled_from(["bf16", "fp8", "mxfp8"]), label="precision")
    cluster = draw(st.sampled_from(["h100-8x2", "b200-8x2", "gb200-4x4"]), label="cluster")
    stack = json.dumps({name: value for name, value in switches.items() if value is not None})
    try:
        run = runfile.loads(BASE, overrides=[*shape, f"precision={fp8}", f"cluster={cluster}", f"stack={stack}"])
    except RunFileError as error:
        assume(not any(words in str(error) for words in IMPOSSIBLE))
        raise
    assume(not contract.check_export(run))
    return run


def imported(path: Path, cluster: str) -> tuple[Run, str]:
    found = contract.import_run(str(path), cluster=cluster)
    return runfile.loads(json.dumps(found.content)), "\n".join(found.notes)


def as_megatron_has_it(run: Run, *, is_bridge: bool) -> Features:
    """The switches of a run where those that it leaves open are Megatron's, and those without a meaning are None."""
    plan, has_experts = run.plan, run.model.experts is not None
    assert plan is not None
    defaults = Features(
        cuda_graphs=CudaGraphs.NONE, dispatcher=Dispatcher.ALL_TO_ALL, overlaps_experts=False, overlaps_tensor=False,
        fuses_experts=False, gradient_format=WireFormat.FP32, drops_tokens=False,
    )  # fmt: skip
    found = run.stack.features.or_else(defaults)
    absent = {}
    if plan.expert == 1:
        absent["overlaps_experts"] = None
    if plan.tensor == 1:
        absent["overlaps_tensor"] = None
    if not has_experts:
        absent |= dict.fromkeys(("dispatcher", "fuses_experts", "drops_tokens", "capacity_factor", "expert_imbalance"))
    elif found.has_capacity:
        absent |= {"capacity_factor": found.busiest_expert_ratio, "drops_tokens": None}
    if run.precision.name in ("bf16", "mxfp8"):
        absent["parameter_format"] = None
    if not is_bridge:
        absent |= {"fp8_attention": None, "fuses_experts": False if has_experts else None}
    absent |= {name: None for name in ("fp8_attention", "offloaded_activations") if not getattr(found, name)}
    return replace(found, **absent)


@pytest.mark.parametrize("name", ["megatron_lm.args", "megatron_bridge.yaml"])
def test_the_stack_of_an_export_is_that_of_its_run(name, tmp_path_factory):
    folder, seen = tmp_path_factory.mktemp("exports"), set()

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(run=stated_runs())
    def comes_back(run: Run) -> None:
        is_bridge = name.endswith("yaml")
        (folder / name).write_text(contract.lower_export(run, folder=folder).files[name])
        again, _ = imported(folder / name, run.cluster_name)
        assert again.stack.features == as_megatron_has_it(run, is_bridge=is_bridge)
        seen.update(again.stack.features.stated().items())
        (folder / name).write_text(contract.lower_export(again, folder=folder).files[name])
        assert imported(folder / name, run.cluster_name)[0].stack == again.stack

    comes_back()
    assert len(seen) > 15


def written(run: Run, folder: Path, *more: str) -> Path:
    lines = contract.lower_export(run, folder=folder).files["megatron_lm.args"].splitlines()
    off = {line.removeprefix("without ") for line in more if line.startswith("without ")}
    lines = [line for line in lines if line.split()[0] not in off]
    (folder / "megatron_lm.args").write_text("\n".join([*lines, *(m for m in more if m.startswith("--"))]) + "\n")
    return folder / "megatron_lm.args"


CASES = [
    ("--moe-token-dispatcher-type allgather", {"dispatcher": "all-to-all"}, "allgather; the estimate assumes"),
    ("--moe-token-dispatcher-type flex", {"dispatcher": "deepep"}, ""),
    ("--moe-token-dispatcher-type flex --moe-enable-deepep", {"dispatcher": "deepep"}, ""),
    ("--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep", {"dispatcher": "hybridep"}, ""),
    ("without --moe-token-dispatcher-type", {"dispatcher": "all-to-all"}, "allgather"),
    ("--overlap-moe-expert-parallel-comm", {"overlaps_experts": True}, ""),
    ("--overlap-moe-expert-parallel-comm --delay-wgrad-compute", {"overlaps_experts": True},
     "--delay-wgrad-compute; the estimate assumes that gradients of weights"),
    ("--tp-comm-overlap", {"overlaps_tensor": True}, ""),
    ("--tp-comm-overlap --disable-tp-comm-bulk-dgrad", {"overlaps_tensor": True}, "--disable-tp-comm-bulk-dgrad"),
    ("--enable-cuda-graph", {"cuda_graphs": "partial"}, "local with graphs of whole layers"),
    ("--external-cuda-graph --cuda-graph-scope attn moe_router moe_preprocess", {"cuda_graphs": "partial"}, ""),
    ("--cuda-graph-impl transformer_engine --cuda-graph-scope mamba", {"cuda_graphs": "state-space"}, ""),
    ("--cuda-graph-impl transformer_engine --cuda-graph-scope attn,mlp", {"cuda_graphs": "partial"}, "attn, mlp"),
    ("--cuda-graph-impl local --cuda-graph-scope full_iteration", {"cuda_graphs": "full"}, ""),
    ("--attention-backend unfused", {"attention": "unfused"}, ""),
    ("--attention-backend fused", {"attention": "cudnn"}, ""),
    ("--attention-backend flash", {"attention": "fa3"}, "does not say which FlashAttention"),
    ("--attention-backend local", {"attention": "unfused"}, ""),
    ("--attention-backend auto", {}, ""),
    ("--transformer-impl local", {"attention": "unfused"}, "--transformer-impl local; the estimate assumes"),
    ("--use-flash-attn", {}, "--use-flash-attn has no effect"),
    ("--grad-reduce-in-bf16", {"gradient_format": "bf16"}, ""),
    ("--accumulate-allreduce-grads-in-fp32", {"gradient_format": "fp32"}, ""),
    ("--accumulate-allreduce-grads-in-fp32 --grad-reduce-in-bf16", {"gradient_format": "bf16"}, ""),
    ("--cpu-offloading-num-layers 12", {"offloaded_activations": 0.25}, ""),
    ("--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather", {"parameter_format": "fp8"}, ""),
    ("--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather", {}, "--fp8-param-gather under mxfp8"),
    ("without --overlap-grad-reduce", {}, "that --overlap-grad-reduce is off; the estimate assumes"),
    ("without --overlap-param-gather", {}, "that --overlap-param-gather is off; the estimate assumes"),
    ("--moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity", {"capacity_factor": 1.5}, ""),
    ("--no-overlap-p2p-communication", {}, ""),
]  # fmt: skip
PLAIN = {
    "cuda_graphs": "none", "dispatcher": "all-to-all", "overlaps_experts": False, "overlaps_tensor": False,
    "fuses_experts": False, "gradient_format": "fp32", "drops_tokens": False,
}  # fmt: skip


@pytest.mark.parametrize(("options", "stack", "words"), CASES)
def test_a_switch_of_a_script_is_read_or_noted(options, stack, words, tmp_path):
    path = written(runfile.loads(BASE), tmp_path, *(options.splitlines()))
    found = contract.import_run(str(path), cluster="h100-8x2")
    wanted = PLAIN | stack
    if "capacity_factor" in stack:
        del wanted["drops_tokens"]
    assert found.content["stack"] == wanted
    notes = "\n".join(found.notes)
    assert words in notes
    assert bool(words) == bool(notes), notes


def test_stages_that_send_and_do_not_compute_are_noted(tmp_path):
    plan = "parallel={data_shard: 2, pipeline: 4, virtual_pipeline: 2, tensor: 2, schedule: interleaved}"
    run = runfile.loads(BASE, overrides=["model=qwen3-8b", plan, "parallel.layers_per_stage=null"])
    assert imported(written(run, tmp_path), "h100-8x2")[1] == ""
    _, notes = imported(written(run, tmp_path, "--no-overlap-p2p-communication"), "h100-8x2")
    assert notes.startswith("the run file does not contain --no-overlap-p2p-communication; the estimate assumes")


def test_gradients_of_fp16_are_as_narrow_as_bf16(tmp_path):
    run = runfile.loads(BASE)
    text = written(run, tmp_path).read_text().replace("--bf16\n", "--fp16\n")
    (tmp_path / "fp16.args").write_text(text)
    again, notes = imported(tmp_path / "fp16.args", "h100-8x2")
    assert (again.stack.features.gradient_format, again.precision.reduce_bytes) == (WireFormat.BF16, 2)
    assert "gradients are reduced in fp16" in notes
    (tmp_path / "fp16.args").write_text(text + "--accumulate-allreduce-grads-in-fp32\n")
    assert imported(tmp_path / "fp16.args", "h100-8x2")[0].stack.features.gradient_format is WireFormat.FP32


def test_kernels_that_a_cluster_lacks_are_noted(tmp_path):
    path = written(runfile.loads(BASE), tmp_path, "--moe-token-dispatcher-type flex",
                   "--moe-flex-dispatcher-backend hybridep", "--attention-backend fused")  # fmt: skip
    again, notes = imported(path, "mi300x-8x2")
    assert (again.stack.features.dispatcher, again.stack.features.attention) == (Dispatcher.ALL_TO_ALL, None)
    assert "--moe-flex-dispatcher-backend hybridep on these accelerators; the estimate assumes" in notes
    assert "--attention-backend fused on these accelerators; the estimate assumes" in notes


def test_estimates_of_scripts_that_differ_in_a_switch_differ(tmp_path):
    """A run file without Megatron-LM's defaults would mean the release's: gradients in bf16, overlapped tensors."""
    run, _ = imported(written(runfile.loads(BASE), tmp_path), "h100-8x2")
    known = features_of(run.stack, run.cluster.accelerator, precision="bf16")
    assert (known.gradient_format, known.overlaps_tensor) == (WireFormat.FP32, False)


def test_the_settings_are_options_or_fields():
    names = {key for switch in SWITCHES.values() for one in switch.settings.values() for key in one}
    others = {"grad_reduce_in_fp32", "fp8_dot_product_attention", *BRIDGE_ONLY}  # other names, or Bridge's alone
    assert {name.replace("_", "-") for name in names - others} <= known_names().keys()
    assert names >= ABSENT.keys()


ABSENT_FIELD = object()
BRIDGE = [
    ({"mixed_precision": "bf16_mixed"}, {"gradient_format": "fp32"}),
    ({"mixed_precision": "fp16_mixed"}, {"gradient_format": "bf16"}),
    ({"mixed_precision": {"bf16": True, "grad_reduce_in_fp32": False}}, {"gradient_format": "bf16"}),
    ({"mixed_precision": {"bf16": True}, "ddp.grad_reduce_in_fp32": False}, {"gradient_format": "fp32"}),
    ({"mixed_precision": None, "model.bf16": True, "ddp.grad_reduce_in_fp32": ABSENT_FIELD},
     {"gradient_format": "bf16"}),
    ({"mixed_precision": None, "model.bf16": True, "ddp.grad_reduce_in_fp32": True}, {"gradient_format": "fp32"}),
    ({"mixed_precision": "bf16_with_fp8_current_scaling_mixed"}, {"parameter_format": "fp8"}),
    ({"mixed_precision": "bf16_with_fp8_subchannel_scaling_mixed"}, {}),
    ({"mixed_precision": {"bf16": True, "fp8": "hybrid", "fp8_param": True}}, {"parameter_format": "fp8"}),
    ({"model.tp_comm_overlap": True}, {"overlaps_tensor": True}),
    ({"comm_overlap.tp_comm_overlap": True}, {"overlaps_tensor": True}),
    ({"comm_overlap.tp_comm_overlap": False, "model.tp_comm_overlap": True}, {}),
    ({"comm_overlap.tp_comm_overlap": True, "model.sequence_parallel": False}, {}),
    ({"comm_overlap": {"tp_comm_overlap": False, "overlap_moe_expert_parallel_comm": True}},
     {"overlaps_experts": True}),
    ({"model.overlap_moe_expert_parallel_comm": True}, {"overlaps_experts": True}),
    ({"model.cuda_graph_impl": "full_iteration"}, {"cuda_graphs": "full"}),
    ({"model.cuda_graph_impl": "transformer_engine",
      "model.cuda_graph_modules": ["attn", "moe_router", "moe_preprocess"]}, {"cuda_graphs": "partial"}),
    ({"model.moe_token_dispatcher_type": "flex"}, {"dispatcher": "deepep"}),
    ({"model.attention_backend": "flash", "model.flash_attention_version": 2}, {"attention": "fa2"}),
    ({"model.cpu_offloading": True, "model.cpu_offloading_num_layers": 24}, {"offloaded_activations": 0.5}),
    ({"model.cpu_offloading_num_layers": 24}, {}),
    ({"model.use_transformer_engine_op_fuser": True}, {"fuses_experts": True}),
    ({"model.moe_router_force_load_balancing": True}, {"expert_imbalance": 1.0}),
]  # fmt: skip


def bridge(folder: Path, changes: dict) -> Path:
    content = YAML().load(contract.lower_export(runfile.loads(BASE), folder=folder).files["megatron_bridge.yaml"])
    for name, value in changes.items():
        section, _, key = name.partition(".")
        if value is ABSENT_FIELD:
            del content[section][key]
        elif key:
            content.setdefault(section, {})[key] = value
        else:
            content[section] = value
    YAML().dump(content, folder / "run_config.yaml")
    return folder / "run_config.yaml"


@pytest.mark.parametrize(("changes", "stack"), BRIDGE)
def test_a_switch_of_bridge_is_read(changes, stack, tmp_path):
    found = contract.import_run(str(bridge(tmp_path, changes)), cluster="h100-8x2")
    assert found.content["stack"] == PLAIN | stack
    known = ("fp16", "sequence_parallel", "first_last_layers_bf16")
    assert not [note for note in found.notes if not any(word in note for word in known)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ddp.overlap_grad_reduce": False}, "that ddp.overlap_grad_reduce is off"),
        ({"ddp.overlap_param_gather": False}, "that ddp.overlap_param_gather is off"),
        ({"comm_overlap": {"tp_comm_overlap": False, "overlap_grad_reduce": False}},
         "that comm_overlap.overlap_grad_reduce is off"),
        ({"model.delay_wgrad_compute": True}, "model.delay_wgrad_compute; the estimate assumes"),
        ({"model.transformer_impl": "local"}, "model.transformer_impl local; the estimate assumes"),
        ({"model.cuda_graph_impl": "local"}, "model.cuda_graph_impl local with graphs of whole layers"),
        ({"model.moe_token_dispatcher_type": "allgather"}, "model.moe_token_dispatcher_type allgather"),
    ],
)  # fmt: skip
def test_a_switch_of_bridge_without_a_key_is_noted(changes, words, tmp_path):
    notes = contract.import_run(str(bridge(tmp_path, changes)), cluster="h100-8x2").notes
    assert len(notes) == 1
    assert words in notes[0]


def test_a_section_of_overlaps_has_defaults_of_its_own(tmp_path):
    off = {"ddp.overlap_grad_reduce": False, "ddp.overlap_param_gather": False}
    path = bridge(tmp_path, off | {"comm_overlap": {"tp_comm_overlap": False}})
    assert contract.import_run(str(path), cluster="h100-8x2").notes == ()
