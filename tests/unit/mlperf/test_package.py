"""Submission folders, reference points from runs, comparisons."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.mlperf.conftest import SyntheticLog

from meshwright.errors import InputError
from meshwright.mlperf.benchmarks import load_benchmark
from meshwright.mlperf.check_system import SYSTEM_FIELDS
from meshwright.mlperf.compare import NOT_MLPERF, PUBLISHED, UNVERIFIED, compare, compared_scores, published_results
from meshwright.mlperf.convergence import read_points
from meshwright.mlperf.official import package_version
from meshwright.mlperf.package import write_package
from meshwright.mlperf.results import reference_document, write_reference_file
from meshwright.mlperf.score import result_folders, score_folder

REFERENCE = {"Creator": "Reference", "When": "2026", "Platform": "1xTest", "Precision": "BF16"}


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Any]:
    """System description and code of a submission."""
    system = tmp_path / "sys8.json"
    values = {**dict.fromkeys(SYSTEM_FIELDS, ""), "submitter": "Org", "division": "closed", "status": "Preview"}
    system.write_text(json.dumps({**values, "number_of_nodes": "1", "accelerators_per_node": "8"}))
    code = tmp_path / "code"
    (code / "__pycache__").mkdir(parents=True)
    (code / "__pycache__" / "train.pyc").write_text("x")
    (code / "train.py").write_text("print(1)\n")
    (code / "README.md").write_text("How to run\n")
    return {"out": tmp_path / "submission", "org": "Org", "system": system, "code": code, "round_name": "5.1"}


@pytest.fixture
def without_official(monkeypatch: pytest.MonkeyPatch) -> None:
    """The official checker is not started, which takes two seconds."""
    monkeypatch.setattr("meshwright.mlperf.package.ask", lambda request: {"passes": True, "messages": []})


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_package_is_whole_idempotent_and_accepted(
    lora_set: Callable[..., Path], inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = lora_set(*[4] * 3, *[5] * 7)
    package = write_package([folder], **inputs)
    results = "results/sys8/llama2_70b_lora"
    assert set(package.files) == {
        "systems/sys8.json",
        "benchmarks/llama2_70b_lora/implementations/sys8/README.md",
        "benchmarks/llama2_70b_lora/implementations/sys8/train.py",
        f"{results}/scaling.json",
        *(f"{results}/result_{i}.txt" for i in range(10)),
    }
    written = tree(package.folder)
    assert json.loads(written[f"{results}/scaling.json"]) == {"scaling_factor": package.scores[0].test.scaling}
    if package_version() is not None:
        assert package.check.passes, package.check.messages
    assert package.passes
    assert package.changed
    monkeypatch.setattr("meshwright.mlperf.package.ask", lambda request: {"passes": True, "messages": []})
    again = write_package([folder], **inputs)
    assert not again.changed
    assert tree(package.folder) == written
    assert sorted(p.name for p in inputs["out"].iterdir()) == ["Org"]


@pytest.mark.usefixtures("without_official")
def test_a_second_system_joins_and_the_first_stays(lora_set: Callable[..., Path], inputs: dict[str, Any]) -> None:
    folder = lora_set(*[5] * 10)
    first = set(write_package([folder], **inputs).files)
    other = inputs["system"].with_name("sys16.json")
    shutil.copy(inputs["system"], other)
    assert first < set(write_package([folder], **{**inputs, "system": other}).files)


@pytest.mark.when_touched  # test_official_checker (test_check.py) reads what a checker rejects
def test_the_package_checker_is_read_by_its_output(lora_set: Callable[..., Path], inputs: dict[str, Any]) -> None:
    folder = lora_set(*[5] * 10)
    for i in (3, 4):
        SyntheticLog(seed=i).without("submission_org").write(folder / f"result_{i}.txt")
    package = write_package([folder], **inputs)
    if package_version() is None:
        assert package.check.not_run
        return
    assert package.check.passes is False
    assert not package.passes
    assert any("2 files do not comply" in message for message in package.check.messages)


@pytest.mark.when_touched  # test_a_package_is_whole_idempotent_and_accepted asks the same checkers
def test_a_package_of_a_proxy_is_checked_officially_as_far_as_that_goes(
    lora_set: Callable[..., Path], inputs: dict[str, Any]
) -> None:
    """The package checker skips unknown benchmarks: their files go through the checkers that it would have called."""
    if package_version() is None:
        pytest.skip("mlperf-logging is not installed")
    rules = load_benchmark("proxy_lora_xs")
    folder = inputs["out"].parent / rules.name
    for i in range(10):
        log = SyntheticLog(seed=i)
        log.row("submission_benchmark")["value"] = rules.name
        log.write(folder / f"result_{i}.txt")
    package = write_package([folder], **inputs | {"round_name": "6.1"})
    assert package.check.passes is False
    assert any("result_0.txt" in text and "lora_rank" in text for text in package.check.messages)
    assert package.check.not_checked == ("proxy_lora_xs: convergence (the checks of this package tested it)",)
    assert package.notes == (f"{folder}: submission_org of the logs is 'Reference', the submitter is 'Org'",)


@pytest.mark.usefixtures("without_official")
def test_more_runs_leave_the_median_window(lora_set: Callable[..., Path], inputs: dict[str, Any]) -> None:
    package = write_package([lora_set(*[5] * 12)], **inputs)
    assert len([name for name in package.files if "result_" in name]) == 10


def test_all_problems_of_the_inputs_at_once(lora_set: Callable[..., Path], inputs: dict[str, Any]) -> None:
    inputs["system"].write_text(json.dumps({"submitter": "Other", "status": "soon"}))
    (inputs["code"] / "two words.py").write_text("")
    (inputs["code"] / ".hidden").write_text("")
    with pytest.raises(InputError) as caught:
        write_package([lora_set(5, 5, 5)], **{**inputs, "org": "../Org"})
    for part in ("missing: division", "'soon'", "'Other'", "two words.py", ".hidden", "'../Org'", "3 of 10 runs"):
        assert part in str(caught.value)
    assert not inputs["out"].exists()


@pytest.mark.usefixtures("without_official")
def test_an_interrupted_package_leaves_the_old_tree(
    lora_set: Callable[..., Path], inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = lora_set(*[5] * 10)
    written = tree(write_package([folder], **inputs).folder)
    (inputs["code"] / "train.py").write_text("print(2)\n")
    monkeypatch.setattr("meshwright.mlperf.package._official", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        write_package([folder], **inputs)
    assert tree(inputs["out"] / "Org") == written
    assert [p.name for p in inputs["out"].iterdir()] == ["Org"]


def test_reference_points_from_runs(lora_set: Callable[..., Path], tmp_path: Path) -> None:
    folder = lora_set(*[4] * 6, *[5] * 8, *[6] * 6)
    document, rules = reference_document([folder], origin=REFERENCE, round="5.1")
    row = document["llama2_70b_lora_ref_8"]
    assert row["samples to converge"] == [2688] * 6 + [3072] * 8 + [3456] * 6
    assert row["Hyperparams"] == {
        "opt_base_learning_rate": 4e-4, "opt_learning_rate_training_steps": 1024, "gradient_accumulation_steps": 1,
        "opt_learning_rate_warmup_factor": 0.0,
    }  # fmt: skip
    out = tmp_path / "new" / "rcps.json"
    write_reference_file(out, document, rules, replace=False)
    assert read_points(out, runs=10)[0].mean == 3072
    changed = {"llama2_70b_lora_ref_8": {**row, "Creator": "Other"}}
    with pytest.raises(InputError, match="--replace"):
        write_reference_file(out, changed, rules, replace=False)
    assert write_reference_file(out, changed, rules, replace=True)["llama2_70b_lora_ref_8"]["Creator"] == "Other"
    if package_version() is not None:
        from mlperf_logging.rcp_checker.rcp_checker import RCP_Checker

        with out.open() as stream:
            official = RCP_Checker("training", "5.1.0", "llama2_70b_lora", False, stream)
        assert official.rcp_data["llama2_70b_lora_ref_8"]["RCP Mean"] == 3072


def test_runs_that_make_no_point(lora_set: Callable[..., Path]) -> None:
    folder = lora_set(*[5] * 11)
    log = SyntheticLog(seed=2)
    log.row("run_stop")["metadata"]["status"] = "aborted"
    log.row("opt_base_learning_rate")["value"] = 1e-3
    log.write(folder / "result_2.txt")
    with pytest.raises(InputError) as caught:
        reference_document([folder], origin=REFERENCE, round="5.1")
    for part in ("11 of the 20 runs of a point", "aborted", "opt_base_learning_rate differs"):
        assert part in str(caught.value)


def test_comparison_of_published_results() -> None:
    found = published_results(
        rounds=["5.1"], benchmarks=["llama2_70b_lora"], accelerators=["MI355X", "mi300x"], devices=8
    )
    comparison = compare(found, baseline="MI300X")
    group = next(g for g in comparison.groups if g.accelerator == "MI355X")
    assert group.maker is not None
    assert group.maker.score_min == pytest.approx(10.185, abs=1e-3)
    assert group.spread == pytest.approx(0.0227, abs=1e-4)
    assert len(group.partners) == 3
    assert [round(r.ratio, 2) for r in comparison.generations] == [2.75]
    assert comparison.generations[0].of == "AMD"
    assert not any("Unverified" in note for note in comparison.endnotes)


def test_labels_of_computed_results(published: Path, lora_set: Callable[..., Path]) -> None:
    real = score_folder(result_folders(published / "v5.1" / "AMD")[0])
    mine = score_folder(lora_set(*[5] * 10))
    results = compared_scores([real, mine])
    assert [r.label for r in results] == [PUBLISHED, UNVERIFIED]
    assert any("Result not verified by MLCommons Association" in note for note in compare(results).endnotes)
    own = compared_scores([mine])[0]
    with pytest.raises(InputError, match="may not be compared"):
        compare([results[0], own.__class__(**{**own.__dict__, "label": NOT_MLPERF})])
    with pytest.raises(InputError, match="no result"):
        compare([])


def test_rules_name_the_catalogue_models() -> None:
    from meshwright.catalog.lookup import model

    for name in ("llama31_8b", "llama2_70b_lora", "gpt_oss_20b", "deepseekv3_671b", "llama31_405b"):
        assert model(load_benchmark(name).model["catalogue"])
