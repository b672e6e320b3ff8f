"""Rules as data: cadence, rounds, targets, own benchmarks."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.errors import InputError, UnknownNameError
from meshwright.mlperf.benchmarks import (
    BENCHMARKS,
    benchmark_names,
    load_benchmark,
    read_benchmark,
    round_names,
    round_rules,
)
from meshwright.mlperf.formulas import evaluate_formula

MLPERF = ("deepseekv3_671b", "gpt_oss_20b", "llama2_70b_lora", "llama31_405b", "llama31_8b", "qwen35_397b_grpo")


def test_suites_of_the_rounds() -> None:
    suites = {r: {n for n in MLPERF if r in _rounds(n)} for r in round_names()}
    assert suites == {
        "5.0": {"llama2_70b_lora", "llama31_405b"},
        "5.1": {"llama2_70b_lora", "llama31_405b", "llama31_8b"},
        "6.0": set(MLPERF) - {"qwen35_397b_grpo"},
        "6.1": set(MLPERF) - {"llama31_405b"},
    }
    assert set(MLPERF) <= set(benchmark_names())


@pytest.mark.parametrize(
    ("name", "round_", "batch", "first", "interval"),
    [
        ("llama31_8b", "5.1", 16, 12288, 12288),
        ("llama31_8b", "5.1", 36, 12312, 12312),
        ("llama31_8b", "5.1", 96, 12288, 12288),
        ("llama2_70b_lora", "5.1", 8, 1536, 384),
        ("llama2_70b_lora", "5.1", 9, 1548, 387),
        ("llama2_70b_lora", "5.1", 16, 1920, 384),
        ("llama2_70b_lora", "6.0", 64, 4224, 384),
        ("llama31_405b", "5.0", 1152, 46080, 46080),
        ("llama31_405b", "5.1", 1152, 18432 * 15, 18432),
        ("gpt_oss_20b", "6.0", 64, 12288, 12288),
        ("deepseekv3_671b", "6.0", 16384, 16384, 16384),
        ("deepseekv3_671b", "6.1", 16384, 16384 * 43, 16384),
        ("qwen35_397b_grpo", "6.1", 256, 256 * 18, 256),
        ("qwen35_397b_grpo", "6.1", 1024, 1024 * 7, 1024),
    ],
)  # fmt: skip
def test_cadence(name: str, round_: str, batch: int, first: int, interval: int) -> None:
    rules = load_benchmark(name, round_)
    assert (rules.first_evaluation(batch), rules.interval(batch)) == (first, interval)


@pytest.mark.parametrize(
    ("name", "round_", "runs", "target"),
    [
        ("llama31_8b", "5.1", 10, 3.3),
        ("llama2_70b_lora", "5.0", 10, 0.925),
        ("gpt_oss_20b", "6.0", 10, 3.34),
        ("deepseekv3_671b", "6.1", 3, 3.6),
        ("llama31_405b", "6.0", 3, 5.6),
    ],
)
def test_target_and_runs(name: str, round_: str, runs: int, target: float) -> None:
    rules = load_benchmark(name, round_)
    assert (rules.runs, rules.target, rules.official) == (runs, target, True)
    assert rules.reached(target)
    assert not rules.reached(target + 1e-9)
    assert not rules.reached(0.0)
    assert not rules.reached(float("nan"))
    assert rules.rcp is not None
    assert rules.rcp.is_file()


def test_an_accuracy_is_better_when_it_is_higher() -> None:
    rules = load_benchmark("qwen35_397b_grpo", "6.1")
    assert (rules.runs, rules.target) == (3, 0.69)
    assert [v for v in (0.0, 0.5, 0.69, 0.6901, 1.0, 1.1, float("nan"), True) if rules.reached(v)] == [0.6901, 1.0]


def test_exception_of_v60() -> None:
    assert len(load_benchmark("gpt_oss_20b", "6.0").hyperparameters["opt_end_learning_rate"].formulas) == 2
    assert len(load_benchmark("gpt_oss_20b", "6.1").hyperparameters["opt_end_learning_rate"].formulas) == 1


def test_formulas_of_all_hyperparameters_have_values() -> None:
    logged = {"global_batch_size": 16384, "opt_base_learning_rate": 1e-4, "opt_learning_rate_warmup_steps": 4}
    for name in MLPERF:
        for round_ in _rounds(name):
            for rule in load_benchmark(name, round_).hyperparameters.values():
                for formula in rule.formulas:
                    assert evaluate_formula(formula, logged) > 0


def test_round_that_did_not_run_it() -> None:
    with pytest.raises(InputError, match=r"got '5\.0', allowed: 5\.1, 6\.0, 6\.1"):
        load_benchmark("llama31_8b", "5.0")
    with pytest.raises(UnknownNameError, match="llama31_8b"):
        load_benchmark("llama3_8b")
    with pytest.raises(UnknownNameError, match="unknown round"):
        round_rules("5.2")


OWN = """
title = "Own"
kind = "pretrain"
official = false
runs = 3
[target]
metric = "nats per byte"
value = 2.0
[evaluation]
interval = "ceil(256 / global_batch_size) * global_batch_size"
samples = 64
[hyperparameters]
opt_base_learning_rate = { above = 0.0 }
[rounds."6.1"]
rcp = "own.json"
"""


def test_own_benchmark(tmp_path: Path) -> None:
    (tmp_path / "own_xs.toml").write_text(OWN)
    own = load_benchmark("own_xs", folders=[tmp_path])
    assert (own.name, own.official, own.round) == ("own_xs", False, "6.1")
    assert own.rcp == tmp_path / "own.json"
    assert load_benchmark(str(tmp_path / "own_xs.toml")) == own


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('[rounds."6.1"]\nrcp = "own.json"', ""), "table"),
        (("value = 2.0", "value = true"), "target"),
        (("samples = 64", "sample = 64"), "sample"),
        (("ceil(256", "__import__('os')(256"), "arithmetic|read"),
        (("ceil(256 / global_batch_size)", "opt_base_learning_rate"), "global_batch_size alone"),
        (('"Own"', "Own"), "cannot be read"),
        (("above = 0.0", "over = 0.0"), "over"),
    ],
    ids=["no-round", "target", "key", "code", "names", "toml", "hyperparameter"],
)
def test_damaged_benchmark_files(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    path = tmp_path / "own.toml"
    path.write_text(OWN.replace(*change))
    with pytest.raises(InputError, match=message):
        read_benchmark(path).interval(8)


def test_own_benchmark_cannot_replace_one_of_mlperf(tmp_path: Path) -> None:
    (tmp_path / "llama31_8b.toml").write_text(OWN)
    with pytest.raises(InputError, match="share the name"):
        load_benchmark("llama31_8b", folders=[tmp_path])


@pytest.mark.parametrize(
    "text", ["a.b", "[1]", "1 if x else 2", "x ** 99", "2 / 0", "'a'", "x", "", "(-1) ** 0.5", "10 ** 60 ** 60"]
)
def test_formulas_refuse(text: str) -> None:
    with pytest.raises(InputError):
        evaluate_formula(text, {"x": "text"})


def _rounds(name: str) -> list[str]:
    import tomllib

    return list(tomllib.loads((BENCHMARKS / f"{name}.toml").read_text())["rounds"])
