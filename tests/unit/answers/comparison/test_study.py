"""Comparisons of folders of records and published figures: values, warnings, like for like, golden tables."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests.record_folders import write_serving, write_sweep, write_training

from meshwright.answers.comparison.ratios import Verdict
from meshwright.answers.comparison.sides import Breakdown, Evidence
from meshwright.answers.comparison.study import PARTS, Gap, compare_items, endnotes, gap_rows, verdict_word
from meshwright.cli.commands.compare import command
from meshwright.errors import InfeasibleError, InputError
from meshwright.report.comparison.tables import markdown, tables_of

GOLDEN = Path(__file__).parent / "golden"
EIGHT_405B = "model=llama3.1-405b,precision=fp4,accelerator=b200"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    where = tmp_path_factory.mktemp("records")
    write_training(where / "before")
    write_training(where / "after", speed=1.25)
    return where


@pytest.mark.parametrize(
    ("verdict", "of_memory"), [(Verdict.WIN, "less"), (Verdict.LOSS, "more"), (Verdict.TIE, "undecided")]
)
def test_more_memory_is_called_more_and_no_loss(verdict, of_memory):
    assert verdict_word(verdict, "memory") == of_memory
    assert verdict_word(verdict, "throughput") == verdict.value


def means(found):
    return {m.metric: m for m in found.means}


def test_two_trainings(folders):
    found = compare_items([str(folders / "before"), str(folders / "after")])
    throughput = means(found)["throughput"]
    assert throughput.value == pytest.approx(1.25)
    assert throughput.ratios[0].verdict is Verdict.WIN
    assert 1.2 < throughput.ratios[0].low < 1.25 < throughput.ratios[0].high < 1.31
    assert len(throughput.ratios[0].other.samples) == 17  # without three that warm up
    assert means(found)["memory"].ratios[0].verdict is Verdict.TIE
    assert [d.condition for d in found.differing if d.differs] == []
    assert any("steps of one run" in text for text in found.cautions)


def test_a_sweep_names_the_software_of_its_engine(tmp_path):
    write_sweep(tmp_path / "a")
    write_sweep(tmp_path / "b")
    found = compare_items([str(tmp_path / "a"), str(tmp_path / "b")])
    (software,) = (d for d in found.differing if d.condition == "software")
    assert "torch 2.13.0" in str(software.values)
    for text in (str(software.values), *endnotes(found.sides)):
        assert "{" not in text


def test_the_gap_of_like_for_like_adds_up(folders):
    found = compare_items([str(folders / "before"), str(folders / "after")], is_like_for_like=True)
    (gap,) = found.gaps
    assert gap.total_s == pytest.approx(1 / (1.25 * 9362) - 1 / 9362)
    assert sum(gap.part_s(p) for p in ("kernel_s", "communication_s", "bubble_s", "host_s")) == pytest.approx(
        gap.total_s
    )
    assert gap.before.communication_s == pytest.approx(0.1 / 9362)
    assert gap.before.bubble_s == 0


def test_the_bubble_of_a_gap_is_the_measured_wait_for_other_stages(tmp_path):
    shares = {"GEMM": 0.7, "communication": 0.1, "pipeline wait": 0.15, "idle": 0.05}
    write_training(tmp_path / "waits", run__plan={"pipeline": 4}, profile__shares=shares)
    write_training(tmp_path / "flat")
    found = compare_items([str(tmp_path / "flat"), str(tmp_path / "waits")], is_like_for_like=True)
    after = found.gaps[0].after
    assert after.bubble_s * 9362 == pytest.approx(0.15)
    assert after.host_s * 9362 == pytest.approx(0.05)
    assert "measured wait" in after.note


def test_a_pipeline_whose_waits_are_not_measured_apart_has_no_bubble_and_says_so(tmp_path):
    write_training(tmp_path / "a", run__plan={"pipeline": 4})
    write_training(tmp_path / "b")
    after = compare_items([str(tmp_path / "b"), str(tmp_path / "a")], is_like_for_like=True).gaps[0].after
    assert (after.bubble_s, after.host_s * 9362) == (0, pytest.approx(0.05))
    assert "not measured apart" in after.note


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"run__global_batch": 32}, "sequences of a step: 64 (before), 32 (other)"),
        ({"statistics__mfu_convention": "hardware FLOPs; of the peak"}, "FLOP rule"),
    ],
    ids=["batch", "flops"],
)
def test_unlike_work_is_refused_in_like_for_like(folders, tmp_path, changes, said):
    write_training(tmp_path / "other", **changes)
    items = [str(folders / "before"), str(tmp_path / "other")]
    with pytest.raises(InfeasibleError, match="not like for like") as refused:
        compare_items(items, is_like_for_like=True)
    assert said in refused.value.message
    assert compare_items(items).means  # and compared without


def test_mfu_of_two_formats_refers_to_two_peaks(folders, tmp_path):
    write_training(tmp_path / "other", run__precision={"name": "fp8"})
    found = compare_items([str(folders / "before"), str(tmp_path / "other")])
    assert any("different peaks" in text for text in found.cautions)


def test_hardware_mixed_with_parallelism_is_warned_about(folders, tmp_path):
    write_training(
        tmp_path / "other", device__accelerator="mi355x", run__plan_in_words="TP8 mbs1", started="2024-01-01T00:00:00"
    )
    found = compare_items([str(folders / "before"), str(tmp_path / "other")])
    text = " ".join(found.cautions)
    assert "hardware differs together with parallelism" in text
    assert "24 months apart" in text
    assert (found.hardware[0].older, found.hardware[0].newer) == ("h100", "mi355x")
    assert found.hardware[0].line == ""


def test_replicas_of_the_published_tables(capsys):
    """Two published TP4 replicas over one TP8, both v0.21-era against v0.19: 1.36 over eleven rows."""
    found = compare_items(
        [
            f"points:source=*v0.19*,layout=TP8,{EIGHT_405B}",
            f"2 x TP4=points:source=*v0.21*,layout=TP4,{EIGHT_405B},replicas=2",
        ]
    )
    (mean,) = found.means
    assert (mean.n, round(mean.value, 2)) == (11, 1.36)
    assert mean.lowest.value < mean.value < mean.highest.value
    assert any("extrapolated" in text for text in found.cautions)
    assert found.sides[1].values[0].evidence is Evidence.EXTRAPOLATED


def test_mlperf_sets_average_over_submitters_and_generations_stand_beside_datasheets():
    found = compare_items(["mlperf:5.1/AMD/MI300X*/llama2_70b_lora", "mlperf:5.1/AMD/MI355X*/llama2_70b_lora"])
    (mean,) = found.means
    assert 2.7 < mean.value < 2.8
    (hardware,) = found.hardware
    assert hardware.line == "AMD Instinct"
    assert hardware.memory_capacity == pytest.approx(1.5)
    partners = compare_items(["mlperf:5.1/*/*xB200*/llama2_70b_lora@8", "mlperf:5.1/AMD/MI355X*/llama2_70b_lora"])
    assert partners.sides[0].values[0].sampled == "submitter's set"
    assert partners.sides[0].values[0].value == pytest.approx(
        sum(partners.sides[0].values[0].samples) / len(partners.sides[0].values[0].samples)
    )


def test_examples_of_published_figures_are_answered():
    lines = [line for line in (command.epilog or "").splitlines() if ":" in line and "run" not in line]
    asked = [[word for word in shlex.split(line) if ":" in word] for line in lines if "meshwright" in line]
    assert len(asked) == 2
    assert all(compare_items(sides).means for sides in asked)


def test_a_share_of_the_gap_below_half_a_percent_has_no_sign():
    before = Breakdown(**dict.fromkeys(PARTS, 1.0))
    first, second, *_ = PARTS
    gap = Gap(
        workload="w", baseline="a", other="b", before=before,
        after=replace(before, **{first: 2.0, second: 0.999}),
    )  # fmt: skip
    assert [row[-1] for row in gap_rows(gap)][:2] == ["100 %", "0 %"]


def test_sets_of_several_sizes_have_no_mean():
    with pytest.raises(InputError, match="several numbers of accelerators") as refused:
        compare_items(["mlperf:5.1/*/*/llama2_70b_lora", "claim:s65_06"])
    assert "@8" in refused.value.message


def test_an_unverified_score_says_so():
    found = compare_items(["mlperf:5.1/AMD/MI355X*/llama2_70b_lora", "claim:s65_06"])
    assert any("not verified by the MLCommons Association" in text for text in found.cautions)


def test_serving_pairs_loads_and_keeps_definitions_apart(tmp_path):
    write_serving(tmp_path / "a")
    write_serving(tmp_path / "b", speed=2.0)
    found = compare_items([str(tmp_path / "a"), str(tmp_path / "b")])
    assert {m.metric: round(m.value, 6) for m in found.means} == {
        "output rate": 2.0, "input and output rate": 2.0, "time to first token": 2.0, "time per output token": 2.0,
    }  # fmt: skip
    assert means(found)["output rate"].n == 2
    assert any("fewer than 5 repeats" in text for text in found.cautions)


def test_failed_requests_of_a_serving_side_are_said(tmp_path):
    for name, ok in (("all", 10), ("some", 7), ("none", 0)):
        write_serving(tmp_path / name, ok=ok)
    write_serving(tmp_path / "many" / "one")
    write_serving(tmp_path / "many" / "two", ok=7)
    for name, number in (("some", "9 of 30"), ("many", "9 of 30")):
        found = compare_items([str(tmp_path / "all"), str(tmp_path / name)])
        lost = [text for text in found.cautions if "requests failed" in text]
        assert len(lost) == 2
        assert all(number in text and name in text for text in lost)
    with pytest.raises(InputError, match="no workload and metric in common"):
        compare_items([str(tmp_path / "all"), str(tmp_path / "none")])


def test_repeated_records_of_a_folder_become_samples(tmp_path, folders):
    for i, speed in enumerate((0.9, 1.0, 1.1, 1.2), start=1):
        write_training(tmp_path / "many" / f"run-{i}", speed=speed)
    found = compare_items([str(folders / "before"), str(tmp_path / "many")])
    value = found.sides[1].values[0]
    assert (len(value.samples), value.sampled, value.value) == (4, "record", pytest.approx(9362 * 1.05))


def test_records_of_a_folder_that_differ_stay_apart(tmp_path):
    write_training(tmp_path / "many" / "one")
    write_training(tmp_path / "many" / "two", run__precision={"name": "fp8"})
    shutil.copytree(tmp_path / "many", tmp_path / "other")
    found = compare_items([str(tmp_path / "many"), str(tmp_path / "other")])
    assert [r.workload.rpartition(", ")[2] for r in means(found)["throughput"].ratios] == ["bf16", "fp8"]


def test_one_damaged_record_of_many_is_left_out_with_file_and_field(tmp_path, folders):
    write_training(tmp_path / "many" / "good")
    write_training(tmp_path / "many" / "bad", statistics__step_s="fast")
    found = compare_items([str(folders / "before"), str(tmp_path / "many")])
    assert any("bad/record.json" in text and "statistics.step_s" in text for text in found.cautions)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"statistics": {}}, "statistics.steps"), ({"device__name": 3}, "device.name"), ({"started": None}, "started")],
    ids=["missing", "number", "null"],
)
def test_a_damaged_record_is_refused_with_file_and_field(tmp_path, folders, changes, said):
    folder = write_training(tmp_path / "bad", **{k: v for k, v in changes.items() if k != "statistics"})
    if "statistics" in changes:
        record = json.loads((folder / "record.json").read_text())
        record["statistics"] = {}
        (folder / "record.json").write_text(json.dumps(record))
    with pytest.raises(InputError) as refused:
        compare_items([str(folders / "before"), str(folder)])
    assert "bad/record.json" in refused.value.message
    assert said in refused.value.message


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ("nothing-here", "neither a folder of records"),
        ("", "empty name"),
        ("claim:nope", "nope"),
        ("mlperf:9.9/*", "no published MLPerf result"),
        ("points:colour=red", "KEY=TEXT"),
        ("points:accelerator=b200,replicas=0", "replicas"),
        ("points:accelerator=none", "no published point"),
    ],
)
def test_what_is_no_side_is_refused(item, said):
    with pytest.raises(Exception, match=said):
        compare_items(["claim:s65_01", item])


def test_nothing_in_common_names_what_each_side_has(folders):
    with pytest.raises(InputError, match="no workload and metric in common") as refused:
        compare_items([str(folders / "before"), "claim:s65_01"])
    assert "llama3.1-8b, pretrain, 8,192 tokens" in refused.value.message


def test_golden_tables(folders, monkeypatch):
    """Delete tests/unit/answers/comparison/golden/*.md and run this test to write it again."""
    monkeypatch.chdir(folders)
    found = compare_items(["before", "after"], is_like_for_like=True)
    text = markdown(found)
    path = GOLDEN / "two-trainings.md"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        pytest.fail("wrote the golden file: look at it, and run this again")
    assert text == path.read_text()


def test_endnotes_hold_hardware_software_date_command_n_and_statistic(folders):
    found = compare_items([str(folders / "before"), str(folders / "after")])
    note = endnotes(found.sides)[0]
    for text in (
        "8 x NVIDIA H100 80GB HBM3",
        "torch 2.13.0",
        "2026-01-02",
        "meshwright train run.yaml",
        "n = 17 steps",
    ):
        assert text in note
    assert tables_of(found)[0].rows[0][1] == "throughput"


def test_a_gap_that_is_not_split_has_its_reason(folders, tmp_path):
    write_training(tmp_path / "titan", run__engine="torchtitan", profile=None)
    found = compare_items([str(folders / "before"), str(tmp_path / "titan")])
    (reason,) = [text for text in found.cautions if "not split" in text]
    assert "titan" in reason
    assert "--profile" in reason
    write_training(tmp_path / "split", run__engine="torchtitan")
    for other in ("after", tmp_path / "split"):
        both = compare_items([str(folders / "before"), str(folders / other)])
        assert both.gaps
        assert not any("not split" in text for text in both.cautions)
