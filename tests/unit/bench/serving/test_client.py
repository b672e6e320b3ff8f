"""The client against a server with known latencies and faults."""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import time
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import pairwise

import pytest

pytest.importorskip("aiohttp")

from tests.faulty_server import Behavior, MockFault, mock_server

from meshwright.bench.serving.bench import served_model
from meshwright.bench.serving.client import Client, _retry_after_s, open_session
from meshwright.bench.serving.endpoint import Endpoint, Interface, ServingPrompt, field_hint
from meshwright.bench.serving.loads import LoadOutcome, run_load
from meshwright.bench.serving.metrics import LatencyBounds, serving_point
from meshwright.bench.serving.mock import MockServer
from meshwright.errors import InputError
from meshwright.records.serving import Arrivals, Load, RequestStatus, TokenSource
from meshwright.report.serving import failures_by_kind

PROMPT = ServingPrompt(text="one two three", input_tokens=3, output_tokens=8)
NOISE_S: list[float] = []  # of the calm load
QUICK = Behavior(ttft_s=0.002, itl_s=0.001)


async def _noise_s(run: asyncio.Task) -> float:
    """The 90th percentile of late wake-ups in the first 0.3 s of `run`: the scheduler's noise."""
    late = []
    for _ in range(60):
        if run.done():
            break
        begin = time.perf_counter()
        await asyncio.sleep(0.005)
        late.append(time.perf_counter() - begin - 0.005)
    return sorted(late)[int(0.9 * len(late))] if late else 0.0


def measured(
    behavior: Behavior, load: Load | None = None, *, num_requests: int = 12, prompt: ServingPrompt = PROMPT,
    count_tokens=None, with_noise=False, cancel_after: int | None = None, due_s=None, ramp_s: float = 0.0,
    **endpoint,
) -> tuple[LoadOutcome, MockServer]:  # fmt: skip
    async def measure():
        async with mock_server(behavior) as (server, url):
            at = Endpoint(base_url=url, model="mock", **{"timeout_s": 30.0, "idle_timeout_s": 10.0, **endpoint})
            async with open_session(at) as session:
                client = Client(session=session, endpoint=at, start_s=time.perf_counter(), count_tokens=count_tokens)
                run = asyncio.create_task(
                    run_load(
                        client, load or Load(concurrency=4), [prompt] * num_requests, num_requests=num_requests,
                        due_s=due_s, ramp_s=ramp_s,
                    )
                )  # fmt: skip
                if with_noise:
                    NOISE_S.append(await _noise_s(run))
                if cancel_after is not None:
                    while len(client.records) < cancel_after:
                        await asyncio.sleep(0.01)
                    run.cancel()
                return await run, server

    return asyncio.run(measure())


@pytest.fixture(scope="module")
def calm() -> tuple[LoadOutcome, MockServer]:
    """Requests with TTFT 20 ms and ITL 5 ms."""
    return measured(
        Behavior(ttft_s=0.02, itl_s=0.005), num_requests=16, ramp_s=0.04, with_noise=True,
        prompt=replace(PROMPT, output_tokens=10),
    )  # fmt: skip


def point_of(outcome: LoadOutcome, **more):
    return serving_point(outcome, load=Load(concurrency=4), repeat=1, started="2026-01-01T00:00:00+00:00", **more)


def test_latencies_are_those_of_the_server(calm):
    """Against the server's own clock, so that a busy machine delays both alike."""
    outcome, server = calm
    point = point_of(outcome)
    times = server.token_s.values()
    ttft = statistics.median(t[1] - t[0] for t in times)
    tpot = statistics.median((t[-1] - t[1]) / (len(t) - 2) for t in times)
    gap = statistics.median(b - a for t in times for a, b in pairwise(t[1:]))
    near = 1e-3 + 3 * NOISE_S[0]  # a request passes through three wake-ups
    assert point.ttft_s.median == pytest.approx(ttft, abs=near)
    assert point.tpot_s.median == pytest.approx(tpot, abs=near)
    assert point.chunk_gap_s.median == pytest.approx(gap, abs=near)
    assert point.ttft_s.low > 0.0195
    assert point.ttft_s.n == 16
    assert point.chunk_gap_s.n == 16 * 9


