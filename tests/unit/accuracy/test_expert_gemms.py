"""GEMMs of a mixture that differ from the others: in a format of their own, or one expert after the other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from meshwright.accuracy.predict import predict
from meshwright.accuracy.rows import PublishedRun
from meshwright.accuracy.tables import tables_of

ReadOne = Callable[..., PublishedRun]
MIXTURE = {
    "model": "Qwen3-30B-A3B", "layers": "", "hidden": "", "heads": "", "kv_heads": "", "ffn": "", "vocab": "",
    "model_canonical": "", "params_b": "", "arch": "moe", "gpu": "B200", "tp": 1, "pp": 1, "cp": 1, "dp": 8, "ep": 8,
    "gbs": 64, "seq_len": 4096, "framework": "torchtitan", "framework_version": "2025-11", "precision": "mxfp8",
}  # fmt: skip


def rate(run: PublishedRun) -> float:
    return float(predict([run]).tokens_per_s_per_device[0])


@pytest.mark.parametrize(
    ("cells", "narrow", "wide"),
    [
        ({}, "", (0, 0)),
        ({"notes": "MXFP8 for grouped GEMMs only"}, "experts", (1, 0)),
        ({"precision": "mxfp8 (experts only)"}, "experts", (1, 0)),
        ({"precision": "fp8 linears only"}, "dense", (0, 1)),
        ({"precision": "bf16", "notes": "experts only"}, "", (0, 0)),
    ],
)
def test_the_row_says_which_gemms_are_narrow(
    read_one: ReadOne, cells: dict[str, str], narrow: str, wide: tuple[int, int]
) -> None:
    c = read_one(**(MIXTURE | cells)).conditions
    assert c is not None
    assert c.narrow_gemms == narrow
    facts = tables_of([c]).facts
    assert (float(np.ravel(facts.wide_dense)[0]), float(np.ravel(facts.wide_experts)[0])) == wide


def test_gemms_in_16_bits_have_neither_the_rate_nor_the_casts_of_narrow_ones(read_one: ReadOne) -> None:
    """Experts of Mixtral have most of its FLOPs; those of Qwen3 30B are small."""
    everything, experts, linears = (
        rate(read_one(**(MIXTURE | {"notes": note})))
        for note in ("", "MXFP8 for grouped GEMMs only", "MXFP8 linears only")
    )
    assert len({everything, experts, linears}) == 3
    large = MIXTURE | {"model": "Mixtral-8x22B", "ep": 1, "num_gpus": 64, "dp": 64, "gbs": 64, "seq_len": 16384}
    everything, linears = (rate(read_one(**(large | {"notes": note}))) for note in ("", "MXFP8 linears only"))
    assert linears < everything


def test_a_dense_model_has_linear_layers_alone(read_one: ReadOne) -> None:
    c = read_one(precision="fp8 linears only").conditions
    assert c is not None
    assert c.narrow_gemms == ""


@pytest.mark.parametrize("note", ["no grouped GEMM", "python loop over experts", "for-loop experts", "SequentialMLP"])
def test_experts_one_after_the_other_take_longer(read_one: ReadOne, note: str) -> None:
    cells = MIXTURE | {"precision": "bf16"}
    usual, loop = read_one(**cells), read_one(**cells, notes=note)
    assert loop.conditions is not None
    assert loop.conditions.stated["loops_experts"] is True
    assert loop.unread == ()
    assert rate(loop) < rate(usual)
    assert rate(read_one(**cells, notes="grouped GEMM")) == rate(usual)
