import csv
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.every_member import check_every
from tests.shipped_rows import shipped_runs

from meshwright.accuracy.csvfile import CsvRow
from meshwright.accuracy.predict import predict
from meshwright.accuracy.reasons import Reason
from meshwright.accuracy.rows import MEASURED_COLUMNS, PublishedRun, read_failed, read_row, read_runs
from meshwright.accuracy.shapes import may_be_published
from meshwright.accuracy.shipped import failed_configs_path, measured_runs_path, published_systems
from meshwright.errors import InputError
from meshwright.specs.model import BaseFormat
from meshwright.specs.plan import Offload, Sharding
from meshwright.specs.precision import PRECISIONS

ReadOne = Callable[..., PublishedRun]

COLUMNS = [
    *MEASURED_COLUMNS,
    *("id", "source_key", "task", "mbs", "gbs", "tp", "pp", "dp", "layers", "hidden", "heads", "precision"),
    *("framework", "date", "tok_s_gpu_best", "metric_kind", "quality"),
    *("cp", "ep", "etp", "vpp", "grad_accum", "gbs_tokens", "gpus_per_node", "arch", "kv_heads", "ffn"),
    *("vocab", "experts", "topk", "dp_type", "recompute", "notes", "params_b"),
]
COMPLETE = {
    "model": "Mixtral-8x7B", "gpu": "H100-SXM-80GB", "num_gpus": "8", "seq_len": "4096",
    "mbs": "1", "gbs": "64", "tp": "1", "pp": "1", "dp": "8", "ep": "8",
    "precision": "bf16", "framework": "NeMo", "tok_s_gpu_best": "9",
}  # fmt: skip
ODD = (
    *("1e30", "-3", "x", "", "nemo 24.13", "FSDP 0 (HSDP)", "full layers=0", "0 slices", "L0", "-L9"),
    *("recompute_layer_ids [5-2]", "recompute_layer_ids [-]", "moe", "hybrid", "Mixtral-8x7B", "GPT-1L", "zero bubble"),
)
CELL_TEXTS = st.one_of(st.integers(0, 64).map(str), st.sampled_from(ODD), st.text(max_size=12))


def test_a_complete_row_becomes_conditions_without_assumptions(read_one: ReadOne) -> None:
    run = read_one(interconnect="NVLink4", precision="FP8 current scaling")
    c = run.conditions
    assert c is not None
    assert (c.model.name, c.accelerator.name, c.num_nodes, c.devices_per_node) == ("llama3-8b", "h100", 1, 8)
    assert (c.plan.context, c.plan.data, c.plan.sharding) == (2, 4, Sharding.OPTIMIZER)
    assert (c.global_batch, c.tokens_per_step, c.precision) == (128, 128 * 8192, "fp8")
    assert (c.stack.framework, c.stack.vintage, c.fabric_hint) == ("nemo", 2024.5, "NVLink4")
    assert (run.reason, run.tokens_per_s_per_device) == (None, 13000)
    assert [note.split(":")[0] for note in run.assumed] == ["assumed as nemo of 2024 sets it"]  # of its switches


@pytest.mark.parametrize(
    ("cells", "precision"),
    [
        ({}, "fp8_delayed"),  # NeMo of 2024
        ({"notes": "FP8 current scaling"}, "fp8"),
        ({"framework_version": "25.09"}, "fp8"),
        ({"framework": "Megatron-LM", "framework_version": "25.09"}, "fp8_delayed"),
        ({"framework": "torchtitan"}, "fp8"),
    ],
)
def test_scales_in_8_bits_are_those_of_the_release(read_one: ReadOne, cells: dict[str, object], precision: str) -> None:
    run = read_one(precision="fp8", **cells)
    assert run.conditions is not None
    assert run.conditions.precision == precision
    assert any("scales of earlier steps" in note for note in run.assumed) == (precision == "fp8_delayed")


@pytest.mark.parametrize(
    "cells",
    [
        {"model": "meta-llama/Meta-Llama-3-8B-Instruct"},
        {"model": "Llama-3-8B-Base"},
        {"gpu": "NVIDIA H100 80GB HBM3"},
        {"precision": "FP8 (tensorwise)"},
    ],
)
def test_other_words_for_the_same_conditions(read_one: ReadOne, cells: dict[str, object]) -> None:
    usual, other = read_one().conditions, read_one(**cells).conditions
    assert other == usual


