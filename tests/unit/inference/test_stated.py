"""Published points in the words of strangers: each condition takes effect, refuses the row, or is listed as unread."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest
from tests.every_member import check_every

from meshwright.inference.estimate import estimate_rate
from meshwright.inference.points import COLUMNS, PointReason, Quantity, read_points
from meshwright.inference.server import server
from meshwright.inference.stated import share

ROW = {
    "model": "Llama-3.1-70B", "precision": "FP8", "hw": "H200-141GB", "gpus": "8", "parallelism": "TP8",
    "framework": "vllm", "isl": "1024", "osl": "1024", "concurrency": "16", "metric": "tpot", "value": "15.65",
    "unit": "ms",
}  # fmt: skip
MIXTURE = {"model": "DeepSeek-R1", "hw": "B200", "precision": "FP4"}


@pytest.fixture
def point(tmp_path):
    """The point of a row with some cells changed."""

    def read(**cells):
        path = tmp_path / "points.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*COLUMNS, "source", "note"], restval="")
            writer.writeheader()
            writer.writerow(ROW | cells)
        return read_points(path)[0]

    return read


def _check_texts(point, column, texts, value):
    """Each text of `column` is read as what stands beside it: a value, or the reason of a refusal."""

    def one(case):
        cells, expected = case
        found = point(**({column: cells} if isinstance(cells, str) else cells))
        assert (found.reason if found.conditions is None else value(found)) == expected

    check_every(list(texts.items()) if isinstance(texts, dict) else texts, one, name=lambda case: str(case[0]))


def test_speculation_is_refused_unless_it_is_denied_or_its_acceptance_is_stated(point):
    refused = (
        "speculative decoding with EAGLE-3", "MTP enabled (3 draft tokens)", "MTP=3", "with MTP", "draft model 1B",
        "num_speculative_tokens=3", "--speculative-algorithm EAGLE", "ngram speculation", "n-gram prompt lookup",
        "Medusa heads", "spec decode on", "speculative-num-steps 3",
        "num_speculative_tokens=3, acceptance length 4.5",  # more than it drafts
    )  # fmt: skip
    without = (
        "speculative decoding: off", "no speculative decoding", "MTP off", "without MTP", "MTP disabled",
        "spec_method none", "1.5x faster than with MTP", "EAGLE would add 2x", "MTP on/off NOT recorded",
    )  # fmt: skip
    stated = {
        "num_speculative_tokens=3, acceptance length 2.5": (3, 1.5),
        "EAGLE-3, 4 draft tokens, acceptance rate 50 %": (4, 2.0),
        "MTP with 2 speculative tokens, acceptance rate of 0.75": (2, 1.5),
    }
    cases = dict.fromkeys(refused, PointReason.SPECULATIVE) | dict.fromkeys(without, (0, 0.0)) | stated
    _check_texts(
        point, "note", cases, lambda p: (p.conditions.load.drafted_per_step, p.conditions.load.accepted_per_step)
    )
    for framework in ("vLLM + EAGLE3", "SGLang (EAGLE)", "vLLM (MTP)"):
        assert point(framework=framework).reason is PointReason.SPECULATIVE
    assert point(precision="FP8, no MTP").reason is None


def test_prefill_and_decode_on_different_devices_are_refused(point):
    apart = (
        "disaggregated prefill/decode (1P1D)", "PD-disaggregated", "prefill/decode on separate nodes", "2P1D",
        "TP4 for prefill and TP8 for decode",
    )  # fmt: skip
    cases = dict.fromkeys(apart, PointReason.DISAGGREGATED) | {"not disaggregated": "TP8", "": "TP8"}
    _check_texts(point, "note", cases, lambda p: p.conditions.served.layout.describe())
    assert point(framework="vLLM, disaggregated").reason is PointReason.DISAGGREGATED
    assert point(parallelism="1P2D").reason is PointReason.DISAGGREGATED


def test_hits_of_a_prefix_cache_are_a_share_of_the_prompt(point):
    cases = {
        "prefix caching enabled, 80% hit rate": 0.8, "prefix cache hit rate 60 %": 0.6, "KV cache hit rate 0.5": 0.5,
        "40 % of prompts cached": 0.4, "radix cache disabled": 0.0, "--disable-radix-cache": 0.0, "prefix caching": 0.0,
    }  # fmt: skip
    _check_texts(point, "note", cases, lambda p: p.conditions.load.prefix_hit_rate)
    assert any("without a stated share" in note for note in point(note="--enable-prefix-caching").assumed)
    assert not any("prefix" in note for note in point(note="--no-enable-prefix-caching").assumed)
    assert [share(text) for text in ("80%", "80 %", "0.8", "0.5 %", None)] == [0.8, 0.8, 0.8, 0.005, 0]


def test_the_format_of_the_cache(point):
    cases = dict.fromkeys(
        ("KV cache in FP8", "fp8 kv cache", "--kv-cache-dtype fp8_e4m3", "kv cache: fp8", "FP8-KV checkpoint, fp8 KV"),
        ("fp8", False),
    ) | dict.fromkeys(
        ("bf16 KV cache", "KV cache BF16", "KV cache in bf16", "FP8 KV cache not used",
         "x.sh has no kv-cache-dtype: bf16 KV"),
        ("bf16", False),
    ) | {"kv_cache_dtype=auto": ("fp8", True), "int8 KV cache": ("fp8", True)}  # fmt: skip
    _check_texts(
        point, "note", cases, lambda p: (p.conditions.served.cache.name, any("KV cache" in n for n in p.assumed))
    )
    assert point(precision="FP8 weights, BF16 KV").conditions.served.cache.name == "bf16"


def test_options_of_the_scheduler(point):
    usual = (1024, 8192)
    cases = {
        "max_num_seqs=64": (64, 8192), "--max-running-requests 32": (32, 8192), "max batch size 64": (64, 8192),
        "max_num_batched_tokens=16,384": (1024, 16384), "chunked prefill off": usual,
        "--chunked-prefill-size -1": usual,
    }  # fmt: skip
    _check_texts(point, "note", cases, lambda p: (p.conditions.engine.max_sequences, p.conditions.engine.batch_tokens))


def test_what_nothing_takes_is_listed(point):
    texts = (
        "--enforce-eager", "no CUDA graphs", "torch.compile off", "--gpu-memory-utilization 0.95", "power limit 500 W",
        "MIG 1g", "DeepEP", "two-batch overlap", "EPLB", "int4 weights", "requests arrive at 5 req/s",
        "static batching", "--cpu-offload-gb 10", "ShareGPT prompts", "chunked prefill off",
        "MTP on/off NOT recorded",
    )  # fmt: skip
    _check_texts(point, "note", dict.fromkeys(texts, True), lambda p: bool(p.unread))
    for text in ("", "no speculative decoding", "fp8 KV cache", "ttft_ms=9.5 measured=2026-03-25", "max_num_seqs=64"):
        assert point(note=text).unread == (), text
    assert any("is not known" in note for note in point(framework="LMDeploy").assumed)


def test_layouts_in_words(point):
    cases = [
        *(
            ({"parallelism": text}, "TP8")
            for text in ("TP: 8", "tensor parallel 8", "--tensor-parallel-size 8", "8-way TP", "TP8, no EP", "TP(8)")
        ),
        ({"parallelism": "data parallel 8"}, "8 x TP1"),
        ({"parallelism": "single GPU", "gpus": "1"}, "TP1"),
        ({"parallelism": "", "gpus": "1"}, "TP1"),
        ({"parallelism": "TP8 context parallel 2"}, PointReason.NO_PARALLELISM),
        (MIXTURE | {"note": "--enable-dp-attention", "parallelism": "TP8 EP8"}, "TP1 ADP8 EP8"),
        (MIXTURE | {"note": "no DP attention", "parallelism": "TP8 EP8"}, "TP8 EP8"),
        (MIXTURE | {"parallelism": "TP8, expert parallelism on"}, "TP8 EP8"),
        (MIXTURE | {"note": "--enable-expert-parallel"}, "TP8 EP8"),
        (MIXTURE | {"note": "expert parallel off"}, "TP8"),
    ]
    small = {"model": "Llama-3.1-8B"}
    texts = [(cells if "model" in cells else small | cells, expected) for cells, expected in cases]
    _check_texts(point, "", texts, lambda p: p.conditions.served.layout.describe())
    assert any("sequence is not read" in note for note in point(parallelism="TP8, sequence parallel").assumed)
    assert not any("not read" in note for note in point(parallelism="tensor parallel 8, no EP").assumed)


def test_models_and_devices_are_spelled_as_elsewhere(point):
    models = {
        "meta-llama/Llama-3.3-70B-Instruct": "llama3.1-70b", "Meta-Llama-3.1-8B-Instruct": "llama3.1-8b",
        "RedHatAI/Meta-Llama-3.1-70B-Instruct-FP8-dynamic": "llama3.1-70b", "Qwen/Qwen3-8B-AWQ": "qwen3-8b",
        "openai/gpt-oss-20b": "gpt-oss-20b", "nvidia/DeepSeek-R1-0528-NVFP4": "deepseek-v3", "DSv3": "deepseek-v3",
        "Mixtral-8x7B-Instruct-v0.1": "mixtral-8x7b", "GLM-9": PointReason.UNKNOWN_MODEL,
    }  # fmt: skip
    _check_texts(point, "model", models, lambda p: p.conditions.served.model.name)
    devices = {
        "H100-SXM5-80GB": "h100", "8x NVIDIA H200": "h200", "DGX B200": "b200", "MI300X OAM": "mi300x",
        "GB200 NVL72": "gb200", "B200 NVL": PointReason.UNKNOWN_ACCELERATOR,
    }  # fmt: skip
    _check_texts(point, "hw", devices, lambda p: p.conditions.served.cluster.accelerator.name)


def test_formats_of_weights_in_words(point):
    cases = {
        "bfloat16": "bf16", "half": "fp16", "fp8 (e4m3)": "fp8", "FP8 dynamic": "fp8", "fp8-block": "fp8",
        "W8A8": "int8", "W8A8-FP8": "fp8", "AWQ int4": "int4", "GPTQ-Int4": "int4", "mxfp4 weights": "mxfp4",
        "FP8 (KV FP8)": "fp8", "FP8 or BF16": PointReason.UNKNOWN_PRECISION, "auto": PointReason.UNKNOWN_PRECISION,
    }  # fmt: skip
    _check_texts(point, "precision", cases, lambda p: p.conditions.served.weights.name)
    named = {"precision": "", "model": "Llama-3.1-70B-Instruct-FP8"}
    assert point(**named).conditions.served.weights.name == "fp8"


def test_loads_and_lengths_in_words(point):
    loads = dict.fromkeys(
        ("conc 64", "concurrency=64", "64 concurrent requests", "64 users", "batch size 64", "BS=64", "8 per GPU"), 64.0
    ) | dict.fromkeys(("inf", "unlimited", "max throughput", "request rate inf"))
    loads |= {"single stream": 1.0} | dict.fromkeys(("1-256", "0 req/s", "1.2.3 qps"), PointReason.NO_LOAD)
    _check_texts(point, "concurrency", loads, lambda p: p.conditions.load.concurrency)
    lengths = {"8k": 8192, "1024 tokens": 1024, "~1000": 1000, "ShareGPT": PointReason.NO_LENGTHS}
    _check_texts(point, "isl", lengths, lambda p: p.conditions.load.input_tokens)


def test_a_rate_of_requests_has_the_requests_in_flight_of_the_estimate(point):
    """As `inference estimate --rate`; a rate that the server never finishes is a full one, without a first token."""
    texts = ("2 req/s", "QPS 2", "2 rps", "request rate 2", "rate=2", "2 requests per second", "0.25 req/s/gpu")
    for text in texts:
        found = point(concurrency=text, metric="ttft").conditions
        asked = server(found.served, found.engine)
        assert estimate_rate(asked, replace(found.load, concurrency=None), 2.0).load == found.load, text
        assert found.limit.sequences == pytest.approx(found.load.concurrency), text
    over = point(concurrency="10000 req/s")
    assert over.conditions.load.concurrency is None
    assert any("a full server" in note for note in over.assumed)
    assert point(concurrency="10000 req/s", metric="ttft").reason is PointReason.NO_LOAD


def test_metrics_and_units_in_words(point):
    rate, gap, first = Quantity.OUTPUT_RATE, Quantity.ITL, Quantity.TTFT
    cases = [
        (("output throughput", "tokens/second", ""), (rate, 15.65)),
        (("output_throughput", "TPS", ""), (rate, 15.65)),
        (("output tps", "tps/gpu", ""), (rate, 125.2)),
        (("throughput", "tokens per second per GPU", ""), (rate, 125.2)),
        (("throughput", "tok/s", "per GPU"), (rate, 125.2)),
        (("throughput", "tok/s", "input + output tokens"), (Quantity.TOTAL_RATE, 15.65)),
        (("interactivity", "tok/s/user", ""), (Quantity.USER_RATE, 15.65)),
        (("mean_tpot_ms", "ms", ""), (gap, 0.01565)),
        (("inter-token latency", "ms", ""), (gap, 0.01565)),
        (("average time per output token", "msec", ""), (gap, 0.01565)),
        (("TTFT (mean)", "seconds", ""), (first, 15.65)),
        (("p99 TPOT", "ms", ""), PointReason.OTHER_METRIC),
        (("prefill throughput", "tok/s", ""), PointReason.OTHER_METRIC),
        (("output_throughput", "tok/s/node", ""), (rate, 15.65)),  # of one node
        (("throughput per node", "tokens/s", ""), (rate, 15.65)),
        (("ttft", "ms", "P99"), PointReason.OTHER_METRIC),
        (("tpot", "ms", "100 prompts; values are the 99th percentile"), PointReason.OTHER_METRIC),
        (("mean_tpot_ms", "ms", "p99"), (gap, 0.01565)),
        (("tpot", "ms", "p99 was 31 ms"), (gap, 0.01565)),
        (("output_throughput", "tok/s", "p99"), (rate, 15.65)),
    ]
    texts = [(dict(zip(("metric", "unit", "note"), cells, strict=True)), expected) for cells, expected in cases]
    _check_texts(point, "", texts, lambda p: (p.conditions.quantity, pytest.approx(p.conditions.measured, rel=1e-9)))
    two_nodes = point(gpus="16", parallelism="TP8", metric="output_throughput", unit="tok/s/node", value="100")
    assert two_nodes.conditions.measured == 200


def test_the_engine_is_named_in_any_words(point):
    engines = {
        "TensorRT LLM 1.0": "trtllm", "NVIDIA NIM (TRT-LLM 0.17)": "trtllm-0", "Dynamo + SGLang": "sglang",
        "Triton + TensorRT-LLM": "trtllm", "vllm==0.7.2": "vllm-v0", "TGI 3.0": "generic",
    }  # fmt: skip
    _check_texts(point, "framework", engines, lambda p: p.conditions.engine.name)
