"""Software stacks by name."""

from __future__ import annotations

import pytest

from meshwright.catalog import engine_names
from meshwright.catalog.stacks import stack_facts, stack_for_engine, stack_names
from meshwright.cost.memory import memory_constants
from meshwright.errors import UnknownNameError
from meshwright.specs.hardware import Stack


@pytest.mark.parametrize("name", stack_names())
def test_every_stack_says_what_it_is(name):
    facts = stack_facts(name)
    assert facts.name == name
    assert facts.title
    assert len(facts.source) > 10
    assert 2018 < facts.newest < 2030


@pytest.mark.parametrize("engine", engine_names())
def test_every_engine_runs_a_known_stack(engine):
    stack = stack_for_engine(engine)
    assert stack.framework in stack_names()
    assert stack.vintage is None


@pytest.mark.parametrize("name", stack_names())
def test_every_stack_has_memory_constants(name):
    assert memory_constants(Stack(framework=name)) is not None


def test_unknown_names_name_the_nearest():
    with pytest.raises(UnknownNameError, match="torchtitan"):
        stack_facts("torchtitn")
    with pytest.raises(UnknownNameError, match="megatron"):
        stack_for_engine("megatorn")


def test_traits_decide_what_the_model_asks_for():
    assert stack_facts("megatron-deepspeed").unfused_attention
    assert not stack_facts("nemo").unfused_attention
    assert stack_facts("megatron-bridge").deduplicates
