"""Closed forms from the papers, and the published memory figures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.shipped_rows import shipped_runs

from meshwright.accuracy.rows import PublishedRun
from meshwright.accuracy.tables import memory_of, tables_of
from meshwright.catalog import lookup as catalog
from meshwright.cost.flops import count_parameters
from meshwright.cost.memory import MemoryConstants, MemoryTable, estimate_memory, memory_constants
from meshwright.cost.memory.activations import LayerBytes, layer_bytes
from meshwright.cost.memory.states import RankLayers, StateBytes, rank_parameters, state_bytes, state_rates
from meshwright.cost.tables import BatchTable, ModelTable, model_row, plan_row, precision_row
from meshwright.errors import UnknownNameError
from meshwright.specs.features import Features, WireFormat
from meshwright.specs.hardware import Stack
from meshwright.specs.model import Attention, BaseFormat, Experts, Lora, Model
from meshwright.specs.plan import Offload, Plan, Recompute, Schedule, Sharding
from meshwright.specs.precision import PRECISIONS, Precision

MEGATRON = Stack(framework="megatron-lm")
SEQ = 1024
GPT = Model(
    name="gpt",
    hidden=1024,
    num_layers=8,
    vocab=32000,
    attention=Attention(num_heads=16, num_kv_heads=16, head_dim=64),
    ffn_hidden=4096,
    gated_ffn=False,
)
MOE = replace(GPT, name="moe", ffn_hidden=0, gated_ffn=True, experts=Experts(num_experts=8, top_k=2, ffn_hidden=512))
BF16, FP8 = PRECISIONS["bf16"], PRECISIONS["fp8"]


def constants_of(stack: Stack = MEGATRON, **changes: float) -> MemoryConstants:
    return replace(memory_constants(stack), **changes)


def layer(plan: Plan, *, constants: MemoryConstants, precision: Precision = BF16, model: Model = GPT) -> LayerBytes:
    """Bytes of one layer per token of a micro-batch of one sequence."""
    batch = BatchTable(seq_len=SEQ, global_batch=plan.data)
    return layer_bytes(model_row(model), batch, plan_row(plan), precision_row(precision), constants, tokens=1)


def whole_model(model: ModelTable) -> RankLayers:
    return RankLayers(dense=model.num_dense_layers, moe=model.num_moe_layers, embedding=1, head=1)


def states(plan: Plan, *, model: Model = GPT, lora: Lora | None = None, **options: object) -> StateBytes:
    """States of a rank that holds the whole model, without FSDP's gathered layers."""
    table = model_row(model, lora=lora)
    precision = precision_row(options.get("precision", BF16))  # pyright: ignore[reportArgumentType]
    constants = options.get("constants") or constants_of()
    rates = state_rates(table, BatchTable(seq_len=SEQ, global_batch=8), plan_row(plan), precision, constants)  # pyright: ignore[reportArgumentType]
    held = rank_parameters(table, count_parameters(table), plan_row(plan), whole_model(table))
    return state_bytes(replace(rates, gathered=0, gathered_unit=0, unreduced=0), held, table.num_layers)


def memory(
    plan: Plan,
    *,
    model: Model = GPT,
    num_micro: int = 8,
    constants: MemoryConstants | None = None,
    lora: Lora | None = None,
    precision: Precision = BF16,
) -> MemoryTable:
    return estimate_memory(
        model=model_row(model, lora=lora),
        batch=BatchTable(seq_len=SEQ, global_batch=plan.micro_batch * plan.data * num_micro),
        plan=plan_row(plan),
        precision=precision_row(precision),
        constants=constants or constants_of(),
    )


