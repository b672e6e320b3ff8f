import numpy as np
import pytest
from tests.plan_requests import plan_request

from meshwright.catalog import lookup as catalog
from meshwright.errors import InputError
from meshwright.planner.legality import legal_mask, legality_context
from meshwright.planner.objective import Goal, goal_for
from meshwright.planner.screen import cost_model
from meshwright.planner.space import default_space, enumerate_plans
from meshwright.specs.run import Costs, Objective

H100 = catalog.cluster("h100-8x2")


@pytest.fixture(scope="module")
def scored():
    request = plan_request("llama3-8b", H100.name, engine="megatron")
    plan = enumerate_plans(default_space(request))
    plan = plan.take(np.flatnonzero(legal_mask(plan, context=legality_context(request)))[::29])
    model = cost_model(request)
    return model.steps(plan), model.bound_s(plan)


@pytest.mark.parametrize("objective", list(Objective))
def test_the_bound_of_the_value_is_below_the_value(objective, scored):
    steps, bound_s = scored
    costs = Costs(usd_per_device_hour=3.0, usd_per_kwh=0.1)
    goal = goal_for(objective, cluster=H100, costs=costs, num_steps=1000)
    assert np.all(goal.bound(bound_s) <= goal.value(steps) * (1 + 1e-9))


def test_cost_is_rent_and_electricity(scored):
    steps, _ = scored
    rent = Goal(objective=Objective.COST, num_devices=16, usd_per_device_hour=3.6)
    assert rent.value(steps) == pytest.approx(steps.step_s * 16 * 0.001)
    both = goal_for(Objective.COST, cluster=H100, costs=Costs(usd_per_device_hour=3.6, usd_per_kwh=0.36))
    assert both.value(steps) == pytest.approx(rent.value(steps) + both.energy_j(steps) * 1e-7)


def test_power_lies_between_idle_and_design(scored):
    steps, _ = scored
    goal = goal_for(Objective.ENERGY, cluster=H100)
    assert goal.power is not None
    watts = goal.value(steps) / steps.step_s
    factor = 16 * goal.power.pue_ratio
    assert np.all(watts >= factor * (goal.power.idle_w + goal.power.node_w) * (1 - 1e-9))
    assert np.all(watts <= factor * (goal.power.tdp_w + goal.power.node_w) * (1 + 1e-9))


def test_cost_without_a_price_is_refused():
    with pytest.raises(InputError, match="price"):
        Goal(objective=Objective.COST)
