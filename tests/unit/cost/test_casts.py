"""Casts beside GEMMs and the cache of quantised weights, counted by hand."""

from __future__ import annotations

import pytest

from meshwright.catalog import lookup as catalog
from meshwright.cost.casts import WeightCache, cache_bytes, cast_passes, dequantised_passes, is_cached
from meshwright.cost.flops import count_parameters
from meshwright.cost.tables import BatchTable, model_row, plan_row, precision_row
from meshwright.specs.model import BaseFormat, Lora
from meshwright.specs.plan import Plan, Sharding
from meshwright.specs.precision import PRECISIONS

LLAMA = catalog.model("llama3.1-8b")
LAYER = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14_336
TOKENS, BANDWIDTH = 8192, 1e12
MICRO_BATCHES = 4


def seconds(
    precision: str = "fp8",
    *,
    cache: WeightCache = WeightCache.CALIBRATED,
    lora: Lora | None = None,
    stored: dict[str, str] | None = None,
    frozen_in_16_bits: int = 0,
    plan: Plan | None = None,
):
    table = model_row(LLAMA, lora=lora)
    plan = plan or Plan(data_shard=8)
    return cast_passes(
        table,
        BatchTable(seq_len=TOKENS, global_batch=MICRO_BATCHES * plan.data),
        plan_row(plan),
        precision_row(
            PRECISIONS[precision], stored_activations=stored, weight_cache=cache,
            frozen_in_16_bits=frozen_in_16_bits,
        ),
        count_parameters(table),
        TOKENS,
        BANDWIDTH,
        is_moe=False,
    )  # fmt: skip


class TestStoredActivations:
    def test_of_a_feed_forward_block_in_16_bits(self) -> None:
        found = seconds("bf16", stored={"feed_forward": "int8"})
        # input, gate, up and their product: read in 2 bytes, written in 1 and 1/32
        moved = TOKENS * (4096 + 3 * 14_336) * (2 + 1 + 1 / 32)
        assert found.forward_s == pytest.approx(moved / BANDWIDTH)
        assert found.input_s == pytest.approx(moved / BANDWIDTH)

    def test_fp8_gemms_keep_their_inputs_in_8_bits_already(self) -> None:
        found = seconds("fp8", stored={"feed_forward": "int8", "norm": "int8"})
        moved = TOKENS * (2 * 14_336 + 2 * 4096) * (2 + 1 + 1 / 32)
        assert found.forward_s == pytest.approx(moved / BANDWIDTH)

    def test_nothing_is_stored_unless_asked(self) -> None:
        assert seconds("bf16").total_s == 0


class TestWeights:
    def test_without_a_cache_they_are_cast_in_both_passes(self) -> None:
        found = seconds(cache=WeightCache.OFF)
        assert found.forward_s == found.input_s == pytest.approx(LAYER * (2 + 2) / BANDWIDTH)

    def test_with_it_once_a_step(self) -> None:
        found = seconds(cache=WeightCache.AUTO)
        assert found.forward_s == pytest.approx(LAYER * (2 + 2) / MICRO_BATCHES / BANDWIDTH)
        assert found.input_s == 0

    def test_frozen_ones_held_in_8_bits_are_only_transposed(self) -> None:
        off, on = (seconds(cache=c, lora=Lora()) for c in (WeightCache.OFF, WeightCache.ON))
        assert (off.forward_s, off.input_s) == (0, pytest.approx(LAYER * 2 / BANDWIDTH))
        assert on.total_s == 0

    def test_frozen_ones_held_in_16_bits_are_cast(self) -> None:
        found = seconds(cache=WeightCache.OFF, lora=Lora(), frozen_in_16_bits=1)
        assert found.forward_s == found.input_s == pytest.approx(LAYER * 4 / BANDWIDTH)

    @pytest.mark.parametrize("kind", [WeightCache.AUTO, WeightCache.OFF])
    def test_16_bit_runs_have_none(self, kind: WeightCache) -> None:
        assert seconds("bf16", cache=kind).total_s == 0


class TestQuantisedBase:
    @pytest.mark.parametrize(
        ("base_format", "in_parts", "moved"),
        [
            (BaseFormat.NF4, 0, 0.5 + 4 / 64 + 2),
            (BaseFormat.NF4_DOUBLE, 0, 0.5 + (1 + 4 / 256) / 64 + 2),
            (BaseFormat.NF4, 1, 0.5 + 4 / 64 + 2 + 2 * 2 + 2 * 4),  # an index for two weights, a value for each
            (BaseFormat.INT8, 1, 1 + 2),
        ],
    )
    def test_it_is_read_in_its_format_and_written_in_16_bits(self, base_format, in_parts, moved) -> None:
        table = model_row(LLAMA, lora=Lora(base_format=base_format))
        precision = precision_row(PRECISIONS["bf16"], dequantises_in_parts=in_parts)
        found = dequantised_passes(table, precision, LAYER, BANDWIDTH)
        scales = 0.002 if base_format is BaseFormat.INT8 else 1e-9  # of a row, here not counted one by one
        assert found.forward_s == found.input_s == pytest.approx(LAYER * moved / BANDWIDTH, rel=scales)
        assert found.weight_s == 0

    def test_a_base_in_16_bits_is_read_by_its_gemms_alone(self) -> None:
        found = dequantised_passes(model_row(LLAMA, lora=Lora()), precision_row(PRECISIONS["bf16"]), LAYER, BANDWIDTH)
        assert found.total_s == 0


FSDP = Plan(data_shard=8, sharding=Sharding.PARAMETERS)


@pytest.mark.parametrize(
    ("plan", "batch", "kind", "cached"),
    [
        (Plan(data_shard=8), 32, WeightCache.AUTO, 1),
        (Plan(data_shard=8), 8, WeightCache.AUTO, 0),  # one micro-batch
        (Plan(data_shard=8), 8, WeightCache.ON, 1),
        (Plan(data_shard=8), 32, WeightCache.OFF, 0),
        (Plan(data_shard=8), 32, WeightCache.CALIBRATED, 0),
        (FSDP, 32, WeightCache.ON, 0),  # gathered anew for each pass
    ],
    ids=["auto", "once", "on", "off", "calibrated", "fsdp"],
)
def test_where_weights_are_cached(plan: Plan, batch: int, kind: WeightCache, cached: int) -> None:
    tables = BatchTable(seq_len=TOKENS, global_batch=batch), plan_row(plan)
    precision = precision_row(PRECISIONS["fp8"], weight_cache=kind)
    assert is_cached(*tables, precision) == cached
    assert cache_bytes(model_row(LLAMA), *tables, precision, frozen_bytes=2) == 2 * cached
    assert cache_bytes(model_row(LLAMA, lora=Lora()), *tables, precision, frozen_bytes=1) == cached