@pytest.mark.parametrize(
    ("cells", "offload"),
    [
        ({"framework": "torchtune", "notes": "CPU offload + fused optimizer"}, Offload.OPTIMIZER),
        ({"framework": "torchtune", "notes": "activations offloaded"}, Offload.NONE),
        ({"notes": "CPU offload"}, Offload.NONE),  # of NeMo: of what is not said
    ],
)
def test_optimizer_states_in_host_memory(read_one: ReadOne, cells: dict[str, object], offload: Offload) -> None:
    run = read_one(**cells)
    assert run.conditions is not None
    assert run.conditions.plan.offload is offload
    assert any("offloading of activations" in note for note in run.assumed) == (offload is Offload.NONE)


def test_a_rate_follows_from_the_seconds_of_a_step_where_the_batch_is_stated(read_one: ReadOne) -> None:
    timed = {"tok_s_gpu_best": "", "step_time_s": 10}
    run = read_one(**timed)
    assert run.reason is None
    assert run.tokens_per_s_per_device == pytest.approx(128 * 8192 / (10 * 8))
    assert "rate from 10 s a step" in run.assumed
    assert read_one(**timed, gbs="", pp=1, cp=1, dp=8).reason is Reason.NO_BATCH


def test_adapters_by_other_names_of_the_task(read_one: ReadOne) -> None:
    for task in ("lora", "PEFT", "LoRA fine-tuning"):
        conditions = read_one(task=task).conditions
        assert conditions is not None
        assert conditions.lora is not None


def test_what_a_row_leaves_open_or_contradicts_is_its_reason(read_one: ReadOne) -> None:
    def check(cells: dict[str, object], reason: Reason) -> None:
        run = read_one(**cells)
        assert run.reason is reason
        assert run.conditions is None or reason in (Reason.NO_RATE, Reason.FLOPS_ONLY)

    check_every(
        [
            ({"tok_s_gpu_best": ""}, Reason.NO_RATE),
            ({"tok_s_gpu_best": "", "mfu_pct": 40, "framework": "Unheard-of"}, Reason.FLOPS_ONLY),
            ({"metric_kind": "end_to_end_gpu_hours"}, Reason.END_TO_END),
            ({"gpu": ""}, Reason.NO_ACCELERATOR),
            ({"gpu": "Abacus 9000"}, Reason.UNKNOWN_ACCELERATOR),
            ({"num_gpus": ""}, Reason.NO_DEVICES),
            ({"num_gpus": 12, "dp": 6, "gbs": 12}, Reason.INCONSISTENT),
            ({"model": "Jamba 52B", "arch": "hybrid"}, Reason.UNKNOWN_ARCHITECTURE),
            ({"model": "Nemotron-H 47B", "arch": "hybrid"}, Reason.UNKNOWN_ARCHITECTURE),
            ({"model": "NewArch 9B", "arch": "hybrid", "hidden": 4096}, Reason.UNKNOWN_ARCHITECTURE),
            ({"model": "Unheard-of 9B"}, Reason.NO_DIMENSIONS),
            ({"seq_len": ""}, Reason.NO_SEQUENCE_LENGTH),
            ({"mbs": "", "gbs": ""}, Reason.NO_BATCH),
            ({"tp": "", "pp": "", "dp": ""}, Reason.NO_PARALLELISM),
            ({"precision": "int3"}, Reason.UNKNOWN_PRECISION),
            ({"precision": "nvfp4"}, Reason.UNKNOWN_PRECISION),
            ({"dp": 16}, Reason.INCONSISTENT),
            ({"gpus_per_node": 16, "num_gpus": 16, "dp": ""}, Reason.INCONSISTENT),
            ({"task": "DPO"}, Reason.OTHER_TASK),
            ({"task": "inference"}, Reason.OTHER_TASK),
            ({"gbs": 130}, Reason.INCONSISTENT),
        ],
        lambda case: check(*case),
    )


