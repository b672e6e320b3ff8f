"""Tables in the columns and units of others."""

from pathlib import Path

import pytest

from meshwright.accuracy.columns import notes_on_columns, our_columns
from meshwright.accuracy.rows import read_runs
from meshwright.accuracy.shipped import shipped_columns
from meshwright.errors import InputError

HEADER = "Model,GPU type,# GPUs,Framework,Seq. length,Global batch size,MBS,TP,PP,Data parallel size,dtype"
ROW = "llama3.1-8b,H100 SXM5 80GB,8,torchtitan,8192,64,1,1,1,8,bf16"


def one(tmp_path: Path, header: str, row: str):
    path = tmp_path / "theirs.csv"
    path.write_text(f"{HEADER},{header}\n{ROW},{row}\n")
    (run,) = read_runs(path)
    return run


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("tok_s_gpu_best", "8192"),
        ("tokens_per_s_per_gpu", "8192"),
        ("Tokens/s/GPU", "8192"),
        ("Tokens per second per GPU", "8192"),
        ("step_time_s", "8"),
        ("Step time (s)", "8"),
        ("Step time (ms)", "8000"),
        ("s/step", "8"),
        ("sec/iter", "8"),
        ("ms/step", "8000"),
        ("elapsed time per iteration (ms)", "8000"),
        ("step/s", "0.125"),
        ("TPS/GPU", "8192"),
        ("Throughput (T/s/GPU)", "8192"),
    ],
)
def test_a_rate_in_any_unit_is_the_same(tmp_path, header, value):
    run = one(tmp_path, header, value)
    assert run.reason is None
    assert run.conditions
    assert run.conditions.plan.data_shard == 8
    assert run.tokens_per_s_per_device == pytest.approx(8192)


COLUMNS_OF_ENGINES = {
    "gpu": "System", "model_size": "NumParams", "mbs": "MicroBatchSize|BS/GPU|LBS", "gbs": "GlobalBatchSize|GBS",
    "seq_len": "SeqLen (T)|ctx_len", "grad_accum": "GradAccum", "etp": "Expert TP|ETP",
    "vpp": "Virtual PP|VP", "cp": "CP",
    "ep": "EP", "recompute": "Recompute|Remat|Activation checkpointing|Grad Ckpt", "dp_type": "Sharding Strategy",
    "precision": "Precision|Numerics|Data type",
    "hfu_pct": "HFU", "dp_shard": "DP shard", "dp_replicate": "DP replicate",
    "seq_parallel": "Sequence parallel", "gpus_per_node": "GPUs/node", "tok_s_gpu_best": "tok/s/gpu",
    "mfu_pct": "Model FLOPs Utilization|model flops utilization (%)", "num_gpus": "# of GPUs|GPU count|World size",
    "tflops_per_gpu": "TFLOPs/GPU|Achieved TFLOP/s/GPU|TFLOP/s/chip",
}  # fmt: skip


def test_names_of_columns_in_tables_of_engines():
    pairs = [(theirs, ours) for ours, names in COLUMNS_OF_ENGINES.items() for theirs in names.split("|")]
    assert [(theirs, our_columns([theirs])[0].name) for theirs, _ in pairs] == pairs


def test_memory_in_gib(tmp_path):
    ours, theirs = (
        one(tmp_path, f"tgs,{name}", f"8000,{v}") for name, v in (("mem_gb_per_gpu", 64), ("Memory (GiB)", 64))
    )
    assert theirs.memory_bytes == pytest.approx(ours.memory_bytes * 2**30 / 1e9)


@pytest.mark.parametrize(("header", "value"), [("MFU", "0.45"), ("MFU (%)", "45"), ("mfu", "45")])
def test_a_share_and_percent_are_told_apart_by_their_values(tmp_path, header, value):
    path = tmp_path / "theirs.csv"
    path.write_text(f"model,gpu,num_gpus,seq_len,{header}\nllama3-8b,h100,8,8192,{value}\n")
    from meshwright.accuracy.rows import table_of_runs

    (row,) = table_of_runs(path)
    assert row.number("mfu_pct") == pytest.approx(45)


def test_what_is_renamed_and_what_is_not_read_is_said(tmp_path):
    path = tmp_path / "theirs.csv"
    path.write_text(f"{HEADER},Weather,batch size,Step time (ms)\n")
    renamed, unread = notes_on_columns(path)
    assert "GPU type as gpu" in renamed
    assert "Step time (ms) as step_time_s (times 0.001)" in renamed
    assert unread == "columns that are not read: Weather, batch size"


def test_our_own_columns_stay_as_they_are():
    header = sorted(shipped_columns())
    assert [(c.name, c.scale) for c in our_columns(header)] == [(name, 1.0) for name in header]
    assert [c.name for c in our_columns(["gpu", "Accelerator"])] == ["gpu", "Accelerator"]


def test_a_table_without_a_measure_is_refused(tmp_path):
    with pytest.raises(InputError, match="missing a measured column"):
        one(tmp_path, "Weather", "sunny")


