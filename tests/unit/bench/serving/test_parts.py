"""Events, lengths, arrivals, metrics and bounds without a server."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
from dataclasses import replace
from itertools import islice, pairwise

import pytest

pytest.importorskip("aiohttp")

from hypothesis import given
from hypothesis import strategies as st

from meshwright.bench.serving.ceiling import refusal
from meshwright.bench.serving.events import ChunkKind, EventBuffer, MalformedEventError, read_chunk
from meshwright.bench.serving.loads import LoadOutcome
from meshwright.bench.serving.metrics import latency, serving_point
from meshwright.bench.serving.prompts import (
    LocalTokenizer,
    PromptSource,
    parse_lengths,
    read_prompts,
    text_of_length,
    word_scale,
)
from meshwright.bench.serving.summary import (
    InterTokenDefinition,
    LoadSummary,
    MedianBounds,
    best_by_bound,
    best_under,
    search_concurrency,
    summaries,
)
from meshwright.errors import InputError
from meshwright.records.serving import Arrivals, Load, RequestRecord, RequestStatus, due_times

STREAM = b'data: {"a": 1}\n\n: ping\n\ndata: one\r\ndata: two\r\n\r\nevent: x\ndata: {"b": 2}\n\ndata: [DONE]\n\n'
EVENTS = [b'{"a": 1}', b"one\ntwo", b'{"b": 2}', b"[DONE]"]


@given(st.lists(st.integers(1, len(STREAM) - 1)))
def test_events_do_not_depend_on_the_split(cuts):
    buffer, found = EventBuffer(), []
    ends = [0, *sorted(cuts), len(STREAM)]
    for start, end in pairwise(ends):
        found += buffer.feed(STREAM[start:end])
    assert found + buffer.end() == EVENTS


@given(st.binary(max_size=200))
def test_any_bytes_are_events_or_malformed(data):
    buffer = EventBuffer()
    try:
        for event in [*buffer.feed(data), *buffer.end()]:
            read_chunk(event)
    except MalformedEventError:
        pass


@pytest.mark.parametrize(
    ("choice", "kind"),
    [
        ({"text": "x"}, ChunkKind.ANSWER),
        ({"text": ""}, ChunkKind.ANSWER),  # bytes of an incomplete character
        ({"text": "", "finish_reason": "stop"}, ChunkKind.EMPTY),
        ({"delta": {"role": "assistant", "content": ""}}, ChunkKind.EMPTY),
        ({"delta": {"role": "assistant", "content": None}}, ChunkKind.EMPTY),
        ({"delta": {"content": "x"}}, ChunkKind.ANSWER),
        ({"delta": {"reasoning_content": "x"}}, ChunkKind.REASONING),
        ({"delta": {}, "finish_reason": "length"}, ChunkKind.EMPTY),
    ],
    ids=str,
)
def test_kinds_of_chunks(choice, kind):
    assert read_chunk(json.dumps({"choices": [choice]}).encode()).kind is kind


@pytest.mark.parametrize(
    "text", ["", "0", "-5", "1.5", "5-2", "normal:5", "uniform:a,b", "normal:nan,1", "1e99", "gauss:1,2", "inf"]
)
def test_wrong_lengths_are_refused(text):
    with pytest.raises(InputError, match="--input-tokens"):
        parse_lengths(text, option="--input-tokens")


@pytest.mark.parametrize(
    ("text", "mean", "spread"),
    [("100", 100, 0), ("50-150", 100, 29), ("normal:100,10", 100, 10), ("lognormal:100,0.1", 100, 10)],
)
def test_lengths_have_their_distribution(text, mean, spread):
    rng = random.Random(1)
    drawn = [parse_lengths(text, option="x").draw(rng) for _ in range(2000)]
    assert statistics.mean(drawn) == pytest.approx(mean, rel=0.03)
    assert statistics.pstdev(drawn) == pytest.approx(spread, rel=0.1, abs=0.1)


@pytest.mark.parametrize(
    ("arrivals", "shape", "variation"),
    [(Arrivals.POISSON, None, 1), (Arrivals.GAMMA, 0.25, 2), (Arrivals.CONSTANT, None, 0)],
)
def test_gaps_between_arrivals(arrivals, shape, variation):
    times = list(due_times(Load(arrivals=arrivals, offered_per_s=50.0, shape=shape), 20_000, seed=3))
    gaps = [b - a for a, b in pairwise([0.0, *times])]
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.05)
    assert statistics.pstdev(gaps) / statistics.mean(gaps) == pytest.approx(variation, rel=0.05, abs=1e-6)


def test_prompts_are_the_same_for_a_seed_and_differ_between_requests():
    source = PromptSource(inputs=parse_lengths("20", option="x"), outputs=parse_lengths("4-9", option="x"))
    first, again, other = (list(islice(source.prompts(load=load, repeat=1), 5)) for load in ("a", "a", "b"))
    assert first == again != other
    assert len({p.text for p in first}) == 5
    assert all(len(p.text.split()) == 20 for p in first)


def test_words_follow_the_servers_count():
    scale = word_scale([(8, 8 * 3 + 5), (64, 64 * 3 + 5)])
    assert (scale.tokens_per_word, scale.fixed_tokens) == (3, 5)
    assert scale.length(305) == 100
    assert word_scale([(8, 7), (64, 7)]).tokens_per_word == 1


def test_a_tokenizer_gives_exact_lengths():
    letters = LocalTokenizer(encode=lambda t: [ord(c) for c in t], decode=lambda ids: "".join(map(chr, ids)))
    assert letters.count(text_of_length(333, random.Random(0), letters)) == 333


def test_files_of_prompts(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 2000, "input_length": 7, "output_length": 3, "hash_ids": [1]}\n\n'
        '{"timestamp": 1500, "prompt": "hello", "max_tokens": 4}\n'
    )
    rows = read_prompts(path)
    assert [(r.at_s, r.text, r.input_tokens, r.output_tokens) for r in rows] == [
        (0.0, "hello", None, 4),
        (0.5, None, 7, 3),
    ]


LETTERS = LocalTokenizer(encode=lambda t: [ord(c) for c in t], decode=lambda ids: "".join(map(chr, ids)))


def trace(tmp_path, *rows: dict, tokenizer=None, scale=None) -> PromptSource:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PromptSource(
        inputs=parse_lengths("20", option="x"), outputs=parse_lengths("4", option="x"), rows=read_prompts(path),
        tokenizer=tokenizer, scale=scale or word_scale([(8, 8), (64, 64)]),
    )  # fmt: skip


def shared(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


MOONCAKE = (
    {"input_length": 1300, "output_length": 5, "hash_ids": [7, 8, 9]},
    {"input_length": 1600, "output_length": 5, "hash_ids": [7, 8, 10, 11]},
    {"input_length": 1030, "output_length": 5, "hash_ids": [7, 8]},  # two blocks of 512, and text of its own
    {"input_length": 600, "output_length": 5, "hash_ids": [12, 13]},
)


def test_equal_hash_ids_are_equal_text(tmp_path):
    source = trace(tmp_path, *MOONCAKE)
    found = list(islice(source.prompts(load="a", repeat=1), 8))
    words = [prompt.text.split() for prompt in found]
    assert [len(w) for w in words[:4]] == [1300, 1600, 1030, 600]
    assert shared(words[0], words[1]) == shared(words[0], words[2]) == 1024
    assert shared(words[0], words[3]) < 5
    assert words[4][:1300] == words[0]  # the file begins again, with the same ids
    assert found == list(islice(source.prompts(load="a", repeat=1), 8))
    other = next(iter(source.prompts(load="a", repeat=2)))
    assert shared(other.text.split(), words[0]) < 5  # another repeat must not find the cache of the first


def test_blocks_have_their_length_by_a_tokenizer_and_by_the_servers_count(tmp_path):
    rows = MOONCAKE[0], MOONCAKE[1]
    source = trace(tmp_path, *rows, tokenizer=LETTERS)
    first, second = islice(source.prompts(load="a", repeat=1), 2)
    assert (LETTERS.count(first.text), LETTERS.count(second.text)) == (1300, 1600)
    assert 1024 <= shared(first.text, second.text) < 1040
    assert source.prefix_fault == ""
    scale = word_scale([(8, 8 * 2 + 5), (64, 64 * 2 + 5)])
    first, second = islice(trace(tmp_path, *rows, scale=scale).prompts(load="a", repeat=1), 2)
    assert shared(first.text.split(), second.text.split()) == 512
    assert len(second.text.split()) == scale.length(1600)


def test_a_tokenizer_that_changes_text_is_said(tmp_path):
    lower = LocalTokenizer(encode=LETTERS.encode, decode=lambda ids: LETTERS.decode(ids).upper())
    assert "hash_ids" in trace(tmp_path, *MOONCAKE[:2], tokenizer=lower).prefix_fault
    assert trace(tmp_path, {"input_length": 3}, tokenizer=lower).prefix_fault == ""


@pytest.mark.parametrize(
    "row",
    [{"input_length": 700, "hash_ids": [1, 2, 3]}, {"input_length": 1700, "hash_ids": [1, 2]}, {"hash_ids": [1]},
     {"input_length": 700, "hash_ids": ["a", "b"]}, {"input_length": 700, "hash_ids": 3}],
    ids=str,
)  # fmt: skip
def test_hash_ids_of_another_block_size_are_refused(tmp_path, row):
    with pytest.raises(InputError, match=r"trace\.jsonl:1: hash_ids"):
        trace(tmp_path, row)


@pytest.mark.parametrize(
    "line",
    ["[1]", "{", '{"promt": "x"}', '{"prompt": 3}', '{"max_tokens": 0}', '{"max_tokens": true}', '{"timestamp": "x"}',
     '{"messages": ["x"]}', '{"prompt": ""}'],
)  # fmt: skip
def test_a_wrong_line_is_named(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x"}\n' + line + "\n")
    with pytest.raises(InputError, match=r"prompts\.jsonl:2"):
        read_prompts(path)


def test_missing_and_empty_files_of_prompts(tmp_path):
    (tmp_path / "empty").write_text("\n")
    for name in ("absent", "empty"):
        with pytest.raises(InputError):
            read_prompts(tmp_path / name)


# --- metrics ---


def request(index: int, sent_s: float, *, ttft_s: float = 0.1, gap_s: float = 0.01, tokens: int = 11, **more):
    chunks = tuple(sent_s + ttft_s + i * gap_s for i in range(tokens))
    return RequestRecord(
        **{
            "index": index, "sent_s": sent_s, "due_s": sent_s, "end_s": chunks[-1], "status": RequestStatus.OK,
            "chunk_s": chunks, "input_tokens": 5, "output_tokens": tokens, "asked_output_tokens": tokens, **more,
        }
    )  # fmt: skip


def outcome(records, **more) -> LoadOutcome:
    wall_s = max(r.end_s for r in records)
    return LoadOutcome(
        **{"records": tuple(records), "num_sent": len(records), "mean_in_flight": 1.0, "peak_in_flight": 1,
           "wall_s": wall_s, **more}
    )  # fmt: skip


def point(records, *, concurrency: int = 1, repeat: int = 1, **more):
    found = serving_point(outcome(records), load=Load(concurrency=concurrency), repeat=repeat, started="now")
    return replace(found, **more)


def test_a_prefill_stall_is_in_the_mean_per_token_and_not_in_the_median_gap():
    """The two definitions of inter-token latency differ on the same requests."""
    stalled = request(0, 0.0)
    chunks = (*stalled.chunk_s[:-1], stalled.chunk_s[-1] + 0.5)
    found = point([replace(stalled, chunk_s=chunks, end_s=chunks[-1])])
    assert found.chunk_gap_s.median == pytest.approx(0.01)
    assert found.tpot_s.median == pytest.approx(0.06)


def test_the_steady_state_has_no_ramp_and_drain():
    records = [request(i, sent_s=i * 0.201) for i in range(101)]  # one after the other
    found = point(records)
    assert found.steady_s == pytest.approx(found.wall_s) == pytest.approx(20.3)
    overlapping = [request(i, sent_s=0.1 * i, gap_s=0.1, tokens=20) for i in range(20)]
    busy = point(overlapping)
    assert busy.steady_s is None or busy.steady_s < busy.wall_s


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=300))
def test_statistics_are_ordered(samples):
    found = latency(samples)
    assert found is not None
    tiny = 1e-9 * found.high
    assert found.low <= found.median_low <= found.median + tiny
    assert found.median <= found.median_high + tiny
    assert found.median - tiny <= found.p90 <= found.p95 + tiny <= found.p99 + 2 * tiny <= found.high + 3 * tiny


def test_the_interval_of_a_median_narrows_with_samples():
    rng = random.Random(5)
    for n in (99, 100, 5000):
        found = latency([rng.random() for _ in range(n)])
        assert found is not None
        assert 0 < found.median_high - found.median_low < 4 / n**0.5


# --- bounds ---


def loads(*rows: tuple[int, float, float]) -> list[LoadSummary]:
    """Summaries of (concurrency, time per output token, total tokens/s)."""
    made = []
    for concurrency, tpot_s, total in rows:
        base = point([request(0, 0.0, gap_s=tpot_s)], concurrency=concurrency)
        made.append(replace(base, total_tokens_per_s=total))
    return summaries(made)


def test_the_best_load_is_a_step_function_of_the_bound():
    found = loads((1, 0.010, 100.0), (2, 0.012, 180.0), (4, 0.030, 170.0), (8, 0.040, 400.0))
    steps = best_by_bound(found, InterTokenDefinition.TPOT)
    assert [(s.load.concurrency, round(s.above_s, 6)) for s in steps] == [(1, 0.01), (2, 0.012), (8, 0.04)]
    assert best_under(steps, 0.010) is None or best_under(steps, 0.010).load.concurrency == 1
    for bound_s, best in ((0.005, None), (0.011, 1), (0.031, 2), (0.05, 8)):
        under = best_under(steps, bound_s)
        assert (under and under.load.concurrency) == best


def test_a_load_with_failed_requests_is_not_the_best():
    found = loads((1, 0.01, 100.0), (4, 0.02, 200.0))
    failed = replace(found[1].points[0], errors={"http_error": 1})
    steps = best_by_bound([found[0], replace(found[1], points=(failed,))], InterTokenDefinition.TPOT)
    assert [step.load.concurrency for step in steps] == [1]
    assert len(best_by_bound(found, InterTokenDefinition.TPOT)) == 2


def test_a_refused_load_is_not_the_best():
    found = loads((1, 0.01, 100.0), (2, 0.01, 900.0))
    refused = LoadSummary(load=found[1].load, points=(replace(found[1].points[0], refusal=refusal(600.0, 1000.0)),))
    assert refusal(500.0, 1000.0) == ""
    steps = best_by_bound([s for s in (found[0], refused) if s.usable], InterTokenDefinition.TPOT)
    assert [s.load.concurrency for s in steps] == [1]


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 5, 7, 8, 13, 31, 32, 33, 40])
def test_the_search_finds_the_highest_concurrency(limit):
    tried = []

    async def measure(concurrency: int) -> LoadSummary:
        tried.append(concurrency)
        return loads((concurrency, 0.01 if concurrency <= limit else 0.05, 1.0))[0]

    found = asyncio.run(search_concurrency(measure, MedianBounds(itl_s=0.03).holds, most=32))
    assert found == (min(limit, 32) or None)
    assert len(tried) <= 11
    assert max(tried) <= 32


def test_failed_requests_break_a_bound():
    good = loads((1, 0.01, 1.0))[0]
    bad = LoadSummary(load=good.load, points=(replace(good.points[0], errors={"dropped": 1}),))
    assert MedianBounds(itl_s=0.03).holds(good)
    assert not MedianBounds(itl_s=0.03).holds(bad)
    assert not MedianBounds(ttft_s=0.1).holds(good)


def test_repeats_have_medians_and_ranges():
    repeats = [point([request(0, 0.0)], repeat=i, total_tokens_per_s=float(i)) for i in range(1, 8)]
    (found,) = summaries(repeats)
    total = found.value("total_tokens_per_s")
    assert (total.value, total.low, total.high) == (4, 1, 7)
    assert found.document()["ranges"]["total_tokens_per_s"].high == 7
    assert found.total("output_tokens") == 77
