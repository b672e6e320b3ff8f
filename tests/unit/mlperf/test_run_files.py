"""Run files of benchmarks, their inputs, and what the closed division refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from meshwright.engines.native.check import check
from meshwright.errors import InputError, MissingDependencyError
from meshwright.mlperf.benchmarks import load_benchmark
from meshwright.mlperf.check import check_path
from meshwright.mlperf.check_system import SYSTEM_FIELDS
from meshwright.mlperf.inputs import find_inputs
from meshwright.mlperf.proxy_data import PARTS, build_proxy_data
from meshwright.mlperf.run_files import benchmark_run
from meshwright.mlperf.run_set import RunSet, new_seeds, open_set
from meshwright.mlperf.running import named_benchmark
from meshwright.mlperf.system_description import describe_system
from meshwright.mlperf.worker import clear_page_cache, logged_facts
from meshwright.specs.plan import Plan


def run_of(name: str, *overrides: str, division: str = "closed"):
    weights = "weights" if load_benchmark(name).kind == "lora" else None
    return benchmark_run(
        load_benchmark(name), overrides=overrides, train="train", validation="validation", weights=weights,
        division=division,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "batch", "every", "skip", "sequences", "steps"),
    [
        ("llama31_8b", 16, 12_288, 0, 1024, 1_200_000),
        ("llama31_8b", 96, 12_288, 0, 1024, 1_200_000),
        ("llama31_8b", 36, 12_312, 0, 1024, 1_200_000),
        ("proxy_pretrain_xs", 48, 144, 0, 128, 126),
        ("proxy_lora_xs", 8, 48, 3, 128, None),
    ],
)
def test_evaluation_follows_from_the_rules(name, batch, every, skip, sequences, steps):
    run = run_of(name, f"batch.global_sequences={batch}", "optimizer.learning_rate=1e-3")
    evaluate = run.train.evaluate
    assert evaluate.every_steps * batch == every
    assert (evaluate.skip_first, evaluate.num_sequences) == (skip, sequences)
    assert evaluate.target_loss == load_benchmark(name).target
    assert steps in (None, run.train.steps)
    assert run.train.steps % evaluate.every_steps == 0 or name == "llama31_8b"


def test_learning_rate_and_warmup_are_those_of_the_reference_points():
    run = run_of("llama31_8b", "batch.global_sequences=32")
    assert (run.optimizer.learning_rate, run.optimizer.warmup_steps) == (8e-4, 128)
    assert run_of("llama31_8b").global_batch == 16


@pytest.mark.parametrize(
    "override",
    ["optimizer.weight_decay=0.2", "train.evaluate.every_steps=1", "train.evaluate.target_loss=9", "train.steps=50",
     "data.sequence_length=64", "optimizer.schedule=linear", "data.joined_documents=false"],
)  # fmt: skip
def test_the_closed_division_refuses_what_the_rules_fix(override):
    key = override.partition("=")[0].removeprefix("data.sequence")
    with pytest.raises(InputError, match=f"closed division does not allow.*{key}"):
        run_of("proxy_pretrain_xs", "optimizer.learning_rate=1e-3", override)
    run_of("proxy_pretrain_xs", "optimizer.learning_rate=1e-3", override, division="open")


def test_the_closed_division_allows_what_the_rules_leave_open():
    run_of("llama31_8b", "precision=fp8", "parallel={data_shard: 8}", "batch.micro=2", "train.compile=true")
    assert run_of("proxy_lora_xs", "train.steps=72").num_steps == 72


def test_a_run_file_carries_its_choices_over(tmp_path):
    run = run_of("llama31_8b", "batch.global_sequences=32", "optimizer.learning_rate=7e-4")
    from meshwright import runfile

    path = tmp_path / "mine.yaml"
    path.write_text(runfile.changed_text(run, {}, wanted=run, what="the run"))
    benchmark, overrides = named_benchmark(str(path), round_name="5.1")
    again = benchmark_run(benchmark, overrides=overrides, train="train", validation="validation", weights=None)
    assert benchmark.name == "llama31_8b"
    assert (again.global_batch, again.optimizer, again.train) == (32, run.optimizer, run.train)


def test_absent_data_is_refused_with_the_way_to_get_it(tmp_path, monkeypatch):
    monkeypatch.delenv("MESHWRIGHT_MLPERF_DATA", raising=False)
    benchmark = load_benchmark("llama31_8b")
    with pytest.raises(MissingDependencyError, match="--data DIR") as error:
        find_inputs(benchmark, data=None, weights=None)
    assert "llama-3-1-8b-preprocessed-c4-dataset" in error.value.hint
    with pytest.raises(MissingDependencyError, match=r"c4-validation.*\.idx"):
        find_inputs(benchmark, data=tmp_path, weights=None)


def test_adapters_that_are_not_those_of_the_rules_are_refused():
    with pytest.raises(InputError, match=r"lora.targets is .*'query'.*, the rules have .*'qkv'"):
        run_of("llama2_70b_lora", "lora.targets=[query, key, value, output]")
    assert run_of("llama2_70b_lora", "lora.base_format=full").lora.targets == ("qkv", "output")


def test_the_log_of_llama2_70b_lora_passes_in_the_closed_division(tmp_path):
    """The facts of the run as the native engine would train it, by our checks and the official checker."""
    from tests.unit.mlperf.conftest import SyntheticLog

    rules = load_benchmark("llama2_70b_lora", "5.1")
    run = run_of("llama2_70b_lora", "batch.global_sequences=8")
    assert not [problem for problem in check(run) if problem.key != "weights"]
    facts = dict(logged_facts(run, Plan(data_shard=8), benchmark=rules.name, train_samples=3901))
    for index in range(rules.runs):
        log = SyntheticLog(seed=index)
        for row in log.rows:
            if row["key"] in facts and row["key"] != "seed":
                row["value"] = facts[row["key"]]
        log.write(tmp_path / rules.name / f"result_{index}.txt")
    report = check_path(tmp_path / rules.name, round="5.1")
    assert [found.rule for found in report.findings if found.severity == "error"] == []
    assert {key for key, rule in rules.hyperparameters.items() if rule.required} <= set(facts)


@pytest.mark.parametrize("name", ["proxy_pretrain_xs", "proxy_lora_xs"])
def test_generated_data_are_those_of_the_rules(name, tmp_path):
    benchmark = load_benchmark(name)
    folder = build_proxy_data(benchmark, cache=tmp_path)  # it compares the digests of the text
    assert all(list(folder.glob(f"{part}*")) for part in PARTS)
    if name == "proxy_pretrain_xs":
        return
    from meshwright.training.data.store import open_store

    store = open_store([build_proxy_data(benchmark, cache=tmp_path) / "train"])
    assert store.is_masked
    assert store.num_documents == benchmark.hyperparameters["train_samples"].value
    text = bytes(store.tokens(0, 256).clip(max=255).astype("uint8"))
    answer = store.trained(0, 256)
    assert text[: answer.argmax()].startswith(b"report: ")
    assert text[answer.argmax() :].startswith(b" summary: ")


def test_data_that_are_not_those_of_the_rules_are_refused(tmp_path):
    from dataclasses import replace

    benchmark = load_benchmark("proxy_lora_xs")
    with pytest.raises(InputError, match="differs from its rules"):
        build_proxy_data(replace(benchmark, data={**benchmark.data, "language": 3}), cache=tmp_path)


def test_packed_records_become_token_files_once(tmp_path):
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    from meshwright.mlperf.inputs import indexed_from_packed
    from meshwright.training.data.store import open_store

    rows = {"input_ids": [[1, 2, 3, 4], [5, 6, 7, 8]], "labels": [[-100, -100, 3, 4], [-100, 6, 7, 8]]}
    parquet.write_table(pyarrow.table(rows), tmp_path / "train.parquet")
    prefix = indexed_from_packed(tmp_path / "train.parquet", length=4, cache=tmp_path / "cache")
    store = open_store([prefix])
    assert store.tokens(0, 8).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert store.trained(0, 8).tolist() == [False, False, True, True, False, True, True, True]
    with pytest.raises(InputError, match="another length"):
        indexed_from_packed(tmp_path / "train.parquet", length=8, cache=tmp_path / "cache")
    (tmp_path / "train.npy").write_bytes(b"")
    with pytest.raises(InputError, match="Parquet"):
        indexed_from_packed(tmp_path / "train.npy", length=4)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match="cannot be read"):
        indexed_from_packed(tmp_path / "bad.parquet", length=4, cache=tmp_path / "cache")


def test_facts_come_from_the_run_as_it_is():
    run = run_of("llama31_8b", "batch.global_sequences=32", "batch.micro=2")
    plan = Plan(data_shard=8, micro_batch=2)
    facts = dict(logged_facts(run, plan, benchmark="llama31_8b", train_samples=7))
    assert facts["gradient_accumulation_steps"] == 2
    assert facts["opt_learning_rate_decay_steps"] == 1_200_000 - 128
    assert facts["opt_end_learning_rate"] == pytest.approx(8e-5)
    assert (facts["eval_samples"], facts["number_of_ranks"], facts["micro_batch_size"]) == (1024, 8, 2)
    for key, value in (("linear", "fp8"), ("attn", "bfloat16"), ("comm", "bfloat16")):
        fp8 = dict(logged_facts(run_of("llama31_8b", "precision=fp8"), plan, benchmark="", train_samples=7))
        assert fp8[f"lowest_numerical_precision_in_{key}"] == value


def a_set(**changes) -> RunSet:
    values = {
        "benchmark": "b", "round": "6.1", "num_runs": 2, "seeds": (1, 2), "seeds_from": "system", "run_text": "x: 1",
        "division": "closed", "submission": {}, "train_samples": 1, "facts": {}, "warm_up_steps": 0, "threads": 1,
        "num_concurrent": 1,
    }  # fmt: skip
    return RunSet(**(values | changes))


def test_a_set_keeps_its_seeds_and_refuses_to_become_another(tmp_path):
    assert open_set(tmp_path, a_set()) == a_set()
    assert open_set(tmp_path, a_set(seeds=(8, 9), num_concurrent=2)) == a_set()
    with pytest.raises(InputError, match=r"num_runs: 2 -> 3.*run_text: x: 1 -> x: 2"):
        open_set(tmp_path, a_set(num_runs=3, run_text="x: 2"))
    with pytest.raises(InputError, match="seeds"):
        open_set(tmp_path, a_set(seeds=(8, 9), seeds_from="given"))
    (tmp_path / "set.json").write_text("{")
    with pytest.raises(InputError, match="does not describe a set"):
        open_set(tmp_path, a_set())


def test_results_of_other_runs_are_not_mixed_with(tmp_path):
    (tmp_path / "result_0.txt").write_text("")
    with pytest.raises(InputError, match="results of other runs"):
        open_set(tmp_path, a_set())


def test_seeds_are_different_and_of_the_range_of_run_files():
    seeds = new_seeds(500)
    assert len(set(seeds)) == 500
    assert all(0 <= seed <= 10**9 for seed in seeds)
    assert new_seeds(3) != new_seeds(3)


def test_the_page_cache_is_cleared_or_the_log_says_why_not(tmp_path):
    file = tmp_path / "data.bin"
    file.write_bytes(b"x")
    assert clear_page_cache([file], drop_caches=tmp_path / "drop")["method"] == "drop_caches"
    assert (tmp_path / "drop").read_text() == "3\n"
    refused = clear_page_cache([file], drop_caches=tmp_path)  # a folder cannot be written
    assert refused["value"] is True
    assert "posix_fadvise of 1 files" in refused["method"]
    nothing = clear_page_cache([tmp_path / "absent"], drop_caches=tmp_path)
    assert nothing["value"] is False


def test_the_system_is_described_with_every_field_and_what_is_missing(tmp_path):
    run = run_of("proxy_lora_xs")
    found = describe_system(run, submitter="me", division="closed", status="Preview")
    assert set(SYSTEM_FIELDS) <= set(found.fields)
    assert int(found.fields["host_processor_vcpu_count"]) >= 1
    assert "cooling" in found.missing
    (tmp_path / "mine.json").write_text('{"cooling": "air", "host_networking": "none"}')
    given = describe_system(run, submitter="me", division="closed", status="Preview", given=tmp_path / "mine.json")
    assert given.fields["cooling"] == "air"
    assert "cooling" not in given.missing
    for text in ("[]", "{", '{"cooling": []}'):
        (tmp_path / "mine.json").write_text(text)
        with pytest.raises(InputError):
            describe_system(run, submitter="", division="", status="", given=tmp_path / "mine.json")
    bare = describe_system(run, submitter="", division="", status="", root=Path(tmp_path))
    assert bare.fields["host_memory_capacity"] == ""
    assert "host_memory_capacity" in bare.missing
