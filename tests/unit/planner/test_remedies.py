"""The fewest changes that let an asked plan run."""

from dataclasses import replace

import pytest
from tests.plan_requests import plan_request

from meshwright import runfile
from meshwright.answers.documents.plan import why_not_sentence
from meshwright.answers.plan_ranking import plan_run
from meshwright.cost.tables import plan_row
from meshwright.engines.base import check_export
from meshwright.planner.explain import WhyNot, WhyNotVerdict, explain_infeasible, why_not
from meshwright.planner.legality import legality_context, violations
from meshwright.planner.remedies import _narrower, forced_changes, with_fixed
from meshwright.planner.request import PlanRequest, request_for
from meshwright.planner.screen import cost_model
from meshwright.planner.search import PlanResult, search
from meshwright.specs.plan import Offload, Plan, Recompute, Schedule, Sharding
from meshwright.specs.run import StateFormat, with_plan


def request(model="llama3-70b", cluster="h100-8x4", engine="native", batch=64) -> PlanRequest:
    return plan_request(model, cluster, engine=engine, global_batch=batch)


def runs(asked: PlanRequest, plan: Plan) -> bool:
    model = cost_model(asked)
    fits = model.memory_budget.fits(model.memory(plan_row(plan)).reserved_bytes)
    return not violations(plan, context=legality_context(asked)) and bool(fits)


@pytest.fixture(scope="module")
def result() -> PlanResult:
    return search(request(), top=1)


def ask(result: PlanResult, **fixed) -> WhyNot:
    assert result.best is not None
    return why_not(result.request, fixed, winner=result.best)


def test_one_change_is_enough_where_one_is(result):
    answer = ask(result, tensor=1, pipeline=1, context=1, sharding=Sharding.PARAMETERS, recompute=Recompute.NONE)
    assert answer.verdict is WhyNotVerdict.DOES_NOT_FIT
    assert answer.remedies
    assert all(len(remedy.changes) == 1 for remedy in answer.remedies)
    assert "it runs without recompute=none" in why_not_sentence(answer)
    for remedy in answer.remedies:
        assert remedy.ratio == pytest.approx(search(_changed(answer, remedy), top=1).best.step_s / result.best.step_s)


def _changed(answer: WhyNot, remedy) -> PlanRequest:
    dropped = {text.removeprefix("without ").partition("=")[0] for text in remedy.changes}
    return request().fixing(**{k: v for k, v in answer.fixed.items() if k not in dropped})


def test_two_changes_where_none_alone_helps(result):
    answer = ask(result, tensor=3, pipeline=7, micro_batch=1)
    assert answer.verdict is WhyNotVerdict.ILLEGAL
    assert answer.remedies[0].changes == ("without tensor=3", "without pipeline=7")
    assert answer.remedies[0].plan.micro_batch == 1


def test_a_question_is_not_given_up_as_a_whole(result):
    assert ask(result, tensor=3).remedies == ()
    assert ask(result, tensor=3, pipeline=7).remedies == ()


@pytest.mark.parametrize("engine", ["native", "megatron"])
def test_settings_that_save_memory_come_from_the_engine(engine):
    asked = replace(request("llama3.1-8b", "h100-8x1", engine), global_batch=8)
    best = search(asked, top=1).best
    fixed = {"data_shard": 8, "sharding": Sharding.NONE, "recompute": Recompute.FULL}
    answer = why_not(asked, fixed, winner=best)
    texts = [text for remedy in answer.remedies for text in remedy.changes]
    assert texts
    assert engine == "native" or "with offload=optimizer" not in texts  # only it runs that
    assert engine == "native" or not any("optimizer.states" in text for text in texts)


ACCEPTED = """
model: llama3.1-8b
data: {{sequence_length: 4096}}
batch: {{global_sequences: 64, micro: 1}}
cluster: h100-8x2
engine: {engine}
parallel: {{data_shard: 16, sharding: {sharding}, recompute: {recompute}}}
train: {{steps: 10, compile: {compile}}}
"""
SHARDINGS = {"native": "optimizer", "megatron": "optimizer", "torchtitan": "parameters", "maxtext": "parameters"}


