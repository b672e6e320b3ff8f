"""`meshwright inference` from the outside: documents, exit codes and messages."""

from __future__ import annotations

import json

import pytest

CAPACITY = ("inference", "capacity", "--json")


def test_capacity_has_the_keys_that_scripts_read(meshwright):
    done = meshwright(
        *CAPACITY, "--model", "llama3.1-405b", "--cluster", "mi355x-1x1", "--precision", "mxfp4",
        "--kv-precision", "fp8", "--context", 8192,
    )  # fmt: skip
    document = done.json
    assert done.exit_code == 0
    assert document["weights_bytes"] == pytest.approx(221.8e9, rel=1e-3)
    assert document["kv_bytes_per_token"] == 258_048
    assert document["max_sessions"] == document["max_tokens"] // 8192 > 0
    assert document["binds"] == "kv_cache"
    assert set(document["reserve"]["sources"]) <= set(document["reserve"])


def test_what_does_not_fit_exits_with_one_and_says_what_is_missing(meshwright):
    options = ("--model", "deepseek-r1", "--cluster", "mi355x-1x1", "--precision", "fp4")
    done = meshwright(*CAPACITY, *options)
    document = done.json
    assert done.exit_code == 1
    assert (document["fits"], document["max_sessions"], document["binds"]) == (False, 0, "weights")
    assert "needs 36" in document["shortfall"]
    assert "does not fit" in meshwright("inference", "capacity", *options).stdout


@pytest.mark.parametrize(
    "wrong",
    [
        ("--model", "lama3.1-405b"),
        ("--model", "/nowhere/config.json"),
        ("--cluster", "mi355x"),
        ("--cluster", "here"),
        ("--precision", "fp3"),
        ("--kv-precision", "int9"),
        ("--context", "0"),
        ("--context", "1e30"),
        ("--tensor", "3"),
        ("--tensor", "0"),
        ("--memory-ratio", "1.5"),
        ("--memory-ratio", "nan"),
    ],
    ids="=".join,
)
def test_bad_input_is_one_message(meshwright, wrong):
    options = {"--model": "llama3.1-8b", "--cluster": "h100-8x1"} | dict([wrong])
    done = meshwright(*CAPACITY, *(part for option in options.items() for part in option))
    assert done.exit_code == 2
    assert done.json["error"]["message"]
    assert "Traceback" not in done.stderr


ESTIMATE = ("inference", "estimate", "--model", "llama3.1-8b", "--cluster", "h100-8x1", "--tensor", 1)
LENGTHS = ("--input-tokens", 512, "--output-tokens", 128)


def test_an_estimate_for_each_concurrency(meshwright):
    document = meshwright(*ESTIMATE, *LENGTHS, "--concurrency", "1,8", "--json").json
    assert [load["concurrency"] for load in document["loads"]] == [1, 8]
    assert document["layout"]["replicas"] == 8
    assert document["loads"][0]["price"]["source"].startswith("median of 6 offers, 2026-")
    assert {"ttft_s", "itl_s", "output_tokens_per_s", "total_tokens_per_s"} <= set(document["loads"][0])


def test_more_requests_than_fit_are_shown_beside_those_that_do(meshwright):
    asked = (*ESTIMATE[:4], "--cluster", "h100-1x1", *LENGTHS, "--concurrency", "8,4000")
    few, many = meshwright(*asked, "--json").json["loads"]
    assert few["in_flight"] == 8 < few["most_in_flight"] == many["in_flight"] == many["most_in_flight"] < 4000
    assert many["concurrency"] == 4000
    done = meshwright(*asked)
    fit = f"{many['in_flight']:,.0f}"
    assert f"{fit} of 4,000 asked" in done.stdout
    assert f"4,000 requests in flight are asked for and {fit} fit" in done.stderr
    assert done.stdout.count("asked") == 1


def test_a_windowed_cache_is_said_at_long_contexts(meshwright):
    asked = ("inference", "estimate", "--model", "gpt-oss-20b", "--cluster", "h100-1x1", "--output-tokens", 100)
    (note,) = [n for n in meshwright(*asked, "--input-tokens", 32000, "--json").json["notes"] if "windowed" in n]
    assert "12 of 24 layers need their last 128 tokens" in note
    assert "holds 2 times as much" in note
    assert "windowed" not in str(meshwright(*asked, "--input-tokens", 20, "--json").json["notes"])
    whole = meshwright(*asked, "--input-tokens", 32000, "--engine", "trtllm", "--json").json["notes"]
    assert "this engine has no windowed cache and holds 2 times as much" in str(whole)


def test_tables_of_an_estimate_and_a_plan(meshwright):
    assert "ITL" in meshwright(*ESTIMATE, *LENGTHS, "--rate", 2).stdout
    plan = ("inference", "plan", *ESTIMATE[2:6], *LENGTHS)
    done = meshwright(*plan, "--itl", 20, "--explain", "--pareto", "--disaggregated")
    assert done.exit_code == 0
    assert "bound 20 ms" in done.stdout
    assert "tokens/s/user" in done.stdout
    assert meshwright(*plan, "--itl", "0.001").exit_code == 1