def test_totals_are_exact_and_conserved(calm):
    outcome, server = calm
    point = point_of(outcome)
    assert (point.num_ok, point.input_tokens, point.output_tokens) == (16, 48, 160)
    assert point.output_tokens == server.num_tokens
    assert point.total_tokens_per_s * point.wall_s == pytest.approx(208)
    assert point.littles_law_ratio == pytest.approx(1, abs=0.05)
    assert point.mean_in_flight == pytest.approx(point.requests_per_s * point.e2e_s.mean, rel=0.05)
    assert point.peak_in_flight == 4
    assert point.token_source is TokenSource.USAGE
    assert point.tokens_per_chunk == 1


def test_goodput_needs_every_bound(calm):
    outcome, _ = calm
    assert point_of(outcome, bounds=LatencyBounds(ttft_s=10, tpot_s=10)).good_ratio == 1
    assert point_of(outcome, bounds=LatencyBounds(ttft_s=10, tpot_s=1e-6)).good_ratio == 0
    assert point_of(outcome).good_ratio is None


@pytest.mark.parametrize("interface", Interface)
def test_a_role_is_no_token(interface):
    outcome, _ = measured(QUICK, num_requests=2, interface=interface)
    assert [len(r.chunk_s) for r in outcome.records] == [8, 8]
    assert {r.output_tokens for r in outcome.records} == {8}


FAULTS = {
    MockFault.HTTP_500: RequestStatus.HTTP_ERROR,
    MockFault.HTTP_429: RequestStatus.HTTP_ERROR,
    MockFault.HTTP_503: RequestStatus.HTTP_ERROR,
    MockFault.RESET: RequestStatus.DROPPED,
    MockFault.CLOSE: RequestStatus.DROPPED,
    MockFault.CLOSE_AT_ONCE: RequestStatus.DROPPED,
    MockFault.STALL: RequestStatus.TIMED_OUT,
    MockFault.NOT_JSON: RequestStatus.MALFORMED,
    MockFault.NOT_AN_EVENT: RequestStatus.MALFORMED,
    MockFault.NOT_HTTP: RequestStatus.MALFORMED,
    MockFault.ERROR_EVENT: RequestStatus.SERVER_ERROR,
    MockFault.NO_FINISH: RequestStatus.DROPPED,
    MockFault.EMPTY: RequestStatus.MALFORMED,
}


def test_http_statuses_are_counted_apart():
    faults = {1: MockFault.HTTP_429, 2: MockFault.HTTP_429, 4: MockFault.HTTP_500}
    outcome, _ = measured(replace(QUICK, faults=faults), Load(concurrency=1), num_requests=6)
    point = point_of(outcome)
    assert point.errors == {RequestStatus.HTTP_ERROR: 3}
    assert asdict(point)["http_statuses"] == {"429": 2, "500": 1}
    assert failures_by_kind(point) == {"http_error 429": 2, "http_error 500": 1}


@pytest.mark.parametrize("fault", [MockFault.HTTP_429, MockFault.HTTP_503])
def test_a_busy_server_is_asked_again_on_request(fault):
    busy = replace(QUICK, faults={1: fault, 2: fault}, retry_after="0")
    outcome, server = measured(busy, Load(concurrency=1), num_requests=4, num_retries=2)
    point = point_of(outcome)
    assert (point.num_ok, point.errors, point.num_retries, server.num_requests) == (4, {}, 2, 6)
    assert [r.num_retries for r in outcome.records] == [0, 2, 0, 0]
    outcome, _ = measured(busy, Load(concurrency=1), num_requests=4, num_retries=1)
    assert point_of(outcome).http_statuses == {fault.removeprefix("http_"): 1}
    assert measured(busy, Load(concurrency=1), num_requests=4)[1].num_requests == 4
    outcome, server = measured(
        replace(QUICK, faults={0: MockFault.HTTP_500}), Load(concurrency=1), num_requests=1, num_retries=2
    )
    assert server.num_requests == 1  # 500 is no busy server


