from dataclasses import replace

import pytest

from meshwright import runfile, scale
from meshwright.answers.plan_ranking import plan_run
from meshwright.answers.quantities import fit_text
from meshwright.answers.run_estimate import estimate_run
from meshwright.cost.memory import memory_parts
from meshwright.errors import InfeasibleError
from meshwright.runfile import from_options
from meshwright.specs.memory_budget import FitVerdict


def test_a_pinned_plan_is_the_plan_and_an_open_one_is_searched(flat, pipelined):
    assert pipelined.chosen is None
    assert pipelined.plan == pipelined.run.plan
    assert flat.chosen is not None
    assert flat.plan == flat.chosen.plans[0].plan
    assert flat.estimate.step.step.value == pytest.approx(flat.chosen.plans[0].step_s)


def test_wall_time_is_steps_over_goodput(pipelined):
    totals, step = pipelined.economics.totals, pipelined.estimate.step.step
    assert totals.num_steps == -(-(10**10) // (64 * 4096))
    wall = totals.num_steps * step.value / pipelined.economics.goodput.value
    assert totals.wall.value == pytest.approx(wall)
    assert totals.wall.low < wall < totals.wall.high


def test_cost_is_device_hours_at_the_stated_price(pipelined):
    totals = pipelined.economics.totals
    assert pipelined.economics.price is None
    assert totals.cost.value == pytest.approx(32 * totals.wall.value / 3600 * 2.0)
    per_million = pipelined.economics.usd_per_million_tokens
    assert per_million * totals.num_tokens / 1e6 == pytest.approx(totals.cost.value)


def test_energy_lies_between_idle_and_full_power(pipelined):
    totals = pipelined.economics.totals
    device_mwh = 32 * 700 * totals.wall.value / 3.6e9  # at the design power of an H100
    assert 0.5 * device_mwh < totals.energy.value < 2 * device_mwh


def test_electricity_that_is_paid_apart_is_added(pipelined):
    costs = replace(pipelined.run.costs, usd_per_kwh=0.1)
    dearer = estimate_run(replace(pipelined.run, costs=costs)).economics.totals
    rent = pipelined.economics.totals.cost.value
    assert dearer.cost.value == pytest.approx(rent + 100 * dearer.energy.value)


def test_the_whole_interval_is_wider_than_that_of_the_step(pipelined):
    wall, step = pipelined.economics.totals.wall, pipelined.estimate.step.step
    assert wall.high / wall.value > step.high / step.value
    assert wall.value / wall.low > step.value / step.low


def test_without_an_end_of_training_there_are_no_totals(pipelined):
    train = replace(pipelined.run.train, tokens=None)
    economics = estimate_run(replace(pipelined.run, train=train)).economics
    assert economics.totals is None
    assert economics.usd_per_million_tokens == pytest.approx(pipelined.economics.usd_per_million_tokens)


def test_memory_parts_add_up_to_what_is_reserved(pipelined):
    memory = pipelined.estimate.step.memory
    assert sum(memory_parts(memory).values()) == pytest.approx(memory.reserved_bytes)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("model=llama3-70b", "parallel={tensor: 1, pipeline: 1}"), "device memory: .* needs .* GiB"),
        (("parallel={tensor: 2, pipeline: 4, schedule: dualpipe}",), "megatron.* has no dualpipe schedule"),
        pytest.param(
            ("model=llama3.1-405b", "cluster=h100-8x1", "parallel=auto", "batch.micro=null"),
            "needs at least",
            marks=pytest.mark.when_touched,  # test_nothing_fits (unit/cli/test_plan.py) searches for the same model
        ),
    ],
)
def test_what_cannot_run_is_infeasible(pipelined, overrides, message):
    run = runfile.loads(pipelined.run.text, overrides=overrides)
    with pytest.raises(InfeasibleError, match=message) as caught:
        estimate_run(run)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("spare", "verdict"),
    [(1.06, FitVerdict.FITS), (1.01, FitVerdict.MAY_FIT), (0.99, FitVerdict.MAY_FIT), (0.9, FitVerdict.DOES_NOT_FIT)],
)
def test_a_plan_may_reserve_what_the_search_allows(pipelined, spare, verdict):
    """95 % of the memory, not all of it; what needs a little more is answered, with the probability that it fits."""
    memory = pipelined.estimate.step.memory
    accelerator = replace(pipelined.run.cluster.accelerator, memory_bytes=int(memory.reserved_bytes * spare))
    run = replace(pipelined.run, cluster=replace(pipelined.run.cluster, accelerator=accelerator))
    if verdict is FitVerdict.DOES_NOT_FIT:
        with pytest.raises(InfeasibleError, match="of which a plan may reserve"):
            estimate_run(run)
        return
    done = estimate_run(run)
    found = done.to_dict()["memory"]
    assert (done.memory.verdict, found["verdict"], found["fits"]) == (verdict, verdict, spare > 1.05)
    said = [note for note in done.notes if note.startswith(f"the plan {fit_text(done.memory)}")]
    assert len(said) == (verdict is FitVerdict.MAY_FIT)


@pytest.mark.when_touched  # cli/test_plan.py plans such a run
def test_a_run_that_names_no_engine_is_estimated_as_it_is_planned():
    asked = {"model": "qwen3-next-80b-a3b", "cluster": "h100-8x4", "global_batch": 256, "sequence_length": 4096}
    done, planned = estimate_run(from_options(**asked)), plan_run(from_options(**asked), top=1)
    assert done.run.engine == "any"
    assert done.notes[0] == planned.notes[0]
    assert done.plan == planned.best.plan
    named = estimate_run(from_options(**asked, engine="native"))
    assert (named.run.engine, any("planned for" in note for note in named.notes)) == ("native", False)


def test_steps_of_labels_are_planned_estimated_and_scaled_as_one_size():
    run = from_options(
        model="llama3-8b", cluster="h100-8x2", global_batch=16, sequence_length=4096, engine="native",
        overrides=["batch.label_tokens=200000"],
    )  # fmt: skip
    ranking = plan_run(run)
    best, note = ranking.best, "a step is predicted to take 64 sequences"
    for again in (estimate_run(run), estimate_run(ranking.pinned())):
        assert again.estimate.plan == best.plan
        assert again.estimate.step.step == best.step.step
        assert again.memory.reserved_bytes == best.step.memory.reserved_bytes
        assert [note in line for line in again.notes].count(True) == 1
    assert [note in line for line in ranking.notes].count(True) == 1
    assert all(16 % (done.plan.data * done.plan.micro_batch) == 0 for done in ranking)  # each global batch is divided
    scaled = scale(run, devices=[16])
    assert scaled.curve.points[0].costed.estimate.step.step == best.step.step
    assert [note in line for line in scaled.notes].count(True) == 1