def test_a_row_with_memory_but_no_rate_keeps_its_conditions(read_one: ReadOne) -> None:
    run = read_one(tok_s_gpu_best="", mem_gb_per_gpu=50, notes="mem = max allocated")
    assert run.conditions is not None
    assert (run.reason, run.memory_bytes, run.memory_definition) == (Reason.NO_RATE, 50e9, "allocated")


def test_lora_adapters_follow_the_benchmark_or_the_framework(read_one: ReadOne) -> None:
    mlperf = read_one(task="lora", source_key="mlperf_v5.0", model="Llama-2-70B")
    assert mlperf.conditions
    assert mlperf.conditions.lora
    assert (mlperf.conditions.lora.rank, mlperf.conditions.lora.dropout) == (16, 0.1)
    tune = read_one(task="lora", framework="torchtune")
    assert tune.conditions
    assert tune.conditions.lora
    assert (tune.conditions.lora.rank, "gate" in tune.conditions.lora.targets) == (8, True)
    assert any(note.startswith("LoRA rank 8") for note in tune.assumed)


def test_a_missing_precision_is_the_frameworks_and_noted(read_one: ReadOne) -> None:
    run = read_one(precision="", framework="Megatron-DeepSpeed")
    assert run.conditions
    assert run.conditions.precision == "fp16"
    assert "precision fp16, the default of megatron-deepspeed" in run.assumed


def test_nodes_hold_no_more_devices_than_are_used(read_one: ReadOne) -> None:
    run = read_one(num_gpus=4, dp=2)
    assert run.conditions
    assert (run.conditions.devices_per_node, run.conditions.num_nodes) == (4, 1)


def test_groups_name_the_catalogues_accelerator_also_for_unpredicted_rows(read_one: ReadOne) -> None:
    predicted, not_predicted = read_one(), read_one(seq_len="")
    assert predicted.groups["accelerator"] == not_predicted.groups["accelerator"] == "h100"
    assert predicted.groups["size"] == "3B to 20B active"
    assert "size" not in not_predicted.groups
    assert predicted.is_gpu
    assert not read_one(gpu="TPU v5p").is_gpu


def test_sweeps_are_recognised_by_their_row_or_by_the_list(read_one: ReadOne) -> None:
    assert not read_one().is_sweep
    assert read_one(quality="B-third-party-sweep").is_sweep
    assert read_one(source_key="vtrain_single").is_sweep


def test_failed_configurations_count_only_when_memory_ran_out(read_one: ReadOne) -> None:
    for kind, reason in (("oom", None), ("oom_or_crash", None), ("error", Reason.NOT_MEMORY)):
        run = read_one(failed=True, metric_kind=kind, tok_s_gpu_best="")
        assert run.reason is reason, kind
        assert run.conditions is not None


def test_a_file_without_the_schema_is_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("id,speed\na,3\n")
    with pytest.raises(InputError, match="missing columns model, gpu, num_gpus, seq_len"):
        read_runs(path)


def test_most_shipped_rows_with_a_rate_can_be_predicted() -> None:
    runs = shipped_runs()
    rated = [run for run in runs if run.tokens_per_s_per_device]
    predictable = [run for run in rated if run.conditions]
    assert (len(runs), len(rated)) == (3043, 3010)
    assert len(predictable) >= 2570
    for run in predictable:
        c = run.conditions
        assert c is not None
        assert c.plan.num_devices == c.num_devices, run.id
        assert c.global_batch == c.plan.micro_batch * c.plan.data * c.plan.num_micro_batches(c.global_batch)
    for run in runs:
        assert run.conditions is not None or run.reason is not None, run.id


def test_every_shipped_failure_by_memory_can_be_predicted() -> None:
    reasons = Counter(run.reason for run in read_failed(failed_configs_path()))
    assert reasons == {None: 1054, Reason.NOT_MEMORY: 12}


@given(st.data())
def test_any_cells_give_conditions_a_reason_or_bad_input(data: st.DataObject) -> None:
    cells = data.draw(st.dictionaries(st.sampled_from(COLUMNS), CELL_TEXTS, max_size=8))
    row = CsvRow("any.csv", 2, COMPLETE | cells)
    try:
        run = read_row(row)
    except InputError:
        return
    assert run.conditions is not None or run.reason is not None
    if run.conditions is not None:
        assert run.conditions.plan.num_devices == run.conditions.num_devices


