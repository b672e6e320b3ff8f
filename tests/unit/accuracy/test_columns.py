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
        ("Tokens/s/GPU", "8192"),
        ("Tokens per second per GPU", "8192"),
        ("step_time_s", "8"),
        ("Step time (s)", "8"),
        ("Step time (ms)", "8000"),
    ],
)
def test_a_rate_in_any_unit_is_the_same(tmp_path, header, value):
    run = one(tmp_path, header, value)
    assert run.reason is None
    assert run.conditions
    assert run.conditions.plan.data_shard == 8
    assert run.tokens_per_s_per_device == pytest.approx(8192)


def test_memory_in_gib(tmp_path):
    ours, theirs = (
        one(tmp_path, f"tgs,{name}", f"8000,{v}")
        for name, v in (("mem_gb_per_gpu", 64), ("Memory (GiB)", 64))
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


def test_grouped_digits_are_refused_with_their_number(tmp_path):
    with pytest.raises(InputError) as error:
        one(tmp_path, "tgs", '"8,192"')
    assert error.value.hint == "write the digits: 8192"
