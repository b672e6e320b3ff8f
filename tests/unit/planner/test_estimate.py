"""One pinned plan: step, interval, tier, memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.calibration.correction import EfficiencyCorrection
from meshwright.calibration.parameters import fitted, prior
from meshwright.catalog import lookup as catalog
from meshwright.cost.flops import count_parameters, model_flops_per_token
from meshwright.planner import PlanRequest
from meshwright.planner.estimate import PlanEstimate, estimate_plan, estimate_ranked, notes_on_software
from meshwright.planner.finalists import simulated_step_s
from meshwright.planner.search import search
from meshwright.planner.training import state_bytes
from meshwright.specs.estimate import Tier
from meshwright.specs.hardware import Stack
from meshwright.specs.model import Lora
from meshwright.specs.plan import Plan, Schedule, Sharding
from meshwright.specs.precision import PRECISIONS
from meshwright.specs.run import Preference, PreferenceLoss

FLAT = Plan(data_shard=32)
PIPELINED = Plan(tensor=2, pipeline=4, virtual_pipeline=2, data_shard=4, schedule=Schedule.INTERLEAVED)


def request(*, model="llama3-8b", cluster="h100-8x4", precision="bf16", framework="megatron-bridge") -> PlanRequest:
    return PlanRequest(
        model=catalog.model(model),
        cluster=catalog.cluster(cluster),
        seq_len=8192,
        global_batch=128,
        precision=PRECISIONS[precision],
        stack=Stack(framework=framework),
    )


@pytest.fixture(scope="module", params=[FLAT, PIPELINED], ids=["flat", "pipelined"])
def estimate(request: pytest.FixtureRequest) -> PlanEstimate:
    return estimate_plan(globals()["request"](), request.param)


def test_components_add_up_to_the_step(estimate):
    assert sum(estimate.step.components_s.values()) == pytest.approx(estimate.step.step.value)


@pytest.mark.parametrize(
    ("loss", "lora", "ratio_of_layers", "ratio_of_head"),
    [
        # A frozen matrix takes 2 GEMMs, one is the reference's; of the head 2, with the logits of the backward pass.
        (PreferenceLoss.DPO, Lora(), 3 / 2, 4 / 2),
        (PreferenceLoss.SIMPO, Lora(), 1, 3 / 2),
        # Where the head is trained with the adapters, the reference is computed before the first step.
        (PreferenceLoss.DPO, Lora(modules_to_save=("embedding", "head")), 1, 4 / 3),
        # A trained one takes 3.
        (PreferenceLoss.DPO, None, 1, 4 / 3),
    ],
)
def test_pairs_of_answers_take_the_passes_of_their_loss(loss, lora, ratio_of_layers, ratio_of_head):
    plain = replace(request(framework="native"), lora=lora)
    pairs = replace(plain, preference=Preference(loss=loss))
    before, after = (estimate_plan(one, FLAT).step for one in (plain, pairs))
    layers = after.components_s["ffn"] / before.components_s["ffn"]
    assert layers == pytest.approx(ratio_of_layers, rel=0.02)  # rates depend on shapes a little
    head = after.components_s["head"] / before.components_s["head"]
    assert head == pytest.approx(ratio_of_head, rel=0.1)  # passes over logits, and their sums, are not GEMMs
    assert sum(after.components_s.values()) == pytest.approx(after.step.value)
    assert after.memory.reserved_bytes == before.memory.reserved_bytes


def test_dropout_keeps_a_mask_of_each_branch():
    plain = request(framework="native")
    dropped = replace(plain, residual_dropout=0.1)
    plan = Plan(data_shard=32, sharding=Sharding.NONE)
    before, after = (estimate_plan(one, plan) for one in (plain, dropped))
    num = 2 * plain.model.hidden * plain.model.num_layers * plain.seq_len * plan.micro_batch
    assert after.memory.activations_bytes - before.memory.activations_bytes == pytest.approx(num, rel=0.01)


def test_modules_that_are_trained_beside_adapters_have_gradients_and_states():
    plain, saved = (
        replace(request(framework="native"), lora=Lora(modules_to_save=names)) for names in ((), ("embedding", "head"))
    )
    plan = Plan(data_shard=32, sharding=Sharding.NONE)
    before, after = (estimate_plan(one, plan) for one in (plain, saved))
    count = 2 * plain.model.vocab * plain.model.hidden
    assert after.memory.gradients_bytes - before.memory.gradients_bytes == pytest.approx(4 * count, rel=0.01)
    assert after.memory.optimizer_bytes - before.memory.optimizer_bytes == pytest.approx(12 * count, rel=0.01)
    assert state_bytes(saved) - state_bytes(plain) == pytest.approx(14 * count)
    head = after.step.components_s["head"] / before.step.components_s["head"]
    assert head == pytest.approx(3 / 2, rel=0.1)


def test_dora_takes_a_sum_of_each_weight_and_keeps_its_outputs_twice():
    plain, dora = (replace(request(framework="native"), lora=Lora(use_dora=one)) for one in (False, True))
    before, after = (estimate_plan(one, FLAT) for one in (plain, dora))
    hidden, kv = 4096, 1024
    assert after.memory.activations_bytes - before.memory.activations_bytes == pytest.approx(
        32 * 8192 * 4 * (2 * hidden + 2 * kv), rel=0.01
    )
    assert after.memory.workspace_bytes - before.memory.workspace_bytes == pytest.approx(8 * hidden**2, rel=0.05)
    assert dora.model_table.num_layers * count_parameters(dora.model_table).lora_layer == pytest.approx(
        plain.model_table.num_layers * (count_parameters(plain.model_table).lora_layer + 2 * hidden + 2 * kv)
    )
    assert after.step.components_s["adapters"] > 2 * before.step.components_s["adapters"]


def test_rate_step_and_utilization_are_one_statement(estimate):
    step = estimate.step
    tokens = 128 * 8192 / 32
    assert step.tokens_per_s_per_device.value == pytest.approx(tokens / step.step.value)
    flops = model_flops_per_token(request().model_table, seq_len=8192)
    peak = request().cluster.accelerator.peak_flops_per_s["bf16"]
    assert step.mfu.value == pytest.approx(step.tokens_per_s_per_device.value * flops / peak)
    assert 0.2 < step.mfu.value < 0.7


def test_all_intervals_have_one_relative_width(estimate):
    step = estimate.step
    for quantity in (step.step, step.tokens_per_s_per_device, step.mfu):
        assert quantity.low < quantity.value < quantity.high
        assert quantity.high / quantity.value == pytest.approx(quantity.value / quantity.low)
        assert quantity.high / quantity.low == pytest.approx(step.step.high / step.step.low)


def test_what_is_uncertain_adds_up_to_all_of_it(estimate):
    assert sum(estimate.uncertainty.values()) == pytest.approx(1.0)
    assert min(estimate.uncertainty.values()) >= 0
    assert set(estimate.uncertainty) > set(prior().parameters)


def test_pipelines_are_simulated():
    estimate = estimate_plan(request(), PIPELINED)
    assert estimate.timeline is not None
    assert estimate.step.step.value == pytest.approx(simulated_step_s(PIPELINED, estimate.steps))
    assert estimate_plan(request(), FLAT).timeline is None


def test_plans_of_a_search_are_estimated_as_each_alone():
    wanted = replace(request(), engine="megatron").fixing(tensor=2)
    found = search(wanted, top=6)
    assert {ranked.is_simulated for ranked in found.plans} == {True, False}
    for together in estimate_ranked(wanted, found.plans):
        alone = estimate_plan(wanted, together.plan)
        for name in ("step", "tokens_per_s_per_device"):
            assert vars(getattr(together.step, name)) == pytest.approx(vars(getattr(alone.step, name)))
        assert together.step.components_s == pytest.approx(alone.step.components_s)
        assert together.step.memory.reserved_bytes == pytest.approx(alone.step.memory.reserved_bytes)
        assert together.uncertainty == pytest.approx(alone.uncertainty)


def test_more_busy_experts_take_longer():
    wanted = request(model="mixtral-8x7b")
    plan = Plan(expert=8, data_shard=32)
    even, uneven = (estimate_plan(wanted, plan, load_factor=f).step.step.value for f in (1.0, 1.5))
    assert uneven > 1.1 * even


def test_formats_are_compared_with_their_own_peak():
    half, eight = (estimate_plan(request(precision=p), FLAT).step for p in ("bf16", "fp8"))
    assert eight.step.value < half.step.value
    assert eight.mfu.value < half.mfu.value


def test_memory_says_whether_it_fits():
    memory = estimate_plan(request(), PIPELINED).step.memory
    assert memory.fits
    assert memory.usable_bytes == pytest.approx(0.95 * memory.capacity_bytes)
    assert memory.capacity_bytes == request().cluster.accelerator.memory_bytes
    parts = (
        memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes
        + memory.activations_bytes + memory.workspace_bytes
    )  # fmt: skip
    assert memory.allocated_bytes == pytest.approx(parts)
    assert memory.reserved_bytes > memory.allocated_bytes
    large = replace(request(model="llama3-70b"), precision=PRECISIONS["bf16"])
    assert not estimate_plan(large, replace(FLAT, micro_batch=4)).step.memory.fits


@pytest.mark.parametrize(
    ("cluster", "framework", "said"),
    [
        ("h100-8x4", "megatron-bridge", ""),
        ("h100-8x4", "torchtitan", ""),
        ("h100-8x4", "native", "was never measured on Hopper; its rates here are from torchtitan; engine: any"),
        ("b200-8x4", "native", "from torchtitan, which was not measured on it either; engine: any estimates NeMo"),
        ("b200-8x4", "torchtitan", "no measured run on Blackwell of TorchTitan, or of its relatives, informs"),
        ("mi355x-8x4", "native", "estimates AMD Primus"),
        ("vr200-4x18", "megatron-bridge", "no measured run on Rubin of NeMo"),
        ("cpu-1x1", "native", ""),
    ],
)  # fmt: skip
def test_an_engine_that_was_not_measured_on_an_architecture_is_named(cluster, framework, said):
    engine = {"megatron-bridge": "megatron"}.get(framework, framework)
    noted = notes_on_software(replace(request(cluster=cluster, framework=framework), engine=engine))
    assert len(noted) == bool(said)
    assert said in "".join(noted)


def test_another_engine_changes_nothing_where_the_run_states_its_software():
    (said,) = notes_on_software(replace(request(framework="transformers"), engine="native"))
    assert "on Hopper" in said
    assert "engine: any" not in said


def test_what_the_user_has_measured_needs_no_note():
    asked = request(cluster="b200-8x4", framework="native")
    one = np.zeros(1)
    flat = EfficiencyCorrection(axes=("m",), x=one[:, None], y=one, noise=one, mean=0.0, length=1.0, sd=1.0)
    own = replace(fitted(), corrections={"gemm/forward/bf16": flat})
    assert notes_on_software(replace(asked, calibration=own)) == []


class TestTier:
    """Interpolated where device and software were measured, datasheet where one was, guessed where neither."""

    @staticmethod
    def tier(cluster: str, framework: str, calibration=None) -> Tier:
        wanted = request(cluster=cluster, framework=framework)
        return estimate_plan(wanted, FLAT, calibration=calibration).step.step.tier

    def test_from_what_was_measured(self):
        assert self.tier("h100-8x4", "megatron-bridge") is Tier.INTERPOLATED
        assert self.tier("h100-8x4", "megatron-bridge", prior()) is Tier.GUESSED

    def test_a_known_stack_on_an_unknown_device(self):
        unseen = replace(fitted(), offsets={k: o for k, o in fitted().offsets.items() if not k[2].startswith("h100/")})
        assert self.tier("h100-8x4", "megatron-bridge", unseen) is Tier.DATASHEET
        wide = estimate_plan(request(), FLAT, calibration=unseen).step.step
        narrow = estimate_plan(request(), FLAT).step.step
        assert wide.high / wide.low > narrow.high / narrow.low