def test_the_wait_is_that_of_the_server_and_counts_in_the_latency():
    busy = replace(QUICK, faults={0: MockFault.HTTP_429}, retry_after="1")
    outcome, _ = measured(busy, Load(concurrency=1), num_requests=1, num_retries=1)
    assert outcome.records[0].ttft_s > 1
    outcome, _ = measured(replace(busy, retry_after="3600"), Load(concurrency=1), num_requests=1, num_retries=1)
    assert outcome.records[0].http_status == 429  # longer than a request may take


def test_times_of_retry_after():
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    assert 50 < _retry_after_s(soon) <= 60
    assert _retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert [_retry_after_s(text) for text in ("7", "-1", "soon", "nan", None)] == [7, 0, None, None, None]


def test_cached_tokens_are_those_that_the_server_counts():
    outcome, _ = measured(replace(QUICK, cached_tokens=2), num_requests=5)
    assert point_of(outcome).cached_tokens == 10
    assert point_of(measured(QUICK, num_requests=5)[0]).cached_tokens is None


@pytest.mark.parametrize(
    ("options", "absent"),
    [
        ({"omitted": ("stream_options", "ignore_eos")}, "stream_options"),
        ({"renamed": {"max_tokens": "max_completion_tokens"}}, "max_tokens"),
    ],
)
def test_fields_that_a_server_refuses_are_renamed_or_left_out(options, absent):
    strict = replace(QUICK, refused_fields=(absent,))
    outcome, _ = measured(strict, num_requests=2, **options)
    assert [(r.status, len(r.chunk_s)) for r in outcome.records] == [(RequestStatus.OK, 8)] * 2
    outcome, _ = measured(strict, num_requests=1)
    assert outcome.records[0].http_status == 400
    (name,) = {**options.get("renamed", {}), **dict.fromkeys(options.get("omitted", ())[:1])}
    assert name in field_hint(outcome.records[0].reason)


@pytest.mark.parametrize("fault", MockFault)
def test_a_fault_is_counted_and_the_others_go_on(fault):
    faults = {3: fault, 4: fault} if fault is MockFault.CLOSE_AT_ONCE else {3: fault}  # it is tried a second time
    outcome, _ = measured(replace(QUICK, faults=faults), Load(concurrency=1), num_requests=6, idle_timeout_s=0.5)
    point = point_of(outcome, bounds=LatencyBounds(ttft_s=100.0))
    assert point.errors == {FAULTS[fault]: 1}, [r.reason for r in outcome.records]
    assert (point.num_requests, point.num_ok, point.output_tokens) == (6, 5, 40)
    assert point.good_ratio == pytest.approx(5 / 6)
    assert next(r for r in outcome.records if r.status is not RequestStatus.OK).reason


def test_tokens_of_failed_requests_are_not_in_the_rates():
    outcome, _ = measured(replace(QUICK, faults={1: MockFault.CLOSE}), Load(concurrency=1), num_requests=3)
    point = point_of(outcome)
    assert (point.output_tokens, point.lost_output_tokens) == (16, 4)


@pytest.mark.parametrize(
    "behavior",
    [replace(QUICK, is_split=True), replace(QUICK, slow_read_s=0.01), replace(QUICK, closes_kept_alive=True)],
    ids=["split events", "slow reader", "closes kept-alive connections"],
)
def test_slow_and_odd_servers_lose_nothing(behavior):
    outcome, _ = measured(behavior, num_requests=8)
    point = point_of(outcome)
    assert (point.num_ok, point.output_tokens) == (8, 64), [r.reason for r in outcome.records]
    assert point.errors == {}