@pytest.mark.parametrize("compiles", ["false", "true"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("engine", SHARDINGS)
def test_a_setting_that_saves_memory_is_accepted_by_the_engine_for_which_it_is_named(engine, recompute, compiles):
    given = {"engine": engine, "sharding": SHARDINGS[engine], "recompute": recompute, "compile": compiles}
    run = runfile.loads(ACCEPTED.format(**given))
    refused = set(check_export(run))
    asked = request_for(run)
    for change in _narrower(asked):
        changed = change.apply(asked)
        assert run.plan is not None
        plan = replace(run.plan, **changed.fixed)
        states = StateFormat.BF16 if changed.precision != asked.precision else run.optimizer.states
        told = replace(
            run,
            plan=plan,
            precision=changed.precision,
            optimizer=replace(run.optimizer, states=states),
            kernels=replace(changed.kernels, is_storage_open=run.kernels.is_storage_open),
        )
        assert told != run
        assert set(check_export(told)) <= refused, change.text


QUESTIONS = (
    {"tensor": 1, "pipeline": 1, "recompute": Recompute.NONE, "micro_batch": 4},
    {"tensor": 1, "data_replicate": 4, "recompute": Recompute.NONE, "micro_batch": 2},
)


@pytest.mark.when_touched  # engines/test_planned_is_exported.py exports plans of each engine
@pytest.mark.parametrize("question", QUESTIONS, ids=["whole", "replicated"])
@pytest.mark.parametrize("engine", SHARDINGS)
def test_the_plan_of_a_remedy_is_exported(engine, question):
    """Megatron's search has sharded parameters, which nothing here writes for it: no remedy needs them."""
    text = ACCEPTED.partition("parallel:")[0].format(engine=engine).replace("llama3.1-8b", "llama3-70b")
    run = runfile.loads(text.replace("h100-8x2", "h100-8x4").replace(", micro: 1", "") + "train: {steps: 10}\n")
    answers = plan_run(run, top=1, why_not=[question]).why_not
    refused = set(check_export(run))
    for remedy in answers[0].remedies:
        assert set(check_export(with_plan(run, remedy.plan))) <= refused, remedy
    fits = "stack.offloaded_activations" in answers[0].software  # which the planner chooses where nothing else fits
    assert answers[0].remedies or fits or engine in ("megatron", "maxtext")


def test_any_engine_keeps_optimizer_states_in_host_memory():
    texts = [change.text for change in _narrower(request(engine="any"))]
    assert "with offload=optimizer" in texts
    assert "with kernels.stored_activations={feed_forward: e4m3}" in texts


@pytest.mark.parametrize("engine", [*SHARDINGS, "any"])
def test_what_does_not_fit_is_offered_only_what_the_engine_runs(engine):
    """One device more is offered to each; states in host memory are tried before, where the engine runs them."""
    found = search(request("llama3.1-8b", "h100-1x1", engine, batch=1), top=1)
    assert found.best is None
    told = explain_infeasible(found)
    assert told.suggestions
    assert not any("host memory" in text for text in told.suggestions)
    assert any("offload" in note for note in found.space.untried) == (engine in ("native", "megatron", "any"))


def test_the_fewest_choices_that_have_to_change(result):
    asked = {"micro_batch": 2}
    answer = ask(result, **asked)
    assert answer.verdict is WhyNotVerdict.SLOWER
    winner, loser = result.best.plan, answer.comparison.loser.plan
    assert answer.forced
    assert f"the rest can stay but for {', '.join(answer.forced)}" in why_not_sentence(answer)
    assert not runs(result.request, with_fixed(winner, asked, 32))
    names = {text.partition("=")[0] for text in answer.forced}
    changed = {name: getattr(loser, name) for name in names | {"recompute"} if name.startswith("recompute")}
    changed |= {name: getattr(loser, name) for name in names}
    assert runs(result.request, with_fixed(winner, {**changed, **asked}, 32))


def test_nothing_has_to_change_with_what_runs_anyway(result):
    plan = result.best.plan
    assert forced_changes(result.request, {"offload": Offload.NONE}, winner=plan, loser=plan) == ()


@pytest.mark.parametrize(
    ("layers", "pipeline", "virtual", "schedule"),
    [
        ((32,), 1, 1, Schedule.INTERLEAVED),
        ((16, 16), 2, 1, Schedule.ONE_F_ONE_B),
        ((8,) * 4, 4, 1, Schedule.ONE_F_ONE_B),
        ((5, 5, 6, 6, 5, 5), 2, 3, Schedule.INTERLEAVED),
    ],
)
def test_listed_layers_bring_the_pipeline_that_has_their_stages(layers, pipeline, virtual, schedule):
    winner = Plan(pipeline=4, virtual_pipeline=3, data_shard=4, schedule=Schedule.INTERLEAVED)
    plan = with_fixed(winner, {"layers_per_stage": layers}, 16)
    assert (plan.pipeline, plan.virtual_pipeline, plan.schedule) == (pipeline, virtual, schedule)
    assert plan.num_devices == 16