def test_a_rate_has_percentiles_of_its_arrivals(meshwright):
    asked = (*ESTIMATE, *LENGTHS, "--rate", 100)
    plain = meshwright(*asked, "--json").json
    bounds = ("--ttft", 120, "--itl", 15, "--percentile", 99)
    assert meshwright(*asked, *bounds, "--json").json["loads"] == plain["loads"]
    bursts = meshwright(*asked, *bounds, "--arrivals", "gamma:3", "--json").json
    found, simulated = bursts["arrivals"], plain["arrivals"]
    for asked_for in (plain, bursts):
        (load,), under = asked_for["loads"], asked_for["arrivals"]
        assert (load["ttft_s"]["value"], load["itl_s"]["value"]) == (under["ttft_s"]["mean"], under["itl_s"]["mean"])
        assert load["in_flight"] == pytest.approx(100 * under["e2e_s"]["mean"])
    assert (simulated["arrivals"], found["arrivals"]) == ("poisson", "gamma:3")
    assert simulated["bounds"] is None
    assert simulated["headroom"] == pytest.approx(simulated["capacity_requests_per_s"] / 100)
    for name in ("ttft_s", "itl_s", "e2e_s"):
        assert found[name]["p50"] <= found[name]["p95"] <= found[name]["p99"]
    assert found["keeps_bounds"] == (found["ttft_s"]["p99"] <= 0.12 and found["itl_s"]["p99"] <= 0.015)
    assert found["goodput_per_s"] == pytest.approx(100 * found["good_share"])
    assert "arrivals" not in meshwright(*ESTIMATE, *LENGTHS, "--json").json
    done = meshwright(*asked, "--itl", 15, "--percentile", 99)
    assert "100 requests/s, poisson arrivals" in done.stdout
    assert "15.00 ms" in done.stdout
    assert "The mean keeps them at no rate." in " ".join(meshwright(*asked, "--itl", "0.1").stdout.split())


def test_a_plan_keeps_the_percentile_of_its_bounds(meshwright):
    plan = (
        "inference",
        "plan",
        "--model",
        "llama3.1-8b",
        "--cluster",
        "h100-8x1",
        "--rate",
        4,
        "--input-tokens",
        20000,
    )
    plan = (*plan, "--output-tokens", 20, "--ttft", 2500, "--json")
    mean, tail = meshwright(*plan).json, meshwright(*plan, "--percentile", 99).json
    assert mean["arrivals"]["ttft_s"]["p99"] > 2.5  # the bound is of the mean
    assert tail["arrivals"]["ttft_s"]["p99"] <= 2.5
    assert tail["arrivals"]["keeps_bounds"]
    assert tail["bounds"]["percentile"] == 99
    devices = [one["best"]["layout"]["replicas"] * one["best"]["layout"]["tensor"] for one in (mean, tail)]
    assert devices[0] < devices[1]
    nothing = meshwright(*plan[:-1], "--percentile", 99, "--arrivals", "gamma:20")
    assert nothing.exit_code == 1
    assert "(p99) on 8 devices" in nothing.stderr  # the tail of bursts


def test_a_plan_takes_no_layout_whose_queue_does_not_drain(meshwright):
    """A full cache computes requests again, so a full server finishes fewer than one that is nearly full."""
    load = ("--input-tokens", 1024, "--output-tokens", 256, "--rate", 36, "--precision", "fp8")
    asked = ("--model", "llama3.1-70b", "--cluster", "h200-8x1", *load, "--json")
    plan = meshwright("inference", "plan", *asked).json
    assert plan["arrivals"]["is_stable"]
    assert plan["best"]["layout"]["text"] == "7 x TP1"
    estimate = meshwright("inference", "estimate", "--tensor", 2, *asked)
    assert estimate.exit_code == 0
    assert not estimate.json["arrivals"]["is_stable"]
    assert "ttft_s" not in estimate.json["arrivals"]
    assert "Not stable" in meshwright("inference", "estimate", "--tensor", 2, *asked[:-1]).stdout


@pytest.mark.parametrize(
    "wrong",
    [
        ("--arrivals", "poisson"),
        ("--percentile", "99", "--ttft", "100"),
        ("--ttft", "100"),
        ("--rate", "1", "--percentile", "99"),
        ("--rate", "1", "--percentile", "20", "--ttft", "100"),
        ("--rate", "1", "--percentile", "100", "--ttft", "100"),
        ("--rate", "1", "--arrivals", "gamma"),
        ("--rate", "1", "--ttft", "0"),
        ("--rate", "1", "--seed", "-1"),
    ],
    ids=" ".join,
)
def test_bad_input_of_arrivals(meshwright, wrong):
    done = meshwright(*ESTIMATE, *LENGTHS, *wrong, "--json")
    assert done.exit_code == 2, done.stdout
    assert done.json["error"]["message"]


