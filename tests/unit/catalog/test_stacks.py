"""Software stacks by name."""

from __future__ import annotations

import pytest
from tests.every_member import check_every

from meshwright.catalog.accelerators import accelerator
from meshwright.catalog.lookup import engine_names
from meshwright.catalog.stacks import features_of, stack_facts, stack_for_engine, stack_names
from meshwright.cost.memory import memory_constants
from meshwright.errors import UnknownNameError
from meshwright.specs.features import AttentionKernel, CudaGraphs, Dispatcher, Features
from meshwright.specs.hardware import Stack


def test_every_stack_says_what_it_is():
    def check(name):
        facts = stack_facts(name)
        assert facts.name == name
        assert facts.title
        assert len(facts.source) > 10
        assert 2018 < facts.newest < 2030

    check_every(stack_names(), check)


@pytest.mark.parametrize("engine", engine_names())
def test_every_engine_runs_a_known_stack(engine):
    stack = stack_for_engine(engine)
    assert stack.framework in stack_names()
    assert stack.vintage is None


def test_every_stack_has_memory_constants():
    def check(name):
        assert memory_constants(Stack(framework=name)) is not None

    check_every(stack_names(), check)


def test_unknown_names_name_the_nearest():
    with pytest.raises(UnknownNameError, match="torchtitan"):
        stack_facts("torchtitn")
    with pytest.raises(UnknownNameError, match="megatron"):
        stack_for_engine("megatorn")


def test_traits_decide_what_the_model_asks_for():
    assert stack_facts("megatron-deepspeed").unfused_attention
    assert not stack_facts("nemo").unfused_attention


def test_megatron_on_amd_is_amds():
    assert stack_for_engine("megatron", vendor="AMD").framework == "primus-megatron"
    assert stack_for_engine("megatron", vendor="NVIDIA").framework == "megatron-bridge"


def test_every_switch_of_every_stack_has_a_value():
    def check(name):
        unknown = {key for key, value in vars(features_of(Stack(framework=name))).items() if value is None}
        assert unknown <= {
            "gradient_format",
            "parameter_format",
            "capacity_factor",
            "attention_tile",
        }  # else the precision's, none, and the kernel's

    check_every(stack_names(), check)


def test_releases_step():
    """The latest release up to a date decides, one for an accelerator before one for all; a run's own switch first."""
    gb200, h100 = accelerator("gb200"), accelerator("h100")

    def of(vintage, device, **switches):
        stack = Stack(framework="megatron-bridge", vintage=vintage, features=Features(**switches))
        return features_of(stack, device)

    assert of(2025.7, gb200).drops_tokens
    assert of(2025.9, h100).dispatcher is Dispatcher.ALL_TO_ALL
    assert of(2025.9, gb200).dispatcher is Dispatcher.HYBRIDEP
    assert of(2026.42, gb200).fuses_experts
    assert not of(2026.42, accelerator("b200")).fuses_experts
    assert of(2026.6, h100).cuda_graphs is CudaGraphs.NONE
    assert of(2026.6, gb200, cuda_graphs=CudaGraphs.NONE).cuda_graphs is CudaGraphs.NONE


@pytest.mark.parametrize("name", ["b200", "gb200", "b300", "gb300"])
def test_graphs_of_whole_iterations_are_mxfp8s(name):
    """Presets of Megatron-Bridge in 16 bits keep partial graphs; those in MXFP8 have whole ones, first on GB200."""
    device = accelerator(name)

    def graphs(vintage: float, precision: str) -> CudaGraphs | None:
        stack = Stack(framework="megatron-bridge", vintage=vintage)
        return features_of(stack, device, precision=precision).cuda_graphs

    assert graphs(2026.6, "bf16") is graphs(2026.6, "") is CudaGraphs.PARTIAL
    assert graphs(2026.6, "mxfp8") is CudaGraphs.FULL
    assert (graphs(2026.45, "mxfp8") is CudaGraphs.FULL) == (name in ("gb200", "gb300"))


@pytest.mark.parametrize(
    ("vintage", "device", "kernel"),
    [
        (2025.3, "b200", AttentionKernel.FA2),
        (2025.5, "b200", AttentionKernel.CUDNN),
        (2025.5, "gb300", AttentionKernel.CUDNN),
        (2025.5, "h100", AttentionKernel.FA2),
        (2025.8, "h100", AttentionKernel.CUDNN),
        (2025.8, "mi355x", AttentionKernel.TRITON),
    ],
)
def test_torchtitan_takes_cudnn_since_its_commits(vintage, device, kernel):
    stack = Stack(framework="torchtitan", vintage=vintage)
    assert features_of(stack, accelerator(device)).attention is kernel
