"""Results of other clients: each field goes where its definition belongs."""

from __future__ import annotations

import json

import pytest

from meshwright.bench.serving.importers import ResultFormat, read_results_of
from meshwright.errors import InputError
from meshwright.records.serving import Arrivals

LATENCIES = {
    f"{part}_{name}_ms": value
    for name, value in (("ttft", 100.0), ("tpot", 28.2), ("itl", 11.1), ("e2el", 900.0), ("e2e_latency", 900.0))
    for part in ("mean", "median", "p99")
}
VLLM = {
    "date": "20261001-120000", "model_id": "m", "num_prompts": 12, "completed": 10, "failed": 2, "duration": 5.0,
    "request_rate": "inf", "max_concurrency": 16, "total_input_tokens": 1280, "total_output_tokens": 320,
    "request_throughput": 2.0, "output_throughput": 64.0, "total_token_throughput": 320.0, **LATENCIES,
}  # fmt: skip
SGLANG = {
    "backend": "sglang", "request_rate": 4.0, "max_concurrency": 8, "duration": 5.0, "completed": 10,
    "total_input_tokens": 1280, "total_output_tokens": 320, "request_throughput": 2.0, "input_throughput": 256.0,
    "output_throughput": 64.0, "total_throughput": 320.0, "accept_length": 2.5, **LATENCIES,
}  # fmt: skip


def metric(value: float, unit: str) -> dict[str, object]:
    return {
        "unit": unit,
        "avg": value,
        "p50": value,
        "p90": value,
        "p95": value,
        "p99": value,
        "min": value,
        "max": value,
    }


AIPERF = {
    "request_count": metric(10, "requests"), "error_request_count": metric(1, "requests"),
    "request_latency": metric(900, "ms"), "time_to_first_token": metric(100, "ms"),
    "inter_token_latency": metric(28.2, "ms"), "inter_chunk_latency": metric(11.1, "ms"),
    "input_sequence_length": metric(128, "tokens"), "output_sequence_length": metric(32, "tokens"),
    "output_token_throughput": metric(64, "tokens/sec"), "request_throughput": metric(2, "requests/sec"),
    "input_config": {"endpoint": {"model_names": ["m"]}, "loadgen": {"concurrency": 16}},
}  # fmt: skip


def shares(value: float) -> dict[str, object]:
    inner = {"count": 10, "mean": value, "median": value, "min": value, "max": value, "percentiles": {"p99": value}}
    return {"successful": inner}


GUIDELLM = {
    "args": {"model": "m"},
    "benchmarks": [
        {
            "duration": 5.0, "config": {"strategy": {"streams": 16}},
            "metrics": {
                "request_totals": {"successful": 10, "errored": 1, "incomplete": 1, "total": 12},
                "prompt_token_count": shares(128), "output_token_count": shares(32),
                "time_to_first_token_ms": shares(100), "inter_token_latency_ms": shares(28.2),
                "time_per_output_token_ms": shares(30.4), "request_latency": shares(0.9),
            },
        }
    ],
}  # fmt: skip
INFERENCEX = {
    "hw": "mi355x", "model": "m", "framework": "sglang", "precision": "fp4", "tp": 8, "conc": 16, "isl": 128,
    "osl": 32, "tput_per_gpu": 40.0, "output_tput_per_gpu": 8.0, "spec_decoding": "mtp",
    **{key.removesuffix("_ms"): value / 1e3 for key, value in LATENCIES.items()},
}  # fmt: skip
ALL = {"vllm": VLLM, "sglang": SGLANG, "aiperf": AIPERF, "guidellm": GUIDELLM, "inferencex": INFERENCEX}


@pytest.mark.parametrize("name", ALL)
def test_one_load_is_the_same_through_every_client(tmp_path, name):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(ALL[name]))
    (found,) = read_results_of(path)
    assert found.format is ResultFormat(name)
    point = found.point
    assert point.total_tokens_per_s == pytest.approx(320)
    assert point.output_tokens_per_s == pytest.approx(64)
    assert point.ttft_s.median == pytest.approx(0.1)
    assert point.tpot_s.median == pytest.approx(0.0282)
    assert point.e2e_s.median == pytest.approx(0.9)
    assert (point.chunk_gap_s is None) == (name == "guidellm")
    if point.chunk_gap_s:
        assert point.chunk_gap_s.median == pytest.approx(0.0111)
    if name != "inferencex":
        assert (point.num_ok, point.input_tokens, point.output_tokens, point.wall_s) == (10, 1280, 320, 5.0)
    assert found.gaps
    assert found.model == ("" if name == "sglang" else "m")


def test_loads_and_failures(tmp_path):
    points = {}
    for name, document in ALL.items():
        (tmp_path / name).write_text(json.dumps(document))
        points[name] = read_results_of(tmp_path / name)[0]
    assert {n: p.point.load.concurrency for n, p in points.items()} == dict.fromkeys(ALL, 16) | {"sglang": 8}
    assert points["sglang"].point.load.arrivals is Arrivals.POISSON
    assert points["vllm"].point.errors == {"http_error": 2}
    assert points["guidellm"].point.errors == {"http_error": 1, "cancelled": 1}
    assert points["aiperf"].point.num_requests == 11
    assert points["inferencex"].num_devices == 8
    assert any("speculative" in gap for gap in points["inferencex"].gaps)
    assert any("2.5 tokens per step" in gap for gap in points["sglang"].gaps)


