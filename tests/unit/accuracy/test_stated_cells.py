"""Cells of conditions in the words of strangers: what each is read as, and which are noted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.every_member import check_every

from meshwright.accuracy.conditions import RunConditions
from meshwright.accuracy.rows import PublishedRun

ReadOne = Callable[..., PublishedRun]

ROW = {
    "framework": "torchtitan", "framework_version": "2025-06", "date": "2025-06-09", "num_gpus": 64, "mbs": 1,
    "gbs": 128, "cp": "", "dp": "", "tp": 1, "pp": 1, "dp_type": "FSDP", "precision": "bf16", "tok_s_gpu_best": 6000,
}  # fmt: skip
STAGED = ROW | {"framework": "Megatron-LM", "dp_type": "distopt", "pp": 4, "gbs": 256}


def _recomputed(c: RunConditions) -> tuple[str, tuple[str, ...], int | None]:
    return str(c.plan.recompute), c.plan.recompute_modules, c.plan.recompute_layers


FULL, NONE, CORE = ("full", (), None), ("none", (), None), ("selective", ("core_attention",), None)

RECOMPUTE = {
    "Full AC": FULL, "full ckpt": FULL, "unsloth": FULL, "nothing_saveable": FULL, "full except last layer": FULL,
    "not needed": NONE, "not used": NONE, "0": NONE, "everything_saveable": NONE, "activation offload": NONE,
    "sel. AC": CORE, "Selective (attention)": CORE, "50% of layers": ("full", (), 16),
    "half of the layers": ("full", (), 16), "8/32 layers": ("full", (), 8), "16 layers": ("full", (), 16),
    "selective, every 2 layers": ("full", (), 16), "layernorm + swiglu": ("selective", ("norm", "activation"), None),
}  # fmt: skip
SHARDING = {
    "Z3": ("parameters", 64), "DS-Z3": ("parameters", 64), "grad_op": ("gradients", 64), "FSDP=32": ("parameters", 32),
    "FSDP (no reshard)": ("gradients", 64), "fsdp32 x ddp2": ("parameters", 32), "FSDP2": ("parameters", 64),
    "dist. optimizer": ("optimizer", 64), "FSDP 16": ("parameters", 16),
}  # fmt: skip
PRECISION = {
    "pure bf16": ("bf16", True), "bf16-true": ("bf16", True), "FP8/BF16": ("fp8", False),
    "bf16 + fp8 linears": ("fp8", False), "BF16, no FP8": ("bf16", False), "bf16 (fp32 master)": ("bf16", False),
}  # fmt: skip
OPTIMIZER = {
    "FusedAdam": ("adamw", "none"), "CPU Adam": ("adamw", "optimizer"), "DeepSpeedCPUAdam": ("adamw", "optimizer"),
    "AdamW, CPU offload": ("adamw", "optimizer"), "AdamW (bf16 states)": ("adamw in bf16", "none"),
    "DistMuon": ("muon", "none"), "AdamW (no offload)": ("adamw", "none"),
}  # fmt: skip
SCHEDULE = {
    "VPP": ("interleaved", 2), "LoopedBFS": ("interleaved", 2), "1f1b (interleaved, vpp 4)": ("interleaved", 4),
    "ScheduleInterleaved1F1B": ("interleaved", 2), "non-interleaved": ("1f1b", 1), "ZBV": ("zbv", 2),
}  # fmt: skip

Table = tuple[str, dict[str, Any], dict[str, Any], Callable[[RunConditions], Any]]
TABLES: list[Table] = [
    ("recompute", ROW, RECOMPUTE, _recomputed),
    ("dp_type", ROW, SHARDING, lambda c: (c.plan.sharding.name.lower(), c.plan.data_shard)),
    ("precision", ROW, PRECISION, lambda c: (c.precision, c.all_in_16_bits)),
    ("optimizer", ROW, OPTIMIZER, lambda c: (str(c.optimizer), str(c.plan.offload))),
    ("schedule", STAGED, SCHEDULE, lambda c: (str(c.plan.schedule), c.plan.virtual_pipeline)),
]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table[0])
def test_a_cell_is_read_as_what_stands_beside_it(read_one: ReadOne, table: Table) -> None:
    column, row, cells, value = table

    def one(case: tuple[str, Any]) -> None:
        run = read_one(**row | {column: case[0]})
        assert run.conditions is not None, (run.reason, run.reason_detail)
        assert value(run.conditions) == case[1]

    check_every(cases := list(cells.items()), one, name=lambda case: case[0])
    assert cases


def test_what_a_cell_leaves_out_is_noted(read_one: ReadOne) -> None:
    cases = [
        ("recompute", "full except last layer", "read as full"), ("recompute", "full for MoE layers", "read as full"),
        ("recompute", "adaptive", "read as core_attention"), ("dp_type", "ZeRO++", "not understood"),
        ("optimizer", "Shampoo", "AdamW is assumed"), ("precision", "BF16+FP8", "read as fp8"),
        ("recompute", "activation offload", "not modelled"),
    ]  # fmt: skip

    def one(case: tuple[str, str, str]) -> None:
        column, cell, note = case
        assert any(note in text for text in read_one(**ROW | {column: cell}).assumed)

    check_every(cases, one, name=str)
