"""FLOPs of DeepSeek-V4 in Primus's count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.accuracy.primus_flops import primus_flops_per_token
from meshwright.catalog import lookup as catalog
from meshwright.cost.flops import model_flops_per_token
from meshwright.cost.tables import model_row
from meshwright.specs.model import Model
from meshwright.specs.sparse_attention import Compression

FLASH = catalog.model("deepseek-v4-flash")


def with_layers(strides: tuple[int, ...]) -> Model:
    a, num = FLASH.attention, len(strides)
    attention = replace(a, num_windowed_layers=num, compression=Compression(strides=strides))
    return replace(FLASH, num_layers=num, num_mtp_layers=0, attention=attention)


def test_the_whole_model_as_four_rows_print_it():
    """1,135.6 TFLOP/s at 3,157.6 tokens/s, 1,199.4 at 3,334.9, ...: 359.64 GFLOP a token."""
    counted = primus_flops_per_token(model_row(FLASH), seq_len=4096)
    for tflops, rate in ((1135.6, 3157.6), (1199.4, 3334.9), (1043.0, 2900.1), (1171.8, 3258.2)):
        assert counted == pytest.approx(tflops * 1e12 / rate, rel=1e-3)


def test_sixteen_layers_as_its_calibration_prints_them():
    """34,112 TFLOP for 64 sequences: 3 layers of windows, 7 with an indexer, 6 heavily compressed."""
    model = with_layers((0, 0, *(4, 128) * 6, 4, 0))
    counted = primus_flops_per_token(model_row(model), seq_len=4096) * 64 * 4096
    assert counted == pytest.approx(34_112e12, rel=2e-3)


def test_it_counts_about_four_times_what_is_computed():
    row = model_row(FLASH)
    assert primus_flops_per_token(row, seq_len=4096) / model_flops_per_token(row, seq_len=4096) == pytest.approx(
        4, rel=0.03
    )
