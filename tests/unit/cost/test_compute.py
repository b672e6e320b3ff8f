"""Kernel times: limits that no kernel passes, quantisation, and what each module of a layer takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.calibration.correction import EfficiencyCorrection
from meshwright.catalog import lookup as catalog
from meshwright.cost.attention import ATTENTION_FILL_KEYS, EXPONENTIAL_SHARES, SPLIT_BACKWARD_GEMMS
from meshwright.cost.compute import KernelCorrections, gemm_s, gemm_tiles
from meshwright.cost.passes import PassTimes
from meshwright.specs.model import Attention, Lora, Model
from meshwright.specs.plan import Plan

UNITS, FLOPS, BANDWIDTH = 128, 1e15, 3e12
UNBOUND = 1e30


def seconds(m: float, n: float, k: float, **changes: float) -> float:
    rates = {"flops_per_s": FLOPS, "bytes_per_s": BANDWIDTH, "num_units": UNITS, "kernel_s": 0.0} | changes
    return float(gemm_s(m, n, k, **rates))


class TestGemm:
    def test_a_large_one_reaches_the_rate(self):
        m = n = k = 16_384
        share = 2 * m * n * k / FLOPS / seconds(m, n, k)
        assert 0.97 < share < 1
        assert share == pytest.approx(k / (k + gemm_tiles().depth), rel=1e-6)

    def test_one_more_row_of_tiles_starts_another_wave(self):
        full = seconds(UNITS * 256, 128, 4096, bytes_per_s=UNBOUND)
        assert seconds(UNITS * 256 + 1, 128, 4096, bytes_per_s=UNBOUND) > 1.3 * full

    def test_work_below_one_wave_takes_a_wave(self):
        assert seconds(64, 128, 8192, bytes_per_s=UNBOUND) == seconds(64, 512, 8192, bytes_per_s=UNBOUND)

    def test_without_units_work_is_not_quantised_in_waves(self):
        few = seconds(256, 128, 8192, num_units=0, bytes_per_s=UNBOUND)
        assert seconds(512, 128, 8192, num_units=0, bytes_per_s=UNBOUND) == pytest.approx(2 * few)

    def test_a_thin_one_moves_its_bytes(self):
        m, n, k = 1, 8192, 8192
        bf16 = seconds(m, n, k, flops_per_s=UNBOUND)
        assert bf16 == pytest.approx(2 * (m * k + k * n + m * n) / BANDWIDTH)
        narrow = seconds(m, n, k, flops_per_s=UNBOUND, element_bytes=1.0)
        assert narrow == pytest.approx((m * k + k * n + 2 * m * n) / BANDWIDTH)

    def test_a_kernel_starts_once_whatever_the_groups(self):
        more = seconds(512, 512, 512, groups=16, kernel_s=5e-6) - seconds(512, 512, 512, groups=16)
        assert more == pytest.approx(5e-6)

    def test_groups_fill_waves_together(self):
        one = seconds(UNITS * 256, 128, 4096, bytes_per_s=UNBOUND)
        assert seconds(256, 128, 4096, groups=UNITS, bytes_per_s=UNBOUND) == pytest.approx(one)

    @pytest.mark.parametrize("shape", [(0, 5, 5), (5, 0, 5), (5, 5, 0)])
    def test_no_work_takes_no_time(self, shape: tuple[int, int, int]):
        assert seconds(*shape, kernel_s=5e-6) == 0


def test_passes_add_and_scale():
    one = PassTimes(forward_s=1.0, input_s=2.0, weight_s=3.0)
    twice = one + one
    assert twice == one.times(2.0)
    assert twice.total_s == 12.0


class TestLayer:
    def test_the_backward_pass_of_a_matrix_is_about_two_forward_passes(self, case):
        ffn = case().layer().dense_ffn
        assert ffn.input_s == pytest.approx(ffn.forward_s, rel=0.1)
        assert ffn.weight_s == pytest.approx(ffn.forward_s, rel=0.1)

    def test_frozen_matrices_have_no_weight_gradient(self, case):
        frozen = case(lora=Lora()).layer()
        assert frozen.dense_ffn.weight_s == frozen.attention_gemm.weight_s == 0
        assert frozen.dense_ffn.input_s == case().layer().dense_ffn.input_s

    def test_frozen_matrices_quantise_no_transposed_copy(self, case):
        found, frozen = (
            case(precision="fp8_rowwise", plan=Plan(data_shard=32), lora=lora).layer() for lora in (None, Lora())
        )
        assert frozen.dense_ffn.forward_s < found.dense_ffn.forward_s
        assert frozen.dense_ffn.input_s < found.dense_ffn.input_s

    def test_tensor_parallelism_divides_the_work_but_not_the_efficiency(self, case):
        one = case().layer()
        eight = case(plan=Plan(tensor=8, data_shard=4)).layer()
        for part in ("attention_gemm", "dense_ffn", "attention_core", "head"):
            ratio = getattr(one, part).total_s / getattr(eight, part).total_s
            assert 4 < ratio <= 8, part

    def test_sequence_parallelism_divides_the_norms(self, case):
        split = case(plan=Plan(tensor=4, data_shard=8)).layer().norm_s
        whole = case(plan=Plan(tensor=4, data_shard=8, sequence_parallel=False)).layer().norm_s
        assert whole == pytest.approx(4 * split)

    def test_longer_sequences_cost_more_attention_per_token_and_no_more_matrices(self, case):
        short = case(seq_len=4096, plan=Plan(micro_batch=2, data_shard=32)).layer()
        long = case(seq_len=8192, plan=Plan(micro_batch=1, data_shard=32)).layer()
        fill = (4096 + ATTENTION_FILL_KEYS) / (2048 + ATTENTION_FILL_KEYS)  # keys of a query: half of the sequence
        assert long.attention_core.forward_s == pytest.approx(fill * short.attention_core.forward_s, rel=0.02)
        assert long.dense_ffn.forward_s == short.dense_ffn.forward_s

    def test_tiles_on_the_diagonal_are_computed_whole(self, case):
        """4,096 tokens see 2,048 keys in the mean; tiles of 2,048 compute 3,072."""
        c = case(seq_len=4096, plan=Plan(micro_batch=2, data_shard=32))
        usual, large, whole, beyond = (
            float(c.with_rates(attention_tile=tile).layer().attention_core.forward_s)
            for tile in (128, 2048, 4096, 8192)
        )
        assert large / usual == pytest.approx(
            (3072 - 64 + ATTENTION_FILL_KEYS) / (2048 + ATTENTION_FILL_KEYS), rel=0.01
        )
        assert beyond == whole

    def test_two_kernels_for_the_gradients_compute_seven_gemms(self, case):
        fused = case().layer().attention_core
        split = case().with_rates(attention_backward_gemms=SPLIT_BACKWARD_GEMMS).layer().attention_core
        assert split.input_s / fused.input_s == pytest.approx(7 / 5, rel=0.01)
        assert split.forward_s == fused.forward_s

    def test_systolic_arrays_hold_whole_blocks(self, case):
        """gpt-oss' 2,880 outputs or inputs of a projection take 3,072 of arrays of 256."""
        c = case(model="gpt-oss-120b", plan=Plan(data_shard=32)).with_rates(output_tiles=0)
        free, padded = (c.with_rates(matrix_unit_width=width).layer().attention_gemm for width in (0, 256))
        assert padded.forward_s / free.forward_s == pytest.approx(3072 / 2880, rel=0.01)
        assert padded.weight_s / free.weight_s == pytest.approx(3072 / 2880, rel=0.04)  # its depth is that of tokens

    def test_context_parallelism_divides_the_tokens(self, case):
        assert case(plan=Plan(context=4, data_shard=8)).layer().dense_ffn.forward_s < 0.3 * (
            case().layer().dense_ffn.forward_s
        )

    def test_an_unfused_kernel_computes_the_square_and_moves_it(self, case):
        fused, unfused = case().layer(), case().with_rates(unfused_attention=1).layer()
        assert unfused.attention_core.forward_s > 2 * fused.attention_core.forward_s

    def test_systolic_arrays_pad_heads(self, case):
        c = case(model="llama3-8b")  # heads of 128
        cores, filled, half = (
            float(c.with_rates(matrix_unit_width=width, attention_forward_ratio=0.5).layer().attention_core.forward_s)
            for width in (0, 128, 256)
        )
        assert filled == pytest.approx(cores)
        assert half == pytest.approx((1 + 0.5) * filled, rel=0.01)  # GEMMs, half of the time, take twice as long

    def test_a_quarter_of_the_matrix_rate_leaves_attention_its_other_work(self, case):
        """GEMMs take four times as long; what half of the time was, exponentials and such, takes as long as before."""
        c = case().with_rates(attention_forward_ratio=0.5)
        quarter = c.with_rates(bf16_flops_per_s=c.rates.device.bf16_flops_per_s / 4, matrix_share=0.25)
        before, after = (float(x.layer().attention_core.forward_s) for x in (c, quarter))
        assert after == pytest.approx((4 + 1) / (1 + 1) * before, rel=0.01)

    @pytest.mark.parametrize(
        ("architecture", "long_ratio", "measured"),
        [("Ampere", 0.62, 0.88), ("Hopper", 0.64, 0.76), ("Blackwell", 0.48, 0.65), ("Blackwell Ultra", 0.6, 0.69)],
    )
    def test_narrow_heads_have_as_many_exponentials(self, case, architecture, long_ratio, measured):
        """Rate with heads of 64 over the rate with 128, forward, long sequences.

        FlashAttention-2, arXiv 2307.08691, figure 4, and -3, arXiv 2407.08608, figure 5; Blackwell: medians of
        aiconfigurator-core 0.12 in TensorRT-LLM, vLLM and SGLang, which differ
        among themselves: 0.61 to 0.65 and 0.65 to 0.73.
        """
        model = catalog.model("llama3-8b")
        narrow = replace(model, attention=replace(model.attention, num_heads=64, num_kv_heads=16, head_dim=64))
        wide_s, narrow_s = (
            float(
                case(model=m)
                .with_rates(attention_forward_ratio=long_ratio, exponential_share=EXPONENTIAL_SHARES[architecture])
                .layer()
                .attention_core.forward_s
            )
            for m in (model, narrow)
        )
        assert wide_s / narrow_s == pytest.approx(measured, rel=0.12)

    def test_an_unfused_norm_moves_six_times_the_bytes(self, case):
        fused, unfused = case().layer(), case().with_rates(unfused_norm=1).layer()
        assert unfused.norm_s == pytest.approx(6 * fused.norm_s)
        assert unfused.elementwise.forward_s > fused.elementwise.forward_s

    def test_fp8_is_faster_and_not_twice_as_fast(self, case):
        bf16, eight = case().layer(), case(precision="fp8").layer()
        assert 1.2 < bf16.dense_ffn.total_s / eight.dense_ffn.total_s < 2
        assert eight.attention_core == bf16.attention_core
        assert eight.head == bf16.head  # the output matrix stays in 16 bits

    def test_scales_that_are_known_before_cost_least(self, case):
        """Norms cast with scales of earlier steps; scales of blocks take a cast, of a whole tensor two kernels."""
        delayed, by_block, by_tensor = (
            case(precision=name).layer().dense_ffn.total_s for name in ("fp8_delayed", "fp8_blockwise", "fp8")
        )
        assert delayed < by_block < by_tensor < 1.1 * delayed

    def test_windows_shorten_attention(self, case):
        model = catalog.model("gpt-oss-20b")
        everywhere = replace(model, attention=replace(model.attention, window_pattern=()))
        assert case(model=model).layer().attention_core.forward_s < 0.6 * (
            case(model=everywhere).layer().attention_core.forward_s
        )