class TestActivations:
    """Korthikanti et al. 2022, arXiv 2205.05198, section 4: GELU, dropout, unfused attention; per token."""

    paper = constants_of(keeps_dropout_masks=1, unfused_attention=1, probability_bytes=5)
    # The paper does not count the log-sum-exp that fused attention kernels keep (4 bytes a head).
    h, heads = GPT.hidden, GPT.attention.num_heads

    def bytes_of(self, plan: Plan) -> float:
        return float(layer(plan, constants=self.paper).dense) - 4 * self.heads / plan.tensor

    def test_no_parallelism(self) -> None:
        assert self.bytes_of(Plan()) == 34 * self.h + 5 * self.heads * SEQ

    def test_tensor_parallel_leaves_10_bytes_whole(self) -> None:
        plan = Plan(tensor=4, sequence_parallel=False)
        assert self.bytes_of(plan) == 10 * self.h + 24 * self.h / 4 + 5 * self.heads * SEQ / 4

    def test_sequence_parallel_splits_everything(self) -> None:
        assert self.bytes_of(Plan(tensor=4)) == (34 * self.h + 5 * self.heads * SEQ) / 4

    def test_selective_recomputation_drops_the_attention_core(self) -> None:
        plan = Plan(tensor=4, recompute=Recompute.SELECTIVE, recompute_modules=("core_attention",))
        assert self.bytes_of(plan) == 34 * self.h / 4

    def test_full_recomputation_keeps_the_layer_input(self) -> None:
        kept = layer(Plan(recompute=Recompute.FULL), constants=self.paper)
        assert kept.dense == 2 * self.h
        assert kept.dense + kept.live_dense == layer(Plan(), constants=self.paper).dense

    def test_half_of_the_layers_recomputed(self) -> None:
        plan = Plan(recompute=Recompute.FULL, recompute_layers=GPT.num_layers // 2)
        none, full = (layer(p, constants=self.paper).dense for p in (Plan(), Plan(recompute=Recompute.FULL)))
        assert layer(plan, constants=self.paper).dense == (none + full) / 2


def test_every_second_gemm_of_llama() -> None:
    """torchtitan's selective op, Llama 3.1 8B: input, q, v, attention, gate (or up) and the last product."""
    plan = Plan(recompute=Recompute.SELECTIVE, recompute_modules=("alternate_matmuls",))
    kept = layer(plan, constants=constants_of(), model=catalog.model("llama3.1-8b")).dense
    assert kept == 2 * (4096 + 4096 + 1024 + 4096 + 14336 + 4096) + 4 * 32


def test_fp8_halves_what_linear_layers_keep() -> None:
    saved = layer(Plan(), constants=constants_of()).dense
    narrow = layer(Plan(), constants=constants_of(), precision=FP8).dense
    assert saved - narrow == 2 * GPT.hidden + GPT.ffn_hidden  # both norm outputs and the product


def test_routed_tokens_are_kept_once_per_expert() -> None:
    kept = layer(Plan(), constants=constants_of(), model=MOE)
    assert MOE.experts is not None
    one = replace(MOE, experts=replace(MOE.experts, top_k=1))
    per_expert = 2 * MOE.hidden + 6 * 512  # input of the expert; gate, up and their product
    assert kept.moe - layer(Plan(), constants=constants_of(), model=one).moe == per_expert


def test_mla_up_projection_drops_queries_keys_and_values() -> None:
    """DeepSeek-V3, 128 heads of 192 for queries and keys and 128 for values."""
    model = catalog.model("deepseek-v3")
    plan = Plan(recompute=Recompute.SELECTIVE, recompute_modules=("mla_up_projection",))
    everything, kept = (layer(p, constants=constants_of(), model=model).moe for p in (Plan(), plan))
    assert everything - kept == 2 * 128 * (192 + 192 + 128)


def test_frozen_feed_forward_keeps_no_inputs() -> None:
    table = model_row(GPT, lora=Lora(targets=("query", "key", "value", "output")))
    arguments = (BatchTable(seq_len=SEQ, global_batch=1), plan_row(Plan()), precision_row(BF16), constants_of())
    frozen = layer_bytes(table, *arguments, tokens=1).dense
    adapted = layer_bytes(model_row(GPT, lora=Lora(targets=("query", "up", "down"))), *arguments, tokens=1).dense
    trained = layer(Plan(), constants=constants_of()).dense
    assert trained - frozen == 2 * GPT.hidden + 2 * GPT.ffn_hidden
    assert adapted <= trained


class TestStates:
    """Bytes per parameter of ZeRO: arXiv 1910.02054, section 5, with fp32 gradients."""

    num = float(count_parameters(model_row(GPT)).total)

    @pytest.mark.parametrize(
        ("sharding", "per_parameter"),
        [
            (Sharding.NONE, 2 + 4 + 12),
            (Sharding.OPTIMIZER, 2 + 4 + 12 / 8),
            (Sharding.GRADIENTS, 2 + 16 / 8),
            (Sharding.PARAMETERS, 16 / 8),  # the fp32 master is the weight
        ],
    )
    def test_zero_stages(self, sharding: Sharding, per_parameter: float) -> None:
        held = states(Plan(data_shard=8, sharding=sharding))
        assert held.weights + held.gradients + held.optimizer == pytest.approx(per_parameter * self.num)

    def test_16_bit_gradients(self) -> None:
        held = states(Plan(data_shard=8), constants=constants_of(accumulates_in_16_bits=1))
        assert held.gradients == pytest.approx(2 * self.num)

    def test_widened_for_the_update(self) -> None:
        changes = {"accumulates_in_16_bits": 1, "step_gradient_bytes": 4}
        held = states(Plan(data_shard=8), constants=constants_of(**changes))
        assert held.optimizer == pytest.approx(16 / 8 * self.num)

    def test_nanotron_keeps_20_bytes_with_data_parallelism(self) -> None:
        """HF Ultra-Scale Playbook, memory for weights, gradients and optimizer states: 2 + 2 + 4 + 12."""
        nanotron = constants_of(Stack(framework="nanotron"))
        held = states(Plan(data_shard=8, sharding=Sharding.NONE), constants=nanotron)
        assert held.weights + held.gradients + held.optimizer == pytest.approx(20 * self.num)

    def test_pure_16_bit_training(self) -> None:
        held = states(Plan(), constants=constants_of(Stack(framework="torchtune")))
        assert held.weights + held.gradients + held.optimizer == pytest.approx(8 * self.num)

    def test_offloaded_optimizer(self) -> None:
        assert states(Plan(offload=Offload.OPTIMIZER)).optimizer == 0

    def test_the_native_engine_keeps_shards_of_masters_here(self) -> None:
        """FSDP gathers from them; one data rank has masters apart, which go."""
        native = constants_of(Stack(framework="native"))
        for plan, here in (
            (Plan(tensor=2, offload=Offload.OPTIMIZER), 0.0),
            (Plan(data_shard=4, offload=Offload.OPTIMIZER), 4 / 4),
            (Plan(data_shard=2, context=2, sharding=Sharding.NONE, offload=Offload.OPTIMIZER), 4),
            (Plan(data_shard=4, sharding=Sharding.PARAMETERS, offload=Offload.OPTIMIZER), 0.0),  # they are the weights
        ):
            assert states(plan, constants=native).optimizer == pytest.approx(here * self.num), plan

    def test_experts_are_shared_by_their_own_ranks(self) -> None:
        """8 data ranks with 8-way experts: each rank holds one expert and shares it with nobody."""
        parameters = count_parameters(model_row(MOE))
        experts = float(parameters.experts_layer) * MOE.num_layers
        held = states(Plan(data_shard=8, expert=8), model=MOE)
        assert held.optimizer == pytest.approx(12 * (float(parameters.total) - experts) / 8 + 12 * experts / 8)
        assert held.weights == pytest.approx(2 * (float(parameters.total) - experts) + 2 * experts / 8)

    def test_dualpipe_holds_two_stages_and_both_ends(self) -> None:
        parameters = count_parameters(model_row(GPT))
        unit = float(parameters.embedding + parameters.head)
        layers = (self.num - unit - GPT.hidden) / GPT.num_layers  # without the last norm
        held = memory(Plan(pipeline=4, schedule=Schedule.DUALPIPE))
        assert held.weights_bytes == pytest.approx(2 * (2 * 2 * layers + unit + GPT.hidden))
        assert held.gradients_bytes == pytest.approx(2 * held.weights_bytes)

    def test_one_stage_holds_one_copy_under_every_schedule(self) -> None:
        held = [memory(Plan(data_shard=8, schedule=schedule)).reserved_bytes for schedule in Schedule]
        assert held == pytest.approx([held[0]] * len(held))

    def test_dualpipe_keeps_most_micro_batches_on_the_first_stage(self) -> None:
        """Of five in flight on rank 0 four have passed the first stage, and one the last with its prediction module."""
        plan = Plan(pipeline=4, schedule=Schedule.DUALPIPE, layers_per_stage=(2, 2, 2, 1))
        model = replace(GPT, vocab=128, num_mtp_layers=1, num_layers=7)
        held, whole = memory(plan, model=model, num_micro=16), memory(Plan(), model=model, num_micro=16)
        layer = float(whole.activations_bytes - 2 * SEQ * GPT.hidden) / (model.num_layers + 1)
        assert held.rank == 0
        assert held.activations_bytes == pytest.approx(4 * (2 * layer + 2 * SEQ * GPT.hidden) + 2 * layer)


class TestLora:
    lora = Lora(rank=8)

    def test_only_adapters_are_trained(self) -> None:
        table = model_row(GPT, lora=self.lora)
        adapters = float(count_parameters(table).lora_layer) * GPT.num_layers
        held = states(Plan(data_shard=8, sharding=Sharding.NONE), lora=self.lora)
        assert held.gradients == pytest.approx(4 * adapters)
        assert held.optimizer == pytest.approx(12 * adapters)
        assert held.weights == pytest.approx(2 * (TestStates.num + adapters))

    @pytest.mark.parametrize(
        ("sharding", "weights", "gradients", "optimizer"),
        [
            (Sharding.OPTIMIZER, 1, 1, 8),
            (Sharding.GRADIENTS, 1, 8, 8),
            (Sharding.PARAMETERS, 8, 8, 12),  # the fp32 parameter is the master: 8 bytes of states for 12
        ],
    )
    def test_adapters_are_sharded_as_the_plan_says(self, sharding, weights, gradients, optimizer) -> None:
        whole = states(Plan(data_shard=8, sharding=Sharding.NONE), lora=self.lora)
        held = states(Plan(data_shard=8, sharding=sharding), lora=self.lora)
        twice = states(Plan(data_shard=8, sharding=sharding), lora=replace(self.lora, rank=16))
        more = states(Plan(data_shard=8, sharding=Sharding.NONE), lora=replace(self.lora, rank=16))
        assert whole.gradients / held.gradients == pytest.approx(gradients)
        assert whole.optimizer / held.optimizer == pytest.approx(optimizer)
        if sharding is not Sharding.PARAMETERS:  # which gathers those of two layers, too
            assert (more.weights - whole.weights) / (twice.weights - held.weights) == pytest.approx(weights)

    def test_frozen_weights_are_kept_in_8_bits_under_fp8(self) -> None:
        wide, narrow = (states(Plan(), lora=self.lora, precision=p) for p in (BF16, FP8))
        assert wide.weights - narrow.weights == pytest.approx(TestStates.num)

    @pytest.mark.parametrize("sharding", [Sharding.NONE, Sharding.PARAMETERS])
    def test_a_quantised_base_is_held_in_its_format_with_its_scales(self, sharding: Sharding) -> None:
        plan, parameters = Plan(data_shard=8, sharding=sharding), count_parameters(model_row(GPT))
        matrices = GPT.num_layers * float(parameters.attention_layer + parameters.dense_ffn_layer)
        full = states(plan, lora=self.lora)
        codes = states(plan, lora=replace(self.lora, base_format=BaseFormat.NF4))
        ranks = 8 if sharding is Sharding.PARAMETERS else 1
        assert full.weights - codes.weights == pytest.approx(matrices * (2 - 0.5 - 4 / 64) / ranks)
        assert (codes.gradients, codes.optimizer) == (full.gradients, full.optimizer)

    def test_quantised_experts_are_held_in_their_format(self) -> None:
        model = replace(GPT, experts=Experts(num_experts=8, top_k=2, ffn_hidden=512))
        plan, parameters = Plan(data_shard=8, expert=4), count_parameters(model_row(model))
        full, codes = (
            states(plan, model=model, lora=replace(self.lora, base_format=kind))
            for kind in (BaseFormat.FULL, BaseFormat.NF4)
        )
        matrices = GPT.num_layers * float(parameters.attention_layer + parameters.experts_layer / 4)
        assert full.weights - codes.weights == pytest.approx(matrices * (2 - 0.5 - 4 / 64))

    def test_one_matrix_of_a_quantised_base_is_whole_at_a_time(self) -> None:
        plan = Plan(tensor=2, recompute=Recompute.FULL)
        full, codes = (
            memory(plan, lora=replace(self.lora, base_format=kind), model=replace(GPT, vocab=2))
            for kind in (BaseFormat.FULL, BaseFormat.NF4_DOUBLE)
        )
        whole = 2 * GPT.hidden * GPT.ffn_hidden / 2  # 16 bits, on two tensor ranks
        assert codes.workspace_bytes - full.workspace_bytes == pytest.approx(whole)

    def test_fsdp_gathers_a_quantised_base_as_it_is_held(self) -> None:
        plan = Plan(data_shard=8, sharding=Sharding.PARAMETERS)
        full, codes = (
            memory(plan, lora=replace(self.lora, base_format=kind)) for kind in (BaseFormat.FULL, BaseFormat.NF4)
        )
        parameters = count_parameters(model_row(GPT))
        layer = float(parameters.attention_layer + parameters.dense_ffn_layer)
        saved = (2 - 0.5 - 4 / 64) * layer * (GPT.num_layers / 8 + 2)
        norms = 2 * (2 - 0.5 - 4 / 64) * float(parameters.total) * 0.001
        assert full.weights_bytes - codes.weights_bytes == pytest.approx(saved, abs=norms)


class TestFsdp:
    def test_two_layers_and_the_embeddings_are_gathered(self) -> None:
        plan = Plan(data_shard=8, sharding=Sharding.PARAMETERS)
        table = model_row(GPT)
        parameters = count_parameters(table)
        unit = float(parameters.embedding + parameters.head)
        layer_parameters = (float(parameters.total) - unit) / GPT.num_layers
        rates = state_rates(
            table, BatchTable(seq_len=SEQ, global_batch=8), plan_row(plan), precision_row(BF16), constants_of()
        )
        held = state_bytes(rates, rank_parameters(table, parameters, plan_row(plan), whole_model(table)), 8)
        assert held.weights == pytest.approx(4 * TestStates.num / 8 + 2 * (2 * layer_parameters + unit))
        assert held.gradients == pytest.approx(4 * TestStates.num / 8 + 4 * layer_parameters)

    @pytest.mark.parametrize(("vocab", "gathered"), [(1024, 2 * 1024 * 4096), (32000, 1024 * 32000)])
    def test_xla_gathers_matrix_by_matrix(self, vocab: int, gathered: int) -> None:
        """The largest matrix of a layer and the one after it, or the head where that is larger."""
        plan, model = Plan(data_shard=8, sharding=Sharding.PARAMETERS), replace(GPT, vocab=vocab)
        table = memory(plan, model=model, constants=constants_of(Stack(framework="maxtext")))
        num = float(count_parameters(model_row(model)).total)
        assert table.weights_bytes == pytest.approx(4 * num / 8 + 2 * gathered)
        assert table.gradients_bytes == pytest.approx(4 * num / 8 + 4 * 1024 * 4096)

    def test_a_pipeline_keeps_weights_gathered_and_gradients_unreduced(self) -> None:
        """Shards of gradients take the place of whole ones, so those are all there is."""
        sharded = Plan(pipeline=2, data_shard=8, sharding=Sharding.PARAMETERS)
        replicated = replace(sharded, sharding=Sharding.NONE)
        assert memory(sharded).weights_bytes > memory(replicated).weights_bytes
        assert memory(sharded).gradients_bytes == memory(replicated).gradients_bytes

    def test_one_rank_gathers_nothing(self) -> None:
        assert memory(Plan(sharding=Sharding.PARAMETERS)).weights_bytes == pytest.approx(4 * TestStates.num)


class TestFullestRank:
    def test_first_rank_keeps_most_micro_batches(self) -> None:
        small_vocab = replace(GPT, vocab=128)
        table = memory(Plan(pipeline=4, data_shard=1), model=small_vocab, num_micro=8)
        assert table.rank == 0

    def test_last_rank_has_the_logits(self) -> None:
        table = memory(Plan(pipeline=2, micro_batch=4), model=replace(GPT, vocab=500_000, num_layers=2), num_micro=1)
        assert table.rank == 1

    def test_a_tied_head_is_a_copy_on_the_last_rank(self) -> None:
        last = RankLayers(dense=2, moe=0, embedding=0, head=1)
        for tied in (True, False):
            table = model_row(replace(GPT, tied_embeddings=tied))
            held = rank_parameters(table, count_parameters(table), plan_row(Plan(pipeline=4)), last)
            assert held.unit == GPT.vocab * GPT.hidden

    def test_v_shaped_schedules_put_the_head_on_the_first_rank(self) -> None:
        plan = Plan(pipeline=4, virtual_pipeline=2, schedule=Schedule.ZBV)
        assert memory(plan, model=replace(GPT, vocab=500_000)).rank == 0

    def test_more_layers_in_the_middle_than_at_the_ends(self) -> None:
        """70 layers on 12 ranks: 5 at the ends, 6 between; the second rank keeps 11 micro-batches of 6 layers."""
        model = replace(GPT, num_layers=70, vocab=128)
        uneven = memory(Plan(pipeline=12), model=model, num_micro=64).activations_bytes
        kept = layer(Plan(), constants=constants_of(), model=model).dense * SEQ
        assert uneven == pytest.approx(11 * 6 * kept)

    def test_parts_add_up(self) -> None:
        table = memory(Plan(pipeline=2, tensor=2, data_shard=2))
        parts = ("weights", "gradients", "optimizer", "activations", "workspace")
        assert table.allocated_bytes == pytest.approx(sum(getattr(table, f"{name}_bytes") for name in parts))
        assert table.reserved_bytes > table.allocated_bytes


@pytest.mark.parametrize(("framework", "num_bytes"), [("megatron-lm-2021", 4), ("megatron-deepspeed", 4 + 2)])
def test_gradients_that_a_hook_adds_to_their_accumulators_are_freed(framework: str, num_bytes: float) -> None:
    table = memory(Plan(data_shard=8), constants=constants_of(Stack(framework=framework)))
    assert table.gradients_bytes == pytest.approx(num_bytes * TestStates.num)


def test_gradients_of_one_backward_pass_take_the_place_of_activations() -> None:
    torchtitan = constants_of(Stack(framework="torchtitan"))
    plan = Plan(sharding=Sharding.NONE)
    one, many = (memory(plan, num_micro=n, constants=torchtitan) for n in (1, 2))
    assert many.gradients_bytes == pytest.approx(4 * TestStates.num)
    assert one.gradients_bytes == pytest.approx(max(4 * TestStates.num - float(one.activations_bytes), 0))


class TestSwitches:
    """Switches of a run's stack that move or narrow what a device keeps."""

    def switched(self, framework: str, **features: object) -> MemoryConstants:
        return memory_constants(Stack(framework=framework, features=Features(**features)))  # pyright: ignore[reportArgumentType]

    @pytest.mark.parametrize("share", [0.25, 1.0])
    def test_offloaded_activations_leave_two_layers_here(self, share: float) -> None:
        here = memory(Plan(), constants=self.switched("megatron-lm"))
        there = memory(Plan(), constants=self.switched("megatron-lm", offloaded_activations=share))
        kept = float(layer(Plan(), constants=constants_of()).dense) * SEQ
        assert here.activations_bytes - there.activations_bytes == pytest.approx(share * (GPT.num_layers - 2) * kept)

    def test_of_two_layers_none_is_offloaded(self) -> None:
        shallow = replace(GPT, num_layers=2)
        sizes = [
            memory(
                Plan(), model=shallow, constants=self.switched("megatron-lm", offloaded_activations=x)
            ).activations_bytes
            for x in (0.0, 1.0)
        ]
        assert sizes[0] == sizes[1]

    def test_one_buffer_accumulates_and_is_reduced(self) -> None:
        for framework, form, narrow in (
            ("megatron-lm", WireFormat.BF16, 1),
            ("primus-megatron", WireFormat.BF16, 1),
            ("megatron-bridge", WireFormat.FP32, 0),
            ("megatron-bridge", None, 1),
            ("torchtitan", WireFormat.BF16, 0),
        ):
            constants = self.switched(framework, gradient_format=form)
            assert constants.accumulates_in_16_bits == narrow, framework

    def test_gradients_that_wait_for_their_reduction_have_the_format_on_the_wire(self) -> None:
        plan = Plan(sharding=Sharding.PARAMETERS, data_shard=4, pipeline=2)  # unreduced until the step ends
        wide, narrow = (
            memory(plan, num_micro=8, constants=self.switched("torchtitan", gradient_format=form))
            for form in (None, WireFormat.BF16)
        )
        assert wide.gradients_bytes / narrow.gradients_bytes == pytest.approx(4 / 2)

    @pytest.mark.parametrize("sharding", [Sharding.GRADIENTS, Sharding.PARAMETERS])
    def test_gradients_that_are_reduced_once_are_whole_between_micro_batches(self, sharding) -> None:
        """In the format of gathered parameters, to which autograd adds them; one micro-batch needs no sum."""
        plan = Plan(sharding=sharding, data_shard=4)
        once, each = (self.switched("transformers", reduces_once=value) for value in (True, False))
        several, one = (memory(plan, num_micro=number, constants=once) for number in (8, 1))
        assert one.gradients_bytes == memory(plan, num_micro=1, constants=each).gradients_bytes
        unsharded = memory(Plan(sharding=Sharding.NONE, data_replicate=4), num_micro=8, constants=each)
        assert several.gradients_bytes == pytest.approx(unsharded.gradients_bytes)
        assert several.weights_bytes == one.weights_bytes


class TestConstants:
    def test_a_stack_section_overrides_its_lineage(self) -> None:
        assert memory_constants(Stack(framework="megatron-bridge")).accumulates_in_16_bits == 1
        assert memory_constants(MEGATRON).accumulates_in_16_bits == 0

    def test_a_model_that_is_loaded_in_16_bits_has_no_master(self) -> None:
        plan = Plan(data_shard=8, sharding=Sharding.PARAMETERS)
        full, half = (
            memory(plan, constants=constants_of(Stack(framework=f))) for f in ("torchtitan", "nemo-automodel")
        )
        assert half.optimizer_bytes == pytest.approx(full.optimizer_bytes / 2)
        assert full.weights_bytes - half.weights_bytes == pytest.approx(2 * TestStates.num / 8)

    def test_policies_of_names_keep_no_more_than_these(self) -> None:
        """MaxText's save_qkv_proj: the layer's input, queries, keys and values."""
        plan = Plan(recompute=Recompute.SELECTIVE, recompute_modules=("norm", "activation", "core_attention", "mlp"))
        named, kept = (layer(plan, constants=constants_of(Stack(framework=f))).dense for f in ("maxtext", "nemo"))
        heads = GPT.attention.num_heads, GPT.attention.num_kv_heads, GPT.attention.head_dim
        assert named == pytest.approx(2 * (GPT.hidden + (heads[0] + 2 * heads[1]) * heads[2]))
        assert kept - named == pytest.approx(2 * GPT.hidden + (2 * heads[2] + 4) * heads[0])

    def test_attention_and_norm_of_a_run(self) -> None:
        stack = Stack(framework="aa-scaling")
        assert memory_constants(stack).norm_copy_bytes > 0
        assert memory_constants(stack, fused_norm=True).norm_copy_bytes == 0
        assert memory_constants(stack, unfused_attention=True).unfused_attention == 1

    def test_unknown_stack(self) -> None:
        with pytest.raises(UnknownNameError, match="nanotronn"):
            memory_constants(Stack(framework="nanotronn"))


@pytest.fixture(scope="module")
def measured() -> list[PublishedRun]:
    return [run for run in shipped_runs() if run.conditions and run.memory_bytes]


@pytest.mark.parametrize(
    ("source", "part", "median"),
    [
        ("simumax_b200", "allocated_bytes", 0.02),
        ("hf_ultrascale", "allocated_bytes", 0.07),
        ("torchtitan", "reserved_bytes", 0.07),
    ],
)
def test_published_memory(measured: list[PublishedRun], source: str, part: str, median: float) -> None:
    runs = [run for run in measured if run.source_key == source]
    conditions = [run.conditions for run in runs if run.conditions]
    predicted = getattr(memory_of(conditions, tables_of(conditions)), part)
    error = predicted / np.array([run.memory_bytes for run in runs]) - 1
    assert np.median(np.abs(error)) < median
