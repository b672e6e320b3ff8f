import numpy as np
import pytest

from meshwright.catalog import lookup as catalog
from meshwright.cost.collectives import all_to_all_s
from meshwright.cost.context_heads import COPIES, swap_s
from meshwright.cost.groups import groups_of
from meshwright.cost.tables import model_row, plan_row
from meshwright.specs.plan import Plan

TOKENS, ELEMENT_S = 1024.0, 1e-12


def swap(case, name: str, plan: Plan) -> float:
    group = groups_of(plan_row(plan), case().rates.network).context
    found = swap_s(
        model_row(catalog.model(name)), plan_row(plan), TOKENS, group=group, element_bytes=2.0, element_s=ELEMENT_S
    )
    return float(np.ravel(found)[0])


def test_values_of_gated_delta_net_go_to_ranks_of_heads_and_outputs_come_back(case):
    model, plan = catalog.model("qwen3.5-9b"), Plan(tensor=2, context=4, data_shard=4)
    linear = model.linear_attention
    there = 2 * (linear.keys + linear.values + linear.num_value_heads) / 2
    back = linear.values / 2
    group = groups_of(plan_row(plan), case().rates.network).context
    expected = all_to_all_s(2 * TOKENS * there, group) + all_to_all_s(2 * TOKENS * back, group)
    expected = float(np.ravel(expected)[0]) + COPIES * TOKENS * (there + back) * ELEMENT_S
    assert swap(case, "qwen3.5-9b", plan) == pytest.approx(model.linear_share * expected)


def test_groups_that_are_fewer_than_ranks_are_repeated(case):
    """Nemotron-H 8B has 8 groups: 16 ranks get each group twice, 4 ranks two groups each."""
    few, many = (swap(case, "nemotron-h-8b", Plan(context=c, data_shard=32 // c)) for c in (4, 16))
    model = catalog.model("nemotron-h-8b")
    more = COPIES * TOKENS * 2 * model.state_space.state_size * (16 - 8) * ELEMENT_S
    assert many - few > model.layer_pattern.count("M") / model.num_layers * more


def test_nothing_moves_without_context_ranks_or_scans(case):
    assert swap(case, "nemotron-h-8b", Plan(data_shard=32)) == 0
    assert swap(case, "llama3.1-8b", Plan(context=4, data_shard=8)) == 0


def test_a_step_pays_for_it(case):
    plans = [Plan(context=c, data_shard=32 // c) for c in (1, 2, 4)]
    seconds = []
    for plan in plans:
        built = case(model="nemotron-h-8b", plan=plan, seq_len=131_072, global_batch=32)
        seconds.append(float(np.ravel(built.steps().components_s["context_parallel"])[0]))
    assert seconds[0] == 0 < seconds[1]
