"""Adapters of published rows: their matrices, and the format of the base."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from meshwright.accuracy.predict import predict
from meshwright.accuracy.rows import PublishedRun
from meshwright.specs.model import BaseFormat

ReadOne = Callable[..., PublishedRun]
ALL = ("query", "key", "value", "output", "gate", "up", "down")


@pytest.mark.parametrize(
    ("note", "targets"),
    [
        ("LoRA r=8 on q,v", ("query", "value")),
        ("LoRA r=8 on v_proj and q_proj", ("query", "value")),
        ("LoRA r=8; all linear layers", ALL),
        ("LoRA (rank 8, alpha=16) targeting q/k/v/o", ALL[:4]),
        ("lora_target_modules=linear_qkv,linear_proj", ("qkv", "output")),
        ("lora_target_modules=linear_qkv,q_proj", ("query", "key", "value")),
        ("LoRA r=8 on mlp only", ("gate", "up", "down")),
    ],
)
def test_the_row_names_the_adapted_matrices(read_one: ReadOne, note: str, targets: tuple[str, ...]) -> None:
    run = read_one(task="sft", framework="torchtune", precision="bf16", notes=note)
    assert run.conditions is not None
    assert run.conditions.lora is not None
    assert run.conditions.lora.targets == targets
    assert run.unread == ()


@pytest.mark.parametrize(
    ("cells", "base"),
    [
        ({"notes": "LoRA r=8"}, BaseFormat.FULL),
        ({"notes": "LoRA, quantised base"}, BaseFormat.NF4_DOUBLE),
        ({"task": "lora", "notes": "quantized base model"}, BaseFormat.NF4_DOUBLE),
        ({"notes": "QLoRA"}, BaseFormat.NF4_DOUBLE),
        ({"notes": "QLoRA, nf4 without double quantisation"}, BaseFormat.NF4),
        ({"notes": "LoRA; base weights in int8"}, BaseFormat.INT8),
        ({"task": "lora", "precision": "QLoRA"}, BaseFormat.NF4_DOUBLE),
        ({"task": "lora", "precision": "nf4"}, BaseFormat.NF4_DOUBLE),
        ({"task": "lora", "precision": "4-bit"}, BaseFormat.NF4_DOUBLE),
        ({"task": "lora", "precision": "int8"}, BaseFormat.INT8),
        ({"task": "lora", "precision": "bf16 (nf4 base)"}, BaseFormat.NF4_DOUBLE),
    ],
)
def test_the_base_below_adapters_has_its_format(read_one: ReadOne, cells: dict[str, str], base: BaseFormat) -> None:
    run = read_one(**({"task": "sft", "framework": "torchtune", "precision": "bf16"} | cells))
    assert run.conditions is not None, run.reason_detail
    assert run.conditions.lora is not None
    assert (run.conditions.lora.base_format, run.conditions.precision) == (base, "bf16")
    assert run.unread == ()
    assert any("quantisation" in note for note in run.assumed) == (base is BaseFormat.NF4_DOUBLE)


def test_without_adapters_four_bits_are_no_format_of_a_base(read_one: ReadOne) -> None:
    assert read_one(precision="nf4").conditions is None


def test_fewer_adapted_matrices_take_less_time_and_memory(read_one: ReadOne) -> None:
    cells = {"task": "sft", "framework": "torchtune", "precision": "bf16"}
    said = predict([read_one(notes=f"LoRA r=64 on {targets}", **cells) for targets in ("q,v", "all linear layers")])
    few, many = said.tokens_per_s_per_device
    assert few > many
    few, many = said.memory_allocated_bytes
    assert few < many


def test_a_base_in_the_format_of_its_gemms_is_made_whole_by_no_kernel(read_one: ReadOne) -> None:
    run = read_one(task="lora", gpu="B200", precision="nvfp4", notes="LoRA r=16; NVFP4 phase; quantised base")
    assert run.conditions
    assert run.conditions.lora
    assert (run.conditions.lora.base_format, run.conditions.precision) == (BaseFormat.FULL, "nvfp4")
    assert "base weights in nvfp4, in which they are multiplied" in run.assumed
