"""Bytes that depend on kernels, counted by hand: logits in chunks, stored activations, gathered keys, CPU routes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.api.runs import load_run
from meshwright.calibration.memory import MemoryConstants, memory_constants
from meshwright.catalog import lookup as catalog
from meshwright.cost.memory import estimate_memory
from meshwright.cost.memory.activations import layer_bytes
from meshwright.cost.tables import BatchTable, model_row, plan_row, precision_row
from meshwright.kernels.traffic import CHUNK_LOGITS, automatic_chunk, chunk_rows
from meshwright.planner.estimate import estimate_plan
from meshwright.planner.request import request_for
from meshwright.specs.estimate import MemoryEstimate
from meshwright.specs.hardware import Stack
from meshwright.specs.model import Lora
from meshwright.specs.plan import Plan, Recompute
from meshwright.specs.precision import PRECISIONS

NATIVE, TITAN, MLPERF = (Stack(framework=name) for name in ("native", "torchtitan", "mlperf-amd"))
EIGHT_BITS = {"feed_forward": "int8", "norm": "int8"}
TOKENS = 8192
RUN = Path(__file__).parents[3] / "examples" / "runs" / "llama2-70b-lora-fp8.yaml"


def kept(
    model: str,
    *,
    plan: Plan | None = None,
    lora: Lora | None = None,
    stored: dict[str, str] | None = None,
    precision: str = "bf16",
    constants: MemoryConstants | None = None,
) -> float:
    """Bytes per token that a layer keeps."""
    return float(
        layer_bytes(
            model_row(catalog.model(model), lora=lora),
            BatchTable(seq_len=TOKENS, global_batch=8),
            plan_row(plan or Plan()),
            precision_row(PRECISIONS[precision], stored_activations=stored),
            constants or memory_constants(NATIVE),
            1,
        ).dense
    )


def workspace(stack: Stack, **changes: object) -> float:
    table = estimate_memory(
        model=model_row(catalog.model("llama3.1-8b")),
        batch=BatchTable(seq_len=TOKENS, global_batch=8),
        plan=plan_row(Plan(data_shard=8)),
        precision=precision_row(PRECISIONS["bf16"]),
        constants=memory_constants(stack, **changes),  # pyright: ignore[reportArgumentType]
    )
    return float(table.workspace_bytes)


class TestLogits:
    V, H = 128_256, 4096

    def test_all_are_there_where_the_sum_over_chunks_would_take_more(self) -> None:
        logits = TOKENS * (self.V + self.H) * 2
        assert workspace(NATIVE) == pytest.approx(0.4e9 + logits + self.V * self.H * 2)
        chunked = workspace(NATIVE, routes={"linear_cross_entropy": "cached"})
        chunk = 512 * self.V * 2 + TOKENS * self.H * 2  # 2^26 logits in whole tiles
        summed = self.V * self.H * (2 + 4)  # in 16 bits, and the fp32 sum over 16 chunks
        assert chunked == pytest.approx(0.4e9 + chunk + summed)

    @pytest.mark.parametrize("tokens", [1, 500, 523, 524, 8192, 8715, 8716, 9000, 65536])
    @pytest.mark.parametrize("hidden", [512, 4096, 16384])
    def test_the_automatic_chunk_never_takes_more(self, tokens: int, hidden: int) -> None:
        def held(chunk: float) -> float:
            rows = float(chunk_rows(tokens, vocab=self.V, chunk_logits=chunk))
            return rows * self.V * 2 + (4 * self.V * hidden if rows < tokens else 0)

        chunk = float(automatic_chunk(tokens, vocab=self.V, hidden=hidden, element_bytes=2))
        assert held(chunk) <= held(CHUNK_LOGITS)
        # and wherever one chunk takes no more than several there is one
        assert (chunk >= tokens * self.V) == (held(tokens * self.V) <= held(CHUNK_LOGITS))

    def test_all_of_them_without_the_kernel(self) -> None:
        whole = workspace(NATIVE, routes={"linear_cross_entropy": "reference"})
        assert whole == pytest.approx(0.4e9 + TOKENS * self.V * 14 + TOKENS * self.H * 0 + self.V * self.H * 2)
        logits = TOKENS * self.V * 14
        assert logits / 20 > 2**26 * 2 + TOKENS * self.H * 2

    def test_fewer_than_a_chunk_are_one_gemm(self) -> None:
        table = estimate_memory(
            model=model_row(catalog.model("llama3.1-8b")),
            batch=BatchTable(seq_len=256, global_batch=8),
            plan=plan_row(Plan(data_shard=8)),
            precision=precision_row(PRECISIONS["bf16"]),
            constants=memory_constants(NATIVE),
        )
        head = 256 * (self.V * 2 + self.H * 2) + self.V * self.H * 2
        assert float(table.workspace_bytes) == pytest.approx(0.4e9 + head)


class TestStoredActivations:
    def test_a_llama_layer(self) -> None:
        h, f, narrow = 4096, 14_336, 1 + 1 / 32
        attention = 2 * (4096 + 2 * 1024 + 4096) + 4 * 32
        assert kept("llama3.1-8b") == attention + 4 * h + 4 * h + 6 * f
        # inputs of both norms, of the feed-forward and all that is f wide; the input of attention stays
        assert kept("llama3.1-8b", stored=EIGHT_BITS) == attention + 2 * h + narrow * (3 * h + 3 * f)
        assert kept("llama3.1-8b", stored={"norm": "e4m3"}) == attention + 4 * h + 6 * f + narrow * 2 * h

    def test_what_fp8_gemms_keep_is_8_bits_wide_already(self) -> None:
        stored = kept("llama3.1-8b", precision="fp8", stored=EIGHT_BITS)
        narrow, h, f = 1 + 1 / 32, 4096, 14_336
        attention = 2 * (4096 + 2 * 1024 + 4096) + 4 * 32
        assert stored == attention + h + h + narrow * 2 * h + narrow * 2 * f + f


class TestMlperfLora:
    """Llama 2 70B, adapters of rank 16 on qkv and output, dropout 0.1, fp8; bytes per token and layer."""

    lora = Lora(rank=16, targets=("qkv", "output"), dropout=0.1)
    constants = memory_constants(MLPERF)
    attention = 2 * (8192 + 2 * 1024 + 8192) + 4 * 64  # q, k, v, output, log-sum-exp
    dropped = 3 * 2 * 8192  # both adapters' inputs: what dropout left, and its mask

    def test_in_16_bits(self) -> None:
        found = kept("llama2-70b", lora=self.lora, precision="fp8", constants=self.constants)
        assert found == self.attention + self.dropped + 2 * 2 * 8192 + 2 * 2 * 28_672

    def test_in_8_bits(self) -> None:
        found = kept("llama2-70b", lora=self.lora, precision="fp8", constants=self.constants, stored=EIGHT_BITS)
        assert found == self.attention + self.dropped + (1 + 1 / 32) * (2 * 8192 + 2 * 28_672)

    def test_without_dropout_adapters_keep_what_is_there(self) -> None:
        lora = Lora(rank=16, targets=("qkv", "output"))
        found = kept("llama2-70b", lora=lora, precision="fp8", constants=self.constants)
        assert found == self.attention + 2 * 8192 + 2 * 2 * 8192 + 2 * 2 * 28_672


class TestLlama70BOnEightDevices:
    """`examples/runs/llama2-70b-lora-fp8.yaml`: AMD's MLPerf shape, and what fits without recomputation."""

    weights = 68_976_648_192  # in 8 bits
    adapters = 80 * 16 * (8192 + 10_240 + 8192 + 8192)
    linear = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28_672)

    @staticmethod
    def memory(**kernels: object) -> MemoryEstimate:
        run = load_run(RUN, overrides=[f"kernels.{key}={value}" for key, value in kernels.items()])
        assert run.plan is not None
        return estimate_plan(request_for(run), run.plan).step.memory

    def test_every_byte(self) -> None:
        found = self.memory()
        per_token = TestMlperfLora.attention + TestMlperfLora.dropped + (1 + 1 / 32) * (2 * 8192 + 2 * 28_672)
        assert found.activations_bytes == TOKENS * (80 * per_token + 2 * 8192)
        assert found.weights_bytes == self.weights + 2 * self.adapters
        assert found.fits

    def test_with_the_cache(self) -> None:
        more = self.memory(weight_cache="on").weights_bytes - self.memory().weights_bytes
        assert more == self.linear  # the other orientation of each frozen matrix

    @pytest.mark.parametrize(
        ("stored", "cache", "fits_in"),
        [(EIGHT_BITS, "off", 192), (EIGHT_BITS, "on", 256), ({}, "off", 256), ({}, "on", 320)],
        ids=["stored", "stored and cached", "neither", "cached"],
    )
    def test_the_smallest_device(self, stored: dict[str, str], cache: str, fits_in: int) -> None:
        found = self.memory(stored_activations=json.dumps(stored), weight_cache=cache)
        gib = found.reserved_bytes / 2**30
        assert min(size for size in (192, 256, 288, 320) if gib <= 0.95 * size) == fits_in