@pytest.mark.parametrize(
    ("document", "load"),
    [
        # benchmark_serving.py of vLLM 0.9 (May 2025) with --metadata; it spells its goodput with a colon
        (VLLM | {"max_concurrency": None, "request_goodput:": 1.5, "gpu": "4xNVIDIA_L40S"}, "12 in flight"),
        (VLLM | {"request_rate": "inf"}, "16 in flight"),
        (VLLM | {"request_rate": 10.0, "burstiness": 1.0}, "10/s poisson"),
        (VLLM | {"request_rate": 10.0, "burstiness": 0.5}, "10/s gamma"),
        (AIPERF | {"input_config": {"loadgen": {"request_rate": 4, "arrival_pattern": "constant"}}}, "4/s constant"),
        (AIPERF | {"input_config": {"loadgen": {"request_rate": 4}}}, "4/s poisson"),
        (AIPERF | {"input_config": {"loadgen": {"request_rate": 4, "arrival_pattern": "gamma",
                                                "arrival_smoothness": 0.5}}}, "4/s gamma"),
        (GUIDELLM | {"benchmarks": [GUIDELLM["benchmarks"][0]
                                    | {"config": {"strategy": {"type_": "constant", "rate": 2.0}}}]}, "2/s constant"),
        (GUIDELLM | {"benchmarks": [GUIDELLM["benchmarks"][0]
                                    | {"config": {"strategy": {"type_": "synchronous"}}}]}, "1 in flight"),
    ],
)  # fmt: skip
def test_arrivals_are_those_of_the_file(tmp_path, document, load):
    (tmp_path / "r.json").write_text(json.dumps(document))
    (found,) = read_results_of(tmp_path / "r.json")
    assert found.point.load.name == load
    assert found.point.load.shape in ((0.5,) if load.endswith("gamma") else (None,))
    assert ("not read: gpu" in found.gaps) == ("gpu" in document)
    assert found.point.good_requests_per_s == document.get("request_goodput:")


@pytest.mark.parametrize(
    "document",
    [VLLM | {"request_rate": "often"}, VLLM | {"request_rate": 0}, VLLM | {"request_rate": 2, "burstiness": 0},
     AIPERF | {"input_config": {"request_rate": 4, "arrival_pattern": "tidal"}},
     AIPERF | {"input_config": {"concurrency": "many"}}],
    ids=range(5),
)  # fmt: skip
def test_loads_that_are_not_understood_are_refused(tmp_path, document):
    (tmp_path / "r.json").write_text(json.dumps(document))
    with pytest.raises(InputError):
        read_results_of(tmp_path / "r.json")


def test_json_lines_hold_several_loads(tmp_path):
    path = tmp_path / "online.jsonl"
    path.write_text("\n".join(json.dumps({**SGLANG, "max_concurrency": n}) for n in (1, 2)) + "\n")
    assert [r.point.load.concurrency for r in read_results_of(path)] == [1, 2]


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "[1]", "{", '{"a": 1}', "null", "[" * 100_000,
        json.dumps({**VLLM, "duration": "long"}),
        json.dumps({**VLLM, "median_itl_ms": -1}),
        json.dumps({k: v for k, v in VLLM.items() if k != "completed"}),
        json.dumps({**AIPERF, "request_latency": metric(1, "weeks")}),
        json.dumps({**AIPERF, "request_count": {}}),
        json.dumps({**GUIDELLM, "benchmarks": [{}]}),
        json.dumps({k: v for k, v in INFERENCEX.items() if k != "tp"}),
    ],
    ids=range(14),
)  # fmt: skip
def test_damaged_results_are_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InputError):
        read_results_of(path)


def test_absent_files_are_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_results_of(tmp_path / "absent.json")


def test_the_command_shows_both_definitions(meshwright, tmp_path):
    for name, document in ALL.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    asked = [part for name in ALL for part in ("--from", str(tmp_path / f"{name}.json"))]
    shown = meshwright("bench", "serve", *asked)
    assert shown.exit_code == 0, shown.stderr
    assert "28.20" in shown.stdout
    assert "11.10" in shown.stdout
    assert "define otherwise" in shown.stdout
    document = json.loads(meshwright("bench", "serve", *asked, "--json", "--itl-bound", "20").stdout)
    best = {b["format"]: b for b in document["best"]}
    assert best["vllm"]["chunk_gap_s"]["under_bound"] is None  # 2 of its requests failed
    assert "2 of 12 requests failed: no best load" in shown.stdout
    (tmp_path / "vllm.json").write_text(json.dumps({**ALL["vllm"], "failed": 0}))
    document = json.loads(meshwright("bench", "serve", *asked, "--json", "--itl-bound", "20").stdout)
    best = {b["format"]: b for b in document["best"]}
    assert best["vllm"]["chunk_gap_s"]["under_bound"] is not None
    assert best["vllm"]["tpot_s"]["under_bound"] is None  # the same load under another definition
    assert meshwright("bench", "serve", "x:1", *asked).exit_code == 2


@pytest.mark.parametrize("config", [{"model_names": ["m"]}, {"models": {"items": [{"name": "m"}]}}], ids=str)
def test_the_model_of_aiperf_is_found_in_both_forms_of_its_configuration(config, tmp_path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps({**AIPERF, "input_config": config}))
    (found,) = read_results_of(path)
    assert found.model == "m"
