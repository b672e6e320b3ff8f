"""Rows in the words of tables and launch scripts that no shipped row has."""

from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.accuracy.reasons import Reason
from meshwright.accuracy.rows import PublishedRun, read_runs
from meshwright.accuracy.spelling import spelled
from meshwright.specs.plan import Recompute, Sharding

ReadOne = Callable[..., PublishedRun]


def conditions_of(run: PublishedRun):
    assert run.conditions is not None, (run.reason, run.reason_detail)
    return run.conditions


def read_table(tmp_path: Path, header: str, row: str) -> PublishedRun:
    path = tmp_path / "theirs.csv"
    path.write_text(f"{header}\n{row}\n")
    (run,) = read_runs(path)
    return run


# --- columns ---


def test_a_table_of_sizes_containers_and_lengths_in_thousands(tmp_path: Path) -> None:
    run = read_table(
        tmp_path,
        "Model,Size,Accelerator,Total GPUs,Sequence length,Global batch size,Micro batch size,TP,PP,VP,compute dtype,"
        "Elapsed training step time (s),Container,Act. ckpt,Peak mem (GiB)",
        "Llama 3.1,405B,NVIDIA GB200,512,8k,768,1,4,8,None,fp8_cs,14.1,nvcr.io/nvidia/nemo:25.11,none,100",
    )
    c = conditions_of(run)
    assert (c.model.name, c.seq_len, c.plan.virtual_pipeline, c.precision) == ("llama3.1-405b", 8192, 1, "fp8")
    assert (c.stack.framework, c.stack.vintage) == ("nemo", 2025.833)
    assert run.step_time_s == 14.1
    assert run.memory_bytes == pytest.approx(100 * 2**30)


def test_rates_of_all_devices_that_only_nodes_count(tmp_path: Path) -> None:
    run = read_table(
        tmp_path,
        "Model,Hardware,Nodes,GPUs per node,Context length,Global batch,Micro batch,Parallelism,dtype,Tokens/day (B)",
        "Qwen3-14B,MI325X,4,8,4096,256,2,FSDP32,bf16,18",
    )
    assert run.tokens_per_s_per_device == pytest.approx(18e9 / 86400 / 32)
    assert conditions_of(run).plan.sharding is Sharding.PARAMETERS


# --- names ---


@pytest.mark.parametrize(
    ("published", "name"),
    [
        ("llama3.1_8B-FP8-pretrain", "llama3.1-8b"),
        ("Llama3-8B (full finetune)", "llama3-8b"),
        ("Qwen3-235B-A22B-Instruct-2507", "qwen3-235b-a22b"),
        ("Qwen2.5-Coder-7B", "qwen2.5-7b"),
        ("MiniMax-M2 230B-A10B", "minimax-m2"),
        ("DeepSeek-V3 (671B-A37B)", "deepseek-v3"),
        ("GPT OSS 20B (MXFP4 weights)", "gpt-oss-20b"),
    ],
)
def test_names_with_tasks_formats_dates_and_sizes(read_one: ReadOne, published: str, name: str) -> None:
    cells = {"layers": "", "hidden": "", "heads": "", "kv_heads": "", "ffn": "", "vocab": "", "params_b": ""}
    run = read_one(model=published, precision="bf16", cp="", dp=8, dp_type="FSDP", tok_s_gpu_best=9, **cells)
    assert conditions_of(run).model.name == name


@pytest.mark.parametrize("published", ["OPT 5B", "BLOOM-3B", "Kimi-K2 30B"])
def test_a_size_of_its_own_is_another_model(read_one: ReadOne, published: str) -> None:
    cells = {"layers": "", "hidden": "", "heads": "", "kv_heads": "", "ffn": "", "vocab": "", "params_b": ""}
    assert read_one(model=published, **cells).conditions is None


