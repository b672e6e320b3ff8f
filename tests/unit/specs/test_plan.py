"""Plans in words and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.specs.plan import MAX_STAGES, Plan, Sharding, listed_layers, read_layers


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_listed_layers_are_read_back(layers):
    assert read_layers(listed_layers(tuple(layers))) == tuple(layers)


@pytest.mark.parametrize("listed", ["", "4x", "4x0", f"1x{MAX_STAGES + 1}", "a", "4,,4"])
def test_what_is_no_list_of_layers(listed):
    with pytest.raises(ValueError, match=r"layers|invalid literal"):
        read_layers(listed)


@pytest.mark.parametrize(
    ("plan", "whole"),
    [
        (Plan(data_shard=8, sharding=Sharding.PARAMETERS), False),
        (Plan(data_shard=8, pipeline=2, sharding=Sharding.PARAMETERS), True),
        (Plan(data_replicate=8, sharding=Sharding.PARAMETERS), True),
        (Plan(data_shard=8), True),
    ],
)
def test_weights_that_stay_whole_between_micro_batches(plan, whole):
    assert plan.keeps_weights_whole is whole


def test_experts_lie_on_the_same_ranks_again():
    plan = Plan(tensor=2, context=2, pipeline=4, data_shard=8, expert=16)
    assert (plan.num_devices, plan.expert_data) == (128, 2)
