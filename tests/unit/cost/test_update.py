"""Work of once a step: reduction, update, gather."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.cost.collectives import all_gather_s, reduce_scatter_s
from meshwright.cost.layers import LayerTimes
from meshwright.cost.stages import split_layers
from meshwright.cost.update import HOST_UPDATES_PER_S, OPTIMIZER_BYTES, data_parallel_s, optimizer_s, trained_parameters
from meshwright.specs.model import Lora
from meshwright.specs.plan import Offload, Plan, Sharding

NO_WINDOW = LayerTimes(forward_s=0.0, input_s=0.0, weight_s=0.0)
FSDP = Plan(data_shard=32, sharding=Sharding.PARAMETERS)
LONG_WINDOW = LayerTimes(forward_s=100.0, input_s=100.0, weight_s=100.0)


def trained(c) -> tuple[float, float]:
    dense, expert = trained_parameters(c.context, split_layers(c.model, c.plan))
    return float(dense), float(expert)


def reduced_s(c, middle: LayerTimes = NO_WINDOW) -> float:
    return float(data_parallel_s(c.context, split_layers(c.model, c.plan), middle))


def updated_s(c) -> float:
    return float(optimizer_s(c.context, split_layers(c.model, c.plan)))


class TestTrainedParameters:
    def test_without_model_parallelism_a_rank_trains_all_matrices(self, case):
        c = case()
        total = float(c.context.parameters.total)
        assert trained(c) == (pytest.approx(total, rel=1e-4), 0)  # but for the norms

    @pytest.mark.parametrize("plan", [Plan(tensor=4, data_shard=8), Plan(tensor=2, pipeline=4, data_shard=4)])
    def test_model_parallelism_divides_them(self, case, plan):
        width = plan.tensor * plan.pipeline
        alone = trained(case())[0]
        assert alone / width <= trained(case(plan=plan))[0] < 1.3 * alone / width  # the first rank has the embedding

    def test_expert_ranks_divide_the_experts_only(self, case):
        alone = trained(case(model="mixtral-8x7b"))
        spread = trained(case(model="mixtral-8x7b", plan=Plan(expert=8, data_shard=32)))
        assert spread == (alone[0], alone[1] / 8)

    def test_adapters_alone_are_trained(self, case):
        dense, expert = trained(case(model="mixtral-8x7b", lora=Lora(rank=16)))
        assert expert == 0
        assert dense == 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024))


class TestDataParallel:
    def test_one_replica_has_nothing_to_reduce(self, case):
        assert reduced_s(case(plan=Plan(tensor=8, pipeline=4))) == 0

    def test_zero_1_moves_the_gradient_once_and_the_weight_once(self, case):
        """Both are at least the ring's bytes over one port a device: fp32 gradients, 16-bit weights."""
        c = case(cluster="h100-8x8", plan=Plan(data_shard=64)).with_rates(data_hidden_ratio=0.0)
        parameters, network = float(c.context.parameters.total), c.rates.network
        port_s = parameters * (4 + 2) * 7 / 8 / 8 / float(network.out_bytes_per_s)
        assert 1 <= reduced_s(c) / port_s < 2.5

    def test_16_bit_gradients_travel_faster(self, case):
        c = case()
        half = replace(c, precision=replace(c.precision, reduce_bytes=2.0))
        assert reduced_s(half) < reduced_s(c)

    def test_fsdp_pays_by_layer_and_here_for_the_tables_around_them(self, case):
        """Embedding and head: gathered once, reduced after each of four micro-batches, a quarter of it hidden."""
        c = case(plan=FSDP).with_rates(gather_hidden_ratio=0.25, data_collective_factor=1.5, data_collective_s=1e-3)
        tables, shard = 2 * 128256 * 4096, c.context.groups.shard
        gather_s = 1.5 * float(all_gather_s(2 * tables, shard)) + 1e-3
        reduce_s = 1.5 * float(reduce_scatter_s(4 * tables, shard)) + 1e-3
        assert reduced_s(c) == pytest.approx(0.75 * (gather_s + 4 * reduce_s))
        assert reduced_s(case(plan=replace(FSDP, data_shard=16, pipeline=2))) > 0

    @pytest.mark.parametrize(
        "plan",
        [
            Plan(data_shard=32, sharding=Sharding.GRADIENTS),
            Plan(data_shard=16, pipeline=2, sharding=Sharding.PARAMETERS),
        ],
    )
    def test_fsdp2_copies_what_it_gathers_and_reduces_once_a_step(self, case, plan):
        copied, plain = (case(plan=plan).with_rates(copies_shards=c) for c in (1, 0))
        num_bytes = 2 * 2 + 2 + float(plain.precision.reduce_bytes)
        copies_s = trained(plain)[0] * num_bytes / float(plain.rates.device.streaming_bytes_per_s)
        assert reduced_s(copied, LONG_WINDOW) - reduced_s(plain, LONG_WINDOW) == pytest.approx(copies_s)

    def test_tensor_ranks_divide_the_tables(self, case):
        c = case(plan=replace(FSDP, tensor=4, data_shard=8)).with_rates(data_collective_s=0.0)
        tables, shard = 2 * 128256 * 4096 / 4, c.context.groups.shard
        gather_s, reduce_s = (float(all_gather_s(2 * tables, shard)), float(reduce_scatter_s(4 * tables, shard)))
        felt = 1 - float(c.rates.gather_hidden_ratio)
        assert reduced_s(c) == pytest.approx(felt * (gather_s + 16 * reduce_s))

    def test_adapters_leave_nothing_of_the_tables_to_reduce(self, case):
        c = case(plan=FSDP, lora=Lora(rank=16)).with_rates(gather_hidden_ratio=0.0, data_collective_s=0.0)
        gather_s = float(all_gather_s(2 * 2 * 128256 * 4096, c.context.groups.shard))
        assert reduced_s(c) == pytest.approx(gather_s)

    def test_one_shard_has_its_tables(self, case):
        assert reduced_s(case(plan=replace(FSDP, data_shard=1, tensor=8, pipeline=1))) == 0

    def test_context_ranks_hold_the_same_parameters(self, case):
        assert reduced_s(case(plan=Plan(context=8, tensor=4))) > 0

    def test_overlap_needs_a_window_and_a_stack_that_uses_it(self, case):
        c = case().with_rates(data_hidden_ratio=1.0, overlap_slowdown_ratio=0.0)
        assert reduced_s(c.with_rates(overlaps_data=1), LONG_WINDOW) == 0
        assert reduced_s(c.with_rates(overlaps_data=1), NO_WINDOW) == pytest.approx(
            reduced_s(c.with_rates(overlaps_data=0))
        )
        assert reduced_s(c.with_rates(overlaps_data=0), LONG_WINDOW) == reduced_s(c.with_rates(overlaps_data=0))

    def test_what_may_overlap_hides_only_partly(self, case):
        c = case().with_rates(overlaps_data=1, overlap_slowdown_ratio=0.0)
        everything = reduced_s(c.with_rates(data_hidden_ratio=0.0), LONG_WINDOW)
        assert reduced_s(c.with_rates(data_hidden_ratio=0.75), LONG_WINDOW) == pytest.approx(everything / 4)

    def test_experts_reduce_over_their_own_ranks(self, case):
        """The ports carry as much either way; what a node adds up beforehand is spared."""
        wide = reduced_s(case(model="mixtral-8x7b", plan=Plan(expert=8, data_shard=32)))
        assert wide < reduced_s(case(model="mixtral-8x7b"))


