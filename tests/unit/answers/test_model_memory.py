"""Memory of training a model without a cluster: hand sums, and the published estimators of others."""

from __future__ import annotations

import csv

import pytest

import meshwright as mw
from meshwright.errors import InputError

NUM_PARAMETERS = {"qwen3-0.6b": 596_049_920, "llama3.1-8b": 8_030_261_248, "llama3.1-70b": 70_553_706_496}
"""Of the published weights."""


def states_of(row) -> tuple[float, float, float]:
    return tuple(row.parts_bytes[part] for part in ("weights", "gradients", "optimizer"))


def asked(model: str, **given):
    return mw.estimate_memory(model=model, **{"optimizer": ["adamw"], "lora_rank": [0]} | given)


@pytest.mark.parametrize("model", NUM_PARAMETERS)
@pytest.mark.parametrize(
    ("precision", "rates"),
    [
        ("fp32", (4, 4, 4 + 4)),
        ("fp16", (2, 2, 4 + 4 + 4)),  # Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1: 16
        ("bf16", (2, 4, 4 + 4 + 4)),
    ],
)
def test_states_of_one_device_are_bytes_per_parameter(model, precision, rates):
    found = asked(model, precision=[precision])
    assert found.num_parameters == NUM_PARAMETERS[model]
    assert states_of(found.rows[0]) == pytest.approx([NUM_PARAMETERS[model] * rate for rate in rates])


@pytest.mark.parametrize("model", ["qwen3-0.6b", "llama3.1-70b"])
def test_against_accelerate(model):
    """`estimate_training_usage`: 4 bytes of weights, gradients and each state; mixed, 2 more of gradients. AdamW."""
    number = NUM_PARAMETERS[model]
    published = {"fp32": (4 + 4 + 8) * number, "bf16": (4 + (4 + 2) + 8) * number}
    found = asked(model, precision=list(published))
    assert {row.precision: sum(states_of(row)) for row in found.rows} == pytest.approx(published)


@pytest.mark.parametrize("devices", [8, 64])
def test_against_deepspeed(devices):
    """`estimate_zero2_model_states_mem_needs`, fp16.

    It counts 2 bytes of whole gradients and 2 of their fp32 shard besides. Offloaded, it has weights alone on the
    device and 16 bytes in host memory, of which 4 are fp32 gradients that make room for the update; FSDP's fp32
    shards, 4 bytes, stay on the device here.
    """
    number = NUM_PARAMETERS["llama3.1-8b"]
    kept = asked("llama3.1-8b", precision=["fp16"], devices=devices, sharding=["gradients"])
    assert 4 * number + 16 * number / devices == pytest.approx(
        sum(states_of(kept.rows[0])) + 2 * number + 2 * number / devices
    )
    moved = asked("llama3.1-8b", precision=["fp16"], devices=devices, sharding=["gradients"], offload_optimizer=True)
    weights, gradients, optimizer = states_of(moved.rows[0])
    assert (weights, gradients, optimizer) == pytest.approx((2 * number, 2 * number / devices, 4 * number / devices))
    assert moved.rows[0].host_bytes * devices == pytest.approx((16 - 4 - 4) * number)
    assert kept.rows[0].host_bytes == 0


def test_every_kind_of_sharding_on_several_devices():
    number, devices = NUM_PARAMETERS["llama3.1-8b"], 8
    found = asked("llama3.1-8b", precision=["fp16"], devices=devices)
    rates = {row.sharding.name: sum(states_of(row)) / number for row in found.rows}
    assert rates.pop("PARAMETERS") > 14 / devices  # and what is gathered
    assert rates == pytest.approx({"NONE": 16, "OPTIMIZER": 4 + 12 / devices, "GRADIENTS": 2 + 14 / devices})


def test_rows_are_every_combination():
    found = mw.estimate_memory(
        model="qwen3-0.6b", sequence_length=[1024, 2048], micro_batch=[1, 2], precision=["bf16"],
        optimizer=["adamw", "muon"], lora_rank=[0, 8],
    )  # fmt: skip
    assert len({tuple(row.values())[:7] for row in found.to_rows()}) == len(found.rows) == 2**4
    by_tokens = [
        row.parts_bytes["activations"]
        for row in found.rows
        if (row.optimizer, row.lora_rank, row.micro_batch) == ("adamw", 0, 1)
    ]
    assert by_tokens[1] == pytest.approx(2 * by_tokens[0])
    adapters = [row for row in found.rows if row.lora_rank]
    assert max(row.parts_bytes["gradients"] for row in adapters) < 0.02 * 4 * found.num_parameters


def test_optimizers_take_their_own_states():
    number = NUM_PARAMETERS["llama3.1-8b"]
    found = mw.estimate_memory(model="llama3.1-8b", precision=["bf16"], lora_rank=[0])
    rates = {row.optimizer: row.parts_bytes["optimizer"] / number - 4 for row in found.rows}
    ends = 2 * 128_256 * 4096 / number  # embedding and head, which AdamW updates beside Muon
    assert rates == pytest.approx({"adamw": 8, "adamw8bit": 2 + 2 / 64, "lion": 4, "muon": 4 + 4 * ends})


def test_a_model_without_adapters_has_no_rows_of_them():
    found = mw.estimate_memory(model="deepseek-v4-flash", precision=["bf16"], optimizer=["adamw"])
    assert [row.lora_rank for row in found.rows] == [0]
    assert "no rows of LoRA" in found.notes[0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "nobody"}, "nobody"),
        ({"precision": "bf16"}, "a list"),
        ({"precision": []}, "precision are missing"),
        ({"optimizer": ["sgd"]}, "adamw"),
        ({"sharding": ["zero9"]}, "gradients"),
        ({"devices": 0}, "devices"),
        ({"lora_rank": [-1]}, "lora_rank"),
    ],
)
def test_wrong_arguments_are_refused(given, message):
    with pytest.raises(mw.InputError, match=message):
        mw.estimate_memory(**{"model": "qwen3-0.6b"} | given)


def test_csv_has_the_rows(tmp_path):
    found = asked("qwen3-0.6b")
    found.write_csv(tmp_path / "memory.csv")
    with (tmp_path / "memory.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["total_bytes"]) for row in rows] == [row.total_bytes for row in found.rows]
    with pytest.raises(mw.InputError, match="cannot write"):
        found.write_csv(tmp_path / "no" / "memory.csv")


def test_rows_are_those_that_the_native_engine_runs():
    """adamw8bit rounds whole tensors, and of optimizers AdamW alone keeps its states in host memory."""
    found = asked("qwen3-0.6b", optimizer=["adamw", "adamw8bit"], devices=8, precision=["bf16"])
    assert [row.sharding.name for row in found.rows if row.optimizer == "adamw8bit"] == ["NONE"]
    assert len(found.rows) == 5
    assert "adamw8bit" in found.notes[0]
    with pytest.raises(InputError, match="no combination is left"):
        asked("qwen3-0.6b", optimizer=["adamw8bit"], devices=8, sharding=["parameters"])
    with pytest.raises(InputError, match="lion"):
        asked("qwen3-0.6b", optimizer=["adamw", "lion"], offload_optimizer=True)
