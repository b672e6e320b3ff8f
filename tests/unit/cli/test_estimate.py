import json

import pytest
from tests.example_runs import OPEN_RUN, PINNED_RUN


def test_json_of_a_pinned_plan(meshwright):
    outcome = meshwright("estimate", PINNED_RUN, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    document = outcome.json
    assert document["chosen_by"] == "run file"
    assert document["plan"].startswith("TP4 CP2 PP4 VPP5")
    step = document["estimate"]["step"]
    assert sum(document["components_s"].values()) == pytest.approx(step["value"])
    memory = document["memory"]
    assert sum(memory["parts_bytes"].values()) == pytest.approx(memory["reserved_bytes"])
    assert sum(document["uncertainty"].values()) == pytest.approx(1)
    assert [row["name"] for row in document["stages"]] == ["0", "1 to 2", "3"]
    assert 0 < document["goodput"]["value"] < 1
    assert document["totals"]["num_tokens"] >= 10**12
    days, steps = document["totals"]["days"], document["totals"]["num_steps"]
    assert days["unit"] == "days"
    assert days["value"] == pytest.approx(steps * step["value"] / document["goodput"]["value"] / 86_400)
    assert {"hardware", "calibration", "failures"} <= document["sources"].keys()


def test_the_estimate_of_a_published_run_holds_the_measured_rate(meshwright):
    rate = meshwright("estimate", PINNED_RUN, "--json").json["estimate"]["tokens_per_s_per_device"]
    assert rate["low"] < 1116 < rate["high"]  # NVIDIA DGX Cloud Benchmarking, llama3.1, v25.04


def test_optimizer_states_take_the_bytes_they_are_kept_in(meshwright):
    held = {}
    for states in ("fp32", "bf16", "int8"):
        document = meshwright("estimate", PINNED_RUN, "--set", f"optimizer.states={states}", "--json").json
        held[states] = document["memory"]["parts_bytes"]
    fp32, bf16, int8 = (held[s]["optimizer"] for s in held)
    # Per parameter: an fp32 master of 4 bytes, and two moments of 4, of 2, or of 1 and their scales.
    assert bf16 / fp32 == pytest.approx((4 + 4) / (4 + 8))
    assert int8 / fp32 == pytest.approx((4 + 2 + 2 / 64) / (4 + 8))
    assert {k: v for k, v in held["int8"].items() if k != "optimizer"} == {
        k: v for k, v in held["fp32"].items() if k != "optimizer"
    }


def test_an_open_plan_is_the_planners_and_it_says_so(meshwright):
    outcome = meshwright("estimate", OPEN_RUN, "--json")
    assert outcome.json["chosen_by"] == "planner"
    assert f"the planner chose {outcome.json['plan']}" in outcome.stderr
    planned = meshwright("plan", OPEN_RUN, "--top", 1, "--json").json["plans"][0]
    assert planned["plan"] == outcome.json["plan"]


def test_tables(meshwright):
    outcome = meshwright("estimate", PINNED_RUN)
    assert outcome.exit_code == 0, outcome.stderr
    for words in (
        "tokens/s/device", "80 % interval", "tensor parallel", "█", "memory of stage", "capacity",
        "micro-batches kept", "goodput", "time to train", "energy", "Causes of the interval",
    ):  # fmt: skip
        assert words in outcome.stdout


def test_trace_and_page(meshwright, tmp_path):
    trace, page = tmp_path / "step.json", tmp_path / "step.html"
    outcome = meshwright("estimate", PINNED_RUN, "--trace", trace, "--html", page, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    ends = [e["ts"] + e["dur"] for e in events if e["ph"] == "X"]
    assert max(ends) == pytest.approx(1e6 * outcome.json["estimate"]["step"]["value"])
    assert len({e["tid"] for e in events if e["ph"] == "X" and e["pid"] == 1}) == 4
    assert "llama3.1-70b" in page.read_text(encoding="utf-8")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step.html", "step.json"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("parallel.schedule=dualpipe", "parallel.virtual_pipeline=1"), "no dualpipe schedule"),
        (("parallel={tensor: 1}", "parallel.data_shard=256"), "GiB"),
        pytest.param(
            ("parallel=auto", "batch.micro=null", "cluster=h100-8x1", "model=llama3.1-405b"),
            "needs at least",
            marks=pytest.mark.when_touched,  # test_nothing_fits (test_plan.py) searches for the same model
        ),
    ],
)
def test_what_cannot_run_exits_with_1(meshwright, overrides, message):
    arguments = [word for override in overrides for word in ("--set", override)]
    outcome = meshwright("estimate", PINNED_RUN, *arguments, "--json")
    assert outcome.exit_code == 1
    assert message in outcome.json["error"]["message"]
    assert outcome.json["error"]["hint"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "missing argument"),
        (("missing.yaml",), "missing.yaml"),
        ((OPEN_RUN, "--set", "cluster=here"), "known cluster"),
        ((OPEN_RUN, "--html", "no/such/folder/page.html"), "cannot be written"),
        ((OPEN_RUN, "--trace", "no/such/folder/trace.json"), "cannot be written"),
    ],
)
def test_bad_input_is_one_message(meshwright, arguments, message):
    outcome = meshwright("estimate", *arguments)
    assert outcome.exit_code == 2
    assert message in outcome.stderr
    assert "Traceback" not in outcome.stderr