def test_checks_of_a_row_are_noted(read_one: ReadOne) -> None:
    impossible = read_one(mem_gb_per_gpu=90, qa_flags="mem>capacity")
    assert impossible.memory_bytes is None
    assert "flagged: mem>capacity" in impossible.assumed
    other = read_one(params_b=13)
    assert any("13 billion parameters printed, 8.03 billion" in note for note in other.assumed)
    assert not any("billion" in note for note in read_one(params_b=8.0).assumed)


def test_conditions_list_what_a_prediction_uses(read_one: ReadOne) -> None:
    c = read_one(notes="FSDP + torch.compile").conditions
    assert c is not None
    assert c.software["compiles"] is True
    assert c.software["framework"] == "nemo"
    assert {"attention", "cuda_graphs", "expert_imbalance"} <= set(c.software)


def test_a_rate_above_the_peak_has_a_reason(read_one: ReadOne) -> None:
    cells = {"model": "LLAMA3.1-8B", "arch": "dense", "gpu": "RTX A6000", "precision": "bf16"}
    cells |= dict.fromkeys(("num_gpus", "dp", "cp", "tp"), 1) | {"mbs": 2, "gbs": 2}
    possible, impossible = (read_one(**cells, tok_s_gpu_best=rate) for rate in (2000, 4000))
    assert possible.reason is None
    assert impossible.reason is Reason.ABOVE_PEAK
    assert impossible.reason_detail.endswith("times the peak")


def test_a_measured_gemm_rate_is_a_condition_and_noted(read_one: ReadOne) -> None:
    run, without = read_one(gemm_tflops=1000), read_one()
    assert run.conditions is not None
    assert without.conditions is not None
    assert run.conditions.gemm_flops_per_s == 1e15
    assert "GEMMs at 1,000 TFLOP/s, measured on this system" in run.assumed
    assert without.conditions.gemm_flops_per_s is None
    impossible = read_one(gemm_tflops=2000)  # the peak is 1,979
    assert impossible.reason is Reason.ABOVE_PEAK


def test_rates_that_a_source_measured_apply_to_its_system_alone() -> None:
    rates = {
        (run.source_key, run.conditions.accelerator.name): run.conditions.gemm_flops_per_s
        for run in shipped_runs()
        if run.conditions
    }
    stated = {(s["source_key"], s["accelerator"]): s["gemm_tflops"] * 1e12 for s in published_systems()}
    assert {system: rate for system, rate in rates.items() if rate} == stated
    assert all(s["source"] for s in published_systems())


def test_padded_sequences_of_different_lengths_have_no_comparable_rate(read_one: ReadOne) -> None:
    assert read_one(notes="baseline (unpacked); variable length data").reason is Reason.VARIED_LENGTHS
    assert read_one(notes="packed 2048").reason is None


DEEPSEEK_V4 = {
    "model": "DeepSeek-V4-Flash", "gpu": "MI355X", "num_gpus": 32, "gpus_per_node": 8, "seq_len": 4096, "mbs": 1,
    "gbs": 256, "tp": 1, "pp": 4, "cp": 1, "dp": 8, "ep": 8, "precision": "bf16", "framework": "Primus (Megatron)",
    "date": "2026-08", "arch": "moe",
}  # fmt: skip


def test_compressed_attention_is_read_with_its_switches(read_one: ReadOne) -> None:
    notes = "load-balance mode / dispatcher: uniform / MegaMoE; 43 layers + MTP 1"
    run = read_one(**DEEPSEEK_V4, notes=notes, recompute="")
    c = run.conditions
    assert c is not None
    assert (c.model.name, c.model.num_mtp_layers, c.plan.recompute_layers) == ("deepseek-v4-flash", 1, 3)
    assert (c.stack.features.overlaps_experts, c.stack.features.expert_imbalance) == (True, 1.0)
    assert any("not calibrated" in note for note in run.assumed)
    other = read_one(**DEEPSEEK_V4, notes="load-balance mode / dispatcher: even / DeepEP").conditions
    assert other is not None
    assert (other.stack.features.overlaps_experts, other.stack.features.dispatcher) == (None, "deepep")


