import csv

import pytest
from tests.every_member import check_every

from meshwright import runfile
from meshwright.catalog import lookup as catalog

ASKED = ("plan", "--model", "llama3-8b", "--cluster", "h100-8x2", "--gbs", 64, "--seq", 4096)


def test_accelerators_of_every_vendor_are_planned_without_an_engine(meshwright):
    """Trainium's rates are those of TPUs, on which MaxText was measured and which it runs on."""
    of_vendor = {catalog.accelerator(name).vendor: name for name in catalog.accelerator_names() if name != "cpu"}
    assert {"AWS", "Google", "AMD", "NVIDIA"} < set(of_vendor)

    def check(name):
        outcome = meshwright(*ASKED[:3], "--cluster", f"{name}-4x4", *ASKED[5:], "--top", 1)
        assert outcome.exit_code == 0, outcome.stderr

    check_every(of_vendor.values(), check)


def test_a_run_that_is_too_large_for_tpus_is_refused_for_its_memory(meshwright):
    asked = ("plan", "--model", "qwen3-coder-480b-a35b", "--cluster", "tpu-v4-2x4", "--gbs", 8, "--seq", 512)
    outcome = meshwright(*asked)
    assert outcome.exit_code == 1
    assert "device memory" in outcome.stderr
    assert "native" not in outcome.stderr.partition("hint")[2]


