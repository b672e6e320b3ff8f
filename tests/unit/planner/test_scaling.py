"""Scaling studies on small worlds: what changes with size, what must not, and what cancels."""

from __future__ import annotations

from dataclasses import fields, replace
from math import exp, log, sqrt

import pytest

from meshwright.calibration.parameters import ALL, Offset, fitted
from meshwright.catalog.lookup import cluster
from meshwright.cost.uncertainty import BF16_GEMM, Z80
from meshwright.errors import InfeasibleError, InputError
from meshwright.planner import request_for, search
from meshwright.planner.estimate import estimate_plan
from meshwright.planner.scaling import (
    Mode,
    Study,
    Unreached,
    at_size,
    curve_ends,
    emulate,
    emulation_ends,
    rank_replicas,
    replica_devices,
    resized,
    scale,
    sensitivity,
    tokens_in,
    widened,
    with_tokens,
)
from meshwright.planner.scaling.spread import interval_factor, log_deviations, log_slopes
from meshwright.planner.training import goodput_at, state_bytes, with_failures
from meshwright.runfile import from_options
from meshwright.specs.estimate import Estimate, Tier
from meshwright.specs.plan import Plan, Schedule, Sharding
from meshwright.specs.run import Costs
from meshwright.units import DAY_S

DENSE_PLAN = Plan(tensor=4, data_shard=4)
MOE_PLAN = Plan(context=2, pipeline=4, virtual_pipeline=2, expert=8, data_shard=4, schedule=Schedule.INTERLEAVED)


def study(model="llama3.1-8b", nodes=2, global_batch=256, **changes) -> Study:
    run = from_options(
        model=model, cluster=f"h100-8x{nodes}", global_batch=global_batch, sequence_length=4096, engine="megatron"
    )
    return Study(**{"request": request_for(run), **changes})


@pytest.fixture(scope="module")
def kept():
    """One plan on 16 to 128 devices, 1e12 tokens, at 2 USD per device hour."""
    asked = study(plan=DENSE_PLAN, num_tokens=1e12, costs=Costs(usd_per_device_hour=2.0))
    return scale(asked, [128, 16, 32])


class TestSizes:
    def test_a_cluster_gets_whole_nodes(self):
        found = resized(cluster("h100-8x2"), 64)
        assert (found.num_devices, found.name) == (64, "h100-8x8")
        assert found.fabric == cluster("h100-8x8").fabric

    def test_racks_are_cut_anew(self):
        whole_racks = cluster("gb200-4x36")
        assert resized(whole_racks, 256).fabric == cluster("gb200-4x64").fabric
        assert resized(whole_racks, 256).fabric.scale_up_domain != whole_racks.fabric.scale_up_domain

    def test_a_changed_network_stays_changed(self):
        slow = replace(cluster("h100-8x2"), fabric=replace(cluster("h100-8x2").fabric, scale_out_bytes_per_s=1e9))
        assert resized(slow, 64).fabric.scale_out_bytes_per_s == 1e9

    @pytest.mark.parametrize("num_devices", [0, 4, 20])
    def test_parts_of_nodes_are_refused(self, num_devices):
        with pytest.raises(InputError, match="whole nodes"):
            resized(cluster("h100-8x2"), num_devices)

    @pytest.mark.parametrize(
        ("plan", "replica"),
        [
            (Plan(tensor=8, pipeline=2), 16),
            (Plan(context=4, expert=16, pipeline=24, data_shard=8), 384),  # experts fold over data ranks
            (Plan(context=4, tensor=4, expert=8, pipeline=3, data_shard=2), 48),  # attention is wider
            (Plan(tensor=3, expert=4, data_shard=4), 12),  # neither divides the other
            (Plan(data_shard=64, sharding=Sharding.PARAMETERS), 1),  # sharding is not model parallelism
        ],
    )
    def test_a_replica_is_what_holds_the_model_once(self, plan, replica):
        assert replica_devices(plan) == replica

    def test_widening_changes_the_data_width_alone(self):
        wide = widened(MOE_PLAN, 256)
        assert wide is not None
        assert wide.num_devices == 256
        changed = {f.name for f in fields(Plan) if getattr(wide, f.name) != getattr(MOE_PLAN, f.name)}
        assert changed == {"data_shard"}

    def test_a_hybrid_shard_gets_more_replicas(self):
        hybrid = Plan(data_shard=8, data_replicate=2, sharding=Sharding.PARAMETERS)
        wide = widened(hybrid, 64)
        assert wide is not None
        assert (wide.data_shard, wide.data_replicate) == (8, 8)
        assert widened(hybrid, 60) is None

    def test_no_part_of_a_replica(self):
        assert widened(Plan(pipeline=3, data_shard=4), 16) is None