def test_a_rate_counted_for_every_residual_stream(read_one: ReadOne) -> None:
    printed = {"tok_s_gpu_best": "", "tflops_per_gpu": 1135.6, "flops_convention": "Primus DSv4 closed form counts"}
    run = read_one(**DEEPSEEK_V4, **printed)
    assert run.tokens_per_s_per_device == pytest.approx(3157.6, rel=1e-3)


def test_sizes_of_a_script_that_its_table_does_not_print(read_one: ReadOne) -> None:
    unsized = DEEPSEEK_V4 | {"seq_len": "", "gbs": ""}
    run = read_one(**unsized, source="github:AMD-AGI/Primus git log (PR text) speedup ladder")
    assert run.conditions is not None
    assert (run.conditions.seq_len, run.conditions.global_batch) == (4096, 256)
    assert "gbs 256, the default of its script" in run.assumed
    assert read_one(**unsized).reason is Reason.NO_SEQUENCE_LENGTH


def test_a_model_like_another_has_its_own_layers_and_experts(read_one: ReadOne) -> None:
    cells = DEEPSEEK_V4 | {
        "model": "DeepSeek-V4-like-20L+1MTP-128E", "layers": 20, "experts": 128, "num_gpus": 8, "pp": 2,
        "dp": 4, "ep": 4,
    }  # fmt: skip
    run = read_one(**cells)
    assert run.conditions is not None
    model = run.conditions.model
    assert (model.num_layers, model.num_mtp_layers, model.experts.num_experts) == (20, 1, 128)
    assert len(model.attention.compression.strides) == 20
    assert any("read as deepseek-v4-flash but for what the row states" in note for note in run.assumed)


def test_a_stack_without_indexers_attends_to_all_keys(read_one: ReadOne) -> None:
    cells = DEEPSEEK_V4 | {"model": "GLM-5", "num_gpus": 64, "pp": 8}
    dense, sparse = read_one(**cells), read_one(**cells | {"framework": "Megatron-Bridge", "gpu": "H200"})
    assert dense.conditions is not None
    assert dense.conditions.model.attention.indexer is None
    assert any("attention to all keys" in note for note in dense.assumed)
    assert sparse.conditions is not None
    assert sparse.conditions.model.attention.indexer is not None


@pytest.mark.parametrize(
    ("cells", "is_lora"),
    [
        ({"task": "", "model": "Llama3 8B LoRA"}, True),
        ({"task": "sft", "notes": "LoRA r=64"}, True),
        ({"task": "sft", "notes": "full fine-tuning, no LoRA"}, False),
        ({"task": "pretrain", "notes": "faster than LoRA"}, False),
    ],
)
def test_adapters_by_task_model_and_note(read_one: ReadOne, cells: dict[str, object], is_lora: bool) -> None:
    c = read_one(**cells).conditions
    assert c
    assert (c.lora is not None) is is_lora
    assert c.lora is None or "64" not in str(cells.get("notes")) or c.lora.rank == 64


@pytest.mark.parametrize("cells", [{"task": "qlora"}, {"task": "sft", "notes": "4-bit base (bnb nf4), r=16"}])
def test_a_quantised_base_by_task_and_note(read_one: ReadOne, cells: dict[str, object]) -> None:
    run, plain = read_one(**cells), read_one(task="sft", notes="LoRA")
    assert run.conditions
    assert run.conditions.lora
    assert run.conditions.lora.base_format is BaseFormat.NF4_DOUBLE
    assert any("nf4" in note for note in run.assumed)
    assert plain.conditions
    assert plain.conditions.lora
    assert plain.conditions.lora.base_format is BaseFormat.FULL


def test_contradictions_are_all_listed_with_what_is_used(read_one: ReadOne) -> None:
    run = read_one(notes="TP4, MBS 2, BF16; CUDA graphs off; full-iteration CUDA graphs", grad_accum=3, gbs_tokens=999)
    used = [note for note in run.assumed if note.endswith(("used", "used, 1", "used, fp8"))]
    assert len(used) == 6, run.assumed
    assert run.conditions
    assert (run.conditions.plan.tensor, run.conditions.plan.micro_batch) == (1, 1)


def test_a_slice_of_cores_is_half_as_many_chips(read_one: ReadOne) -> None:
    run = read_one(gpu="TPU v5p-128", num_gpus=128, dp=64, framework="MaxText", precision="bf16")
    assert "a slice TPU v5p-128 has 64 chips: 128 used, as of several" in run.assumed


