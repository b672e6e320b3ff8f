"""A whole step: components, bubble, once-a-step work, the stack's factor."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.catalog import lookup as catalog
from meshwright.cost.pipeline.closed_form import waiting_s
from meshwright.cost.step import estimate_steps, oversubscribed_s
from meshwright.cost.tables import BatchTable, ModelTable, PlanTable, PrecisionTable
from meshwright.specs.model import Lora
from meshwright.specs.plan import Plan, Recompute, Schedule, Sharding

PIPELINE = Plan(tensor=2, pipeline=4, data_shard=4)
INTERLEAVED = replace(PIPELINE, virtual_pipeline=2, schedule=Schedule.INTERLEAVED)

ONCE = ("bubble", "data_parallel", "optimizer", "fixed", "stragglers")


def test_components_add_up(case):
    steps = case(plan=PIPELINE).steps()
    assert sum(steps.components_s.values()) == pytest.approx(steps.step_s, rel=1e-12)
    assert all(np.all(np.asarray(x) >= 0) for x in steps.components_s.values())


def test_tokens_per_device(case):
    steps = case().steps()
    assert steps.tokens_per_s_per_device == pytest.approx(128 * 8192 / 32 / steps.step_s)


def test_micro_batches(case):
    assert case(plan=Plan(data_shard=16, pipeline=2, micro_batch=2)).steps().num_micro_batches == 4


class TestPipeline:
    def bubble_s(self, case, plan: Plan, **rates: float) -> float:
        c = case(plan=plan, framework="megatron-bridge").with_rates(general_factor=1.0, **rates)
        return float(c.steps().components_s["bubble"])

    def test_one_rank_has_no_bubble(self, case):
        assert self.bubble_s(case, Plan(data_shard=32)) == 0

    @pytest.mark.parametrize("virtual", [2, 4, 8])
    def test_virtual_stages_divide_it(self, case, virtual):
        """Narayanan et al. 2021, section 2.2.2; without the messages that more stages send."""
        plan = replace(INTERLEAVED, virtual_pipeline=virtual)
        once = self.bubble_s(case, PIPELINE, pipeline_exposed_ratio=0.0)
        assert self.bubble_s(case, plan, pipeline_exposed_ratio=0.0) == pytest.approx(once / virtual)

    def test_more_stages_send_more(self, case):
        few, many = (replace(INTERLEAVED, virtual_pipeline=v) for v in (2, 8))
        sent = [
            self.bubble_s(case, p, pipeline_exposed_ratio=1.0) - self.bubble_s(case, p, pipeline_exposed_ratio=0.0)
            for p in (few, many)
        ]
        assert sent[1] == pytest.approx(sent[0] * (4 * 8 - 1) / (4 * 2 - 1), rel=1e-6)

    def test_it_is_p_minus_1_micro_batches_whatever_their_number(self, case):
        steps = case(plan=PIPELINE).with_rates(pipeline_exposed_ratio=0.0).steps()
        s = steps.stages
        mean = (s.first.total_s + 2 * s.middle.total_s + s.last.total_s) / 4
        work = steps.num_micro_batches * max(s.first.total_s, s.middle.total_s, s.last.total_s)
        kernels = steps.step_s - sum(
            steps.components_s[n] for n in ("bubble", "data_parallel", "optimizer", "fixed", "stragglers")
        )
        assert steps.components_s["bubble"] / kernels == pytest.approx(3 * mean / work)

    def test_weight_gradients_fill_it(self, case):
        bubbles = [
            self.bubble_s(case, replace(PIPELINE, schedule=s, virtual_pipeline=v), pipeline_exposed_ratio=0.0)
            for s, v in ((Schedule.ONE_F_ONE_B, 1), (Schedule.ZERO_BUBBLE, 1), (Schedule.ZBV, 2))
        ]
        assert bubbles[0] > bubbles[1] > bubbles[2] >= 0

    def test_the_head_is_the_last_ranks(self, case):
        s = case(plan=PIPELINE).steps().stages
        assert s.middle.total_s < s.first.total_s < s.last.total_s
        assert s.first.total_s == pytest.approx(s.middle.total_s + s.start.total_s)  # the embedding
        assert s.last.total_s == pytest.approx(s.middle.total_s + s.end.total_s)

    def test_the_slowest_rank_sets_the_pace(self, case):
        small, large = (replace(catalog.model("llama3-8b"), vocab=v) for v in (32_000, 512_000))
        gain = case(model=large, plan=PIPELINE).steps().step_s - case(model=small, plan=PIPELINE).steps().step_s
        head_s = case(model=large, plan=PIPELINE).layer().head.total_s
        assert gain > 0.8 * 32 * head_s  # every one of 32 micro-batches waits for it


class TestOversubscription:
    @given(longest_s=st.floats(0, 1e3), share=st.floats(0, 1), cpu_oversubscription=st.floats(1, 64))
    def test_a_chain_ends_no_sooner_than_the_work_of_all_and_no_later_than_alone(
        self, longest_s, share, cpu_oversubscription
    ):
        """Of ranks whose longest chain is `longest_s`, a `share` of which is work of their own."""
        work_s = share * longest_s
        ends_s = float(oversubscribed_s(longest_s, work_s, cpu_oversubscription))
        assert work_s <= ends_s <= longest_s
        assert ends_s >= longest_s / cpu_oversubscription
        assert float(oversubscribed_s(longest_s, work_s, 2 * cpu_oversubscription)) <= ends_s

    def test_ranks_of_their_own_wait(self):
        assert oversubscribed_s(3.0, 2.0, 1.0) == 3

    def test_those_that_share_a_core_work_while_others_wait(self):
        assert oversubscribed_s(3.0, 2.0, 1.25) == pytest.approx(2.4)
        assert oversubscribed_s(3.0, 2.0, 4.0) == 2

    def test_a_pipeline_on_one_core_has_no_bubble(self, case):
        """Four ranks take turns: all that counts is their work together, and no rank is the slowest."""
        alone = case(plan=PIPELINE).with_rates(general_factor=1.0, dense_gain_per_year=0.0).steps()
        oversubscribed = case(plan=PIPELINE).with_rates(
            general_factor=1.0, dense_gain_per_year=0.0, cpu_oversubscription=4.0
        ).steps()  # fmt: skip
        assert alone.components_s["bubble"] > 0
        assert oversubscribed.components_s["bubble"] == pytest.approx(0, abs=1e-9)
        s = alone.stages
        mean = (s.first.total_s + 2 * s.middle.total_s + s.last.total_s) / 4
        work = sum(x for name, x in oversubscribed.components_s.items() if name not in ONCE)
        assert work == pytest.approx(alone.num_micro_batches * mean)

    def test_oversubscription_changes_nothing_where_no_process_waits(self, case):
        c = case(cluster="h100-8x1", plan=Plan(tensor=8))
        assert c.with_rates(cpu_oversubscription=2.0).steps().step_s == pytest.approx(c.steps().step_s)


class TestTimeAroundCollectives:
    """Work of a process around a collective adds so many times its seconds to one component, and nowhere else."""

    SECONDS = 1e-3

    def added(self, case, name: str, **asked: object) -> dict[str, float]:
        """By how much components grow in `SECONDS`, when nothing hides them and no power limit absorbs them."""
        c = case(**asked).with_rates(
            general_factor=1.0, dense_gain_per_year=0.0, host_layer_s=0.0, slowdown_per_doubling=0.0,
            tensor_exposed_ratio=1.0, pipeline_exposed_ratio=1.0, data_hidden_ratio=0.0,
            gather_hidden_ratio=0.0, sustained_ratio=1.0, gemm_ratio=0.5, attention_forward_ratio=0.3,
            attention_backward_ratio=0.3,
        )  # fmt: skip
        without, with_it = (c.with_rates(**{name: s}).steps().components_s for s in (0.0, self.SECONDS))
        grown = {part: (with_it[part] - without[part]) / self.SECONDS for part in with_it}
        return {part: float(x) for part, x in grown.items() if abs(x) > 1e-6}

    def test_tensor_parallelism_communicates_eight_times_a_layer(self, case):
        """Two gathers and two scatters forward, as many backward; 16 micro-batches of 32 layers."""
        found = self.added(case, "tensor_collective_s", plan=Plan(tensor=4, data_shard=8))
        assert found == {"tensor_parallel": pytest.approx(16 * 32 * 8)}

    def test_and_four_times_without_sequence_parallelism(self, case):
        plan = Plan(tensor=4, data_shard=8, sequence_parallel=False)
        assert self.added(case, "tensor_collective_s", plan=plan) == {"tensor_parallel": pytest.approx(16 * 32 * 4)}

    def test_fsdp_gathers_a_layer_twice_and_reduces_it_once(self, case):
        """Four micro-batches of 32 layers; the tables around them are gathered once and reduced four times."""
        found = self.added(case, "data_collective_s", plan=Plan(data_shard=32, sharding=Sharding.PARAMETERS))
        assert found == {"gather": pytest.approx(4 * 32 * 3), "data_parallel": pytest.approx(1 + 4)}

    @pytest.mark.parametrize(("sharding", "times"), [(Sharding.NONE, 1), (Sharding.OPTIMIZER, 2)])
    def test_other_replicas_reduce_each_layer_once_a_step_and_may_gather_it(self, case, sharding, times):
        found = self.added(case, "data_collective_s", plan=Plan(data_shard=32, sharding=sharding))
        assert found == {"data_parallel": pytest.approx(32 * times)}

    @pytest.mark.parametrize("plan", [Plan(data_shard=32), Plan(data_shard=32, sharding=Sharding.PARAMETERS)])
    def test_a_process_hooks_into_each_layer_s_passes(self, case, plan):
        """Four micro-batches of 32 layers."""
        assert self.added(case, "data_layer_s", plan=plan) == {"hooks": pytest.approx(4 * 32)}

    def test_a_pipeline_waits_for_each_hop_that_its_schedule_does(self, case):
        found = self.added(case, "pipeline_transfer_s", plan=Plan(pipeline=4, data_shard=8))
        passes = {"forward_s": 1.0, "backward_input_s": 1.0, "backward_weight_s": 1.0}
        hops = waiting_s(Schedule.ONE_F_ONE_B, 4, 1, 16, **passes, transfer_s=1.0) - waiting_s(
            Schedule.ONE_F_ONE_B, 4, 1, 16, **passes
        )
        assert hops > 0
        assert found == {"bubble": pytest.approx(float(hops))}

    @pytest.mark.parametrize(
        "name", ["tensor_collective_s", "data_collective_s", "data_layer_s", "pipeline_transfer_s"]
    )
    def test_one_device_communicates_nothing(self, case, name):
        assert self.added(case, name, cluster="h100-8x1", plan=Plan(sharding=Sharding.NONE)) == {}

    @pytest.mark.parametrize(
        ("name", "plan", "part"),
        [
            ("tensor_collective_factor", Plan(tensor=4, data_shard=8), "tensor_parallel"),
            ("data_collective_factor", Plan(data_shard=32, sharding=Sharding.NONE), "data_parallel"),
            ("data_collective_factor", Plan(data_shard=32, sharding=Sharding.PARAMETERS), "gather"),
        ],
    )
    def test_a_factor_multiplies_what_the_wire_takes(self, case, name, plan, part):
        c = case(plan=plan).with_rates(
            host_layer_s=0.0, data_hidden_ratio=0.0, gather_hidden_ratio=0.0,
            tensor_collective_s=0.0, data_collective_s=0.0,
        )  # fmt: skip
        once, twice = (c.with_rates(**{name: x}).steps().components_s[part] for x in (1.0, 2.0))
        assert twice == pytest.approx(2 * once)


class TestOnceAStep:
    def test_fixed_time_is_the_calibrated_one(self, case):
        assert case().with_rates(step_s=0.5).steps().components_s["fixed"] == 0.5

    def test_one_node_has_no_stragglers(self, case):
        assert case(cluster="h100-8x1", plan=Plan(data_shard=8)).steps().components_s["stragglers"] == 0

    def test_stragglers_grow_with_the_logarithm_of_nodes(self, case):
        def share(nodes: int) -> float:
            c = case(cluster=f"h100-8x{nodes}", plan=Plan(data_shard=8 * nodes), global_batch=8192)
            steps = c.with_rates(slowdown_per_doubling=0.01).steps()
            return float(steps.components_s["stragglers"] / (steps.step_s - steps.components_s["stragglers"]))

        assert share(64) == pytest.approx(0.06)
        assert share(2) == pytest.approx(0.01)


class TestFactor:
    def test_unexplained_time_multiplies_all_but_the_fixed_time(self, case):
        once = case().with_rates(general_factor=2.0, step_s=0.0).steps()
        twice = case().with_rates(general_factor=4.0, step_s=0.0).steps()
        assert twice.step_s == pytest.approx(2 * once.step_s)

    def test_experts_have_a_factor_of_their_own(self, case):
        dense, moe = case().with_rates(moe_factor=2.0), case(model="mixtral-8x7b").with_rates(moe_factor=2.0)
        assert dense.steps().step_s == case().with_rates(moe_factor=1.0).steps().step_s
        assert moe.steps().step_s > 1.9 * (moe.with_rates(moe_factor=1.0).steps().step_s)

    def test_a_year_of_maturity(self, case):
        c = case().with_rates(general_factor=2.0, dense_gain_per_year=0.1, step_s=0.0, host_layer_s=0.0, host_moe_s=0.0)
        steps = [c.with_rates(years=y).steps().step_s for y in (0.0, 1.0)]
        assert steps[1] / steps[0] == pytest.approx(math.exp(-0.1))


def test_adapters_are_cheaper_than_training_everything(case):
    full, adapters = case().steps(), case(lora=Lora()).steps()
    assert 0.6 < adapters.step_s / full.step_s < 0.8  # 4 N of 6 N, and attention


def test_fp8_is_faster(case):
    assert case(precision="fp8").steps().step_s < case().steps().step_s


def test_unbalanced_routing_is_slower(case):
    c = case(model="mixtral-8x7b", plan=Plan(expert=8, data_shard=32))
    assert c.steps(load_factor=2.0).step_s > 1.2 * c.steps().step_s


def test_a_prediction_module_costs_about_a_layer_and_a_head(case):
    model = catalog.model("deepseek-v3")
    plan = Plan(expert=64, data_shard=1024)
    with_it = case(model=model, cluster="h100-8x128", plan=plan, global_batch=8192).steps()
    without = case(model=replace(model, num_mtp_layers=0), cluster="h100-8x128", plan=plan, global_batch=8192).steps()
    assert 1.01 < with_it.step_s / without.step_s < 1.06


ROWS = (
    {"model": "llama3-8b", "plan": Plan(data_shard=32, sharding=Sharding.PARAMETERS)},
    {"model": "llama3-8b", "plan": INTERLEAVED, "precision": "fp8"},
    {"model": "mixtral-8x7b", "plan": Plan(expert=8, data_shard=16, pipeline=2, schedule=Schedule.ZERO_BUBBLE)},
    {"model": "deepseek-v2-lite", "plan": Plan(expert=4, data_shard=32, recompute=Recompute.FULL)},
    {"model": "gpt3-175b", "plan": Plan(tensor=8, pipeline=4, sequence_parallel=False), "seq_len": 2048},
    {"model": "llama3-8b", "plan": Plan(context=4, data_shard=8), "lora": Lora(), "framework": "torchtitan"},
)


def test_arrays_give_what_rows_give(case):
    cases = [case(**row) for row in ROWS]
    together = estimate_steps(
        model=ModelTable.stack([c.model for c in cases]),
        batch=BatchTable.stack([c.batch for c in cases]),
        plan=PlanTable.stack([c.plan for c in cases]),
        precision=PrecisionTable.stack([c.precision for c in cases]),
        rates=type(cases[0].rates).stack([c.rates for c in cases]),
    )
    alone = [c.steps() for c in cases]
    assert together.step_s == pytest.approx([float(s.step_s) for s in alone], rel=1e-12)
    for name, seconds in together.components_s.items():
        expected = [float(s.components_s[name]) for s in alone]
        assert np.broadcast_to(seconds, len(cases)) == pytest.approx(expected, rel=1e-9, abs=1e-15), name
