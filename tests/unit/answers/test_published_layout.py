"""The line about the layout that a vendor ships for a mixture."""

import pytest

from meshwright.accuracy.rows import read_runs
from meshwright.accuracy.shipped import measured_runs_path, shipped_layout, shipped_layouts
from meshwright.answers.components import label
from meshwright.answers.documents.plan import why_not_sentence
from meshwright.answers.plan_ranking import plan_run
from meshwright.catalog import lookup as catalog
from meshwright.planner import search
from meshwright.planner.choice import goal_of
from meshwright.runfile import from_options, loads


def ranking(model="qwen3-235b-a22b", cluster="h100-8x32", *keys, engine="megatron", batch=1024):
    return plan_run(
        from_options(
            model=model, cluster=cluster, global_batch=batch, sequence_length=4096, engine=engine, overrides=keys
        ),
        top=1,
    )  # fmt: skip


def test_every_layout_is_that_of_a_measured_run_of_this_model():
    runs = {run.id: run.conditions for run in read_runs(measured_runs_path())}
    named = [(model, *run) for model, runs_of in shipped_layouts().items() for run in runs_of.items()]
    for model, accelerator, id in named:
        layout, conditions = shipped_layout(model, accelerator), runs[id]
        assert conditions.model.hidden == catalog.model(model).hidden
        assert conditions.accelerator.name == catalog.accelerator(accelerator).name
        assert layout.degrees == {name: getattr(conditions.plan, name) for name in layout.degrees}
        assert layout.num_devices == conditions.plan.num_devices


def test_the_published_layout_is_behind_by_what_a_search_with_its_degrees_finds():
    found = ranking()
    request, best, gap = found.request, found.search.plans[0], found.published
    degrees, comparison = gap.layout.degrees, gap.answer.comparison
    held = search(request.fixing(**degrees), top=1, goal=goal_of(found.run)).best
    assert comparison.loser.plan == held.plan
    assert held.step_s > best.step_s
    text = str(gap)
    assert text.startswith("NeMo Megatron-Bridge 26.04.01 has TP2 CP1 EP32 PP8 on 256 devices: slower. TP2 EP32 PP8 ")
    assert f"{held.plan.describe()}: " in text
    assert f"(+{100 * (held.step_s / best.step_s - 1):.1f} %), {label(comparison.decided_by.name)} +" in text
    assert found.to_dict()["explanation"]["published"]["text"] == text


def test_the_reason_is_named_for_which_no_plan_has_the_degrees():
    of_memory = str(ranking("kimi-k2", engine="torchtitan", batch=512).published)
    assert "EP32 PP8 on 256 devices: device memory: kimi-k2 needs at least " in of_memory
    assert "illegal. expert 32 x " in str(ranking(cluster="h100-8x4", engine="any").published)


def test_a_published_layout_has_the_switches_with_which_it_is_fastest():
    found = ranking("deepseek-v3", "b200-8x32", "precision=mxfp8", batch=4096)
    degrees, gap = shipped_layout("deepseek-v3", "b200").degrees, found.published
    asked = plan_run(found.run, top=1, why_not=[degrees]).why_not[0]
    held = plan_run(loads(found.run.text, overrides=(*found.run.overrides, "stack=null")), top=1, fixed=degrees)
    assert gap.answer.comparison.loser.plan == asked.comparison.loser.plan == held.best.plan
    assert gap.answer.comparison.loser.step_s == held.search.best.step_s
    assert all("; with stack.overlaps_experts=false" in text for text in (str(gap), why_not_sentence(asked)))


@pytest.mark.parametrize(
    "asked",
    [("qwen3-30b-a3b", "h100-8x4"), ("qwen3-235b-a22b", "h200-8x32"), ("qwen3-235b-a22b", "h100-8x16+h200-8x16")],
)
def test_other_questions_have_no_such_line(asked):
    found = ranking(*asked, engine="any")
    assert found.published is None
    assert "published" not in found.to_dict()["explanation"]


def test_a_plan_with_the_published_degrees_has_no_such_line():
    found = ranking("gpt-oss-120b", "b200-8x8", engine="any", batch=1280)
    degrees = shipped_layout("gpt-oss-120b", "b200").degrees
    held = found.search.plans[0]
    assert (found.published is None) == all(getattr(held.plan, name) == width for name, width in degrees.items())


def test_the_command_prints_it(meshwright):
    asked = ("--model", "qwen3-235b-a22b", "--cluster", "h100-8x32", "--gbs", 1024, "--seq", 4096)
    outcome = meshwright("plan", *asked, "--engine", "megatron", "--top", 1)
    assert "published: NeMo Megatron-Bridge 26.04.01 has TP2 CP1 EP32 PP8 on 256 devices:" in " ".join(
        outcome.stdout.split()
    )