def test_one_dropped_kept_alive_connection_is_opened_again():
    outcome, _ = measured(replace(QUICK, faults={1: MockFault.CLOSE_AT_ONCE}), Load(concurrency=1), num_requests=3)
    point = point_of(outcome)
    assert (point.num_ok, point.num_reconnects) == (3, 1)


def test_without_usage_chunks_or_a_tokenizer_are_counted():
    silent = replace(QUICK, has_usage=False)
    by_chunk, _ = measured(silent, num_requests=2)
    assert point_of(by_chunk).token_source is TokenSource.CHUNKS
    assert (by_chunk.records[0].input_tokens, by_chunk.records[0].output_tokens) == (3, 8)
    by_text, _ = measured(silent, num_requests=2, count_tokens=lambda text: len(text))
    assert point_of(by_text).token_source is TokenSource.TOKENIZER
    assert by_text.records[0].output_tokens == 8 * len(" tok")


def test_several_tokens_per_chunk_are_seen():
    outcome, _ = measured(replace(QUICK, tokens_per_chunk=4), num_requests=2)
    point = point_of(outcome)
    assert point.tokens_per_chunk == 4
    assert point.output_tokens == 16


def test_no_server_is_an_outcome_too():
    async def measure():
        at = Endpoint(base_url="http://127.0.0.1:9", model="none")
        async with open_session(at) as session:
            return await Client(session=session, endpoint=at, start_s=0.0).send(PROMPT, index=0)

    assert asyncio.run(measure()).status is RequestStatus.NOT_CONNECTED


def test_an_interrupted_load_keeps_what_it_has():
    slow = Behavior(ttft_s=0.01, itl_s=0.01)
    outcome, _ = measured(slow, num_requests=1000, cancel_after=4)
    point = point_of(outcome)
    assert outcome.interrupted
    assert point.num_ok >= 4
    assert 1 <= point.errors[RequestStatus.CANCELLED] <= 4
    assert point.num_requests == point.num_ok + point.errors[RequestStatus.CANCELLED]


def test_an_open_loop_does_not_wait_for_answers():
    slow = Behavior(ttft_s=0.2, num_slots=1)
    outcome, _ = measured(
        slow, Load(arrivals=Arrivals.CONSTANT, offered_per_s=100.0), num_requests=4,
        prompt=replace(PROMPT, output_tokens=1),
    )  # fmt: skip
    assert outcome.peak_in_flight == 4
    assert [r.due_s for r in outcome.records] == pytest.approx([0.01, 0.02, 0.03, 0.04])
    assert all(r.sent_s >= r.due_s for r in outcome.records)
    assert outcome.records[-1].ttft_s > 0.6  # it queued behind three others


def test_a_trace_has_its_own_times_and_a_ramp_starts_workers_in_turn():
    outcome, _ = measured(QUICK, Load(arrivals=Arrivals.TRACE), num_requests=3, due_s=[0.0, 0.05, 0.1])
    assert outcome.records[2].sent_s >= 0.1
    ramped, _ = measured(QUICK, Load(concurrency=2), num_requests=40, ramp_s=0.1)
    first = sorted(r.sent_s for r in ramped.records)
    assert sum(s < 0.05 for s in first) < 10


# --- streams as public servers send them ---

GAP_S = 0.06


def chunk(choice=None, **more):
    return b"data: " + json.dumps({"choices": [] if choice is None else [choice], **more}).encode() + b"\n\n"


def said(content, **more):
    return chunk({"index": 0, "delta": {"content": content}, **more})


def called(name=None, arguments=""):
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return chunk({"delta": {"tool_calls": [{"index": 0, "function": function}]}})


