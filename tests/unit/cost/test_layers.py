"""One layer with its communication: who pays what, and what hides behind what."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.catalog import lookup as catalog
from meshwright.cost.layers import LayerParts, layer_parts, layer_times
from meshwright.specs.model import BaseFormat, Lora
from meshwright.specs.plan import Plan, Recompute, Sharding


def parts_of(c) -> LayerParts:
    return layer_parts(c.context, c.layer())


def test_one_device_communicates_nothing(case):
    parts = parts_of(case(cluster="h100-8x1", plan=Plan(data_shard=8)))
    for name in ("tensor_parallel", "context_parallel", "gather", "recompute"):
        assert parts.dense[name].total_s == 0, name


class TestTensorParallel:
    PLAN = Plan(tensor=8, data_shard=4)

    def test_it_is_felt_as_much_as_calibration_says(self, case):
        c = case(plan=self.PLAN)
        all_exposed = parts_of(c.with_rates(tensor_exposed_ratio=1.0)).dense["tensor_parallel"].forward_s
        half = parts_of(c.with_rates(tensor_exposed_ratio=0.5)).dense["tensor_parallel"].forward_s
        assert half == pytest.approx(all_exposed / 2)

    def test_four_ring_passes_over_the_scale_up_link(self, case):
        """Two gathers and two scatters of the activations: never faster than the wire."""
        c = case(plan=self.PLAN).with_rates(tensor_exposed_ratio=1.0)
        wire_s = 4 * 7 / 8 * 8192 * 4096 * 2 / c.rates.network.up_bytes_per_s
        assert 1 <= parts_of(c).dense["tensor_parallel"].forward_s / wire_s < 1.5

    @pytest.mark.parametrize(
        ("framework", "precision", "lora", "sent_bytes"),
        [
            ("megatron-bridge", "bf16", None, 2 + 2),
            ("megatron-bridge", "mxfp8", None, 1 + 2),  # gathered in 8 bits, summed in 16
            ("megatron-bridge", "nvfp4", None, 0.5625 + 2),
            ("megatron-bridge", "mxfp8", Lora(targets=("qkv",)), 2 + 2),  # adapters read what is gathered
            ("torchtitan", "fp8", None, 1 + 2),
            ("torchtitan", "fp8_rowwise", None, 2 + 2),
            ("native", "fp8", None, 2 + 2),
        ],
    )
    def test_what_is_gathered_is_cast_before(self, case, framework, precision, lora, sent_bytes):
        free = {"tensor_exposed_ratio": 1.0, "tensor_collective_s": 0.0, "tensor_collective_factor": 1.0}

        def seconds(seq_len: int) -> float:
            c = case(
                plan=self.PLAN, seq_len=seq_len, cluster="b200-8x4", framework=framework, precision=precision, lora=lora
            )
            return parts_of(c.with_rates(**free)).dense["tensor_parallel"].forward_s

        c = case(cluster="b200-8x4")
        wire_s = 2 * 7 / 8 * 2**20 * 4096 * sent_bytes / c.rates.network.up_bytes_per_s
        assert seconds(2**21) - seconds(2**20) == pytest.approx(wire_s, rel=0.02)

    def test_across_nodes_it_is_slower(self, case):
        inside = parts_of(case(plan=self.PLAN)).dense["tensor_parallel"].forward_s
        across = parts_of(case(plan=Plan(tensor=16, data_shard=2))).dense["tensor_parallel"].forward_s
        assert across > 1.2 * inside

    def test_experts_without_a_shared_one_need_it_for_attention_only(self, case):
        parts = parts_of(case(model="mixtral-8x7b", plan=self.PLAN))
        assert parts.moe["tensor_parallel"].forward_s == parts.dense["tensor_parallel"].forward_s / 2


class TestContextParallel:
    def test_keys_travel_behind_attention(self, case):
        rates = {"context_loss_ratio": 0.0, "overlap_slowdown_ratio": 0.0}
        long = case(seq_len=131_072, plan=Plan(context=8, data_shard=4), global_batch=8).with_rates(**rates)
        short = case(seq_len=2048, plan=Plan(context=16, data_shard=2)).with_rates(**rates)
        assert parts_of(long).dense["context_parallel"].forward_s == 0
        assert parts_of(short).dense["context_parallel"].forward_s > 0

    def test_each_doubling_of_parts_slows_attention(self, case):
        c = case(seq_len=131_072, plan=Plan(context=8, data_shard=4), global_batch=8).with_rates(
            context_loss_ratio=0.05, overlap_slowdown_ratio=0.0
        )
        lost_s = parts_of(c).dense["context_parallel"].forward_s
        assert lost_s == pytest.approx(3 * 0.05 * 8192 / 131_072 * c.layer().attention_core.forward_s)

    def test_fewer_key_heads_travel_less(self, case):
        model = catalog.model("llama3-8b")
        multi_head = replace(model, attention=replace(model.attention, num_kv_heads=32))
        plan = Plan(context=16, data_shard=2)
        grouped = parts_of(case(plan=plan)).dense["context_parallel"].total_s
        assert parts_of(case(model=multi_head, plan=plan)).dense["context_parallel"].total_s > 2 * grouped


class TestExpertParallel:
    MODEL = "gpt-oss-120b"

    def all_to_all_s(self, case, *, cluster="h100-8x8", **changes) -> float:
        plan = Plan(**({"expert": 8, "data_shard": 64} | changes))
        return float(parts_of(case(model=self.MODEL, cluster=cluster, plan=plan)).moe["expert_parallel"].forward_s)

    def test_no_all_to_all_when_every_rank_has_all_experts(self, case):
        assert self.all_to_all_s(case, expert=1) == 0

    def test_an_all_to_all_inside_a_node_is_cheaper_than_across(self, case):
        assert self.all_to_all_s(case, expert=8) < self.all_to_all_s(case, expert=64) / 2

    def test_a_rack_does_not_mind(self, case):
        inside, across = (self.all_to_all_s(case, cluster="gb200-4x16", expert=e) for e in (8, 64))
        assert across < 1.5 * inside

    def test_one_copy_to_each_node_is_never_slower(self, case):
        c = case(model=self.MODEL, cluster="h100-8x8", plan=Plan(expert=64, data_shard=64))
        one, all_copies = c.with_rates(deduplicates=1), c.with_rates(deduplicates=0)
        assert parts_of(one).moe["expert_parallel"].forward_s < parts_of(all_copies).moe["expert_parallel"].forward_s

    def test_dispatch_in_8_bits_travels_less(self, case):
        c = case(model=self.MODEL, cluster="h100-8x8", plan=Plan(expert=64, data_shard=64))
        narrow = replace(c, precision=replace(c.precision, dispatch_bytes=1.0))
        assert parts_of(narrow).moe["expert_parallel"].forward_s < parts_of(c).moe["expert_parallel"].forward_s

    def test_parts_of_an_expert_gather_tokens_inside_the_node(self, case):
        """The all-to-all between nodes carries each row once, unless a stack sends it to every part."""
        whole, parts = ({"expert": 8, "tensor": 4, "data_shard": 16, "expert_tensor": t} for t in (1, 4))
        plan = Plan(**parts)
        copied = case(model=self.MODEL, cluster="h100-8x8", plan=plan).with_rates(copies_rows=1, deduplicates=0)
        gathered = copied.with_rates(copies_rows=0)
        sent, also_gathered = (parts_of(c).moe["expert_parallel"].forward_s for c in (copied, gathered))
        assert self.all_to_all_s(case, **whole) < also_gathered < 0.7 * sent

    def test_parts_of_an_expert_gather_tokens_without_an_all_to_all(self, case):
        assert self.all_to_all_s(case, expert=1, tensor=4, expert_tensor=4, data_shard=16) > 0

    def test_dense_layers_do_not_communicate(self, case):
        assert "expert_parallel" not in parts_of(case()).dense


class TestOnAProcessor:
    """Work that takes time only where the processor that issues also computes."""

    def accumulated(self, c, **rates) -> float:
        return parts_of(c.with_rates(accumulation_passes=1.0, **rates)).dense["accumulation"].total_s

    def test_gradients_are_added_up_in_memory(self, case):
        c = case(plan=Plan(data_shard=8), cluster="h100-8x1", global_batch=32)  # 4 micro-batches, 16 bits
        layer = float(c.context.parameters.attention_layer + c.context.parameters.dense_ffn_layer)
        streaming = float(c.rates.device.streaming_bytes_per_s)
        assert self.accumulated(c) == pytest.approx(layer * (6 + 3 * 10) / 4 / streaming)
        assert parts_of(c).dense["accumulation"].total_s < 1e-6 * self.accumulated(c)

    def test_frozen_weights_have_no_gradients(self, case):
        assert self.accumulated(case(plan=Plan(data_shard=8), lora=Lora())) == 0

    def test_hooks_are_paid_where_states_are_shared_out(self, case):
        plans = (Plan(data_shard=32), Plan(context=2, tensor=16), Plan(tensor=8, pipeline=4))
        shared, context, divided = (parts_of(case(plan=p).with_rates(data_layer_s=1.0)) for p in plans)
        assert shared.dense["hooks"].total_s == context.dense["hooks"].total_s == 1
        assert divided.dense["hooks"].total_s == 0


class TestGather:
    FSDP = Plan(data_shard=32, sharding=Sharding.PARAMETERS)

    def test_only_fully_sharded_layers_gather(self, case):
        for plan in (Plan(data_shard=32), Plan(data_shard=32, sharding=Sharding.GRADIENTS)):
            assert parts_of(case(plan=plan)).dense["gather"].total_s == 0

    def test_large_micro_batches_hide_it_but_for_the_slowdown(self, case):
        """Beside communication of M seconds compute loses M (1 - 1/slowdown)."""
        small, large = (case(plan=replace(self.FSDP, micro_batch=b)) for b in (1, 4))
        rows = [parts_of(c).dense["gather"].total_s for c in (small, large)]
        assert 0 < rows[1] <= rows[0]
        undisturbed = large.with_rates(overlap_slowdown_ratio=0.0)
        assert parts_of(undisturbed).dense["gather"].forward_s == 0

    def test_short_micro_batches_wait_for_the_network(self, case):
        c = case(plan=self.FSDP, seq_len=512)
        layer_bytes = 2 * float(c.context.parameters.attention_layer + c.context.parameters.dense_ffn_layer)
        port_s = 3 / 4 * layer_bytes / 8 / float(c.rates.network.out_bytes_per_s)
        gather = parts_of(c).dense["gather"]
        assert gather.forward_s > port_s / 2
        assert gather.input_s > gather.forward_s  # backward gathers again and reduces

    def test_copies_from_and_to_the_buffers_of_collectives_are_not_hidden(self, case):
        """FSDP2: 2 + 2 bytes of each gathered weight, twice; a gradient of 2 bytes into a sum of 4, once."""
        plain = case(plan=replace(self.FSDP, micro_batch=4)).with_rates(copies_shards=0)
        copied = plain.with_rates(copies_shards=1)
        before, after = (parts_of(c).dense["gather"] for c in (plain, copied))
        p = plain.context.parameters
        weight_s = float(p.attention_layer + p.dense_ffn_layer) / float(plain.rates.device.streaming_bytes_per_s)
        assert after.forward_s - before.forward_s == pytest.approx(4 * weight_s)
        assert after.input_s - before.input_s == pytest.approx((4 + 2 + float(plain.precision.reduce_bytes)) * weight_s)
        assert copied.step_s > plain.step_s

    def test_copies_on_a_cpu_are_measured_with_its_collectives(self, case):
        gpu, cpu = (case(framework="native", cluster=name).rates for name in ("h100-8x4", "cpu-1x4"))
        assert gpu.copies_shards == 1
        assert cpu.copies_shards == cpu.dispatches_tensors == 0

    def test_a_rank_without_shards_of_others_copies_nothing(self, case):
        whole = case(plan=Plan(sharding=Sharding.PARAMETERS), cluster="h100-1x1").with_rates(copies_shards=1)
        assert parts_of(whole).dense["gather"].total_s == 0

    def test_a_pipeline_gathers_once_a_step_instead(self, case):
        plan = Plan(data_shard=8, pipeline=4, sharding=Sharding.PARAMETERS)
        assert parts_of(case(plan=plan, seq_len=512)).dense["gather"].total_s == 0

    def test_a_pipeline_that_frees_layers_gathers_them_for_each_backward_pass(self, case):
        plan = Plan(data_shard=8, pipeline=4, sharding=Sharding.PARAMETERS)
        gather = parts_of(case(plan=plan, seq_len=512).with_rates(regathers=1)).dense["gather"]
        assert gather.forward_s == gather.weight_s == 0
        flat = parts_of(case(plan=replace(plan, pipeline=1), seq_len=512)).dense["gather"]
        assert 0 < gather.input_s < flat.input_s  # which also reduces

    def test_replicas_gather_within_a_node_and_reduce_across(self, case):
        flat = case(plan=self.FSDP, seq_len=512)
        hybrid = case(plan=replace(self.FSDP, data_shard=8, data_replicate=4), seq_len=512)
        assert parts_of(hybrid).dense["gather"].forward_s < parts_of(flat).dense["gather"].forward_s
        assert parts_of(hybrid).dense["gather"].input_s > parts_of(hybrid).dense["gather"].forward_s

    def test_frozen_weights_are_gathered_and_not_reduced(self, case):
        full = parts_of(case(plan=self.FSDP, seq_len=512)).dense["gather"]
        frozen = parts_of(case(plan=self.FSDP, seq_len=512, lora=Lora())).dense["gather"]
        assert frozen.input_s < full.input_s

    def test_a_quantised_base_is_gathered_as_it_is_held(self, case):
        rates = {"gather_hidden_ratio": 0.0, "data_collective_s": 0.0}
        full, codes = (
            case(plan=self.FSDP, seq_len=16, lora=Lora(base_format=kind)).with_rates(**rates)
            for kind in (BaseFormat.FULL, BaseFormat.NF4)
        )
        narrow = replace(full, precision=replace(full.precision, gather_bytes=0.5 + 4 / 64))
        gathers = [parts_of(c).dense["gather"].forward_s for c in (full, narrow, codes)]
        assert gathers[2] == pytest.approx(gathers[1])
        assert gathers[2] < 0.5 * gathers[0]


class TestQuantisedBase:
    LAYER = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14_336
    FFN = 3 * 4096 * 14_336

    def whole_s(self, case, part: str, component: str, *, model: str = "llama3-8b", **plan) -> float:
        """Seconds that a base in 4 bits takes more."""
        made = [
            parts_of(case(model=model, plan=Plan(**plan), lora=Lora(base_format=kind)).with_rates(sustained_ratio=1.0))
            for kind in (BaseFormat.FULL, BaseFormat.NF4)
        ]
        layers = [one.moe if model == "mixtral-8x7b" else one.dense for one in made]
        full, codes = (float(getattr(layer[component], part)) for layer in layers)
        return codes - full

    def seconds(self, case, weights: float) -> float:
        return weights * (0.5 + 4 / 64 + 2) / float(case().rates.device.streaming_bytes_per_s)

    def test_it_becomes_whole_forward_and_backward(self, case):
        for part in ("forward_s", "input_s"):
            found = self.whole_s(case, part, "casts", tensor=2, data_shard=16)
            assert found == pytest.approx(self.seconds(case, self.LAYER / 2))

    def test_experts_become_whole_on_their_ranks(self, case):
        found = self.whole_s(case, "forward_s", "casts", model="mixtral-8x7b", expert=4, data_shard=32)
        attention, experts = 2 * 4096 * (4096 + 1024), 8 / 4 * self.FFN
        assert found == pytest.approx(self.seconds(case, attention + experts))

    @pytest.mark.parametrize(("modules", "share"), [(("mlp",), FFN), (("alternate_matmuls",), LAYER / 2)])
    def test_recomputed_gemms_read_it_whole_again(self, case, modules, share):
        plan = {"data_shard": 32, "recompute": Recompute.SELECTIVE, "recompute_modules": modules}
        assert self.whole_s(case, "input_s", "recompute", **plan) == pytest.approx(self.seconds(case, share))

    def test_recomputed_layers_read_it_whole_again(self, case):
        found = self.whole_s(case, "input_s", "recompute", data_shard=32, recompute=Recompute.FULL)
        assert found == pytest.approx(self.seconds(case, self.LAYER), rel=0.1)


class TestRecompute:
    def again_s(self, case, **plan) -> float:
        return float(parts_of(case(plan=Plan(data_shard=32, **plan))).dense["recompute"].input_s)

    def test_full_runs_the_forward_pass_twice(self, case):
        c = case(plan=Plan(data_shard=32, recompute=Recompute.FULL))
        parts = parts_of(c.with_rates(sustained_ratio=1.0))
        forward = sum(p.forward_s for name, p in parts.dense.items() if name != "gather")
        assert parts.dense["recompute"].input_s == pytest.approx(forward)

    def test_a_stack_that_stops_early_leaves_out_the_last_gemm_and_its_collective(self, case):
        for plan in (Plan(data_shard=32), Plan(tensor=8, data_shard=4)):
            c = case(plan=replace(plan, recompute=Recompute.FULL))
            whole, early = (parts_of(c.with_rates(stops_recompute=stops)).dense for stops in (0, 1))
            down = whole["ffn"].forward_s / 3
            scatter = whole["tensor_parallel"].forward_s / 4
            saved = whole["recompute"].input_s - early["recompute"].input_s
            assert saved == pytest.approx(down + scatter)

    def test_experts_outputs_are_needed_again(self, case):
        c = case(model="mixtral-8x7b", plan=Plan(data_shard=32, expert=8, recompute=Recompute.FULL))
        whole, early = (parts_of(c.with_rates(stops_recompute=stops)).moe for stops in (0, 1))
        assert whole["recompute"].input_s == early["recompute"].input_s

    @pytest.mark.parametrize(("layers", "share"), [(0, 0.0), (8, 0.25), (32, 1.0), (99, 1.0), (None, 1.0)])
    def test_some_layers(self, case, layers, share):
        whole = self.again_s(case, recompute=Recompute.FULL)
        part = self.again_s(case, recompute=Recompute.FULL, recompute_layers=layers)
        assert part == pytest.approx(share * whole)

    def test_modules_add_up(self, case):
        def chosen(*modules: str) -> float:
            return self.again_s(case, recompute=Recompute.SELECTIVE, recompute_modules=modules)

        assert chosen("core_attention", "norm") == pytest.approx(chosen("core_attention") + chosen("norm"))
        assert chosen("moe") == 0  # a dense layer has none

    def test_recomputing_experts_repeats_their_all_to_all(self, case):
        plan = Plan(data_shard=32, expert=8, recompute=Recompute.SELECTIVE, recompute_modules=("moe",))
        parts = parts_of(case(model="mixtral-8x7b", plan=plan)).moe
        names = ("experts", "router", "expert_parallel")
        assert parts["recompute"].input_s == pytest.approx(sum(parts[n].forward_s for n in names))


class TestHost:
    def test_a_fast_host_is_not_seen(self, case):
        c = case()
        parts = parts_of(c)
        times = layer_times(parts.dense, np.float64(0.0))
        assert times.total_s == pytest.approx(sum(p.total_s for p in parts.dense.values()))

    def test_tensor_ranks_of_distributed_tensors_are_dispatched_unless_compiled(self, case):
        def host_s(**plan) -> float:
            c = case(plan=Plan(**plan), cluster="b200-8x1", framework="fsdp2")
            plain, dispatched = (parts_of(c.with_rates(dispatches_tensors=d)) for d in (0, 1))
            assert dispatched.host_moe_s - plain.host_moe_s == pytest.approx(
                dispatched.host_dense_s - plain.host_dense_s
            )
            return float(dispatched.host_dense_s - plain.host_dense_s)

        assert host_s(tensor=8, sequence_parallel=True) == pytest.approx(2.5e-3)
        assert host_s(tensor=8, sequence_parallel=False) == pytest.approx(1.8e-3)
        assert host_s(data_shard=8) == 0
        eager, compiled = (case(framework=name).rates for name in ("fsdp2", "olmo-core"))
        assert eager.dispatches_tensors == 1
        assert compiled.dispatches_tensors == 0

    def test_a_slow_host_sets_the_pace(self, case):
        times = layer_times(parts_of(case()).dense, np.float64(1.0))
        assert times.forward_s == pytest.approx(1.0, rel=1e-3)
        assert times.input_s + times.weight_s == pytest.approx(1.0, rel=1e-3)

    def test_equal_paces_cost_a_fifth(self, case):
        parts = parts_of(case()).dense
        forward = sum(p.forward_s for p in parts.values())
        assert layer_times(parts, forward).forward_s == pytest.approx(2**0.25 * forward)

    def test_recomputation_is_issued_too(self, case):
        parts = parts_of(case(plan=Plan(data_shard=32, recompute=Recompute.FULL))).dense
        times = layer_times(parts, np.float64(1.0))
        assert times.input_s + times.weight_s == pytest.approx(2.0, rel=1e-3)

    def test_experts_take_it_longer(self, case):
        parts = parts_of(case(model="mixtral-8x7b"))
        assert parts.host_moe_s > parts.host_dense_s > 0

    def test_each_part_of_ring_attention_is_launched(self, case):
        def host_s(context: int, *, ring: int) -> float:
            c = case(plan=Plan(context=context, data_shard=32 // context)).with_rates(ring_attention=ring)
            return float(parts_of(c).host_dense_s)

        more = [host_s(context, ring=1) - host_s(context, ring=0) for context in (1, 2, 4, 8)]
        assert more == pytest.approx([0, more[1], 2 * more[1], 4 * more[1]])
        assert 0.3 < more[1] / host_s(1, ring=1) < 1
        assert host_s(8, ring=0) == host_s(1, ring=0)

    def test_each_expert_of_a_rank_starts_kernels(self, case):
        def host_s(expert, **rates):
            plan = Plan(data_shard=32, expert=expert)
            return parts_of(case(model="mixtral-8x7b", plan=plan).with_rates(**rates)).host_moe_s

        none, some, all_experts = (host_s(expert) for expert in (8, 4, 1))
        assert none < some < all_experts
        assert all_experts - none == pytest.approx(7 * (some - none))
        assert host_s(1, host_expert_s=0.0) == host_s(8, host_expert_s=0.0)
        assert host_s(1, fused_experts=1.0) == host_s(8, fused_experts=1.0)


def test_the_power_limit_fills_what_kernels_leave(case):
    c = case().with_rates(sustained_ratio=0.3)
    parts = parts_of(c)
    kernels = sum(p.forward_s for name, p in parts.dense.items() if name not in ("power_limit", "recompute"))
    assert parts.dense["power_limit"].forward_s > 0
    assert kernels + parts.dense["power_limit"].forward_s >= c.layer().dense_floor.forward_s * (1 - 1e-12)
    assert parts_of(case().with_rates(sustained_ratio=1.0)).dense["power_limit"].total_s == 0