MODEL_MEMORY = ("estimate", "--memory", "--model", "llama3.1-8b")


def test_memory_of_every_pipeline_rank(meshwright):
    outcome = meshwright("estimate", PINNED_RUN)
    assert "Memory of every pipeline rank" in outcome.stdout
    ranks = meshwright("estimate", PINNED_RUN, "--json").json["memory_of_ranks"]
    assert [row["rank"] for row in ranks] == [0, 1, 2, 3]
    flat = meshwright("estimate", OPEN_RUN)  # the planner's best has no pipeline
    assert "memory of stage 0" in flat.stdout
    assert "every pipeline rank" not in flat.stdout


def test_memory_of_a_model_needs_no_run(meshwright, tmp_path):
    path = tmp_path / "memory.csv"
    outcome = meshwright(*MODEL_MEMORY, "--precision", "bf16,fp16", "--lora-rank", 0, "--csv", path)
    assert outcome.exit_code == 0, outcome.stderr
    for words in ("8.03B parameters", "parameters", "states", "adamw8bit", "fp16", "trains all"):
        assert words in outcome.stdout
    assert "host" not in outcome.stdout
    assert len(path.read_text(encoding="utf-8").splitlines()) == 1 + 2 * 4
    moved = meshwright(*MODEL_MEMORY, "--offload-optimizer", "--devices", 8)
    assert "host" in moved.stdout
    assert "ZeRO" not in moved.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("estimate", "--memory"), "needs a model"),
        ((*MODEL_MEMORY, PINNED_RUN), "takes no run"),
        ((*MODEL_MEMORY, "--set", "precision=fp8"), "takes no run"),
        (("estimate", PINNED_RUN, "--seq", "4096,8192"), "--seq: got '4096,8192', allowed: one value"),
        (("estimate", "--model", "llama3.1-8b"), "hint: or describe the run: --model, --cluster, --gbs and --seq"),
        (("estimate", PINNED_RUN, "--lora-rank", 8), "--lora-rank belongs to --memory"),
        (("estimate", PINNED_RUN, "--csv", "rows.csv"), "--csv belongs to --memory"),
    ],
)
def test_options_of_a_run_and_of_a_model_are_not_mixed(meshwright, arguments, message):
    outcome = meshwright(*arguments)
    assert outcome.exit_code == 2
    assert message in outcome.stderr


def test_options_describe_a_run_as_those_of_plan_do(meshwright):
    question = ("--model", "llama3.1-8b", "--cluster", "h100-8x8", "--gbs", 512, "--seq", 8192, "--precision", "fp8")
    best = meshwright("plan", *question, "--json").json["plans"][0]
    document = meshwright("estimate", *question, "--json").json
    assert document["plan"] == best["plan"]
    assert document["request"]["precision"] == "fp8"


def test_the_causes_of_the_interval_are_sentences(meshwright):
    said = " ".join(meshwright("estimate", PINNED_RUN).stdout.split())
    assert "% unexplained error of the calibration's fit" in said
    assert "_ratio" not in said
