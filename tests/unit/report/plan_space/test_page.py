"""The page of all scored plans: what it holds, what it lets one copy, and names that look like markup."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from tests.tiny_runs import LORA_70B

from meshwright import runfile
from meshwright.answers.plan_ranking import plan_run
from meshwright.answers.plan_rows import plan_fields, scored_rows
from meshwright.planner.choice import goal_of
from meshwright.planner.fixed import fixed_fields
from meshwright.planner.request import request_for
from meshwright.planner.scored import scored_plans
from meshwright.report.plan_space.page import page_data, plan_page
from meshwright.specs.plan import Plan, listed_layers
from meshwright.specs.run import with_plan

RUN = """# what is copied keeps its comments </script><script>alert(1)</script>
model: qwen3-0.6b
data: {sequence_length: 4096}
batch: {global_sequences: 16} # sequences of a step
precision: bf16
cluster: h100-8x1
parallel: auto # the planner's
engine: native
"""


@pytest.fixture(scope="module")
def run():
    return runfile.loads(RUN, file="run.yaml")


@pytest.fixture(scope="module")
def scored(run):
    return scored_plans(request_for(run, fixed={}), goal=goal_of(run), most=200)


def test_columns_are_the_plans(run, scored):
    data = page_data(scored, run=run, command="meshwright plan run.yaml")
    assert data["plan"] == [p.plan.describe() for p in scored]
    names, index = data["fields"]["sharding"]
    assert [names[i] for i in index] == [p.plan.sharding.name.lower() for p in scored]
    for i in (0, len(scored) - 1):
        assert sum(column[i] for column in data["components"].values()) == pytest.approx(data["step_s"][i], rel=1e-3)
        assert sum(column[i] for column in data["memory"].values()) == pytest.approx(data["gib"][i], rel=1e-3)
    columns = [data[n] for n in ("step_s", "spread", "value", "gib", "front", "simulated")]
    assert {len(c) for c in columns} == {len(scored)}


def template_of(data, i):
    texts, index = data["templates"]
    return texts[index[i]]


def test_the_run_file_of_any_plan_pins_it(run, scored):
    data = page_data(scored, run=run)
    sections, index = data["sections"]
    kinds = {p.plan.recompute: i for i, p in enumerate(scored)}
    assert len(kinds) == 3
    for i in (0, len(scored) - 1, *kinds.values()):
        text = template_of(data, i).replace(data["here"][0], sections[index[i]])
        text = text.replace(data["here"][1], str(scored.plans[i].plan.micro_batch))
        wanted = with_plan(run, scored.plans[i].plan)
        assert runfile.loads(text, file="copied.yaml").plan == wanted.plan
        assert text.startswith("# what is copied keeps its comments")


def test_run_files_of_plans_that_save_memory_say_so():
    """As LoRA of 70 billion parameters on eight MI300X without recomputation, which fits in no other way."""
    saving = runfile.loads(LORA_70B.replace("fp8", "bf16"), file="run.yaml")
    wanted = {"recompute": "none", "tensor": 1, "context": 1, "pipeline": 1}
    plans = plan_run(saving, fixed=wanted, top=1, scored=20).scored
    data = page_data(plans, run=saving)
    kernels = {(p.plan.stored_activations, p.plan.weight_cache, p.plan.loss_chunk) for p in plans}
    assert len(kernels) == len(data["templates"][0]) > 1
    for i, done in enumerate(plans):
        text = template_of(data, i).replace(data["here"][0], data["sections"][0][data["sections"][1][i]])
        read = runfile.loads(text.replace(data["here"][1], str(done.plan.micro_batch)), file="copied.yaml")
        wanted = with_plan(saving, done.plan)
        assert (read.plan, read.kernels) == (wanted.plan, wanted.kernels)


def fix_value(plan: Plan) -> str:
    """The value of `--fix` that leaves no field of `plan` free."""
    fields = plan_fields(plan) | {
        "sequence_parallel": str(plan.sequence_parallel).lower(),
        "recompute_modules": ",".join(plan.recompute_modules),
        "stored_activations": ",".join(plan.stored_activations or ()),
        "layers_per_stage": listed_layers(plan.layers_per_stage) if plan.layers_per_stage else "even",
        "loss_chunk": plan.loss_chunk or "auto",
    }
    return ",".join(f"{name}={value}" for name, value in fields.items() if value != "")


def test_the_value_of_fix_leaves_nothing_open(scored):
    for done in scored:
        fixed = fixed_fields([fix_value(done.plan)])
        assert replace(done.plan, **fixed) == done.plan
        free = {name for name, value in plan_fields(done.plan).items() if value == ""}
        assert fixed.keys() | free == vars(done.plan).keys()


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ("meshwright plan run.yaml --html p.html", "meshwright plan run.yaml"),
        ("meshwright plan run.yaml --html=p.html --all --limit 5", "meshwright plan run.yaml"),
        ("meshwright plan 'my run.yaml' --set model=x --top 3", "meshwright plan 'my run.yaml' --set model=x"),
    ],
    ids=["html", "several", "quoted"],
)
def test_the_command_of_one_plan_writes_no_page(run, scored, typed, kept):
    assert page_data(scored, run=run, command=typed)["command"] == kept


def test_names_with_markup_stay_text(run, scored):
    page = plan_page(scored, run=run)
    assert "<script>alert" not in page
    held = re.findall(r'<script type="application/json" id="plans">(.*?)</script>', page, re.DOTALL)
    assert "</script><script>alert(1)" in template_of(json.loads(held[0]), 0)
    page = plan_page(scored, run=replace(run, cluster_name="<img src=x onerror=alert(1)>"), command="<b>")
    assert "<img" not in page
    assert "&lt;b&gt;" in page


def test_a_run_that_its_file_does_not_say_offers_no_run_file(run, scored):
    assert page_data(scored, run=replace(run, cluster_name="another"))["templates"][0] == [""]


def test_rows_have_every_part(scored):
    rows = scored_rows(scored)
    assert [row["rank"] for row in rows] == list(range(1, len(scored) + 1))
    assert len({frozenset(row) for row in rows}) == 1
    row = rows[0]
    parts = ("weights", "gradients", "optimizer", "activations", "workspace", "beside_the_allocator")
    assert sum(row[f"{name}_bytes"] for name in parts) == pytest.approx(row["reserved_bytes"])
    assert row["tokens_per_s_per_device"] * row["step_s"] == pytest.approx(16 * 4096 / 8)