def test_shapes_that_are_not_those_of_the_named_model_are_noted(read_one: ReadOne) -> None:
    run = read_one(model="Llama3.1-8B", hidden=2048, ffn=8192, heads=16)
    assert "hidden 2048, 4096 in llama3.1-8b: 2048 used" in run.assumed


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("MI300X x8", "mi300x"),
        ("H100 (x8)", "h100"),
        ("MI355X (OAM, 288 GB, liquid cooled)", "mi355x"),
        ("tpu7x-256", "tpu7x"),
        ("TPU7x (2x2x4)", "tpu7x"),
        ("Cloud TPU v6e (Trillium)", "tpu-v6e"),
        ("p5.48xlarge (H100)", "h100"),
        ("H200 NVL x8", None),
    ],
)
def test_spellings_of_accelerators(name: str, known: str | None) -> None:
    assert spelled(name) == known


# --- software ---


@pytest.mark.parametrize(
    ("cells", "vintage"),
    [
        ({"date": "March 2026"}, 2026.167),
        ({"date": "2026/05/01"}, 2026.333),
        ({"date": "05/2026"}, 2026.333),
        ({"date": "20260401"}, 2026.25),
        ({"date": "2026"}, 2026.5),
        ({"framework_version": "0.15.0 (Oct 2025)", "date": "2026-01"}, 2025.75),
        ({"framework_version": "torch 2.10.0.dev20260115"}, 2026.038),
        ({"framework_version": "rocm/primus:v25.9_gfx950"}, 2025.667),
        ({"framework": "NeMo 25.09", "date": "2026-02"}, 2025.667),
        ({"framework_version": "26.02.01"}, 2026.083),
    ],
)
def test_dates_and_releases(tmp_path: Path, cells: dict[str, str], vintage: float) -> None:
    row = {
        **{"model": "llama3-8b", "gpu": "h100", "num_gpus": "8", "seq_len": "8192", "mbs": "1", "dp_type": "fsdp"},
        **{"framework": "torchtitan", "tok_s_gpu_best": "9", "precision": "bf16"},
        **cells,
    }
    run = read_table(tmp_path, ",".join(row), ",".join(row.values()))
    assert conditions_of(run).stack.vintage == pytest.approx(vintage, abs=1e-3)


@pytest.mark.parametrize("framework", ["Megatron-LM", "ROCm Megatron-LM", "Primus (Megatron-Bridge)"])
def test_megatron_on_amd_is_that_of_amd(read_one: ReadOne, framework: str) -> None:
    run = read_one(framework=framework, gpu="MI355X", precision="bf16")
    assert conditions_of(run).stack.framework == "primus-megatron"


@pytest.mark.parametrize(("gpu", "precision"), [("B300", "nvfp4"), ("MI355X", "mxfp4")])
def test_four_bits_are_those_of_the_vendor(read_one: ReadOne, gpu: str, precision: str) -> None:
    run = read_one(gpu=gpu, precision="FP4")
    assert conditions_of(run).precision == precision
    assert any(note.startswith(f"precision {precision}") for note in run.assumed)


def test_a_format_of_a_part_is_noted(read_one: ReadOne) -> None:
    run = read_one(gpu="B200", precision="mxfp8 (routed experts only)")
    assert "precision 'mxfp8 (routed experts only)' read as mxfp8" in run.assumed


# --- plan ---


def test_degrees_of_notes_that_agree_with_the_devices(read_one: ReadOne) -> None:
    cells = {"num_gpus": 64, "cp": "", "dp": "", "dp_type": "", "mbs": "", "gbs": "", "framework": "torchtitan"}
    run = read_one(notes="FSDP=16, TP=4; local_batch_size 2", tp="", pp="", **cells)
    plan = conditions_of(run).plan
    assert (plan.tensor, plan.data_shard, plan.micro_batch) == (4, 16, 2)
    assert plan.sharding is Sharding.PARAMETERS
    cells |= {"mbs": 1, "tp": "", "pp": "", "dp_type": "HSDP"}
    run = read_one(notes="dp_replicate=8, dp_shard=8", **cells)
    assert conditions_of(run).plan.data_replicate == 8