def test_json_has_the_promised_shape(meshwright):
    outcome = meshwright(*ASKED, "--top", 4, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    document = outcome.json
    assert document.keys() == {"request", "plans", "counts", "seconds", "explanation", "notes"}
    assert document["notes"][0].startswith("planned for engine: megatron, as none is named")
    assert document["request"]["num_devices"] == 16
    assert document["counts"].keys() >= {"enumerated", "legal", "fit", "scored", "simulated"}
    assert [plan["rank"] for plan in document["plans"]] == [1, 2, 3, 4]
    for plan in document["plans"]:
        parallel, estimate = plan["parallel"], plan["estimate"]
        degrees = ("data_shard", "data_replicate", "tensor", "context", "pipeline")
        product = 1
        for name in degrees:
            product *= parallel[name]
        assert product == 16
        for name, unit in (("step", "s"), ("tokens_per_s_per_device", "tokens/s"), ("mfu", "ratio")):
            assert estimate[name]["low"] <= estimate[name]["value"] <= estimate[name]["high"]
            assert estimate[name]["unit"] == unit
            assert estimate[name]["tier"] in ("measured", "interpolated", "datasheet", "guessed")
        assert sum(plan["components_s"].values()) == pytest.approx(estimate["step"]["value"])
        memory = plan["memory"]
        assert memory["reserved_bytes"] <= document["request"]["usable_bytes"] < memory["capacity_bytes"]
    steps = [plan["estimate"]["step"]["value"] for plan in document["plans"]]
    assert steps == sorted(steps)
    losers = document["explanation"]["losers"]
    assert [loser["loser"]["plan"] for loser in losers] == [p["plan"] for p in document["plans"][1:]]
    assert losers[0]["step_ms"]["delta"] == pytest.approx(1e3 * (steps[1] - steps[0]))


def test_the_engine_of_a_question_that_names_none_is_the_most_measured_one_that_runs_it(meshwright, tmp_path):
    for model, cluster, engine in (
        ("llama3-8b", "mi355x-8x2", "megatron"), ("gpt-oss-20b", "h100-8x4", "torchtitan"),
        ("llama3-8b", "tpu-v5p-4x4", "maxtext"), ("llama3-8b", "gaudi2-8x2", "any"),
    ):  # fmt: skip
        asked = ("--model", model, "--cluster", cluster, "--gbs", 64, "--seq", 4096)
        outcome = meshwright("plan", *asked, "--json", "--top", 1, "--write", tmp_path / "run.yaml")
        assert outcome.json["request"]["engine"] == engine, outcome.stderr
        assert f"planned for engine: {engine}" in outcome.stderr
        if engine != "any":  # the file names the engine, and the estimate of the file is that of the plan
            assert f"engine: {engine}\n" in (tmp_path / "run.yaml").read_text()
            pinned = meshwright("estimate", tmp_path / "run.yaml", "--json")
            assert "planned for engine" not in pinned.stderr
            assert pinned.json["estimate"]["step"] == outcome.json["plans"][0]["estimate"]["step"]


@pytest.mark.parametrize("model", ["llama3.1-8b", "qwen3-30b-a3b"])
def test_what_the_engine_refuses_of_the_training_is_noted(meshwright, tmp_path, model):
    asked = ("--model", model, "--cluster", "h100-8x4", "--gbs", 64, "--seq", 4096, "--engine", "maxtext", "--top", 1)
    written = tmp_path / "run.yaml"
    outcome = meshwright("plan", *asked, "--set", "train.router_z_loss=0.001", "--write", written)
    refused = "`train` and `export` refuse this run with engine maxtext: train.router_z_loss: "
    assert refused in outcome.stderr
    assert refused in meshwright("estimate", written).stderr
    assert "refuse" not in meshwright("plan", *asked).stderr
    exported = meshwright("export", written, "--set", "train.steps=10", "--out", tmp_path / "files")
    assert "cannot do this run: train.router_z_loss: " in exported.stderr


def test_a_question_that_names_no_engine_hints_at_the_native_ones_plan(meshwright):
    asked = ("--model", "llama3.1-8b", "--cluster", "h100-8x1", "--gbs", 8, "--seq", 1048576)
    outcome = meshwright("plan", *asked)
    assert outcome.exit_code == 1
    assert "hint: --engine native has one that fits: " in outcome.stderr
    assert meshwright("plan", *asked, "--engine", "native", "--json").exit_code == 0


def test_the_first_lines_say_what_rounded_gradients_gain(meshwright):
    asked = (*ASKED, "--top", 1, "--engine", "megatron")
    lines = " ".join(meshwright(*asked).stdout.split("\n\n")[0].split())
    assert "software: --set stack.gradient_format=bf16 rounds gradients: " in lines
    gains = meshwright(*asked, "--json").json["explanation"]["gradients"]
    assert gains["changes"] == {"gradient_format": "bf16"}
    assert f"{gains['saved_bytes'] / 2**30:.1f} GiB less for the same plan" in lines
    native = meshwright(*ASKED, "--top", 1, "--engine", "native", "--json").json["explanation"]
    assert "gradients" not in native


@pytest.mark.when_touched  # planner/test_switches.py has the gains
def test_other_software_is_named_with_its_gain(meshwright):
    asked = ("plan", "--model", "qwen3-30b-a3b", "--cluster", "h100-8x2", "--gbs", 64, "--seq", 4096, "--top", 1)
    asked += ("--engine", "megatron", "--set", "stack.cuda_graphs=none", "--explain", "--fix", "tensor=1,context=1")
    assert "stack.cuda_graphs=" in meshwright(*asked).stdout
    switches = meshwright(*asked, "--json").json["explanation"]["switches"]
    assert all(switch["gain"] > 1 for switch in switches)
    assert any("cuda_graphs" in switch["changes"] for switch in switches)


def test_plans_as_a_table(meshwright, tmp_path):
    path = tmp_path / "plans.csv"
    outcome = meshwright(*ASKED, "--top", 4, "--csv", path, "--json")
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    plans = outcome.json["plans"]
    assert [row["plan"] for row in rows] == [plan["plan"] for plan in plans]
    for row, plan in zip(rows, plans, strict=True):
        assert float(row["step_s"]) == pytest.approx(plan["estimate"]["step"]["value"])
        assert sum(float(row[f"{name}_s"]) for name in plan["components_s"]) == pytest.approx(float(row["step_s"]))
        assert int(row["tensor"]) == plan["parallel"]["tensor"]


def test_a_table_that_cannot_be_written(meshwright, tmp_path):
    outcome = meshwright(*ASKED, "--csv", tmp_path / "absent" / "plans.csv")
    assert outcome.exit_code == 2
    assert "cannot write" in outcome.stderr


def test_switches_of_the_software_change_the_estimate(meshwright):
    asked = ("plan", "--model", "qwen3-30b-a3b", "--cluster", "gb200-4x2", "--gbs", 64, "--seq", 4096, "--engine",
             "megatron", "--precision", "mxfp8", "--top", 1, "--json", "--fix", "micro_batch=1,expert=8")  # fmt: skip
    graphs, launches = (meshwright(*asked, "--set", f"stack.cuda_graphs={x}").json for x in ("full", "none"))
    assert graphs["request"]["stack"]["cuda_graphs"] == "full"
    faster, slower = (d["plans"][0]["estimate"]["step"]["value"] for d in (graphs, launches))
    assert slower > 1.3 * faster
    wrong = meshwright(*asked, "--set", "stack.dispatcher=deepeep")
    assert wrong.exit_code == 2
    assert "deepep" in wrong.stderr


@pytest.mark.when_touched  # test_deterministic (unit/planner/test_search.py) searches twice
def test_the_answer_is_deterministic(meshwright):
    first, second = (meshwright(*ASKED, "--json").json for _ in range(2))
    assert {**first, "seconds": None} == {**second, "seconds": None}


def test_tables(meshwright):
    outcome = meshwright(*ASKED, "--top", 2, "--explain", "--pareto", "--why-not", "tensor=8", "--why-not", "tp=3")
    assert outcome.exit_code == 0, outcome.stderr
    for words in (
        "llama3-8b on h100-8x2 (16 devices)", "80 % interval", "MFU", "of 80", "plans enumerated", "\nWhy ",
        "decides", "Speed against memory", "tensor=8: slower", "tensor=3: illegal",
    ):  # fmt: skip
        assert words in outcome.stdout
    assert " 3 " not in outcome.stdout.split("plans enumerated")[0].split("─")[-1]


def test_a_fixed_field_holds_in_every_plan(meshwright):
    outcome = meshwright(*ASKED, "--fix", "tensor=4", "--fix", "sharding=optimizer", "--json")
    parallels = [plan["parallel"] for plan in outcome.json["plans"]]
    assert {(p["tensor"], p["sharding"]) for p in parallels} == {(4, "optimizer")}


def test_the_front_trades_speed_for_memory(meshwright):
    front = meshwright(*ASKED, "--pareto", "--json").json["pareto"]
    assert len(front) > 1
    steps, sizes = [p["step_s"] for p in front], [p["reserved_bytes"] for p in front]
    assert steps == sorted(steps)
    assert sizes == sorted(sizes, reverse=True)


def test_the_written_file_pins_the_first_plan(meshwright, tmp_path):
    path = tmp_path / "pinned.yaml"
    outcome = meshwright(*ASKED, "--engine", "torchtitan", "--write", path, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    run, best = runfile.load(path), outcome.json["plans"][0]
    assert run.plan.describe() == best["plan"]
    assert run.engine == "torchtitan"
    again = meshwright("estimate", path, "--json").json
    assert again["estimate"] == best["estimate"]
    assert "`export` wants one: --set train.steps=N" in outcome.stderr
    stated = meshwright(*ASKED, "--engine", "torchtitan", "--write", path, "--set", "train.steps=9")
    assert "train.steps" not in stated.stderr


def test_a_field_that_is_fixed_as_the_run_says_contradicts_nothing(meshwright):
    stated = ("--set", "kernels.loss_chunk=1024", "--set", "batch.micro=2")
    for fixed in ("loss_chunk=auto", "loss_chunk=1024,micro_batch=2"):
        outcome = meshwright(*ASKED, *stated, "--fix", fixed, "--top", 1, "--json")
        assert outcome.exit_code == 0, outcome.stderr
        assert outcome.json["plans"][0]["micro_batch"] == 2


def test_an_objective_changes_the_value(meshwright):
    outcome = meshwright(*ASKED, "--objective", "cost", "--set", "costs.usd_per_device_hour=2", "--json")
    best = outcome.json["plans"][0]
    step_s = best["estimate"]["step"]["value"]
    assert best["objective_value"] == pytest.approx(step_s * 16 * 2 / 3600)


def test_nothing_fits(meshwright):
    outcome = meshwright(
        "plan", "--model", "llama3.1-405b", "--cluster", "h100-8x1", "--gbs", 8, "--seq", 4096, "--json"
    )
    assert outcome.exit_code == 1
    assert "needs at least" in outcome.json["error"]["message"]
    assert "fits with" in outcome.json["error"]["hint"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "missing --model, --cluster, --gbs, --seq"),
        (("missing.yaml",), "missing.yaml"),
        ((*ASKED[1:], "--fix", "tensr=8"), "unknown plan field"),
        ((*ASKED[1:], "--fix", "layers_per_stage=8"), "must add up to the 32 layers"),
        ((*ASKED[1:], "--set", "nonsense"), "nonsense"),
        ((*ASKED[1:], "--set", "batch.micro=2", "--fix", "mbs=1"), "batch.micro: 2: got 'micro_batch=1'"),
        ((*ASKED[1:], "--set", "kernels.loss_chunk=1024", "--fix", "loss_chunk=2048"), "kernels.loss_chunk: 1024"),
        (
            (*ASKED[1:], "--set", "kernels.stored_activations={norm: e4m3}", "--fix", "stored_activations=none"),
            "kernels.stored_activations: ('norm',)",
        ),
        ((*ASKED[1:], "--precision", "bf17"), "unknown precision"),
        ((*ASKED[1:], "--objective", "fame"), "fame"),
        ((*ASKED[1:], "--write", "no/such/folder/out.yaml"), "cannot write"),
        (("--model", "llama3-8b", "--cluster", "here", "--gbs", 8, "--seq", 4096), "known cluster"),
    ],
)
def test_bad_input_is_one_message(meshwright, arguments, message):
    outcome = meshwright("plan", *arguments)
    assert outcome.exit_code == 2
    assert message in outcome.stderr
    assert outcome.stdout == ""
    assert "Traceback" not in outcome.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--engine", "torchtitan"), "model: torchtitan 0.3.0 has no model with the shapes of mixtral-8x7b"),
        (("--engine", "maxtext", "--precision", "fp8"), "precision: fp8 is not lowered"),
        (("--engine", "megatron", "--set", "task=lora"), "task: Megatron-Core has no adapters"),
        (("--engine", "maxtext", "--set", "optimizer.states=bf16"), "optimizer.states: MaxText's second"),
        (("--engine", "megatron", "--set", "train.compile=true"), "train.compile: is not lowered"),
        (("--engine", "native", "--precision", "fp16"), "precision: fp16 is not trained"),
    ],
    ids=["model", "precision", "task", "optimizer", "compile", "native"],
)
def test_what_an_engine_runs_under_no_plan_is_refused_at_once(meshwright, monkeypatch, options, words):
    monkeypatch.setattr("meshwright.answers.plan_ranking.best_plans", None)  # nothing is searched
    asked = ("plan", "--model", "mixtral-8x7b", "--cluster", "h100-8x8", "--gbs", 512, "--seq", 4096)
    outcome = meshwright(*asked, *options)
    assert outcome.exit_code == 2
    assert words in outcome.stderr
    assert "without an engine, one that runs it is planned for; --engine any names none" in outcome.stderr