ROLE = chunk({"delta": {"role": "assistant", "content": ""}})
STOP, DONE = chunk({"delta": {}, "finish_reason": "stop"}), b"data: [DONE]\n\n"
USAGE = chunk(usage={"prompt_tokens": 3, "completion_tokens": 2})
ONE, TWO = said("a"), said("b")

STREAMS = {
    # name: what arrives at 0, 1, 2, ... gaps; status; tokens that are seen; gap of the first and the last one
    "vLLM": ([ROLE, ONE, TWO, STOP + USAGE + DONE], "ok", 2, 1, 2),
    "an empty text before the first": ([ROLE, said(""), ONE, TWO, STOP + DONE], "ok", 2, 2, 3),
    "several empty texts before the first": ([said(""), said(""), ONE, TWO + STOP, DONE], "ok", 2, 2, 3),
    "an incomplete character between": ([ROLE, ONE, said(""), TWO, STOP + DONE], "ok", 3, 1, 3),
    "the finish with the last text": ([ROLE, ONE, said("b", finish_reason="length"), DONE], "ok", 2, 1, 2),
    "content that is null": ([ROLE, said(None), ONE, TWO, STOP + DONE], "ok", 2, 2, 3),
    "reasoning first": ([ROLE, chunk({"delta": {"reasoning_content": "r"}}), ONE, STOP + DONE], "ok", 2, 1, 2),
    "reasoning, as OpenRouter": ([ROLE, chunk({"delta": {"reasoning": "r"}}), ONE, STOP + DONE], "ok", 2, 1, 2),
    "text, then a call": ([ROLE, ONE, called("f"), called(arguments="{}"), STOP + DONE], "ok", 3, 1, 3),
    "calls alone": ([ROLE, called("f"), called(arguments="{"), called(arguments="}"), STOP + DONE], "ok", 3, 1, 3),
    "a call in the first chunk": (
        [chunk({"delta": {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}}),
         called(arguments="{}"), STOP + DONE], "ok", 2, 0, 1,
    ),
    "the older call of a function": (
        [ROLE, chunk({"delta": {"function_call": {"name": "f", "arguments": "{}"}}}), STOP + DONE], "ok", 1, 1, 1,
    ),
    "a refusal": ([ROLE, chunk({"delta": {"refusal": "no"}}), STOP + DONE], "ok", 1, 1, 1),
    "Azure's filter first": (
        [b'data: {"choices": [], "prompt_filter_results": []}\n\n', ROLE, ONE, STOP + DONE], "ok", 1, 2, 2,
    ),
    "SGLang's usage in each chunk": (
        [ROLE, chunk({"delta": {"content": "a"}}, usage={"prompt_tokens": 3, "completion_tokens": 1}),
         chunk({"delta": {"content": "b"}}, usage={"prompt_tokens": 3, "completion_tokens": 2}), STOP + DONE],
        "ok", 2, 1, 2,
    ),
    "no [DONE]": ([ROLE, ONE, TWO, STOP], "ok", 2, 1, 2),
    "no finish": ([ROLE, ONE, TWO, DONE], "ok", 2, 1, 2),
    "neither": ([ROLE, ONE, TWO], "dropped", 2, 1, 2),
    "data alone": ([b"data:\n\n" + ROLE, b"data: \n\n" + ONE, TWO, STOP + DONE], "ok", 2, 1, 2),
    "comments": ([b": OPENROUTER PROCESSING\n\n" + ROLE, b":\n\n" + ONE, STOP + DONE], "ok", 1, 1, 1),
    "pings": ([b"event: ping\ndata: {}\n\n" + ROLE, ONE, b"event: ping\n\n" + STOP + DONE], "ok", 1, 1, 1),
    "pings with words": ([ROLE, b"event: heartbeat\ndata: still here\n\n" + ONE, STOP + DONE], "ok", 1, 1, 1),
    "named events": ([b"event: message\nid: 7\nretry: 10\n" + ROLE, ONE, STOP + DONE], "ok", 1, 1, 1),
    "carriage returns": ([x.replace(b"\n", b"\r") for x in (ROLE, ONE, TWO, STOP + DONE)], "ok", 2, 1, 2),
    "both": ([x.replace(b"\n", b"\r\n") for x in (ROLE, ONE, TWO, STOP + DONE)], "ok", 2, 1, 2),
    "a byte order mark": ([b"\xef\xbb\xbf" + ROLE, ONE, STOP + DONE], "ok", 1, 1, 1),
    "a split event": ([ROLE + ONE[:9], ONE[9:], TWO, STOP + DONE], "ok", 2, 1, 2),
    "an error event": ([ROLE, ONE, b'event: error\ndata: {"message": "out of memory"}\n\n'], "server_error", 1, 1, 1),
    "an error event of words": ([ROLE, b"event: error\ndata: overloaded\n\n"], "server_error", 0, None, None),
    "llama.cpp's older error": ([ROLE, ONE, b'error: {"code": 500, "message": "busy"}\n\n'], "server_error", 1, 1, 1),
    "content in parts, as Mistral": (
        [ROLE, chunk({"delta": {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "r"}]}]}}),
         chunk({"delta": {"content": [{"type": "text", "text": "a"}]}}), STOP + DONE], "ok", 2, 1, 2,
    ),
    "choices that are null": ([b'data: {"choices": null}\n\n' + ROLE, ONE, TWO, STOP + DONE], "ok", 2, 1, 2),
    "a delta that is null": ([ROLE, ONE, chunk({"delta": None}), TWO, STOP + DONE], "ok", 2, 1, 3),
    "Azure's filter between": ([ROLE, ONE, chunk({"content_filter_results": {}}), TWO, STOP + DONE], "ok", 2, 1, 3),
    "Groq's usage in the finish": (
        [ROLE, ONE, TWO, chunk({"delta": {}, "finish_reason": "stop"}, x_groq={"usage": {}}) + DONE], "ok", 2, 1, 2,
    ),
    "Ollama's role in each chunk": (
        [said("a", finish_reason=None), chunk({"delta": {"role": "assistant", "content": "b"}}),
         chunk({"delta": {"role": "assistant", "content": ""}, "finish_reason": "stop"}) + DONE], "ok", 2, 0, 1,
    ),
    "the whole message again, as Perplexity": (
        [chunk({"delta": {"content": "a"}, "message": {"content": "a"}}),
         chunk({"delta": {"content": "b"}, "message": {"content": "ab"}}), STOP + DONE], "ok", 2, 0, 1,
    ),
    "an event of two lines": (
        [ROLE, b'data: {"choices":\ndata: [{"delta": {"content": "a"}}]}\n\n', STOP + DONE], "ok", 1, 1, 1,
    ),
    "no space": ([x.replace(b"data: ", b"data:") for x in (ROLE, ONE, STOP + DONE)], "ok", 1, 1, 1),
    "no line after [DONE]": ([ROLE, ONE, STOP, b"data: [DONE]"], "ok", 1, 1, 1),
    "text after [DONE]": ([ROLE, ONE, STOP + DONE, TWO], "ok", 1, 1, 1),
    "an error in the finish, as OpenRouter": (
        [ROLE, ONE, chunk({"delta": {"content": ""}, "finish_reason": "error"}, error={"message": "gone"})],
        "server_error", 1, 1, 1,
    ),
    "an error in data": ([ROLE, b'data: {"error": {"message": "busy"}}\n\n'], "server_error", 0, None, None),
}  # fmt: skip


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def streamed(parts, *, head=HEAD, gap_s=GAP_S):
    """The record of a request that is answered by `parts`, a gap after each other."""
    return asked(lambda client: client.send(PROMPT, index=0), parts, head=head, gap_s=gap_s)


