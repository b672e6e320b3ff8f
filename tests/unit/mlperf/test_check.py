"""Checks of result files: a clean set, mutations, published sets, unfinished logs, and the official checker."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.every_member import check_every
from tests.unit.mlperf.conftest import SyntheticLog

from meshwright.errors import InputError
from meshwright.mlperf.benchmarks import load_benchmark
from meshwright.mlperf.check import check_path, log_findings
from meshwright.mlperf.check_system import SYSTEM_FIELDS
from meshwright.mlperf.findings import check_rules
from meshwright.mlperf.log import parse_log
from meshwright.mlperf.official import official_check, package_version
from meshwright.programs import install_command

Change = Callable[[SyntheticLog], object]


def rules_broken(log: SyntheticLog, *, round_: str = "5.1", lines: list[str] | None = None) -> dict[str, str]:
    """Rule -> message of the findings of one log."""
    rules = load_benchmark(log.benchmark, round_)
    found = log_findings(parse_log(lines or log.lines(), path=Path("result_0.txt")), rules)
    return {f.rule: f.message for f in reversed(found)}


def setting(key: str, value: object) -> Change:
    return lambda log: log.row(key).update(value=value)


def stamp(key: str, seconds: float, which: int = -1) -> Change:
    """Move the time of one record."""

    def change(log: SyntheticLog) -> None:
        log.rows_of(key)[which]["time_ms"] += int(seconds * 1000)

    return change


def count(key: str, which: int, samples: object) -> Change:
    def change(log: SyntheticLog) -> None:
        log.rows_of(key)[which]["metadata"]["samples_count"] = samples

    return change


def metadata(key: str, **values: object) -> Change:
    return lambda log: log.row(key)["metadata"].update(values)


def without(*keys: str) -> Change:
    return lambda log: log.without(*keys)


def each(*changes: Change) -> Change:
    def change(log: SyntheticLog) -> None:
        for one in changes:
            one(log)

    return change


def test_the_cadence_of_an_earlier_round_is_allowed_in_logs_of_that_time():
    """As two sets of Llama 3.1 405B from round 5.0 in round 5.1 (training_rules.adoc, Results Resubmission)."""
    log = SyntheticLog(benchmark="llama31_405b", batch=1152, evaluations=6)
    assert rules_broken(log, round_="5.0") == {}
    assert set(rules_broken(log, round_="5.1")) == {"resubmitted"}
    assert check_rules()["resubmitted"].severity == "warning"
    log.rows = [row | {"time_ms": row["time_ms"] + 15_000_000_000} for row in log.rows]  # half a year later
    assert {"cadence-first", "cadence-interval"} <= set(rules_broken(log, round_="5.1"))


def test_reinforcement_learning_is_checked_as_the_official_checker_does(tmp_path):
    log = SyntheticLog(benchmark="qwen35_397b_grpo", batch=256, evaluations=3)
    for row, accuracy in zip(log.rows_of("eval_accuracy"), (0.61, 0.65, 0.7), strict=True):
        row["value"] = accuracy
    assert rules_broken(log, round_="6.1") == {}
    if package_version() is not None:
        assert official_check([log.write(tmp_path / "result_0.txt")], load_benchmark("qwen35_397b_grpo", "6.1")).passes
    log.rows_of("eval_accuracy")[0]["value"] = 0.71
    assert set(rules_broken(log, round_="6.1")) == {"target-first"}
    log.rows_of("eval_accuracy")[0]["value"], log.row("eval_accuracy")["value"] = 0.61, 0.69
    assert "target" in rules_broken(log, round_="6.1")
    log.row("num_prompts_per_step")["value"] = 32
    assert "hyperparameter" in rules_broken(log, round_="6.1")


def test_an_earlier_log_with_the_cadence_of_no_round():
    log = SyntheticLog(benchmark="llama31_405b", batch=1152, evaluations=6)
    half_of_the_evaluations(log)
    assert "cadence-interval" in rules_broken(log, round_="5.1")


def test_a_quotient_of_warm_up_steps_is_its_ceiling():
    """9142.857142857143 at batch 1008, as a published set of round 5.1 has it."""
    log = SyntheticLog(benchmark="llama31_405b", batch=1008, evaluations=6)
    log.row("opt_base_learning_rate")["value"] = 7e-5
    log.row("opt_learning_rate_warmup_steps")["value"] = 8000 * 1152 / 1008
    log.row("opt_learning_rate_decay_steps")["value"] = 1_371_429 - 9143
    assert set(rules_broken(log, round_="5.1")) == {"resubmitted"}
    log.row("opt_learning_rate_warmup_steps")["value"] = 9100
    assert "hyperparameter" in rules_broken(log, round_="5.1")


def half_of_the_evaluations(log: SyntheticLog) -> None:
    evaluations = [e["metadata"]["samples_count"] for e in log.rows_of("eval_accuracy")]
    gone = evaluations[1::2]
    keys = ("eval_start", "eval_accuracy", "eval_stop")
    log.rows = [r for r in log.rows if not (r["key"] in keys and r["metadata"]["samples_count"] in gone)]


def moved(key: str, before: str) -> Change:
    def change(log: SyntheticLog) -> None:
        row = log.row(key)
        log.rows.remove(row)
        log.rows.insert(log.rows.index(log.rows_of(before)[0]), row)

    return change


def added(key: str, value: object) -> Change:
    def change(log: SyntheticLog) -> None:
        log.rows.insert(5, {**log.rows[4], "key": key, "value": value})

    return change


def earlier_target(log: SyntheticLog) -> None:
    log.rows_of("eval_accuracy")[1]["value"] = 0.9


def trained_past_the_target(log: SyntheticLog) -> None:
    log.rows_of("eval_accuracy")[-1]["value"] = 0.93


def shifted_counts(log: SyntheticLog) -> None:
    for row in log.rows:
        if "samples_count" in row["metadata"]:
            row["metadata"]["samples_count"] += 384


SMALL = "llama31_8b"
LORA_MUTATIONS: list[tuple[str, Change, str, str]] = [
    # name, change, rule, part of the message
    ("aborted", metadata("run_stop", status="aborted"), "status", "'aborted'"),
    ("no-status", lambda log: log.row("run_stop")["metadata"].pop("status"), "status", "None"),
    ("half-of-evals", half_of_the_evaluations, "cadence-interval", "768"),
    ("late-first-eval", shifted_counts, "cadence-first", "first at 1,920, the rules say 1,536"),
    ("stop-before-start", stamp("run_stop", -90_000), "order", "earlier than run_start"),
    ("no-eval-bounds", without("eval_start", "eval_stop"), "pairs-absent", "no eval_start"),
    ("no-eval-stop", without("eval_stop"), "pairs", "without eval_stop"),
    ("no-block-stop", lambda log: log.rows.remove(log.rows_of("block_stop")[1]), "pairs-blocks", "block_start without"),
    ("no-seed", without("seed"), "seed-missing", "no seed"),
    ("text-seed", setting("seed", "7"), "seed-integer", "'7'"),
    ("float-seed", setting("seed", 7.5), "seed-integer", "7.5"),
    ("bool-seed", setting("seed", True), "seed-integer", "True"),
    ("two-seeds", added("seed", 12), "seed-several", "2 seeds"),
    ("key-twice", added("lora_rank", 16), "key-doubled", "lora_rank has 2"),
    ("key-twice-differing", added("lora_rank", 8), "key-repeated", "16, 8"),
    ("alpha", setting("lora_alpha", 64), "hyperparameter", "lora_alpha is 64, the rules say 32"),
    ("rank", setting("lora_rank", 8), "hyperparameter", "16"),
    ("clip", setting("opt_gradient_clip_norm", 1.0), "hyperparameter", "0.3"),
    ("decay", setting("opt_adamw_weight_decay", 0.1), "hyperparameter", "0.0001"),
    ("dropout", added("lora_dropout", 0.0), "hyperparameter", "lora_dropout is 0.0"),
    ("train-samples", setting("train_samples", 4000), "hyperparameter", "3901"),
    ("zero-rate", setting("opt_base_learning_rate", 0.0), "hyperparameter", "> 0"),
    ("text-rate", setting("opt_base_learning_rate", "4e-4"), "hyperparameter", "a number"),
    ("no-accumulation", setting("gradient_accumulation_steps", 0), "hyperparameter", ">= 1"),
    ("half-batch", setting("global_batch_size", 8.5), "hyperparameter", "whole number"),
    ("eval-samples", setting("eval_samples", 100), "eval-samples", "173"),
    ("eval-samples-text", setting("eval_samples", "173"), "eval-samples", "'173'"),
    ("target-missed", trained_past_the_target, "target", "0.93; the target is 0.925"),
    ("target-earlier", earlier_target, "target-first", "3 evaluations follow"),
    ("other-target", added("target_accuracy", 0.94), "target-logged", "0.94"),
    ("nan-loss", setting("eval_accuracy", float("nan")), "eval-value", "nan"),
    ("zero-loss", setting("eval_accuracy", 0.0), "eval-value", "0.0"),
    ("text-loss", setting("eval_accuracy", "0.9"), "eval-value", "'0.9'"),
    ("list-loss", setting("eval_accuracy", [0.9]), "eval-value", "[0.9]"),
    ("no-samples", lambda log: log.row("eval_accuracy")["metadata"].pop("samples_count"), "samples-missing", "1 eval"),
    ("text-samples", count("eval_accuracy", 1, "1920"), "samples-missing", "1 eval"),
    ("samples-back", count("eval_accuracy", 2, 1536), "samples-monotone", "1536 after 1920"),
    ("samples-odd", each(count("eval_accuracy", 2, 2307), count("eval_start", 2, 2307)), "samples-batch", "2307"),
    ("one-batch-low", count("eval_accuracy", 2, 2296), "samples-one-batch-low", "2296 where eval_start has 2304"),
    ("samples-disagree", count("eval_accuracy", 2, 2200), "samples-disagree", "2200 where eval_start has 2304"),
    ("stop-samples", count("run_stop", 0, 9000), "stop-samples", "9000"),
    ("slow-block", lambda log: _delay(log, "block_stop", 2, 900), "block-rate", "s per sample"),
    ("fast-eval", lambda log: _delay(log, "eval_accuracy", 2, -4.5), "eval-rate", "median"),
    ("clock-back", stamp("eval_accuracy", -5000, 2), "clock-backward", "earlier than"),
    ("ranks-shuffled", stamp("eval_accuracy", -5.2, 2), "clock-shuffled", "up to a second"),
    ("seconds", lambda log: [r.update(time_ms=r["time_ms"] // 1000) for r in log.rows], "clock-unit", "time_ms is 1.7"),
    ("slow-init", lambda log: _delay(log, "init_stop", 0, 31 * 60), "init-limit", "minutes, the limit is 30"),
    ("run-start-late", moved("run_start", "eval_start"), "eval-outside", "stands before run_start"),
    ("run-start-before-init", moved("run_start", "init_start"), "order", "stands before init_stop"),
    ("evals-after-stop", moved("run_stop", "block_start"), "eval-outside", "after run_stop"),
    ("cache-kept", setting("cache_clear", False), "cache-clear", "False"),
    ("no-cache-clear", without("cache_clear"), "key-missing", "no cache_clear"),
    ("no-org", without("submission_org"), "key-missing", "no submission_org"),
    ("empty-org", setting("submission_org", " "), "key-missing", "submission_org is empty"),
    ("no-train-samples", without("train_samples"), "key-missing", "no train_samples"),
    ("no-blocks", without("block_start", "block_stop"), "key-missing", "no block_"),
    ("no-stop", without("run_stop"), "unfinished", "no run_stop"),
    ("division", setting("submission_division", "ajar"), "division", "'ajar'"),
    ("division-list", setting("submission_division", []), "division", "[]"),
    ("other-benchmark", setting("submission_benchmark", "llama2-70b"), "benchmark-name", "'llama2-70b'"),
    ("point-in-time", lambda log: log.row("init_start").update(event_type="POINT_IN_TIME"), "event-type", "POINT"),
    ("two-ends", lambda log: log.rows.append(dict(log.row("run_stop"))), "phase-repeated", "run_stop has 2"),
    ("two-starts", lambda log: log.rows.insert(30, dict(log.row("run_start"))), "phase-repeated", "run_start has 2"),
    ("hidden-time", lambda log: _delay(log, "run_start", 0, 1200), "init-gap", "1200.001 s later than init_stop"),
    ("late-clear", moved("cache_clear", "eval_start"), "cache-clear", "stands after run_start"),
    ("evals-off-clock", lambda log: _evaluate_at_once(log), "eval-instant", "5 of 5 evaluations"),
    ("horizon", setting("opt_learning_rate_training_steps", 100), "steps-beyond-schedule", "384 steps"),
    ("same-eval-twice", lambda log: log.rows.insert(-3, dict(log.row("eval_accuracy"))), "eval-repeated", "6 records"),
]  # fmt: skip
DECAY_FIRST = moved("opt_learning_rate_decay_steps", "opt_learning_rate_warmup_steps")
SMALL_MUTATIONS: list[tuple[str, Change, str, str]] = [
    ("end-rate-zero", setting("opt_end_learning_rate", 0.0), "hyperparameter", "0.1 * opt_base_learning_rate = 4e-05"),
    ("decay-before-warmup", DECAY_FIRST, "hyperparameter-order", "before opt_learning_rate_warmup"),
    ("decay-steps", setting("opt_learning_rate_decay_steps", 1_200_000), "hyperparameter", "= 1199984"),
    ("sequence", setting("max_sequence_length", 4096), "hyperparameter", "8192"),
    ("optimizer", setting("opt_name", "adam"), "hyperparameter", "'adamw'"),
    ("beta", setting("opt_adamw_beta_2", 0.999), "hyperparameter", "0.95"),
    ("epsilon", setting("opt_adamw_epsilon", 1e-8), "hyperparameter", "1e-05"),
    ("warmup-text", setting("opt_learning_rate_warmup_steps", "16"), "hyperparameter", "a number"),
    ("max-steps", setting("max_steps", 1000), "hyperparameter", "1200000"),
]  # fmt: skip
NOT_OFFICIAL = (
    "aborted", "half-of-evals", "stop-before-start", "no-eval-bounds", "no-seed", "key-twice", "alpha", "clip", "decay",
    "target-earlier", "samples-back", "one-batch-low", "eval-samples", "late-first-eval", "clock-back", "cache-kept",
)  # fmt: skip
"""Mutations that the official compliance checker accepts."""


def _delay(log: SyntheticLog, key: str, which: int, seconds: float) -> None:
    """Delay a record and all after it."""
    start = log.rows.index(log.rows_of(key)[which])
    for row in log.rows[start:]:
        row["time_ms"] += int(seconds * 1000)


def _evaluate_at_once(log: SyntheticLog) -> None:
    """Take the seconds of all evaluations out of the log."""
    taken = 0
    for row in log.rows:
        taken += 5000 if row["key"] == "eval_accuracy" else 0
        row["time_ms"] -= taken


@pytest.mark.parametrize("benchmark", ["llama2_70b_lora", SMALL])
def test_a_clean_log_has_no_finding(benchmark: str) -> None:
    assert rules_broken(SyntheticLog(benchmark=benchmark, batch=16)) == {}


def test_mutations_of_a_lora_log() -> None:
    def check(change: Change, rule: str, message: str) -> None:
        log = SyntheticLog()
        change(log)
        found = rules_broken(log)
        assert rule in found, found
        assert message in found[rule]

    check_every(LORA_MUTATIONS, lambda mutation: check(*mutation[1:]), name=lambda mutation: mutation[0])


def test_a_shared_machine_makes_no_rate_odd() -> None:
    """Short intervals that wait for others, and an evaluation that is slow with the block before it."""
    short = SyntheticLog(evaluations=8)
    for row in short.rows:
        row["time_ms"] = 1_760_000_000_000 + (row["time_ms"] - 1_760_000_000_000) // 200
    for number, factor in ((2, 60), (5, 90)):
        _delay(short, "eval_accuracy", number, factor / 1000)
        _delay(short, "block_stop", number, 0.9)
    assert not {"eval-rate", "block-rate"} & rules_broken(short).keys()
    slow = SyntheticLog(evaluations=8)
    _delay(slow, "block_stop", 4, 2.5 * 384 * 0.35)
    _delay(slow, "eval_accuracy", 4, 9)
    found = rules_broken(slow)
    assert "block-rate" in found
    assert "eval-rate" not in found


@pytest.mark.parametrize(
    ("change", "rule", "message"), [m[1:] for m in SMALL_MUTATIONS], ids=[m[0] for m in SMALL_MUTATIONS]
)
def test_mutations_of_a_pretraining_log(change: Change, rule: str, message: str) -> None:
    log = SyntheticLog(benchmark=SMALL, batch=32)
    change(log)
    found = rules_broken(log)
    assert rule in found, found
    assert message in found[rule]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (":::MLLOG {", "not JSON"),
        (':::MLLOG {"key": "seed"}', "lacks time_ms, value, metadata"),
        (':::MLLOG{"key": 1}', "no space"),
        (':::MLLOG {"time_ms": 1, "key": "seed", "value": 1, "value": 2, "metadata": {}}', "has value twice"),
        (':::MLLOG {"time_ms": 1, "key": "a", "value": 1, "metadata": {"x": 1, "x": 2}}', "has x twice"),
        (':::MLLOG {"time_ms": "1", "key": "seed", "value": 1, "metadata": {}}', "time_ms is no finite number"),
        (':::MLLOG {"time_ms": true, "key": "seed", "value": 1, "metadata": {}}', "time_ms is no finite number"),
    ],
    ids=["cut", "lacking", "no-space", "value-twice", "metadata-twice", "text-time", "truth-time"],
)
def test_broken_lines(line: str, message: str) -> None:
    log = SyntheticLog()
    found = rules_broken(log, lines=[*log.lines()[:4], line, *log.lines()[4:]])
    assert message in found["log-syntax"]


def test_counts_one_batch_low_without_eval_start_are_one_warning() -> None:
    log = SyntheticLog(benchmark=SMALL, batch=32).without("eval_start", "eval_stop")
    for row in log.rows_of("eval_accuracy"):
        row["metadata"]["samples_count"] -= 32
    found = rules_broken(log)
    assert "12256 where the cadence has 12288" in found["samples-one-batch-low"]
    assert not {"cadence-first", "cadence-interval"} & found.keys()


def test_an_evaluation_without_a_count_before_those_a_batch_low() -> None:
    log = SyntheticLog(benchmark=SMALL, batch=32).without("eval_start", "eval_stop")
    rows = log.rows_of("eval_accuracy")
    first, second, *_ = (row["metadata"]["samples_count"] for row in rows)
    for row in rows:
        row["metadata"]["samples_count"] -= 32 + second - first
    rows[0]["metadata"].pop("samples_count")
    assert f"{first - 32} where the cadence has {first}" in rules_broken(log)["samples-one-batch-low"]


def test_epochs_in_place_of_samples() -> None:
    log = SyntheticLog()
    for row in log.rows_of("eval_accuracy"):
        row["metadata"]["epoch_num"] = row["metadata"].pop("samples_count")
    assert set(rules_broken(log)) == {"samples-in-epochs"}


DISCLOSED: dict[str, Any] = {
    "lowest_numerical_precision_in_linear": "fp8", "lowest_numerical_precision_in_attn": "bfloat16",
    "lowest_numerical_precision_in_comm": "bfloat16", "tensor_parallelism": 1, "pipeline_parallelism": 1,
    "context_parallelism": 1, "expert_parallelism": 1, "micro_batch_size": 1, "config_filename": "config.sh",
}  # fmt: skip


def disclosing(**changes: object) -> SyntheticLog:
    log = SyntheticLog()
    for key, value in {**DISCLOSED, **changes}.items():
        added(key, value)(log)
    return log


def test_disclosure() -> None:
    assert rules_broken(disclosing(), round_="6.1") == {}
    assert "no lowest_numerical_precision_in_linear" in rules_broken(SyntheticLog(), round_="6.1")["disclosure-missing"]
    assert rules_broken(SyntheticLog(), round_="6.0") == {}
    low = disclosing(lowest_numerical_precision_in_linear="mxfp6")
    assert "mxfp6" in rules_broken(low, round_="6.0")["disclosure-value"]
    assert rules_broken(low, round_="6.1") == {}
    assert "tensor_parallelism is 0" in rules_broken(disclosing(tensor_parallelism=0), round_="6.1")["disclosure-value"]
    assert "config_filename" in rules_broken(disclosing(config_filename=""), round_="6.1")["disclosure-value"]
    named = SyntheticLog()
    added("lowest_numerical_precision_linear", "fp8")(named)
    assert "stands for lowest_numerical_precision_in_linear" in rules_broken(named, round_="6.0")["disclosure-name"]


def set_rules(folder: Path, **options: Any) -> dict[str, str]:
    return {f.rule: f.message for f in check_path(folder, round="5.1", **options).findings}


def test_sets(lora_set: Callable[..., Path]) -> None:
    folder = lora_set(*[5] * 9, 6)
    assert set_rules(folder) == {}
    assert check_path(folder).passes
    (folder / "notes.md").write_text("x")
    assert "notes.md" in set_rules(folder)["result-names"]
    (folder / "result_4.txt").write_bytes((folder / "result_3.txt").read_bytes())
    found = set_rules(folder)
    assert "result_3.txt" in found["run-copied"]
    assert "1003" in found["seed-repeated"]
    (folder / "result_4.txt").unlink()
    assert "9 result files, a score needs 10" in set_rules(folder)["result-count"]
    assert "result-count" not in set_rules(folder, unfinished=True)
    log = SyntheticLog(batch=16, seed=4)
    setting("opt_base_learning_rate", 5e-4)(log)
    log.write(folder / "result_4.txt")
    found = set_rules(folder)
    assert found["set-batch"] == "global batch sizes 8, 16"
    assert "opt_base_learning_rate" in found["set-hyperparameters"]


def test_a_copied_run_with_another_date_and_seed(lora_set: Callable[..., Path]) -> None:
    folder = lora_set(*[5] * 10)
    copy = SyntheticLog(seed=3)
    for row in copy.rows:
        row["time_ms"] += 86_400_000
    setting("seed", 77)(copy)
    copy.write(folder / "result_4.txt")
    assert set_rules(folder)["run-copied"] == "the times and losses stand in result_3.txt too"
    for number, row in enumerate(copy.rows_of("run_stop") + copy.rows_of("eval_accuracy")):
        row["time_ms"] += number + 1
    copy.write(folder / "result_4.txt")
    assert set_rules(folder)["run-copied"] == "the losses stand in result_3.txt too"


def test_a_set_is_of_one_system_and_division(lora_set: Callable[..., Path]) -> None:
    folder = lora_set(*[3] * 10)
    for key, value in (("platform", "8xOther"), ("org", "Other"), ("status", "cloud"), ("division", "open")):
        log = SyntheticLog(seed=4, evaluations=3)
        setting(f"submission_{key}", value)(log)
        log.write(folder / "result_4.txt")
        found = set_rules(folder)
        assert f"submission_{key} is " in found["set-system"]
        assert "set-rcp" in found  # one open log does not exempt the set
    assert check_path(folder).passes is False


def test_sets_faster_than_the_reference(lora_set: Callable[..., Path]) -> None:
    assert "faster than allowed" in set_rules(lora_set(*[3] * 10))["set-rcp"]


def test_system_description(tmp_path: Path) -> None:
    folder = tmp_path / "Org" / "results" / "sys" / "llama2_70b_lora"
    for i in range(10):
        log = disclosing()
        log.write(folder / f"result_{i}.txt")
    system = tmp_path / "Org" / "systems" / "sys.json"
    system.parent.mkdir()
    described = dict.fromkeys(SYSTEM_FIELDS, "")
    described |= {"status": "Preview", "number_of_nodes": "1", "accelerators_per_node": "8"}
    system.write_text(json.dumps(described))
    assert not {"system-description", "devices", "platform-nodes"} & set_rules(folder).keys()
    system.write_text(json.dumps({**described, "accelerators_per_node": 4, "number_of_nodes": 4}))
    found = set_rules(folder)
    assert "16 devices" in found["devices"]
    system.write_text(json.dumps({**described, "division": "open"}))
    assert set_rules(folder)["division"] == "'closed', sys.json has 'open'"
    assert "4 nodes" in found["platform-nodes"]
    described.pop("cooling")
    system.write_text(json.dumps({**described, "status": "soon"}))
    messages = " ".join(f.message for f in check_path(folder).findings if f.rule == "system-description")
    assert "missing: cooling" in messages
    assert "'soon'" in messages
    system.write_text("[")
    assert "no JSON" in set_rules(folder)["system-description"]


def test_published_sets(published: Path) -> None:
    """One of the eight sets deviates from the cadence; the counts of one vendor are a batch low."""
    found = {}
    for folder in sorted({p.parent for p in published.rglob("result_*.txt")}):
        report = check_path(folder)
        found[folder.parent.name, folder.name] = {f.rule for f in report.findings}
    assert found == {
        ("MI300X_EPYC_9575F_pytorch", "llama2_70b_lora"): set(),
        ("9xXE9712x4GB200", "llama2_70b_lora"): {"cadence-first", "cadence-interval", "unfinished"},
        ("MI300X-LLMBoost-GPUBoost-4node", "llama2_70b_lora"): set(),
        ("MI355X_EPYC_9575F_pytorch", "llama2_70b_lora"): set(),
        ("MI355X_EPYC_9575F_pytorch", "llama31_8b"): {"samples-one-batch-low"},
        ("1xC885A_M8-8xMI350X-OAM-288GB", "llama31_8b"): {"samples-one-batch-low"},
        ("MI325X-LLMBoost-GPUBoost-1node", "llama2_70b_lora"): set(),
        ("theia_ngpu8_ngc25.09_nemo", "llama2_70b_lora"): set(),
    }


@pytest.mark.parametrize("benchmark", ["llama2_70b_lora", SMALL])
def test_every_prefix_of_a_log_is_right_so_far(tmp_path: Path, benchmark: str) -> None:
    lines = SyntheticLog(benchmark=benchmark, evaluations=3).lines()
    path = tmp_path / "result_0.txt"
    for end in range(3, len(lines)):
        path.write_text("\n".join(lines[:end]))
        report = check_path(path, benchmark=benchmark, round="5.1", unfinished=True)
        assert report.findings == (), (end, report.findings)
        assert "run_stop" in report.pending["result_0.txt"]
    path.write_text("\n".join(lines[:10]))
    assert [f.rule for f in check_path(path, benchmark=benchmark, round="5.1").findings] == ["unfinished"]


def test_wrong_paths(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(InputError, match="neither a result file"):
            check_path(path)


def test_every_rule_is_broken_by_a_test() -> None:
    named = {m[2] for m in (*LORA_MUTATIONS, *SMALL_MUTATIONS)}
    elsewhere = {
        "log-syntax", "log-empty", "samples-in-epochs", "disclosure-missing", "disclosure-value", "disclosure-name",
        "devices", "platform-nodes", "system-description", "result-count", "result-names", "run-copied", "set-batch",
        "set-hyperparameters", "set-rcp", "set-system", "seed-repeated", "resubmitted",
    }  # fmt: skip
    assert named | elsewhere == check_rules().keys()


def test_empty_file(tmp_path: Path) -> None:
    (tmp_path / "result_0.txt").write_bytes(b"\x00\xff no record\n")
    found = check_path(tmp_path / "result_0.txt", benchmark="llama31_8b", round="5.1").findings
    assert [f.rule for f in found] == ["log-empty"]


@pytest.mark.skipif(package_version() is None, reason="mlperf-logging is not installed")
def test_official_checker(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One process checks wrong logs that it accepts, logs that stop it, and a log after one that stopped it."""
    files = []
    for name, change, *_ in LORA_MUTATIONS:
        log = SyntheticLog()
        change(log)
        files.append(log.write(tmp_path / f"{name}.txt"))
    (tmp_path / "odd.txt").write_text(":::MLLOG [1]\n")
    files.append(tmp_path / "odd.txt")
    files.append(SyntheticLog().write(tmp_path / "clean.txt"))
    verdict = official_check(files, load_benchmark("llama2_70b_lora", "5.1"))
    accepted = {v.file.removesuffix(".txt") for v in verdict.verdicts if v.passes}
    assert {*NOT_OFFICIAL, "clean"} <= accepted
    assert not {"no-org", "slow-init", "target-missed", "rank", "no-stop", "odd"} & accepted
    rejected = {v.file: v.messages for v in verdict.verdicts if not v.passes}
    assert "the checker stopped: TypeError" in rejected["odd.txt"][0]
    assert "submission_org" in rejected["no-org.txt"][0]
    assert verdict.passes is False
    assert capfd.readouterr().out == ""


def test_official_checker_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("meshwright.mlperf.official.package_version", lambda: None)
    verdict = official_check([tmp_path], load_benchmark("llama31_8b"))
    assert verdict.passes is None
    assert install_command("mlperf") in verdict.not_run
