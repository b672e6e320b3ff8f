"""`meshwright scale` from the outside: documents, tables, pages and messages."""

from __future__ import annotations

import re

import pytest

from meshwright.answers.scale_study import ScaleQuestion, scale_report
from meshwright.runfile import load

OPTIONS = ("--model", "llama3.1-8b", "--cluster", "h100-8x2", "--gbs", 256, "--seq", 4096)
PINNED = """
model: qwen3-30b-a3b
data: {sequence_length: 4096}
batch: {global_sequences: 256, micro: 1}
precision: bf16
cluster: h100-8x4
parallel: {pipeline: 4, virtual_pipeline: 2, expert: 8, context: 2, schedule: interleaved}
engine: megatron
train: {tokens: 1e12}
"""


HALF = ("--set", "parallel=auto", "--gbs", 1)  # 24 of 32 devices have three quarters of a sequence


@pytest.fixture
def pinned(tmp_path):
    path = tmp_path / "pinned.yaml"
    path.write_text(PINNED)
    return path


def test_a_training_shorter_than_a_step_is_refused(meshwright):
    outcome = meshwright("scale", *OPTIONS, "--tokens", "15")
    assert outcome.exit_code == 2
    assert "shorter than one step: got '15 tokens', allowed: at least the 1,048,576 tokens of a step" in outcome.stderr
    assert meshwright("scale", *OPTIONS, "--devices", "16", "--tokens", 256 * 4096).exit_code == 0


def test_a_curve_as_json(meshwright):
    outcome = meshwright("scale", *OPTIONS, "--devices", "16,64", "--tokens", "1e12", "--json")
    document = outcome.json
    assert (outcome.exit_code, outcome.stderr) == (0, "".join(f"note: {said}\n" for said in document["notes"]))
    first, last = document["points"]
    assert (first["num_devices"], last["num_devices"]) == (16, 64)
    assert first["efficiency"]["value"] == 1.0
    assert last["efficiency"]["low"] < last["efficiency"]["value"] < last["efficiency"]["high"]
    assert last["speedup"] == pytest.approx(4 * last["efficiency"]["value"])
    days = [p["training"]["days_of_steps"]["value"] for p in document["points"]]
    assert days[0] / days[1] == pytest.approx(last["speedup"])
    assert last["training"]["days"]["value"] == pytest.approx(days[1] / last["goodput"]["value"])
    assert last["parallel"]["data_shard"] >= 1
    assert document["mode"] == "strong"
    assert "emulation" not in document


def test_the_default_sizes_are_multiples_of_the_runs_cluster(meshwright):
    document = meshwright("scale", *OPTIONS, "--fix", "tensor=2", "--keep-plan", "--json").json
    asked = sorted(p["num_devices"] for p in (*document["points"], *document["unreached"]))
    assert asked == [16, 32, 64, 128, 256]
    assert {p["parallel"]["tensor"] for p in document["points"]} == {2}


def test_weak_scaling_of_one_plan(meshwright, pinned):
    arguments = ("--devices", "32,64", "--mode", "weak", "--keep-plan", "--no-goodput", "--json")
    points = meshwright("scale", pinned, *arguments).json["points"]
    assert [p["global_batch_sequences"] for p in points] == [256, 512]
    assert {p["goodput"] for p in points} == {None}
    assert {p["training"]["num_tokens"] for p in points} == {1e12}


def test_a_pinned_micro_batch_does_not_bind_the_planner(pinned):
    report = scale_report(load(pinned), ScaleQuestion(devices=(32,)))
    assert load(pinned).micro_batch == 1
    assert dict(report.study.request.fixed) == {}


def test_an_emulation(meshwright, pinned):
    outcome = meshwright("scale", pinned, "--emulate", "32", "--devices", "32,256", "--json")
    first, last = outcome.json["emulation"]["points"]
    assert first["efficiency"]["value"] == 1.0
    assert last["emulated"]["num_devices"] == 32
    assert last["emulated"]["global_batch_sequences"] == 32
    assert last["real"]["num_devices"] == 256
    assert sum(last["difference_s"].values()) == pytest.approx(
        last["real"]["estimate"]["step"]["value"] - last["emulated"]["estimate"]["step"]["value"], abs=1e-9
    )


def test_days_solve_for_the_tokens(meshwright, pinned):
    document = meshwright("scale", pinned, "--keep-plan", "--devices", "32,64", "--days", "5", "--json").json
    assert document["points"][0]["training"]["days_of_steps"]["value"] == pytest.approx(5.0)
    assert document["num_tokens"] == pytest.approx(document["points"][1]["training"]["num_tokens"], abs=1)