class TestElementwise:
    def test_norms_of_queries_and_keys_take_time(self, case):
        model = catalog.model("qwen3-8b")
        without = replace(model, attention=replace(model.attention, qk_norm=False))
        normed, plain = case(model=model).layer(), case(model=without).layer()
        assert 1.05 < normed.elementwise.forward_s / plain.elementwise.forward_s < 1.5

    def test_latent_attention_rotates_a_part_of_each_head(self, case):
        """The rotary embedding of DeepSeek-V3 moves less than three times all of its queries and keys."""
        model = catalog.model("deepseek-v3")
        whole = replace(model, attention=Attention(num_heads=128, num_kv_heads=128, head_dim=192))
        plan = {"cluster": "h100-8x128", "plan": Plan(expert=64, data_shard=1024)}
        latent, grouped = case(model=model, **plan).layer(), case(model=whole, **plan).layer()
        assert 0.6 < latent.elementwise.forward_s / grouped.elementwise.forward_s < 0.9


class TestWindows:
    def test_a_window_takes_whole_tiles_of_keys(self, case):
        """Half of gpt-oss' layers see 128 keys of 8,192: splash attention computes 2,048 of them."""

        def forward_s(tile: int) -> float:
            c = case(model="gpt-oss-120b", plan=Plan(data_shard=32)).with_rates(attention_tile=tile)
            return float(c.layer().attention_core.forward_s)

        small, large, whole = (forward_s(tile) for tile in (128, 1024, 8192))
        usual = (4096 + 252) / 2 + ATTENTION_FILL_KEYS  # a window of 128 takes two tiles of 128
        assert large / small == pytest.approx((4096 + 448 + 1792 + 112 + 2 * ATTENTION_FILL_KEYS) / 2 / usual, rel=0.01)
        assert whole / small == pytest.approx((8192 - 64 + ATTENTION_FILL_KEYS) / usual, rel=0.01)
        assert forward_s(2 * 8192) == whole