def asked(ask, parts, *, head, gap_s):

    async def answer(reader, writer):
        request = await reader.readuntil(b"\r\n\r\n")
        if length := re.search(rb"content-length: (\d+)", request, re.IGNORECASE):
            await reader.readexactly(int(length[1]))
        writer.write(head)
        for number, part in enumerate(parts):
            await asyncio.sleep(gap_s if number else 0)
            writer.write(part)
            with suppress(ConnectionError):  # the client has had enough
                await writer.drain()
        writer.close()

    async def measure():
        server = await asyncio.start_server(answer, "127.0.0.1")
        port = server.sockets[0].getsockname()[1]
        async with server:
            at = Endpoint(base_url=f"http://127.0.0.1:{port}", model="m", timeout_s=30.0, idle_timeout_s=10.0,
                          interface=Interface.CHAT)  # fmt: skip
            async with open_session(at) as session:
                client = Client(session=session, endpoint=at, start_s=time.perf_counter())
                return await ask(client)

    return asyncio.run(measure())


@pytest.mark.parametrize("name", STREAMS)
def test_streams_of_public_servers_are_counted(name):
    parts, status, tokens, first, last = STREAMS[name]
    record = streamed(parts)
    assert (record.status.value, len(record.chunk_s)) == (status, tokens), record.reason
    if tokens:
        gaps = [(s - record.sent_s) / GAP_S for s in (record.chunk_s[0], record.chunk_s[-1])]
        assert gaps[0] >= first - 0.05  # a busy machine delays, and never hastens
        assert gaps[1] >= last - 0.05