class TestCurve:
    def test_sizes_ascend_and_the_first_is_the_base(self, kept):
        assert [p.num_devices for p in kept.points] == [16, 32, 128]
        assert kept.points[0].efficiency.value == kept.points[0].speedup == 1.0
        assert kept.points[0].efficiency.low == kept.points[0].efficiency.high == 1.0

    def test_strong_scaling_keeps_the_batch_and_the_plan(self, kept):
        assert {p.costed.global_batch for p in kept.points} == {256}
        assert {replace(p.costed.plan, data_shard=1) for p in kept.points} == {replace(DENSE_PLAN, data_shard=1)}

    def test_speed_up_is_the_ratio_of_step_times_at_one_batch(self, kept):
        first, *others = kept.points
        for point in others:
            assert point.speedup == pytest.approx(first.costed.step_s / point.costed.step_s)
            assert point.efficiency.value == pytest.approx(point.speedup * 16 / point.num_devices)

    def test_weak_scaling_keeps_the_share_of_a_replica(self):
        curve = scale(study(plan=DENSE_PLAN, mode=Mode.WEAK), [16, 64])
        assert [p.costed.global_batch for p in curve.points] == [256, 1024]
        assert len({p.costed.plan.num_micro_batches(p.costed.global_batch) for p in curve.points}) == 1
        assert 0.8 < curve.points[1].efficiency.value < 1.0

    def test_weak_scaling_refuses_parts_of_a_sequence(self):
        found = at_size(study(global_batch=1, mode=Mode.WEAK), 24)
        assert isinstance(found, Unreached)
        assert "whole number of sequences" in found.why_not

    def test_the_planner_is_never_slower_than_a_kept_plan(self, kept):
        chosen = scale(study(), [16, 128])
        for free, bound in zip(chosen.points, (kept.points[0], kept.points[-1]), strict=True):
            assert free.costed.step_s <= bound.costed.step_s * 1.001

    def test_a_size_that_cannot_be_reached_says_why(self):
        curve = scale(study(plan=Plan(tensor=2, pipeline=4, data_shard=2)), [16, 24, 40, 512])
        assert [p.num_devices for p in curve.points] == [16, 512]
        assert [u.num_devices for u in curve.unreached] == [24, 40]
        assert all("does not divide" in u.why_not for u in curve.unreached)
        odd = scale(study(plan=Plan(pipeline=16)), [16, 24])
        assert "no whole number of replicas of 16" in odd.unreached[0].why_not

    def test_what_does_not_fit_says_what_is_needed(self):
        found = at_size(study(model="llama3.1-70b", plan=Plan(data_shard=16, sharding=Sharding.NONE)), 16)
        assert isinstance(found, Unreached)
        assert "GiB a device" in found.why_not

    def test_no_plan_at_all_is_an_answer_too(self):
        found = at_size(study(model="llama3.1-405b", nodes=1, global_batch=8), 8)
        assert isinstance(found, Unreached)
        assert "GiB" in found.why_not