def test_no_engine_plans_what_none_runs(meshwright):
    asked = ("plan", "--model", "qwen3.5-4b", "--cluster", "h100-8x1", "--gbs", 64, "--seq", 4096, "--top", 1)
    outcome = meshwright(*asked, "--engine", "any", "--json")
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.json["plans"]


def test_all_scored_plans_in_every_form(meshwright, tmp_path):
    table, page = tmp_path / "plans.csv", tmp_path / "plans.html"
    asked = (*ASKED, "--all", "--limit", 40)
    outcome = meshwright(*asked, "--csv", table, "--html", page, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    scored = outcome.json["scored"]
    assert not scored["is_complete"]
    assert len(scored["plans"]) >= 40
    assert scored["plans"][0]["plan"] == outcome.json["plans"][0]["plan"]
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["plan"] for row in rows] == [plan["plan"] for plan in scored["plans"]]
    assert "Plans of llama3-8b" in page.read_text(encoding="utf-8")
    printed = meshwright(*asked)
    assert "--limit N lists more" in printed.stdout
    assert "\N{BLACK DIAMOND}" in printed.stdout


def test_a_run_that_names_no_engine_is_planned_for_any_where_the_default_does_not_run_it(meshwright, tmp_path):
    asked = ("plan", "--model", "qwen3.5-9b", "--cluster", "h100-8x4", "--gbs", 64, "--seq", 4096, "--top", 1)
    outcome = meshwright(*asked, "--write", tmp_path / "run.yaml")
    assert outcome.exit_code == 0
    assert "planned for engine: any, as native, the default, does not run it: model.linear_attention" in outcome.stderr
    assert runfile.load(tmp_path / "run.yaml").engine == "any"
    assert meshwright(*asked, "--engine", "native").exit_code == 2


