"""Token rates of rows that print FLOP/s or a utilisation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from meshwright.accuracy.csvfile import read_table
from meshwright.accuracy.flop_rates import flop_count_of, flops_per_token
from meshwright.accuracy.reasons import Reason
from meshwright.accuracy.rows import MEASURED_COLUMNS, PublishedRun, read_row
from meshwright.accuracy.shipped import measured_runs_path
from meshwright.cost.tables import model_row

ReadOne = Callable[..., PublishedRun]
SC21 = "SC21: 96*B*s*L*h^2*(1+s/6h+V/16Lh) - INCLUDES full-recompute forward (HFU-like), full attention"
GPT = {
    "model": "GPT-18.4B", "framework": "Megatron-LM", "date": "2021-04-01", "layers": 40, "hidden": 6144, "heads": 48,
    "kv_heads": "", "ffn": "", "vocab": 51200, "params_b": 18.4, "seq_len": 2048,
    "gpu": "A100-SXM-80GB", "num_gpus": 256,
    "tp": 8, "pp": 1, "cp": 1, "dp": 32, "mbs": 8, "gbs": 1024, "precision": "fp16", "tok_s_gpu_best": "",
}  # fmt: skip


def test_the_count_of_narayanan_et_al(read_one: ReadOne) -> None:
    """Equation 3 of arXiv 2104.04473, but for the biases and norms that it leaves out."""
    run = read_one(**GPT, tflops_per_gpu=135, flops_convention=SC21)
    L, h, s, V = 40, 6144, 2048, 51200
    per_token = 96 * L * h**2 * (1 + s / (6 * h) + V / (16 * L * h))
    assert run.reason is None
    assert run.tokens_per_s_per_device == pytest.approx(135e12 / per_token, rel=1e-3)
    assert any("135 TFLOP/s" in note for note in run.assumed)


def test_a_utilisation_with_its_peak(read_one: ReadOne) -> None:
    stated = read_one(**GPT, tflops_per_gpu=156, flops_convention=SC21)
    share = read_one(**GPT, mfu_pct=50, mfu_peak_tflops=312, flops_convention=SC21)
    assert share.tokens_per_s_per_device == stated.tokens_per_s_per_device
    without_peak = read_one(**GPT, mfu_pct=50, flops_convention=SC21)
    assert without_peak.reason is Reason.FLOPS_ONLY


def test_an_unknown_count_is_no_rate(read_one: ReadOne) -> None:
    run = read_one(**GPT | {"framework": "Unheard-of"}, tflops_per_gpu=135)
    assert (run.reason, run.tokens_per_s_per_device) == (Reason.FLOPS_ONLY, None)


def test_a_printed_rate_precedes(read_one: ReadOne) -> None:
    run = read_one(**GPT | {"tok_s_gpu_best": 870}, tflops_per_gpu=1, flops_convention=SC21)
    assert run.tokens_per_s_per_device == 870


COUNTED_OTHERWISE = {
    "oellm_jupiter",  # of Megatron-LM as of the 50,304 entries that its rows of torchtitan state
    "xtuner_megatron_moe",  # Pai-Megatron-Patch of July 2025 counts half of the score matrix already
}
"""Sources whose rows print both units, so that no rate relies on the count of their software."""


def test_counts_reproduce_rows_that_print_both_units() -> None:
    """Every count that a source's rows without a rate rely on, on its rows with one: within 3 % in the median."""
    ratios: dict[str, list[float]] = {}
    for row in read_table(measured_runs_path(), required=MEASURED_COLUMNS):
        printed = row.number("gflop_per_token_reported")
        if printed is None:
            continue
        run = read_row(row)
        c = run.conditions
        if c is None or c.lora or run.task != "pretrain":
            continue
        if run.source_key not in COUNTED_OTHERWISE and (count := flop_count_of(row, c.stack)):
            counted = flops_per_token(model_row(c.model), seq_len=c.seq_len, count=count)
            ratios.setdefault(count.name, []).append(printed * 1e9 / counted)
    assert len(ratios) == 5
    for name, found in ratios.items():
        assert np.median(found) == pytest.approx(1, abs=0.03), name
        assert len(found) >= 3