class TestTraining:
    def test_days_shrink_by_the_speed_up(self, kept):
        first, last = kept.points[0], kept.points[-1]
        assert first.training.productive.value / last.training.productive.value == pytest.approx(last.speedup)

    def test_failures_lengthen_the_wall_time(self, kept):
        for point in kept.points:
            assert point.training.wall.value == pytest.approx(point.training.productive.value / point.goodput.value)
            assert point.training.wall.low < point.training.wall.value < point.training.wall.high

    def test_more_devices_fail_more_often(self, kept):
        mtbf = [p.goodput.mtbf_s * p.num_devices for p in kept.points]
        assert mtbf == pytest.approx([mtbf[0]] * 3)

    def test_money_is_devices_times_hours_times_price(self, kept):
        for point in kept.points:
            hours = point.training.wall.value / 3600
            assert point.training.cost.value == pytest.approx(point.num_devices * hours * 2.0)

    def test_without_a_price_there_is_no_cost(self):
        curve = scale(study(plan=Plan(tensor=4, data_shard=4), num_tokens=1e12), [16])
        known = curve.points[0].training.cost
        assert known is not None  # the catalogue has a price of the H100
        run = from_options(model="llama3.1-8b", cluster="mi355x-8x2", global_batch=256, sequence_length=4096)
        curve = scale(Study(request=request_for(run), plan=Plan(tensor=4, data_shard=4), num_tokens=1e12), [16])
        assert curve.points[0].training.cost is None
        assert curve.points[0].training.energy.value > 0

    def test_leaving_failures_out(self):
        curve = scale(study(plan=DENSE_PLAN, num_tokens=1e12, with_failures=False), [16])
        assert curve.points[0].goodput is None
        assert curve.points[0].training.wall == curve.points[0].training.productive

    def test_the_length_can_be_solved_for(self, kept):
        tokens = tokens_in(kept.points[0].costed, 10 * DAY_S)
        again = with_tokens(kept, tokens)
        assert again.points[0].training.productive.value == pytest.approx(10 * DAY_S)
        assert again.points[1].costed is kept.points[1].costed

    def test_intervals_add_in_quadrature(self):
        steps = Estimate(value=100.0, low=80.0, high=125.0, unit="s", tier=Tier.MEASURED)
        goodput = replace(goodput_at(study().request), value=0.8, low=0.64, high=1.0)
        wall = with_failures(steps, goodput)
        both = sqrt(2) * log(1.25)
        assert (wall.value, wall.low, wall.high) == pytest.approx((125, 125 * exp(-both), 125 * exp(both)))
        assert wall.tier is Tier.GUESSED

    def test_a_checkpoint_holds_fourteen_bytes_of_each_parameter(self):
        # bf16 weights, fp32 master weights and both moments: 2 + 4 + 8
        assert state_bytes(study().request) == pytest.approx(14 * 8.03e9, rel=2e-3)


class TestSpread:
    def test_a_ratio_against_itself_is_certain(self):
        request = study().request
        slopes = log_slopes(request, DENSE_PLAN)
        assert interval_factor(log_deviations(request, slopes, slopes)) == 1.0

    def test_a_slope_is_what_moving_the_parameter_does(self):
        asked = study()
        request, name = asked.request, "scale_up_ratio"
        calibration = fitted()
        key = (name, ALL, ALL)
        old = calibration.offsets.get(key, Offset(value=0.0, sd=0.1, num_rows=0))
        moved = replace(calibration, offsets={**calibration.offsets, key: replace(old, value=old.value + 0.01)})
        before, after = (estimate_plan(request, DENSE_PLAN, calibration=c) for c in (calibration, moved))
        change = log(after.step.step.value / before.step.step.value)
        assert log_slopes(request, DENSE_PLAN)[name] == pytest.approx(change / 0.01, rel=0.05)
        assert change < 0

    def test_what_two_sizes_share_cancels(self, kept):
        last = kept.points[-1]
        step = last.costed.estimate.step.step
        assert 1 < last.efficiency.high / last.efficiency.value < step.high / step.value

    def test_deviations_add_in_quadrature(self):
        assert interval_factor({"a": 0.3, "b": -0.4}) == pytest.approx(exp(Z80 * 0.5))

    def test_every_calibrated_parameter_has_a_slope(self):
        assert set(log_slopes(study().request, DENSE_PLAN)) == {*fitted().parameters, BF16_GEMM}


@pytest.fixture(scope="module")
def emulation():
    """Two replicas of 16 devices stand for up to 16."""
    return emulate(moe_study(), [32, 48, 64, 256], small=32)


def moe_study() -> Study:
    return study(model="qwen3-30b-a3b", nodes=4, global_batch=256, plan=MOE_PLAN)


