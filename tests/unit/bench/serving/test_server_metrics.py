"""A server's own metrics, in the texts that each project prints."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("aiohttp")

from tests.faulty_server import Behavior, mock_server

from meshwright.bench.serving import server_metrics
from meshwright.bench.serving.bench import ServingBenchRequest, measure_serving
from meshwright.bench.serving.endpoint import Endpoint
from meshwright.bench.serving.prompts import LengthKind, Lengths, PromptSource
from meshwright.bench.serving.server_metrics import MOST_BYTES, ServerReading, reading, server_fields
from meshwright.bench.serving.summary import summaries
from meshwright.records.serving import Load, ServingRecorder, read_serving
from meshwright.report.serving import cautions

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a {brace} and \\"quotes\\""} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:gpu_cache_usage_perc{engine="0",model_name="m"} 0.9
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1.0e+03
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.7e+09
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 250.0
vllm:num_preemptions_total{engine="0",model_name="m"} 7.0
"""
SGLANG = """# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 162.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 2826.0
sglang:token_usage{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 0.28
sglang:cache_hit_rate{model_name="m"} 0.007
sglang:prompt_tokens_total{model_name="m"} 8.128902e+06
sglang:cached_tokens_total{model_name="m"} 4096.0
sglang:num_retracted_requests_total{model_name="m"} 3.0
sglang:num_retractions_count{model_name="m"} 9.0
"""
LLAMACPP = """# HELP llamacpp:requests_processing Number of requests processing.
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 3
# HELP llamacpp:requests_deferred Number of requests deferred.
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 1
llamacpp:kv_cache_usage_ratio 0.5
"""
TGI = """# TYPE tgi_batch_current_size gauge
tgi_batch_current_size 4

# TYPE tgi_queue_size gauge
tgi_queue_size 7
tgi_request_input_length_bucket{le="10"} 1
"""
TRTLLM = """# TYPE trtllm_num_active_requests gauge
trtllm_num_active_requests{engine_type="trtllm",model_name="m"} 5.0
trtllm_server_queue_length{engine_type="trtllm",model_name="m"} 6.0
trtllm_kv_cache_utilization{engine_type="trtllm",model_name="m"} 0.125
trtllm_prompt_tokens_total{engine_type="trtllm",model_name="m"} 100.0
trtllm_prompt_cached_tokens_total{engine_type="trtllm",model_name="m"} 10.0
trtllm_prompt_cached_tokens_sum{engine_type="trtllm",model_name="m"} 10.0
"""
TEXTS = {
    VLLM: ServerReading(running=3, waiting=4, cache_usage=0.5, hits=250, looked=1000, preemptions=7),
    SGLANG: ServerReading(running=162, waiting=2826, cache_usage=0.28, hits=4096, looked=8128902, preemptions=3),
    LLAMACPP: ServerReading(running=3, waiting=1, cache_usage=0.5),
    TGI: ServerReading(running=4, waiting=7),
    TRTLLM: ServerReading(running=5, waiting=6, cache_usage=0.125, hits=10, looked=100),
}


@pytest.mark.parametrize("text", TEXTS, ids=["vllm", "sglang", "llamacpp", "tgi", "trtllm"])
def test_each_project_is_read_as_it_prints(text):
    assert reading(text) == TEXTS[text]
    assert reading(text.replace("\n", "\r\n")) == TEXTS[text]


@pytest.mark.parametrize(
    "text", ["", "{}", "tgi_queue_size NaN", "tgi_queue_size x", "tgi_queue_size -1", "a\0\n{" * 99]
)
def test_other_texts_are_no_reading(text):
    assert reading(text) is None


def test_a_counter_that_began_again_says_nothing():
    found = server_fields(
        [ServerReading(preemptions=5, running=1), ServerReading(running=3), ServerReading(preemptions=2, running=9)]
    )
    assert found["server_preemptions"] is None
    assert found["server_running"] == 3  # between the first and the last
    assert server_fields([]) == dict.fromkeys(found)


FIELDS = tuple(server_fields([]))
FOUR = Lengths(kind=LengthKind.FIXED, first=4)


def measured(tmp_path, metrics):
    async def measure():
        async with mock_server(Behavior(ttft_s=0.05, metrics=metrics)) as (_, url):
            request = ServingBenchRequest(
                endpoint=Endpoint(base_url=url, model="mock"), loads=(Load(concurrency=2),), num_requests=8,
                source=PromptSource(inputs=FOUR, outputs=FOUR), has_self_test=False,
            )  # fmt: skip
            recorder = ServingRecorder(tmp_path, sidecar={"endpoint": {}, "command": [], "started": "now"})
            return await measure_serving(request, recorder=recorder, begin=lambda *_: None, done=lambda _: None)

    (point,) = asyncio.run(measure()).points
    (kept,) = read_serving(tmp_path).points
    assert [getattr(kept, name) for name in FIELDS] == [getattr(point, name) for name in FIELDS]
    return point


@pytest.mark.parametrize("path", ["/metrics", "/prometheus/metrics"])
def test_a_load_has_the_growth_of_the_counters_and_the_gauges_between(tmp_path, monkeypatch, path):
    monkeypatch.setattr(server_metrics, "EVERY_S", 0.02)
    text = (
        "vllm:num_requests_running 2\nvllm:prefix_cache_queries_total {0}0\nvllm:prefix_cache_hits_total {0}\n"
        "vllm:num_preemptions_total {0}\n"
    )
    point = measured(tmp_path, {path: lambda done: text.format(100 + done)})
    assert (point.server_running, point.server_waiting, point.server_cache_usage) == (2, None, None)
    assert (point.server_hit_ratio, point.server_preemptions) == (0.1, 8)
    (said,) = cautions(summaries([point]))
    assert said == "2 in flight, by the server's metrics: 2.0 running, 10% of prompts cached, 8 preemptions"
    assert summaries([point])[0].document()["server_preemptions"] == 8


@pytest.mark.parametrize("text", [None, "up 1", "tgi_queue_size 1\n" + "#" * MOST_BYTES])
def test_a_server_without_metrics_or_with_too_many_bytes_has_none(tmp_path, text):
    point = measured(tmp_path, {} if text is None else {"/metrics": lambda _: text})
    assert point.num_ok == 8
    assert point.server_running is point.server_waiting is point.server_preemptions is None
