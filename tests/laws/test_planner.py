"""Laws of the planner over random small models and clusters."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.plan_oracle import fitting_plans

from meshwright.catalog import lookup as catalog
from meshwright.catalog.lookup import engine_names
from meshwright.catalog.stacks import stack_for_engine
from meshwright.cost.plan_rows import plan_from_row
from meshwright.planner.engines import engine_facts
from meshwright.planner.estimate import estimate_plan
from meshwright.planner.legality import legal_mask, legality_context
from meshwright.planner.objective import goal_for
from meshwright.planner.request import PlanRequest
from meshwright.planner.savings import ranking_value
from meshwright.planner.screen import cost_model, no_event_graphs
from meshwright.planner.search import LAYOUT_COLUMNS, Distinct, search
from meshwright.planner.space import default_space, enumerate_plans, num_rows
from meshwright.planner.switches import open_values, with_values
from meshwright.specs.model import Attention, Experts, Model
from meshwright.specs.plan import Plan
from meshwright.specs.precision import PRECISIONS
from meshwright.specs.run import Objective

FEW = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def models(draw) -> Model:
    heads = draw(st.sampled_from([4, 6, 8]))
    experts = draw(st.sampled_from([0, 4, 6]))
    return Model(
        name="random",
        hidden=128 * heads,
        num_layers=draw(st.integers(2, 9)),
        vocab=32_000,
        attention=Attention(
            num_heads=heads, num_kv_heads=draw(st.sampled_from([h for h in (1, 2, heads) if heads % h == 0])),
            head_dim=128,
        ),
        ffn_hidden=draw(st.sampled_from([1024, 3072])),
        experts=Experts(num_experts=experts, top_k=2, ffn_hidden=512, num_shared=draw(st.integers(0, 1)))
        if experts
        else None,
    )  # fmt: skip


@st.composite
def requests(draw) -> PlanRequest:
    engine = draw(st.sampled_from(engine_names()))
    width, nodes = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (3, 2), (4, 2), (8, 1)]))
    cluster = catalog.cluster(f"{draw(st.sampled_from(['h100', 'mi300x']))}-{width}x{nodes}")
    # Devices with little memory, so that the memory filter matters.
    memory = draw(st.sampled_from([6e9, 10e9, 80e9]))
    small = replace(cluster.accelerator, memory_bytes=int(memory))
    return PlanRequest(
        model=draw(models()),
        cluster=replace(cluster, accelerator=small),
        seq_len=draw(st.sampled_from([1024, 4096, 6144])),
        global_batch=draw(st.sampled_from([1, 6, 16, 24])),
        precision=PRECISIONS[draw(st.sampled_from(["bf16", "fp8"]))],
        stack=stack_for_engine(engine),
        engine=engine,
    )


def reserved_bytes(model, plan):
    return np.broadcast_to(np.asarray(model.memory(plan).reserved_bytes), np.shape(plan.tensor))


def best_first(plans, values, distinct):
    """The values of all plans ascending; with layouts the value of the best plan of each layout."""
    if distinct is Distinct.PLANS or not len(values):
        return np.sort(values)
    layouts = np.concatenate([np.stack([getattr(p, name) for name in LAYOUT_COLUMNS], axis=1) for p in plans])
    kind = np.unique(layouts, axis=0, return_inverse=True)[1]
    return np.sort([values[kind == k].min() for k in range(kind.max() + 1)])


@settings(FEW, max_examples=50)
@given(requests(), st.sampled_from(Objective), st.sampled_from(Distinct), st.data())
def test_search_equals_exhaustive_search(request, objective, distinct, data):
    """Under each objective and each set of the switches that the planner may choose."""
    options = open_values(replace(request, stack=replace(request.stack, is_open=True)))
    request = with_values(request, {name: options[name] for name in options if data.draw(st.booleans(), label=name)})
    goal = goal_for(objective, cluster=request.cluster, num_steps=100)
    model = replace(cost_model(request), refine=no_event_graphs)
    plans = fitting_plans(request, default_space(request), model)
    values = [ranking_value(goal.value(model.steps(p)), p.stored_mask) for p in plans]
    expected = best_first(plans, np.concatenate([np.empty(0), *values]), distinct)[:7]
    result = search(request, top=7, goal=goal, model=model, distinct=distinct)
    assert [p.rank for p in result.plans] == pytest.approx(list(expected), rel=1e-12)
    if len(expected):
        best = search(request, top=1, goal=goal, model=model, limit=expected[0] * (1 + 1e-9)).best
        assert best is not None
        assert best.rank == pytest.approx(expected[0], rel=1e-12)


@FEW
@given(requests())
def test_the_bound_never_exceeds_the_step(request):
    model = cost_model(request)
    plan = enumerate_plans(default_space(request))
    plan = plan.take(np.flatnonzero(legal_mask(plan, context=legality_context(request))))
    if num_rows(plan):
        assert np.all(model.bound_s(plan) <= model.steps(plan).step_s * (1 + 1e-9))


@FEW
@given(requests(), st.booleans())
def test_the_least_memory_is_that_of_all_legal_plans(request, offloads):
    """The search looks at few of them where nothing fits."""
    if offloads and engine_facts(request.engine).offloads_optimizer:
        request = request.fixing(offload="optimizer")
    model, space = cost_model(request), default_space(request)
    plan = enumerate_plans(space)
    plan = plan.take(np.flatnonzero(legal_mask(plan, context=legality_context(request))))
    nothing = replace(model, memory_budget=replace(model.memory_budget, capacity_bytes=1.0))
    least = search(request, top=1, model=nothing).least_memory
    assert (least is not None) == bool(num_rows(plan))
    if least is not None:
        assert np.all(model.least_bytes(plan) <= reserved_bytes(model, plan) * (1 + 1e-9))
        assert least.reserved_bytes == pytest.approx(reserved_bytes(model, plan).min(), rel=1e-9)


@pytest.mark.when_touched  # test_search_equals_exhaustive_search searches the same
@FEW
@given(requests(), st.data())
def test_fixing_what_the_winner_has_changes_nothing(request, data):
    best = search(request, top=1).best
    if best is None:
        return
    name = data.draw(st.sampled_from([f.name for f in fields(Plan)]))
    again = search(request.fixing(**{name: getattr(best.plan, name)}), top=1).best
    assert again is not None
    assert again.rank <= best.rank * (1 + 1e-12)


@pytest.mark.when_touched  # test_search_equals_exhaustive_search searches the same
@FEW
@given(requests())
def test_more_memory_is_never_slower(request):
    model = replace(cost_model(request), refine=no_event_graphs)
    little = search(request, top=1, model=model).best
    twice = replace(model.memory_budget, capacity_bytes=2 * model.memory_budget.capacity_bytes)
    much = search(request, top=1, model=replace(model, memory_budget=twice)).best
    if little is not None:
        assert much is not None
        assert much.value <= little.value


@pytest.mark.when_touched  # test_search_equals_exhaustive_search leaves out what does not fit
@FEW
@given(requests(), st.data())
def test_what_fits_for_the_search_fits_for_the_estimate_and_the_reverse(request, data):
    """One memory budget: every returned plan fits when it is estimated, and what the search drops does not."""
    for found in search(request, top=5).plans:
        assert estimate_plan(request, found.plan).step.memory.fits
    space = default_space(request)
    plan = enumerate_plans(space)
    plan = plan.take(np.flatnonzero(legal_mask(plan, context=legality_context(request))))
    if not num_rows(plan):
        return
    model = cost_model(request)
    needs = reserved_bytes(model, plan)
    # The rows on both sides of the limit are those that two rules would tell apart.
    nearest = np.argsort(np.abs(np.log(needs / request.usable_bytes)))[:20]
    row = int(data.draw(st.sampled_from(list(nearest))))
    one = plan_from_row(plan.take(row), splits=space.splits)
    assert model.memory_budget.fits(needs[row]) == estimate_plan(request, one).step.memory.fits