def test_a_plan_has_its_best_point_and_the_front(meshwright):
    document = meshwright("inference", "plan", *ESTIMATE[2:6], *LENGTHS, "--itl", 20, "--json").json
    assert document["best"]["itl_s"] <= 0.02
    assert len(document["front"]) > 3
    assert document["estimate"]["output_tokens_per_s"]["low"] > 0


@pytest.mark.parametrize(
    "wrong",
    [
        ("--rate", "-1"),
        ("--rate", "nan"),
        ("--concurrency", "0"),
        ("--concurrency", "x"),
        ("--price", "0"),
        ("--utilization", "1.1"),
        ("--region", "Mars"),
        ("--life", "3"),
        ("--accepted", "2"),
        ("--prefill-replicas", "8"),
        ("--tensor", "7"),
        ("--input-tokens", "1e99"),
        ("--engine", "mine"),
    ],
    ids="=".join,
)
def test_bad_input_of_an_estimate(meshwright, wrong):
    done = meshwright(*ESTIMATE, *LENGTHS, *wrong, "--json")
    assert done.exit_code == 2, done.stdout
    assert "Traceback" not in done.stderr


def test_a_model_that_does_not_fit_is_no(meshwright):
    done = meshwright(*ESTIMATE[:2], "--model", "llama3.1-405b", *ESTIMATE[4:], *LENGTHS)
    assert done.exit_code == 1
    assert "the weights need" in done.stderr


def test_why_no_layout_keeps_the_bounds_names_the_question_once_and_a_way_on(meshwright):
    done = meshwright("inference", "plan", "--model", "llama3.1-405b", *ESTIMATE[4:6], *LENGTHS, "--itl", 3)
    assert done.exit_code == 1
    assert done.stderr.count("llama3.1-405b") == 1
    assert done.stderr.count("TP8") == 1
    assert "hint: loosen the bounds (--ttft, --itl, --rate)" in done.stderr


def test_accuracy_of_a_file(meshwright, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(
        "model,precision,hw,gpus,parallelism,framework,isl,osl,concurrency,metric,value,unit\n"
        "llama3.1-8b,bf16,H100,1,TP1,vllm,512,128,8,tpot,8.0,ms\n"
        "unheard-of,bf16,H100,1,TP1,vllm,512,128,8,tpot,8.0,ms\n"
    )
    document = meshwright("inference", "accuracy", "--points", path, "--json").json
    assert (document["summary"]["num_rows"], document["summary"]["num_predicted"]) == (2, 1)
    assert document["unpredicted"] == {"model not in the catalogue": 1}
    assert meshwright("inference", "accuracy", "--points", path, "--rows").exit_code == 0
    path.write_text("model\n")
    assert meshwright("inference", "accuracy", "--points", path, "--json").exit_code == 2


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ((*CAPACITY, "--model", "llama3.1-8b", "--cluster", "h100-8x1"), "accelerator"),
        ((*ESTIMATE, *LENGTHS), "calibration"),
        (("inference", "accuracy"), "points"),
        (("inference", "accuracy"), "records"),
    ],
)
def test_an_empty_path_is_not_the_current_folder(meshwright, command, option):
    done = meshwright(*command, f"--{option}", "")
    assert done.exit_code == 2
    assert f"{option}: got ''" in done.stderr


def test_requests_in_flight_are_ascending_each_once(meshwright):
    document = meshwright(*ESTIMATE, *LENGTHS, "--concurrency", "8,1,8", "--json").json
    assert [load["concurrency"] for load in document["loads"]] == [1, 8]


def test_a_plan_writes_what_starts_its_servers(meshwright, tmp_path):
    options = ("--model", "llama3.1-8b", "--cluster", "h100-8x1", "--input-tokens", 64, "--output-tokens", 64)
    done = meshwright("inference", "plan", *options, "--json", "--write", tmp_path / "servers")
    assert done.exit_code == 0
    assert json.loads((tmp_path / "servers" / "plan.json").read_text()) == done.json
    assert {path.name for path in (tmp_path / "servers").iterdir()} == {
        "README.md", "kubernetes.yaml", "plan.json", "start.sh",
    }  # fmt: skip
    done = meshwright("inference", "plan", *options, "--engine", "generic", "--write", tmp_path / "none")
    assert done.exit_code == 2
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("verb", ["estimate", "plan"])
def test_answers_of_one_token_have_no_speed(meshwright, verb):
    tokens = ("--input-tokens", 64, "--output-tokens", 1)
    outcome = meshwright("inference", verb, "--model", "qwen3-0.6b", "--cluster", "h100-1x1", *tokens)
    assert outcome.exit_code == 0, outcome.stderr
    assert "inf " not in outcome.stdout