DEEP, HUGE = b"[" * 200_000, b"1" + b"0" * 400
HUGE_USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": %b, "completion_tokens": %b}}\n\n' % (HUGE, HUGE)
OK, JSON = HEAD.removesuffix(b"\r\n"), b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nConnection: close\r\n"
HOSTILE = {
    # name: further headers, parts of the body; status, words of the reason
    "counts of 400 digits": (OK, [ONE, HUGE_USAGE, DONE], "malformed", "not JSON"),
    "a count that no text has": (OK, [ONE, USAGE.replace(b"3", b"9" * 30), STOP + DONE], "ok", ""),
    "a chunk nested 200,000 deep": (OK, [b"data: " + DEEP + b"\n\n"], "malformed", "not JSON"),
    "an error nested 4,096 deep": (JSON % 500, [DEEP[:4096]], "http_error", "500: [[["),
    "a wait of 400 digits": (JSON % 503 + b"Retry-After: %b\r\n" % HUGE, [b"busy"], "http_error", "503: busy"),
    "another host": (JSON % 307 + b"Location: http://192.0.2.1/v1\r\n", [], "http_error", "it redirects to http://192"),
    "an endless answer": (OK, [said("a" * 2**16) * 16] * 40, "malformed", "longer than"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_answer_is_counted_as_a_failure(name):
    head, parts, status, reason = HOSTILE[name]
    record = streamed(parts, head=head + b"\r\n", gap_s=0)
    assert (record.status.value, reason in record.reason) == (status, True), record.reason
    assert max(record.input_tokens, record.output_tokens) < 2**53


@pytest.mark.parametrize(
    ("head", "body", "words"),
    [
        (JSON % 200, [DEEP], "does not name one model: got []"),
        (JSON % 200, [json.dumps({"data": [{"id": f"m{i}"} for i in range(100)]}).encode()], "got '100 models'"),
        (JSON % 200, [b'{"data": "', *[b"a" * 2**20] * 17], "does not name one model: got []"),
        (JSON % 302 + b"Location: http://192.0.2.1/v1\r\n", [], "redirects to another address"),
    ],
    ids=["deep", "many", "endless", "redirected"],
)
def test_a_hostile_list_of_models_is_refused(head, body, words):
    with pytest.raises(InputError, match=re.escape(words)):
        asked(lambda client: served_model(client.endpoint.base_url, {}), body, head=head + b"\r\n", gap_s=0)