def test_a_name_that_no_row_has_is_known_without_reading_them():
    runs = shipped_runs()
    names = {run.conditions.model.name for run in runs if run.conditions is not None}
    assert len(names) > 50
    assert [name for name in names if not may_be_published(name)] == []
    assert not may_be_published("tiny")
    with measured_runs_path().open(encoding="utf-8", newline="") as lines:
        other_names = [row["model"] for row in csv.DictReader(lines) if row["model"] != row["model_canonical"]]
    assert [name for name in other_names if not may_be_published(name)] == []
    assert len(other_names) > 50


FP32 = {"gpu": "A100-SXM-80GB", "model": "LLAMA3.1-8B", "framework": "torchtitan", "precision": "fp32"}
"""A100 multiplies 19.5 TFLOP/s in fp32 and 156 in TF32: about 370 and 3,000 tokens/s of this model."""


@pytest.mark.parametrize(
    ("cells", "tf32"),
    [
        ({"tok_s_gpu_best": 200}, False),
        ({"tok_s_gpu_best": 200, "precision": "TF32"}, True),
        ({"tok_s_gpu_best": 200, "precision": "fp32 (TF32)"}, True),
        ({"tok_s_gpu_best": 200, "notes": "TF32 allowed"}, True),
        ({"tok_s_gpu_best": 200, "notes": "TF32 allowed", "precision": "bf16"}, False),
        ({"tok_s_gpu_best": 200, "notes": "TF32 allowed", "gpu": "MI355X"}, False),  # it has no such units
        ({"tok_s_gpu_best": 1000}, True),  # more than its fp32 units compute
    ],
)
def test_fp32_is_tf32_where_the_row_says_so_or_its_rate_shows_it(
    read_one: ReadOne, cells: dict[str, object], tf32: bool
) -> None:
    run = read_one(**FP32 | cells)
    assert run.conditions is not None, run.reason_detail
    assert (run.conditions.tf32, run.reason) == (tf32, None)
    assert any("as TF32" in note for note in run.assumed) == (cells["tok_s_gpu_best"] == 1000)


def test_no_rate_makes_tf32_of_what_is_none(read_one: ReadOne) -> None:
    assert read_one(**FP32, tok_s_gpu_best=1000, notes="no TF32").reason is Reason.ABOVE_PEAK
    denied = FP32 | {"precision": "fp32 (TF32 disabled)"}
    assert read_one(**denied, tok_s_gpu_best=1000).reason is Reason.ABOVE_PEAK
    assert read_one(**FP32, tok_s_gpu_best=5000).reason is Reason.ABOVE_PEAK


def test_tf32_has_the_rate_of_tensor_cores(read_one: ReadOne) -> None:
    """Between 8 times the peak of fp32 units and half of bf16's."""
    runs = [read_one(**FP32 | {"tok_s_gpu_best": 200, "precision": p}) for p in ("fp32", "TF32", "bf16")]
    fp32, tf32, bf16 = predict(runs).tokens_per_s_per_device
    assert 4 * fp32 < tf32 < 8.5 * fp32
    assert 0.4 * bf16 < tf32 < bf16


@pytest.mark.parametrize(
    ("cells", "name", "assumed"),
    [
        ({"optimizer": "AdamW (fused)"}, "adamw", ""),
        ({"optimizer": "adamw_8bit"}, "adamw8bit", ""),
        ({"optimizer": "Muon"}, "muon", ""),
        ({"notes": "optimizer states in bf16"}, "adamw in bf16", ""),
        ({"optimizer": "Adafactor"}, "adamw", "optimizer Adafactor: AdamW is assumed"),
    ],
)
def test_the_optimizer_is_a_condition(read_one: ReadOne, cells: dict[str, object], name: str, assumed: str) -> None:
    run = read_one(**cells)
    assert run.conditions is not None
    assert run.conditions.optimizer == name
    assert not assumed or assumed in run.assumed
    usual = PRECISIONS[run.conditions.precision].optimizer_state_bytes
    assert (run.conditions.number_formats.optimizer_state_bytes < usual) == (name != "adamw")