def test_grouped_digits_are_read(tmp_path):
    assert one(tmp_path, "tgs", '"8,192"').tokens_per_s_per_device == 8192


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("samples/s", "8"),
        ("Samples per second", "8"),
        ("seq/s/GPU", "1"),
        ("Total tokens/s", "65536"),
        ("Cluster throughput (tokens/s)", "65536"),
        ("k tokens/s/chip", "8.192"),
        ("tokens/s/node", "65536"),
        ("tokens per day", "5662310400"),
        ("B tokens/day", "5.6623104"),
        ("tokens/GPU/day", "707788800"),
        ("steps/s", "0.125"),
        ("it/s", "0.125"),
    ],
)
def test_rates_of_samples_steps_and_all_devices(tmp_path, header, value):
    path = tmp_path / "theirs.csv"
    path.write_text(f"{HEADER},gpus_per_node,{header}\n{ROW},8,{value}\n")
    (run,) = read_runs(path)
    assert run.tokens_per_s_per_device == pytest.approx(8192)
    assert run.reason is None


def test_tokens_of_nobody_are_not_read(tmp_path):
    path = tmp_path / "theirs.csv"
    path.write_text(f"{HEADER},MFU,tokens/s\n{ROW},45,8000\n")
    assert notes_on_columns(path)[-1] == "columns that are not read: tokens/s"


def test_columns_of_switches_are_read_as_notes(tmp_path):
    path = tmp_path / "theirs.csv"
    path.write_text(f"{HEADER},CUDA graphs,Attention,Weather,tgs\n{ROW},off,FA3,sunny,8192\n")
    (run,) = read_runs(path)
    assert run.conditions
    assert (run.conditions.stack.features.cuda_graphs, run.conditions.stack.features.attention) == ("none", "fa3")
    assert notes_on_columns(path)[-2:] == [
        "columns read as notes: CUDA graphs, Attention",
        "columns that are not read: Weather",
    ]


def test_devices_of_nodes(tmp_path):
    path = tmp_path / "theirs.csv"
    path.write_text(
        "model,gpu,Nodes,GPUs per node,seq_len,Global batch size,MBS,FSDP,tgs\nllama3.1-8b,H100,2,8,8192,64,1,1,8192\n"
    )
    (run,) = read_runs(path)
    assert run.conditions
    assert (run.conditions.num_devices, run.conditions.plan.data_shard) == (16, 16)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("sign", [",", ";", "\t", "|"])
def test_files_of_spreadsheets(tmp_path, encoding, sign):
    lines = [f"{HEADER},Step time (s),,", "", f"{ROW},8,,", ",".join([""] * 14)]
    text = "\r\n".join(line.replace(",", sign) for line in lines)
    path = tmp_path / "theirs.csv"
    path.write_bytes(text.encode(encoding))
    (run,) = read_runs(path)
    assert (run.line, run.tokens_per_s_per_device) == (3, 8192)


def test_decimal_commas_of_files_with_semicolons(tmp_path):
    path = tmp_path / "theirs.csv"
    header, row = HEADER.replace(",", ";"), ROW.replace(",", ";")
    path.write_text(f"sep=;\n{header};tgs;MFU\n{row};8.192,5;45,25 %\n")
    (run,) = read_runs(path)
    assert run.tokens_per_s_per_device == 8192.5


@pytest.mark.parametrize("form", ["list", "lines", "object"])
def test_json(tmp_path, form):
    import json

    row = dict(zip(HEADER.split(","), ROW.split(","), strict=True)) | {"# GPUs": 8, "tgs": 8192.0, "notes": None}
    text = {"list": json.dumps([row]), "lines": json.dumps(row) + "\n", "object": json.dumps({"rows": [row]})}[form]
    path = tmp_path / "theirs.json"
    path.write_text(text)
    (run,) = read_runs(path)
    assert run.tokens_per_s_per_device == 8192
    path.write_text("[1, 2]")
    with pytest.raises(InputError, match="not a row"):
        read_runs(path)


@pytest.mark.parametrize(
    ("version", "compiles"),
    [
        ("2025-09, no compile", False),
        ("2025-09; torch.compile", True),
        ("2025-09 (eager)", False),
        ("2025-09, compile of the loss only", False),
    ],
)
def test_words_beside_the_version_are_switches(tmp_path, version, compiles):
    run = one(tmp_path, "tgs,framework_version", f'8000,"{version}"')
    assert run.conditions
    assert run.conditions.stack.vintage == pytest.approx(2025 + 8 / 12, abs=1e-3)
    assert run.conditions.software["compiles"] is compiles
    assert run.unread == ()


def test_a_framework_names_its_kernels(tmp_path):
    path = tmp_path / "theirs.csv"
    cells = ROW.replace("torchtitan", "mine (unfused attention)")
    path.write_text(f"{HEADER},tgs\n{cells},2000\n")
    (run,) = read_runs(path)
    assert run.conditions
    assert run.conditions.software["attention"] == "unfused"