class TestOptimizer:
    def test_bytes_over_bandwidth(self, case):
        c = case(plan=Plan(data_shard=32, sharding=Sharding.NONE)).with_rates(
            optimizer_passes=1.0, memory_ratio=1.0, unit_pace=0.0
        )
        count = trained(c)[0]
        assert updated_s(c) == pytest.approx(count * OPTIMIZER_BYTES / float(c.rates.device.memory_bytes_per_s))

    @pytest.mark.parametrize("sharding", [Sharding.OPTIMIZER, Sharding.GRADIENTS, Sharding.PARAMETERS])
    def test_sharding_divides_it(self, case, sharding):
        whole = updated_s(case(plan=Plan(data_shard=32, sharding=Sharding.NONE)))
        assert updated_s(case(plan=Plan(data_shard=32, sharding=sharding))) == pytest.approx(whole / 32)

    def test_replicas_do_not(self, case):
        plan = Plan(data_shard=8, data_replicate=4, sharding=Sharding.PARAMETERS)
        assert updated_s(case(plan=plan)) == pytest.approx(
            4 * updated_s(case(plan=replace(plan, data_shard=32, data_replicate=1)))
        )

    def test_states_in_host_memory_travel_over_the_host_link(self, case):
        plan = Plan(data_shard=32)
        away = case(plan=replace(plan, offload=Offload.OPTIMIZER)).with_rates(updates_on_host=0)
        link_s = trained(away)[0] / 32 * 12 / float(away.rates.host_bytes_per_s)
        assert updated_s(away) == pytest.approx(link_s)
        assert updated_s(away) > updated_s(case(plan=plan))

    def test_sharded_parameters_are_masters_that_stay(self, case):
        away = case(plan=replace(FSDP, offload=Offload.OPTIMIZER)).with_rates(updates_on_host=0)
        link_s = trained(away)[0] / 32 * 8 / float(away.rates.host_bytes_per_s)
        assert updated_s(away) == pytest.approx(link_s)

    def test_or_all_masters_do_where_fsdp_shards_them(self, case):
        plan = Plan(data_shard=32, offload=Offload.OPTIMIZER)
        away, kept = (case(plan=plan).with_rates(updates_on_host=0, keeps_masters=n) for n in (0, 1))
        assert updated_s(kept) == pytest.approx(updated_s(away) * 8 / 12)

    def test_or_are_updated_there_by_one_thread_between_copies_of_the_shard(self, case):
        plan = replace(FSDP, offload=Offload.OPTIMIZER)
        away = case(plan=plan).with_rates(updates_on_host=1)
        shard, link = trained(away)[0] / 32, float(away.rates.host_bytes_per_s)
        copied = float(away.context.num_micro_batches) * (2 * 2 + 4)  # two gathers in 16 bits, gradients in 32
        assert updated_s(away) == pytest.approx(shard * (1 / HOST_UPDATES_PER_S + copied / link))
        assert updated_s(away) > 3 * updated_s(case(plan=plan).with_rates(updates_on_host=0))

    def test_megatron_copies_gradients_and_weights_once_a_step(self, case):
        away = case(plan=Plan(data_shard=32, sharding=Sharding.OPTIMIZER, offload=Offload.OPTIMIZER))
        shard, link = trained(away)[0] / 32, float(away.rates.host_bytes_per_s)
        assert float(away.rates.updates_on_host) == 1  # of Megatron-Bridge
        copied = float(away.precision.reduce_bytes + away.precision.gather_bytes)
        assert updated_s(away) == pytest.approx(shard * (1 / HOST_UPDATES_PER_S + copied / link))


def test_the_window_is_of_a_middle_rank(case):
    """A pass of a middle rank hides reduction; forward passes hide the gather."""
    c = case(plan=Plan(pipeline=4, data_shard=8)).with_rates(
        data_hidden_ratio=1.0, overlaps_data=1, overlap_slowdown_ratio=0.0
    )
    backward_only = LayerTimes(forward_s=0.0, input_s=50.0, weight_s=50.0)
    assert 0 < reduced_s(c, backward_only) < reduced_s(c)