def test_context_ranks_keep_the_keys_and_values_of_all() -> None:
    one, four = (kept("llama3.1-8b", plan=Plan(context=c)) for c in (1, 4))
    assert four - one == 3 * 2 * 2 * 1024
    ring = memory_constants(TITAN)
    assert kept("llama3.1-8b", plan=Plan(context=4), constants=ring) == kept("llama3.1-8b", constants=ring)


def test_routes_of_a_cpu_keep_more() -> None:
    h, f = 4096, 14_336
    cpu = memory_constants(NATIVE, on_cpu=True)
    probabilities = 32 * (TOKENS + 64)  # 2 bytes for each earlier key, in blocks of 64 queries
    silu, norms = 2 * f, 2 * 6 * h
    assert kept("llama3.1-8b", constants=cpu) == kept("llama3.1-8b") + probabilities + silu + norms
    fused = memory_constants(NATIVE, on_cpu=True, routes={"attention": "sdpa"})
    assert kept("llama3.1-8b", constants=fused) == kept("llama3.1-8b") + silu + norms


def test_fp32_activations_are_twice_as_wide() -> None:
    log_sum_exp = 4 * 32
    wide, narrow = (kept("llama3.1-8b", precision=p) - log_sum_exp for p in ("fp32", "bf16"))
    assert wide == 2 * narrow