def test_tables_say_what_could_not_be_reached(meshwright, pinned):
    outcome = meshwright("scale", pinned, "--keep-plan", "--devices", "32,48,64")
    assert outcome.exit_code == 0
    assert re.search(r"^64 .* of 2 ", outcome.stdout, re.MULTILINE)
    assert re.search(r"^48 devices: .*", outcome.stdout, re.MULTILINE)
    assert "Training of 1T tokens" in outcome.stdout


def test_units_follow_the_size_of_the_training(meshwright, pinned):
    priced = ("--keep-plan", "--devices", "32", "--set", "costs.usd_per_device_hour=2")
    assert "  USD" in meshwright("scale", pinned, *priced, "--tokens", "1e9").stdout
    long = meshwright("scale", pinned, *priced, "--tokens", "1e14").stdout
    assert "GWh" in long
    assert "million USD" in long


@pytest.mark.when_touched  # planner/test_scaling.py has both
def test_replicas_and_sensitivity(meshwright, pinned):
    replicas = meshwright("scale", pinned, "--replicas", "8,16", "--devices", "64", "--json").json["replicas"]
    assert replicas[0]["relative_ratio"] == 1.0
    assert {r["replica_devices"] for r in replicas} == {8, 16}
    outcome = meshwright("scale", pinned, "--keep-plan", "--devices", "32,64", "--sensitivity")
    assert "with one assumption changed" in outcome.stdout
    assert "growth of stragglers" in outcome.stdout


def test_the_page_loads_nothing(meshwright, pinned, tmp_path):
    page = tmp_path / "scale.html"
    arguments = ("--keep-plan", "--devices", "32,64", "--html", page)
    assert meshwright("scale", pinned, *arguments).exit_code == 0
    text = page.read_text()
    assert text.count('class="for-wide"') == 2
    assert "What the numbers rest on" in text
    assert re.findall(r"""(?:src|href)=["']?(?!#)[^"'>\s]+""", text) == []
    assert "@import" not in text
    assert "url(" not in re.sub(r"url\(#", "", text)


def test_failures_are_simulated_at_each_size(meshwright, pinned, tmp_path):
    page = tmp_path / "scale.html"
    arguments = ("scale", pinned, "--keep-plan", "--devices", "32,64", "--simulate", 30)
    points = meshwright(*arguments, "--json").json["points"]
    for point in points:
        found = point["simulation"]
        assert found["p10"] <= found["mean"] <= found["p90"]
        assert found["mean"] == pytest.approx(point["goodput"]["value"], abs=0.003)  # of which spares are 0.001
        assert found["mean"] * 720 + sum(found["lost_h"].values()) == pytest.approx(720)
        assert found["interval_s"] == point["goodput"]["interval_s"]
    assert points[1]["simulation"]["restarts"] > points[0]["simulation"]["restarts"] > 0
    outcome = meshwright(*arguments, "--html", page)
    assert "Goodput of 30 days, 200 times, failure by failure" in outcome.stdout
    assert "Share of time that is lost" in page.read_text()
    assert "simulation" not in meshwright(*arguments[:-2], "--json").json["points"][0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "missing --model"),
        ((*OPTIONS, "--devices", "16,many"), "'--devices': 'many' is not a whole number"),
        ((*OPTIONS, "--devices", "0"), "'--devices': 0 is not in the range 1<=x<=10000000"),
        ((*OPTIONS, "--devices", "20"), "a cluster has whole nodes: got 20, allowed: multiples of 8"),
        ((*OPTIONS, "--tokens", "1e12", "--days", "3"), "--tokens and --days both"),
        ((*OPTIONS, "--tokens", "nan"), "'--tokens': nan is not above 0, up to 1e+18"),
        ((*OPTIONS, "--fix", "tensr=2"), "unknown plan field: got 'tensr'"),
        ((*OPTIONS, "--emulate", "20"), "whole nodes"),
        ((*OPTIONS, "--simulate", "-1"), "'--simulate': -1 is not above 0"),
        ((*OPTIONS, "--simulate", "9", "--no-goodput"), "hint: leave out --no-goodput, --emulate and --replicas"),
        ((*OPTIONS, "--simulate", "9", "--emulate", "8"), "hint: leave out --no-goodput, --emulate and --replicas"),
        ((*OPTIONS, "--devices", "16", "--simulate", "1e9"), "too many failures to simulate: got '1e+09 days'"),
    ],
)
def test_bad_input_is_one_message(meshwright, arguments, said):
    outcome = meshwright("scale", *arguments)
    assert outcome.exit_code == 2
    assert said in outcome.stderr
    assert outcome.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--keep-plan", "--devices", "48"), "cannot be made on 48 devices"),
        (("--emulate", "8", "--devices", "64"), "cannot be emulated on 8 devices"),
        (("--replicas", "5", "--devices", "64"), "no replica of 5 devices"),
        (("--replicas", "8", "--devices", "24", "--mode", "weak", *HALF), "whole number of sequences"),
    ],
)
def test_no_is_an_answer(meshwright, pinned, arguments, said):
    outcome = meshwright("scale", pinned, *arguments)
    assert outcome.exit_code == 1
    assert said in outcome.stderr