class TestEmulation:
    def test_the_batch_shrinks_as_the_cluster_that_it_stands_for_grows(self, emulation):
        assert [(p.num_devices, p.emulated.global_batch) for p in emulation.points] == [(32, 256), (64, 128), (256, 32)]
        assert {p.emulated.num_devices for p in emulation.points} == {32}

    def test_the_whole_batch_is_the_base(self, emulation):
        assert emulation.points[0].efficiency.value == 1.0

    def test_each_replica_does_what_it_does_in_the_large_cluster(self, emulation):
        for point in emulation.points:
            micro = {c.plan.num_micro_batches(c.global_batch) for c in (point.emulated, point.real)}
            assert len(micro) == 1
            assert replica_devices(point.real.plan) == replica_devices(point.emulated.plan) == 32

    def test_shorter_pipelines_have_larger_bubbles(self, emulation):
        shares = [p.emulated.estimate.step.components_s["bubble"] / p.emulated.step_s for p in emulation.points]
        assert shares == sorted(shares)
        assert [p.efficiency.value for p in emulation.points] == sorted(
            (p.efficiency.value for p in emulation.points), reverse=True
        )

    def test_the_differences_add_up(self, emulation):
        for point in emulation.points:
            whole = point.real.step_s - point.emulated.step_s
            assert sum(point.difference_s.values()) == pytest.approx(whole, abs=1e-9)

    def test_the_real_cluster_pays_for_its_size(self, emulation):
        last = emulation.points[-1]
        assert last.real.num_devices == 256
        assert last.real_efficiency.value < last.efficiency.value
        assert last.difference_s["stragglers"] > 0
        assert last.difference_s["optimizer"] < 0  # its states lie on more devices

    def test_a_share_that_is_no_whole_sequence_is_told(self, emulation):
        assert [(u.num_devices, u.why_not) for u in emulation.unreached] == [
            (48, "its share of the batch is no whole number of sequences")
        ]

    def test_a_plan_that_does_not_fit_the_small_cluster(self):
        with pytest.raises(InfeasibleError, match="cannot be emulated on 8 devices"):
            emulate(moe_study(), [64], small=8)


class TestReplicas:
    @pytest.mark.when_touched  # test_of_each_verb (unit/api/test_documents.py) ranks replicas
    def test_best_first_and_of_the_size_that_was_asked(self):
        request = moe_study().request
        replicas = rank_replicas(request, [8, 16, 5])
        assert {r.num_devices for r in replicas} == {8, 16}
        assert all(replica_devices(r.costed.plan) == r.num_devices for r in replicas)
        rates = [r.relative_ratio for r in replicas]
        assert rates[0] == 1.0
        assert rates == sorted(rates, reverse=True)
        best = search(request, top=1).best
        assert best is not None
        assert replicas[0].costed.step_s >= best.step_s * 0.999

    def test_the_fixed_fields_hold(self):
        request = moe_study().request.fixing(sharding=Sharding.OPTIMIZER)
        assert {r.costed.plan.sharding for r in rank_replicas(request, [8])} == {Sharding.OPTIMIZER}


@pytest.fixture(scope="module")
def swings():
    return sensitivity(moe_study(), curve_ends([32, 128]))


class TestSensitivity:
    @pytest.mark.when_touched  # TestReplicas and TestCurve vary the same study
    def test_largest_change_first(self, swings):
        changes = [abs(s.change) for s in swings.swings if s.change is not None]
        assert changes == sorted(changes, reverse=True)
        assert len(changes) > 5

    @pytest.mark.when_touched  # TestReplicas and TestCurve vary the same study
    def test_each_change_is_against_the_study(self, swings):
        for s in swings.swings:
            if s.change is not None:
                assert s.efficiency == pytest.approx(swings.efficiency + s.change)

    def test_signs_that_must_be(self, swings):
        change = {(s.assumption, s.value): s.change for s in swings.swings}
        assert change["global batch", "twice"] > 0 > change["global batch", "half"]
        assert change["growth of stragglers", "twice"] < 0
        assert change["failures counted in", "most published"] < change["failures counted in", "as planned"] < 0

    def test_failures_are_the_ratio_of_goodputs(self, swings):
        first, last = (goodput_at(at_size(moe_study(), n).request).value for n in (32, 128))
        counted = next(s for s in swings.swings if s.value == "as planned")
        assert counted.efficiency == pytest.approx(swings.efficiency * last / first)

    @pytest.mark.when_touched  # test_largest_change_first changes the same assumptions of a curve
    def test_an_emulation_has_no_failures_to_count(self):
        found = sensitivity(moe_study(), emulation_ends(256, small=32))
        assert "failures counted in" not in {s.assumption for s in found.swings}

    def test_a_study_without_an_answer_has_no_swings(self):
        found = sensitivity(moe_study(), curve_ends([32, 40]))
        assert isinstance(found, Unreached)