def test_offloading_that_an_engine_lacks_is_refused(meshwright):
    asked = (
        "--model",
        "llama3.1-70b",
        "--cluster",
        "h100-8x1",
        "--gbs",
        "64",
        "--seq",
        "4096",
        "--engine",
        "torchtitan",
    )
    outcome = meshwright("plan", *asked, "--fix", "offload=optimizer")
    assert outcome.exit_code == 1
    assert "keeps optimizer states on the device: offload must be none" in outcome.stderr


def test_keys_of_the_plan_that_a_search_ignores_are_named(meshwright):
    asked = ("--model", "llama3.1-8b", "--cluster", "h100-8x1", "--gbs", "64", "--seq", "4096", "--top", "1")
    outcome = meshwright("plan", *asked, "--set", "parallel.tensor=8")
    assert outcome.exit_code == 0
    assert "parallel.tensor: ignored, as a plan that a run pins" in outcome.stderr


def test_the_column_of_an_objective_is_per_million_tokens(meshwright):
    for goal, heading in (("cost", "USD per"), ("energy", "kWh per")):
        asked = (*ASKED, "--objective", goal, "--top", 1)
        (plan,) = meshwright(*asked, "--json").json["plans"]
        per_million = plan["objective_value"] / (64 * 4096) * 1e6 / (3.6e6 if goal == "energy" else 1)
        shown = meshwright(*asked).stdout
        assert heading in shown
        assert f"{per_million:.4g}" in shown