class TestExperts:
    MODEL = "mixtral-8x7b"

    def test_measured_products_say_nothing_of_grouped_ones_on_a_device_with_tiles(self, case):
        x = np.array([[8.0, 8, 8], [14, 14, 14]])
        correction = EfficiencyCorrection(
            axes=("m", "n", "k"), x=x, y=np.log([2.0, 2.0]), noise=np.full(2, 0.02), mean=np.log(2.0),
            length=4.0, sd=0.1,
        )  # fmt: skip
        corrections = KernelCorrections(linear={"gemm/forward": correction})
        formula = case(model=self.MODEL)
        tiles, none = formula.with_rates(corrections=corrections), formula.with_rates(output_tiles=0)
        assert tiles.layer().experts.forward_s == formula.layer().experts.forward_s
        assert tiles.layer().attention_gemm.forward_s == pytest.approx(2 * formula.layer().attention_gemm.forward_s)
        slower = none.with_rates(corrections=corrections).layer().experts.forward_s
        assert slower == pytest.approx(2 * none.layer().experts.forward_s)

    def test_an_expert_alone_on_its_rank_is_a_plain_gemm(self, case):
        def slower(expert: int) -> float:
            c = case(model=self.MODEL, plan=Plan(expert=expert, data_shard=32)).with_rates(output_tiles=0)
            slow, fast = (c.with_rates(grouped_ratio=r).layer().experts.forward_s for r in (0.5, 1.0))
            return float(slow / fast)

        assert slower(8) == 1
        assert slower(4) == pytest.approx(2, rel=0.05)

    def test_a_dense_model_has_none(self, case):
        layer = case().layer()
        assert layer.experts.total_s == layer.router.total_s == 0

    def test_the_busiest_rank_decides(self, case):
        even, skewed = case(model=self.MODEL), case(model=self.MODEL)
        assert skewed.layer(load_factor=1.5).experts.forward_s == pytest.approx(
            1.5 * even.layer().experts.forward_s, rel=0.1
        )

    def test_experts_keep_their_total_work_over_expert_ranks(self, case):
        """8 ranks with one expert each and 8 times the tokens, instead of 8 experts."""
        together, spread = (
            case(model=self.MODEL, plan=Plan(expert=expert, data_shard=32)).with_rates(grouped_ratio=1.0)
            for expert in (1, 8)
        )
        assert spread.layer().experts.forward_s == pytest.approx(together.layer().experts.forward_s, rel=0.1)

    def test_many_small_experts_are_slower_than_one_dense_block_of_their_size(self, case):
        small = Model(
            name="fine",
            hidden=2048,
            num_layers=4,
            vocab=32_000,
            attention=Attention(num_heads=16, num_kv_heads=4, head_dim=128),
            ffn_hidden=8 * 768,
        )
        fine = case(model="qwen3-30b-a3b", plan=Plan(data_shard=32, micro_batch=1)).layer().experts
        dense = case(model=small, plan=Plan(data_shard=32, micro_batch=1)).layer().dense_ffn
        assert fine.forward_s > dense.forward_s

    def test_biases_of_experts_cost_kernels_unless_experts_are_fused(self, case):
        model = catalog.model("gpt-oss-120b")
        assert model.experts is not None
        plain = replace(model, experts=replace(model.experts, bias=False))
        plan = {"plan": Plan(expert=8, data_shard=32)}

        def cost(fused: int) -> float:
            biased, without = case(model=model, **plan), case(model=plain, **plan)
            return (
                biased.with_rates(fused_experts=fused).layer().moe_elementwise.forward_s
                - without.with_rates(fused_experts=fused).layer().moe_elementwise.forward_s
            )

        assert 2 < cost(fused=0) / cost(fused=1) < 6

    def test_copies_of_a_stack_add_to_permutations(self, case):
        c = case(model="qwen3-30b-a3b", plan=Plan(data_shard=32, expert=8))
        plain, more = (c.with_rates(routed_accesses=n).layer().router.forward_s for n in (0.0, 8.0))
        moved = 8 * 2.0 * 8192 * c.model.top_k * c.model.hidden  # one sequence
        assert more - plain == pytest.approx(moved / c.rates.device.streaming_bytes_per_s)

    def test_shared_experts_add_to_routed_ones(self, case):
        model = catalog.model("deepseek-v2-lite")
        assert model.experts is not None
        without = replace(model, experts=replace(model.experts, num_shared=0))
        assert case(model=model).layer().experts.forward_s > case(model=without).layer().experts.forward_s


def test_latent_up_projections_are_part_of_attention(case):
    layer = case(model="deepseek-v3", cluster="h100-8x128", plan=Plan(expert=64, data_shard=1024)).layer()
    assert 0 < layer.latent_up.forward_s < layer.attention_gemm.forward_s
    assert np.all(case().layer().latent_up.forward_s == 0)


def test_the_power_limit_bounds_a_layer_from_below(case):
    """FLOPs of the layer at the sustained share of the peak."""
    c = case()
    layer, device = c.layer(), c.rates.device
    rate = device.bf16_flops_per_s * device.sustained_ratio
    matrices = 2 * 8192 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336)
    scores = 8192 * 4096 * 2 * 32 * 256
    assert layer.dense_floor.forward_s == pytest.approx((matrices + scores) / rate)
    assert layer.dense_floor.weight_s == pytest.approx(matrices / rate)