class TestRecomputationAndLogits:
    """Logits are gone before a layer is recomputed: the larger counts, not the sum."""

    def allocated(self, stack: Stack, recompute: Recompute, seq_len: int) -> float:
        table = estimate_memory(
            model=model_row(catalog.model("llama3.1-8b")),
            batch=BatchTable(seq_len=seq_len, global_batch=8),
            plan=plan_row(Plan(data_shard=8, recompute=recompute)),
            precision=precision_row(PRECISIONS["bf16"]),
            constants=replace(memory_constants(stack), gradients_as_they_come=0),
        )
        return float(table.allocated_bytes)

    def layers(self, seq_len: int) -> float:
        """Bytes that full recomputation frees of 32 layers: all but their inputs in bf16."""
        whole, none = kept("llama3.1-8b"), kept("llama3.1-8b", plan=Plan(recompute=Recompute.FULL))
        assert none == 2 * 4096
        return 32 * (whole - none) * seq_len

    @pytest.mark.parametrize("seq_len", [256, 8192])  # the head is larger than a layer at both
    def test_a_recomputed_layer_adds_nothing_below_the_head(self, seq_len: int) -> None:
        freed = self.allocated(NATIVE, Recompute.NONE, seq_len) - self.allocated(NATIVE, Recompute.FULL, seq_len)
        assert freed == pytest.approx(self.layers(seq_len))

    def test_stacks_that_keep_the_head_have_both(self) -> None:
        freed = self.allocated(TITAN, Recompute.NONE, 8192) - self.allocated(TITAN, Recompute.FULL, 8192)
        assert freed < self.layers(8192)