def test_a_model_that_does_not_fit_on_few_devices_may_be_trained_with_adapters(meshwright):
    asked = ("plan", "--model", "llama3.1-8b", "--cluster", "rtx-4090-1x1", "--gbs", 16, "--seq", 2048)
    refused = meshwright(*asked)
    assert (refused.exit_code, "; adapters fit: --set task=lora" in refused.stderr) == (1, True)
    assert "rtx-4090-1x1 (1 device), 16" in meshwright(*asked, "--set", "task=lora").stdout
    assert "adapters" not in meshwright(*asked, "--model", "llama3.1-405b").stderr


def test_words_of_plans_are_explained_once(meshwright):
    asked = ("plan", "--model", "llama3.1-8b", "--cluster", "h100-8x8", "--gbs", 512, "--seq", 8192, "--engine")
    said = " ".join(meshwright(*asked, "megatron", "--top", 3).stdout.split())
    assert "in their order: 1 stage of 5, then 4 stages of 6, then 1 stage of 3." in said
    assert said.count("computes these again: norm (norms)") == 1


def test_a_plan_that_ranks_behind_faster_ones_is_marked_and_the_reason_said(meshwright):
    asked = ("plan", "--model", "llama3.1-70b", "--cluster", "h100-8x4", "--gbs", 64, "--seq", 8192)
    shown = meshwright(*asked, "--engine", "native", "--top", 6).stdout
    assert "8bit=feed_forward+norm *" in shown
    assert "* ranks as if it took 1% longer, as it rounds gradients." in shown
    without = meshwright(*asked, "--engine", "native", "--fix", "stored_activations=none").stdout
    assert "* ranks" not in without
