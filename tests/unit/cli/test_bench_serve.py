"""`meshwright bench serve` against the mock server, in a thread of this process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")

from tests.faulty_server import Behavior, MockFault, mock_server

from meshwright.records.serving import read_requests, read_serving

QUICK = Behavior(ttft_s=0.002, itl_s=0.001)


@contextmanager
def serving(behavior: Behavior = QUICK) -> Iterator[str]:
    """Address of a mock server that runs in a thread."""
    ready, loop, found = threading.Event(), asyncio.new_event_loop(), []

    async def serve() -> None:
        async with mock_server(behavior) as (_, url):
            stop = asyncio.Event()
            found.extend((url, stop))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(20)
        yield found[0]
    finally:
        loop.call_soon_threadsafe(found[1].set)
        thread.join(20)
        loop.close()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as address:
        yield address


def small(*more: str) -> list[str]:
    return ["--input-tokens", "10", "--output-tokens", "5", "--no-self-test", *more]


def test_the_form_that_scripts_use(meshwright, url, tmp_path):
    outcome = meshwright(
        "bench", "serve", "--url", url, "--model", "mock", "--concurrency", "1,2,4", "--requests", "8",
        "--input-tokens", "10", "--output-tokens", "5", "--json", "--out", str(tmp_path / "out"),
    )  # fmt: skip
    assert outcome.exit_code == 0, outcome.stderr
    document = json.loads(outcome.stdout)
    assert [p["concurrency"] for p in document["points"]] == [1, 2, 4]
    for p in document["points"]:
        assert (p["num_requests"], p["num_ok"], p["num_failed"], p["errors"]) == (8, 8, 0, {})
        assert (p["input_tokens"], p["output_tokens"], p["total_tokens"]) == (80, 40, 120)
        assert p["token_source"] == "usage"
        assert p["total_tokens_per_s"] == pytest.approx(120 / p["wall_s"])
        assert p["littles_law_ratio"] == pytest.approx(1, abs=0.05)
        assert p["client_ceiling_chunks_per_s"] > 0
        assert p["ttft_s"]["n"] == 8
        assert p["chunk_gap_s"]["n"] == 32
    assert set(document["best"]) == {"tpot_s", "chunk_gap_s"}
    records = read_serving(tmp_path / "out")
    assert [p.load.concurrency for p in records.points] == [1, 2, 4]
    assert records.sidecar["endpoint"]["model"] == "mock"
    assert records.points[0].ttft_s.median == pytest.approx(document["points"][0]["ttft_s"]["median"])
    requests = list(read_requests(tmp_path / "out"))
    assert len(requests) == 24
    assert sum(r.output_tokens for _, _, r in requests) == 120


def test_tables_notes_and_an_open_loop(meshwright, url, tmp_path):
    outcome = meshwright(
        "bench", "serve", url, "--rate", "200", "--arrivals", "gamma", "--requests", "6", "--repeats", "2",
        "--ttft-bound", "1000", "--html", str(tmp_path / "page.html"), *small("--out", str(tmp_path / "out")),
    )  # fmt: skip
    assert outcome.exit_code == 0, outcome.stderr
    for heading in ("Tokens/s", "Latency in ms", "Best load under a bound", "goodput", "200/s gamma"):
        assert heading in outcome.stdout
    assert "repeat 2" in outcome.stderr
    page = (tmp_path / "page.html").read_text()
    assert page.count('class="for-wide"') == 2
    for text in ("Throughput against interactivity", "Best load under a bound", "200/s gamma", "Conditions"):
        assert text in page
    assert "http://" not in page.replace("http://www.w3.org", "").replace(url, "")  # nothing is loaded


@pytest.mark.slow  # bench/serving/test_parts.py searches without a server
def test_a_search(meshwright, url, tmp_path):
    outcome = meshwright(
        "bench", "serve", url, "--search", "--ttft-bound", "60000", "--max-concurrency", "3", "--requests", "4",
        "--json", *small("--out", str(tmp_path / "out")),
    )  # fmt: skip
    assert outcome.exit_code == 0, outcome.stderr
    document = json.loads(outcome.stdout)
    assert document["search"]["concurrency"] == 3
    assert [p["concurrency"] for p in document["points"]] == [1, 2, 3]


def test_a_trace(meshwright, url, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f'{{"timestamp": {20 * i}, "input_length": 4, "output_length": 2}}\n' for i in range(4)))
    outcome = meshwright(
        "bench", "serve", url, "--prompts", str(trace), "--arrivals", "trace", "--no-self-test", "--json",
        "--out", str(tmp_path / "out"),
    )  # fmt: skip
    assert outcome.exit_code == 0, outcome.stderr
    (point,) = json.loads(outcome.stdout)["points"]
    assert (point["arrivals"], point["num_ok"], point["input_tokens"], point["output_tokens"]) == ("trace", 4, 16, 8)


def test_failures_are_counted_and_all_failing_is_an_answer_of_no(meshwright, tmp_path):
    with serving(Behavior(fault_every=4, fault=MockFault.CLOSE)) as url:
        outcome = meshwright(
            "bench", "serve", url, "--concurrency", "1", "--requests", "12", "--warmup", "0", "--json",
            *small("--out", str(tmp_path / "a")),
        )  # fmt: skip
    (point,) = json.loads(outcome.stdout)["points"]
    assert outcome.exit_code == 0
    assert point["errors"] == {"dropped": 3}
    assert point["num_ok"] == 9
    with serving(Behavior(fault_every=1, fault=MockFault.HTTP_500)) as url:
        outcome = meshwright(
            "bench", "serve", url, "--concurrency", "1", "--requests", "3", *small("--out", str(tmp_path / "b"))
        )
    assert outcome.exit_code == 1
    assert "no load could be measured" in outcome.stderr
    assert "http error" in outcome.stdout


def test_statuses_and_retries_are_in_tables_and_document(meshwright, tmp_path):
    busy = Behavior(fault_every=4, fault=MockFault.HTTP_429, retry_after="0")
    asked = ["--concurrency", "1", "--requests", "8", "--warmup", "0", "--model", "mock"]
    with serving(busy) as url:
        outcome = meshwright("bench", "serve", url, *asked, *small("--out", str(tmp_path / "a")))
    assert outcome.exit_code == 0, outcome.stderr
    assert "http error 429" in outcome.stdout
    assert "Best load under a bound" not in outcome.stdout
    assert "of 8 requests failed, so it is no best load" in outcome.stderr
    with serving(busy) as url:
        outcome = meshwright(
            "bench", "serve", url, *asked, "--retries", "3", "--json", *small("--out", str(tmp_path / "b"))
        )
    document = json.loads(outcome.stdout)
    (point,) = document["points"]
    assert (point["num_ok"], point["http_statuses"]) == (8, {})
    assert point["num_retries"] > 0
    assert document["best"]["tpot_s"]["steps"]
    assert read_serving(tmp_path / "b").sidecar["endpoint"]["retries"] == 3


def test_a_refused_field_has_its_option_in_the_hint(meshwright, tmp_path):
    with serving(Behavior(refused_fields=("max_tokens",))) as url:
        outcome = meshwright("bench", "serve", url, *small("--out", str(tmp_path / "a")))
        assert outcome.exit_code == 2
        assert "--request-field max_tokens=max_completion_tokens" in outcome.stderr
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text('{"prompt": "hello"}\n')
        outcome = meshwright(
            "bench", "serve", url, "--prompts", str(prompts), "--concurrency", "1", "--requests", "2", "--warmup", "0",
            *small("--out", str(tmp_path / "b")),
        )  # fmt: skip
        assert outcome.exit_code == 1
        assert "--request-field max_tokens=max_completion_tokens" in outcome.stderr
        outcome = meshwright(
            "bench", "serve", url, "--request-field", "max_tokens=max_completion_tokens", "--concurrency", "1",
            "--requests", "2", *small("--out", str(tmp_path / "c")),
        )  # fmt: skip
        assert outcome.exit_code == 0, outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name one server"),
        (["a:1", "--url", "b:2"], "more than one server"),
        (["ftp://x"], "not the address"),
        (["http://"], "not the address"),
        (["http://x:99999"], "not the address"),
        (["x:1", "--concurrency", "0"], "--concurrency"),
        (["x:1", "--concurrency", "two"], "--concurrency"),
        (["x:1", "--rate", "0"], "--rate"),
        (["x:1", "--rate", "nan"], "--rate"),
        (["x:1", "--rate", "1", "--concurrency", "1"], "closed loop"),
        (["x:1", "--arrivals", "gamma"], "needs --rate"),
        (["x:1", "--arrivals", "trace"], "timestamp"),
        (["x:1", "--shape", "2"], "--shape"),
        (["x:1", "--search"], "needs a bound"),
        (["x:1", "--search", "--itl-bound", "5", "--concurrency", "2"], "chooses the loads"),
        (["x:1", "--input-tokens", "many"], "--input-tokens"),
        (["x:1", "--prompts", "absent.jsonl"], "absent.jsonl"),
        (["x:1", "--tokenizer", "absent"], "tokenizer"),
        (["x:1", "--model", "m", "--extra", "top_k"], "--extra"),
        (["x:1", "--model", "m", "--request-field", "max_tokens"], "FIELD=NEW_NAME"),
        (["x:1", "--model", "m", "--request-field", "max_tokens=temperature"], "FIELD=NEW_NAME"),
        (["x:1", "--model", "m", "--request-field", "prompt=text"], "cannot do without"),
        (["x:1", "--model", "m", "--omit-field", "model"], "cannot do without"),
        (["x:1", "--model", "m", "--key-variable", "NO_SUCH_VARIABLE"], "no key"),
        (["127.0.0.1:9"], "no server answers"),
        (["127.0.0.1:9", "--model", "m", "--no-self-test"], "no server answers"),
    ],
)
def test_wrong_requests_are_refused(meshwright, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    outcome = meshwright("bench", "serve", *arguments)
    assert outcome.exit_code == 2, outcome.stderr
    assert message in outcome.stderr


def test_records_are_not_overwritten(meshwright, url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = ["bench", "serve", url, "--concurrency", "1", "--requests", "1", *small()]
    assert [meshwright(*asked).exit_code for _ in range(2)] == [0, 0]
    assert {p.name for p in tmp_path.iterdir()} == {"bench-serve", "bench-serve-2"}
    assert meshwright(*asked, "--out", "bench-serve").exit_code == 2


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, id="SIGINT"), pytest.param(signal.SIGTERM, id="SIGTERM", marks=pytest.mark.slow)],
)  # both cancel the same task
def test_an_interrupted_measurement_keeps_what_it_has(tmp_path, number, wait_for):
    with serving(Behavior(ttft_s=0.01, itl_s=0.005)) as url:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "meshwright", "bench", "serve", url, "--concurrency", "2", "--requests",
                "100000", "--warmup", "1", *small("--out", str(tmp_path / "out")),
            ],
            stderr=subprocess.PIPE, text=True, env=os.environ,
        )  # fmt: skip
        folder: Path = tmp_path / "out"
        wait_for(lambda: (folder / "serving.csv").exists(), process)
        threading.Event().wait(1.5)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + number, stderr
    assert "Traceback" not in stderr
    assert "as far as it came" in stderr
    (point,) = read_serving(folder).points
    assert point.interrupted
    assert point.num_ok > 0
    assert point.num_ok + sum(point.errors.values()) == point.num_requests
    assert point.errors.get("cancelled", 0) <= 2