NOT_NATIVE = ("--model", "qwen3-next-80b-a3b", "--cluster", "h100-8x4", "--gbs", 256, "--seq", 4096)
"""A run that names no engine and that the default does not run."""


@pytest.mark.when_touched  # test_plan.py plans such a run
def test_a_run_that_is_scaled_for_any_says_so_as_a_plan_does(meshwright):
    outcome = meshwright("scale", *NOT_NATIVE, "--devices", "32", "--json")
    planned = meshwright("plan", *NOT_NATIVE, "--top", 1, "--json").json
    assert outcome.json["request"]["engine"] == planned["request"]["engine"] == "any"
    assert outcome.json["notes"] == [planned["notes"][0]]  # of `any` much was measured
    assert "planned for engine: any, as native, the default, does not run it" in outcome.stderr
    assert outcome.json["points"][0]["plan"] == planned["plans"][0]["plan"]
    named = meshwright("scale", *NOT_NATIVE, "--engine", "native")
    assert (named.exit_code, "the native engine cannot do this run" in named.stderr) == (2, True)
    of_any = meshwright("scale", *OPTIONS, "--devices", "16", "--engine", "any", "--json")
    assert "notes" not in of_any.json


def test_the_fewest_devices_that_train_in_time(meshwright):
    asked = ("scale", *OPTIONS, "--tokens", "1e11", "--json")
    document = meshwright(*asked, "--deadline", 1).json
    found = document["deadline"]
    days = {p["num_devices"]: p["training"]["days"] for p in document["points"]}
    fewest, sure = found["num_devices"], found["num_devices_at_high_end"]
    assert days[fewest]["value"] <= 1 < days[fewest]["high"]
    assert days[sure]["high"] <= 1
    # A node less is a step less: eighths of the power of two below it.
    less = fewest - max(8, 2 ** (fewest.bit_length() - 1) // 8)
    (point,) = meshwright(*asked, "--devices", less).json["points"]
    assert point["training"]["days"]["value"] > 1
    (shown,) = (line for line in meshwright(*asked[:-1], "--deadline", 1).stdout.splitlines() if " in 1 day;" in line)
    assert shown.startswith(f"{fewest} devices train in 1 day; ")


@pytest.mark.parametrize(
    ("options", "message", "code"),
    [
        (("--deadline", 8), "a deadline needs the length of the training", 2),
        (("--deadline", 8, "--tokens", 1e12, "--devices", 16), "a deadline chooses the numbers of devices", 2),
        (("--deadline", 0.01, "--tokens", 1e12), "trains in 0.01 days: ", 1),
    ],
)
def test_deadlines_without_an_answer(meshwright, options, message, code):
    outcome = meshwright("scale", *OPTIONS, *options)
    assert (outcome.exit_code, message in outcome.stderr) == (code, True), outcome.stderr
    assert "hint: " in outcome.stderr


def test_a_missing_price_is_said_with_the_option_that_gives_it(meshwright):
    outcome = meshwright("scale", "--model", "llama3.1-8b", "--cluster", "mi355x-8x2", *OPTIONS[4:], "--tokens", "1e11")
    assert "none is known for mi355x; give yours: --set costs.usd_per_device_hour=USD" in " ".join(
        outcome.stdout.split()
    )


@pytest.mark.parametrize("verb", [("plan",), ("estimate",), ("scale", "--devices", "8,16")])
def test_uncounted_completions_are_said_wherever_a_step_is_predicted(meshwright, tmp_path, verb):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: llama3.2-1b\ncluster: h100-8x1\nparallel: {data_shard: 8}\n"
        "data: {source: q.jsonl, tokenizer: bytes, sequence_length: 1024}\nbatch: {global_sequences: 64, micro: 4}\n"
        "train: {steps: 2, grpo: {completion_tokens: 512, rewards: [number]}}\n"
    )
    done = meshwright(verb[0], path, *verb[1:], "--json")
    assert sum("train.grpo: the predicted step is the update only" in note for note in done.json["notes"]) == 1