def test_data_parallel_ranks_that_count_context_ranks(read_one: ReadOne) -> None:
    run = read_one(dp=8)
    assert conditions_of(run).plan.data_shard == 4
    assert "DP 8 counts the context ranks: 4 without" in run.assumed


def test_experts_of_a_model_without_any_are_noted(read_one: ReadOne) -> None:
    assert "ep 8: the model has no experts" in read_one(ep=8).assumed


def test_nodes_that_are_too_large_do_not_stop_a_file(read_one: ReadOne) -> None:
    run = read_one(num_gpus=64, cp=1, dp=64, num_nodes=4, gpus_per_node="")
    assert conditions_of(run).devices_per_node == 8
    assert "4 nodes of 16 devices: a node has at most 8, not used" in run.assumed


@pytest.mark.parametrize(
    ("dp_type", "sharding"),
    [
        ("none", Sharding.NONE),
        ("replicated", Sharding.NONE),
        ("FULLY_SHARD (reshard_after_forward=False)", Sharding.GRADIENTS),
        ("optim_grads_params", Sharding.PARAMETERS),
        ("zero_optimization.stage=3", Sharding.PARAMETERS),
    ],
)
def test_words_of_sharding(read_one: ReadOne, dp_type: str, sharding: Sharding) -> None:
    assert conditions_of(read_one(dp_type=dp_type)).plan.sharding is sharding


@pytest.mark.parametrize(
    ("recompute", "notes", "kind", "layers"),
    [
        ("N", "", Recompute.NONE, None),
        ("AC off", "", Recompute.NONE, None),
        ("w/ ckpt", "", Recompute.FULL, None),
        ("remat=full", "", Recompute.FULL, None),
        ("full, uniform, recompute_num_layers=1", "", Recompute.FULL, None),
        ("full/block/4", "", Recompute.FULL, 4),
        ("full", "recompute_method=block, recompute_num_layers=2", Recompute.FULL, 2),
        ("", "async checkpointing on", Recompute.NONE, None),
        ("", "end-to-end, incl. checkpointing, restarts", Recompute.NONE, None),
    ],
)
def test_words_of_recomputation(
    read_one: ReadOne, recompute: str, notes: str, kind: Recompute, layers: int | None
) -> None:
    plan = conditions_of(read_one(recompute=recompute, notes=notes)).plan
    assert (plan.recompute, plan.recompute_layers) == (kind, layers)


def test_a_column_and_a_note_on_recomputation_that_contradict_each_other(read_one: ReadOne) -> None:
    run = read_one(recompute="full", notes="no activation recomputation")
    assert "notes say none of recomputation: its column used, full" in run.assumed


@pytest.mark.parametrize(
    ("cells", "note"),
    [
        ({"dp_type": "zero-3 offload"}, "dp_type 'zero-3 offload': its offloading is not modelled"),
        ({"precision": "bf16/fp8"}, "precision 'bf16/fp8' read as bf16"),
    ],
)
def test_what_of_a_cell_is_not_used_is_noted(read_one: ReadOne, cells: dict[str, str], note: str) -> None:
    assert note in read_one(**cells).assumed


# --- rates ---


def test_a_utilisation_in_16_bits_is_of_the_devices_peak(tmp_path: Path) -> None:
    header = "model,gpu,num_gpus,seq_len,mbs,gbs,tp,pp,precision,framework,date,mfu_pct"
    row = "llama3.1-70b,h100,64,8192,1,128,4,4,{},Megatron-LM,2026-03,42"
    assert read_table(tmp_path, header, row.format("bf16")).tokens_per_s_per_device
    assert read_table(tmp_path, header, row.format("fp8")).reason is Reason.FLOPS_ONLY
